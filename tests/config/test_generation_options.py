"""Every option works, is rejected by name, or causes a warning if the mode does not read it."""

from pathlib import Path

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
    WatermarkingConfig,
    generate,
)
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.config.reference import reference
from tests.support import counting
from tests.support.models import generated, left_pad, model_config, random_params
from tests.support.tokenizers import byte_level

CFG = counting.CFG.replace(max_new_tokens=4)
PARAMS = counting.with_second_best(CFG)


def run(prompt=3, **fields):
    cfg = CFG.replace(**fields)
    ids = [prompt] if isinstance(prompt, int) else prompt
    return generate(PARAMS, None if ids is None else [ids], jax.random.key(0), cfg)


def tokens(*expected):
    """Return a check that the option changes the tokens from 4, 5, 6, 7 to `expected`."""
    return lambda out: generated(out, 0) == list(expected)


def kept(count):
    """Return a check that sampling draws from `count` tokens."""
    return lambda out: int(np.isfinite(out.scores[0, 0]).sum()) == count


BEAMS = {"num_beams": 2, "num_return_sequences": 2}
SAMPLED = {"do_sample": True, "top_k": 0, "output_scores": True}
WORKS = {
    "max_length": ({"max_new_tokens": None, "max_length": 3}, tokens(4, 5)),
    "max_new_tokens": ({"max_new_tokens": 2}, tokens(4, 5)),
    "min_length": ({"min_length": 3, "eos_token_id": 5}, tokens(4, 6, 7, 8)),
    "min_new_tokens": ({"min_new_tokens": 2, "eos_token_id": 5}, tokens(4, 6, 7, 8)),
    "max_time": ({"max_time": 0.0}, lambda out: out.stop_reasons.tolist() == [StopReason.TIME]),
    "do_sample": (
        {"do_sample": True, "temperature": 100.0, "top_k": 2, "max_new_tokens": 12},
        lambda out: set(np.diff(generated(out, 0)).tolist()) == {1, 2},
    ),
    "temperature": (SAMPLED | {"temperature": 0.5}, lambda out: bool(jnp.isclose(out.scores[0, 0, 4], 40, rtol=1e-3))),
    "top_k": (SAMPLED | {"top_k": 2}, kept(2)),
    "top_p": (SAMPLED | {"top_p": 0.5}, kept(1)),
    "min_p": (SAMPLED | {"min_p": 1e-6}, kept(2)),
    "typical_p": (SAMPLED | {"typical_p": 0.2}, kept(1)),
    "epsilon_cutoff": (SAMPLED | {"epsilon_cutoff": 1e-6}, kept(2)),
    "eta_cutoff": (SAMPLED | {"eta_cutoff": 1e-6}, kept(2)),
    "top_h": (SAMPLED | {"top_h": 0.5}, kept(1)),
    "repetition_penalty": ({"prompt": [4, 3], "repetition_penalty": 5.0}, tokens(5, 6, 7, 8)),
    "encoder_repetition_penalty": ({"prompt": [5, 3], "encoder_repetition_penalty": 5.0}, tokens(5, 6, 7, 8)),
    # Negative penalties make generated tokens more likely, so 4 is repeated. The prompt's tokens, like 9, do not count.
    "frequency_penalty": ({"prompt": [9, 3], "frequency_penalty": -30.0}, tokens(4, 4, 4, 4)),
    "presence_penalty": ({"prompt": [9, 3], "presence_penalty": -30.0}, tokens(4, 4, 4, 4)),
    "no_repeat_ngram_size": ({"prompt": [3, 4, 3], "no_repeat_ngram_size": 2}, tokens(5, 6, 7, 8)),
    "encoder_no_repeat_ngram_size": ({"prompt": [3, 4, 3], "encoder_no_repeat_ngram_size": 2}, tokens(5, 6, 7, 8)),
    "bad_words_ids": ({"bad_words_ids": [[4, 5], [8]]}, tokens(4, 6, 7, 9)),
    "renormalize_logits": (
        {"renormalize_logits": True, "output_scores": True},
        lambda out: bool(jnp.isclose(jax.nn.logsumexp(out.scores[0, 0]), 0.0, atol=1e-6)),
    ),
    "forced_bos_token_id": ({"forced_bos_token_id": 20}, tokens(20, 21, 22, 23)),
    "forced_eos_token_id": ({"forced_eos_token_id": 20}, tokens(4, 5, 6, 20)),
    "remove_invalid_values": (
        {"remove_invalid_values": True, "bad_words_ids": [[0]], "output_scores": True},
        lambda out: bool(jnp.all(jnp.isfinite(out.scores))),
    ),
    "exponential_decay_length_penalty": (
        {"exponential_decay_length_penalty": (0, 3.0), "eos_token_id": 7},
        tokens(4, 5, 7),
    ),
    "suppress_tokens": ({"suppress_tokens": [4, 7]}, tokens(5, 6, 8, 9)),
    "begin_suppress_tokens": ({"begin_suppress_tokens": [4, 6]}, tokens(5, 6, 7, 8)),
    "forced_decoder_ids": ({"forced_decoder_ids": [[2, 20]]}, tokens(4, 20, 21, 22)),
    "sequence_bias": ({"sequence_bias": {(4, 6): 15.0, (8,): -15.0}}, tokens(4, 6, 7, 9)),
    "guidance_scale": (
        # The negative prompt is the last token, here the whole prompt, so guidance only normalizes the scores.
        {"guidance_scale": 1.5, "output_scores": True},
        lambda out: bool(jnp.isclose(jax.nn.logsumexp(out.scores[0, 0]), 0.0, atol=1e-5)),
    ),
    "watermarking_config": (
        {"watermarking_config": WatermarkingConfig(bias=30.0), "output_scores": True, "output_logits": True},
        lambda out: {0.0, 30.0} == set(np.unique(out.scores[0] - out.logits[0]).tolist()),
    ),
    "num_return_sequences": (
        {"num_return_sequences": 2, "do_sample": True},
        lambda out: out.sequences.shape[0] == 2,
    ),
    "output_attentions": ({"output_attentions": True}, lambda out: out.attentions.prefill[0].shape == (1, 2, 1, 1)),
    "output_hidden_states": (
        {"output_hidden_states": True},
        lambda out: out.hidden_states.decode[1].shape == (3, 1, 64),
    ),
    "output_scores": ({"output_scores": True}, lambda out: out.scores.shape == (4, 1, 50)),
    "output_logits": ({"output_logits": True}, lambda out: out.logits.shape == (4, 1, 50)),
    "output_logprobs": ({"output_logprobs": "logits"}, lambda out: out.logprobs.shape == (1, 4)),
    "top_logprobs": (
        {"output_logprobs": "scores", "top_logprobs": 2},
        lambda out: out.top_tokens[0].tolist() == [[4, 5], [5, 6], [6, 7], [7, 8]],
    ),
    "return_dict_in_generate": ({"return_dict_in_generate": True}, tokens(4, 5, 6, 7)),
    "pad_token_id": ({"pad_token_id": 9, "eos_token_id": 5}, lambda out: out.sequences[0].tolist() == [3, 4, 5, 9, 9]),
    "bos_token_id": ({"prompt": None, "bos_token_id": 10}, tokens(11, 12, 13, 14)),
    "eos_token_id": ({"eos_token_id": [20, 5]}, tokens(4, 5)),
    "slots": ({"prompt": [1, 2, 3], "slots": 1}, lambda out: out.cache is None and tokens(4, 5, 6, 7)(out)),
    "prefill_chunk_size": ({"prompt": [1, 2, 3], "prefill_chunk_size": 2}, tokens(4, 5, 6, 7)),
    "cache_dtype": (
        {"cache_dtype": "int8"},
        lambda out: out.cache.kv.cache_dtype == "int8" and generated(out, 0) == [4, 5, 6, 7],
    ),
    "cache_implementation": ({"cache_implementation": "static"}, tokens(4, 5, 6, 7)),
    "use_cache": ({"use_cache": True}, tokens(4, 5, 6, 7)),
    "num_beams": (
        BEAMS,
        lambda out: generated(out, 0) == [4, 5, 6, 7] and -2.6 < float(out.sequences_scores[1]) < -2.4,
    ),
    "length_penalty": (BEAMS | {"length_penalty": 0.0}, lambda out: -10.1 < float(out.sequences_scores[1]) < -9.9),
    "early_stopping": (
        BEAMS | {"early_stopping": True, "eos_token_id": [4, 5]},
        lambda out: [generated(out, row) for row in range(2)] == [[4], [5]],
    ),
    "num_beam_groups": (
        BEAMS | {"num_beam_groups": 2, "diversity_penalty": 100.0},
        lambda out: all(a != b for a, b in zip(generated(out, 0), generated(out, 1), strict=True)),
    ),
    "dola_layers": (SAMPLED | {"dola_layers": "low", "repetition_penalty": 1.2}, kept(1)),
    "diversity_penalty": (
        BEAMS | {"num_beam_groups": 2, "diversity_penalty": 0.1},
        lambda out: generated(out, 0) == generated(out, 1) == [4, 5, 6, 7],
    ),
    "prompt_lookup_num_tokens": (
        {"prompt": [4, 5, 6, 7, 3], "prompt_lookup_num_tokens": 2},
        lambda out: generated(out, 0) == [4, 5, 6, 7] and (int(out.drafted[0]), int(out.accepted[0])) == (2, 2),
    ),
    # The most likely token, 4, is in the prompt, so its similarity to an earlier token is as high as possible.
    "penalty_alpha": ({"prompt": [4, 3], "penalty_alpha": 0.9, "top_k": 2}, tokens(5, 6, 7, 8)),
    "constraints": (
        {"num_beams": 2, "constraints": [PhrasalConstraint([9, 8]), DisjunctiveConstraint([[20], [30]])]},
        lambda out: "9, 8" in str(generated(out, 0)) and bool({20, 30} & set(generated(out, 0))),
    ),
    "force_words_ids": (
        {"num_beams": 4, "max_new_tokens": 6, "force_words_ids": [[20, 40]]},
        tokens(4, 5, 6, 7, 20, 40),
    ),
}
REFUSED = {
    "diversity_penalty": ({"diversity_penalty": 1.0}, ConfigError),
    "constraints": ({"constraints": [PhrasalConstraint([1])]}, ConfigError),
    "force_words_ids": ({"force_words_ids": [[1]]}, ConfigError),
    "assistant_early_exit": ({"assistant_early_exit": 2}, ConfigError),
    "assistant_lookbehind": ({"assistant_lookbehind": 2}, ConfigError),
    "target_lookbehind": ({"target_lookbehind": 2}, ConfigError),
    "is_assistant": ({"is_assistant": True}, ConfigError),
    "use_cache": ({"use_cache": False}, ConfigError),
    "cache_implementation": ({"cache_implementation": "quantized"}, ConfigError),
    "low_memory": ({"low_memory": True}, ConfigError),
    "decoder_start_token_id": ({"decoder_start_token_id": 1}, ConfigError),
    "generation_kwargs": ({"generation_kwargs": {"a": 1}}, ConfigError),
    "cache_config": ({"cache_config": {"a": 1}}, ConfigError),
    "compile_config": ({"compile_config": {"a": 1}}, ConfigError),
    "disable_compile": ({"disable_compile": True}, ConfigError),
    "max_cache_len": ({"max_cache_len": 9}, ConfigError),
    "return_legacy_cache": ({"return_legacy_cache": True}, ConfigError),
}
# Options that only modes other than greedy search read.
WARNED = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "num_beam_groups": 2,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "constant",
    "max_matching_ngram_size": 3,
    "assistant_confidence_threshold": 0.5,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "top_h": 0.5,
}


