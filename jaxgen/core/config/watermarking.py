"""WatermarkingConfig: the parameters of a watermark. `jaxgen.core.logits.watermark` applies the watermark."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxgen.core.config.kinds import Number, OneOf, Real, StaticInteger, Unsigned
from jaxgen.errors import ConfigError, shown

_KINDS = {
    "greenlist_ratio": Real(above=0, below=1, per_prompt=False),
    "bias": Real(per_prompt=False),
    "hashing_key": Unsigned(per_prompt=False),
    "seeding_scheme": OneOf("lefthash", "selfhash"),
    "context_width": StaticInteger(1, least=1),
}
_TRACED = tuple(name for name, kind in _KINDS.items() if kind.traced)
_STATIC = tuple(name for name, kind in _KINDS.items() if not kind.traced)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class WatermarkingConfig:
    """Parameters of a watermark, as in transformers. Changing the ratio, bias or key never causes recompilation.

    >>> WatermarkingConfig(bias=3).to_hf()["bias"]
    3.0

    Attributes:
        greenlist_ratio: the fraction of the vocabulary that is green, greater than 0 and less than 1.
        bias: the number that is added to the scores of green tokens.
        hashing_key: the secret key, from 0 to 2**32 - 1.
        seeding_scheme: the context that determines which tokens are green: "lefthash" for the previous token, or
            "selfhash" for the previous `context_width - 1` tokens.
        context_width: the number of tokens that a row must have before it is marked.

    Raises:
        ConfigError: a value is not allowed.
        TypeError: a value has the wrong type.
    """

    greenlist_ratio: Number = 0.25
    bias: Number = 2.0
    hashing_key: Number = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1

    def __post_init__(self):
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is None:
                raise TypeError(f"{name} must not be None: leave it out")
            object.__setattr__(self, name, kind.parse(name, value))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> WatermarkingConfig:
        """Read a dict that has the same fields as transformers' class.

        Raises:
            ConfigError: a field is unknown, or a value is not allowed.
        """
        for name in config:
            if name not in _KINDS:
                known = ", ".join(_KINDS)
                raise ConfigError(f"watermarking_config has the unknown field {shown(name)}: known are {known}")
        return cls(**config)

    def to_hf(self) -> dict[str, Any]:
        """Return all fields as a dict of Python numbers and strings."""
        return {name: np.asarray(getattr(self, name)).item() for name in _KINDS}

    def tree_flatten(self):
        """Split the config into its traced values and its static fields."""
        leaves = tuple(_KINDS[name].leaf(getattr(self, name)) for name in _TRACED)
        return leaves, tuple(getattr(self, name) for name in _STATIC)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        """Rebuild from the result of `tree_flatten`. JAX may pass placeholders, so values are not checked."""
        config = object.__new__(cls)
        for name, value in zip((*_STATIC, *_TRACED), (*static, *leaves), strict=True):
            object.__setattr__(config, name, value)
        return config

    def __eq__(self, other: object) -> bool:
        return self.to_hf() == other.to_hf() if isinstance(other, WatermarkingConfig) else NotImplemented
