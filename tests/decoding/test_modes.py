"""The contracts of modes and rows: toy modes in the compiled loop, with all features on, compared with plain Python."""

import copy
import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import ConfigError, GenerationConfig, StepHook, StopReason, TokenAutomaton, generate
from jaxgen.core.decoding.extensions import Extensions, functions
from jaxgen.core.decoding.modes import MODES, mode_of
from jaxgen.core.decoding.sample import draw
from jaxgen.core.grammar.stop_strings import StopStrings
from jaxgen.core.model.cache import KeysValues
from jaxgen.core.output import output
from jaxgen.core.request.assistant import open_assistant
from jaxgen.core.request.driver import run_whole
from jaxgen.core.request.prepare import CallInputs, prepare
from tests.support.models import last_logits, left_pad, model_config, random_params, slow
from tests.support.tokenizers import byte_level
from tests.support.toy_modes import Refill, Shuffle

TOKENIZER = byte_level()
MODEL = model_config(vocab_size=280, num_hidden_layers=1)
PARAMS = random_params(MODEL)
TABLE = np.asarray(PARAMS["model"]["embed_tokens"]["weight"])
PROMPTS = [[5, 6, 7], [30], [20, 21, 22, 23, 24], [9, 8], [70, 71, 72, 73]]
KEY = jax.random.key(4)
AUTOMATA = [
    TokenAutomaton.from_regex(pattern, TOKENIZER, vocab_size=MODEL.vocab_size)
    for pattern in ("[a-h]*", "[a-d]{3,9}", "[ -~]*", "([ab][cd])+", "[x-z]{4}")
]
STOP = "da"
NEW = 12
KNOBS = {
    "temperature": [2.0, 1.0, 3.0, 1.5, 2.5],
    "repetition_penalty": [1.3, 1.0, 0.9, 1.1, 1.0],
    "max_new_tokens": [NEW, 7, 9, NEW, 5],
    "eos_token_id": [[97], [98, 99], [100], [101], []],
}


@flax.struct.dataclass
class Nudge(StepHook):
    """A hook that makes a different token more likely at each call, and scales up the embeddings slightly."""

    bonus: jax.Array

    def init(self, history):
        return jnp.zeros(history.length.shape[0], jnp.int32)

    def before(self, calls, history, inputs):
        return dataclasses.replace(inputs, inputs_embeds=inputs.inputs_embeds * 1.5), calls

    def after(self, calls, history, output):
        rows = jnp.arange(calls.shape[0])
        logits = output.logits.at[rows, 65 + calls % 26].add(self.bonus)
        return dataclasses.replace(output, logits=logits), calls + 1


def discourage(history, scores):
    """Make one token less likely: which one depends on the row's length."""
    return scores - 3.0 * jax.nn.one_hot(60 + history.length % 20, scores.shape[1])


def two_of_a_kind(history, scores):
    last = history.last(2)
    return (history.step >= 2) & (last[:, 0] == last[:, 1]) & (history.length % 2 == 0)


ALLOWED, PUSH, EXHAUSTED = map(jax.jit, (TokenAutomaton.allowed, TokenAutomaton.push, TokenAutomaton.exhausted))
DRAW = jax.jit(draw)


