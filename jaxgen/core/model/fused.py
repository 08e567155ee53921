"""Fused projections for fewer matrix products per layer: one matrix for q, k and v, and one for gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxgen.core.model.layout import fused
from jaxgen.core.model.sharding import mesh_of
from jaxgen.errors import InputError


def fuse_projections(params: Mapping[str, Any], *, donate: bool = False) -> dict[str, Any]:
    """Fuse projections into fewer, larger matrices, for inference on a single device.

    >>> params = fuse_projections(params, donate=True)
    >>> generate(params, ids, key, cfg)

    `q_proj`, `k_proj` and `v_proj` become `qkv_proj`, and `gate_proj` and `up_proj` become `gate_up_proj`. Weights with
    several adapters are fused if all parts have updates of the same rank; other weights with low-rank updates are left
    unchanged. On a GPU, a step with few rows spends much of its time launching kernels, and fusing saves two kernels
    per layer. `save_hf` writes the original matrices.

    Args:
        params: the nested parameters, as returned by `load_hf`, quantized or not.
        donate: delete the original arrays as they are fused, so that the weights are not in memory twice.

    Raises:
        InputError: the parameters are split across a mesh.
    """
    if mesh_of(params) is not None:
        raise InputError(
            "params are divided over a mesh, and fused projections are for one device: leave fuse_projections out"
        )
    return fused(params, donate)
