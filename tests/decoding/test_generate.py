"""The loop with a counting model, whose correct output is known exactly."""

import functools
import inspect

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import (
    Batch,
    ConfigError,
    GenerationConfig,
    InputError,
    JaxgenWarning,
    StepHook,
    generate,
    prefill,
    score,
)
from jaxgen.core.request.inputs import mask_of
from tests.support.counting import CFG, PARAMS, count, with_second_best
from tests.support.models import (
    all_generated,
    counting_config,
    generated,
    left_pad,
    model_config,
    random_params,
    slow,
)
from tests.support.streamers import Collector, RowCollector

IDS = np.asarray([[1]], np.int32)


def test_counting_model_counts():
    out = count([[3], [7, 8, 9, 20]])
    assert np.asarray(out.sequences).tolist() == [
        [0, 0, 0, 3, 4, 5, 6, 7, 8, 9],
        [7, 8, 9, 20, 21, 22, 23, 24, 25, 26],
    ]
    assert out.lengths.tolist() == [6, 6]
    assert out.sequences.dtype == jnp.int32


def test_parameters_may_be_numpy_arrays():
    out = generate(jax.tree.map(np.asarray, PARAMS), IDS, None, CFG)
    assert out.sequences.tolist() == [[1, 2, 3, 4, 5, 6, 7]]


def test_eos_is_kept_and_padding_follows():
    out = count([[3], [30]], CFG.replace(eos_token_id=[5, 33], pad_token_id=49))
    assert np.asarray(out.sequences).tolist() == [[3, 4, 5, 49, 49, 49, 49], [30, 31, 32, 33, 49, 49, 49]]
    assert out.lengths.tolist() == [2, 3]


def test_without_a_pad_id_the_first_eos_pads():
    out = count([[3], [30]], counting_config(max_new_tokens=4, eos_token_id=[32, 5]))
    assert np.asarray(out.sequences).tolist() == [[3, 4, 5, 32, 32], [30, 31, 32, 32, 32]]


@pytest.mark.parametrize("eos", [[9], [9, 1], [9, 1, 2, 3, 4, 5, 6]])
def test_any_number_of_eos_ids(eos):
    assert all_generated(count([[7], [8]], CFG.replace(eos_token_id=eos))) == [[8, 9], [9]]


def test_a_budget_per_prompt():
    out = count([[3], [30]], CFG.replace(max_new_tokens=[1, 4]))
    assert np.asarray(out.sequences)[:, 1:].tolist() == [[4, 0, 0, 0], [31, 32, 33, 34]]
    assert out.lengths.tolist() == [1, 4]


def test_max_length_counts_the_tokens_of_a_row_and_not_its_padding():
    out = count([[3], [7, 8, 9]], counting_config(max_length=5, pad_token_id=0))
    assert generated(out, 0) == [4, 5, 6, 7]
    assert generated(out, 1) == [10, 11]


def test_max_new_tokens_wins_over_max_length():
    cfg = CFG.replace(max_length=3, max_new_tokens=5)
    assert all_generated(count([[3], [10]], cfg)) == [[4, 5, 6, 7, 8], [11, 12, 13, 14, 15]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_new_tokens": 3}, [4, 6, 7, 8, 9, 10]),  # the eos token, 5, is banned as the second token
        ({"min_new_tokens": 1}, [4, 5]),
        *slow(({"min_new_tokens": [3, 3]}, [4, 6, 7, 8, 9, 10])),
        *slow(({"min_length": 3}, [4, 6, 7, 8, 9, 10]), ({"min_length": 2}, [4, 5])),
    ],
)
def test_minimum_lengths_ban_eos(fields, expected):
    cfg = CFG.replace(eos_token_id=5, **fields)
    assert all_generated(generate(with_second_best(cfg), [[3], [3]], None, cfg)) == [expected] * 2


def test_min_new_tokens_replaces_min_length():
    cfg = CFG.replace(eos_token_id=5, min_length=40, min_new_tokens=0)
    with pytest.warns(JaxgenWarning, match="min_length is ignored"):
        assert all_generated(count([[3], [9]], cfg)) == [[4, 5], [10, 11, 12, 13, 14, 15]]


