"""Check the memory for a call's caches before anything is compiled or allocated.

The caches are only part of the memory that a call needs. `jaxgen.programs` checks later whether there is enough memory
for each compiled program.
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

# Changes to the arguments of `caches_bytes` that reduce the memory for a call.
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
    """Return the size in bytes of `KVCache.create(model, rows, slots, dtype)`."""
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
    grammars: int = 0,
) -> int:
    """Return the total size in bytes of the caches for prompts and sequences, plus `prefixes` and `grammars`.

    With `slots`, memory is allocated for `slots` rows, even if there are fewer sequences. `prefixes` and `grammars` are
    the sizes in bytes of an engine's prefix store and of its table of grammars.
    """
    prompts, rows = (prompts, prompts * sequences) if slots is None else (slots, slots)
    sizes = [(model, *size, cache_dtype) for model in models for size in ((prompts, width), (rows, capacity))]
    return prefixes + grammars + sum([cache_bytes(*size) for size in sizes])


def check_call_memory(run: Run, width: int, prefixes: int = 0, grammars: int = 0) -> None:
    """Raise an `InputError` if the device does not have enough memory for a call's caches.

    `width` is the width of prompts in the program. `prefixes` and `grammars` are as in `caches_bytes`.
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
        grammars=grammars,
    )
    leaf = jax.tree.leaves(run.params)[0]
    devices = leaf.devices() if isinstance(leaf, jax.Array) else {default_device()}
    count = len(devices)  # on a mesh, all devices store parts of about equal size
    if (each := needed() // count) > SMALL:
        check_free("this call needs {}", each, devices, lambda free: remedy(needed, free * count))


def remedy(needed: functools.partial[int], free: int, more: Mapping[str, dict[str, Any]] | None = None) -> str:
    """Suggest each change that makes a call fit into `free` bytes, or a combination if no single change suffices.

    Given keyword arguments that change the call, `needed` returns the number of bytes that the changed call
    requires. `more` contains changes to consider in addition to those in `_REMEDIES`.
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
