"""Sample with jaxgen in tunix (google-tunix 0.1): a rollout engine for its learners, such as GRPOLearner.

    from tunix.models.qwen2 import params as qwen2

    tensors = qwen2._get_key_and_transform_mapping(model.config)  # how tunix reads a checkpoint
    engine = functools.partial(JaxgenRollout, model="Qwen2.5-0.5B-Instruct", tensors=tensors)
    cluster = RLCluster(actor=model, ..., cluster_config=ClusterConfig(rollout_engine=engine, ...))

jaxgen starts with the trainer's weights, and gets the new ones whenever tunix synchronizes them. `offload_to_cpu` and
low-rank updates are not supported. tunix requires an older safetensors than jaxgen, but does not need it: install tunix
first, then jaxgen.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jaxgen import Tokenizer, generate, load_hf, score


class JaxgenRollout(BaseRollout):
    """The checkpoint `model`, whose tensors have the names that the table `tensors` maps to those of the trainer."""

    def __init__(self, rollout_actor, tokenizer=None, mesh=None, rollout_config=None, *, model, tensors):
        """Load the checkpoint's config, and take the trainer's weights. tunix passes the first four arguments."""
        self.tensors, self.calls = tensors, 0
        dtype = None if rollout_config is None else rollout_config.data_type
        self.params, self.cfg = load_hf(model, dtype=None if dtype is None else jnp.dtype(dtype).name)
        self.tok = Tokenizer.from_pretrained(model)
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **_) -> RolloutOutput:
        """Answer the prompts. The log-probabilities are those after the temperature, but before top-k and top-p."""
        config, key = rollout_config, rollout_config.seed
        if key is None:
            key, self.calls = jax.random.fold_in(jax.random.key(0), self.calls), self.calls + 1
        elif isinstance(key, int):
            key = jax.random.key(key)
        elif not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)  # made by jax.random.PRNGKey
        ids, mask = (np.asarray(array) for array in self.tok.batch(prompts))
        missing = config.max_prompt_length - ids.shape[1]
        if missing < 0:
            raise ValueError(f"a prompt has {ids.shape[1]} tokens, more than max_prompt_length: filter the prompts")
        ids = np.pad(np.where(mask, ids, self.pad_id()), ((0, 0), (missing, 0)), constant_values=self.pad_id())
        mask = np.pad(mask, ((0, 0), (missing, 0)))
        drawn = {"do_sample": True, "temperature": config.temperature} if config.temperature else {"do_sample": False}
        plain = self.cfg.replace(**{"top_p": 1.0, "top_k": 0, **drawn}, max_new_tokens=config.max_tokens_to_generate)
        plain = plain.replace(eos_token_id=config.eos_tokens or self.cfg.eos_token_id)
        warped = plain.replace(top_p=config.top_p or 1.0, top_k=max(config.top_k or 0, 0))
        out = generate(self.params, ids, key if config.temperature else None, warped, attention_mask=mask)
        lengths, logprobs = np.asarray(out.lengths), None
        if config.return_logprobs:
            given = {"attention_mask": out.attention_mask, "prompt_width": out.prompt_width}
            scored = out.generated(score(self.params, out.sequences, plain, of="scores", **given)).logprobs
            logprobs = [row[:n] for row, n in zip(np.asarray(scored), lengths, strict=True)]
        tokens = [row[:n] for row, n in zip(np.asarray(out.generated(out.sequences)), lengths, strict=True)]
        return RolloutOutput(self.tok.decode_batch(out), [], tokens, ids, logprobs)

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Return the model's log-probabilities of the completions, float32[B, T]; both arguments may be padded."""
        rows = jnp.concatenate([prompt_tokens, completion_tokens], axis=1)
        scored = score(self.params, rows, self.cfg, of="logits", attention_mask=rows != self.pad_id())
        return scored.logprobs[:, prompt_tokens.shape[1] :]

    def update_params(self, params, filter_types=None) -> None:
        """Replace the weights by the trainer's, an `nnx.State`."""
        if filter_types is not None and nnx.LoRAParam in filter_types:
            raise ValueError("low-rank updates are not supported by this example: train all weights")
        given = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(params)}

        def converted(path, old):
            name = ".".join(entry.key for entry in path)
            for pattern, (target, rule) in self.tensors.items():
                if re.fullmatch(pattern, name):
                    new = given[re.sub(pattern, target, name)]
                    if rule is not None and rule[0] is not None:  # transposed, and perhaps with an axis of heads
                        new = new.reshape(old.shape[::-1]).T
                    return jax.device_put(new.astype(old.dtype), old.sharding)
            raise ValueError(f"{name} is not in the table of tensors: pass the table of this model's family")

        self.params = jax.tree_util.tree_map_with_path(converted, self.params)

    def pad_id(self) -> int:
        """Return the pad token's id."""
        return self.cfg.pad_token_id

    def eos_id(self) -> int:
        """Return the id of the token that ends an answer, or of the first of several."""
        return int(np.atleast_1d(np.asarray(self.cfg.eos_token_id))[0])

    def model(self) -> None:
        """Return None: no model shares its weights with jaxgen, so tunix synchronizes them."""