def test_tables_contain_every_option():
    elsewhere = {"stop_strings", "token_healing", "adapter", "output_routed_experts"}  # these have their own tests
    assert WORKS.keys() | REFUSED.keys() | WARNED.keys() | elsewhere == OPTIONS.keys()


def test_every_refused_option_is_refused():
    assert {option.name for option in OPTIONS.values() if option.refused} <= REFUSED.keys()


def test_reference_page_is_up_to_date():
    page = reference()
    assert all(page.count(f"\n| `{name}` |") == 1 for name in OPTIONS)
    path = Path(__file__).resolve().parents[2] / "docs" / "options.md"
    assert path.read_text() == page, "regenerate it: python -m jaxgen.core.config.reference > docs/options.md"


@pytest.mark.slow
def test_options_work_without_jit():
    with jax.disable_jit():
        assert tokens(4, 5, 6, 7)(run(**SAMPLED | {"top_k": 1}))


@pytest.mark.slow  # most cases compile their own programs
@pytest.mark.parametrize(("name", "case"), WORKS.items(), ids=WORKS)
def test_option_has_its_effect(name, case):
    fields, holds = case
    assert holds(run(**fields))


@pytest.mark.parametrize(("name", "case"), REFUSED.items(), ids=REFUSED)
def test_option_is_refused_by_name(name, case):
    fields, error = case
    with pytest.raises(error, match=name):
        run(**fields)


