"""Beam search, checked against plain Python and by its properties."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import (
    GenerationConfig,
    InputError,
    StopReason,
    TextStreamer,
    TokenAutomaton,
    compute_transition_scores,
    generate,
)
from jaxgen.core.decoding.sample import draw_distinct
from tests.support.compilations import compiled_by_other_values
from tests.support.model_of_61_tokens import IDS, MASK, MODEL, PARAMS, PROMPTS, TABLE
from tests.support.models import generated, last_logits, left_pad, model_config, random_params, slow
from tests.support.tokenizers import byte_level

NEW = 7
CFG = GenerationConfig(model=MODEL, max_new_tokens=NEW, pad_token_id=0, num_beams=3, num_return_sequences=3)


class PlainSearch:
    """The reference: beam search of one prompt with lists. The model reads each beam in full, without a cache."""

    def __init__(self, prompt, cfg, transform=None):
        self.prompt, self.cfg, self.count = prompt, cfg, cfg.num_beams
        self.transform = transform or (lambda tokens, scores: scores)
        eos = cfg.eos_token_id
        self.eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        self.beams = [(0.0 if place == 0 else -1e9, [], []) for place in range(self.count)]
        self.ended, self.complete = [], False
        while not self.complete and len(self.beams[0][1]) < cfg.max_new_tokens:
            self.step()
        if not self.complete:
            self.close()

    def close(self):
        for beam in self.beams:
            self.add(*beam)

    def add(self, total, tokens, origins):
        self.ended.append((total / len(tokens) ** self.cfg.length_penalty, tokens, origins))
        self.ended = sorted(self.ended, key=lambda entry: -entry[0])[: self.count]

    def candidates(self):
        candidates = []
        for place, (total, tokens, origins) in enumerate(self.beams):
            logits = last_logits(MODEL, PARAMS, TABLE[[*self.prompt, *tokens]])
            scores = np.asarray(self.transform(tokens, jax.nn.log_softmax(logits)))
            candidates += [(total + s, [*tokens, t], [*origins, place]) for t, s in enumerate(scores)]
        return sorted(candidates, key=lambda entry: -entry[0])

    def step(self):
        candidates = self.candidates()[: (1 + max(1, len(self.eos))) * self.count]
        length = len(self.beams[0][1]) + 1
        for rank, candidate in enumerate(candidates):
            if candidate[1][-1] in self.eos and rank < self.count:
                self.add(*candidate)
        self.beams = [candidate for candidate in candidates if candidate[1][-1] not in self.eos][: self.count]
        self.check_complete(candidates[0][0], length)

    def check_complete(self, best, length):
        penalty, stopping = self.cfg.length_penalty, self.cfg.early_stopping
        if len(self.ended) == self.count:
            longest = self.cfg.max_new_tokens if stopping == "never" and penalty > 0 else length
            self.complete = stopping is True or self.ended[-1][0] >= best / longest**penalty


def check(out, searches, copies=3):
    for number, search in enumerate(searches):
        for place, (score, tokens, origins) in enumerate(search.ended[:copies]):
            row = number * copies + place
            assert generated(out, row) == tokens
            np.testing.assert_allclose(out.sequences_scores[row], score, rtol=1e-4)
            first = number * search.count
            indices = [first + origin for origin in origins] + [-1] * (NEW - len(tokens))
            assert np.asarray(out.beam_indices)[row].tolist() == indices


SETTINGS = {
    "plain": {},
    "eos": {"eos_token_id": [7, 20, 33, 48, 50], "early_stopping": False},
    "early": {"eos_token_id": [7, 20, 33, 48, 50], "early_stopping": True, "length_penalty": 2.0},
    "never": {"eos_token_id": [7, 20, 33, 48, 50], "early_stopping": "never", "length_penalty": 0.5},
    "short": {"eos_token_id": [7, 20, 33, 48, 50], "early_stopping": "never", "length_penalty": -1.0},
}


@pytest.mark.parametrize("name", ["plain", *slow("eos", "early", "never", "short")])
def test_beam_search_matches_the_reference(name):
    cfg = CFG.replace(**SETTINGS[name])
    out = generate(PARAMS, IDS, None, cfg, attention_mask=MASK)
    check(out, [PlainSearch(prompt, cfg) for prompt in PROMPTS])


def run(cfg, prompts=PROMPTS, width=None, **more):
    ids, mask = left_pad(prompts, width)
    return generate(PARAMS, ids, None, cfg, attention_mask=mask, **more)


def rows_of(out):
    return [(generated(out, row), round(float(score), 4)) for row, score in enumerate(out.sequences_scores)]


EOS = CFG.replace(**SETTINGS["eos"])


@pytest.mark.slow
def test_row_does_not_depend_on_batch_bucket_or_jit():
    together = rows_of(run(EOS, width=40))
    alone = [row for prompt in PROMPTS for row in rows_of(run(EOS, [prompt]))]
    traced = jax.jit(lambda params: generate(params, IDS, None, EOS, attention_mask=MASK))(PARAMS)
    assert together == alone == rows_of(traced)
    assert len({len(tokens) for tokens, _ in together}) > 1


@pytest.mark.slow
def test_transition_scores_sum_to_the_sequences_scores():
    cfg = EOS.replace(output_scores=True, repetition_penalty=1.3, num_return_sequences=2)
    out = run(cfg)
    assert out.scores.shape == (NEW, 9, 61)
    scores = compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    np.testing.assert_allclose(
        np.asarray(scores).sum(axis=1) / np.asarray(out.lengths), out.sequences_scores, rtol=1e-4
    )


@pytest.mark.slow
def test_budgets_and_penalties_per_prompt():
    cfg = EOS.replace(max_new_tokens=[7, 3, 5], length_penalty=[1.0, 0.0, 2.0], repetition_penalty=[1.0, 1.5, 2.0])
    alone = [
        row
        for place, prompt in enumerate(PROMPTS)
        for row in rows_of(
            run(
                EOS.replace(
                    max_new_tokens=[7, 3, 5][place],
                    length_penalty=[1.0, 0.0, 2.0][place],
                    repetition_penalty=[1.0, 1.5, 2.0][place],
                ),
                [prompt],
            )
        )
    ]
    assert rows_of(run(cfg)) == alone


@pytest.mark.slow
def test_a_stop_string_ends_a_single_beam():
    tokenizer = byte_level()
    model = model_config(vocab_size=len(tokenizer))
    params = random_params(model)
    cfg = GenerationConfig(model=model, max_new_tokens=6, num_beams=4, num_return_sequences=4, pad_token_id=0)
    letters = set(tokenizer.encode("abcdefghij"))
    cfg = cfg.replace(suppress_tokens=[token for token in range(len(tokenizer)) if token not in letters])
    ids = tokenizer.batch(["one"]).ids
    free = generate(params, ids, None, cfg)
    stop = tokenizer.decode(generated(free, 0)[2:4])
    out = generate(params, ids, None, cfg.replace(stop_strings=stop), tokenizer=tokenizer)
    for row in range(4):
        text, ended = tokenizer.decode(generated(out, row)), int(out.stop_reasons[row]) == StopReason.STOP_STRING
        assert (stop in text) == ended
        assert stop not in text[:-1]
    assert StopReason.STOP_STRING in out.stop_reasons.tolist()


@pytest.mark.slow
def test_a_criterion_ends_a_single_beam():
    def criterion(history, scores):
        return (history.last(1)[:, 0] % 7 == 3) & (history.step > 1)

    out = run(CFG, stopping_criteria=[criterion])
    for row in range(9):
        tokens = generated(out, row)
        hits = [token % 7 == 3 and step > 0 for step, token in enumerate(tokens)]
        assert not any(hits[:-1])
        assert hits[-1] == (int(out.stop_reasons[row]) == StopReason.CRITERION)
    assert StopReason.CRITERION in out.stop_reasons.tolist()


@pytest.mark.slow
def test_every_beam_follows_the_grammar():
    tokenizer = byte_level()
    model = model_config(vocab_size=len(tokenizer))
    params = random_params(model)
    automaton = TokenAutomaton.from_regex("(ab|ba){1,3}c", tokenizer, vocab_size=len(tokenizer))
    cfg = GenerationConfig(model=model, max_new_tokens=8, num_beams=4, num_return_sequences=4, pad_token_id=0)
    cfg = cfg.replace(eos_token_id=tokenizer.eos_token_id, length_penalty=0.0)
    out = generate(params, tokenizer.batch(["x"]).ids, None, cfg, prefix_allowed_tokens_fn=automaton)
    texts = [tokenizer.decode(generated(out, row)) for row in range(4)]
    assert len(set(texts)) == 4
    for text in texts:
        assert text.endswith("c"), text
        assert set(text[:-1:2] + text[1:-1:2]) <= {"a", "b"}


@pytest.mark.slow
def test_a_prefix_function_gets_the_number_of_the_prompt():
    allowed = {0: [10, 11, 12], 1: [20, 21, 22], 2: [30, 31, 32]}
    out = run(CFG, prefix_allowed_tokens_fn=lambda prompt, ids: allowed[prompt])
    for row in range(9):
        assert set(generated(out, row)) <= set(allowed[row // 3])


@pytest.mark.slow
def test_guided_search_matches_the_reference_with_guided_scores():
    cfg = EOS.replace(guidance_scale=1.6)
    out = run(cfg)
    searches = []
    for prompt in PROMPTS:

        def guided(tokens, scores, prompt=prompt):
            other = jax.nn.log_softmax(last_logits(MODEL, PARAMS, TABLE[[prompt[-1], *tokens]]))
            return 1.6 * (scores - other) + other

        searches.append(PlainSearch(prompt, cfg, guided))
    check(out, searches)


@pytest.mark.slow
def test_the_cache_of_each_result_continues_it():
    first = run(EOS.replace(early_stopping=True))
    ids = [[token] for token in (40, 41, 42) for _ in range(3)]
    greedy = GenerationConfig(model=MODEL, max_new_tokens=4, pad_token_id=0)
    on = generate(PARAMS, ids, None, greedy, cache=first.cache)
    whole = [PROMPTS[row // 3] + generated(first, row) + ids[row] for row in range(9)]
    again = generate(PARAMS, *left_pad(whole)[:1], None, greedy, attention_mask=left_pad(whole)[1])
    assert [generated(on, row) for row in range(9)] == [generated(again, row) for row in range(9)]


@pytest.mark.slow
def test_logprobs_follow_their_beam():
    out = run(EOS.replace(output_logprobs="logits", top_logprobs=2))
    np.testing.assert_allclose(
        np.asarray(out.logprobs).sum(axis=1) / np.asarray(out.lengths), out.sequences_scores, rtol=1e-4
    )
    assert out.top_tokens.shape == (9, NEW, 2)
    best = np.asarray(out.top_logprobs)[:, :, 0]
    assert (np.asarray(out.logprobs) <= best + 1e-6).all()


@pytest.mark.slow
def test_search_ends_when_no_token_is_possible():
    banned = list(range(61))
    out = jax.jit(lambda params: generate(params, IDS, None, CFG.replace(suppress_tokens=[banned, [1], [2]])))(PARAMS)
    assert out.stop_reasons.tolist() == [StopReason.NO_TOKEN] * 3 + [StopReason.LENGTH] * 6


def test_a_streamer_is_refused():
    with pytest.raises(InputError, match="a streamer cannot follow beams, got num_beams=3"):
        run(CFG, streamer=TextStreamer(byte_level()))


@pytest.mark.slow
def test_distinct_draws_follow_the_distribution():
    scores = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
    keys = jax.random.split(jax.random.key(0), 20_000)
    rows = jnp.broadcast_to(scores, (len(keys), 1, 4))
    values, draws = map(np.asarray, draw_distinct(keys, rows, 3, jnp.full(len(keys), 2), None))
    assert np.isneginf(values[:, 2]).all()  # only two are drawn
    probs = np.exp(np.asarray(scores))
    for first in range(4):
        for second in range(4):
            expected = 0.0 if first == second else probs[first] * probs[second] / (1 - probs[first])
            seen = np.mean((draws[:, 0] == first) & (draws[:, 1] == second))
            assert abs(seen - expected) < 4 * (expected / 20_000) ** 0.5 + 1e-9


def test_impossible_candidates_are_drawn_last():
    scores = jnp.asarray([[[-jnp.inf, 0.0], [-jnp.inf, 1.0]]])
    values, places = draw_distinct(jax.random.split(jax.random.key(1), 1), scores, 4, jnp.asarray([4]), None)
    assert sorted(places[0, :2].tolist()) == [1, 3]
    assert sorted(values[0].tolist()) == [-jnp.inf, -jnp.inf, 0.0, 1.0]


@pytest.mark.slow
def test_sampled_beams_depend_only_on_the_key_of_their_prompt():
    cfg = EOS.replace(do_sample=True, top_k=20, temperature=1.5)
    keys = jax.random.split(jax.random.key(3), 3)
    together = generate(PARAMS, IDS, keys, cfg, attention_mask=MASK)
    for number, prompt in enumerate(PROMPTS):
        alone = generate(PARAMS, [prompt], keys[number : number + 1], cfg)
        assert [generated(alone, row) for row in range(3)] == [
            generated(together, number * 3 + row) for row in range(3)
        ]
    other = generate(PARAMS, IDS, jax.random.split(jax.random.key(4), 3), cfg, attention_mask=MASK)
    assert rows_of(other) != rows_of(together)


@pytest.mark.slow
def test_groups_choose_different_tokens():
    cfg = CFG.replace(num_beam_groups=3, diversity_penalty=100.0)
    out = run(cfg)
    for prompt in range(3):
        columns = np.asarray(out.sequences)[3 * prompt : 3 * prompt + 3, 7:]
        assert all(len(set(column)) == 3 for column in columns.T)


@pytest.mark.slow
def test_group_transition_scores_sum_to_the_sequences_scores():
    cfg = EOS.replace(num_beams=4, num_beam_groups=2, diversity_penalty=0.7, output_scores=True)
    out = run(cfg)
    scores = compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    np.testing.assert_allclose(
        np.asarray(scores).sum(axis=1) / np.asarray(out.lengths), out.sequences_scores, rtol=1e-4
    )


@pytest.mark.slow
def test_new_values_compile_nothing():
    assert compiled_by_other_values(run, CFG, length_penalty=lambda rng: float(rng.uniform(0.1, 0.9))) == 0


@pytest.mark.slow
def test_numbers_at_their_bounds():
    """Without eos ids, all beams have the same length, so the length penalty does not change their order."""
    largest = float(np.finfo(np.float32).max)
    penalties = [1e-45, 100.0, -100.0, largest, -largest]
    prompts = [PROMPTS[0]] * len(penalties)
    usual = [tokens for tokens, _ in rows_of(run(CFG, prompts[:1]))]
    out = run(CFG.replace(length_penalty=penalties), prompts)
    assert np.isfinite(out.sequences_scores).all()
    assert [tokens for tokens, _ in rows_of(out)] == usual * len(penalties)
    ids, mask = left_pad(prompts)
    for name in ("repetition_penalty", "temperature"):
        fields = {name: [1e-45, 1e-38, 1e-30, 3.4e38, largest], "do_sample": name == "temperature", "top_k": 0}
        key = jax.random.key(0) if name == "temperature" else None
        out = generate(PARAMS, ids, key, CFG.replace(**fields), attention_mask=mask)
        assert np.isfinite(out.sequences_scores).all()
        assert np.all(np.asarray(out.stop_reasons) == StopReason.LENGTH)


@pytest.mark.slow
def test_beam_sampling_draws_without_replacement():
    """One step draws four distinct tokens and returns the best two. Compare 2,000 results with the probabilities."""
    model = model_config(vocab_size=9)
    params, prompts = random_params(model), 2000
    cfg = CFG.replace(model=model, max_new_tokens=1, num_beams=2, num_return_sequences=2)
    cfg = cfg.replace(do_sample=True, top_k=0, temperature=6.0)
    out = generate(params, [[3]] * prompts, jax.random.key(5), cfg)
    logits = last_logits(model, params, params["model"]["embed_tokens"]["weight"][jnp.asarray([3])])
    probs = np.asarray(jax.nn.softmax(logits / 6.0))
    expected = np.zeros((9, 9))
    for drawn in itertools.permutations(range(9), 4):
        left = 1 - np.concatenate([[0], np.cumsum(probs[list(drawn[:-1])])])
        best, second, *_ = sorted(drawn, key=lambda token: -probs[token])
        expected[best, second] += prompts * np.prod(probs[list(drawn)] / left)
    counts = np.zeros((9, 9))
    np.add.at(counts, tuple(np.asarray(out.sequences)[:, 1].reshape(-1, 2).T), 1)
    likely = expected > 5
    statistic = np.sum((counts - expected)[likely] ** 2 / expected[likely])
    assert likely.sum() > 8
    assert counts[~likely].sum() <= 2 * expected[~likely].sum() + 10
    assert statistic < likely.sum() + 3.5 * np.sqrt(2 * likely.sum())  # fails for about one key in several thousand