class PlainRow:
    """The reference: one row, alone and without a cache."""

    def __init__(self, number: int, key):
        self.prompt, self.key, self.number = PROMPTS[number], key, number
        self.tokens, self.scores, self.reason = [], [], StopReason.NONE
        self.state = int(AUTOMATA[number].start)

    def knob(self, name):
        return KNOBS[name][self.number]

    def advance(self):
        if self.reason != StopReason.NONE:
            return
        ids, step = self.prompt + self.tokens, len(self.tokens)
        automaton = AUTOMATA[self.number]
        scores = np.array(last_logits(MODEL, PARAMS, TABLE[ids] * np.float32(1.5)))
        scores[65 + step % 26] += np.float32(2.5)
        for token in set(ids):
            penalty = np.float32(self.knob("repetition_penalty"))
            scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
        eos = np.isin(np.arange(len(scores)), self.knob("eos_token_id"))
        budget = self.knob("max_new_tokens")
        state, remaining = np.asarray([[self.state], [budget - step]], np.int32)
        scores[~np.asarray(ALLOWED(automaton, state, eos, remaining))[0]] = -np.inf
        scores[60 + len(ids) % 20] -= 3.0
        scores = scores / np.float32(self.knob("temperature"))
        self.scores.append(scores)
        token = int(DRAW(self.key[None], np.int32(step), scores[None])[0])
        self.tokens.append(token)
        self.state = int(PUSH(automaton, state, np.asarray([token], np.int32), eos)[0])
        ids.append(token)
        text = b"".join(TOKENIZER.token_bytes()[t] or b"" for t in ids if t < len(TOKENIZER.token_bytes()))
        done = EXHAUSTED(automaton, *np.asarray([[self.state], [budget - step - 1]], np.int32))[0]
        if eos[token]:
            self.reason = StopReason.EOS
        elif text.endswith(STOP.encode()):
            self.reason = StopReason.STOP_STRING
        elif len(self.tokens) >= 2 and ids[-1] == ids[-2] and len(ids) % 2 == 0:
            self.reason = StopReason.CRITERION
        elif not eos.any() and done:
            self.reason = StopReason.COMPLETE
        elif len(self.tokens) >= budget:
            complete = self.state >= 0 and bool(automaton.accepting[self.state])
            self.reason = StopReason.COMPLETE if complete else StopReason.LENGTH

    def run(self):
        while self.reason == StopReason.NONE:
            self.advance()
        return self


def run(mode, copies=1, assistant=None, **options):
    ids, mask = left_pad(PROMPTS)
    cfg = GenerationConfig(
        model=MODEL, do_sample=True, top_k=0, pad_token_id=0, num_return_sequences=copies, output_scores=True,
        output_logprobs="scores", output_hidden_states=True, **KNOBS, **options,
    )  # fmt: skip
    extensions = Extensions(
        processors=functions("logits_processor", [discourage]),
        criteria=functions("stopping_criteria", [two_of_a_kind]),
        allowed=TokenAutomaton.stack(AUTOMATA),
        stop_strings=StopStrings.build([STOP], TOKENIZER, MODEL.vocab_size),
        hook=Nudge(jnp.float32(2.5)),
    )
    draft = None
    if assistant is not None:
        draft, cfg = open_assistant(assistant, cfg)
    prepared = prepare(PARAMS, cfg, CallInputs(ids, KEY, mask), extensions, eager=True, assistant=draft)
    return output(prepared, run_whole(prepared.run, prepared.request, mode=mode))


def row_key(prompt: int, sequence: int = 0):
    return jax.random.fold_in(jax.random.fold_in(KEY, prompt), sequence)


def check(out, rows: list[PlainRow]):
    start = out.prompt_width
    for index, row in enumerate(rows):
        length = int(out.lengths[index])
        assert np.asarray(out.sequences)[index, start : start + length].tolist() == row.tokens, index
        assert (np.asarray(out.sequences)[index, start + length :] == 0).all()
        assert StopReason(int(out.stop_reasons[index])) == row.reason
        scores = np.asarray(out.scores)[:length, index]
        np.testing.assert_array_equal(np.isinf(scores), np.isinf(row.scores))
        np.testing.assert_allclose(np.where(np.isinf(scores), 0, scores),
                                   np.where(np.isinf(row.scores), 0, row.scores), atol=2e-4)  # fmt: skip
        assert (np.asarray(out.scores)[length:, index] == 0).all()
        expected = [jax.nn.log_softmax(s)[t] for s, t in zip(row.scores, row.tokens, strict=True)]
        np.testing.assert_allclose(np.asarray(out.logprobs)[index, :length], expected, atol=2e-4)
        # The cache has the ids of all tokens, and the keys and values of all but the last.
        assert int(out.cache.count[index]) == len(row.prompt) + length
        assert np.asarray(out.cache.tokens)[index, : int(out.cache.count[index])].tolist() == row.prompt + row.tokens
        assert int(out.cache.kv.total_length[index]) == len(row.prompt) + length - 1


@pytest.fixture(scope="module")
def alone():
    return [PlainRow(number, row_key(number)).run() for number in range(len(PROMPTS))]


def test_reference_rows_end_for_different_reasons(alone):
    assert len({row.reason for row in alone}) >= 3
    assert len({len(row.tokens) for row in alone}) >= 3


@pytest.mark.slow
def test_sampling_matches_the_reference(alone):
    check(run(MODES["sample"]), alone)