def test_repetition_penalty_counts_prompt_and_generated_tokens_but_not_padding():
    cfg = counting_config(max_new_tokens=3, repetition_penalty=50.0, pad_token_id=4)
    ids, mask = left_pad([[3, 2], [1, 1, 1], [3]], pad=4)
    out = generate(with_second_best(cfg), ids, None, cfg, attention_mask=mask)
    assert generated(out, 0) == [4, 5, 6]  # 3 would come first, but the prompt contains it
    assert generated(out, 2) == [4, 5, 6]  # 4 is in this row only as padding, which does not count


def test_scores_and_logits_of_each_step():
    cfg = CFG.replace(eos_token_id=[5], output_scores=True, output_logits=True, min_new_tokens=1, max_new_tokens=4)
    out = count([[4], [20]], cfg)
    assert out.scores.shape == out.logits.shape == (4, 2, 50)
    assert out.scores.dtype == jnp.float32
    assert np.isneginf(out.scores[0, 0, 5])
    assert np.argmax(out.logits[0, 0]) == 5
    np.testing.assert_array_equal(np.argmax(out.logits[:4, 1], -1), [21, 22, 23, 24])
    np.testing.assert_array_equal(out.scores[1:, 1], out.logits[1:, 1])
    plain = count([[4], [20]])
    assert plain.scores is None
    assert plain.logits is None


def test_early_exit_leaves_later_steps_at_zero():
    cfg = CFG.replace(eos_token_id=[7], output_scores=True, output_logits=True, min_new_tokens=1)
    out = count([[4], [5]], cfg)
    assert out.lengths.tolist() == [3, 2]
    assert bool(jnp.any(out.logits[2] != 0))
    assert bool(jnp.all(out.logits[3:] == 0))


@pytest.mark.slow
def test_the_cache_contains_all_but_the_last_token():
    out = count([[3], [7, 8, 9, 20]], CFG.replace(eos_token_id=[5]))
    assert out.cache.kv.prefix is None  # with one sequence per prompt, nothing is shared
    assert out.cache.without_padding().kv.length.tolist() == [2, 9]
    drawn = CFG.replace(eos_token_id=[5], do_sample=True, num_return_sequences=2)
    several = count([[3], [7, 8, 9, 20]], drawn, jax.random.key(0))
    assert several.cache.kv.prefix.length[:2].tolist() == [1, 4]
    assert several.cache.kv.length[:4].tolist() == [1, 1, 5, 5]


def test_padding_can_be_anywhere():
    ids, mask = [[0, 3, 0, 4, 0], [7, 0, 0, 0, 0]], [[0, 1, 0, 1, 0], [1, 0, 0, 0, 0]]
    out = generate(PARAMS, ids, None, CFG.replace(max_new_tokens=2), attention_mask=mask)
    assert np.asarray(out.sequences).tolist() == [[0, 3, 0, 4, 0, 5, 6], [7, 0, 0, 0, 0, 8, 9]]


def test_the_mask_is_inferred_from_the_pad_id():
    real = model_config()
    params, cfg = random_params(real), GenerationConfig(model=real, max_new_tokens=5, pad_token_id=0, eos_token_id=95)
    ids, mask = left_pad([[5, 6, 7], [8]])
    with_mask = generate(params, ids, None, cfg, attention_mask=mask)
    np.testing.assert_array_equal(generate(params, ids, None, cfg).sequences, with_mask.sequences)
    ones = generate(params, ids, None, cfg, attention_mask=np.ones_like(mask)).sequences
    cfg = cfg.replace(eos_token_id=[0, 96])
    with pytest.warns(JaxgenWarning, match="pass attention_mask"):
        attended = generate(params, ids, None, cfg).sequences
    np.testing.assert_array_equal(attended[:, :4], ones[:, :4])


