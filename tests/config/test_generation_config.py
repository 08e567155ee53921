import copy
import inspect
import json
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import ConfigError, DisjunctiveConstraint, GenerationConfig, PhrasalConstraint
from jaxgen.core.config.availability import normal_form
from jaxgen.core.config.generation_config import warn_unused
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.config.option import WARP, Option
from jaxgen.errors import JaxgenWarning
from tests.support.models import model_config

# Every field of transformers 4.41.1's GenerationConfig, with its default.
DEFAULTS_441 = {
    "max_length": 20, "max_new_tokens": None, "min_length": 0, "min_new_tokens": None, "early_stopping": False,
    "max_time": None, "stop_strings": None, "do_sample": False, "num_beams": 1, "num_beam_groups": 1,
    "penalty_alpha": None, "use_cache": True, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None,
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "diversity_penalty": 0.0, "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None,
    "force_words_ids": None, "renormalize_logits": False, "constraints": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "remove_invalid_values": False, "exponential_decay_length_penalty": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_decoder_ids": None, "sequence_bias": None,
    "guidance_scale": None, "low_memory": None, "watermarking_config": None, "num_return_sequences": 1,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False, "output_logits": None,
    "return_dict_in_generate": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "encoder_no_repeat_ngram_size": 0, "decoder_start_token_id": None, "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "heuristic", "cache_implementation": None, "prompt_lookup_num_tokens": None,
    "max_matching_ngram_size": None,
}  # fmt: skip


def test_fields_and_defaults_are_those_of_transformers():
    cfg = GenerationConfig()
    assert {name: getattr(cfg, name) for name in DEFAULTS_441} == DEFAULTS_441


def test_an_eos_token_outside_the_vocabulary_is_refused_if_the_user_sets_it():
    model, smaller = model_config(vocab_size=50), model_config(vocab_size=30)
    for ids in (50, [1, 50], [[1], [50]], np.array([1, 50]), jnp.array([50])):
        for make in (
            lambda ids: GenerationConfig(model=model, eos_token_id=ids),
            lambda ids: GenerationConfig(model=model).replace(eos_token_id=ids),
            lambda ids: GenerationConfig(eos_token_id=ids).replace(model=model),
        ):
            with pytest.raises(ConfigError, match="eos_token_id contains the token 50, which can never end a text"):
                make(ids)
    cfg = GenerationConfig(model=model, eos_token_id=[1, 49])
    with pytest.raises(ConfigError, match="the vocabulary is 0 to 29"):
        cfg.replace(model=smaller)
    stray = GenerationConfig.from_hf({"eos_token_id": 50}, model)  # some checkpoints have such an id
    assert stray.replace(temperature=0.5, do_sample=True).eos_token_id == 50
    assert jax.tree.map(lambda leaf: leaf, stray) == stray


@pytest.mark.parametrize("value", [10**400, float("inf"), -(10**400), float("nan"), True])
@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "max_time", "max_new_tokens", "repetition_penalty", "length_penalty"]
)
def test_numbers_are_finite_and_not_booleans(name, value):
    with pytest.raises((ConfigError, TypeError), match=f"{name} must"):
        GenerationConfig(**{name: value})


NEUTRAL = {
    "temperature": [1.0, 1, np.float32(1), None], "top_p": [1.0, 1, None], "top_k": [0, None],
    "min_p": [None, 0.0, 0], "repetition_penalty": [1.0, 1, None], "min_length": [0, None],
}  # fmt: skip


@pytest.mark.parametrize(("name", "values"), NEUTRAL.items(), ids=NEUTRAL)
def test_neutral_value_is_off_and_equals_the_default(name, values):
    structures = set()
    for value in values:
        cfg = GenerationConfig(top_k=0).replace(**{name: value})
        assert not cfg.on(name)
        assert getattr(cfg, name) == (0 if name == "top_k" else DEFAULTS_441[name])
        structures.add(jax.tree.structure(cfg))
    assert len(structures) == 1
    on = GenerationConfig(top_k=0).replace(**{name: 2 if name in ("top_k", "min_length") else 0.5})
    assert on.on(name)
    assert jax.tree.structure(on) not in structures


