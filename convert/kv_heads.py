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

_PROJECTIONS = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_proj\.(weight|bias)")


def pool_kv_heads(params: Any, cfg: GenerationConfig, kv_heads: int) -> tuple[Any, GenerationConfig]:
    """Return the parameters and config with only `kv_heads` key-value heads, each the mean of a group of heads.

    `params` are nested as `load_hf` returns them; arrays other than key and value projections are returned unchanged.
    Means are computed in float32 and returned in the dtype of the heads. Unless the heads in each group are equal, the
    model's outputs change, and the model needs more training.

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
        if not _PROJECTIONS.fullmatch(".".join(entry.key for entry in path)):
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

    def pool(tensor: Tensor) -> Tensor:
        shape = (tensor.shape[0] // group, *tensor.shape[1:])
        smaller = dataclasses.replace(tensor, shape=shape, nbytes=tensor.nbytes // group)
        return DerivedTensor(**vars(smaller), compute=functools.partial(_means, model=pooled))

    weights = {
        name: pool(tensor) if _PROJECTIONS.fullmatch(name) else tensor for name, tensor in checkpoint.weights.items()
    }
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


def _means(array: Any, model: ModelConfig) -> Any:
    """Average the heads of a weight or bias `[heads * H, ...]` in each of K groups; return float32 `[K * H, ...]`."""
    rest = array.shape[1:]
    groups = array.reshape(model.num_key_value_heads, -1, model.head_dim, *rest)
    return groups.astype(np.float32, copy=False).mean(axis=1).reshape(-1, *rest)
