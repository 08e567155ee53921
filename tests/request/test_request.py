"""Runs without a prompt, with embeddings, guidance, long prompts in chunks, a cache, or hooks."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import ConfigError, InputError, StepHook, StopReason, generate, prefill, score
from tests.support.models import (
    all_generated,
    counting_config,
    counting_params,
    last_logits,
    left_pad,
    model_config,
    random_params,
    slow,
)
from tests.support.small import CFG, IDS, MASK, MODEL, PARAMS, PROMPTS, TABLE
from tests.support.streamers import Collector


def run(cfg=CFG, ids=IDS, **options):
    options.setdefault("attention_mask", MASK)
    return generate(PARAMS, ids, None, cfg, **options)


def test_call_without_prompts_begins_with_bos():
    cfg = counting_config(max_new_tokens=3, bos_token_id=10, pad_token_id=0)
    out = generate(counting_params(cfg), None, None, cfg)
    assert out.sequences.tolist() == [[10, 11, 12, 13]]


@pytest.mark.slow
def test_embeddings_in_place_of_ids():
    cfg = CFG.replace(repetition_penalty=1.3)
    np.testing.assert_array_equal(run(cfg, inputs_embeds=TABLE[IDS]).sequences, run(cfg).sequences)


@pytest.mark.slow
def test_embeddings_without_ids_count_for_the_lengths():
    embeds = TABLE[[[20, 21, 22, 23, 24]]]
    limited = run(CFG.replace(max_new_tokens=None, max_length=12), None, inputs_embeds=embeds, attention_mask=None)
    assert limited.lengths.tolist() == [7]
    said = all_generated(run(CFG, None, inputs_embeds=embeds, attention_mask=None))[0]
    ended = run(CFG.replace(min_length=7, eos_token_id=said), None, inputs_embeds=embeds, attention_mask=None)
    plain = run(CFG.replace(min_length=7, eos_token_id=said), [[20, 21, 22, 23, 24]], attention_mask=None)
    assert all_generated(ended) == all_generated(plain)
    assert ended.lengths.tolist() == [3]


@pytest.mark.slow
def test_embeddings_without_ids():
    assert all_generated(run(inputs_embeds=TABLE[IDS], ids=None)) == all_generated(run())
    # The processors see only generated tokens, and the output contains only these.
    cfg = CFG.replace(repetition_penalty=1.3)
    alone = run(cfg, None, inputs_embeds=TABLE[IDS])
    assert alone.sequences.shape == (3, 6)
    again = jax.jit(lambda x: generate(PARAMS, None, None, cfg, inputs_embeds=x, attention_mask=MASK).sequences)
    np.testing.assert_array_equal(again(TABLE[IDS]), alone.sequences)


def guided(prompt, negative, scale, steps=6):
    """Guidance computed from its formula: two passes of the model per token, without a cache."""
    said = []
    for _ in range(steps):
        with_prompt, without = (
            jax.nn.log_softmax(last_logits(MODEL, PARAMS, TABLE[ids + said])) for ids in (prompt, negative)
        )
        said.append(int(jnp.argmax(without + scale * (with_prompt - without))))
    return said


@pytest.mark.parametrize("scale", [1.7, 0.4])
@pytest.mark.slow
def test_guidance(scale):
    cfg = CFG.replace(guidance_scale=scale)
    assert all_generated(run(cfg)) == [guided(prompt, prompt[-1:], scale) for prompt in PROMPTS]
    negatives = [[1, 2, 3, 4, 5, 6], [9], [8, 7]]
    ids, mask = left_pad(negatives)
    out = run(cfg, negative_prompt_ids=ids, negative_prompt_attention_mask=mask)
    expected = [guided(prompt, negative, scale) for prompt, negative in zip(PROMPTS, negatives, strict=True)]
    assert all_generated(out) == expected
    same = run(cfg, negative_prompt_ids=[[9]])
    assert all_generated(same) == [guided(prompt, [9], scale) for prompt in PROMPTS]


@pytest.mark.slow
def test_negative_prompt_is_unused_if_guidance_is_off():
    off = CFG.replace(guidance_scale=1.0)
    plain = all_generated(run(CFG))
    assert all_generated(run(off, negative_prompt_ids=[[9]])) == plain
    traced = jax.jit(lambda cfg: generate(PARAMS, IDS, None, cfg, attention_mask=MASK, negative_prompt_ids=[[9]]))(off)
    assert all_generated(traced) == plain
    with pytest.raises(InputError, match="negative_prompt_ids need guidance_scale"):
        run(CFG, negative_prompt_ids=[[9]])


@pytest.mark.slow
def test_guidance_continues_from_its_cache():
    cfg = CFG.replace(guidance_scale=1.5)
    first = run(cfg)
    assert first.cache.rows == 3
    on = generate(PARAMS, [[30]] * 3, None, cfg, cache=first.cache, negative_prompt_ids=[[4, 5]])
    whole = [prompt + said + [30] for prompt, said in zip(PROMPTS, all_generated(first), strict=True)]
    assert all_generated(on) == [guided(prompt, [4, 5], 1.5) for prompt in whole]


@pytest.mark.slow
def test_a_long_negative_prompt_beside_a_short_cache():
    cfg, negative = CFG.replace(guidance_scale=1.5), [*range(1, 41)]
    first = prefill(PARAMS, [[5, 6, 7]], cfg)
    on = generate(PARAMS, [[9]], None, cfg, cache=first, negative_prompt_ids=[negative])
    assert all_generated(on) == [guided([5, 6, 7, 9], negative, 1.5)]
    jitted = jax.jit(lambda p: generate(p, [[9]], None, cfg, cache=first, negative_prompt_ids=[negative]).sequences)
    np.testing.assert_array_equal(jitted(PARAMS), on.sequences)


@pytest.mark.slow
def test_a_row_without_guidance_among_others():
    cfg = CFG.replace(repetition_penalty=1.5)
    together = run(cfg.replace(guidance_scale=[1.0, 2.0, 1.0]), streamer=Collector())
    assert [all_generated(together)[row] for row in (0, 2)] == [all_generated(run(cfg))[row] for row in (0, 2)]


@pytest.mark.slow
def test_guidance_of_several_sequences():
    cfg = CFG.replace(guidance_scale=1.5, do_sample=True, num_return_sequences=2, top_k=0)
    out = generate(PARAMS, IDS, jax.random.key(0), cfg, attention_mask=MASK)
    key = jax.random.fold_in(jax.random.key(0), 2)[None]
    alone = generate(PARAMS, IDS[2:], key, cfg)
    assert all_generated(out)[4:] == all_generated(alone)


@pytest.mark.parametrize("chunk", [2, *slow(1, 3, 100)])
def test_prompt_in_chunks_equals_one_pass(chunk):
    cfg = CFG.replace(prefill_chunk_size=chunk, output_logits=True)
    whole = run(cfg.replace(prefill_chunk_size=None))
    out = run(cfg)
    assert all_generated(out) == all_generated(whole)
    np.testing.assert_allclose(out.logits, whole.logits, atol=1e-5)
    np.testing.assert_allclose(out.cache.kv.keys[1][2, :, :5], whole.cache.kv.keys[1][2, :, :5], atol=1e-5)


@pytest.mark.slow
def test_chunks_bound_the_memory_of_a_prefill():
    ids, model = jnp.ones((1, 4096), jnp.int32), model_config(intermediate_size=512, max_position_embeddings=8192)
    params = random_params(model)

    def memory(chunk):
        cfg = CFG.replace(model=model, prefill_chunk_size=chunk, max_new_tokens=1)
        run = jax.jit(lambda params, ids: generate(params, ids, None, cfg).sequences)
        return run.lower(params, ids).compile().memory_analysis().temp_size_in_bytes

    assert memory(64) < memory(None) / 4


def test_chunks_are_refused_if_one_pass_is_required():
    scaled = model_config(rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(ConfigError, match="prefill_chunk_size is not offered with dynamic RoPE"):
        generate(random_params(scaled), IDS, None, CFG.replace(prefill_chunk_size=2, model=scaled))
    with pytest.raises(ConfigError, match="output_attentions needs the prompt in one piece"):
        run(CFG.replace(prefill_chunk_size=2, output_attentions=True))


# --- Hooks ------------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class Feedback(StepHook):
    """An example hook that adds the sum of the generated tokens' directions to each embedding."""

    directions: jax.Array

    def init(self, history):
        return jnp.zeros((history.length.shape[0], self.directions.shape[1]))

    def before(self, total, history, inputs):
        new = self.directions[inputs.ids[:, -1]] * jnp.where(history.step > 0, 1.0, 0.0)[:, None]
        total = total + new
        return dataclasses.replace(inputs, inputs_embeds=inputs.inputs_embeds + total[:, None, :]), total