def test_enabled_options_are_static_under_jit():
    cfg = GenerationConfig(temperature=0.5, eos_token_id=[4, 7])

    @jax.jit
    def inside(cfg):
        assert cfg.on("temperature")
        assert not cfg.on("top_p")
        assert cfg.top_p == 1.0
        return cfg.temperature * 2, cfg.eos_token_id, cfg.replace(top_p=cfg.temperature)

    doubled, eos, changed = inside(cfg)
    assert float(doubled) == 1.0
    assert eos.tolist() == [4, 7, -1, -1]
    assert float(changed.top_p) == 0.5
    inside(cfg.replace(temperature=0.9, eos_token_id=3))
    assert inside._cache_size() == 1


def test_values_per_prompt():
    cfg = GenerationConfig(temperature=[1, 0.5], top_k=jnp.asarray([3, 0]), max_new_tokens=np.asarray([4, 5]))
    assert cfg.temperature.dtype == np.float32
    assert cfg.top_k.dtype == np.int32
    assert cfg.on("temperature")
    assert cfg == GenerationConfig(temperature=[1, 0.5], top_k=[3, 0], max_new_tokens=[4, 5])
    assert cfg != GenerationConfig(temperature=[1, 0.6], top_k=[3, 0], max_new_tokens=[4, 5])
    with pytest.raises(ConfigError, match="has one value per prompt"):
        cfg.to_hf()


