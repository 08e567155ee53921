"""Check that there is enough memory before spending time reading the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from convert.checkpoint import Checkpoint
from convert.hf import float_dtype, open_checkpoint
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.request.cache_memory import bytes_of_call
from jaxgen.memory import REMEDY, check_free, size_text
from jaxgen.programs import default_device


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
    models = [dataclasses.replace(source.cfg.model, dtype=source.dtype(wanted).name) for source in sources]
    caches = bytes_of_call(models, cfg, prompts, width, answers)
    what = f"this request needs {{}} ({size_text(_weights(sources[:1], wanted, quantize))} of weights)"
    needed = _weights(sources, wanted, quantize) + caches
    check_free(what, needed, [default_device()], f"{REMEDY}, --dtype bfloat16, --quantize, or a smaller model")


def _weights(sources: Sequence[Checkpoint], dtype: np.dtype | None, quantize: str | None) -> int:
    return sum(sum(source.quantize(quantize).sizes(dtype).values()) for source in sources)