def fed_back(prompt, directions, steps=6):
    """Generate without a cache, as a reference. Each token keeps the embedding with which it was first read."""
    embeds = TABLE[prompt]
    total, said = jnp.zeros(MODEL.hidden_size), []
    for _ in range(steps):
        said.append(int(jnp.argmax(last_logits(MODEL, PARAMS, embeds))))
        total = total + directions[said[-1]]
        embeds = jnp.concatenate([embeds, (TABLE[said[-1]] + total)[None]])
    return said


@pytest.mark.parametrize("chunk", slow(None, 2))
def test_a_hook_that_adds_an_embedding_at_every_step(chunk):
    directions = 0.5 * jax.random.normal(jax.random.key(0), (MODEL.vocab_size, MODEL.hidden_size))
    out = run(CFG.replace(prefill_chunk_size=chunk), hook=Feedback(directions))
    assert all_generated(out) == [fed_back(prompt, directions) for prompt in PROMPTS]
    assert all_generated(out) != all_generated(run())


class See(StepHook):
    """A hook that counts its calls per row, and changes one logit depending on a hidden state."""

    def init(self, history):
        return {"calls": jnp.zeros(history.length.shape[0], jnp.int32)}

    def after(self, state, history, output):
        assert len(output.hidden_states) == MODEL.num_hidden_layers + 1
        largest = jnp.max(jnp.abs(output.hidden_states[-1]), axis=-1)
        # On every second call, the likeliest token is 50 plus the number of calls so far.
        token = state["calls"] + 50
        bonus = jnp.where(state["calls"] % 2 == 0, 100.0 + largest, 0.0)
        logits = output.logits.at[jnp.arange(len(token)), token].add(bonus)
        return dataclasses.replace(output, logits=logits), {"calls": state["calls"] + 1}