def test_stop_strings_per_prompt():
    sets = [["\n"], ["END", "."], None]
    cfg = GenerationConfig(stop_strings=sets)
    assert cfg.stop_strings == (("\n",), ("END", "."), None)
    assert cfg == GenerationConfig(stop_strings=cfg.stop_strings)
    assert GenerationConfig.from_hf({"stop_strings": sets}) == cfg
    with pytest.raises(ConfigError, match="stop_strings has one value per prompt"):
        cfg.to_hf()
    assert GenerationConfig(stop_strings=("a", "b")).to_hf() == {"stop_strings": ["a", "b"]}
    assert GenerationConfig(stop_strings=[None, None]).on("stop_strings")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"temprature": 1.0}, ConfigError, "did you mean 'temperature'"),
        ({"zzz": 1.0}, ConfigError, "unknown option 'zzz'"),
        ({"temperature": 0.0}, ConfigError, "temperature.*do_sample=False"),
        ({"temperature": -1}, ConfigError, "temperature"),
        ({"temperature": [1.0, 0.0]}, ConfigError, "temperature"),
        ({"temperature": float("nan")}, ConfigError, "temperature"),
        ({"temperature": "hot"}, TypeError, "temperature"),
        ({"temperature": True}, TypeError, "temperature"),
        ({"temperature": [[1.0]]}, ConfigError, "one per prompt"),
        ({"top_k": -1}, ConfigError, "top_k"),
        ({"top_k": 2.5}, TypeError, "top_k"),
        ({"top_p": 1.5}, ConfigError, "top_p"),
        ({"min_p": -0.1}, ConfigError, "min_p"),
        ({"repetition_penalty": 0}, ConfigError, "repetition_penalty"),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens"),
        ({"min_new_tokens": -1}, ConfigError, "min_new_tokens"),
        ({"max_length": 0}, ConfigError, "max_length"),
        ({"max_length": 3.0}, TypeError, "max_length"),
        ({"do_sample": 1}, TypeError, "do_sample"),
        ({"output_logits": "no"}, TypeError, "output_logits"),
        ({"bos_token_id": "x"}, TypeError, "bos_token_id"),
        ({"early_stopping": 1}, ConfigError, "early_stopping"),
        ({"top_k": 2**31}, ConfigError, "top_k must fit"),
        ({"eos_token_id": 2**31}, ConfigError, "eos_token_id"),
        ({"eos_token_id": jnp.asarray([1.0])}, TypeError, "eos_token_id"),
        ({"eos_token_id": [[[1]]]}, ConfigError, "eos_token_id"),
        ({"eos_token_id": [[1], 2]}, ConfigError, "eos_token_id"),
        ({"bad_words_ids": []}, ConfigError, "bad_words_ids.*non-empty"),
        ({"bad_words_ids": [[1], []]}, ConfigError, "bad_words_ids"),
        ({"bad_words_ids": [1]}, ConfigError, "bad_words_ids must be a non-empty list of lists"),
        ({"bad_words_ids": [["a"]]}, TypeError, "bad_words_ids"),
        ({"bad_words_ids": [[-1]]}, ConfigError, "bad_words_ids"),
        ({"sequence_bias": {}}, ConfigError, "sequence_bias.*non-empty"),
        (
            {"sequence_bias": {1: 2.0}},
            ConfigError,
            "sequence_bias must have a list or tuple of ids",
        ),
        ({"sequence_bias": {(): 2.0}}, ConfigError, "sequence_bias"),
        ({"sequence_bias": {(1,): "x"}}, TypeError, "sequence_bias"),
        ({"sequence_bias": {(1,): float("nan")}}, TypeError, "sequence_bias"),
        ({"sequence_bias": [1]}, ConfigError, "sequence_bias"),
        ({"forced_decoder_ids": [[1, 2, 3]]}, ConfigError, "forced_decoder_ids.*2 numbers"),
        ({"forced_eos_token_id": -1}, ConfigError, "forced_eos_token_id"),
        ({"suppress_tokens": "x"}, TypeError, "suppress_tokens"),
        ({"exponential_decay_length_penalty": 3}, ConfigError, "exponential_decay_length_penalty must be a pair"),
        ({"exponential_decay_length_penalty": (1, -1.0)}, ConfigError, "exponential_decay_length_penalty's factor"),
        ({"exponential_decay_length_penalty": ([1, 2], [1.0] * 3)}, ConfigError, "as many starts as factors, got 2"),
        ({"no_repeat_ngram_size": "a"}, TypeError, "no_repeat_ngram_size must be a whole number"),
        ({"encoder_no_repeat_ngram_size": -1}, ConfigError, "encoder_no_repeat_ngram_size must be >= 0"),
        ({"max_length": 10**30}, ConfigError, "max_length must be >= 1 and fit into 32 bits"),
        ({"temperature": 1e39}, ConfigError, r"temperature must be > 0 .*, got 1e\+39, which is too large for float32"),
        ({"temperature": 10**5000}, ConfigError, "got a number of 16610 bits, which is too large for float32"),
        ({"temperature": [1, 5e-324]}, ConfigError, "which is 0 in float32"),
        ({"top_k": 10**5000}, ConfigError, "top_k must fit into 32 bits, got a number of 16610 bits"),
        ({"max_time": 10**5000}, ConfigError, "max_time must be >= 0 seconds and finite, got a number of 16610 bits"),
        ({"no_repeat_ngram_size": 10**5000}, ConfigError, "fit into 32 bits, got a number of 16610 bits"),
        ({"suppress_tokens": [10**5000]}, ConfigError, "suppress_tokens must contain token ids >= 0 that fit"),
        ({"sequence_bias": {(1,): 1e39}}, ConfigError, "sequence_bias must have biases that fit into float32"),
        ({"penalty_alpha": float("inf")}, ConfigError, "penalty_alpha must be >= 0 and finite, got inf"),
        ({"diversity_penalty": -1.0}, ConfigError, "diversity_penalty must be >= 0 and finite"),
        ({"bos_token_id": -1}, ConfigError, "bos_token_id must be >= 0"),
        ({"num_assistant_tokens": "x"}, TypeError, "num_assistant_tokens must be a whole number"),
        ({"exponential_decay_length_penalty": (1.5, 1.0)}, TypeError, "exponential_decay_length_penalty's start"),
        ({"watermarking_config": 3}, TypeError, "watermarking_config"),
        ({"force_words_ids": []}, ConfigError, "force_words_ids must be a non-empty list"),
        ({"force_words_ids": [[]]}, ConfigError, "force_words_ids must be a non-empty list"),
        ({"force_words_ids": [1, 2]}, ConfigError, "force_words_ids must be a non-empty list"),
        ({"force_words_ids": [[1], [[2], []]]}, ConfigError, "force_words_ids: nested_token_ids must have at least"),
        ({"force_words_ids": [[-1]]}, ConfigError, "force_words_ids: token_ids must contain token ids >= 0"),
        ({"force_words_ids": [["a"]]}, TypeError, "force_words_ids: token_ids must contain token ids"),
        ({"force_words_ids": [[[1, 2], 3]]}, TypeError, "force_words_ids: nested_token_ids must be made of lists"),
        (
            {"force_words_ids": [[[1, 2, 3], [4], [1, 2]]]},
            ConfigError,
            r"has \[1, 2\], which is a prefix of \[1, 2, 3\]",
        ),
        ({"force_words_ids": np.ones((2, 2), int)}, ConfigError, "must have 3 axes"),
        ({"constraints": []}, ConfigError, "constraints must not be empty"),
        ({"constraints": PhrasalConstraint([1])}, TypeError, "constraints must be a list"),
        ({"constraints": [[1]]}, TypeError, "constraints must contain only jaxgen.PhrasalConstraint.*builtins.list"),
        ({"watermarking_config": {"greenlist_ratio": 2.0}}, ConfigError, "greenlist_ratio"),
        ({"stop_strings": [1]}, TypeError, "stop_strings"),
        ({"stop_strings": ""}, ConfigError, "stop_strings must not be empty"),
        ({"stop_strings": [["a"], []]}, ConfigError, "stop_strings must not be empty.*None for a prompt without any"),
        ({"stop_strings": ["a", ["b"]]}, TypeError, "a list of strings, or a list with an entry per prompt"),
        ({"stop_strings": ["a", None]}, TypeError, "a list of strings, or a list with an entry per prompt"),
        ({"max_time": "x"}, TypeError, "max_time"),
        ({"max_time": -1}, ConfigError, "max_time"),
        ({"prefill_chunk_size": 0}, ConfigError, "prefill_chunk_size"),
        ({"top_logprobs": 2}, ConfigError, "top_logprobs=2 needs output_logprobs"),
        ({"output_logprobs": "all"}, ConfigError, "output_logprobs"),
        ({"typical_p": 0.0}, ConfigError, "typical_p"),
        ({"epsilon_cutoff": 1.0}, ConfigError, "epsilon_cutoff"),
        ({"eta_cutoff": -0.1}, ConfigError, "eta_cutoff"),
        ({"top_h": 0.0}, ConfigError, "top_h"),
        ({"eos_token_id": "x"}, TypeError, "eos_token_id"),
        ({"eos_token_id": -2}, ConfigError, "eos_token_id"),
        ({"eos_token_id": [1.0]}, TypeError, "eos_token_id"),
        ({"pad_token_id": -1}, ConfigError, "pad_token_id"),
        ({"pad_token_id": [0, 1]}, ConfigError, "pad_token_id"),
        ({"num_return_sequences": 2}, ConfigError, "num_return_sequences=2"),
        ({"num_return_sequences": 0}, ConfigError, "num_return_sequences"),
        ({"early_stopping": "sometimes"}, ConfigError, "early_stopping"),
        ({"num_beams": 2, "num_return_sequences": 3}, ConfigError, "num_beams=2"),
        ({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}, ConfigError, "multiple"),
        ({"num_beams": 4, "num_beam_groups": 2}, ConfigError, "diversity_penalty"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "do_sample": True}, ConfigError, "do_sample"),
        ({"num_beams": 2, "force_words_ids": [[1]], "do_sample": True}, ConfigError, "force_words_ids"),
        ({"no_repeat_ngram_size": -1}, ConfigError, "no_repeat_ngram_size"),
        ({"model": {}}, TypeError, "ModelConfig"),
    ],
)
def test_invalid_values_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        GenerationConfig().replace(**fields)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, "greedy_search"),
        ({"do_sample": True}, "sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"penalty_alpha": 0.6, "top_k": 1}, "greedy_search"),
        ({"num_beams": 2}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}, "group_beam_search"),
        ({"force_words_ids": [[1]]}, "constrained_beam_search"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup"),
        ({"assistant_early_exit": 3}, "assisted_generation"),
        ({"dola_layers": "low"}, "dola_generation"),
    ],
)
def test_mode(fields, mode):
    assert GenerationConfig(**fields).mode == mode


