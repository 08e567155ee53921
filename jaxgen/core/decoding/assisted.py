"""Assisted generation (speculative decoding): transformers' `GenerationMixin._assisted_decoding`, for any batch size.

A cheap drafter proposes the next tokens of each row (`drafting`), and the model reads all of them in one pass. Each row
then chooses its tokens exactly as it would without a draft. A row accepts drafted tokens until one of them differs from
the row's own choice.

The result is therefore the same as in greedy search, or in sampling with the same key, but takes fewer passes. The
drafter and the model draw with the same random numbers, so they often draw the same token. transformers instead accepts
drafted tokens at random, which preserves the distribution of the texts but not the texts themselves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.control import while_loop
from jaxgen.core.decoding.drafting import Draft, drafter_of
from jaxgen.core.decoding.forward import Forward, run_model
from jaxgen.core.decoding.loop import Decoded, Mode, Progress
from jaxgen.core.decoding.request import Tokens
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.sample import Sample, SampleState, record_layers


@flax.struct.dataclass
class AssistedState:
    """State of assisted generation.

    Attributes:
        sample: rows and cache, as in sampling.
        drafter: state of the drafter.
        drafted: int32[B], the number of drafted tokens that the model has read.
        accepted: int32[B], the number of drafted tokens that were accepted.
    """

    sample: SampleState
    drafter: Any
    drafted: jax.Array
    accepted: jax.Array

    @property
    def finished(self) -> jax.Array:
        """bool[], True when every row is done."""
        return self.sample.finished


class Assisted(Mode):
    """Greedy search or sampling with a draft."""

    drafts = replays = crops = True

    def begin(self, run: Run, rows: Rows, read: Forward) -> AssistedState:
        """Choose the first token of each row, and let the drafter read the prompts."""
        sample = Sample().begin(run, rows, read)
        none = jnp.zeros(sample.rows.count, jnp.int32)
        return AssistedState(sample, drafter_of(run).begin(run, sample.rows), none, none)

    def step(self, run: Run, state: AssistedState) -> AssistedState:
        """Draft tokens, run them through the model, and append the model's choices to each row."""
        before, drafter = state.sample.rows, drafter_of(run)
        with jax.named_scope("draft"):
            draft, drafting = drafter.propose(run, before, state.drafter)
        ids = jnp.concatenate([before.history.last(1), draft.tokens], axis=1)
        tokens = Tokens.of_length(ids, jnp.where(before.live, 1 + draft.count, 0))
        read, rows = run_model(run, before, tokens, state.sample.cache, all_logits=True)
        rows, accepted = _append_chosen(run, rows, read, draft)
        added = rows.history.step - before.history.step
        # The model has read each row's last token and the draft. All chosen tokens except the newest stay in the cache.
        rejected = jnp.where(before.live, 1 + draft.count - jnp.maximum(added, 1), 0)
        return AssistedState(
            sample=SampleState(rows, read.cache.drop_last(rejected)),
            drafter=drafter.update(run, drafting, rows, accepted),
            drafted=state.drafted + draft.count,
            accepted=state.accepted + accepted,
        )

    def finish(self, run: Run, state: AssistedState) -> Decoded:
        """Return the tokens, and the numbers of drafted and accepted tokens."""
        decoded = Sample().finish(run, state.sample)
        return dataclasses.replace(decoded, drafted=state.drafted, accepted=state.accepted)

    def progress(self, run: Run, state: AssistedState) -> Progress:
        """Return the tokens so far."""
        return Sample().progress(run, state.sample)


def _append_chosen(run: Run, rows: Rows, read: Forward, draft: Draft) -> tuple[Rows, jax.Array]:
    """Append the accepted drafted tokens to each row, followed by one more token that the model chooses.

    Also return the number of accepted drafted tokens, int32[B].
    """

    def append(carry):
        column, active, rows, accepted = carry
        length = rows.history.length
        if run.cfg.records:
            rows = record_layers(rows, read, column, active, read.cache.offset)
        rows = Sample().extend(run, rows, read, column, active)
        agrees = rows.history.last(1)[:, 0] == draft.tokens[:, jnp.minimum(column, draft.tokens.shape[1] - 1)]
        agrees &= (rows.history.length > length) & (column < draft.count)
        return column + 1, agrees & rows.live, rows, accepted + agrees.astype(jnp.int32)

    begin = (jnp.zeros((), jnp.int32), rows.live, rows, jnp.zeros(rows.count, jnp.int32))
    _, _, rows, accepted = while_loop(lambda carry: jnp.any(carry[1]), append, begin)
    return rows, accepted
