"""Properties of the forward pass. tests/parity/test_parity.py compares its results with those of transformers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import CausalLM, InputError, KVCache
from jaxgen.core.model import workarounds
from jaxgen.core.model.causal_lm import RMSNorm, param_shapes
from jaxgen.core.model.config_keys import ACTIVATIONS
from jaxgen.core.model.feed_forward import activation
from tests.support.models import left_pad, model_config, random_params, slow

CFG = model_config()
PARAMS = random_params(CFG)
# Float32 passes of different shapes sum in different orders, but each is within 2e-5 of a float64 pass.
ROUNDING = 3e-5
WINDOWED = model_config(use_sliding_window=True, sliding_window=4, max_window_layers=1)


def eager(ids, cfg=CFG, params=PARAMS, **kwargs):
    return CausalLM(cfg).apply({"params": params}, jnp.asarray(ids, jnp.int32), **kwargs)


@functools.cache
def compiled(cfg, static):
    return jax.jit(functools.partial(CausalLM(cfg).apply, **dict(static)))


def run(ids, cfg=CFG, params=PARAMS, **kwargs):
    static = {name: kwargs.pop(name) for name, value in list(kwargs.items()) if isinstance(value, bool | int)}
    return compiled(cfg, tuple(static.items()))({"params": params}, jnp.asarray(ids, jnp.int32), **kwargs)


def tokens(rows, length, seed=0):
    return np.random.default_rng(seed).integers(1, CFG.vocab_size, (rows, length))


@pytest.mark.parametrize("cfg", [WINDOWED, *slow(CFG)], ids=["windowed", "full"])
@pytest.mark.parametrize("split", [[3, 1, 8], *slow([12], [5, 7], [1] * 12)])
def test_chunks_through_the_cache_equal_one_pass(cfg, split):
    ids = tokens(2, 12)
    whole = run(ids, cfg)
    cache, logits, start = KVCache.create(cfg, 2, 16), [], 0
    for length in split:
        out = run(ids[:, start : start + length], cfg, cache=cache)
        cache, start = out.cache, start + length
        logits.append(out.logits)
    np.testing.assert_allclose(jnp.concatenate(logits, 1), whole.logits, atol=ROUNDING)
    assert cache.length.tolist() == [12, 12]


@pytest.mark.parametrize("cfg", [WINDOWED, *slow(CFG)], ids=["windowed", "full"])
@pytest.mark.parametrize("side", ["holes", *slow("left", "right")])
def test_padding_does_not_change_logits(cfg, side):
    rows = [tokens(1, 9, 1)[0], tokens(1, 4, 2)[0]]
    width = 11
    ids, mask = np.zeros((2, width), int), np.zeros((2, width), int)
    places = {"left": lambda n: range(width - n, width), "right": range, "holes": lambda n: range(0, 2 * n, 2)}
    places = [list(places[side](len(row)))[: len(row)] for row in rows]
    if side == "holes":
        places = [sorted(np.random.default_rng(3).choice(width, len(row), replace=False)) for row in rows]
    for b, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[b, place], mask[b, place] = row, 1
    plain = run(ids, cfg, attention_mask=jnp.asarray(mask))
    cached = run(ids, cfg, attention_mask=jnp.asarray(mask), cache=KVCache.create(cfg, 2, 9))
    for b, (row, place) in enumerate(zip(rows, places, strict=True)):
        alone = run(row[None], cfg).logits[0]
        np.testing.assert_allclose(plain.logits[b][jnp.asarray(place)], alone, atol=ROUNDING)
        np.testing.assert_allclose(cached.logits[b][jnp.asarray(place)], alone, atol=ROUNDING)
    assert cached.cache.length.tolist() == [9, 4]
    assert bool(jnp.all(jnp.isfinite(plain.logits)))


def test_each_row_continues_at_its_own_position():
    ids, mask = left_pad([tokens(1, 7, 1)[0].tolist(), tokens(1, 3, 2)[0].tolist()])
    more = tokens(2, 2, 5)
    cache = run(ids, attention_mask=jnp.asarray(mask), cache=KVCache.create(CFG, 2, 12)).cache
    out = run(more, cache=cache)
    explicit = run(more, cache=cache, cache_position=jnp.asarray([7, 3]))
    for b, length in enumerate((7, 3)):
        alone = run(np.concatenate([ids[b, 7 - length :], more[b]])[None]).logits[0, -2:]
        np.testing.assert_allclose(out.logits[b], alone, atol=ROUNDING)
        np.testing.assert_allclose(explicit.logits[b], alone, atol=ROUNDING)


@pytest.mark.slow
def test_writing_at_an_earlier_position_discards_later_tokens():
    ids, other = tokens(2, 8), tokens(2, 3, 9)
    cache = run(ids, cache=KVCache.create(CFG, 2, 16)).cache
    out = run(other, cache=cache, cache_position=4)
    fresh = run(np.concatenate([ids[:, :4], other], 1)).logits[:, 4:]
    np.testing.assert_allclose(out.logits, fresh, atol=ROUNDING)
    assert out.cache.length.tolist() == [7, 7]


@pytest.mark.parametrize("cfg", [WINDOWED, *slow(CFG)], ids=["windowed", "full"])
@pytest.mark.slow
def test_rows_share_a_prefix(cfg):
    ids, mask = left_pad([tokens(1, 6, 1)[0].tolist(), tokens(1, 2, 2)[0].tolist()])
    more = tokens(6, 4, 3)
    prompt = run(ids, cfg, attention_mask=jnp.asarray(mask), cache=KVCache.create(cfg, 2, 8)).cache
    first = run(more[:, :3], cfg, cache=prompt.fork(3, 5))
    last = run(more[:, 3:], cfg, cache=first.cache, cache_position=8 + 3)
    assert first.cache.keys[0].shape[0] == 6
    assert last.cache.prefix.keys[0].shape[0] == 2
    for row in range(6):
        prefix = ids[row // 3][mask[row // 3] == 1]
        alone = run(np.concatenate([prefix, more[row]])[None], cfg).logits[0, -4:]
        np.testing.assert_allclose(first.logits[row], alone[:3], atol=ROUNDING)
        np.testing.assert_allclose(last.logits[row], alone[3:], atol=ROUNDING)
    assert last.cache.total_length.tolist() == [10, 10, 10, 6, 6, 6]


@pytest.mark.slow
def test_a_write_past_the_end_is_an_error_or_nan_and_changes_nothing():
    cache = run(tokens(2, 6), cache=KVCache.create(CFG, 2, 8)).cache
    with pytest.raises(InputError, match="8 slots"):
        eager(tokens(2, 3), cache=cache)
    with pytest.raises(InputError, match="8 slots"):
        eager(tokens(2, 3), cache=cache, cache_position=6)
    start = jnp.asarray([6, 5])
    ids = jnp.asarray(tokens(2, 3), jnp.int32)
    out = run(ids, cache=cache, cache_position=start)
    assert bool(jnp.all(jnp.isnan(out.logits[0])))
    alone = run(ids[1:], cache=jax.tree.map(lambda x: x[1:], cache), cache_position=5).logits[0]
    np.testing.assert_allclose(out.logits[1], alone, atol=ROUNDING)
    np.testing.assert_array_equal(out.cache.keys[0][0], cache.keys[0][0])
    inside = run(ids, cache=cache, cache_position=jnp.asarray([4, 5]))
    assert bool(jnp.all(jnp.isfinite(inside.logits)))


@pytest.mark.slow
def test_a_position_in_the_shared_prefix_is_an_error_or_nan_and_changes_nothing():
    prompt = run(tokens(1, 4), cache=KVCache.create(CFG, 1, 4)).cache
    cache = run(tokens(2, 3), cache=prompt.fork(2, 3)).cache
    with pytest.raises(InputError, match="at least 4"):
        eager(tokens(2, 1), cache=cache, cache_position=3)
    out = run(tokens(2, 1), cache=cache, cache_position=jnp.asarray([3, 4]))
    assert bool(jnp.all(jnp.isnan(out.logits[0])))
    assert bool(jnp.all(jnp.isfinite(out.logits[1])))
    np.testing.assert_array_equal(out.cache.keys[0][0], cache.keys[0][0])


def test_logits_to_keep():
    ids = tokens(2, 7)
    whole = run(ids).logits
    np.testing.assert_array_equal(run(ids, logits_to_keep=2).logits.shape, (2, 2, CFG.vocab_size))
    np.testing.assert_allclose(run(ids, logits_to_keep=2).logits, whole[:, -2:], atol=1e-6)
    picked = run(ids, logits_to_keep=jnp.asarray([[6, 0], [3, 3]])).logits
    np.testing.assert_allclose(picked[0], whole[0][jnp.asarray([6, 0])], atol=1e-6)
    np.testing.assert_allclose(picked[1], whole[1][jnp.asarray([3, 3])], atol=1e-6)
    assert run(ids, logits_to_keep=jnp.zeros((2, 0), jnp.int32)).logits.shape == (2, 0, CFG.vocab_size)


def test_embeddings_in_place_of_ids():
    ids = tokens(2, 5)
    embeds = PARAMS["model"]["embed_tokens"]["weight"][ids]
    out = jax.jit(CausalLM(CFG).apply)({"params": PARAMS}, inputs_embeds=embeds)
    np.testing.assert_allclose(out.logits, run(ids).logits, atol=1e-5)


@pytest.mark.slow
def test_position_ids_are_applied():
    ids = tokens(1, 6)
    np.testing.assert_array_equal(run(ids, position_ids=jnp.arange(6)[None]).logits, run(ids).logits)
    # RoPE is relative: shifting all positions does not change the logits, but stretching them does.
    np.testing.assert_allclose(run(ids, position_ids=40 + jnp.arange(6)[None]).logits, run(ids).logits, atol=1e-4)
    assert float(jnp.max(jnp.abs(run(ids, position_ids=3 * jnp.arange(6)[None]).logits - run(ids).logits))) > 1e-2


def test_hidden_states_and_attentions():
    ids, mask = left_pad([[5, 6, 7, 8], [9, 10]])
    out = run(ids, attention_mask=jnp.asarray(mask), output_hidden_states=True, output_attentions=True)
    assert [x.shape for x in out.hidden_states] == [(2, 4, 32)] * 3
    assert [x.shape for x in out.attentions] == [(2, 4, 4, 4)] * 2
    np.testing.assert_array_equal(out.hidden_states[0], PARAMS["model"]["embed_tokens"]["weight"][ids])
    np.testing.assert_allclose(out.hidden_states[-1] @ PARAMS["lm_head"]["weight"].T, out.logits, atol=1e-5)
    weights = np.asarray(out.attentions[0])
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert np.all(weights[0, :, ~np.tri(4, dtype=bool)] == 0)
    assert np.all(weights[1, :, 2:, :2] == 0)
    assert run(ids).hidden_states is None
    assert run(ids).attentions is None


@pytest.mark.slow
def test_loss_is_the_mean_cross_entropy_of_shifted_labels():
    ids = tokens(2, 6)
    labels = ids.copy()
    labels[0, :3] = -100
    out = run(ids, labels=jnp.asarray(labels))
    log_probs = jax.nn.log_softmax(out.logits, -1)
    wanted = [-log_probs[b, t - 1, ids[b, t]] for b in range(2) for t in range(1, 6) if labels[b, t] != -100]
    np.testing.assert_allclose(out.loss, np.mean(wanted), rtol=1e-6)
    assert bool(jnp.isnan(run(ids, labels=jnp.full((2, 6), -100)).loss))
    with pytest.raises(InputError, match="logits_to_keep"):
        run(ids, labels=jnp.asarray(labels), logits_to_keep=1)


def test_activations_are_rounded_once():
    x = jnp.linspace(-6, 6, 1000, dtype=jnp.bfloat16)
    for name in ACTIVATIONS:
        exact = activation(name)(x.astype(jnp.float32))
        np.testing.assert_array_equal(activation(name)(x), exact.astype(jnp.bfloat16))


@pytest.mark.slow
def test_loss_gradients_agree_with_finite_differences():
    ids = jnp.asarray(tokens(2, 6), jnp.int32)

    def loss(params):
        return CausalLM(CFG).apply({"params": params}, ids, labels=ids).loss

    gradient = jax.grad(loss)(PARAMS)
    direction = random_params(CFG, seed=5)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.vdot(a, b)), gradient, direction)))
    step = 1e-3
    ahead, behind = (jax.tree.map(lambda p, d, s=s: p + s * d, PARAMS, direction) for s in (step, -step))
    np.testing.assert_allclose(slope, (loss(ahead) - loss(behind)) / (2 * step), rtol=2e-2)


@pytest.mark.slow
def test_attention_dropout_needs_a_key():
    cfg = model_config(attention_dropout=0.5)
    ids = tokens(1, 8)
    plain = run(ids, cfg).logits
    np.testing.assert_array_equal(plain, run(ids).logits)
    first, again, other = (run(ids, cfg, rngs={"dropout": jax.random.key(s)}).logits for s in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert float(jnp.max(jnp.abs(first - other))) > 1e-3


def test_parameters_have_the_names_and_shapes_of_the_checkpoint():
    shapes = param_shapes(model_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in shapes
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (16, 32)
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (16,)
    assert "model.layers.1.self_attn.o_proj.bias" not in shapes
    llama = param_shapes(model_config(model_type="llama", attention_bias=True, mlp_bias=True))
    assert llama["model.layers.0.self_attn.o_proj.bias"] == (32,)
    assert llama["model.layers.0.mlp.down_proj.bias"] == (32,)


@pytest.mark.slow
def test_initialization_follows_initializer_range():
    cfg = model_config(initializer_range=0.05, vocab_size=2000)
    params = jax.jit(CausalLM(cfg).init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    assert float(jnp.std(params["model"]["embed_tokens"]["weight"])) == pytest.approx(0.05, rel=0.05)
    assert float(jnp.std(params["model"]["layers"]["1"]["mlp"]["up_proj"]["weight"])) == pytest.approx(0.05, rel=0.1)
    assert bool(jnp.all(params["model"]["norm"]["weight"] == 1))
    assert bool(jnp.all(params["model"]["layers"]["0"]["self_attn"]["q_proj"]["bias"] == 0))


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32", "float16")])
def test_an_id_outside_the_vocabulary_makes_its_row_nan(dtype):
    cfg = model_config(torch_dtype=dtype)
    logits = run([[1, 200], [1, 2], [1, -1]], cfg, random_params(cfg)).logits
    assert bool(jnp.all(jnp.isnan(logits[0, 1])))
    assert bool(jnp.all(jnp.isnan(logits[2, 1])))
    assert bool(jnp.all(jnp.isfinite(logits[1])))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_to_float32(dtype):
    cfg = model_config(torch_dtype=dtype)
    ids = tokens(2, 9)
    params = random_params(cfg, scale=0.2)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    expected = run(ids, CFG, wide).logits
    out = run(ids, cfg, params)
    assert out.logits.dtype == jnp.float32
    error = float(jnp.max(jnp.abs(out.logits - expected)) / jnp.max(jnp.abs(expected)))
    assert error < (0.05 if dtype == "bfloat16" else 0.01)
    cached = run(ids[:, 8:], cfg, params, cache=run(ids[:, :8], cfg, params, cache=KVCache.create(cfg, 2, 9)).cache)
    assert float(jnp.max(jnp.abs(cached.logits[:, 0] - expected[:, 8])) / jnp.max(jnp.abs(expected))) < 0.05


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ids": None}, "exactly one"),
        ({"ids": jnp.zeros((1, 2), jnp.int32), "inputs_embeds": jnp.zeros((1, 2, 32))}, "exactly one"),
        ({"ids": jnp.zeros((2,), jnp.int32)}, r"\[B, T\]"),
        ({"ids": jnp.zeros((1, 2))}, "integers"),
        ({"inputs_embeds": jnp.zeros((1, 2, 31))}, "32"),
        ({"ids": jnp.zeros((1, 2), jnp.int32), "attention_mask": jnp.ones((1, 5))}, "attention_mask"),
        ({"ids": jnp.zeros((1, 2), jnp.int32), "cache_position": 0}, "needs a cache"),
        ({"ids": jnp.zeros((1, 2), jnp.int32), "logits_to_keep": -1}, "logits_to_keep"),
        ({"ids": jnp.zeros((1, 2), jnp.int32), "logits_to_keep": True}, "logits_to_keep"),
        ({"ids": jnp.zeros((1, 2), jnp.int32), "logits_to_keep": jnp.zeros(1, jnp.int32)}, "logits_to_keep"),
        ({"ids": jnp.zeros((1, 0), jnp.int32)}, r"\[B, T\]"),
        ({"ids": [[1, 2]], "position_ids": jnp.zeros((1, 3), jnp.int32)}, "position_ids"),
        ({"ids": [[1, 2]], "position_ids": jnp.zeros((1, 2))}, "position_ids"),
        ({"ids": [[1, 2]], "cache": KVCache.create(CFG, 1, 4), "cache_position": 0.5}, "cache_position"),
        ({"ids": [[1, 2]], "cache": KVCache.create(CFG, 1, 4), "cache_position": jnp.arange(2)}, "cache_position"),
        ({"ids": jnp.zeros((1, 2), jnp.int32), "labels": jnp.zeros((1, 3), jnp.int32)}, "labels"),
    ],
)
def test_mismatched_arguments_are_refused(kwargs, message):
    with pytest.raises(InputError, match=message):
        CausalLM(CFG).apply({"params": PARAMS}, **kwargs)


def test_a_gap_in_the_cache_is_an_error_or_nan():
    cache = KVCache.create(CFG, 2, 8)
    with pytest.raises(InputError, match="gap"):
        eager(tokens(2, 3), cache=cache, cache_position=4)
    out = run(tokens(2, 3), cache=cache, cache_position=jnp.asarray([4, 0]))
    assert bool(jnp.all(jnp.isnan(out.logits[0])))
    assert bool(jnp.all(jnp.isfinite(out.logits[1])))


def test_a_cache_of_another_model_is_refused():
    for other in (model_config(num_hidden_layers=3), model_config(num_key_value_heads=4), model_config(head_dim=16)):
        with pytest.raises(InputError, match="another model"):
            run(tokens(2, 1), cache=KVCache.create(other, 2, 8))


def test_labels_outside_the_vocabulary_make_the_loss_nan():
    for label in (-1, CFG.vocab_size):
        assert bool(jnp.isnan(run(tokens(1, 4), labels=jnp.asarray([[1, 2, label, 3]])).loss))


def test_cache_with_another_number_of_rows_is_refused():
    with pytest.raises(InputError, match="3 rows, but the input has 2"):
        run(tokens(2, 1), cache=KVCache.create(CFG, 3, 4))
    with pytest.raises(InputError, match="at least one"):
        KVCache.create(CFG, 0, 4)


@pytest.mark.parametrize("family", ["qwen2", "gemma", "olmo2"])
def test_norms_may_have_wider_weights(family):
    norm, rng = RMSNorm(dataclasses.replace(CFG, dtype="bfloat16", model_type=family)), np.random.default_rng(0)
    rows, weight = jnp.asarray(rng.normal(size=(3, 48)), "bfloat16"), rng.normal(size=48).astype("bfloat16")
    narrow, wide = (norm.apply({"params": {"weight": w}}, rows) for w in (weight, weight.astype(np.float32)))
    assert wide.dtype == narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(wide.astype(jnp.float32), narrow.astype(jnp.float32), rtol=2**-7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu_form_of_the_norm_is_exact(dtype):
    norm, rng = RMSNorm(dataclasses.replace(CFG, dtype=dtype)), np.random.default_rng(0)
    row, weight = jnp.asarray(rng.normal(size=(1, 48)), dtype), jnp.asarray(rng.normal(size=48), dtype)
    np.testing.assert_array_equal(workarounds._norm_of_two(norm._normed, row, weight), norm._normed(row, weight))
    lowered = jax.jit(lambda x: norm.apply({"params": {"weight": weight}}, x)).trace(row[None]).lower
    assert "tensor<2x48x" in lowered(lowering_platforms=("cuda",)).as_text()
    assert "tensor<2x48x" not in lowered(lowering_platforms=("cpu",)).as_text()
