"""The number of compiled programs, counted through jax's compilation events."""

import jax
import numpy as np
import pytest

from jaxgen import GenerationConfig, InputError, generate, warmup
from jaxgen.core.config.generation_options import TRACED
from jaxgen.core.config.option import SAMPLE
from tests.support.compilations import compilations
from tests.support.models import left_pad, model_config, random_params, slow
from tests.support.streamers import Collector
from tests.support.tokenizers import byte_level

MODEL = model_config(num_hidden_layers=1, max_position_embeddings=1024)
PARAMS = random_params(MODEL)


def test_the_counter_counts():
    with compilations() as count:
        jax.jit(lambda x: x * 3.25 + 17)(np.float32(1))
    assert count[0] >= 1


@pytest.mark.parametrize(("longest", "programs"), [(128, 3), (300, 6)])
@pytest.mark.slow
def test_fifty_requests_share_few_programs(longest, programs):
    rng = np.random.default_rng(0)
    keys = [jax.random.key(seed) for seed in range(50)]
    with compilations() as count:
        for number in range(50):
            prompts = [rng.integers(1, 97, rng.integers(1, longest + 1)).tolist() for _ in range(2)]
            ids, mask = left_pad(prompts)
            knobs = {"repetition_penalty": rng.uniform(1.01, 1.5), "min_new_tokens": 1}
            knobs |= {"temperature": rng.uniform(0.2, 0.9), "top_p": rng.uniform(0.1, 0.99)}
            cfg = GenerationConfig(
                model=MODEL,
                do_sample=True,
                max_new_tokens=int(rng.integers(1, 101)),
                eos_token_id=rng.integers(1, 97, rng.integers(1, 4)).tolist(),
                pad_token_id=int(rng.integers(0, 97)),
                **knobs,
            )
            out = generate(PARAMS, ids, keys[number], cfg, attention_mask=mask)
            assert out.sequences.shape[1] == ids.shape[1] + cfg.max_new_tokens
    assert count[0] <= programs


@pytest.mark.slow
def test_spelling_a_value_differently_compiles_nothing():
    base = GenerationConfig(model=MODEL, do_sample=True, top_k=5, temperature=0.5, max_new_tokens=4, pad_token_id=0)
    key, ids = jax.random.key(0), [[1, 2, 3]]
    generate(PARAMS, ids, key, base.replace(temperature=2, eos_token_id=3, output_scores=True))
    with compilations() as count:
        for temperature in (0.7, 3, np.float32(0.7), np.float64(0.1), np.int64(2), np.asarray(0.3)):
            generate(PARAMS, ids, key, base.replace(temperature=temperature, eos_token_id=[3, 4], output_scores=True))
        generate(
            PARAMS,
            np.asarray(ids),
            key,
            base.replace(top_k=np.int64(9), eos_token_id=(9,), output_scores=True, max_new_tokens=16),
        )
        generate(
            PARAMS,
            np.asarray(ids),
            key,
            base.replace(
                max_length=9, max_new_tokens=None, eos_token_id=7, output_scores=True, return_dict_in_generate=True
            ),
        )
    assert count[0] == 0


@pytest.mark.filterwarnings("ignore:greedy_search does not read")
def test_options_of_other_modes_compile_nothing():
    base = GenerationConfig(model=MODEL, max_new_tokens=3)
    key = jax.random.key(0)
    generate(PARAMS, [[1, 2]], None, base)
    with compilations() as count:
        generate(PARAMS, [[1, 2]], key, base.replace(bos_token_id=1, num_assistant_tokens=7, top_p=0.5))
    assert count[0] == 0


@pytest.mark.slow
def test_streaming_compiles_a_fixed_number_of_programs():
    cfg = GenerationConfig(model=MODEL, max_new_tokens=30)
    generate(PARAMS, [[1, 2]], None, cfg, streamer=Collector())
    with compilations() as count:
        for new_tokens in (1, 7, 100):
            generate(PARAMS, [[1, 2, 3, 4]], None, cfg.replace(max_new_tokens=new_tokens), streamer=Collector())
    assert count[0] == 0


# The traced options that sampling reads, except `adapter`, which needs parameters with adapters and has its own test.
VALUES = {
    name: option
    for name, option in TRACED.items()
    if (option.modes is None or SAMPLE in option.modes) and name != "adapter"
}


