"""The implemented decode modes, by the names of `GenerationConfig.mode`.

`IMPLEMENTED` in jaxgen/config/options.py must name them too; docs/architecture.md shows how to add one.
"""

from __future__ import annotations

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.beam import BeamSearch
from jaxgen.decoding.constrained_beam import ConstrainedBeamSearch
from jaxgen.decoding.group_beam import GroupBeamSearch
from jaxgen.decoding.loop import Mode
from jaxgen.decoding.sample import Sample

MODES: dict[str, Mode] = {
    "greedy_search": Sample(),
    "sample": Sample(),
    "beam_search": BeamSearch(),
    "beam_sample": BeamSearch(),
    "group_beam_search": GroupBeamSearch(),
    "constrained_beam_search": ConstrainedBeamSearch(),
}


def mode_of(cfg: GenerationConfig) -> Mode:
    """Return the decode mode of a config."""
    return MODES[cfg.mode]