def test_prompt_lookup_with_beams_is_refused():
    with pytest.raises(ConfigError, match="prompt_lookup_num_tokens works with greedy search and sampling"):
        _ = GenerationConfig(prompt_lookup_num_tokens=3, num_beams=2).mode


def test_normal_form_resets_unread_options():
    sampling = {"temperature": 0.5, "top_k": 3, "top_p": 0.5}
    others = {"length_penalty": 2.0, "early_stopping": True, "num_assistant_tokens": 7, "penalty_alpha": 0.5}
    called = {"max_new_tokens": 5, "max_time": 1.0, "stop_strings": "x"}
    plain = GenerationConfig(pad_token_id=0, repetition_penalty=1.1)
    greedy = plain.replace(**sampling | others | called | {"top_k": 1})
    assert normal_form(greedy) == normal_form(plain)
    drawn = normal_form(greedy.replace(do_sample=True))
    assert drawn == normal_form(plain.replace(do_sample=True, **sampling | {"top_k": 1}))
    assert drawn.temperature == 0.5
    assert normal_form(plain.replace(pad_token_id=None, eos_token_id=[7, 8])).pad_token_id == 7


SAMPLING = {"do_sample": True, "temperature": 0.5, "top_p": 0.8, "min_length": 2, "num_assistant_tokens": 4}
COPIES = {
    "replace": lambda cfg: cfg.replace(max_new_tokens=5),
    "jax.tree.map": lambda cfg: jax.tree.map(np.asarray, cfg),
    "jit": lambda cfg: jax.jit(lambda cfg: cfg)(cfg),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cfg: pickle.loads(pickle.dumps(cfg)),
}


