"""The decode modes, by their names in `GenerationConfig.mode`. docs/architecture.md shows how to add one."""

from __future__ import annotations

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.option import ASSISTED
from jaxgen.decoding.assisted import Assisted
from jaxgen.decoding.beam import BeamSearch
from jaxgen.decoding.constrained_beam import ConstrainedBeamSearch
from jaxgen.decoding.contrastive import ContrastiveSearch
from jaxgen.decoding.dola import Dola
from jaxgen.decoding.group_beam import GroupBeamSearch
from jaxgen.decoding.loop import Mode
from jaxgen.decoding.sample import Sample

MODES: dict[str, Mode] = {
    "greedy_search": Sample(),
    "sample": Sample(),
    "assisted_generation": Assisted(),
    "prompt_lookup": Assisted(),
    "beam_search": BeamSearch(),
    "beam_sample": BeamSearch(),
    "group_beam_search": GroupBeamSearch(),
    "contrastive_search": ContrastiveSearch(),
    "dola_generation": Dola(),
    "constrained_beam_search": ConstrainedBeamSearch(),
}


def mode_of(cfg: GenerationConfig, assisted: bool = False) -> Mode:
    """Return the decode mode of a config, or assisted generation if there is an assistant."""
    return MODES[ASSISTED if assisted else cfg.mode]
