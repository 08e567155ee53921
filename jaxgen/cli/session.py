"""The loaded model and its options. Fixed for a run, except for `/set`."""

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
    """Arguments of `generate` (in `generate_kwargs` if they have no field here), and the statistics of the run."""

    params: Any
    cfg: GenerationConfig
    key: jax.Array
    tokenizer: Tokenizer
    stats: Stats
    generate_kwargs: Mapping[str, Any]