def warnings_of(cfg):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_unused(cfg)
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_unread_checkpoint_values_do_not_warn(copied):
    checkpoint = copied(GenerationConfig.from_hf(SAMPLING))
    for fields in ({}, {"num_beams": 4}, {"penalty_alpha": 0.6, "top_k": 4}, {"min_new_tokens": 3}):
        assert warnings_of(checkpoint.replace(do_sample=False, **fields)) == []
    mine = checkpoint.replace(do_sample=False, temperature=0.5)  # the checkpoint's value, but now set by the user
    assert warnings_of(copied(mine)) == ["greedy_search does not read temperature=0.5"]
    assert warnings_of(mine.replace(top_p=0.5, temperature=None)) == ["greedy_search does not read top_p=0.5"]
    assert warnings_of(GenerationConfig(temperature=0.5)) == ["greedy_search does not read temperature=0.5"]


def test_origin_of_a_value_does_not_affect_equality():
    checkpoint, mine = GenerationConfig.from_hf(SAMPLING), GenerationConfig(**SAMPLING)
    assert checkpoint == mine
    assert repr(checkpoint) == repr(mine)
    assert checkpoint.to_hf() == mine.to_hf() == SAMPLING
    assert jax.tree.structure(checkpoint) == jax.tree.structure(mine)
    assert hash(jax.tree.structure(checkpoint)) == hash(jax.tree.structure(mine))
    traced = jax.jit(lambda cfg: cfg.temperature)
    for cfg in (checkpoint, mine, checkpoint.replace(top_p=0.8)):
        traced(cfg)
    assert traced._cache_size() == 1


@pytest.mark.parametrize(
    ("name", "value"), [("use_cache", False), ("cache_implementation", "dynamic"), ("low_memory", True)]
)
def test_unsupported_options_are_refused_but_ignored_in_a_file(name, value):
    for make in (GenerationConfig, GenerationConfig().replace):
        with pytest.raises(ConfigError, match=f"{name}={value!r} is not offered: [^.]*$"):
            make(**{name: value})
    with pytest.warns(JaxgenWarning, match=f"^generation_config.json: {name}={value!r} is ignored: "):
        checkpoint = GenerationConfig.from_hf({name: value, "top_p": 0.5})
    assert checkpoint.to_hf() == {"top_p": 0.5}


