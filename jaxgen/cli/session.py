"""The loaded model and its options, which `/set` can change in a conversation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxgen.cli.timing import Stats
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Session:
    """Arguments of `generate`, and statistics. `generate_kwargs` contains further keyword arguments."""

    params: Any
    cfg: GenerationConfig
    key: jax.Array
    tokenizer: Tokenizer
    stats: Stats
    generate_kwargs: Mapping[str, Any]