@pytest.mark.parametrize(
    "fields", [{}, {"do_sample": True, "top_k": 0, "num_return_sequences": 2}, {"guidance_scale": 2.0}]
)
@pytest.mark.slow
def test_a_hook_sees_hidden_states_and_changes_logits(fields):
    out = generate(PARAMS, IDS, jax.random.key(0), CFG.replace(**fields), attention_mask=MASK, hook=See())
    for row in all_generated(out):
        assert row[::2] == [50, 52, 54]


class Hide(StepHook):
    """A hook that hides each row's second token from the third step on."""

    def before(self, state, history, inputs):
        hidden = jnp.arange(inputs.attention_mask.shape[1])[None, :] == 1
        visible = inputs.attention_mask & ~(hidden & (history.step >= 2)[:, None])
        return dataclasses.replace(inputs, attention_mask=visible), state


@pytest.mark.slow
def test_a_hook_that_changes_the_mask():
    out = run(CFG.replace(output_attentions=True), hook=Hide())
    weights = np.stack([np.asarray(layer) for layer in out.attentions.decode])  # [L, steps, rows, heads, columns]
    column = MASK.argmax(-1) + 1
    for row in (0, 2):
        assert (weights[:, 0, row, :, column[row]] > 0).all()
        assert (weights[:, 1:, row, :, column[row]] == 0).all()


@pytest.mark.slow
def test_a_hook_that_changes_positions():
    class Shift(StepHook):
        def before(self, state, history, inputs):
            return dataclasses.replace(inputs, position_ids=inputs.position_ids + 3), state

    shifted = run(CFG.replace(output_logits=True), hook=Shift())
    plain = run(CFG.replace(output_logits=True))
    np.testing.assert_allclose(shifted.logits, plain.logits, atol=1e-4)  # RoPE depends only on differences of positions

    class Same(StepHook):
        def before(self, state, history, inputs):
            return dataclasses.replace(inputs, position_ids=jnp.zeros_like(inputs.position_ids)), state

    assert all_generated(run(hook=Same())) != all_generated(plain)


@pytest.mark.slow
def test_hook_gives_the_same_tokens_streamed_and_jitted():
    directions = 0.5 * jax.random.normal(jax.random.key(0), (MODEL.vocab_size, MODEL.hidden_size))
    plain = run(hook=Feedback(directions))

    assert all_generated(run(hook=Feedback(directions), streamer=Collector())) == all_generated(plain)
    jitted = jax.jit(lambda hook: generate(PARAMS, IDS, None, CFG, attention_mask=MASK, hook=hook).sequences)
    np.testing.assert_array_equal(jitted(Feedback(directions)), plain.sequences)


class Wrong(StepHook):
    """A hook with the given methods, one of which breaks the contract."""

    def __init__(self, **methods):
        for name, value in methods.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        (
            {"init": lambda history: jnp.zeros(7)},
            InputError,
            r"init must return arrays whose first axis is the rows, \[3, ...\]",
        ),
        ({"init": lambda history: {"count": 0}}, InputError, "got one of shape \\[\\]"),
        ({"before": lambda state, history, inputs: inputs}, TypeError, r"before must return \(StepInputs, state\)"),
        ({"after": lambda state, history, output: (1, state)}, TypeError, r"after must return \(StepOutput, state\)"),
    ],
)
def test_hooks_that_break_their_contract_are_refused(methods, error, message):
    with pytest.raises(error, match=message):
        run(hook=Wrong(**methods))