def test_unknown_options_of_a_file_are_named_in_one_warning():
    fields = {"temprature": 0.5, "max_new_tokens": 7, "model": "x", "a" * 1000: 1, **{f"x{i}": 1 for i in range(1000)}}
    with pytest.warns(JaxgenWarning, match=r"ignored: temprature \(did you mean temperature\?\), model, aaa") as seen:
        cfg = GenerationConfig.from_hf(fields)
    assert (cfg.to_hf(), len(seen)) == ({"max_new_tokens": 7}, 1)
    assert len(str(seen[0].message)) < 600


# Values that other programs write for "off", but that transformers' classes reject.
FOREIGN_OFF = {
    "temperature": [0.0, -1], "top_h": [0.0, -1], "top_k": [-1], "top_p": [-1.0, 1.5], "min_p": [-1.0],
    "typical_p": [0.0, -1.0], "epsilon_cutoff": [-1, 1.0], "eta_cutoff": [-1, 1.0],
}  # fmt: skip


def test_each_warper_has_an_off_value_of_another_library():
    assert FOREIGN_OFF.keys() == {name for name, option in OPTIONS.items() if option.stage == WARP}


@pytest.mark.parametrize(("name", "values"), FOREIGN_OFF.items(), ids=FOREIGN_OFF)
def test_invalid_file_option_is_an_error_only_if_the_mode_reads_it(name, values):
    for value in values:
        for mode, fields in (
            ("greedy_search", {}), ("greedy_search", {"do_sample": False}), ("beam_search", {"num_beams": 2}),
            ("greedy_search", {"do_sample": None}),
        ):  # fmt: skip
            note = re.escape(f"{name}={value!r} is ignored: {mode} does not read it")
            with pytest.warns(JaxgenWarning, match=f"^generation_config.json: {note}$"):
                cfg = GenerationConfig.from_hf({**fields, name: value, "max_new_tokens": 5})
            assert cfg == GenerationConfig.from_hf({**fields, "max_new_tokens": 5})
        with pytest.raises(ConfigError, match=f"{name} must be"):
            GenerationConfig.from_hf({"do_sample": True, name: value})


def test_an_invalid_option_that_another_mode_reads():
    with pytest.warns(JaxgenWarning, match="length_penalty='x' is ignored: greedy_search does not read it; unknown"):
        GenerationConfig.from_hf({"length_penalty": "x", "typo": 1})
    with pytest.raises(TypeError, match="length_penalty must be"):
        GenerationConfig.from_hf({"length_penalty": "x", "num_beams": 2})
    with pytest.raises(ConfigError, match="top_k must be"):
        GenerationConfig.from_hf({"penalty_alpha": 0.6, "top_k": -1})
    choices = ("num_beams", "num_beam_groups", "penalty_alpha", "prompt_lookup_num_tokens", "assistant_early_exit")
    for name in (*choices, "dola_layers", "constraints", "force_words_ids"):
        with pytest.raises((ConfigError, TypeError), match=name):
            GenerationConfig.from_hf({name: -1, "temperature": 0.0})


def test_null_in_a_file_leaves_an_option_unset():
    cfg = GenerationConfig.from_hf(dict.fromkeys(OPTIONS) | {"top_k": 50})
    assert cfg == GenerationConfig()
    for name in ("do_sample", "num_beams", "early_stopping"):
        with pytest.raises((ConfigError, TypeError), match=f"{name} must be"):
            GenerationConfig(**{name: None})


def test_from_and_to_hf():
    text = """{"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0"}"""
    held = json.loads(text)
    model = model_config()
    cfg = GenerationConfig.from_hf(held, model=model)
    assert cfg.model is model
    assert cfg.eos_token_id == (151645, 151643)
    del held["transformers_version"]
    assert cfg.to_hf() == held
    json.dumps(cfg.to_hf())