ASSISTED = MODES["assisted_generation"]
DRAFTS = {
    # The model drafts without the hook, so its drafts are often wrong.
    "the model": {"assistant": (PARAMS, GenerationConfig(model=MODEL, num_assistant_tokens=2))},
    "another": {"assistant": (random_params(MODEL, seed=1), GenerationConfig(model=MODEL))},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("name", slow("the model", "another", "lookup"))
def test_assisted_generation_matches_the_reference(alone, name):
    out = run(ASSISTED, **DRAFTS[name])
    check(out, alone)
    accepted, drafted = np.asarray(out.accepted), np.asarray(out.drafted)
    assert accepted.sum() < drafted.sum()
    assert accepted.sum() > 0 or name != "the model"
    assert (accepted < np.asarray(out.lengths)).all()


PARENTS = [[0, 0, 1], [2, 1, 0], [0, 1, 2], [1, 1, 1]]


@pytest.mark.slow
def test_reordered_rows_match_the_reference():
    rows = [PlainRow(prompt, row_key(prompt, sequence)) for prompt in range(len(PROMPTS)) for sequence in range(3)]
    for row in rows:
        row.advance()
    while any(row.reason == StopReason.NONE for row in rows):
        parents = PARENTS[max(len(row.tokens) for row in rows) % len(PARENTS)]
        for row in rows:
            row.advance()
        rows = [copy.copy(rows[first + parent]) for first in range(0, len(rows), 3) for parent in parents]
        for row in rows:
            row.tokens, row.scores = list(row.tokens), list(row.scores)
    check(run(Shuffle(PARENTS), copies=3), rows)


@pytest.mark.parametrize("slots", slow(1, 2, 4))
def test_refilled_rows_match_the_reference(alone, slots):
    check(run(Refill(slots)), alone)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Shuffle([[1, 0]]), Refill(2), ASSISTED], ids=["shuffle", "refill", "assisted"])
def test_modes_satisfy_their_contracts_with_guidance(mode):
    """Each row has two streams, in the cache and in the hook's state."""
    copies = 2 if isinstance(mode, Shuffle) else 1
    options = {"guidance_scale": 1.5}
    draft = DRAFTS["the model"] if mode is ASSISTED else {}
    plain, other = run(MODES["sample"], copies, **options), run(mode, copies, **options, **draft)
    rows = np.arange(plain.lengths.shape[0])
    if copies == 2 and (int(plain.lengths.max()) - 1) % 2:  # an odd number of swaps
        rows = rows.reshape(-1, 2)[:, ::-1].reshape(-1)
    assert len({tuple(row) for row in np.asarray(plain.sequences).tolist()}) == len(rows)  # no two rows are equal
    np.testing.assert_array_equal(np.asarray(plain.sequences)[rows], other.sequences)
    np.testing.assert_allclose(np.asarray(plain.scores)[:, rows], other.scores, atol=1e-4)


CROPPING = {
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "contrastive_search": {"penalty_alpha": 0.6, "top_k": 3},
    "beam_search": {"num_beams": 2},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "group_beam_search": {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained_beam_search": {"num_beams": 2, "force_words_ids": [[5]]},
}


def test_modes_that_remove_tokens_need_a_state_that_allows_it(monkeypatch):
    """A state that merges all tokens is refused by these modes and by assisted generation, before anything runs."""
    monkeypatch.setattr(KeysValues, "can_crop", False)
    cfg = GenerationConfig(model=MODEL, max_new_tokens=4, pad_token_id=0)
    for name, options in CROPPING.items():
        with pytest.raises(ConfigError, match=f"{name} removes tokens.* choose one of greedy_search, sample, dola"):
            generate(PARAMS, PROMPTS[:1], KEY if options.get("do_sample") else None, cfg.replace(**options))
    with pytest.raises(ConfigError, match="assisted_generation removes tokens"):
        generate(PARAMS, PROMPTS[:1], None, cfg, assistant=(PARAMS, cfg))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "num_return_sequences": 2},
        {"dola_layers": "high", "repetition_penalty": 1.2},
        {"slots": 1},
    ],
    ids=str,
)
def test_the_other_modes_never_remove_tokens(options, monkeypatch):
    monkeypatch.setattr(KeysValues, "can_crop", False)
    cfg = GenerationConfig(model=MODEL, max_new_tokens=4, pad_token_id=0, **options)
    assert not mode_of(cfg).crops
    assert generate(PARAMS, [PROMPTS[0]] * 2, KEY if cfg.do_sample else None, cfg).lengths.min() > 0
