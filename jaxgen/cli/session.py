"""The loaded model and its options. Only `/set` can change the options during a run."""

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
    """The arguments of `generate` and the run's statistics; `generate_kwargs` has the arguments without a field."""

    params: Any
    cfg: GenerationConfig
    key: jax.Array
    tokenizer: Tokenizer
    stats: Stats
    generate_kwargs: Mapping[str, Any]