def test_numpy_and_jax_scalars_are_accepted():
    cfg = GenerationConfig(do_sample=np.bool_(True), num_return_sequences=np.int64(2), max_length=np.int32(9))
    assert cfg == GenerationConfig(do_sample=True, num_return_sequences=2, max_length=9)
    assert GenerationConfig(eos_token_id=jnp.asarray([3, 4])).to_hf() == {"eos_token_id": [3, 4]}
    fields = {"sequence_bias": {(1, 2): 0.5, (3,): -1.0}, "exponential_decay_length_penalty": (2, 1.5)}
    on_device = jax.tree.map(jnp.asarray, GenerationConfig(**fields))
    assert json.loads(json.dumps(on_device.to_hf())) == {
        "sequence_bias": [[[1, 2], 0.5], [[3], -1.0]],
        "exponential_decay_length_penalty": [2, 1.5],
    }
    through = jax.jit(lambda cfg: cfg)(GenerationConfig(max_new_tokens=5, temperature=0.5))
    assert through.to_hf() == {"max_new_tokens": 5, "temperature": 0.5}


def test_dtype_and_shape_of_traced_values_are_checked():
    def on(name, value):
        return jax.jit(lambda value: getattr(GenerationConfig(**{name: value}), name))(value)

    assert on("temperature", np.int32(2)).dtype == jnp.float32
    with pytest.raises(TypeError, match="top_k"):
        on("top_k", np.float32(2))
    with pytest.raises(ConfigError, match="temperature"):
        on("temperature", np.ones((2, 2), np.float32))


TABLES = {
    "eos_token_id": ([3, 4], [[3], [4, 5]], [3, 4, -1, -1]),
    "suppress_tokens": (7, [[1], []], [7, -1, -1, -1]),
    "bad_words_ids": ([[1], [2, 3]], [[[1]], [[2, 3], [4]]], [[1, -1], [2, 3], [-1, -1], [-1, -1]]),
    "forced_decoder_ids": ([[1, 5]], [[[1, 5]], [[2, 6]]], [[1, 5], [-1, -1], [-1, -1], [-1, -1]]),
}


@pytest.mark.parametrize(("name", "case"), TABLES.items(), ids=TABLES)
def test_ids_become_tables_whose_sizes_are_rounded_up(name, case):
    value, per_prompt, table = case
    cfg = GenerationConfig(**{name: value})
    assert jax.tree.leaves(cfg.replace(top_k=0))[-1].tolist() == table
    assert cfg.to_hf() == {name: value}
    assert jax.tree.leaves(GenerationConfig(**{name: per_prompt}).replace(top_k=0))[-1].shape[0] == 2
    with pytest.raises(ConfigError, match=f"{name} has one value per prompt"):
        GenerationConfig(**{name: per_prompt}).to_hf()
    # A config that jit returns equals the original, and its fields can still be set.
    for given in (cfg, GenerationConfig(**{name: per_prompt})):
        through = jax.jit(lambda cfg: cfg.replace(temperature=0.5))(given)
        assert through.replace(temperature=1.0) == given


def test_sequence_biases_become_arrays():
    cfg = GenerationConfig(sequence_bias={(1, 2): 0.5, (3,): -1}, top_k=0)
    sequences, bias = jax.tree.leaves(cfg)
    assert sequences.tolist() == [[1, 2], [3, -1], [-1, -1], [-1, -1]]
    assert bias.tolist() == [0.5, -1.0, 0.0, 0.0]
    assert cfg == GenerationConfig(sequence_bias=[[[1, 2], 0.5], [[3], -1.0]], top_k=0)
    assert GenerationConfig.from_hf(json.loads(json.dumps(cfg.to_hf()))) == cfg
    several = GenerationConfig(sequence_bias=[{(1,): 0.5}, {(2, 3): 1.0, (4,): 2.0}], top_k=0)
    assert [leaf.shape for leaf in jax.tree.leaves(several)] == [(2, 4, 2), (2, 4)]


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.name)
def test_every_record_is_consistent(option):
    assert option.parse(option.default) == option.default
    assert not option.is_given(option.default)
    assert option.doc or option.refused
    for value in option.examples:
        parsed = option.parse(value)
        assert not option.kind.is_off(parsed)
        assert option.parse(parsed) == parsed
        assert option.kind.leaf(parsed) is not None
    if option.instead_of:
        assert OPTIONS[option.instead_of].instead_of == option.name


class Placeholder:
    """A stand-in for an array, like the objects with which jax describes a program's arguments."""