@pytest.mark.parametrize(("name", "value"), WARNED.items(), ids=WARNED)
def test_options_that_greedy_search_ignores_draw_a_warning(name, value):
    with pytest.warns(UserWarning, match=f"greedy_search does not read {name}={value}"):
        assert tokens(4, 5, 6, 7)(run(**{name: value}))


@pytest.mark.slow
def test_only_contrastive_search_reads_penalty_alpha():
    with pytest.warns(UserWarning, match=r"sample does not read penalty_alpha=0\.6"):
        run(penalty_alpha=0.6, do_sample=True)


def test_options_that_sampling_reads_do_not_warn():
    assert tokens(4, 5, 6, 7)(run(do_sample=True, top_k=3, temperature=0.01))


@pytest.mark.parametrize("fields", [{"low_memory": False}, {"generation_kwargs": {}}, {"is_assistant": False}])
def test_neutral_values_are_accepted(fields):
    assert tokens(4, 5, 6, 7)(run(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"suppress_tokens": 50},
        {"begin_suppress_tokens": [1, 50]},
        {"bad_words_ids": [[50]]},
        {"sequence_bias": {(50,): 1.0}},
        {"forced_bos_token_id": 50},
        {"forced_eos_token_id": [50]},
        {"forced_decoder_ids": [[1, 50]]},
        {"force_words_ids": [[1], [2, 50]], "num_beams": 2},
        {"constraints": [PhrasalConstraint([50])], "num_beams": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_ids_outside_the_vocabulary_are_refused(fields):
    with pytest.raises(ConfigError, match=f"{next(iter(fields))} contains the token 50.*0 to 49"):
        run(**fields)


def test_token_healing_needs_a_tokenizer():
    with pytest.raises(ValueError, match="token_healing compares texts: pass the tokenizer"):
        run(token_healing=True)


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="stop_strings are text: pass the tokenizer"):
        run(stop_strings="x")


def test_stop_strings_for_a_different_number_of_prompts_are_refused():
    cfg = CFG.replace(stop_strings=[["!"], None, ["#"]])
    with pytest.raises(InputError, match="stop_strings has 3 values for 1 prompts: pass one per prompt or one for all"):
        generate(PARAMS, [[3]], None, cfg, tokenizer=byte_level())


# Options with a value for each of three prompts. Most options are off for the second prompt.
PER_PROMPT = {
    "sampling": {
        "do_sample": True,
        "temperature": [0.5, 2.0, 1.0],
        "top_k": [10, 0, 30],
        "top_p": [0.9, 1.0, 0.8],
        "min_p": [0.1, 0.0, 0.01],
        "typical_p": [0.9, 1.0, 0.8],
        "epsilon_cutoff": [0.02, 0.0, 0.01],
        "eta_cutoff": [0.02, 0.0, 0.01],
        "top_h": [0.9, 1.0, 0.8],
    },
    "penalties": {
        "repetition_penalty": [1.4, 1.0, 0.7],
        "encoder_repetition_penalty": [1.4, 1.0, 0.7],
        "frequency_penalty": [0.7, 0.0, -0.5],
        "presence_penalty": [0.7, 0.0, -0.5],
        "guidance_scale": [1.4, 1.0, 0.5],
        "max_new_tokens": [6, 8, 1],
        "suppress_tokens": [list(range(40, 90)), [], [94]],
    },
    "bans": {
        "min_new_tokens": [3, 0, 1],
        "eos_token_id": [[5, 43], [], [8, 33, 9]],
        "begin_suppress_tokens": [list(range(40, 90)), [], [94]],
        "bad_words_ids": [[[41]], [[11, 18], [3]], [[94, 33]]],
        "sequence_bias": [{(41,): -9.0}, {(11, 18): -9.0, (3,): 1.0}, {(94, 33): -9.0}],
        "exponential_decay_length_penalty": ([1, 2, 3], [1.5, 2.0, 0.5]),
    },
    "forced": {
        "min_length": [6, 0, 1],
        "forced_bos_token_id": [3, 4, 5],
        "forced_eos_token_id": [[5], [], [8, 33, 9]],
        "forced_decoder_ids": [[[4, 9]], [[1, 8], [3, 7]], [[5, 6]]],
    },
}
MODEL = GenerationConfig(model=model_config(num_hidden_layers=1), max_new_tokens=8, pad_token_id=0, top_k=0)


def of_row(value, row):
    if isinstance(value, bool):
        return value
    return tuple(part[row] for part in value) if isinstance(value, tuple) else value[row : row + 1]


@pytest.mark.slow
@pytest.mark.parametrize("values", PER_PROMPT.values(), ids=PER_PROMPT)
def test_value_per_prompt_equals_running_each_prompt_alone(values):
    params = random_params(MODEL.model)
    prompts = [[5, 6, 7], [11], [20, 21, 22, 23, 24]]
    keys = jax.random.split(jax.random.key(1), 3)
    ids, mask = left_pad(prompts)
    cfg = MODEL.replace(eos_token_id=[1, 2]).replace(**values)
    together = generate(params, ids, keys, cfg, attention_mask=mask)
    plain = generate(params, ids, keys, MODEL.replace(do_sample=cfg.do_sample), attention_mask=mask)
    assert generated(together, 0) != generated(plain, 0)
    for row, prompt in enumerate(prompts):
        own = cfg.replace(**{name: of_row(value, row) for name, value in values.items()})
        alone = generate(params, [prompt], keys[row : row + 1], own)
        assert generated(together, row) == generated(alone, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for values in PER_PROMPT.values() for name, value in values.items() if name != "do_sample"],
)
def test_values_for_a_different_number_of_prompts_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} has 3 values for 1 prompts"):
        generate(PARAMS, [[1]], None, CFG.replace(**{name: value}))
