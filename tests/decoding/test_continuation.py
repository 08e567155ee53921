"""Continuing from the cache of an earlier output gives the same tokens as starting from the beginning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_hf
from jaxgen import CausalLM, GenerationConfig, InputError, KVCache, Tokenizer, demo, generate, prefill
from tests.support import small
from tests.support.models import (
    all_generated,
    counting_config,
    counting_params,
    generated,
    left_pad,
    slow,
    with_layers,
)
from tests.support.small import MODEL, PARAMS, PROMPTS
from tests.support.streamers import Collector
from tests.support.tokenizers import byte_level

CFG = small.CFG.replace(max_new_tokens=8)
FOLLOWING = [[30], [31, 32, 33], [34, 35]]


def start(cfg, key=None, **options):
    ids, mask = left_pad(PROMPTS)
    return generate(PARAMS, ids, key, cfg, attention_mask=mask, **options)


def both(cfg, first, key=None, **given):
    """Return the tokens of a run that continues from a cache, and those of a run from the beginning."""
    ids, mask = left_pad(FOLLOWING)
    on = generate(PARAMS, ids, key, cfg, attention_mask=mask, cache=first.cache, **given)
    whole = [prompt + generated(first, row) + FOLLOWING[row] for row, prompt in enumerate(PROMPTS)]
    ids, mask = left_pad(whole)
    fresh = generate(PARAMS, ids, key, cfg, attention_mask=mask, **given)
    return [all_generated(out) for out in (on, fresh)]


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": [1.4, 1.0, 1.2], "max_new_tokens": [3, 1, 8]},
        *slow({}, {"do_sample": True, "temperature": 1.5, "top_k": 20}),
        *slow({"min_length": 16, "eos_token_id": list(range(40, 80))}),
    ],
)
def test_continuing_equals_generating_from_the_whole_text(fields):
    cfg = CFG.replace(**fields)
    key = jax.random.key(4) if cfg.do_sample else None
    first = start(cfg.replace(min_length=0, eos_token_id=None), key)
    on, fresh = both(cfg, first, key)
    assert on == fresh


@pytest.mark.slow
def test_stop_strings_per_prompt_may_begin_in_the_cache():
    """Two prompts have stop strings that start in the last cached token and end in the first new token."""
    first, tok = start(CFG), byte_level()
    unstopped, _ = both(CFG, first)
    text = [tok.decode([*generated(first, row)[-1:], *FOLLOWING[row], *unstopped[row][:1]]) for row in range(3)]
    assert all(map(str.isascii, text))
    cfg = CFG.replace(stop_strings=[[text[0]], None, [text[2], text[0]]])
    on, fresh = both(cfg, first, tokenizer=tok)
    assert on == fresh == [unstopped[0][:1], unstopped[1], unstopped[2][:1]]


@pytest.mark.slow
def test_rows_that_ended_at_different_lengths():
    ends = [generated(start(CFG), row)[position] for row, position in ((0, 2), (1, 5))]
    cfg = CFG.replace(eos_token_id=ends)
    first = start(cfg)
    assert len(set(np.asarray(first.lengths).tolist())) > 1
    on, fresh = both(cfg, first)
    assert on == fresh


@pytest.mark.slow
def test_conversations_after_a_shared_beginning():
    params, cfg = load_hf(demo.PATH, dtype="float32")
    tok = Tokenizer.from_pretrained(demo.PATH)
    system = [{"role": "system", "content": "You are a fox who answers in few words."}]
    words = ["a fox", "Who are you?", "\nhi", " Tell me a story about an owl", "1", "你好"]
    chats = [[*system, {"role": "user", "content": " ".join(words[: n % 6 + 1]) + "!" * n}] for n in range(30)]
    prefix = tok.chat_prefix(system)
    assert len(prefix) > 10
    whole, rest = tok.chat(chats), tok.chat(chats, after=prefix)
    cfg, key = cfg.replace(max_new_tokens=24), jax.random.key(3)
    shared = prefill(params, [prefix], cfg)
    once = generate(params, rest.ids, key, cfg, attention_mask=rest.attention_mask, cache=shared)
    each = generate(params, whole.ids, key, cfg, attention_mask=whole.attention_mask)
    assert all_generated(once) == all_generated(each)
    assert len(set(tok.decode_batch(once))) > 15


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), [("stories260K-hf", "Once upon a time, there"), ("demo", "The owl said: ")])
def test_text_that_continues_text(request, name, text):
    path = demo.PATH if name == "demo" else request.getfixturevalue("data") / "checkpoints" / name
    params, cfg = load_hf(path, dtype="float32")
    tok = Tokenizer.from_pretrained(path)
    cfg = GenerationConfig(model=cfg.model, max_new_tokens=8)
    first, more = tok.batch([text, text[:9]]), tok.batch(["And then", "And"], add_special_tokens=False)
    out = generate(params, first.ids, None, cfg, attention_mask=first.attention_mask)
    on = generate(params, more.ids, None, cfg, attention_mask=more.attention_mask, cache=out.cache)
    rows = [
        [*tok.encode([text, text[:9]][row]), *generated(out, row), *tok.encode(added, add_special_tokens=False)]
        for row, added in enumerate(("And then", "And"))
    ]
    assert [row.count(tok.bos_token_id) for row in rows] == [int(tok.bos_token_id is not None)] * 2
    ids, mask = left_pad(rows)
    assert all_generated(on) == all_generated(generate(params, ids, None, cfg, attention_mask=mask))


@pytest.mark.parametrize("turns", [4, 15])
@pytest.mark.slow
def test_a_long_conversation(turns):
    cfg = counting_config(max_new_tokens=5, pad_token_id=0)
    params = counting_params(cfg)
    cache = None
    for turn in range(turns):
        out = generate(params, [[turn + 1], [turn + 7]], None, cfg, cache=cache)
        assert generated(out, 1) == [(turn + 8 + step) % 50 for step in range(5)]
        cache = out.cache
        assert cache.count.tolist() == [6 * (turn + 1)] * 2
        assert cache.without_padding().kv.total_length.tolist() == [6 * (turn + 1) - 1] * 2
    kept = np.asarray(cache.tokens)[0, : int(cache.count[0])]
    assert kept.tolist() == [(turn + 1 + step) % 50 for turn in range(turns) for step in range(6)]


@pytest.mark.slow
def test_max_length_counts_cached_tokens():
    first = start(CFG)
    out = generate(PARAMS, [[1], [2], [3]], None, CFG.replace(max_new_tokens=None, max_length=21), cache=first.cache)
    assert out.lengths.tolist() == [21 - (len(prompt) + 8 + 1) for prompt in PROMPTS]


@pytest.mark.slow
def test_returned_sequences_are_continued_independently():
    cfg = CFG.replace(do_sample=True, num_return_sequences=2, temperature=2.0)
    first = start(cfg, jax.random.key(1))
    ids = np.arange(40, 46)[:, None]
    on = generate(PARAMS, ids, None, CFG, cache=first.cache)
    for row in range(6):
        prompt = PROMPTS[row // 2] + generated(first, row) + [40 + row]
        assert generated(on, row) == generated(generate(PARAMS, [prompt], None, CFG), 0)


@pytest.mark.slow
def test_a_cache_of_the_model_alone():
    prompt = jnp.asarray([[5, 6, 7, 8]])
    cache = jax.jit(CausalLM(MODEL).apply)({"params": PARAMS}, prompt, cache=KVCache.create(MODEL, 1, 10)).cache
    out = generate(PARAMS, [[9]], None, CFG, cache=cache)
    assert generated(out, 0) == generated(generate(PARAMS, [[5, 6, 7, 8, 9]], None, CFG), 0)
    for options in ({"repetition_penalty": 1.2}, {"forced_bos_token_id": 3}, {"forced_decoder_ids": [[6, 30]]}):
        with pytest.raises(InputError, match=f"{next(iter(options))} depends on all tokens"):
            generate(PARAMS, [[9]], None, CFG.replace(**options), cache=cache)
    with pytest.raises(InputError, match="repetition_penalty depends on all tokens"):  # the same in a later call
        generate(PARAMS, [[9]], None, CFG.replace(repetition_penalty=1.2), cache=out.cache)


@pytest.mark.slow
def test_unknown_cached_tokens_count_toward_the_length():
    prompt = jnp.asarray([[5, 6, 7, 8]])
    cache = jax.jit(CausalLM(MODEL).apply)({"params": PARAMS}, prompt, cache=KVCache.create(MODEL, 1, 10)).cache
    cfg = CFG.replace(min_length=7, eos_token_id=list(range(0, 97, 2)))
    ended = generate(PARAMS, [[9]], None, cfg, cache=cache)
    assert generated(ended, 0) == generated(generate(PARAMS, [[5, 6, 7, 8, 9]], None, cfg), 0)
    assert 3 <= int(ended.lengths[0]) < 8


PENALIZED = CFG.replace(repetition_penalty=[1.4, 1.0, 1.2])


def test_under_jit():
    first = start(PENALIZED)
    ids, mask = left_pad(FOLLOWING)
    plain = generate(PARAMS, ids, None, PENALIZED, attention_mask=mask, cache=first.cache)

    @jax.jit
    def go_on(params, cfg, cache, ids, mask):
        return generate(params, ids, None, cfg.replace(max_new_tokens=8), attention_mask=mask, cache=cache).sequences

    assert (go_on(PARAMS, PENALIZED, first.cache, jnp.asarray(ids), jnp.asarray(mask)) == plain.sequences).all()


@pytest.mark.slow
def test_given_cache_is_not_modified():
    first = start(CFG)
    before = jax.tree.map(np.array, first.cache)
    both(CFG, first)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, first.cache), before)


@pytest.mark.slow
def test_streaming():
    first, collector = start(CFG), Collector()
    ids, mask = left_pad(FOLLOWING)
    generate(PARAMS, ids, None, CFG, attention_mask=mask, cache=first.cache, streamer=collector)
    out = generate(PARAMS, ids, None, CFG, attention_mask=mask, cache=first.cache)
    np.testing.assert_array_equal(collector.tokens, np.asarray(out.sequences)[:, 3:])


def test_mismatched_caches_are_refused():
    first = start(PENALIZED)
    with pytest.raises(InputError, match="the cache has 3 rows, but there are 1 prompts"):
        generate(PARAMS, [[1]], None, CFG, cache=first.cache)
    other = with_layers(MODEL, 1)
    with pytest.raises(InputError, match="the cache belongs to another model"):
        generate(PARAMS, [[1]], None, CFG, cache=KVCache.create(other, 1, 8))


# --- Caches from prefill and from other caches --------------------------------------------------------------------


def run(ids, cfg=CFG, key=None, **options):
    ids, mask = left_pad(ids)
    out = generate(PARAMS, ids, key, cfg, attention_mask=mask, **options)
    return out, all_generated(out)


SYSTEM = [40, 41, 42, 43]


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "prefill_chunk_size": 2},
        {},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 0},
        {"guidance_scale": 1.5},
    ],
)
@pytest.mark.slow
def test_a_prefix_is_shared_by_many_prompts(fields):
    cfg = CFG.replace(**fields)
    key = jax.random.key(3) if cfg.do_sample else None
    system = prefill(PARAMS, [SYSTEM], cfg.replace(eos_token_id=[[96], [95], []]))  # eos ids for PROMPTS
    assert system.rows == 1
    out, said = run(PROMPTS, cfg, key, cache=system)
    assert said == run([SYSTEM + prompt for prompt in PROMPTS], cfg, key)[1]
    if not cfg.on("guidance_scale"):
        assert out.cache.kv.parts[0].rows == 1  # shared, not one per prompt
    # The prefix is unchanged: continuing from the results gives the same tokens as a run over the whole text.
    following = FOLLOWING * cfg.num_return_sequences
    if cfg.num_return_sequences == 1:
        on = run(following, cfg, key, cache=out.cache)[1]
        whole = [SYSTEM + p + s + f for p, s, f in zip(PROMPTS, said, FOLLOWING, strict=True)]
        assert on == run(whole, cfg, key)[1]


@pytest.mark.slow
def test_nested_prefix_shared_by_two_prompts_each():
    two = prefill(PARAMS, [[50], [51]], CFG, cache=prefill(PARAMS, [SYSTEM], CFG))
    said = run([[1], [2], [3], [4]], cache=two)[1]
    assert said == run([[*SYSTEM, 50 + row // 2, row + 1] for row in range(4)])[1]
    with pytest.raises(InputError, match="the cache has 2 rows, but there are 3 prompts"):
        run([[1], [2], [3]], cache=two)


@pytest.mark.slow
def test_prefix_from_jitted_prefill_or_finished_run():
    held = jax.jit(prefill)(PARAMS, jnp.asarray([SYSTEM]), CFG.replace(pad_token_id=None, eos_token_id=[3, 4]))
    assert run(PROMPTS, cache=held)[1] == run([SYSTEM + prompt for prompt in PROMPTS])[1]
    out, said = run([SYSTEM])
    assert run(PROMPTS, cache=out.cache)[1] == run([SYSTEM + said[0] + prompt for prompt in PROMPTS])[1]


@pytest.mark.slow
def test_crop_removes_generated_tokens():
    out, said = run(PROMPTS)
    cut = out.cache.crop(jnp.asarray([len(prompt) + 2 for prompt in PROMPTS]))
    on = run(FOLLOWING, cache=cut)[1]
    assert on == run([p + s[:2] + f for p, s, f in zip(PROMPTS, said, FOLLOWING, strict=True)])[1]
    less = out.cache.crop(-6)
    assert less.count.tolist() == [len(prompt) + 2 for prompt in PROMPTS]
    assert out.cache.crop(100).count.tolist() == out.cache.count.tolist()
    with pytest.raises(InputError, match="one integer or one per row"):
        out.cache.crop(jnp.asarray([1, 2]))


@pytest.mark.slow
def test_reorder_and_expand():
    out, said = run(PROMPTS)
    order = [2, 0, 2]
    on = run(FOLLOWING, cache=out.cache.reorder(jnp.asarray(order)))[1]
    assert on == run([PROMPTS[r] + said[r] + f for r, f in zip(order, FOLLOWING, strict=True)])[1]
    twice = out.cache.expand(2)
    assert twice.rows == 6
    on = run([[7]] * 6, cache=twice)[1]
    assert on == run([[7]] * 6, cache=out.cache)[1]
    with pytest.raises(InputError, match="rows must be from 0 to 2"):
        out.cache.reorder(jnp.asarray([3]))
