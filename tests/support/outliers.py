"""Rescaling of weights that creates outliers in the activations, as in large models, but leaves outputs the same."""

import flax.traverse_util
import numpy as np

INTO = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def with_outliers(params, layers: int, share: float = 0.01, factor: float = 20.0, seed: int = 0):
    """Scale some channels before each layer's projections, and undo this in the weights that read these channels."""
    flat = {name: np.asarray(leaf) for name, leaf in flax.traverse_util.flatten_dict(params, sep=".").items()}
    rng = np.random.default_rng(seed)

    def scales(width: int) -> np.ndarray:
        chosen = rng.choice(width, max(1, round(width * share)), replace=False)
        return np.where(np.isin(np.arange(width), chosen), factor, 1.0).astype(np.float32)

    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for norm, projections in INTO.items():
            name = f"{prefix}{norm}.weight"
            scale = scales(len(flat[name]))
            flat[name] = flat[name] * scale
            for projection in projections:
                flat[f"{prefix}{projection}.weight"] = flat[f"{prefix}{projection}.weight"] / scale[None, :]
        up, down = f"{prefix}mlp.up_proj.weight", f"{prefix}mlp.down_proj.weight"
        scale = scales(len(flat[up]))
        flat[up], flat[down] = flat[up] * scale[:, None], flat[down] / scale[None, :]
    return flax.traverse_util.unflatten_dict(flat, sep=".")
