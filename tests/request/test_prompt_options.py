"""Options that are off for some prompts and on for others, and configs that an engine does not support."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import ConfigError, GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.logits.history import History
from jaxgen.core.logits.pipeline import build_transform
from jaxgen.core.logits.row_options import RowOptions
from jaxgen.core.request.prompt import PromptReader
from jaxgen.core.request.prompt_options import PromptOptions, not_in_slots
from tests.support.models import model_config

CFG = GenerationConfig(model=model_config(), max_new_tokens=8, do_sample=True, top_k=0, eos_token_id=2)
VOCAB = CFG.model.vocab_size
READER = PromptReader(PromptOptions(CFG, 8))


@pytest.mark.slow
def test_options_of_other_prompts_change_no_bits():
    assert {
        "top_h",
        "top_p",
        "sequence_bias",
        "forced_bos_token_id",
        "exponential_decay_length_penalty",
    } < READER.options.own
    off = READER.read([5]).options
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(3, VOCAB, (2, 9)), jnp.int32)
    length, budget = jnp.asarray([1, 6], jnp.int32), jnp.asarray([3, 3], jnp.int32)
    history = History.begin(READER.options.full, ids, length, budget, options=READER.options.own)
    history = history.push(jnp.asarray([7, 8], jnp.int32), jnp.ones(2, bool))
    scores = jnp.asarray(rng.normal(size=(2, VOCAB)), jnp.float32)
    transform = jax.jit(lambda rows: build_transform(RowOptions(READER.options.full, rows))(history, scores))
    for name in READER.options.own - {"do_sample"}:
        option = OPTIONS[name]
        own = READER.read({"ids": [5], name: option.examples[0], "do_sample": True}).options
        rows = jax.tree.map(lambda *x: jnp.stack(x), off | {"do_sample": np.bool_(True)}, own)
        got = transform(rows)
        np.testing.assert_array_equal(got[0], scores[0], err_msg=name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": None}, "max_new_tokens must be one number in an engine's config"),
        ({"max_new_tokens": [4, 8]}, "max_new_tokens must be one number"),
        ({"temperature": [0.5, 0.7]}, "temperature has one value per prompt"),
        ({"max_time": 5.0}, "max_time is not an option of an engine"),
        ({"slots": 4}, "slots is not an option of an engine"),
        ({"guidance_scale": 1.5}, "guidance_scale is not an option of an engine"),
        (
            {"num_beams": 2, "do_sample": False},
            "greedy search, sampling and DoLa, not with beam_search",
        ),
        ({"penalty_alpha": 0.5, "top_k": 4, "do_sample": False}, "not with contrastive_search"),
        ({"prompt_lookup_num_tokens": 3}, "not with prompt_lookup"),
        ({"token_healing": True}, "token_healing is not an option of an engine"),
        ({"output_scores": True}, "output_scores is not offered by an engine: use output_logprobs"),
    ],
)
def test_unsupported_configs_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        PromptOptions(CFG.replace(**options), 8)


def test_a_table_is_as_large_as_the_config_needs():
    suppressed, biases = list(range(50)), {tuple(range(10)): 1.5, (3,): -2.0}
    reader = PromptReader(PromptOptions(CFG.replace(suppress_tokens=suppressed, sequence_bias=biases), 8))
    options = reader.read([5]).options
    assert set(options["suppress_tokens"].tolist()) == {-1, *suppressed}
    assert options["sequence_bias"][0].shape[1] >= 10
    own = reader.read({"ids": [5], "suppress_tokens": [7]}).options["suppress_tokens"]
    assert own.shape == options["suppress_tokens"].shape
    assert set(own.tolist()) == {-1, 7}


def test_prompt_may_set_only_the_named_options():
    reader = PromptReader(PromptOptions(CFG.replace(temperature=0.7, min_length=4), 8, ["top_k"]))
    assert (
        reader.options.own == {"do_sample", "temperature", "min_new_tokens", "top_k"} | reader.options.own & CFG.enabled
    )
    prompt = reader.read({"ids": [5], "top_k": 3, "temperature": 0.5, "max_new_tokens": 2})
    assert (prompt.options["top_k"], prompt.options["min_new_tokens"], prompt.budget) == (3, 3, 2)
    with pytest.raises(ConfigError, match=r"top_p is part of the program: .*; or name it in prompt_options"):
        reader.read({"ids": [5], "top_p": 0.5})
    with pytest.raises(ConfigError, match="prompt_options has num_beams, which is not an option of a prompt: eos_"):
        PromptOptions(CFG, 8, ["num_beams"])
    with pytest.raises(TypeError, match="prompt_options must be a list of names, got 'top_p'"):
        PromptOptions(CFG, 8, "top_p")


@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, None), ({"max_time": 5.0}, "max_time"), ({"num_beams": 2, "do_sample": False}, "beam_search")],
)
def test_reason_why_a_config_cannot_run_in_slots(options, reason):
    assert not_in_slots(CFG.replace(**options)) == reason