@pytest.mark.slow
def test_the_mask_is_inferred_inside_the_callers_jit():
    cfg = CFG.replace(max_length=8, max_new_tokens=5)
    ids, mask = left_pad([[5, 6, 7], [8]])
    inside = jax.jit(functools.partial(generate, attention_mask=None))(PARAMS, jnp.asarray(ids), None, cfg)
    assert inside.attention_mask[:, :3].tolist() == mask.astype(bool).tolist()
    np.testing.assert_array_equal(inside.sequences, count([[5, 6, 7], [8]], cfg).sequences)


def test_the_mask_is_inferred_by_each_rows_own_eos():
    cfg = CFG.replace(eos_token_id=[[9], [0]], pad_token_id=0)
    mask = mask_of(None, np.asarray([[0, 0, 5], [1, 2, 0]]), cfg)
    assert mask.tolist() == [[False, False, True], [True, True, True]]


@pytest.mark.slow
def test_concrete_arguments_and_traced_ones_in_a_list_under_jit():
    run = jax.jit(lambda x: generate(PARAMS, [[1, 2]], None, CFG).sequences + x)
    assert run(0).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    run = jax.jit(lambda x: generate(PARAMS, [[1, x]], None, CFG).sequences)
    assert run(2).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_weights_of_another_dtype_are_refused():
    with pytest.raises(InputError, match=r"they are bfloat16 and cfg\.model\.dtype is float32: make them equal"):
        generate(jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS), [[1]], None, CFG)


def test_inside_the_callers_jit():
    ids, mask = left_pad([[3], [7, 8, 9, 20]])
    cfg = CFG.replace(eos_token_id=[24], max_length=4 + 9)
    run = jax.jit(lambda params, ids, mask, cfg: generate(params, ids, None, cfg, attention_mask=mask))
    out = run(PARAMS, ids, mask, cfg)
    eager = generate(PARAMS, ids, None, cfg, attention_mask=mask)
    assert out.sequences.shape == (2, 4 + 9)
    np.testing.assert_array_equal(out.sequences[:, :10], eager.sequences)
    np.testing.assert_array_equal(out.lengths, eager.lengths)
    # A new budget does not compile a new program.
    run(PARAMS, ids, mask, cfg.replace(max_new_tokens=3))
    assert run._cache_size() == 1
    budgets = run(PARAMS, ids, mask, cfg.replace(max_new_tokens=[2, 3]))
    assert budgets.lengths.tolist() == [2, 3]
    # Without max_length, max_new_tokens determines the size of arrays, so it must be static.
    wide = run(PARAMS, np.full((2, 20), 3, np.int32), np.ones((2, 20)), CFG)
    assert wide.sequences[:, 20:].tolist() == [[4, 5, 6, 7, 8, 9]] * 2
    with pytest.raises(ConfigError, match="set max_length"):
        run(PARAMS, ids, mask, CFG.replace(max_new_tokens=[2, 3]))
    with pytest.raises(InputError, match="streamer"):
        jax.jit(lambda p: generate(p, ids, None, CFG, streamer=Collector()).sequences)(PARAMS)


