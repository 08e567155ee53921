"""cuDNN's attention kernel, on NVIDIA GPUs; see `flash.Kernel`.

`jax.nn.dot_product_attention` calls the same kernel, but expects keys and values as `[B, S, K, H]`. A cache stores them
as `[B, K, S, H]`, and would be copied at every step. The function of jax that accepts both is private; see
`private_module`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxgen.core.model.cache import KeysValues

_OLDEST_GPU = (8, 0)  # compute capability
_LARGEST_HEAD = 128
_FEW_QUERIES = 16
# For a few queries, the kernel reads the keys of a row and kv head in one thread block. If there are fewer such blocks,
# about the number of an H100's multiprocessors, the keys are divided among several.
_FULL_GPU, _SMALLEST_BLOCK = 128, 128
# Steps of fewer rows with at most this many slots have been measured on an H200 with general operations only.
_FEW_SLOTS = 4096


def fits(q: jax.Array, parts: Sequence[KeysValues]) -> bool:
    """Return True if the kernel supports these arguments and is expected to be faster than general operations."""
    batch, _, steps, width = q.shape
    if not isinstance(batch * steps, int) or private_module() is None or width > _LARGEST_HEAD or width % 8:
        return False
    fills_gpu = batch * parts[-1].keys.shape[1] >= _FULL_GPU // 2
    return steps > _FEW_QUERIES or fills_gpu or max([part.slots for part in parts]) > _FEW_SLOTS


def key_blocks(pairs: int, slots: int, queries: int) -> int:
    """Return the number of equal blocks of keys into which a call is divided, to give the whole GPU work."""
    blocks = 1
    while queries <= _FEW_QUERIES and pairs * blocks < _FULL_GPU and slots % (2 * blocks * _SMALLEST_BLOCK) == 0:
        blocks *= 2
    return blocks


def call(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Call the kernel; see `flash.Kernel.call`."""
    module = private_module()
    assert module is not None
    mask = module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK
    if lengths is not None:
        mask = module.MaskType.PADDING
    options = {"mask_type": mask, "sliding_window_length": window, "qkv_layout": "BNTH", "return_residual": True}

    @custom_vmap
    def run(q, keys, values, lengths):
        of_rows = {} if lengths is None else {"q_seqlen": jnp.full_like(lengths, q.shape[2]), "kv_seqlen": lengths}
        return module.dot_product_attention(q, keys, values, **of_rows, scale=scale, **options)

    @run.def_vmap
    def _(size, is_batched, *arguments):  # jax's rule does not accept arguments of which only some are batched
        def with_rows(x, is_batched):
            return (x if is_batched else jnp.broadcast_to(x, (size, *x.shape))).reshape(-1, *x.shape[1 + is_batched :])

        results = run(*jax.tree.map(with_rows, arguments, tuple(is_batched)))
        return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results), (True, True)

    return run(q, keys, values, lengths)


@functools.cache
def private_module() -> Any | None:
    """Return jax's private module that calls the kernel; None without this module, cuDNN or a GPU that it supports.

    `tests/model/test_flash.py` fails if a release of jax does not have the module or changes the function's arguments.
    """
    try:
        module: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    except ImportError:
        return None
    if module.cuda_versions is None:  # jax's plugin for CUDA is not installed
        return None
    try:
        module.cuda_versions.cudnn_get_version()
    except RuntimeError:  # cuDNN is not installed
        return None
    try:
        gpus = jax.devices("cuda")
    except RuntimeError:  # programs are compiled for another machine
        return module
    capabilities = [tuple(map(int, gpu.compute_capability.split("."))) for gpu in gpus]
    return module if min(capabilities) >= _OLDEST_GPU else None
