"""Check the memory for a call's caches before anything is compiled or allocated.

The caches are only part of the memory that a call needs. `jaxgen.programs` checks later whether there is enough memory
for each compiled program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxgen.buckets import capacity_for, prompt_bucket
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.modes import mode_of
from jaxgen.core.decoding.run import Run
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.config import ModelConfig
from jaxgen.memory import REMEDY, SMALL, check_free
from jaxgen.programs import default_device


@functools.lru_cache
def cache_bytes(model: ModelConfig, rows: int, slots: int, dtype: str | None = None) -> int:
    """Return the size in bytes of `KVCache.create(model, rows, slots, dtype)`."""
    leaves = jax.tree.leaves(jax.eval_shape(functools.partial(KVCache.create, model, rows, slots, dtype)))
    return sum([math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves])


def caches_bytes(
    models: Iterable[ModelConfig], cfg: GenerationConfig, prompts: int, sequences: int, width: int, capacity: int
) -> int:
    """Return the total size in bytes of the caches for prompts of `width` tokens, each with the given sequences.

    With `slots`, memory is allocated for `slots` rows, even if there are fewer sequences.
    """
    prompts, rows = (prompts, prompts * sequences) if cfg.slots is None else (cfg.slots, cfg.slots)
    sizes = [(model, *size, cfg.cache_dtype) for model in models for size in ((prompts, width), (rows, capacity))]
    return sum([cache_bytes(*size) for size in sizes])


def bytes_of_call(
    models: Sequence[ModelConfig], cfg: GenerationConfig, prompts: int, width: int, answers: int = 1
) -> int:
    """Return the size in bytes of the caches for a call with models (a second one drafts), before weights are read.

    `width` is the number of tokens in the longest prompt. At least `answers` answers to each prompt are decoded at a
    time.
    """
    sequences = max(answers, mode_of(cfg, len(models) > 1).needs(cfg).sequences)
    capacity = capacity_for(int(np.max(np.asarray(cfg.max_new_tokens))), cfg.records)
    return caches_bytes(models, cfg, prompts, sequences, prompt_bucket(width), capacity)


def check_call_memory(run: Run, width: int, prefixes: int = 0, grammars: int = 0) -> None:
    """Raise an `InputError` if the device does not have enough memory for a call's caches.

    `width` is the width of prompts in the program. `prefixes` and `grammars` are the sizes in bytes of an engine's
    prefix store and of its table of grammars.
    """
    models = (run.model,) if run.draft is None else (run.model, run.draft.model)
    needed = caches_bytes(models, run.cfg, run.prompts, run.needs.sequences, width, run.capacity)
    leaf = jax.tree.leaves(run.params)[0]
    devices = leaf.devices() if isinstance(leaf, jax.Array) else {default_device()}
    count = len(devices)  # on a mesh, all devices store parts of about equal size
    if (each := (needed + prefixes + grammars) // count) > SMALL:
        remedy = f"{REMEDY}, or prefix_cache_bytes=0" if prefixes else REMEDY
        check_free("this call needs {}", each, devices, remedy)
