"""Low-rank adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax.numpy as jnp
import numpy as np

from convert.atomic_directory import new_directory
from convert.checkpoint import Checkpoint
from convert.errors import CheckpointError
from convert.shards import ADAPTER, ADAPTER_STEM, find_tensors, read_json, write_json
from convert.tensors import DTYPES, DerivedTensor, Tensor, write_file
from jaxgen.core.config.generation_config import GenerationConfig, model_of
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.feed_forward import FUSED
from jaxgen.core.model.layout import parts_of
from jaxgen.core.model.lowrank import Adapters, LowRank
from jaxgen.core.model.sharding import mesh_of, shard_params
from jaxgen.core.model.weights import Packed
from jaxgen.errors import ConfigError, InputError, one_line, shown, warn

_CONFIG, _PREFIX = "adapter_config.json", "base_model.model."
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_FACTOR = re.compile(r"(.+)\.lora_(A|B)\.weight")
_WHOLE = re.compile(r"(.+?)(?:\.base_layer)?\.weight")
# Fields of adapter_config.json with which the update is not the product of two matrices, or not the whole update. All
# fields that are not named in this module are ignored, as in PEFT; a warning names those that are set.
_REFUSED = (
    "modules_to_save use_dora lora_bias layer_replication trainable_token_indices alora_invocation_tokens "
    "target_parameters use_qalora use_bdlora arrow_config kasa_config monteclora_config"
).split()
# Fields that are read, or that do not affect a trained adapter's results
_KNOWN = set(
    "peft_type r lora_alpha rank_pattern alpha_pattern use_rslora target_modules exclude_modules layers_to_transform "
    "layers_pattern base_model_name_or_path revision task_type inference_mode auto_mapping peft_version lora_dropout "
    "loftq_config eva_config corda_config lora_ga_config velora_config megatron_core megatron_config runtime_config "
    "qalora_group_size ensure_weight_tying init_lora_weights bias fan_in_fan_out".split()
)
# Values of init_lora_weights that set only the adapter's initial values. All other values also change the base weights.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_Update = tuple[np.ndarray, np.ndarray]  # (A, scale * B) with shapes float32[r, in] and float32[out, r]


def load_adapter(path, params: Mapping[str, Any], cfg: GenerationConfig) -> dict[str, Any]:
    """Attach one or more LoRA adapters (arXiv 2106.09685), stored in PEFT's format, to a model's parameters.

    >>> params, cfg = load_hf("Qwen2.5-0.5B-Instruct")
    >>> tuned = load_adapter("my-adapter", params, cfg)
    >>> several = load_adapter(["adapter-0", "adapter-1"], params, cfg)
    >>> generate(several, ids, key, cfg.replace(adapter=[0, 1, -1]))

    The update of a matrix is the product of the adapter's matrices B and A, times a scale. The scale is the module's
    alpha / rank, or alpha / sqrt(rank) with `use_rslora`. The update is applied in the dtype of the weights but not
    merged into them. To merge an adapter, use `python -m convert --merge-adapter`.

    If `path` is one directory, its adapter is always applied. If `path` is a list, `cfg.adapter` is the index of the
    adapter to apply: one index for all prompts, or one for each prompt. The default, -1, applies no adapter. Updates
    are padded to the largest rank. Two lists share a program if they contain the same number of adapters, for the same
    modules, with the same largest rank. A warning names the fields of adapter_config.json that are ignored.

    Args:
        path: an adapter's directory, or a list of directories.
        params: the model's parameters, quantized or not, on one device or split across a mesh.
        cfg: the model's config.

    Raises:
        CheckpointError: a file cannot be read, a tensor does not fit the model or the adapter's own config, or an
            adapter uses an unsupported feature (DoRA, trained biases, other saved modules, ...). An embedding or head
            saved with the adapter must be that of the model. The message lists all problems.
        InputError: the list is empty, `fuse_projections` fused the parameters, or they already have an adapter.
    """
    is_stack = not isinstance(path, str | Path)
    paths = list(path) if is_stack else [path]
    if not paths:
        raise InputError("path must be the directory of an adapter, or a list of at least one")
    model = model_of(cfg)
    weights = flax.traverse_util.flatten_dict(dict(params), sep=".")
    for name, weight in weights.items():
        if not model.family.fused and any(part in FUSED for part in name.split(".")):
            raise InputError("params have fused projections: attach the adapter first, then call fuse_projections")
        if isinstance(weight, LowRank | Adapters):
            raise InputError(f"params have an adapter already ({name}): attach all of them at once, as a list")
    updates = [_as_in(weights, update, model) for update in read_updates(paths, model, weights)]
    for name in sorted({name for update in updates for name in update}):
        key = f"{name}.weight"
        weights[key] = _attached(weights[key], [update.get(name) for update in updates], is_stack)
    attached = flax.traverse_util.unflatten_dict(weights, sep=".")
    mesh = mesh_of(params)
    return attached if mesh is None else shard_params(attached, model, mesh)


def read_updates(
    paths: Sequence[str | Path], model: ModelConfig, weights: Mapping[str, Any]
) -> list[dict[str, _Update]]:
    """Return each adapter's updates by module: pairs (A, scale * B) with shapes float32[r, in] and float32[out, r].

    `weights` are the model's weights by name, in files or in memory.
    """
    read = [_read(Path(path), model, weights) for path in paths]
    if problems := [problem for _, faults, _ in read for problem in faults]:
        raise CheckpointError(problems)
    for path, (_, _, notes) in zip(paths, read, strict=True):
        if notes:
            warn(one_line(f"{Path(path) / _CONFIG}: {'; '.join(notes)}"))
    return [updates for updates, _, _ in read]


def merge_adapter(checkpoint: Checkpoint, path: str | Path) -> Checkpoint:
    """Return a checkpoint that merges an adapter into its matrices, in float32, when they are read."""
    if checkpoint.kind:
        raise ConfigError(
            f"{checkpoint.path} is quantized, but an adapter is added to the original matrices: convert it back with "
            "--quantize none first"
        )
    (updates,) = read_updates([path], checkpoint.cfg.model, checkpoint.weights)

    def merged(name: str, tensor: Tensor) -> Tensor:
        update = updates.get(name.removesuffix(".weight"))
        if update is None:
            return tensor
        return DerivedTensor(**vars(tensor), source=tensor, compute=lambda x: x + update[1] @ update[0])

    weights = {name: merged(name, tensor) for name, tensor in checkpoint.weights.items()}
    return dataclasses.replace(checkpoint, weights=weights)


def save_adapter(params: Mapping[str, Any], cfg: GenerationConfig, path, *, base: str = "", overwrite=False) -> None:
    """Write the adapter attached to `params` to a directory that PEFT can load.

    The stored matrix B includes the scale, so `lora_alpha` is the rank. `params` must have a single adapter, with a
    `LowRank` for each updated matrix, as created by `load_adapter` or `jaxgen.training.lora.attach`. The updates of
    projections that `fuse_projections` fused are written as those of the original matrices, which share A.

    Args:
        params: the parameters.
        cfg: the model's config.
        path: the directory, which is created atomically.
        base: the base model's directory or hub id, written to `base_model_name_or_path`.
        overwrite: replace an existing directory.

    Raises:
        InputError: `params` has no adapter, or more than one adapter.
        CheckpointError: `path` exists and cannot be replaced.
    """
    model = model_of(cfg)
    weights = flax.traverse_util.flatten_dict(dict(params), sep=".")
    if any(isinstance(weight, Adapters) for weight in weights.values()):
        raise InputError("params have several adapters, but a directory stores only one: attach only the one to save")
    updates = {name.removesuffix(".weight"): x for name, x in weights.items() if isinstance(x, LowRank)}
    if not updates:
        raise InputError("params have no adapter: attach one with load_adapter or jaxgen.training.lora.attach")
    if _EMBEDDING in updates:
        raise InputError("the embedding has an update, which cannot be saved: leave it out")
    stored = {}
    for name, update in updates.items():
        stored |= _separate(name, (np.asarray(update.a), np.asarray(update.b)), model, not model.family.fused)
    if separate := [name for name in stored if f"{name}.weight" not in param_shapes(model)]:
        raise InputError(
            f"{separate[0]} has an update, but {model.model_type} stores this projection in a fused matrix: attach "
            "adapters to params that are not split across a mesh"
        )
    arrays = {
        f"{_PREFIX}{name}.lora_{letter}.weight": x
        for name, pair in stored.items()
        for letter, x in zip("AB", pair, strict=True)
    }
    with new_directory(Path(path), overwrite=overwrite) as directory:
        write_json(directory / _CONFIG, _config({name: a.shape[0] for name, (a, _) in stored.items()}, base))
        write_file(directory / ADAPTER, arrays)


def _config(ranks: Mapping[str, int], base: str) -> dict[str, Any]:
    rank = collections.Counter(ranks.values()).most_common(1)[0][0]
    others = {name: own for name, own in ranks.items() if own != rank}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    config |= {"r": rank, "lora_alpha": rank, "rank_pattern": others, "alpha_pattern": others, "lora_dropout": 0.0}
    return config | {"target_modules": sorted(ranks), "bias": "none", "fan_in_fan_out": False}


def _as_in(weights: Mapping[str, Any], updates: Mapping[str, _Update], model: ModelConfig) -> dict[str, _Update]:
    """Return updates for the projections that `weights` have: if these are separate, fused updates are split."""
    result: dict[str, _Update] = {}
    for name, update in updates.items():
        result |= _separate(name, update, model, f"{name}.weight" not in weights)
    return result


def _separate(name: str, update: _Update, model: ModelConfig, wanted: bool) -> dict[str, _Update]:
    """Return the updates of a fused projection's parts if this is wanted; they share A. Others remain as they are."""
    parent, _, module = name.rpartition(".")
    if not wanted or module not in FUSED:
        return {name: update}
    a, b = update
    return {f"{parent}.{part}": (a, b[start:end]) for part, start, end in parts_of(module, model, len(b))}