def test_max_length_inside_the_callers_jit():
    cfg = counting_config(max_length=8, pad_token_id=0)
    run = jax.jit(lambda params: generate(params, [[3, 4]], None, cfg, attention_mask=np.ones((1, 2))))
    assert run(PARAMS).sequences.tolist() == [[3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize("new_tokens", [1, 4, 5, 11])
def test_streaming_gives_the_same_tokens_one_by_one(new_tokens):
    streamer = Collector()
    cfg = CFG.replace(max_new_tokens=new_tokens, eos_token_id=[12])
    out = count([[3], [7]], cfg, streamer=streamer)
    plain = count([[3], [7]], cfg)
    np.testing.assert_array_equal(out.sequences, plain.sequences)
    np.testing.assert_array_equal(out.lengths, plain.lengths)
    assert streamer.prompts.tolist() == [[3], [7]]
    steps = int(max(plain.lengths))
    np.testing.assert_array_equal(streamer.tokens, np.asarray(plain.sequences)[:, 1 : 1 + steps])
    assert streamer.ended == 1


@pytest.mark.parametrize("new_tokens", [1, 9, [3, 9]])
def test_streaming_row_by_row(new_tokens):
    streamer = RowCollector()
    cfg = CFG.replace(max_new_tokens=new_tokens, eos_token_id=[12])
    out = count([[3], [10]], cfg, streamer=streamer)
    assert [streamer.rows[row] for row in range(2)] == all_generated(out)
    assert sorted(streamer.over) == [0, 1]
    assert streamer.over[0] == (1 if new_tokens == 9 else 0)
    assert streamer.ended == 1


@pytest.mark.parametrize("collector", [Collector, RowCollector])
def test_streamer_that_delegates_its_methods(collector):
    class Proxy:
        def __init__(self, streamer):
            self.streamer = streamer

        def __getattr__(self, name):
            return getattr(self.streamer, name)

    streamer = collector()
    count([[3], [7]], CFG.replace(max_new_tokens=3), streamer=Proxy(streamer))
    assert streamer.ended == 1


@pytest.mark.slow
def test_streaming_the_sequences_of_a_prompt():
    streamer = RowCollector()
    cfg = CFG.replace(max_new_tokens=[5, 9], do_sample=True, temperature=9.0, num_return_sequences=3, eos_token_id=[12])
    out = count([[3], [10]], cfg, key=jax.random.key(0), streamer=streamer)
    assert [streamer.rows[row] for row in range(6)] == all_generated(out)
    assert sorted(streamer.over) == [*range(6)]


def one_argument(scores):
    return scores


@flax.struct.dataclass
class OneArgument(StepHook):
    value: int

    def __call__(self, scores):
        return scores

    def before(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("keyword", "value", "error", "message"),
    [
        ("assistant", PARAMS, TypeError, r"assistant must be \(params, cfg\)"),
        ("logits_processor", print, TypeError, "logits_processor must be a list"),
        ("logits_processor", [3], TypeError, "logits_processor must be a list of functions"),
        ("stopping_criteria", {1}, TypeError, "stopping_criteria must be a list"),
        ("prefix_allowed_tokens_fn", [1], TypeError, "prefix_allowed_tokens_fn must be a function"),
        ("inputs_embeds", np.zeros((1, 1, 3), np.float32), InputError, r"inputs_embeds must have shape \[B, P, 64\]"),
        ("inputs_embeds", np.zeros((1, 1, 64), np.int32), TypeError, "inputs_embeds must be floats"),
        ("inputs_embeds", np.zeros((1, 2, 64), np.float32), InputError, "must describe the same tokens"),
        ("negative_prompt_attention_mask", [[1]], InputError, "is for negative_prompt_ids"),
        ("cache", 3, TypeError, "cache must be"),
        ("hook", 3, TypeError, "hook must be an object of a class derived from"),
        ("hook", StepHook, TypeError, "hook must be an object"),
        ("streamer", 3, TypeError, "streamer must have the methods put and end, or put_row and end, got int"),
        (
            "logits_processor",
            [one_argument],
            TypeError,
            r"logits_processor one_argument\(scores\) must accept \(history, ",
        ),
        (
            "stopping_criteria",
            [jax.jit(one_argument)],
            TypeError,
            r"stopping_criteria one_argument\(scores\) must accept",
        ),
        ("stopping_criteria", [OneArgument(3)], TypeError, r"stopping_criteria OneArgument\(scores\) must accept"),
        ("prefix_allowed_tokens_fn", one_argument, TypeError, r"one_argument\(scores\) must accept \(row, ids\)"),
        ("hook", OneArgument(3), TypeError, r"hook's before before\(inputs\) must accept \(state, history, inputs\)"),
        ("logits_processor", [lambda h, s: s[:, :10]], InputError, r"must return the scores, float32\[1, 50\]"),
        ("logits_processor", [lambda h, s: None], InputError, "must return the scores, .* got None"),
    ],
)
def test_mismatched_arguments_are_refused_by_name(keyword, value, error, message):
    with pytest.raises(error, match=message):
        generate(PARAMS, [[1]], None, CFG, **{keyword: value})


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"temperature": 0.5}, TypeError, r"cfg.replace\(temperature="),
        ({"assistant_model": 1}, TypeError, r"pass assistant=\(params, cfg\)"),
        ({"synced_gpus": True}, TypeError, "synced_gpus"),
        ({"past_key_values": 1}, TypeError, "cache="),
        ({"max_new_token": 1}, ConfigError, "did you mean 'max_new_tokens'"),
        ({"attention_masks": 1}, TypeError, "did you mean 'attention_mask'"),
        ({"quick": 1}, TypeError, "has no argument 'quick': it has params, ids, key, cfg, attention_mask,"),
    ],
)
def test_unknown_keywords_are_refused(kwargs, error, message):
    with pytest.raises(error, match=message):
        generate(PARAMS, [[1]], None, CFG, **kwargs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: generate(PARAMS, input_ids=[[1]]), r"generate\(\) has no input_ids: pass the prompts as ids"),
        (lambda: generate(PARAMS, inputs=[[1]]), r"generate\(\) has no inputs: pass the prompts as ids"),
        (lambda: generate(PARAMS, [[1]], None, generation_config=CFG), "has no generation_config: .* as cfg"),
        (lambda: prefill(PARAMS, input_ids=[[1]]), r"prefill\(\) has no input_ids"),
        (lambda: score(PARAMS, [[1]], CFG, temperature=0.5), r"score\(\) has no temperature.*cfg.replace\(temp"),
    ],
)
def test_calls_as_in_transformers_get_a_hint(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_signature_of_generate_is_preserved():
    names = list(inspect.signature(generate).parameters)
    assert names[:5] == ["params", "ids", "key", "cfg", "attention_mask"]
    jitted = jax.jit(generate, static_argnames="tokenizer")
    assert jitted.eval_shape(PARAMS, ids=IDS, key=None, cfg=CFG).sequences.shape == (1, 7)
    with pytest.raises(ValueError, match="It is a pytree: pass it to a compiled function as an ordinary argument"):
        jax.jit(generate, static_argnums=3)(PARAMS, IDS, None, CFG)
    with pytest.raises(TypeError, match="a GenerationConfig cannot be hashed"):
        hash(CFG)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": [[1], [1, 2]]}, InputError, "one array"),
        ({"ids": [1, 2]}, InputError, r"\[B, P\]"),
        ({"ids": np.zeros((0, 3), int)}, InputError, "at least 1"),
        ({"ids": np.zeros((1, 0), int)}, InputError, "at least 1"),
        ({"ids": [[1.0]]}, TypeError, "integers"),
        ({"ids": [[50]]}, InputError, "token 50.*0 to 49"),
        ({"ids": [[-1]]}, InputError, "token -1"),
        ({"ids": None}, InputError, "ids and bos_token_id are both None"),
        ({"attention_mask": [[1, 1]]}, InputError, "shape of ids"),
        ({"attention_mask": [[0]]}, InputError, "prompt 0 is empty"),
        ({"attention_mask": [[2]]}, InputError, "0 for padding"),
        (
            {"cfg": {}},
            TypeError,
            r"GenerationConfig, got dict: load_hf\(path\) .* GenerationConfig.from_hf\(fields, model\)",
        ),
        ({"cfg": None}, TypeError, r"GenerationConfig, got NoneType: load_hf\(path\) returns one with the parameters"),
        ({"params": [1]}, TypeError, "params must be"),
        ({"params": {"model": {}}}, InputError, "lm_head.weight is missing"),
        ({"cfg": CFG.replace(do_sample=True)}, InputError, "key is None"),
        ({"cfg": CFG.replace(do_sample=True), "key": 3}, TypeError, "jax.random.key"),
        (
            {"cfg": CFG.replace(do_sample=True), "key": jax.random.split(jax.random.key(0), 2)},
            InputError,
            "one per prompt",
        ),
        (
            {"cfg": CFG.replace(repetition_penalty=[1.5, 1.2])},
            InputError,
            "repetition_penalty has 2 values for 1 prompts",
        ),
        ({"cfg": CFG.replace(max_new_tokens=[1, 2])}, InputError, "max_new_tokens has 2 values"),
        ({"cfg": counting_config(max_length=1)}, InputError, "max_length=1"),
        ({"cfg": CFG.replace(output_logprobs="logits", top_logprobs=51)}, ConfigError, "top_logprobs=51 exceeds"),
    ],
)
def test_bad_input_is_refused_with_a_reason(change, error, message):
    request = {"params": PARAMS, "ids": [[1]], "key": None, "cfg": CFG, "attention_mask": None} | change
    with pytest.raises(error, match=message):
        generate(
            request["params"], request["ids"], request["key"], request["cfg"], attention_mask=request["attention_mask"]
        )