@pytest.mark.filterwarnings("ignore:min_new_tokens and min_length are both set")
@pytest.mark.parametrize("per_prompt", [True, *slow(False)], ids=["per-prompt", "one"])
def test_a_new_value_of_any_option_compiles_nothing(per_prompt):
    ids, key = [[1, 2, 3], [4, 5, 6]], jax.random.key(0)

    def config(which):
        fields = {"do_sample": True}
        for name, option in VALUES.items():
            value, other = option.examples[which], option.examples[1 - which]
            if per_prompt and option.kind.per_prompt:
                fields[name] = option.kind.per_prompt_value([value, other])
            elif name != "do_sample":  # one value for all prompts would choose the mode, which is static
                fields[name] = value
        return GenerationConfig(model=MODEL, **fields)

    mask = np.ones((2, 3), int)
    first = generate(PARAMS, ids, key, config(0), attention_mask=mask)
    with compilations() as count:
        second = generate(PARAMS, ids, key, config(1), attention_mask=mask)
    assert count[0] == 0
    assert first.sequences.tolist() != second.sequences.tolist()


def test_new_stop_strings_compile_nothing():
    tok, ids = byte_level(), [[1, 2, 3], [4, 5, 6]]
    cfg = GenerationConfig(model=MODEL, max_new_tokens=4, pad_token_id=0)
    warmup(PARAMS, cfg.replace(stop_strings=[["!"], None]), [3], [4], prompts=2, tokenizer=tok)
    with compilations() as count:
        for sets in ([["a"], ["bc", "d"]], [None, None], [["e" * 30], ["f" * 30, "g"]], [["h"], ["h"]]):
            generate(PARAMS, ids, None, cfg.replace(stop_strings=sets), attention_mask=np.ones((2, 3)), tokenizer=tok)
    assert count[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "key", "streaming"),
    [({}, None, False), ({"do_sample": True, "top_k": 5, "output_scores": True}, 1, False), ({}, None, True)],
)
def test_after_a_warmup_nothing_is_compiled(options, key, streaming):
    cfg = GenerationConfig(model=MODEL, eos_token_id=[5, 6], pad_token_id=0, **options)
    key = None if key is None else jax.random.key(key)
    pairs = warmup(PARAMS, cfg, [3, 30, 40], [4], prompts=2, key=key, streaming=streaming)
    assert pairs == 2
    with compilations() as count:
        for width, length in ((1, 3), (20, 9), (50, 5)):
            given = {"streamer": Collector()} if streaming else {}
            ids = np.arange(2 * width).reshape(2, width) % 90 + 7
            generate(PARAMS, ids, key, cfg.replace(max_new_tokens=length, eos_token_id=[7, 8]), **given)
    assert count[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"widths": []}, "widths must be whole numbers of at least 1, got 'none'"),
        ({"widths": [0]}, "widths must be whole numbers of at least 1, got 0"),
        ({"lengths": [2.5]}, "lengths must be whole numbers of at least 1, got 2.5"),
        ({"prompts": True}, "prompts must be whole numbers of at least 1, got True"),
    ],
)
def test_warmup_sizes(arguments, message):
    with pytest.raises(InputError, match=message):
        warmup(PARAMS, GenerationConfig(model=MODEL), **{"widths": [3], "lengths": [4], **arguments})


def test_a_warmup_for_a_function_is_refused():
    with pytest.raises(TypeError, match="prefix_allowed_tokens_fn must be a TokenAutomaton here"):
        warmup(PARAMS, GenerationConfig(model=MODEL), [3], [4], prefix_allowed_tokens_fn=lambda row, ids: [1])
    with pytest.raises(InputError, match="programs with token_healing depend on the prompts"):
        warmup(PARAMS, GenerationConfig(model=MODEL, token_healing=True), [3], [4])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("streamer", r"warmup\(\) has no argument 'streamer': did you mean 'streaming'"),
        ("logit_processor", "did you mean 'logits_processor'"),
        ("top_k", r"warmup\(\) has no top_k, which is an option of the config: use cfg.replace"),
    ],
)
def test_unknown_arguments_of_a_warmup_are_refused(name, words):
    with pytest.raises(TypeError, match=words):
        warmup(PARAMS, GenerationConfig(model=MODEL), [3], [4], **{name: None})