def _attached(weight: Any, updates: Sequence[_Update | None], is_stack: bool) -> Any:
    """Attach updates to a weight; an adapter without an update for this weight gets zeros."""
    found = [update for update in updates if update is not None]
    dtype = weight.dtype
    if not is_stack:
        ((a, b),) = found
        return LowRank(weight, jnp.asarray(a, dtype), jnp.asarray(b, dtype))
    rank = max(a.shape[0] for a, _ in found)
    features, columns = weight.shape
    a, b = np.zeros((len(updates), 1, rank, columns), np.float32), np.zeros((len(updates), rank, features), np.float32)
    for number, update in enumerate(updates):
        if update is not None:
            own = update[0].shape[0]
            a[number, 0, :own], b[number, :own] = update[0], update[1].T
    return Adapters(weight, jnp.asarray(a, dtype), jnp.asarray(b, dtype), (features,))


def _read(
    path: Path, model: ModelConfig, weights: Mapping[str, Any]
) -> tuple[dict[str, _Update], list[str], list[str]]:
    """Return an adapter's updates, a list of problems, and notes about what is ignored."""
    file = path / _CONFIG
    config, faults = read_json(file)
    if config is None:
        return {}, faults or [f"{file} is missing: this is not the directory of an adapter"], []
    if faults := [f"{file}: {fault}" for fault in _refused(config)]:
        return {}, faults, []
    tensors, _, faults = find_tensors(path, ADAPTER_STEM)
    modules: dict[str, dict[str, Tensor]] = collections.defaultdict(dict)
    is_base = not any(name.startswith(f"{_PREFIX}model.") for name in tensors)  # made for AutoModel, as in load_hf
    for name, tensor in tensors.items():
        own = name.removeprefix(_PREFIX)
        if is_base and own.startswith(("layers.", "embed_tokens.")):
            own = f"model.{own}"
        match, whole = _FACTOR.fullmatch(own), _WHOLE.fullmatch(own)
        if tensor.dtype not in DTYPES:
            faults.append(f"{tensor.file}: {name} has dtype {tensor.dtype}, wanted {', '.join(DTYPES)}")
        elif match is not None and name.startswith(_PREFIX):
            modules[match[1]][match[2]] = tensor
        elif whole is None or not name.startswith(_PREFIX) or whole[1] not in (_EMBEDDING, _HEAD):
            faults.append(f"{tensor.file}: {name} is not a matrix of a low-rank update of a projection or the head")
        elif fault := _changed(tensor, weights[f"{_EMBEDDING if model.tie_word_embeddings else whole[1]}.weight"]):
            faults.append(f"{tensor.file}: {name} {fault}")
    for name, factors in modules.items():
        if fault := _mismatch(name, factors, model, config):
            faults.append(f"{path}: {fault}")
    if not modules and not faults:
        faults.append(f"{path}: the files have no low-rank updates")
    if faults:
        return {}, faults, []
    updates = {}
    for name, factors in modules.items():
        a, b = (factors[letter].read(np.dtype(np.float32)) for letter in "AB")
        updates[name] = a, b * np.float32(_scale(config, name))
    return updates, [], _ignored(config)


