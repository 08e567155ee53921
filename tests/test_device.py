"""Tests for accelerators: XLA_FLAGS= python -m pytest -o addopts= -m device tests/test_device.py

Without an accelerator, the tests compare one CPU device with another.
"""

import concurrent.futures
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.hlo import decode_step
from benchmarks.profile import operations
from jaxgen import CausalLM, GenerationConfig, Tokenizer, demo, fuse_projections, generate, load_hf, score, shard_params
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.modes import mode_of
from jaxgen.core.model import attention, cudnn, flash
from jaxgen.core.model.cache import EMPTY, KeysValues
from jaxgen.core.model.masks import Visibility
from jaxgen.core.request.driver import run_whole
from jaxgen.core.request.prepare import CallInputs, prepare
from tests.support.models import model_config, random_params
from tests.test_meshes import CFG, IDS, MASK, MODES, PARAMS, mesh_of_shape

pytestmark = pytest.mark.device
DEVICE, CPU = jax.devices()[0], jax.devices("cpu")[-1]
gpu = pytest.mark.skipif(DEVICE.platform != "gpu", reason="only a GPU's profile has these names")


def on(device, tree):
    return jax.device_put(tree, device)


def both(function, *arguments):
    """Return the results of a function on the device and on the CPU."""
    results = []
    for device in (DEVICE, CPU):
        with jax.default_device(device):
            results.append(function(*on(device, arguments)))
            assert {found for leaf in jax.tree.leaves(results[-1]) for found in leaf.devices()} == {device}
    return results


MODES_AND_FORMS = [*((name, "plain") for name in MODES), ("greedy", "fused"), ("sampling", "fused")]


@pytest.fixture(scope="module")
def outputs(request):
    """Yield the outputs of every chosen mode on the device and on the CPU, as futures of concurrent calls."""

    def run(name, form):
        cfg = CFG.replace(**MODES[name])
        key = jax.random.key(5) if cfg.do_sample else None
        params = fuse_projections(PARAMS) if form == "fused" else PARAMS
        return both(lambda params: generate(params, IDS, key, cfg, attention_mask=MASK), params)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        chosen = {case.name.partition("[")[2] for case in request.session.items}
        yield {case: pool.submit(run, *case) for case in MODES_AND_FORMS if f"{'-'.join(case)}]" in chosen}


@pytest.mark.parametrize(("name", "form"), MODES_AND_FORMS)
def test_every_mode_generates_the_same_tokens_as_the_cpu(outputs, name, form):
    here, there = outputs[name, form].result()
    assert here.sequences.tolist() == there.sequences.tolist()
    assert here.stop_reasons.tolist() == there.stop_reasons.tolist()


def texts():
    tok = Tokenizer.from_pretrained(demo.PATH)
    return tok.batch(
        ["Once upon a time there was a fox", "The owl", "One day in autumn, Ivy saw that her key was missing."]
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_logits_match_the_cpu(dtype, tolerance):
    params, cfg = load_hf(demo.PATH, dtype=dtype)
    batch = texts()

    def run(params):
        return CausalLM(cfg.model).apply({"params": params}, batch.ids, attention_mask=batch.attention_mask).logits

    here, there = (np.asarray(x, np.float32)[np.asarray(batch.attention_mask) == 1] for x in both(run, params))
    np.testing.assert_allclose(here, there, rtol=0, atol=tolerance * np.abs(there).max())


def test_a_trained_model_generates_and_scores_as_on_the_cpu():
    params, cfg = load_hf(demo.PATH, dtype="float32")
    cfg, batch = cfg.replace(do_sample=False, max_new_tokens=64), texts()

    def run(params):
        out = generate(params, batch.ids, None, cfg, attention_mask=batch.attention_mask)
        return out.sequences, score(params, out.sequences, cfg).logprobs

    here, there = both(run, params)
    assert here[0].tolist() == there[0].tolist()
    np.testing.assert_allclose(here[1], there[1], atol=1e-3)


def test_logits_of_8_bit_weights_match_the_cpu():
    params, cfg = load_hf(demo.PATH, dtype="float32", quantize="int8")
    ids = texts().ids
    here, there = both(lambda params: CausalLM(cfg.model).apply({"params": params}, ids).logits, params)
    np.testing.assert_allclose(here, there, rtol=0, atol=2e-3 * np.abs(there).max())


@gpu
@pytest.mark.parametrize(("steps", "slots"), [(1, 8192), (5, 8192), (700, 2048)])
def test_cudnns_attention_equals_general_operations(steps, slots):
    """Rows of different lengths, of which one has no earlier tokens; the bits of a row do not depend on the others."""
    rows, heads, kv_heads, width = 4, 8, 2, 64
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(rows, count, size, width)), jnp.bfloat16)
        for count, size in ((heads, steps), (kv_heads, slots), (kv_heads, slots))
    )
    before = jnp.asarray([slots - steps, 0, 77, 1], jnp.int32)
    index = before[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
    order = jnp.where(jnp.arange(slots)[None] < before[:, None] + steps, jnp.arange(slots)[None], EMPTY)
    new = [jnp.take_along_axis(x, index[:, None, :, None], axis=2) for x in (k, v)]

    @jax.jit
    def attend(q, k, v, index, order, new, before):
        part, seen = KeysValues(k, v, "bfloat16"), Visibility(index, (order.astype(jnp.int32),))
        kernel = flash.attend(q, (part,), seen, flash.NewTokens(*new, (before,)), cudnn)
        return kernel, attention._at_once(q, (part,), seen)[0]

    kernel, plain = attend(q, k, v, index, order, new, before)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (kernel, plain)), atol=2e-2)
    moved, _ = attend(*jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), (q, k, v, index, order, new, before)))
    np.testing.assert_array_equal(np.asarray(jnp.roll(moved, -1, axis=0), np.float32), np.asarray(kernel, np.float32))


