"""The loop without a real mode: the tokens that it reads, its number of steps, and the values that it returns."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import KVCache
from jaxgen.core.decoding import loop
from jaxgen.core.decoding.continuation import UNKNOWN, Continuation
from jaxgen.core.decoding.loop import Decoded, Mode, Progress
from jaxgen.core.decoding.modes import mode_of
from jaxgen.core.decoding.recording import Recording
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.stop_reasons import StopReason
from tests.support.counting import CFG, PARAMS
from tests.support.prepared_calls import MESH, prepared

MODEL = CFG.model
PROMPTS = [[3], [7, 8, 9], [30, 31]]


@flax.struct.dataclass
class Ticks:
    """State of `Clock`: the number of steps so far, and the number at which it finishes."""

    step: jax.Array
    last: jax.Array

    @property
    def finished(self):
        return self.step >= self.last


class Clock(Mode):
    """A mode with rows 0 to 3, in which row r always generates token r."""

    def begin(self, run, rows, read):
        raise AssertionError("the tests begin by themselves")

    def step(self, run, state):
        return dataclasses.replace(state, step=state.step + 1)

    def finish(self, run, state):
        rows, cache = jnp.arange(4), KVCache.create(MODEL, 4, 6)
        tokens = jnp.broadcast_to(rows[:, None], (4, 6))
        continuation = Continuation(cache, tokens, rows + 2)
        return Decoded(tokens, rows, rows + 1, Recording(scores=tokens[:, :, None]), continuation, beam_indices=tokens)

    def progress(self, run, state):
        tokens = jnp.broadcast_to(jnp.arange(4)[:, None], (4, 6))
        return Progress(tokens, tokens[:, 0], tokens[:, 0] > 1, state.step, state.finished)


TICKS = Ticks(jnp.int32(0), jnp.int32(5))


@pytest.mark.parametrize(("most", "taken"), [(None, 5), (3, 3), (9, 5), (0, 0)])
def test_steps_are_taken_until_all_rows_are_finished_or_the_limit_is_reached(most, taken):
    run = prepared(PROMPTS).run
    assert int(loop.advance(run, TICKS, Clock(), most).step) == taken


def first(ids, count) -> list[list[int]]:
    """Return the first `count[row]` ids of each row."""
    return [row[:length] for row, length in zip(ids.tolist(), count.tolist(), strict=True)]


@pytest.fixture(scope="module")
def opened():
    """Return a run, and the rows of its three prompts before anything is generated."""
    given = prepared(PROMPTS)
    rows = jax.jit(lambda run, request: loop.open_prompts(run, request.complete())[2])(given.run, given.request)
    return given.run, rows


def with_tokens(opened, tokens: list[list[int]], done: list[bool]) -> tuple[Run, Rows]:
    run, rows = opened
    history = rows.history
    ids, length = np.array(history.ids), np.array(history.length)
    for row, new in enumerate(tokens):
        ids[row, length[row] : length[row] + len(new)] = new
    length += [len(new) for new in tokens]
    reasons = jnp.where(jnp.asarray(done), jnp.int32(StopReason.EOS), 0)
    history = dataclasses.replace(
        history, ids=jnp.asarray(ids), length=jnp.asarray(length, jnp.int32), done=jnp.asarray(done)
    )
    return run, dataclasses.replace(rows, history=history, reasons=reasons)


def test_progress_marks_final_columns(opened):
    """Columns are final up to the length of the shortest live row. The padding of finished rows is already in place."""
    run, rows = with_tokens(opened, [[4, 5, 6], [10], [32, 33, 34, 35]], [False, True, False])
    progress = Progress.from_rows(run, rows)
    assert progress.tokens.tolist() == [[4, 5, 6, 0, 0, 0], [10, 0, 0, 0, 0, 0], [32, 33, 34, 35, 0, 0]]
    assert progress.lengths.tolist() == [3, 1, 4]
    assert progress.done.tolist() == [False, True, False]
    assert int(progress.steps) == 3
    assert not progress.finished
    over = Progress.from_rows(*with_tokens(opened, [[4, 5, 6], [10], [32]], [True] * 3))
    assert int(over.steps) == 3
    assert over.finished


def test_decoded_result_of_finished_rows(opened):
    run, rows = with_tokens(opened, [[4, 5], [10, 11, 12], []], [True, True, False])
    cache = KVCache.create(MODEL, 3, 9)
    decoded = Decoded.from_rows(run, rows, cache)
    assert decoded.tokens.tolist() == [[4, 5, 0, 0, 0, 0], [10, 11, 12, 0, 0, 0], [0] * 6]
    assert decoded.lengths.tolist() == [2, 3, 0]
    assert decoded.reasons.tolist() == [StopReason.EOS, StopReason.EOS, StopReason.NONE]
    continuation = decoded.continuation
    assert continuation.kv is cache
    assert continuation.count.tolist() == [3, 6, 2]
    assert first(continuation.tokens, continuation.count) == [[3, 4, 5], [7, 8, 9, 10, 11, 12], [30, 31]]


def test_rows_added_for_a_mesh_are_removed_from_results():
    run = dataclasses.replace(prepared(PROMPTS).run, mesh=MESH)

    @jax.jit
    def read(state):
        return loop.without_padding(run, Clock().finish(run, state)), loop.progress(run, state, Clock())

    decoded, progress = read(TICKS)
    assert decoded.lengths.tolist() == progress.lengths.tolist() == [0, 1, 2]
    assert decoded.reasons.tolist() == [1, 2, 3]
    assert progress.done.tolist() == [False, False, True]
    for tokens in (decoded.tokens, decoded.beam_indices, progress.tokens, decoded.continuation.tokens):
        assert tokens.tolist() == [[row] * 6 for row in range(3)]
        assert tokens.is_fully_replicated
    assert decoded.recording.scores.shape == (3, 6, 1)
    assert decoded.continuation.count.tolist() == [2, 3, 4]
    assert decoded.continuation.kv.rows == 4


# --- Reading before the first step --------------------------------------------------------------------------------


def cached(tokens: list[list[int]], lengths: list[int], slots: int = 8) -> Continuation:
    """Return a cache in which the model has read only the first `lengths[row]` tokens of each row."""
    kv = dataclasses.replace(KVCache.create(MODEL, len(tokens), slots), length=jnp.asarray(lengths, jnp.int32))
    ids = np.zeros((len(tokens), slots), np.int32)
    for row, given in enumerate(tokens):
        ids[row, : len(given)] = given
    return Continuation(kv, jnp.asarray(ids), jnp.asarray([len(given) for given in tokens], jnp.int32))


def open_after(cache: Continuation | None, **inputs):
    given = prepared(PROMPTS, cache=cache, **inputs)
    return loop.open_prompts(given.run, given.request.complete())


def read_ids(tokens) -> list[list[int]]:
    return first(tokens.ids, tokens.length)


def known_ids(rows: Rows) -> list[list[int]]:
    return first(rows.history.ids, rows.history.length)


def test_opening_prompts_without_a_cache():
    read, cache, rows = open_after(None)
    assert read_ids(read) == known_ids(rows) == PROMPTS
    assert (cache.rows, cache.slots, cache.offset) == (3, 3, 0)
    assert rows.history.unknown.tolist() == [0, 0, 0]
    assert rows.history.done.tolist() == [False] * 3


def test_pending_token_is_read_before_the_prompt():
    read, cache, rows = open_after(cached([[40, 41], [42], [43, 44, 45]], [1, 1, 2]))
    assert read_ids(read) == [[41, 3], [7, 8, 9], [45, 30, 31]]
    assert known_ids(rows) == [[40, 41, 3], [42, 7, 8, 9], [43, 44, 45, 30, 31]]
    assert first(rows.cache_ids, rows.history.total_length) == known_ids(rows)
    assert rows.history.total_length.tolist() == [3, 4, 5]
    assert cache.total_length.tolist() == [1, 1, 2]
    assert cache.prefix is None
    assert cache.slots >= 8 + 3


def test_prompts_share_a_cache_with_one_row():
    read, cache, rows = open_after(cached([[40, 41]], [2]))
    assert read_ids(read) == PROMPTS
    assert known_ids(rows) == [[40, 41, *prompt] for prompt in PROMPTS]
    assert (cache.rows, cache.prefix.rows, cache.slots) == (3, 1, 4)  # 3 for the longest prompt, 1 for a pending token
    assert cache.prefix.length.tolist() == [2]
    assert cache.length.tolist() == [0] * 3


def test_cache_with_unknown_tokens_counts_toward_the_length():
    known = cached([[40, 41], [42], [43, 44, 45]], [2, 1, 3])
    read, cache, rows = open_after(dataclasses.replace(known, tokens=None))
    assert read_ids(read) == known_ids(rows) == PROMPTS
    assert rows.cache_ids is None
    assert rows.history.total_length.tolist() == [3, 4, 5]
    assert cache.total_length.tolist() == [2, 1, 3]


def test_embeddings_are_read_but_their_ids_are_unknown():
    embeds = np.asarray(PARAMS["model"]["embed_tokens"]["weight"])[[[0, 0, 3], [7, 8, 9], [0, 30, 31]]]
    given = prepared(PROMPTS, inputs_embeds=embeds)
    request = dataclasses.replace(given.request, ids=np.full_like(given.request.ids, UNKNOWN))
    read, _, rows = loop.open_prompts(given.run, request.complete())
    assert known_ids(rows) == [[], [], []]
    assert rows.history.unknown.tolist() == [1, 3, 2]
    assert rows.history.done.tolist() == [False] * 3
    assert jnp.argmax(read.embeds, axis=-1)[2, :2].tolist() == [30, 31]
    # The embedding of a pending token comes first.
    after = cached([[40, 41], [42], [43, 44, 45]], [1, 1, 3])
    read = open_after(after, inputs_embeds=embeds)[0]
    assert jnp.argmax(read.embeds, axis=-1)[0, :2].tolist() == [41, 3]
    assert read.mask.sum(axis=1).tolist() == [2, 3, 2]


def test_prompt_is_read_once_and_answered_to_the_end():
    """One program returns the prefill with its records, the continuation, and the decoded run."""
    cfg = CFG.replace(eos_token_id=12, output_hidden_states=True)
    given = prepared(PROMPTS, cfg)

    @jax.jit
    def everything(run, request):
        return loop.prefill(run, request), loop.continuation_of(run, request), loop.decode(run, request, mode_of(cfg))

    (rows, read), continuation, decoded = everything(given.run, given.request)
    assert jnp.argmax(read.logits[:, 0], axis=-1).tolist() == [4, 10, 32]
    assert rows.history.step.tolist() == [0, 0, 0]
    assert read.cache.length.tolist() == continuation.kv.length.tolist() == [1, 3, 2]
    assert continuation.count.tolist() == [1, 3, 2]
    assert first(continuation.tokens, continuation.count) == PROMPTS
    embedded = np.asarray(rows.recording.hidden_states.prefill[0])
    assert (embedded[0, :2] == 0).all()  # padding
    assert np.argmax(embedded, axis=-1)[:, -1].tolist() == [3, 9, 31]
    assert decoded.tokens.tolist() == [[4, 5, 6, 7, 8, 9], [10, 11, 12, 0, 0, 0], [32, 33, 34, 35, 36, 37]]
    assert decoded.lengths.tolist() == [6, 3, 6]
    assert decoded.reasons.tolist() == [StopReason.LENGTH, StopReason.EOS, StopReason.LENGTH]
    assert decoded.continuation.kv.total_length.tolist() == [1 + 5, 3 + 2, 2 + 5]  # the last token is not cached