def test_embeddings_need_a_negative_prompt_of_ids():
    with pytest.raises(InputError, match="pass negative_prompt_ids"):
        run(CFG.replace(guidance_scale=2.0), None, inputs_embeds=TABLE[IDS])


class NotAnArray:
    pass


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("hello", r"ids is text: encode it with a tokenizer first, tok\.batch"),
        (["hello"], "ids is text"),
        (b"hello", "ids is text"),
        ({"input_ids": [[1]]}, "ids is a dict: pass its input_ids"),
        (NotAnArray(), "ids must be an array of token ids, got NotAnArray"),
        ([[1.5]], "ids must be integers"),
    ],
)
def test_prompts_must_be_ids(ids, message):
    with pytest.raises(TypeError, match=message):
        generate(PARAMS, ids, None, CFG)


def branches(history, scores):
    return scores if scores[0, 0] > 0 else -scores


USES_VALUES = {
    "numpy": lambda history, scores: np.where(np.asarray(scores) > 0, scores, -1),
    "if": branches,
    "float": lambda history, scores: scores + float(scores[0, 0]),
    "int": lambda history, scores: scores + [1, 2, 3][history.step[0]],
    "item": lambda history, scores: scores + scores[0, 0].item(),
}


@pytest.mark.parametrize("argument", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("function", USES_VALUES.values(), ids=USES_VALUES)
def test_functions_that_read_traced_values_get_a_hint(argument, function):
    with pytest.raises(InputError, match=f"a function in {argument} uses the value of an array, .* jax.numpy instead"):
        run(**{argument: [function]})


def test_processors_of_transformers_get_a_hint():
    kind = type("TopKLogitsWarper", (), {"__module__": "transformers.generation", "__call__": lambda self, a, b: b})
    with pytest.raises(TypeError, match="contains transformers' TopKLogitsWarper, which computes with torch: set the"):
        run(logits_processor=[kind()])


@pytest.mark.slow
def test_the_generated_columns_of_arrays_that_are_aligned_with_the_sequences():
    cfg = counting_config(max_new_tokens=3, pad_token_id=0, output_logprobs="logits")
    params = counting_params(cfg)
    out = generate(params, [[10, 11], [20, 21]], None, cfg)
    assert out.generated(out.sequences).tolist() == [[12, 13, 14], [22, 23, 24]]

    def again(out):
        scores = score(params, out.sequences, cfg, attention_mask=out.attention_mask, top_logprobs=2)
        return out.generated((scores, out.attention_mask))

    scores, mask = jax.jit(again)(out)
    np.testing.assert_allclose(scores.logprobs, out.logprobs, atol=1e-5)
    assert scores.top_tokens.shape == (2, 3, 2)
    assert mask.tolist() == [[True] * 3] * 2
    with pytest.raises(InputError, match=r"the axes of sequences, \[2, 5\], got shape \[2, 3\]"):
        out.generated(out.logprobs)


@pytest.mark.slow
def test_repr_of_an_output_shows_shapes():
    cfg = counting_config(max_new_tokens=3, pad_token_id=0, eos_token_id=12, output_logprobs="logits")
    out = generate(counting_params(cfg), [[10], [20]], None, cfg)
    assert repr(out) == (
        "GenerateOutput(sequences=int32[2, 4], attention_mask=bool[2, 4], lengths=[2, 3], stop_reasons=[EOS, LENGTH], "
        f"logprobs=float32[2, 3], cache=Continuation(2 rows, {out.cache.slots} slots), prompt_width=1)"
    )
    numbers = f"float32[4, 1, {out.cache.kv.slots}, 32]"
    layers = f"1 x KeysValues(keys={numbers}, values={numbers}, dtype='float32')"
    expected = f"KVCache(layers={layers}, length=int32[4], writers=1, streams=1)"
    assert repr(out.cache.kv) == expected
    assert f"prefix={expected}" in repr(out.cache.kv.fork(1, 8))
    assert "lengths=int32[2]" in str(jax.eval_shape(lambda: generate(counting_params(cfg), [[10], [20]], None, cfg)))
    many = out.replace(stop_reasons=jnp.asarray([StopReason.EOS] * 5 + [StopReason.LENGTH] * 6 + [StopReason.EOS]))
    assert "stop_reasons=[6 x EOS, 6 x LENGTH]" in repr(many)
