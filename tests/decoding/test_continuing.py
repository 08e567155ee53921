"""Going on from an earlier output's cache is a run from the beginning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import CausalLM, GenerationConfig, InputError, KVCache, generate
from tests.models import counting_config, counting_params, generated, left_pad, model_config, random_params

MODEL = model_config()
PARAMS = random_params(MODEL)
CFG = GenerationConfig(model=MODEL, max_new_tokens=8, pad_token_id=0)
PROMPTS = [[5, 6, 7], [11], [20, 21, 22, 23, 24]]
FOLLOWING = [[30], [31, 32, 33], [34, 35]]


def start(cfg, key=None, **options):
    ids, mask = left_pad(PROMPTS)
    return generate(PARAMS, ids, key, cfg, attention_mask=mask, **options)


def both(cfg, first, key=None):
    """The rows of a run that goes on, and those of one from the beginning."""
    ids, mask = left_pad(FOLLOWING)
    on = generate(PARAMS, ids, key, cfg, attention_mask=mask, cache=first.cache)
    whole = [prompt + generated(first, row) + FOLLOWING[row] for row, prompt in enumerate(PROMPTS)]
    ids, mask = left_pad(whole)
    anew = generate(PARAMS, ids, key, cfg, attention_mask=mask)
    return [[generated(out, row) for row in range(3)] for out in (on, anew)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"repetition_penalty": 1.4},
        {"max_new_tokens": [3, 1, 8]},
        {"do_sample": True, "temperature": 1.5, "top_k": 20},
        {"min_length": 16, "eos_token_id": list(range(40, 80))},
    ],
)
def test_going_on_is_beginning_anew(fields):
    cfg = CFG.replace(**fields)
    key = jax.random.key(4) if cfg.do_sample else None
    first = start(cfg.replace(min_length=0, eos_token_id=None), key)
    on, anew = both(cfg, first, key)
    assert on == anew


def test_rows_that_ended_at_different_lengths():
    ends = [generated(start(CFG), row)[position] for row, position in ((0, 2), (1, 5))]
    cfg = CFG.replace(eos_token_id=ends)
    first = start(cfg)
    assert len(set(np.asarray(first.lengths).tolist())) > 1
    on, anew = both(cfg, first)
    assert on == anew


def test_a_long_conversation():
    cfg = counting_config(max_new_tokens=5, pad_token_id=0)
    params = counting_params(cfg)
    cache = None
    for turn in range(15):
        out = generate(params, [[turn + 1], [turn + 7]], None, cfg, cache=cache)
        assert generated(out, 1) == [(turn + 8 + step) % 50 for step in range(5)]
        cache = out.cache
        assert cache.total_known.tolist() == [6 * (turn + 1)] * 2
        assert cache.total_length.tolist() == [6 * (turn + 1) - 1] * 2
    kept = np.concatenate([np.asarray(part.tokens)[0, : int(part.known[0])] for part in cache.parts])
    assert kept.tolist() == [(turn + 1 + step) % 50 for turn in range(15) for step in range(6)]


def test_max_length_counts_what_the_cache_holds():
    first = start(CFG)
    out = generate(PARAMS, [[1], [2], [3]], None, CFG.replace(max_new_tokens=None, max_length=21), cache=first.cache)
    assert out.lengths.tolist() == [21 - (len(prompt) + 8 + 1) for prompt in PROMPTS]


@pytest.mark.slow
def test_return_sequences_go_on_each_by_itself():
    cfg = CFG.replace(do_sample=True, num_return_sequences=2, temperature=2.0)
    first = start(cfg, jax.random.key(1))
    ids = np.arange(40, 46)[:, None]
    on = generate(PARAMS, ids, None, CFG, cache=first.cache)
    for row in range(6):
        prompt = PROMPTS[row // 2] + generated(first, row) + [40 + row]
        assert generated(on, row) == generated(generate(PARAMS, [prompt], None, CFG), 0)


def test_a_cache_of_the_model_alone():
    prompt = jnp.asarray([[5, 6, 7, 8]])
    cache = CausalLM(MODEL).apply({"params": PARAMS}, prompt, cache=KVCache.create(MODEL, 1, 10)).cache
    out = generate(PARAMS, [[9]], None, CFG, cache=cache)
    assert generated(out, 0) == generated(generate(PARAMS, [[5, 6, 7, 8, 9]], None, CFG), 0)
    with pytest.raises(InputError, match="repetition_penalty looks at all tokens"):
        generate(PARAMS, [[9]], None, CFG.replace(repetition_penalty=1.2), cache=cache)


def test_under_jit():
    first = start(CFG)
    ids, mask = left_pad(FOLLOWING)
    plain = generate(PARAMS, ids, None, CFG, attention_mask=mask, cache=first.cache)

    @jax.jit
    def go_on(params, cache, ids, mask):
        return generate(params, ids, None, CFG, attention_mask=mask, cache=cache).sequences

    assert (go_on(PARAMS, first.cache, jnp.asarray(ids), jnp.asarray(mask)) == plain.sequences).all()


def test_the_cache_that_was_given_is_not_changed():
    first = start(CFG)
    before = jax.tree.map(np.array, first.cache)
    both(CFG, first)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, first.cache), before)


def test_streaming():
    class Collect:
        def __init__(self):
            self.values = []

        def put(self, value):
            self.values.append(np.asarray(value).reshape(-1))

        def end(self):
            self.values = np.concatenate(self.values)

    first, collect = start(CFG), Collect()
    ids, mask = left_pad(FOLLOWING)
    generate(PARAMS, ids, None, CFG, attention_mask=mask, cache=first.cache, streamer=collect)
    out = generate(PARAMS, ids, None, CFG, attention_mask=mask, cache=first.cache)
    assert collect.values[ids.size :].reshape(-1, 3).T.tolist() == np.asarray(out.sequences)[:, 3:].tolist()


def test_caches_that_do_not_fit():
    first = start(CFG)
    with pytest.raises(InputError, match="the cache has 3 rows and there are 1 prompts"):
        generate(PARAMS, [[1]], None, CFG, cache=first.cache)
    with pytest.raises(TypeError, match=r"cache must be the cache of an earlier output, a jaxgen\.KVCache, got dict"):
        generate(PARAMS, [[1]], None, CFG, cache={})
    other = dataclasses.replace(MODEL, num_hidden_layers=1, windows=(None,))
    with pytest.raises(InputError, match="the cache is of another model"):
        generate(PARAMS, [[1]], None, CFG, cache=KVCache.create(other, 1, 8))