def test_parameters_with_wrong_shapes_are_named():
    params = jax.tree.map(lambda x: x, PARAMS)
    params["model"]["norm"]["weight"] = jnp.ones(3)
    with pytest.raises(InputError, match=r"model.norm.weight has shape \[3\], wanted \[64\]"):
        generate(params, [[1]], None, CFG)


def test_the_default_length_draws_a_warning():
    with pytest.warns(JaxgenWarning, match="neither max_new_tokens nor max_length") as caught:
        out = generate(PARAMS, [[3], [5]], None, counting_config())
    assert all_generated(out) == [list(range(4, 23)), list(range(6, 25))]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("fields", [{"min_new_tokens": 7}, *slow({"min_length": 8}, {"min_new_tokens": [7, 7]})])
def test_minimum_length_beyond_the_budget_draws_a_warning(fields):
    with pytest.warns(JaxgenWarning, match=f"{next(iter(fields))}=.* cannot be reached with 6 new tokens") as caught:
        out = generate(PARAMS, [[3], [4]], None, CFG.replace(eos_token_id=5, **fields))
    assert out.lengths.tolist() == [6, 6]
    assert caught[0].filename == __file__


def test_warning_names_the_smallest_budget():
    cfg = CFG.replace(eos_token_id=5, min_new_tokens=10, max_new_tokens=[12, 4])
    with pytest.warns(JaxgenWarning, match="min_new_tokens=10 cannot be reached with 4 new tokens"):
        generate(PARAMS, [[3], [3]], None, cfg)


