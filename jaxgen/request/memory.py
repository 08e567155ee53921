"""The memory of a call's caches, checked before anything is compiled or allocated.

It is a lower bound: what the compiled programs take is known once they are compiled, and checked by `jaxgen.programs`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxgen.buckets import capacity_for, prompt_bucket
from jaxgen.decoding.run import Run
from jaxgen.memory import SMALL, check_free
from jaxgen.model.cache import KVCache
from jaxgen.model.cache_storage import SCALED
from jaxgen.model.config import ModelConfig
from jaxgen.programs import default_device

# Changes of arguments of `caches_bytes` that make a call smaller.
_REMEDIES: dict[str, dict[str, Any]] = {
    f"cache_dtype={SCALED.name!r}": {"cache_dtype": SCALED.name},
    "a smaller max_new_tokens": {"capacity": capacity_for(1, recorded=False)},
    "a smaller num_return_sequences or num_beams": {"sequences": 1},
    "fewer prompts at once": {"prompts": 1},
    "fewer slots": {"slots": 1},
    "prefix_cache_bytes=0": {"prefixes": 0},
    "a shorter prompt": {"width": prompt_bucket(1)},
}


@functools.lru_cache
def cache_bytes(model: ModelConfig, rows: int, slots: int, dtype: str | None = None) -> int:
    """Return the bytes of `KVCache.create(model, rows, slots, dtype)`."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: KVCache.create(model, rows, slots, dtype)))
    return sum([math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves])


def caches_bytes(
    models: Iterable[ModelConfig],
    *,
    prompts: int,
    sequences: int,
    width: int,
    capacity: int,
    cache_dtype: str | None,
    slots: int | None,
    prefixes: int = 0,
) -> int:
    """Return the bytes of a call's caches: of prompts, the rows of all sequences, and an engine's store of prefixes.

    With `slots`, that many rows are in memory, even if there are fewer.
    """
    prompts, rows = (prompts, prompts * sequences) if slots is None else (slots, slots)
    sizes = [(model, *size, cache_dtype) for model in models for size in ((prompts, width), (rows, capacity))]
    return prefixes + sum([cache_bytes(*size) for size in sizes])


def check_call_memory(run: Run, width: int, prefixes: int = 0) -> None:
    """Raise an `InputError` if the device lacks the memory for a call's caches.

    `width` is that of the prompts in the program, `prefixes` the bytes of an engine's store of prefixes.
    """
    needed = functools.partial(
        caches_bytes,
        (run.model,) if run.draft is None else (run.model, run.draft.model),
        prompts=run.sizes.prompts,
        sequences=run.needs.sequences,
        width=width,
        capacity=run.capacity,
        cache_dtype=run.cfg.cache_dtype,
        slots=run.cfg.slots,
        prefixes=prefixes,
    )
    leaf = jax.tree.leaves(run.params)[0]
    devices = leaf.devices() if isinstance(leaf, jax.Array) else {default_device()}
    count = len(devices)  # of a mesh, which have about equal parts
    if (each := needed() // count) > SMALL:
        check_free("this call needs {}", each, devices, lambda free: remedy(needed, free * count))


def remedy(needed: functools.partial[int], free: int, more: Mapping[str, dict[str, Any]] | None = None) -> str:
    """Name what makes a request fit into `free` bytes: single changes that suffice, else a combination.

    `needed` returns the bytes for other arguments too, and `more` has changes of those that `caches_bytes` lacks.
    """
    remedies = {**(more or {}), **_REMEDIES}
    if needed.keywords["slots"] is None:
        del remedies["fewer slots"]

    def fit(names: Iterable[str]) -> bool:
        return needed(**{argument: value for name in names for argument, value in remedies[name].items()}) <= free

    if alone := [name for name in remedies if fit([name])]:
        return " or ".join(alone)
    if not fit(remedies):
        return "a smaller model or a machine with more memory"
    together = list(remedies)
    for name in remedies:
        if fit(others := [other for other in together if other != name]):
            together = others
    return " and ".join(together)
