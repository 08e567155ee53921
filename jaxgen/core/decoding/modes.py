"""The decode modes, by their names in `GenerationConfig.mode`. docs/architecture.md shows how to add one."""

from __future__ import annotations

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.option import ASSISTED
from jaxgen.core.decoding.assisted import Assisted
from jaxgen.core.decoding.beam import BeamSearch
from jaxgen.core.decoding.constrained_beam import ConstrainedBeamSearch
from jaxgen.core.decoding.contrastive import ContrastiveSearch
from jaxgen.core.decoding.dola import Dola
from jaxgen.core.decoding.group_beam import GroupBeamSearch
from jaxgen.core.decoding.loop import Mode
from jaxgen.core.decoding.sample import Sample
from jaxgen.core.model.cache import layer_kinds
from jaxgen.errors import ConfigError

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
    """Return the decode mode of a config, or assisted generation if there is an assistant.

    Raises:
        ConfigError: the mode removes tokens from the cache, and the states of the model's layers do not allow this.
    """
    name = ASSISTED if assisted else cfg.mode
    mode = MODES[name]
    if mode.crops and not all(kind.can_crop for kind in layer_kinds(cfg.model)):
        possible = ", ".join(other for other, mode in MODES.items() if not mode.crops)
        raise ConfigError(
            f"{name} removes tokens from the cache, which is not possible with this model, because a layer's state "
            f"merges all tokens: choose one of {possible}"
        )
    return mode
