"""The model that answers, and its options: the same for all answers of a run, but for what `/set` changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxgen.cli.timing import Stats
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Session:
    """Arguments of `generate`, `more` of them as keywords, and the statistics of the run."""

    params: Any
    cfg: GenerationConfig
    key: jax.Array
    tokenizer: Tokenizer
    stats: Stats
    more: Mapping[str, Any]
