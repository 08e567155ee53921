"""Assisted generation: the same result as without a draft, in fewer passes. See also test_modes.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from convert import load_hf
from jaxgen import ConfigError, GenerationConfig, InputError, Tokenizer, generate as generate_, prefill, score
from jaxgen.core.decoding.drafting import first_occurrence
from tests.support.compilations import compiled_by_other_values
from tests.support.model_of_61_tokens import MODEL, PROMPTS
from tests.support.models import (
    all_generated,
    counting_config,
    counting_params,
    left_pad,
    model_config,
    random_params,
    slow,
)
from tests.support.streamers import Collector, RowCollector

PARAMS = random_params(MODEL, scale=0.25)
SMALL = model_config(vocab_size=61, num_hidden_layers=1, hidden_size=16)
NEW = 12
CFG = GenerationConfig(model=MODEL, max_new_tokens=NEW, pad_token_id=0, eos_token_id=[7, 20])
SAMPLED = CFG.replace(do_sample=True, top_k=0, temperature=1.5)
KEY = jax.random.key(3)
# The last layer changes the hidden states little, so the first layer alone makes good drafts.
FLAT = {**PARAMS, "model": {**PARAMS["model"], "layers": {**PARAMS["model"]["layers"]}}}
FLAT["model"]["layers"]["1"] = jax.tree.map(lambda x: x * 0.3, PARAMS["model"]["layers"]["1"])
ASSISTANTS = {
    "itself": (PARAMS, GenerationConfig(model=MODEL)),
    "another": (random_params(SMALL, seed=1), GenerationConfig(model=SMALL)),
}


def generate(cfg, prompts=PROMPTS, width=None, params=PARAMS, key=KEY, **more):
    ids, mask = left_pad(prompts, width)
    return generate_(params, ids, key if cfg.do_sample else None, cfg, attention_mask=mask, **more)


@functools.cache
def plain(sampled: bool):
    return all_generated(generate(SAMPLED if sampled else CFG))


@pytest.mark.parametrize(("name", "sampled"), slow(("itself", True), ("another", True), ("another", False)))
def test_assistant_does_not_change_tokens(name, sampled):
    out = generate(SAMPLED if sampled else CFG, assistant=ASSISTANTS[name])
    assert all_generated(out) == plain(sampled)
    if name == "itself":  # all drafts are accepted
        np.testing.assert_array_equal(out.accepted, out.drafted)
        assert int(out.accepted.sum()) > NEW


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_early_exit_drafts_do_not_change_tokens(sampled):
    cfg = SAMPLED if sampled else CFG
    out = generate(cfg.replace(assistant_early_exit=1), params=FLAT)
    assert all_generated(out) == all_generated(generate(cfg, params=FLAT))
    assert int(out.accepted.sum()) > 0


def reference(row: list[int], most: int) -> int:
    """Return the end of the first earlier occurrence of the row's last tokens. The longest match wins."""
    for size in range(min(most, len(row) - 1), 0, -1):
        for end in range(size, len(row)):
            if row[end - size : end] == row[-size:]:
                return end
    return len(row)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=3, max_size=3),
    st.sampled_from([1, 2, 4, 2**31 - 1]),
)
def test_first_occurrence_matches_the_reference(rows, most):
    ids = np.full((3, 12), 2, np.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    length = jnp.asarray([len(tokens) for tokens in rows], jnp.int32)
    found = _first_occurrence(jnp.asarray(ids), length, most)
    assert found.tolist() == [reference(tokens, most) for tokens in rows]


_first_occurrence = jax.jit(first_occurrence, static_argnums=2)


@pytest.mark.slow
def test_lookup_copies_a_text_that_repeats():
    cfg = counting_config(vocab_size=8, max_new_tokens=20, prompt_lookup_num_tokens=4, pad_token_id=0)
    out = generate(cfg.replace(eos_token_id=[[], [6]]), [[*range(8), 0], [5, 6]], params=counting_params(cfg))
    assert all_generated(out) == [[n % 8 for n in range(1, 21)], [7, 0, 1, 2, 3, 4, 5, 6]]
    # In the first row, reading the prompt yields one token; then each pass accepts up to 4 drafts and adds one token.
    assert int(out.accepted[0]) == int(out.drafted[0]) == 15
    # The second row's prompt ends with its eos token. Lookup can draft only one right token: 6 after 5.
    assert int(out.accepted[1]) == 1


def test_drafts_do_not_exceed_the_budget():
    cfg = counting_config(vocab_size=8, max_new_tokens=8)
    lookup = cfg.replace(prompt_lookup_num_tokens=2**31 - 1, max_matching_ngram_size=2**31 - 1)
    out = generate(lookup, [[*range(8), 0]], params=counting_params(cfg))
    assert all_generated(out) == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert int(out.accepted[0]) == int(out.drafted[0]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_prompt_lookup_does_not_change_tokens(sampled):
    cfg = (SAMPLED if sampled else CFG).replace(prompt_lookup_num_tokens=3, max_matching_ngram_size=1)
    out = generate(cfg, [[7, 8, 9] * 4, [4, 4, 4]], key=jax.random.key(5))
    expected = generate(SAMPLED if sampled else CFG, [[7, 8, 9] * 4, [4, 4, 4]], key=jax.random.key(5))
    assert all_generated(out) == all_generated(expected)
    assert int(out.drafted.sum()) > 0


class Schedule:
    """The numbers of tokens that transformers drafts and accepts for a row. Drafts are right up to token `right`."""

    def __init__(self, budget: int, wanted: int, right: int, grows: bool):
        self.drafted = self.accepted = 0
        done, most = 1, wanted * (2 if grows else 1)
        while done < budget:
            count = min(wanted, budget - done - 1)
            accepted = max(0, min(count, right - done))
            self.drafted, self.accepted, done = self.drafted + count, self.accepted + accepted, done + accepted + 1
            if grows:
                wanted = min(wanted + 2, most) if accepted == wanted else max(wanted - 1, 1)


@pytest.mark.parametrize("schedule", slow("heuristic", "heuristic_transient", "constant"))
def test_schedules_adapt_the_number_of_drafted_tokens(schedule):
    cfg = counting_config(vocab_size=50, max_new_tokens=40)
    params = counting_params(cfg)
    # An assistant that counts correctly to 24, and predicts 0 instead of 25 or more.
    wrong = counting_params(cfg)
    table = wrong["lm_head"]["weight"]
    wrong["lm_head"]["weight"] = table.at[0].add(table[25:].sum(axis=0)).at[25:].set(0.0)
    settings = counting_config(num_assistant_tokens=3, num_assistant_tokens_schedule=schedule)
    budgets = [40, 30, 17]
    out = generate(cfg.replace(max_new_tokens=budgets), [[1], [15], [30]], params=params, assistant=(wrong, settings))
    both = list(zip([1, 15, 30], budgets, strict=True))
    assert all_generated(out) == [[(first + n) % 50 for n in range(1, budget + 1)] for first, budget in both]
    rows = [Schedule(budget, 3, 24 - first, schedule != "constant") for first, budget in both]
    assert out.drafted.tolist() == [row.drafted for row in rows]
    assert out.accepted.tolist() == [row.accepted for row in rows]


@pytest.mark.slow
def test_an_assistant_without_confidence_stops():
    cfg = CFG.replace(eos_token_id=None)
    expected = all_generated(generate(cfg))
    assistant = (PARAMS, GenerationConfig(model=MODEL, assistant_confidence_threshold=1.0))
    out = generate(cfg, assistant=assistant)
    assert all_generated(out) == expected
    assert out.drafted.tolist() == [(NEW - 1) // 2] * 3  # each pass drafts one token and chooses one more
    per_row = generate(cfg.replace(assistant_confidence_threshold=[1.0, 0.0, 1.0]), assistant=ASSISTANTS["itself"])
    assert all_generated(per_row) == expected
    assert per_row.drafted.tolist() == [5, int(per_row.accepted[1]), 5]
    assert int(per_row.drafted[1]) > 5


@pytest.mark.slow
def test_row_does_not_depend_on_batch_bucket_or_jit():
    def result(out):
        return [
            (tokens, int(d), int(a)) for tokens, d, a in zip(all_generated(out), out.drafted, out.accepted, strict=True)
        ]

    keys = jax.vmap(functools.partial(jax.random.fold_in, KEY))(jnp.arange(3))
    together = result(generate(SAMPLED, width=40, assistant=ASSISTANTS["another"]))
    alone = [
        result(generate(SAMPLED, [prompt], key=key[None], assistant=ASSISTANTS["another"]))[0]
        for prompt, key in zip(PROMPTS, keys, strict=True)
    ]
    ids, mask = left_pad(PROMPTS)

    @jax.jit
    def traced(params, assistant):
        draft = (assistant, ASSISTANTS["another"][1])
        return generate_(params, ids, KEY, SAMPLED, attention_mask=mask, assistant=draft)

    assert together == alone == result(traced(PARAMS, ASSISTANTS["another"][0]))


@pytest.mark.slow
@pytest.mark.parametrize("draft", [{"prompt_lookup_num_tokens": 2}, {"assistant_early_exit": 1}])
def test_records_are_those_of_the_tokens(draft):
    fields = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}
    cfg = CFG.replace(**fields, output_logprobs="scores", repetition_penalty=1.2)
    expected, out = generate(cfg), generate(cfg.replace(**draft))
    assert all_generated(out) == all_generated(expected)
    for name in ("scores", "logits", "logprobs", "hidden_states", "attentions"):
        for a, b in zip(jax.tree.leaves(getattr(out, name)), jax.tree.leaves(getattr(expected, name)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_continuing_is_like_generating_at_once():
    head, tail = PROMPTS[0][:4], PROMPTS[0][4:]
    cache = prefill(PARAMS, [head], CFG)
    out = generate(CFG, [tail], cache=cache, assistant=ASSISTANTS["another"])
    assert all_generated(out) == plain(False)[:1]
    more = generate(CFG, [[9]], cache=out.cache, assistant=ASSISTANTS["another"])
    whole = [*PROMPTS[0], *plain(False)[0], 9]
    assert all_generated(more) == all_generated(generate(CFG, [whole]))


@pytest.mark.slow
def test_chunked_prefill_and_other_dtypes_do_not_change_tokens():
    assert all_generated(generate(CFG.replace(prefill_chunk_size=2), assistant=ASSISTANTS["another"])) == plain(False)
    half = dataclasses.replace(SMALL, dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), ASSISTANTS["another"][0])
    assert all_generated(generate(CFG, assistant=(params, GenerationConfig(model=half)))) == plain(False)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [60, 62])
def test_the_padding_of_the_vocabulary_may_differ(vocab):
    model = dataclasses.replace(MODEL, vocab_size=200)
    small = dataclasses.replace(SMALL, vocab_size=140 + vocab)
    params, assistant = random_params(model), random_params(small, seed=1)
    cfg = GenerationConfig(model=model, max_new_tokens=NEW, pad_token_id=0, suppress_tokens=[5])
    ids = [[199, 3, 198], [4, 5, 6]]
    plain = all_generated(generate(cfg, ids, params=params))
    assert (
        all_generated(generate(cfg, ids, params=params, assistant=(assistant, GenerationConfig(model=small)))) == plain
    )


@pytest.mark.slow
def test_a_streamer_gets_tokens_when_every_row_has_them():
    cfg = counting_config(vocab_size=8, max_new_tokens=[20, 13], prompt_lookup_num_tokens=4, pad_token_id=0)
    collector = Collector()
    out = generate(cfg, [[*range(8), 0], [5, 6]], params=counting_params(cfg), streamer=collector)
    np.testing.assert_array_equal(collector.tokens, np.asarray(out.sequences)[:, out.prompt_width :])
    assert collector.ended == 1


@pytest.mark.slow
def test_row_that_is_ahead_is_streamed_immediately():
    cfg = counting_config(vocab_size=8, max_new_tokens=[20, 13], prompt_lookup_num_tokens=4, pad_token_id=0)
    streamer = RowCollector()
    out = generate(cfg, [[*range(8), 0], [5, 6]], params=counting_params(cfg), streamer=streamer)
    assert [streamer.rows[row] for row in range(2)] == all_generated(out)
    assert sorted(streamer.over) == [0, 1]


@pytest.mark.slow
def test_new_values_compile_nothing():
    run = functools.partial(generate, assistant=ASSISTANTS["another"])
    options = {
        "temperature": lambda rng: float(rng.uniform(0.5, 2)),
        "assistant_confidence_threshold": lambda rng: float(rng.uniform(0.1, 0.9)),
    }
    assert compiled_by_other_values(run, SAMPLED, **options) == 0


def test_scores_are_those_without_drafts():
    cfg = CFG.replace(prompt_lookup_num_tokens=3, repetition_penalty=1.3)
    without = CFG.replace(repetition_penalty=1.3)
    both = [score(PARAMS, [[3, 1, 4, 1, 5]], c, of="scores", prompt_width=2).logprobs for c in (cfg, without)]
    np.testing.assert_array_equal(*both)


ITSELF = {"assistant": ASSISTANTS["itself"]}
LOOKUP = {"prompt_lookup_num_tokens": 3}


@pytest.mark.parametrize(
    ("options", "more", "error", "message"),
    [
        (
            {"num_beams": 2},
            ITSELF,
            ConfigError,
            "assistant works with greedy search and sampling, not with beam_search",
        ),
        ({"num_beams": 2} | LOOKUP, {}, ConfigError, "prompt_lookup_num_tokens works with greedy search and sampling"),
        (LOOKUP, ITSELF, ConfigError, "exclude each other"),
        (LOOKUP | {"assistant_early_exit": 1}, {}, ConfigError, "exclude each other"),
        ({"assistant_early_exit": 2}, {}, ConfigError, "less than the model's 2 layers"),
        ({"do_sample": True, "num_return_sequences": 2}, ITSELF, ConfigError, "one sequence per prompt"),
        ({"do_sample": True, "num_return_sequences": 2} | LOOKUP, {}, ConfigError, "one sequence per prompt"),
        ({}, {"assistant": PARAMS}, TypeError, r"assistant must be \(params, cfg\)"),
        ({}, {"assistant": (PARAMS, GenerationConfig(model=SMALL))}, InputError, "assistant: params do not fit"),
        ({}, {"assistant": (PARAMS, GenerationConfig())}, ConfigError, "assistant: cfg.model is None"),
        ({}, {"assistant": (None, CFG)}, TypeError, "assistant: params must be the dict"),
    ],
)
def test_unsupported_options_are_refused(options, more, error, message):
    with pytest.raises(error, match=message):
        generate(CFG.replace(**options), **more)


def test_prompts_without_ids_are_refused():
    embeds = PARAMS["model"]["embed_tokens"]["weight"][jnp.asarray([[3, 1]])]
    with pytest.raises(InputError, match="a draft model reads the ids of all tokens"):
        generate_(PARAMS, None, None, CFG, inputs_embeds=embeds, **ITSELF)
    with pytest.raises(InputError, match="assistant_confidence_threshold has 2 values for 3 prompts"):
        generate(CFG.replace(assistant_confidence_threshold=[0.1, 0.2]), **ITSELF)
    other = model_config(vocab_size=100)
    with pytest.raises(InputError, match="a vocabulary of 100 tokens, but the model's has 61"):
        generate(CFG, assistant=(random_params(other), GenerationConfig(model=other)))


@pytest.mark.slow
def test_settings_that_prompt_lookup_ignores_draw_a_warning():
    with pytest.warns(UserWarning, match="^prompt_lookup does not read num_assistant_tokens=7"):
        generate(CFG.replace(**LOOKUP, num_assistant_tokens=7))
    with pytest.warns(UserWarning, match="does not read max_matching_ngram_size=3"):
        generate(CFG.replace(max_matching_ngram_size=3, assistant_early_exit=1))


@pytest.mark.slow
def test_trained_checkpoints(data):
    """A model that drafts for itself is always right, and prompt lookup finds repeated text."""
    folder = data / "checkpoints" / "stories260K-hf"
    (params, cfg), tokenizer = load_hf(folder), Tokenizer.from_pretrained(folder)
    batch = tokenizer.batch(["Once upon a time", "Lily and Tom"])
    cfg = cfg.replace(do_sample=False, max_new_tokens=60)
    expected = generate_(params, batch.ids, None, cfg, attention_mask=batch.attention_mask)
    out = generate_(params, batch.ids, None, cfg, attention_mask=batch.attention_mask, assistant=(params, cfg))
    np.testing.assert_array_equal(out.sequences, expected.sequences)
    assert out.accepted.tolist() == out.drafted.tolist()
    assert int(out.accepted.min()) > 45

    folder = data / "checkpoints" / "babyllama105-hf"
    (params, cfg), tokenizer = load_hf(folder), Tokenizer.from_pretrained(folder)
    batch = tokenizer.batch(["Max had a red ball. One day Max lost the red ball. Max had a red ball."])
    cfg = cfg.replace(do_sample=False, max_new_tokens=60)
    expected = generate_(params, batch.ids, None, cfg, attention_mask=batch.attention_mask)
    cfg = cfg.replace(prompt_lookup_num_tokens=5)
    out = generate_(params, batch.ids, None, cfg, attention_mask=batch.attention_mask)
    np.testing.assert_array_equal(out.sequences, expected.sequences)
    assert int(out.accepted[0]) > 5
