"""Check that there is enough memory before spending time reading the weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from convert.hf import Checkpoint, float_dtype, open_checkpoint
from jaxgen.buckets import capacity_for, prompt_bucket
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.modes import mode_of
from jaxgen.memory import check_free, size_text
from jaxgen.model.quantization import KINDS
from jaxgen.programs import default_device
from jaxgen.request.memory import caches_bytes, remedy

_REMEDIES: dict[str, dict[str, Any]] = {
    "--dtype bfloat16": {"dtype": np.dtype(jnp.bfloat16)},
    **{f"--quantize {name}": {"quantize": name} for name in KINDS},
}


def check_memory(
    path: Path,
    cfg: GenerationConfig,
    prompts: int,
    width: int,
    *,
    answers: int = 1,
    dtype=None,
    quantize=None,
    assistant=None,
) -> None:
    """Raise an `InputError` if the device lacks the memory for a checkpoint's weights and a call's caches.

    Args:
        path, assistant: the directories of the model and of the assistant (None if there is no assistant).
        cfg: as in `generate`, with `max_new_tokens` set.
        prompts, width: the number of prompts, and the number of tokens in the longest prompt.
        answers: the minimum number of answers to each prompt that are decoded at a time.
        dtype, quantize: as in `load_hf`.
    """
    wanted = float_dtype(dtype)
    sources = [open_checkpoint(one) for one in (path, assistant) if one is not None]
    needed = functools.partial(
        _bytes,
        sources,
        dtype=wanted,
        quantize=quantize,
        prompts=prompts,
        sequences=max(answers, mode_of(cfg, assistant is not None).needs(cfg).sequences),
        width=prompt_bucket(width),
        capacity=capacity_for(int(np.max(np.asarray(cfg.max_new_tokens))), cfg.records),
        cache_dtype=cfg.cache_dtype,
        slots=cfg.slots,
    )
    what = f"this request needs {{}} ({size_text(_weights(sources[:1], wanted, quantize))} of weights)"
    check_free(what, needed(), [default_device()], lambda free: remedy(needed, free, _REMEDIES))


def _bytes(sources: Sequence[Checkpoint], *, dtype: np.dtype | None, quantize: str | None, **sizes: Any) -> int:
    models = [dataclasses.replace(source.cfg.model, dtype=source.dtype(dtype).name) for source in sources]
    return _weights(sources, dtype, quantize) + caches_bytes(models, **sizes)


def _weights(sources: Sequence[Checkpoint], dtype: np.dtype | None, quantize: str | None) -> int:
    return sum(sum(source.quantize(quantize).sizes(dtype).values()) for source in sources)
