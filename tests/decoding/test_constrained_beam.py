"""Constrained beam search, checked against plain Python and by its properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import (
    ConfigError,
    DisjunctiveConstraint,
    GenerationConfig,
    InputError,
    PhrasalConstraint,
    StopReason,
    compute_transition_scores,
    generate,
    prefill,
)
from tests.decoding.test_beam import NEW, PlainSearch, check, rows_of, run
from tests.decoding.test_constraints import bank_of, follow, proposals_of
from tests.support.compilations import compiled_by_other_values
from tests.support.model_of_61_tokens import MODEL, PARAMS, PROMPTS
from tests.support.models import generated, random_params
from tests.support.tokenizers import byte_level

WORDS = [[11, 12], [[40, 41], [40, 42, 43], [3, 1]]]  # the first prompt contains [3, 1]
CFG = GenerationConfig(
    model=MODEL,
    max_new_tokens=NEW,
    pad_token_id=0,
    num_beams=3,
    num_return_sequences=3,
    eos_token_id=[7, 20, 33, 48, 50],
    force_words_ids=WORDS,
)


class ConstrainedSearch(PlainSearch):
    """The reference: constrained beam search of one prompt with lists."""

    def __init__(self, prompt, cfg, transform=None):
        self.words = [word if isinstance(word[0], list) else [word] for word in WORDS]
        super().__init__(prompt, cfg, transform)

    def meets_all(self, tokens):
        pending, current, _, _ = follow(self.words, [*self.prompt, *tokens])
        return not pending and current is None

    def close(self):
        met = [beam for beam in self.beams if self.meets_all(beam[1])]
        for beam in met if len(met) >= self.cfg.num_return_sequences else self.beams:
            self.add(*beam)

    def step(self):
        everything = self.candidates()
        totals = {(place, tokens[-1]): total for total, tokens, (*_, place) in everything}
        for candidate in everything[: self.count]:
            if candidate[1][-1] in self.eos and self.meets_all(candidate[1][:-1]):
                self.add(*candidate)
        chosen = [candidate for candidate in everything if candidate[1][-1] not in self.eos][: self.count]
        banked = [(bank_of(self.words, [*self.prompt, *tokens]), (total, tokens, origins))
                  for total, tokens, origins in chosen]  # fmt: skip
        for place, (_, tokens, origins) in enumerate(self.beams):
            for token, bank in proposals_of(self.words, [*self.prompt, *tokens]).items():
                new = [*tokens, token]
                if new not in [tokens for _, (_, tokens, _) in banked]:
                    banked.append((bank, (totals[place, token], new, [*origins, place])))
        if len(banked) > self.count:
            banked.sort(key=lambda entry: -(100 * entry[0] + entry[1][0]))
            turns = [sum(bank == other for other, _ in banked[:rank]) for rank, (bank, _) in enumerate(banked)]
            chosen = [banked[rank][1] for rank in np.argsort(turns, kind="stable")][: self.count]
        self.beams = chosen
        self.check_complete(everything[0][0], len(chosen[0][1]))


SETTINGS = {
    "heuristic": {},
    "early": {"early_stopping": True, "length_penalty": 2.0},
    "never": {"early_stopping": "never", "length_penalty": 0.5},
    "no end": {"eos_token_id": None, "num_return_sequences": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_constrained_search_matches_the_reference(name):
    cfg = CFG.replace(**SETTINGS[name])
    out = run(cfg)
    check(out, [ConstrainedSearch(prompt, cfg) for prompt in PROMPTS], cfg.num_return_sequences)


def contains(tokens, phrase):
    return any(tokens[i : i + len(phrase)] == phrase for i in range(len(tokens)))


@pytest.mark.slow
def test_best_results_contain_all_words():
    out = run(CFG.replace(num_return_sequences=1, early_stopping=True))
    for row, prompt in enumerate(PROMPTS):
        text = [*prompt, *generated(out, row)]
        assert contains(text, [11, 12])
        assert any(contains(text, phrase) for phrase in WORDS[1])


@pytest.mark.slow
def test_row_does_not_depend_on_batch_bucket_or_jit():
    together = rows_of(run(CFG, width=40))
    alone = [row for prompt in PROMPTS for row in rows_of(run(CFG, [prompt]))]
    traced = jax.jit(lambda cfg: run(cfg))(CFG)
    assert together == alone == rows_of(traced)


@pytest.mark.slow
def test_constraints_are_words():
    constraints = [PhrasalConstraint(WORDS[0]), DisjunctiveConstraint(WORDS[1])]
    expected = rows_of(run(CFG))
    assert rows_of(run(CFG.replace(constraints=constraints, force_words_ids=None))) == expected
    assert rows_of(run(CFG.replace(constraints=constraints[:1], force_words_ids=WORDS[1:]))) == expected


@pytest.mark.slow
def test_scores_include_those_of_the_beams():
    out = run(CFG.replace(output_scores=True, output_logprobs="logits"))
    totals = np.asarray(compute_transition_scores(out.sequences, out.scores, out.beam_indices))
    for row, length in enumerate(np.asarray(out.lengths)):
        np.testing.assert_allclose(totals[row, length - 1] / length, out.sequences_scores[row], rtol=1e-4)
        np.testing.assert_allclose(np.cumsum(out.logprobs[row])[:length], totals[row, :length], rtol=1e-4)


@pytest.mark.slow
def test_a_phrase_in_a_cache_counts():
    first = prefill(PARAMS, [PROMPTS[0][:3]], CFG)
    with_ids = generate(PARAMS, [[9, 8]], None, CFG.replace(num_return_sequences=1, max_new_tokens=1))
    again = generate(PARAMS, [PROMPTS[0][3:]], None, CFG, cache=first)
    assert rows_of(again) == rows_of(run(CFG, PROMPTS[:1]))
    with pytest.raises(InputError, match="force_words_ids depends on all tokens"):
        generate(PARAMS, [[9]], None, CFG, cache=with_ids.cache.kv)


@pytest.mark.slow
def test_a_phrase_may_end_the_text():
    ends = run(CFG.replace(force_words_ids=[[11, 20]], num_return_sequences=1, early_stopping=True))
    for row in range(3):
        assert generated(ends, row)[-2:] == [11, 20]
    tokenizer = byte_level()
    model = MODEL.__class__.from_hf({**MODEL.to_hf(), "vocab_size": len(tokenizer)})
    cfg = GenerationConfig(model=model, max_new_tokens=8, num_beams=3, pad_token_id=0, stop_strings="END")
    cfg = cfg.replace(early_stopping=True, force_words_ids=[tokenizer.encode("END")])
    out = generate(random_params(model), tokenizer.batch(["one"]).ids, None, cfg, tokenizer=tokenizer)
    assert tokenizer.decode(generated(out, 0)).endswith("END")
    assert out.stop_reasons.tolist() == [StopReason.STOP_STRING]


@pytest.mark.slow
def test_other_options_work_together():
    def banned(history, scores):
        return scores.at[:, 41].set(-jnp.inf)  # makes the phrase [40, 41] impossible

    cfg = CFG.replace(
        guidance_scale=1.3,
        repetition_penalty=[1.0, 1.3, 1.6],
        max_new_tokens=[7, 5, 6],
        prefill_chunk_size=2,
        top_logprobs=2,
        output_logprobs="scores",
        num_return_sequences=1,
    )
    out = run(cfg, logits_processor=[banned])
    alone = run(cfg.replace(repetition_penalty=1.3, max_new_tokens=5), [PROMPTS[1]], logits_processor=[banned])
    assert rows_of(out)[1:2] == rows_of(alone)
    assert all(41 not in generated(out, row) for row in range(3))
    assert np.isfinite(np.asarray(out.sequences_scores)).all()


@pytest.mark.slow
def test_other_words_compile_nothing():
    def words(rng):
        phrases = [[int(first), *rng.integers(51, 61, rng.integers(0, 4)).tolist()]
                   for first in rng.choice(np.arange(51, 61), 4, replace=False)]  # fmt: skip
        return [phrases[0], phrases[1:], [50]][: int(rng.integers(2, 4))]

    assert compiled_by_other_values(run, CFG, force_words_ids=words) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 1, "num_return_sequences": 1}, "force_words_ids works with beam search only, got num_beams=1"),
        ({"do_sample": True}, "set do_sample=False"),
        ({"num_beam_groups": 3, "diversity_penalty": 1.0}, "num_beam_groups=1"),
        ({"force_words_ids": [[5], [7, 8]]}, r"force_words_ids has \[7, 8\], in which tokens follow the eos token 7"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens works with greedy search and sampling"),
    ],
)
def test_unsupported_options_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        run(CFG.replace(**fields))
