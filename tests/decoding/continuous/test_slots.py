"""Continuous batching: a sequence generates the same tokens in slots as in a batch of all sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import (
    ConfigError,
    GenerationConfig,
    History,
    InputError,
    StepHook,
    StopReason,
    TokenAutomaton,
    generate,
    prefill,
)
from tests.support.byte_model import MODEL, PARAMS
from tests.support.models import model_config, random_params, slow
from tests.support.tokenizers import byte_level

PROMPTS, WIDTH = 12, 9
RNG = np.random.default_rng(0)
IDS = RNG.integers(40, 120, (PROMPTS, WIDTH), np.int32)
MASK = np.arange(WIDTH)[None, :] >= RNG.integers(0, 7, PROMPTS)[:, None]
BUDGET = RNG.integers(1, 14, PROMPTS)
CFG = GenerationConfig(
    model=MODEL, max_new_tokens=BUDGET, pad_token_id=0, eos_token_id=[1, 2], output_logprobs="scores", top_logprobs=2
)
# top_k is off because XLA may compute the scores twice, and with the flags of these tests the copies are not always
# bit-identical. The log-probabilities could then leave out the last token that top_k keeps.
SAMPLING = {"do_sample": True, "temperature": np.linspace(0.7, 1.5, PROMPTS), "top_k": 0}
KEY = jax.random.key(3)
SEVERAL = {"slots": 5, "prefill_chunk_size": 4}
"""Fewer slots than prompts. The prompts are read in up to three chunks."""


def call(cfg: GenerationConfig, ids=IDS, mask=MASK, **arguments):
    key = arguments.pop("key", KEY if cfg.on("do_sample") else None)
    return generate(PARAMS, ids, key, cfg, attention_mask=mask, **arguments)


def assert_equal(out, expected) -> None:
    for name in ("sequences", "attention_mask", "lengths", "stop_reasons", "top_tokens"):
        np.testing.assert_array_equal(getattr(out, name), getattr(expected, name), err_msg=name)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(out, name), getattr(expected, name), atol=5e-5, err_msg=name)


def check(cfg: GenerationConfig, slots=SEVERAL, **arguments) -> None:
    """Check that slots give the same results as one batch of all rows."""
    expected = call(cfg, **arguments)
    assert len(set(np.asarray(expected.lengths).tolist())) > 2, "all rows end together"
    assert_equal(call(cfg.replace(**slots), **arguments), expected)


@pytest.mark.parametrize("slots", [{"slots": 4}, *slow({"slots": 1}, {"slots": 40}, SEVERAL)])
def test_greedy_search_in_slots(slots):
    check(CFG, slots)


@pytest.mark.slow
def test_several_sequences_per_prompt():
    check(CFG.replace(**SAMPLING, num_return_sequences=3))


@pytest.mark.slow
def test_sampled_and_greedy_rows_together():
    check(CFG.replace(**SAMPLING | {"do_sample": np.arange(PROMPTS) % 3 > 0}, top_p=0.9))


@pytest.mark.slow
def test_grammars_stop_strings_and_penalties_per_prompt():
    tok = byte_level()
    patterns = ["[a-c]+", "[d-f]+x", "(yes|no)", "[0-9]{2,4}", "z+", "[A-Z]{1,3}"] * 2
    automaton = TokenAutomaton.stack([TokenAutomaton.from_regex(p, tok, vocab_size=MODEL.vocab_size) for p in patterns])
    cfg = CFG.replace(**SAMPLING, repetition_penalty=1.3, min_new_tokens=2)
    cfg = cfg.replace(stop_strings=[["b", "cc"], None, ["e"], ["33", "1"], ["zz"], ["Q", "AB", "Z"]] * 2)
    cfg = cfg.replace(max_new_tokens=BUDGET + 6)
    check(cfg, tokenizer=tok, prefix_allowed_tokens_fn=automaton)


class Sums(StepHook):
    """A hook that adds a multiple of its number of calls to the logits, and scales the embeddings."""

    def init(self, history: History):
        return jnp.zeros(history.length.shape, jnp.float32)

    def before(self, state, history, inputs):
        return dataclasses.replace(inputs, inputs_embeds=inputs.inputs_embeds * 1.1), state + 1

    def after(self, state, history, output):
        return dataclasses.replace(output, logits=output.logits + 0.1 * state[:, None]), state + 1


@pytest.mark.slow
@pytest.mark.parametrize("scale", [np.linspace(1.1, 1.6, PROMPTS), *slow(None)], ids=["guided", "plain"])
def test_hook_processor_and_criterion(scale):
    def processor(history: History, scores):
        return scores - 0.01 * history.length[:, None].astype(jnp.float32) * jnp.sin(jnp.arange(320.0))[None, :]

    def criterion(history: History, scores):
        return history.last(1)[:, 0] > 300

    arguments = {"hook": Sums(), "logits_processor": [processor], "stopping_criteria": [criterion]}
    check(CFG.replace(**SAMPLING, guidance_scale=scale), **arguments)


@pytest.mark.slow
def test_negative_prompts_of_different_lengths():
    negative = np.random.default_rng(1).integers(40, 120, (PROMPTS, 14), np.int32)
    mask = np.arange(14)[None, :] >= np.random.default_rng(2).integers(0, 14, PROMPTS)[:, None]
    arguments = {"negative_prompt_ids": negative, "negative_prompt_attention_mask": mask}
    check(CFG.replace(**SAMPLING, guidance_scale=1.4), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, *slow({"guidance_scale": 1.3})], ids=["plain", "guided"])
@pytest.mark.parametrize("slots", [SEVERAL, *slow({"slots": 1})], ids=["several", "one"])
def test_all_prompts_share_a_prefix(options, slots):
    shared = prefill(PARAMS, IDS[:1, :5], CFG)
    check(CFG.replace(**SAMPLING, repetition_penalty=1.2, **options), slots, cache=shared)


@pytest.mark.slow
def test_a_generated_prefix_whose_last_token_is_pending():
    first = generate(PARAMS, IDS[:1], None, CFG.replace(max_new_tokens=4, eos_token_id=None))
    check(CFG.replace(**SAMPLING), cache=first.cache)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"cache_dtype": "int8"}, {"dola_layers": [0], "repetition_penalty": 1.2}])
def test_other_features(options):
    check(CFG.replace(**SAMPLING, **options), {"slots": 5})


@pytest.mark.slow
def test_prompts_as_embeddings():
    embeds = np.asarray(PARAMS["model"]["embed_tokens"]["weight"])[IDS]
    check(CFG, ids=None, inputs_embeds=embeds)


@pytest.mark.slow
def test_inside_the_callers_jit():
    cfg = CFG.replace(**SAMPLING, max_length=32)
    run = jax.jit(lambda params, cfg: generate(params, IDS, KEY, cfg, attention_mask=MASK))
    assert_equal(run(PARAMS, cfg.replace(**SEVERAL)), run(PARAMS, cfg))


@pytest.mark.slow
def test_failing_prompt_does_not_affect_others():
    ids = IDS.copy()
    ids[3, -1] = 999
    run = jax.jit(lambda ids, cfg: generate(PARAMS, ids, None, cfg, attention_mask=MASK))
    cfg = CFG.replace(max_new_tokens=10)
    assert_equal(run(ids, cfg.replace(**SEVERAL)), run(ids, cfg))


class Streamer:
    """A streamer that collects the tokens of each row."""

    def __init__(self):
        self.rows = {row: [] for row in range(PROMPTS)}
        self.ended = []

    def put_row(self, row, ids, ended):
        self.rows[row] += ids.tolist()
        self.ended += [row] * ended

    def end(self):
        pass


@pytest.mark.slow
def test_row_streamer_and_time_limit():
    streamer = Streamer()
    out = call(CFG.replace(**SEVERAL, max_time=600), streamer=streamer)
    assert_equal(out, call(CFG))
    generated = [np.asarray(row)[WIDTH:][:n].tolist() for row, n in zip(out.sequences, out.lengths, strict=True)]
    assert [streamer.rows[row] for row in range(PROMPTS)] == generated
    assert sorted(streamer.ended) == [*range(PROMPTS)]
    assert streamer.ended != sorted(streamer.ended), "rows end in the order of the prompts"


def test_time_limit_may_end_a_run_before_prompts_are_read():
    out = call(CFG.replace(**SEVERAL, max_time=1e-9))
    assert StopReason.TIME in np.asarray(out.stop_reasons)
    assert np.asarray(out.lengths).min() == 0


# --- Results do not depend on other prompts ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many():
    """Return a function that runs some of 64 prompts in slots, and returns tokens and the bits of log-probabilities."""
    model = model_config(vocab_size=320, hidden_size=32, torch_dtype="bfloat16")
    params, rng = random_params(model, scale=0.3), np.random.default_rng(4)
    ids, keys = rng.integers(40, 120, (64, 20), np.int32), jax.random.split(KEY, 64)
    mask = np.arange(20)[None, :] >= rng.integers(0, 19, 64)[:, None]
    budget = rng.integers(1, 40, 64)
    cfg = GenerationConfig(
        model=model, do_sample=True, top_p=0.95, pad_token_id=0, output_logprobs="scores", prefill_chunk_size=8
    )

    def run(prompts: np.ndarray, slots: int):
        limited = cfg.replace(slots=slots, max_new_tokens=np.append(budget[prompts], 40))
        prompts = np.append(prompts, 0)  # an extra prompt with a budget of 40 keeps the capacity the same
        out = generate(params, ids[prompts], keys[prompts], limited, attention_mask=mask[prompts])
        return np.asarray(out.sequences)[:-1], np.asarray(out.logprobs)[:-1].view(np.uint32)

    return run


@pytest.mark.parametrize("slots", slow(1, 3, 8, 16))
def test_neighbors_order_and_slots_change_no_bit(many, slots):
    tokens, bits = many(np.arange(64), slots)
    for prompts in (np.random.default_rng(5).permutation(64), np.array([40, 7, 63, 8, 1])):
        for whole, part in zip((tokens, bits), many(prompts, slots), strict=True):
            np.testing.assert_array_equal(part, whole[prompts])


# --- Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_does_not_grow_with_the_prompts():
    def temporaries(prompts: int) -> int:
        cfg = CFG.replace(max_new_tokens=64, slots=2)
        run = jax.jit(lambda ids: generate(PARAMS, ids, None, cfg).lengths)
        return run.lower(np.ones((prompts, 16), np.int32)).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(4), temporaries(132)
    cache = 2 * MODEL.num_hidden_layers * (16 + 64) * MODEL.num_key_value_heads * MODEL.head_dim * 4
    results = 64 * 4 * 6  # per token: its id and log-probability, and the same for the top two
    assert many - few < 128 * 4 * results
    assert many - few < 128 * cache / 2


# --- Refused inputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_beams": 2}, "slots=5 works with greedy search, sampling and DoLa, not with beam_search"),
        ({"prompt_lookup_num_tokens": 2}, "not with prompt_lookup"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "not with contrastive_search"),
        ({"output_scores": True}, "output_scores is not offered with slots=5"),
        ({"output_hidden_states": True}, "output_hidden_states is not offered with slots=5"),
    ],
)
def test_unsupported_modes_and_records_are_refused(options, error):
    with pytest.raises(ConfigError, match=error):
        call(CFG.replace(slots=5, output_logprobs=None, top_logprobs=0, **options))


def test_unsupported_inputs_are_refused():
    cfg = CFG.replace(slots=5)
    with pytest.raises(ConfigError, match=r"prefix_allowed_tokens_fn .* use a TokenAutomaton"):
        call(cfg, prefix_allowed_tokens_fn=lambda row, ids: [5])
    with pytest.raises(InputError, match="the cache must have one row"):
        call(cfg, cache=prefill(PARAMS, IDS, CFG))
    dynamic = model_config(vocab_size=320, hidden_size=32, rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(ConfigError, match="slots is not offered with dynamic RoPE"):
        call(cfg.replace(model=dynamic))
    with pytest.raises(ConfigError, match="slots must be >= 1"):
        CFG.replace(slots=0)


def test_output_has_no_cache():
    assert call(CFG.replace(slots=4)).cache is None
