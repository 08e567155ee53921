"""Attention by a library's kernel: the keys it is called for, by a stand-in, and when it is called.

No accelerator is needed: splash attention is interpreted, and cuDNN's kernel is not called. `tests/test_compilers.py`
checks that the compilers for an H100 and a TPU accept the calls, and `tests/test_device.py` compares cuDNN's results on
a GPU.
"""

import dataclasses
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxgen import CausalLM, KVCache
from jaxgen.core.model import attention as attention_module, cudnn, flash, splash
from jaxgen.core.model.cache import KeysValues
from jaxgen.core.model.context import Context
from jaxgen.core.model.masks import Visibility
from tests.support.models import model_config, random_params

MODEL = model_config(num_hidden_layers=1)
PARAMS = random_params(MODEL)
WINDOW = model_config(model_type="mistral", num_hidden_layers=1, sliding_window=3)
WINDOW_PARAMS = random_params(WINDOW)
CONTEXT = Context(divided=False, left_aligned=True)
RNG = np.random.default_rng(0)


def ids(rows: int, width: int) -> jax.Array:
    return jnp.asarray(RNG.integers(1, 97, size=(rows, width)), jnp.int32)


def mask(width: int, *lengths: int) -> jax.Array:
    return jnp.arange(width)[None, :] < jnp.asarray(lengths)[:, None]


# --- What is attended to ------------------------------------------------------------------------------------------


def stand_in(q, keys, values, *, scale, causal=False, window=None, lengths=None):
    """Do what `flash.Kernel.call` promises, with general operations."""
    assert window is None or causal
    local = None if window is None else (window - 1, 0)
    q, keys, values = (x.swapaxes(1, 2) for x in (q, keys, values))
    options = {"is_causal": causal, "key_value_seq_lengths": lengths, "local_window_size": local}
    out, log_sums = jax.nn.dot_product_attention(q, keys, values, scale=scale, return_residual=True, **options)
    return out.swapaxes(1, 2), log_sums.swapaxes(1, 2)


@pytest.fixture
def called(monkeypatch) -> list[dict]:
    """Compute all attention by the stand-in, and return the arguments of its calls that follow."""
    calls = []

    def call(q, keys, values, **options):
        made = {"queries": q.shape[:3:2], "keys": keys.shape[:3:2], **options}
        calls.append(made)
        if "lengths" in options:
            jax.debug.callback(lambda lengths: made.update(lengths=lengths.tolist()), options["lengths"])
        return stand_in(q, keys, values, **options)

    def attend(q, parts, visible, new):
        assert new is not None
        return flash.attend(q, parts, visible, new, SimpleNamespace(call=call, key_blocks=cudnn.key_blocks))

    monkeypatch.setattr(attention_module, "all_at_once", lambda steps, slots: False)
    monkeypatch.setattr(attention_module, "_recomputed_in_blocks", attend)
    return calls


def run(tokens, cache, model=MODEL, params=PARAMS, context=CONTEXT, **inputs):
    static = {name: inputs.pop(name) for name in ("cache_position",) if name in inputs}

    @jax.jit
    def apply(params, tokens, cache, inputs):
        return CausalLM(model).apply({"params": params}, tokens, cache=cache, context=context, **inputs, **static)

    out = jax.block_until_ready(apply(params, tokens, cache, inputs))
    jax.effects_barrier()  # for the lengths of `called`
    return out


def check(tokens, cache, monkeypatch, model=MODEL, params=PARAMS, **inputs) -> None:
    """Compare the logits of real tokens with and without the kernel."""
    found = run(tokens, cache, model, params, **inputs)
    with monkeypatch.context() as plain:
        plain.setattr(attention_module, "all_at_once", lambda steps, slots: True)
        expected = run(tokens, cache, model, params, **inputs)
    real = np.asarray(inputs.get("attention_mask", jnp.ones(tokens.shape, bool)))
    np.testing.assert_allclose(found.logits[real], expected.logits[real], atol=1e-4)
    assert np.all(np.isfinite(found.logits))
    np.testing.assert_array_equal(found.cache.length, expected.cache.length)


def filled(rows: int, slots: int, *lengths: int, model=MODEL, params=PARAMS) -> KVCache:
    """Return a cache whose rows have these lengths."""
    width = max(lengths)
    cache = KVCache.create(model, rows, slots)
    return run(ids(rows, width), cache, model, params, attention_mask=mask(width, *lengths)).cache


def test_prompts_are_read_without_a_call_for_earlier_tokens(called, monkeypatch):
    given = mask(6, 6, 1, 4)
    check(ids(3, 6), KVCache.create(MODEL, 3, 9), monkeypatch, attention_mask=given, cache_position=0)
    assert [(call["keys"], call["causal"]) for call in called] == [((3, 6), True)] * MODEL.num_hidden_layers