@pytest.mark.parametrize("option", [o for o in OPTIONS.values() if o.kind.traced and o.examples], ids=lambda o: o.name)
def test_a_config_of_placeholders_has_the_structure_of_the_config(option):
    for value in option.examples:
        leaves, structure = jax.tree.flatten(GenerationConfig(**{option.name: value}))
        placeholders = jax.tree.unflatten(structure, [Placeholder() for _ in leaves])
        assert jax.tree.structure(placeholders) == structure


def test_a_copy_costs_only_the_fields_that_change(monkeypatch):
    parsed = []
    parse = Option.parse
    monkeypatch.setattr(Option, "parse", lambda self, value: parsed.append(self.name) or parse(self, value))
    cfg = GenerationConfig(temperature=0.5, eos_token_id=[1, 2])
    assert sorted(parsed) == ["eos_token_id", "temperature"]
    parsed.clear()
    assert cfg.replace(top_p=0.9).top_p == 0.9
    assert parsed == ["top_p"]


def test_config_is_frozen_and_copies_its_inputs():
    cfg = GenerationConfig()
    with pytest.raises(AttributeError):
        cfg.temperature = 2.0
    biases = {(1, 2): 0.5}
    cfg = cfg.replace(sequence_bias=biases)
    biases[(3,)] = 1.0
    assert dict(cfg.sequence_bias) == {(1, 2): 0.5}
    assert "sequence_bias" in repr(cfg)


def test_repr_shows_only_values_that_differ_from_the_defaults():
    model = model_config()
    cfg = GenerationConfig(temperature=0.5, do_sample=True, top_p=[0.5, 1.0], model=model)
    shown = "GenerationConfig(do_sample=True, temperature=0.5, top_p=array([0.5, 1. ], dtype=float32), model=<"
    size = f"{model.num_hidden_layers} layers, hidden size {model.hidden_size}, {model.vocab_size} tokens, float32"
    assert repr(cfg) == f"{shown}{model.model_type}, {size}>)"
    assert repr(cfg.replace(temperature=1.0, do_sample=False, top_p=1.0, model=None)) == "GenerationConfig()"


def test_the_signature_of_replace_names_every_option():
    signature = inspect.signature(GenerationConfig().replace)
    assert list(signature.parameters) == [*OPTIONS, "model"]


def test_constraints_are_written_as_words():
    constraints = [PhrasalConstraint(np.asarray([1, 2])), DisjunctiveConstraint([[3], [4, 5]])]
    cfg = GenerationConfig(num_beams=2, constraints=constraints, force_words_ids=[[6], [[7], [8]]])
    written = cfg.to_hf()
    assert written["force_words_ids"] == [[1, 2], [[3], [4, 5]], [6], [[7], [8]]]
    assert GenerationConfig.from_hf(written).force_words_ids == ((1, 2), ((3,), (4, 5)), (6,), ((7,), (8,)))
    unflattened = jax.tree.map(np.asarray, cfg)
    assert unflattened.to_hf() == written
    assert unflattened == cfg


@pytest.mark.parametrize("given", [[], [[]], [[1], []], [[1, 2], [1]], [[1], [1]], [[-1]]])
def test_bad_alternatives_are_refused(given):
    with pytest.raises(ConfigError, match="nested_token_ids"):
        DisjunctiveConstraint(given)


def test_on_refuses_unknown_names():
    with pytest.raises(KeyError):
        GenerationConfig().on("temprature")


def test_greedy_copy_resets_sampling_and_beams():
    given = GenerationConfig(
        model=model_config(), do_sample=True, top_p=0.9, temperature=0.7, num_return_sequences=4, repetition_penalty=1.1
    )
    for cfg in (given, given.replace(do_sample=False, num_beams=4), given.replace(penalty_alpha=0.5, top_k=4)):
        greedy = cfg.greedy()
        assert (greedy.mode, greedy.num_return_sequences, greedy.repetition_penalty) == ("greedy_search", 1, 1.1)
        warn_unused(greedy)  # warnings are errors
        assert greedy == GenerationConfig(model=model_config(), repetition_penalty=1.1)
