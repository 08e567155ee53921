"""Reduce the number of key-value heads by averaging neighbors, for grouped-query attention (arXiv 2305.13245, sec. 2).

Neighboring key-value heads serve neighboring query heads, so the query heads need not be reordered.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np

from convert.checkpoint import Checkpoint
from convert.hf import check_params
from convert.quantized import kind_in
from convert.tensors import DerivedTensor, Tensor
from jaxgen.core.config.generation_config import GenerationConfig, model_of
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.layout import separate
from jaxgen.errors import ConfigError

_NAMES = re.compile(r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|qkv_proj|k_norm)\.(?:weight|bias)")


def pool_kv_heads(params: Any, cfg: GenerationConfig, kv_heads: int) -> tuple[Any, GenerationConfig]:
    """Return the parameters and config with only `kv_heads` key-value heads, each the mean of a group of heads.

    `params` are nested as `load_hf` returns them. Only key and value projections, and norms of all keys together, are
    changed. Means are computed in float32 and returned in the dtype of the heads. Unless the heads in each group are
    equal, the model's outputs change, and the model needs more training.

    Raises:
        ConfigError: `kv_heads` is not less than the model's number of key-value heads, or does not divide it.
        CheckpointError: the parameters do not match the model; the message lists all problems.
    """
    model = model_of(cfg)
    pooled = _with_kv_heads(model, kv_heads)
    params = separate(params, model)
    if kind_in(check_params(params, model)):
        raise ConfigError("params are quantized, so their heads cannot be pooled: load them with quantize='none'")

    def pool(path: tuple, array: Any) -> Any:
        if _matched(".".join(entry.key for entry in path), model) is None:
            return array
        return _means(array, pooled).astype(array.dtype)

    return jax.tree_util.tree_map_with_path(pool, params), cfg.replace(model=pooled)


def pool_checkpoint(checkpoint: Checkpoint, kv_heads: int) -> Checkpoint:
    """Return a checkpoint whose key and value projections are pooled when they are read."""
    if checkpoint.kind:
        raise ConfigError(
            f"{checkpoint.path} is quantized, and its heads cannot be pooled: start from the original, or convert with "
            "--quantize none first"
        )
    model = checkpoint.cfg.model
    pooled = _with_kv_heads(model, kv_heads)
    group = model.num_key_value_heads // pooled.num_key_value_heads

    def pool(tensor: Tensor, queries: int) -> Tensor:
        """Return a tensor whose rows after the first `queries` are pooled."""
        shape = (queries + (tensor.shape[0] - queries) // group, *tensor.shape[1:])
        nbytes = tensor.nbytes // tensor.shape[0] * shape[0]
        smaller = dataclasses.replace(tensor, shape=shape, nbytes=nbytes)
        compute = functools.partial(_pooled_rows, queries=queries, model=pooled)
        return DerivedTensor(**vars(smaller), source=tensor, compute=compute)

    weights = dict(checkpoint.weights)
    for name, tensor in weights.items():
        if module := _matched(name, model):
            weights[name] = pool(tensor, model.qkv_sizes[0] if module == "qkv_proj" else 0)
    config = checkpoint.config | {"num_key_value_heads": pooled.num_key_value_heads}
    return dataclasses.replace(checkpoint, config=config, cfg=checkpoint.cfg.replace(model=pooled), weights=weights)


def _with_kv_heads(model: ModelConfig, kv_heads: int) -> ModelConfig:
    if isinstance(kv_heads, bool) or not isinstance(kv_heads, int | np.integer):
        raise TypeError(f"kv_heads must be a whole number, got {kv_heads!r}")
    there = model.num_key_value_heads
    allowed = [number for number in range(1, there) if there % number == 0]
    if not allowed:
        raise ConfigError(f"kv_heads {kv_heads}: the model has 1 key-value head, which cannot be pooled further")
    if kv_heads not in allowed:
        numbers = ", ".join(map(str, allowed))
        raise ConfigError(
            f"kv_heads must be less than the model's {there} key-value heads and divide them: {numbers}; got {kv_heads}"
        )
    return dataclasses.replace(model, num_key_value_heads=int(kv_heads))


def _matched(name: str, model: ModelConfig) -> str | None:
    """Return the module of a parameter whose rows belong to key-value heads, such as "k_proj"; None for others."""
    match = _NAMES.fullmatch(name)
    if match is None or (match[1] == "k_norm" and model.family.norms.queries_keys != "projection"):
        return None
    return match[1]


def _pooled_rows(array: np.ndarray, queries: int, model: ModelConfig) -> np.ndarray:
    """Pool the rows after the first `queries`: those of keys, values, or keys and then values."""
    kinds = 2 if queries else 1
    pooled = [_means(part, model) for part in np.split(array[queries:], kinds)]
    return np.concatenate([array[:queries], *pooled])


def _means(array: Any, model: ModelConfig) -> Any:
    """Average the heads of a weight or bias `[heads * H, ...]` in each of K groups; return float32 `[K * H, ...]`."""
    rest = array.shape[1:]
    groups = array.reshape(model.num_key_value_heads, -1, model.head_dim, *rest)
    return groups.astype(np.float32, copy=False).mean(axis=1).reshape(-1, *rest)