def test_concrete_input_is_also_checked_under_jit():
    def traced(ids, mask=None, **fields):
        return jax.jit(lambda p: generate(p, ids, None, CFG.replace(**fields), attention_mask=mask).sequences)(PARAMS)

    with pytest.raises(InputError, match="token 50"):
        traced([[50]])
    with pytest.raises(InputError, match="prompt 0 is empty"):
        traced([[1, 2]], [[0, 0]])
    with pytest.warns(JaxgenWarning, match="temperature=0.5"):
        traced([[1]], temperature=0.5)


def test_a_whole_batch_in_place_of_its_ids_is_refused():
    with pytest.raises(TypeError, match=r"batch\.ids"):
        generate(PARAMS, Batch(np.ones((1, 2), int), np.ones((1, 2), int)), None, CFG)
    with pytest.raises(InputError, match="without the outer"):
        generate({"params": PARAMS}, [[1]], None, CFG)


def test_frozen_dict_params_are_accepted():
    frozen = generate(flax.core.freeze(PARAMS), [[3], [7]], None, CFG)
    assert (frozen.sequences == generate(PARAMS, [[3], [7]], None, CFG).sequences).all()


def test_options_that_greedy_search_ignores_draw_a_warning():
    with pytest.warns(JaxgenWarning, match="temperature=0.5, top_p=0.9") as caught:
        generate(PARAMS, [[3], [7]], None, CFG.replace(temperature=0.5, top_p=0.9))
    assert caught[0].filename == __file__
    with pytest.warns(JaxgenWarning, match="length_penalty=2.0"):
        count([[3], [7]], CFG.replace(length_penalty=2))
