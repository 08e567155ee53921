"""Generation with an 8-bit cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_hf
from demo.corpus import conversations
from jaxgen import CausalLM, ConfigError, GenerationConfig, KVCache, Tokenizer, generate, prefill
from jaxgen.demo import PATH
from tests.support.models import model_config, random_params, slow

MODEL = model_config(vocab_size=40)
PARAMS = random_params(MODEL)
CFG = GenerationConfig(model=MODEL, max_new_tokens=6, eos_token_id=1, pad_token_id=0, cache_dtype="int8")
IDS = np.random.default_rng(0).integers(2, 40, (3, 9)).astype(np.int32)
KEY = jax.random.key(3)
MODES = {
    "greedy_search": {},
    "sample": {"do_sample": True, "top_k": 10, "num_return_sequences": 2},
    "beam_search": {"num_beams": 3, "num_return_sequences": 2},
    "contrastive_search": {"penalty_alpha": 0.6, "top_k": 3},
    "assisted_generation": {"assistant_early_exit": 1},
    "dola_generation": {"dola_layers": "high", "repetition_penalty": 1.2},
}


def generated(ids=IDS, cfg=CFG, mask=None, **fields) -> np.ndarray:
    """Return each row's new tokens."""
    out = generate(PARAMS, ids, KEY, cfg.replace(**fields), attention_mask=mask)
    return np.asarray(out.sequences)[:, ids.shape[1] :]


def test_tokens_equal_those_of_one_pass_over_the_text():
    """A single pass over the whole text, into an empty 8-bit cache, predicts the generated tokens."""
    out = generate(PARAMS, IDS, None, CFG.replace(eos_token_id=None))
    rows, width = out.sequences.shape
    cache = KVCache.create(MODEL, rows, width, "int8")
    logits = jax.jit(CausalLM(MODEL).apply)({"params": PARAMS}, out.sequences, cache=cache).logits
    wanted = jnp.argmax(logits[:, IDS.shape[1] - 1 : -1], axis=-1)
    np.testing.assert_array_equal(out.sequences[:, IDS.shape[1] :], wanted)


@pytest.mark.parametrize("mode", slow(*MODES))
def test_row_does_not_depend_on_padding_batch_or_chunks(mode):
    fields = MODES[mode]
    assert CFG.replace(**fields).mode == mode
    padded = np.pad(IDS, ((0, 0), (4, 0)))
    mask = np.pad(np.ones_like(IDS), ((0, 0), (4, 0)))
    batch = generated(padded, mask=mask, **fields)
    np.testing.assert_array_equal(generated(**fields), batch)
    first = len(batch) // len(IDS)
    np.testing.assert_array_equal(generated(IDS[:1], **fields), batch[:first])
    if mode not in ("contrastive_search",):
        np.testing.assert_array_equal(generated(prefill_chunk_size=4, **fields), batch)


@pytest.mark.slow
def test_draft_does_not_change_tokens():
    greedy = generated()
    np.testing.assert_array_equal(generated(assistant_early_exit=1), greedy)
    np.testing.assert_array_equal(generated(prompt_lookup_num_tokens=2), greedy)


@pytest.mark.slow
def test_continuing_equals_one_call():
    cfg = CFG.replace(eos_token_id=None)
    first = generate(PARAMS, IDS, None, cfg.replace(max_new_tokens=3))
    assert first.cache.kv.cache_dtype == "int8"
    more = generate(
        PARAMS, np.asarray([[5], [6], [7]], np.int32), None, cfg.replace(max_new_tokens=3), cache=first.cache
    )
    whole = np.concatenate([first.sequences, [[5], [6], [7]]], axis=1)
    np.testing.assert_array_equal(more.sequences[:, 1:], generated(whole, eos_token_id=None, max_new_tokens=3))
    assert np.asarray(first.to_hf().past_key_values[0][0]).dtype == np.float32


@pytest.mark.parametrize("made", [None, "int8"])
def test_continuing_with_another_cache_dtype_is_refused(made):
    cache = prefill(PARAMS, IDS, CFG.replace(cache_dtype=made))
    other = {None: "int8", "int8": None}[made]
    with pytest.raises(ConfigError, match=f"cache_dtype={made!r} and cannot be continued with {other!r}"):
        generate(PARAMS, IDS, None, CFG.replace(cache_dtype=other), cache=cache)


def test_other_values_are_refused():
    with pytest.raises(ConfigError, match="cache_dtype must be None or 'int8', got 'int4'"):
        CFG.replace(cache_dtype="int4")


@pytest.mark.slow
def test_perplexity_with_an_8_bit_cache_is_close():
    """Measure the bundled model's perplexity on real text, with all keys and values read from an 8-bit cache."""
    tokenizer = Tokenizer.from_pretrained(PATH)
    batch = tokenizer.chat(
        [text for text, _ in zip(conversations(7), range(24), strict=False)], add_generation_prompt=False
    )
    params, cfg = load_hf(PATH, dtype="float32")
    assert cfg.model is not None
    model, ids, mask = cfg.model, jnp.asarray(batch.ids), jnp.asarray(batch.attention_mask)

    @jax.jit
    def loss(params, cache):
        labels = jnp.where(mask.astype(bool), ids, -100)
        return CausalLM(model).apply({"params": params}, ids, attention_mask=mask, cache=cache, labels=labels).loss

    exact, int8 = (float(loss(params, KVCache.create(model, *ids.shape, dtype))) for dtype in ("float32", "int8"))
    assert exact > 0.5
    assert np.exp(int8 - exact) < 1.01
    assert int8 != exact


def test_8_bit_cache_takes_about_half_the_memory():
    model = dataclasses.replace(MODEL, dtype="bfloat16", head_dim=64)
    wide, narrow = (
        sum(x.nbytes for x in jax.tree.leaves(KVCache.create(model, 2, 100, dtype).keys)) for dtype in (None, "int8")
    )
    assert narrow / wide == (64 + 4) / 128