def _mismatch(name: str, factors: Mapping[str, Tensor], model: ModelConfig, config: Mapping[str, Any]) -> str | None:
    """Return the reason why a module's update does not fit the model or the config, or None if it fits."""
    if name == _HEAD and model.tie_word_embeddings:
        return "lm_head has an update, and this model's head is its embedding: merge it in PEFT"
    if name == _EMBEDDING:
        return f"{name} has an update, which is not offered for embeddings: merge it in PEFT"
    shape = param_shapes(model).get(f"{name}.weight", ())
    if model.family.experts and ".experts" in name:
        return f"{name} has an update, which is not offered for experts: merge it in PEFT"
    if len(shape) != 2:
        return f"{name} has an update, and the model has no such matrix: is the adapter for another model?"
    if missing := {"A", "B"} - set(factors):
        return f"{name}.lora_{missing.pop()}.weight is missing"
    features, columns = shape
    a, b = factors["A"].shape, factors["B"].shape
    if len(a) != 2 or a[1] != columns or b != (features, a[0]):
        return (
            f"{name} has A {list(a)} and B {list(b)}, and the model's matrix is {[features, columns]}: is the adapter "
            "for another model?"
        )
    if a[0] != (rank := _of_module(config, "r", "rank_pattern", name)):
        return f"{name} has rank {a[0]}, and r and rank_pattern in {_CONFIG} give it rank {rank}: correct them"
    return None


