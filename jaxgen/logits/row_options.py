"""The options of each row: the values for its prompt, repeated for all rows of the prompt."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.options import TRACED
from jaxgen.logits.history import History
from jaxgen.shapes import repeat_rows, token_set

# Values of the enabled options, `{name: [rows, ...]}`. Like its tokens, they are part of a row's state.
OptionValues = dict[str, Any]


def option_values(cfg: GenerationConfig, rows: int) -> OptionValues:
    """Return the values of the enabled options for each of `rows` rows, a multiple of the number of prompts."""
    return repeat_values(cfg.split()[1], rows)


def repeat_values(values: OptionValues, rows: int) -> OptionValues:
    """Repeat values, given for all prompts or for each prompt, to `rows` rows."""
    return {
        name: jax.tree.map(lambda x, rank: _per_row(x, rows, rank), value, TRACED[name].kind.ranks)
        for name, value in values.items()
    }


def _per_row(value, rows: int, rank: int) -> jax.Array:
    """Repeat one value of rank `rank`, or one value per prompt, to `[rows, ...]`."""
    value = jnp.asarray(value)
    return repeat_rows(value, rows) if value.ndim > rank else jnp.broadcast_to(value, (rows, *value.shape))


class RowOptions:
    """The options of a run in the form that processors need, one value per row, and the mesh of the scores."""

    def __init__(self, cfg: GenerationConfig, values: OptionValues, mesh: Mesh | None = None):
        self.cfg, self.values, self.mesh = cfg, values, mesh

    def value(self, name: str) -> jax.Array:
        """The values of an option, `[rows]`."""
        return self.values[name]

    def number(self, name: str) -> jax.Array:
        """The values of an option, `[rows, 1]`."""
        return self.values[name][:, None]

    def table(self, name: str) -> jax.Array | None:
        """An id table, `[rows, E]` or `[rows, S, W]`; None if the option is off."""
        return self.values.get(name)

    def ids(self, name: str) -> jax.Array:
        """A set of ids as bool[rows, V]."""
        return token_set(self.values[name], self._vocab)

    def eos(self, rows: int) -> jax.Array:
        """The ids that end a row, as bool[rows, V]; empty if the option is off."""
        return self.ids("eos_token_id") if self.cfg.on("eos_token_id") else jnp.zeros((rows, self._vocab), bool)

    def at_least(self, rows: int) -> jax.Array:
        """int32[rows, 1]: the minimum number of tokens that warpers keep, so that every beam can continue."""
        eos = self.table("eos_token_id")
        count = jnp.zeros(rows, jnp.int32) if eos is None else jnp.sum(eos >= 0, axis=-1, dtype=jnp.int32)
        return 1 + jnp.maximum(count, 1)[:, None]

    def token(self, name: str) -> jax.Array:
        """An id as bool[rows, V]."""
        return token_set(self.number(name), self._vocab)

    def biases(self) -> tuple[jax.Array, jax.Array]:
        """The biased sequences `[rows, S, W]` and their biases `[rows, S]`."""
        return self.values["sequence_bias"]

    def decay(self, part: int) -> jax.Array:
        """`[rows, 1]`, the start or the factor of the exponential decay."""
        return self.values["exponential_decay_length_penalty"][part][:, None]

    def beginning(self, history: History) -> jax.Array:
        """int32[rows]: the step to which begin_suppress_tokens applies, the first one in which no token is forced."""
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

    def forced_at(self, history: History) -> tuple[jax.Array, jax.Array]:
        """The tokens that forced_decoder_ids forces next, bool[rows, V], and the rows with such a token, bool[rows]."""
        forced = self.values["forced_decoder_ids"]
        here = forced[..., 0] == history.length[:, None]
        # If several entries have the same position, the last one wins, as in a dict.
        last = here & (jnp.cumsum(here[:, ::-1], axis=-1)[:, ::-1] == 1)
        return token_set(jnp.where(last, forced[..., 1], -1), self._vocab), jnp.any(here, axis=-1)

    @property
    def _vocab(self) -> int:
        return self.cfg.model.vocab_size
