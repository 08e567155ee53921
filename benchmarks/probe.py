"""Measure the limits of this machine: memory bandwidth, and FLOP/s of a large matrix product."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

_MOST_ON_DEVICE = 4 << 30  # bytes


def probe(nbytes: int) -> dict[str, float]:
    """Return the bytes/s of reading `nbytes` (at most 4 GB on an accelerator), and the FLOP/s of a bfloat16 product.

    On an accelerator, each measurement launches several operations at once, because each launch takes a while.
    """
    cpu = jax.default_backend() == "cpu"
    if not cpu:
        nbytes = min(nbytes, _MOST_ON_DEVICE)
    reader = _read_with_threads(nbytes) if cpu else _read_on_device(nbytes)
    size = 2048 if cpu else 8192
    square = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)  # multiplying zeros would be faster
    product = jax.jit(lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.float32))
    at_once = 1 if cpu else 20
    return {
        "bytes_per_second": nbytes / _median_seconds(reader, at_once),
        "flops": 2 * size**3 / _median_seconds(lambda: product(square), at_once),
    }


def _median_seconds(work: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready([work() for _ in range(times)])
        seconds.append((time.perf_counter() - start) / times)
    return statistics.median(seconds[1:])


def _read_with_threads(nbytes: int) -> Callable[[], object]:
    parts = np.array_split(np.ones(nbytes // 8, np.uint64), len(os.sched_getaffinity(0)))
    pool = ThreadPoolExecutor(len(parts))
    return lambda: list(pool.map(np.sum, parts))  # numpy releases the GIL


def _read_on_device(nbytes: int) -> Callable[[], object]:
    array = jnp.ones((nbytes // 4 // 1024, 1024), jnp.uint32)
    total = jax.jit(lambda x: jnp.max(x, axis=1))
    return lambda: total(array)
