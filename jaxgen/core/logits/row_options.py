"""Options with a value for each row: the values for its prompt, repeated for all rows of the prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import TRACED
from jaxgen.core.logits.history import History
from jaxgen.shapes import repeat_rows, token_set

# Values of the enabled options, `{name: [rows, ...]}`. These values are part of the rows' state, like the tokens.
OptionValues = dict[str, Any]


def repeat_values(values: OptionValues, rows: int) -> OptionValues:
    """Repeat option values for `rows` rows; an option has one value for all prompts, or one value per prompt."""

    def per_row(value: Any, rank: int) -> jax.Array:
        value = jnp.asarray(value)
        return repeat_rows(value, rows) if value.ndim > rank else jnp.broadcast_to(value, (rows, *value.shape))

    return {name: jax.tree.map(per_row, value, TRACED[name].kind.ranks) for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class RowOptions:
    """The options of a run as processors see them; see `Rows.options`.

    Attributes:
        cfg: which options are on, and the values that all rows share.
        values: the values for each row.
        mesh: the mesh that the scores are split across, or None.
    """

    cfg: GenerationConfig
    values: OptionValues
    mesh: Mesh | None = None

    @classmethod
    def of(cls, cfg: GenerationConfig, rows: int) -> RowOptions:
        """Return the options of a config for `rows` rows, which must be a multiple of the number of prompts."""
        return cls(cfg, repeat_values(cfg.split()[1], rows))

    def value(self, name: str) -> jax.Array:
        """Return the values of an option, `[rows]`."""
        return self.values[name]

    def number(self, name: str) -> jax.Array:
        """Return the values of an option, `[rows, 1]`."""
        return self.values[name][:, None]

    def table(self, name: str) -> jax.Array | None:
        """Return a table of ids, `[rows, E]` or `[rows, S, W]`; None if the option is off."""
        return self.values.get(name)

    def ids(self, name: str) -> jax.Array:
        """Return a set of ids as bool[rows, V]."""
        return token_set(self.values[name], self.cfg.model.vocab_size)

    def eos(self, rows: int) -> jax.Array:
        """Return the ids that end a row, as bool[rows, V]; the set is empty if `eos_token_id` is off."""
        if not self.cfg.on("eos_token_id"):
            return jnp.zeros((rows, self.cfg.model.vocab_size), bool)
        return self.ids("eos_token_id")

    def min_tokens_to_keep(self, rows: int) -> int | jax.Array:
        """Return the number of tokens that warpers must keep: 1, or int32[rows, 1] with beams; see `at_least`."""
        return self.at_least(rows) if self.cfg.num_beams > 1 else 1

    def at_least(self, rows: int) -> jax.Array:
        """Return int32[rows, 1], the number of tokens that every beam needs to continue."""
        eos = self.table("eos_token_id")
        count = jnp.zeros(rows, jnp.int32) if eos is None else jnp.sum(eos >= 0, axis=-1, dtype=jnp.int32)
        return 1 + jnp.maximum(count, 1)[:, None]

    def beginning(self, history: History) -> jax.Array:
        """Return the first step in which no token is forced, int32[rows]; begin_suppress_tokens applies there."""
        begin = jnp.zeros_like(history.length)
        if self.cfg.on("forced_bos_token_id"):
            forced = (history.prompt_length <= 1) & (self.value("forced_bos_token_id") >= 0)
            begin = begin + forced.astype(jnp.int32)
        if self.cfg.on("forced_decoder_ids"):
            position = self.values["forced_decoder_ids"][..., 0]
            count = jnp.sum(position >= 0, axis=-1)
            last = jnp.take_along_axis(position, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
            begin = begin + jnp.where(count > 0, last, 0)
        return begin