def _changed(saved: Tensor, weight: Any) -> str | None:
    """Return a description of the problem if a whole matrix in an adapter's file is not that of the model."""
    if isinstance(weight, Packed):
        return "cannot be compared with the model's, which is quantized: remove it from the file"
    base = weight.read() if isinstance(weight, Tensor) else np.asarray(weight)
    if saved.shape != base.shape:
        return f"has shape {list(saved.shape)}, and the model's has {list(base.shape)}: merge the adapter in PEFT"
    own = saved.read()
    with np.errstate(over="ignore"):
        is_same = np.array_equal(own.astype(base.dtype), base) or np.array_equal(base.astype(own.dtype), own)
    return None if is_same else "differs from the model's, and cannot replace it: merge the adapter in PEFT"


def _ignored(config: Mapping[str, Any]) -> list[str]:
    """Return notes about the fields of a config that are ignored."""
    notes = []
    if config.get("fan_in_fan_out"):
        notes.append("fan_in_fan_out=True is ignored, as in PEFT: no matrix of this model is stored transposed")
    if unknown := sorted(name for name in set(config) - _KNOWN - set(_REFUSED) if config[name]):
        notes.append(f"unknown fields are ignored, as in PEFT: {one_line(', '.join(unknown), 500)}")
    return notes


def _refused(config: Mapping[str, Any]) -> list[str]:
    """List the invalid or unsupported values in a config."""
    if config.get("peft_type") != "LORA":
        return [f"peft_type is {shown(config.get('peft_type'))}, but only LORA is offered"]
    faults = []
    init = config.get("init_lora_weights", True)
    if (init.lower() if isinstance(init, str) else init) not in _INITS:
        faults.append(
            f"init_lora_weights={shown(init)} changes the model's own weights: convert the adapter in PEFT first"
        )
    for name in ("r", "lora_alpha"):
        if not _is_positive(value := config.get(name, 8)):
            faults.append(f"{name} must be a number above 0, got {shown(value)}")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, Mapping) or not all(map(_is_positive, pattern.values())):
            faults.append(f"{name} must be an object whose values are numbers above 0, got {shown(pattern)}")
        elif wrong := [key for key in pattern if not _is_pattern(key)]:
            faults.append(f"{name} has {shown(wrong[0])}, which is not a regular expression")
    for name in _REFUSED:
        if value := config.get(name):
            faults.append(f"{name}={shown(value)} is not offered: merge the adapter in PEFT, or train it without")
    if config.get("bias") not in (None, "none"):
        faults.append(f"bias={shown(config['bias'])} trains biases, which is not offered: merge the adapter in PEFT")
    return faults


def _is_positive(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf


def _is_pattern(key: str) -> bool:
    try:
        re.compile(key)
    except re.error:
        return False
    return True


def _scale(config: Mapping[str, Any], module: str) -> float:
    """Return the scale of a module's update."""
    rank = _of_module(config, "r", "rank_pattern", module)
    alpha = _of_module(config, "lora_alpha", "alpha_pattern", module)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(config: Mapping[str, Any], name: str, pattern: str, module: str) -> float:
    """Return a number for a module; the pattern's keys are regular expressions that match the end of its name."""
    matching = (own for key, own in (config.get(pattern) or {}).items() if re.fullmatch(rf"(?:.*\.)?(?:{key})", module))
    return next(matching, config.get(name, 8))