# A model whose cache and weights are much larger than the other arrays of a program.
LARGE = model_config(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=8192, torch_dtype="bfloat16",
)  # fmt: skip


def test_a_step_copies_no_cache():
    """No operation of a step writes half of a layer's keys or more. Beyond 4,096 slots, a GPU copies keys in blocks."""
    cfg = GenerationConfig(model=LARGE, max_new_tokens=3000, eos_token_id=None, pad_token_id=0)
    params, ids = on(DEVICE, random_params(LARGE)), np.ones((2, 8), np.int32)
    prepared = prepare(params, cfg, CallInputs(ids, None, attention_mask=np.ones_like(ids)), Extensions(), eager=True)
    compiled = run_whole.trace(prepared.run, prepared.request, mode=mode_of(cfg)).lower().compile()
    part = 2 * 2 * 3000 * LARGE.head_dim  # half the size of a layer's 16-bit keys, in bytes
    assert [one for one in decode_step(compiled.as_text()) if one.nbytes >= part] == []


@gpu
def test_step_copies_one_array_to_the_host():
    """A step copies only the loop's condition to the host."""
    params, ids = on(DEVICE, random_params(LARGE)), np.ones((1, 8), np.int32)
    cfg = GenerationConfig(model=LARGE, eos_token_id=None, pad_token_id=0)

    def run(new_tokens):
        out = generate(params, ids, None, cfg.replace(max_new_tokens=new_tokens), attention_mask=np.ones_like(ids))
        jax.block_until_ready(out.sequences)

    for new_tokens in (8, 64):
        run(new_tokens)
    found = operations(run, 8, 64)
    assert sum(one.times for one in found) > 5 * LARGE.num_hidden_layers, "the profile is empty"
    assert sum(one.times for one in found if one.to_host) <= 1


PEAK = """
import jax, numpy as np
from jaxgen import GenerationConfig, generate
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.programs import bytes_taken
from jaxgen.core.request.driver import run_whole
from jaxgen.core.request.prepare import CallInputs, prepare
from tests.support.models import random_params
from tests.test_device import LARGE

params = jax.device_put(random_params(LARGE), jax.devices()[0])
jax.block_until_ready(params)
ids = np.ones((64, 128), np.int32)
cfg = GenerationConfig(model=LARGE, max_new_tokens=1900, eos_token_id=None, pad_token_id=0)
before = jax.devices()[0].memory_stats()["bytes_in_use"]
out = generate(params, ids, None, cfg, attention_mask=np.ones_like(ids))
jax.block_until_ready(out)
peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"] - before
inputs = CallInputs(ids, None, attention_mask=np.ones_like(ids))
call = prepare(params, cfg, inputs, Extensions(), eager=True)
print(peak, bytes_taken(run_whole.trace(call.run, call.request, mode=call.mode).lower().compile()))
"""


@pytest.mark.skipif(DEVICE.platform == "tpu", reason="only one process can have a TPU")
@pytest.mark.skipif(not DEVICE.memory_stats(), reason="this device does not report its memory")
def test_call_uses_the_memory_that_its_program_reports(tmp_path):
    # An allocator that does not reserve memory in advance gives an array up to 128 MB more than it needs. The first
    # process compiles, and for that, measures kernels on arrays of their own; the second finds what was compiled.
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}
    settings |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PEAK], env=os.environ | settings, capture_output=True, text=True, check=True
        )
    peak, reported = map(int, done.stdout.split())
    assert 0.7 * reported < peak < 1.3 * reported


@pytest.mark.skipif(jax.device_count() < 2, reason="there is only one device")
@pytest.mark.parametrize("name", ["greedy", "sampling", "beams"])
def test_a_mesh_generates_the_same_tokens(name):
    parts = 4 if jax.device_count() >= 4 else 2
    cfg = CFG.replace(**MODES[name])
    key = jax.random.key(5) if cfg.do_sample else None
    divided = shard_params(PARAMS, CFG.model, mesh_of_shape((1, parts)))
    out, alone = (generate(params, IDS, key, cfg, attention_mask=MASK) for params in (divided, PARAMS))
    assert out.sequences.tolist() == alone.sequences.tolist()
