"""The implemented decode modes, by the names of `GenerationConfig.mode`."""

from __future__ import annotations

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.loop import Mode
from jaxgen.decoding.sample import Sample

MODES: dict[str, Mode] = {"greedy_search": Sample(), "sample": Sample()}


def mode_of(cfg: GenerationConfig) -> Mode:
    """Return the decode mode of a config."""
    return MODES[cfg.mode]