@pytest.mark.parametrize("width", [1, 2, 5])
def test_new_tokens_follow_earlier_ones_of_other_lengths(called, monkeypatch, width):
    cache = filled(3, 12, 7, 1, 4)
    called.clear()
    check(ids(3, width), cache, monkeypatch, attention_mask=mask(width, width, 1, 1))
    assert len(called) == MODEL.num_hidden_layers * (1 if width == 1 else 2)
    assert called[0]["lengths"] == ([8, 2, 5] if width == 1 else [7, 1, 4])


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_share_a_prefix(called, monkeypatch, rows, width):
    prefix = filled(rows, 8, *[5, 2, 7, 1][:rows])
    cache = prefix.fork(4 // rows, 6)
    cache = run(ids(4, 2), cache, attention_mask=mask(2, 2, 1, 2, 1)).cache
    called.clear()
    check(ids(4, width), cache, monkeypatch)
    assert called[0]["queries"] == (rows, 4 // rows * width)
    assert called[0]["lengths"] == [5, 2, 7, 1][:rows]


@pytest.mark.parametrize("width", [1, 2])
def test_few_rows_read_their_keys_in_blocks(called, monkeypatch, width):
    cache = filled(3, 12, 7, 1, 4)
    called.clear()
    monkeypatch.setattr(cudnn, "_FULL_GPU", 12)
    monkeypatch.setattr(cudnn, "_SMALLEST_BLOCK", 6)
    check(ids(3, width), cache, monkeypatch)
    seen = [8, 2, 5] if width == 1 else [7, 1, 4]
    halves = [[max(1, min(6, length - begin)) for begin in (0, 6)] for length in seen]
    assert called[0]["keys"] == (3 * MODEL.num_key_value_heads * 2, 6)
    assert called[0]["lengths"] == [part for pair in halves for part in pair * MODEL.num_key_value_heads]


def test_rows_without_earlier_tokens_attend_to_new_ones_only(called, monkeypatch):
    check(ids(2, 3), filled(2, 8, 3, 0), monkeypatch, attention_mask=mask(3, 3, 2))


def test_a_row_without_new_tokens_in_a_full_cache_reads_no_further_than_its_slots(called):
    out = run(ids(2, 1), filled(2, 4, 4, 2), attention_mask=mask(1, 0, 1))
    assert called[-1]["lengths"] == [4, 3]
    assert np.all(np.isfinite(out.logits))


def test_a_window_hides_the_oldest_of_the_new_tokens(called, monkeypatch):
    check(ids(2, 7), KVCache.create(WINDOW, 2, 8), monkeypatch, WINDOW, WINDOW_PARAMS, cache_position=0)
    assert {call["window"] for call in called} == {3}


def test_beams_and_hidden_keys_are_left_to_general_operations(called):
    cache = filled(2, 4, 3, 2)
    called.clear()
    shared = cache.fork(2, 3, shared=True)
    for inputs in ({"cache": shared}, {"cache": cache, "key_mask": jnp.ones((2, 3), bool)}):
        rows = inputs["cache"].rows
        with pytest.raises(AssertionError):  # `attend` above demands the new tokens
            run(ids(rows, 1), **inputs)
    on_mesh, exported = (dataclasses.replace(CONTEXT, **field) for field in ({"divided": True}, {"portable": True}))
    for context in (on_mesh, exported, Context(divided=False)):
        with pytest.raises(AssertionError):
            run(ids(2, 1), cache, context=context)
    assert not called


# --- Splash attention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "options"),
    [(256, {"causal": True}), (256, {"causal": True, "window": 50}), (384, {"lengths": jnp.asarray([384, 3])})],
    ids=["causal", "window", "lengths"],
)
def test_splash_attention_does_what_the_stand_in_does(slots, options):
    q, keys, values = (
        jnp.asarray(RNG.normal(size=(2, heads, size, 128)), jnp.float32)
        for heads, size in ((4, 256), (2, slots), (2, slots))
    )
    found = splash.call(q, keys, values, scale=0.1, **options, interpret=True)
    for x, y in zip(found, stand_in(q, keys, values, scale=0.1, **options), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


# --- cuDNN's kernel -----------------------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch) -> list[str]:
    """Replace jax's private module by the stand-in, and return the masks of its calls that follow."""
    masks = []

    def call(q, keys, values, *, mask_type, sliding_window_length, scale, qkv_layout, return_residual, **lengths):
        assert (qkv_layout, return_residual) == ("BNTH", True)
        assert sorted(lengths) == (["kv_seqlen", "q_seqlen"] if mask_type == "padding" else [])
        masks.append(mask_type)
        given = {"causal": mask_type == "causal", "window": sliding_window_length, "lengths": lengths.get("kv_seqlen")}
        assert q.shape[0] == keys.shape[0] == values.shape[0] == lengths.get("q_seqlen", q).shape[0]
        return stand_in(q, keys, values, scale=scale, **given)

    names = SimpleNamespace(PADDING="padding", CAUSAL="causal", NO_MASK="none")
    monkeypatch.setattr(cudnn, "private_module", lambda: SimpleNamespace(dot_product_attention=call, MaskType=names))
    return masks


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes]


def test_cudnn_is_told_what_to_mask(library):
    q, keys, values = arrays((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    for options in ({"causal": True}, {"causal": True, "window": 2}, {"lengths": jnp.asarray([6, 3])}, {}):
        found = cudnn.call(q, keys, values, scale=0.1, **options)
        for x, y in zip(found, stand_in(q, keys, values, scale=0.1, **options), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)
    assert library == ["causal", "causal", "padding", "none"]


@pytest.mark.parametrize("axes", [(0, None, None, None), (0, 0, 0, None), (None, None, None, 0), (0, 1, 1, 0)])
def test_cudnn_reads_rows_of_a_vmap_as_rows(library, axes):
    shapes = ((2, 4, 1, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    pairs = zip(shapes, axes[:3], strict=True)
    given = arrays(*(shape if axis is None else (*shape[:axis], 3, *shape[axis:]) for shape, axis in pairs))
    lengths = jnp.asarray([[6, 3], [1, 2], [4, 4]]) if axes[3] == 0 else jnp.asarray([5, 2])

    def call(q, keys, values, lengths):
        return cudnn.call(q, keys, values, scale=0.1, lengths=lengths)

    found = jax.vmap(call, in_axes=axes)(*given, lengths)
    for index in range(3):
        batched = zip((*given, lengths), axes, strict=True)
        arguments = [x if axis is None else jnp.take(x, index, axis) for x, axis in batched]
        for x, y in zip(found, call(*arguments), strict=True):
            np.testing.assert_allclose(x[index], y, atol=1e-6)


# --- When it is called --------------------------------------------------------------------------------------------


def kernels(rows=1, steps=1024, heads=2, width=128, dtype="bfloat16", slots=(2048,), scaled=False, **visible) -> str:
    model = dataclasses.replace(model_config(), num_key_value_heads=heads, head_dim=width, dtype=dtype)
    q = jax.ShapeDtypeStruct((rows, 2 * heads, steps, width), dtype)
    parts = [
        jax.eval_shape(lambda n=n: KeysValues.create(model, rows, n, jnp.dtype("int8" if scaled else dtype)))
        for n in slots
    ]
    seen = Visibility(jnp.zeros((rows, steps), jnp.int32), (), **visible)
    return " ".join(flash.kernels(q, parts, seen))


@pytest.mark.parametrize(
    ("expected", "call"),
    [
        ("cuda tpu", {}),
        ("cuda tpu", {"dtype": "float16"}),
        ("", {"dtype": "float32"}),
        ("", {"scaled": True}),
        ("tpu", {"width": 256}),
        ("cuda", {"width": 64}),
        ("", {"width": 20}),
        ("", {"softcap": 30.0}),
        ("cuda tpu", {"window": 4096}),
        ("cuda tpu", {"window": 512, "start": 0}),
        ("", {"window": 512}),
        ("", {"window": 512, "start": 0, "slots": (64, 2048)}),
        ("cuda", {"steps": 1000}),
        ("cuda", {"slots": (1000,)}),
        ("", {"steps": 1, "rows": 8}),
        ("cuda", {"steps": 1, "rows": 8, "slots": (64, 8192)}),
        ("cuda", {"steps": 1, "rows": 32}),
        ("", {"steps": 1, "rows": 32, "window": 512}),
    ],
)
def test_kernels_are_called_if_they_support_the_arguments_and_are_faster(monkeypatch, expected, call):
    monkeypatch.setattr(cudnn, "private_module", lambda: fused_attention_stablehlo)
    monkeypatch.setattr(splash, "_is_installed", lambda: True)
    assert kernels(**call) == expected


def test_a_kernel_whose_library_is_missing_is_not_called(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", None)
    monkeypatch.setattr(splash.importlib.util, "find_spec", lambda name: None)
    for cached in (cudnn.private_module, splash._is_installed):
        cached.cache_clear()
    assert kernels() == ""
    for cached in (cudnn.private_module, splash._is_installed):
        cached.cache_clear()


def test_jax_has_the_private_function():
    parameters = inspect.signature(fused_attention_stablehlo.dot_product_attention).parameters
    names = {"q_seqlen", "kv_seqlen", "scale", "mask_type", "sliding_window_length", "qkv_layout", "return_residual"}
    assert names <= set(parameters)
    assert list(parameters)[:3] == ["query", "key", "value"]
    assert hasattr(fused_attention_stablehlo, "cuda_versions")
    assert {"NO_MASK", "PADDING", "CAUSAL"} <= set(fused_attention_stablehlo.MaskType.__members__)
