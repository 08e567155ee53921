"""Meshes of devices: the same tokens as on one device, and no communication except what the model needs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from convert import CheckpointError, load_adapter, load_hf, save_hf
from convert.hf import open_checkpoint
from convert.tensors import Tensor
from jaxgen import GenerationConfig, InputError, StepHook, generate, generate_many, prefill, score, shard_params
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.model.sharding import mesh_of
from jaxgen.core.request.prepare import CallInputs, prepare
from jaxgen.training import lora
from jaxgen.training.loop import TrainBatch, TrainConfig, TrainState, train, train_step
from tests.support.adapters import factors, write
from tests.support.communication import STEPS, check_communication
from tests.support.models import model_config, random_params, slow
from tests.support.streamers import Collector, RowCollector

MODEL = model_config(vocab_size=96, hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=4)
PARAMS = random_params(MODEL, scale=0.2)
CFG = GenerationConfig(model=MODEL, max_new_tokens=8, pad_token_id=0, eos_token_id=[1, 2])
IDS = np.random.default_rng(0).integers(3, 96, (6, 9), np.int32)
MASK = np.arange(9)[None, :] >= np.array([0, 3, 5, 0, 1, 2])[:, None]
KEY = jax.random.key(3)
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))
MODES = {
    "greedy": {},
    "sampling": {
        **{"do_sample": True, "num_return_sequences": 2, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.1},
        "temperature": [0.7, 0.8, 0.9, 1.0, 1.1, 1.2],
    },
    "slots": {"slots": 3, "do_sample": True, "num_return_sequences": 2, "max_new_tokens": [3, 8, 1, 5, 8, 2]},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constraints": {"num_beams": 3, "force_words_ids": [[5, 7]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "dola": {"dola_layers": [0], "repetition_penalty": 1.2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
    "guidance": {"guidance_scale": 1.5},
    "8-bit cache": {"cache_dtype": "int8"},
}


def mesh_of_shape(shape, **options):
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ("data", "model"), **options)


def on_mesh(shape, params=PARAMS, model=MODEL):
    return shard_params(params, model, mesh_of_shape(shape))


def test_model_or_generation_config_describes_the_model():
    mesh = mesh_of_shape((4, 2))
    of_model, of_both = (shard_params(PARAMS, cfg, mesh) for cfg in (MODEL, CFG))
    assert jax.tree.map(lambda x: x.sharding, of_model) == jax.tree.map(lambda x: x.sharding, of_both)
    with pytest.raises(TypeError, match="cfg must be a GenerationConfig with a model, or a ModelConfig, got NoneType"):
        shard_params(PARAMS, GenerationConfig(), mesh)


def on_meshes():
    """Yield each mode on one mesh, and sampling on all meshes."""
    for number, name in enumerate(MODES):
        for place, shape in enumerate(MESHES):
            if name == "sampling" or place == number % len(MESHES):
                marks = [pytest.mark.slow] * ((shape, name) != ((2, 4), "sampling"))
                yield pytest.param(shape, name, marks=marks, id=f"{name}-{shape[0]}x{shape[1]}")


@pytest.mark.parametrize(("shape", "name"), list(on_meshes()))
def test_mesh_generates_the_same_tokens(shape, name):
    cfg = CFG.replace(**MODES[name])
    key = jax.random.key(5) if cfg.do_sample else None
    alone, divided = (generate(params, IDS, key, cfg, attention_mask=MASK) for params in (PARAMS, on_mesh(shape)))
    assert divided.sequences.tolist() == alone.sequences.tolist()
    assert divided.lengths.tolist() == alone.lengths.tolist()
    assert divided.stop_reasons.tolist() == alone.stop_reasons.tolist()


@pytest.mark.parametrize("rows", slow(1, 3, 6))
def test_a_cache_continues_on_the_mesh(rows):
    """Six prompts continue a cache of `rows` rows with 32 tokens each. On the mesh, they are padded to eight."""
    cfg, new = CFG.replace(eos_token_id=None), IDS[:, :3]
    first = cfg.replace(max_new_tokens=32 - 9)
    params = on_mesh((4, 2))
    expected, found = (
        generate(p, new, None, cfg, cache=generate(p, IDS[:rows], None, first).cache) for p in (PARAMS, params)
    )
    assert found.sequences.tolist() == expected.sequences.tolist()
    system = prefill(params, IDS[:rows], cfg)
    assert generate(params, new, None, cfg, cache=system).lengths.tolist() == [8] * 6


CHANGES = {
    "reorder": lambda cache: cache.reorder(np.array([5, 0, 5])),
    "crop": lambda cache: cache.crop(-3),
    "expand": lambda cache: cache.expand(2),
}


@pytest.mark.parametrize("name", slow(*CHANGES))
def test_changes_of_a_cache_on_the_mesh(name):
    cfg = CFG.replace(eos_token_id=None)
    caches = [CHANGES[name](generate(params, IDS, None, cfg).cache) for params in (PARAMS, on_mesh((4, 2)))]
    new = np.resize(IDS[:, :2], (caches[0].rows, 2))
    expected, found = (
        generate(params, new, None, cfg, cache=cache)
        for params, cache in zip((PARAMS, on_mesh((4, 2))), caches, strict=True)
    )
    assert found.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.slow
def test_rows_of_padding_are_not_part_of_a_cache():
    expected, found = (generate(params, IDS, None, CFG) for params in (PARAMS, on_mesh((4, 2))))
    for one, other in zip(*(jax.tree.leaves(out.to_hf().past_key_values) for out in (expected, found)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    assert found.cache.kv.rows == 8
    with pytest.raises(InputError, match=r"rows must be from 0 to 5, got \[7\]"):
        found.cache.reorder(np.array([7]))


@pytest.mark.slow
def test_cache_from_another_mesh_is_continued():
    """A cache does not have to be on the parameters' mesh."""
    cfg, new = CFG.replace(eos_token_id=None), IDS[:, :2]
    alone, divided = (generate(params, IDS, None, cfg).cache for params in (PARAMS, on_mesh((4, 2))))
    expected = generate(PARAMS, new, None, cfg, cache=alone)
    bound = jax.device_put(alone, jax.devices()[3])
    for params, cache in (
        *((PARAMS, divided), (on_mesh((4, 2)), alone), (on_mesh((2, 4)), divided)),
        *((on_mesh((4, 2)), bound), (on_mesh((8, 1)), bound)),
    ):
        assert generate(params, new, None, cfg, cache=cache).sequences.tolist() == expected.sequences.tolist()


@pytest.mark.slow
def test_an_assistant_on_the_mesh():
    small = model_config(vocab_size=96, hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    draft = random_params(small, seed=1)
    cfg = GenerationConfig(model=small, assistant_confidence_threshold=[0.1] * 6)
    mesh = mesh_of_shape((4, 2))
    expected = generate(PARAMS, IDS, None, CFG, assistant=(draft, cfg))
    found = generate(on_mesh((4, 2)), IDS, None, CFG, assistant=(shard_params(draft, small, mesh), cfg))
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.accepted.tolist() == expected.accepted.tolist()


@pytest.mark.slow
def test_outputs_of_every_step_on_the_mesh():
    cfg = CFG.replace(output_scores=True, output_hidden_states=True, output_logprobs="scores", top_logprobs=2)
    expected, found = (generate(params, IDS, None, cfg) for params in (PARAMS, on_mesh((4, 2))))
    for one, other in zip(jax.tree.leaves(expected.scores), jax.tree.leaves(found.scores), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    for layers in ("prefill", "decode"):
        pairs = zip(getattr(expected.hidden_states, layers), getattr(found.hidden_states, layers), strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(expected.top_logprobs, found.top_logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", slow(4, 6))
def test_score_on_the_mesh(rows):
    expected, found = (score(params, IDS[:rows], CFG, top_logprobs=2) for params in (PARAMS, on_mesh((4, 2))))
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
    assert found.top_tokens.tolist() == expected.top_tokens.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("low_rank", [False, True])
def test_training_on_the_mesh(low_rank):
    settings = TrainConfig(steps=2, learning_rate=0.01, eps=1e-3)  # tiny gradients are mostly rounding errors
    ids = IDS[:4]
    batch = TrainBatch(ids, ids, np.ones_like(ids))

    def trained(params):
        start = lora.init(params, 2, jax.random.key(0)) if low_rank else params
        state = TrainState.create(start, settings)
        step = jax.jit(lambda state, frozen: train_step(state, batch, frozen, model=MODEL, cfg=settings))
        for _ in range(2):
            state, metrics = step(state, params if low_rank else None)
        return state.params, metrics

    (expected, loss), (found, divided_loss) = trained(PARAMS), trained(on_mesh((2, 4)))
    np.testing.assert_allclose(divided_loss.loss, loss.loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), expected, found)
    assert mesh_of(found) is not None


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, *slow("int8")])
def test_adapters(tmp_path, quantize):
    save_hf(PARAMS, CFG, tmp_path / "model")
    adapters = [write(tmp_path / str(i), factors(MODEL, rank, i)) for i, rank in enumerate((3, 2))]
    params, cfg = load_hf(tmp_path / "model", quantize=quantize)
    divided, _ = load_hf(tmp_path / "model", quantize=quantize, mesh=mesh_of_shape((2, 4)))
    for given, options in ((adapters, {"adapter": [0, 1, -1, 0, 1, -1]}), (adapters[0], {})):
        own = cfg.replace(**options)
        attached = load_adapter(given, divided, cfg)
        assert mesh_of(attached) is not None
        found = score(attached, IDS, own, attention_mask=MASK).logprobs
        expected = score(load_adapter(given, params, cfg), IDS, own, attention_mask=MASK).logprobs
        np.testing.assert_allclose(found, expected, atol=1e-3)
        plain = score(params, IDS, cfg, attention_mask=MASK).logprobs
        assert np.abs(found - plain).max() > 0.1


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("low_rank", [False, True])
def test_training_resumes_on_the_mesh(tmp_path, low_rank):
    settings = TrainConfig(steps=4, learning_rate=0.01, eps=1e-3)
    params, ids = on_mesh((2, 4)), IDS[:4]
    batch = TrainBatch(ids, ids, np.ones_like(ids))

    def run(batches, **directory):
        start = lora.init(params, 2, jax.random.key(0)) if low_rank else params
        return train(start, batches, model=MODEL, cfg=settings, frozen=params if low_rank else None, **directory)

    def stopping(step):
        if step == 2:
            raise Killed
        return batch

    with pytest.raises(Killed):
        run(stopping, directory=tmp_path, save_every=2)
    expected, found = run(lambda step: batch), run(lambda step: batch, directory=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


class Shift(StepHook):
    """A hook that adds the row's step to the logit of one token."""

    def init(self, history):
        return jnp.zeros(history.length.shape[0])

    def after(self, state, history, output):
        logits = output.logits.at[:, 5].add(state)
        return dataclasses.replace(output, logits=logits), state + 1


def stop_at_seven(history, scores):
    return history.last(1)[:, 0] == 7


CALLS = {
    "hook": {"hook": Shift()},
    "criterion": {"stopping_criteria": [stop_at_seven]},
    "processor": {"logits_processor": [lambda history, scores: scores * 0.5]},
    "function on the host": {"prefix_allowed_tokens_fn": lambda row, ids: [4 + row, int(ids[-1])]},
    "embeddings": {"inputs_embeds": np.random.default_rng(1).normal(size=(6, 9, 64)).astype(np.float32)},
}


@pytest.mark.slow
def test_values_of_each_prompt_on_the_mesh():
    cfg = CFG.replace(guidance_scale=[1.2, 1.3, 1.4, 1.5, 1.6, 1.7], do_sample=True)
    keys = jax.random.split(jax.random.key(3), 6)
    expected, found = (
        generate(params, IDS, keys, cfg, negative_prompt_ids=IDS[:, 5:]) for params in (PARAMS, on_mesh((4, 2)))
    )
    assert found.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("name", slow(*CALLS))
def test_arguments_of_a_call_on_the_mesh(name):
    expected, found = (generate(params, IDS, None, CFG, **CALLS[name]) for params in (PARAMS, on_mesh((4, 2))))
    assert found.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"slots": 3}], ids=["batch", "slots"])
def test_a_streamer_and_a_deadline_on_the_mesh(options):
    expected, found = Collector(), Collector()
    cfg = CFG.replace(max_time=600.0, **options)
    for params, streamer in ((PARAMS, expected), (on_mesh((4, 2)), found)):
        generate(params, IDS, None, cfg, streamer=streamer)
    for one, other in zip(expected.values, found.values, strict=True):
        assert one.tolist() == other.tolist()
    rows = RowCollector()
    generate(on_mesh((4, 2)), IDS, None, cfg, streamer=rows)
    assert expected.tokens.size
    assert [rows.rows[row] for row in range(len(rows.rows))] == expected.tokens.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
def test_an_engine_on_the_mesh(shape):
    prompts = [{"ids": row[keep], "max_new_tokens": 2 + n} for n, (row, keep) in enumerate(zip(IDS, MASK, strict=True))]
    prompts[1] |= {"n": 3}
    prompts[4] |= {"temperature": 1.5, "suppress_tokens": [5, 6]}
    prompts += [{"ids": prompt["ids"]} for prompt in prompts]  # repeated prompts, whose first chunks are copied
    cfg = CFG.replace(do_sample=True, prefill_chunk_size=4)
    alone, found = (
        [done.tokens for done in generate_many(params, prompts, KEY, cfg, slots=3, prompt_width=9, ordered=True)]
        for params in (PARAMS, on_mesh(shape))
    )
    assert len(alone) == 14
    assert alone == found


def test_context_says_whether_weights_are_divided():
    inputs = CallInputs(IDS, attention_mask=np.ones_like(IDS))
    for params, eager, divided in ((PARAMS, True, False), (on_mesh((4, 2)), True, True), (PARAMS, False, None)):
        run = prepare(params, CFG, inputs, Extensions(), eager=eager).run
        assert run.context.divided is divided
        assert run.model.to_hf() == MODEL.to_hf()


@pytest.mark.slow
def test_a_16_bit_row_under_the_callers_jit_on_the_mesh():
    """Sharded weights do not use `in_lanes`, because devices cannot add up the sums of its lanes."""
    model = model_config(vocab_size=96, hidden_size=896, num_attention_heads=8, num_key_value_heads=4)
    model = dataclasses.replace(model, dtype="bfloat16")
    params = random_params(model)
    cfg = GenerationConfig(model=model, max_new_tokens=4, eos_token_id=None, pad_token_id=0)
    run = jax.jit(lambda params: generate(params, jnp.asarray([[3, 4, 5]]), None, cfg).sequences)
    divided = shard_params(params, model, mesh_of_shape((1, 4)))
    np.testing.assert_array_equal(run(divided), run(params))


@pytest.mark.slow
def test_under_the_callers_jit_on_the_mesh():
    cfg = CFG.replace(do_sample=True)
    traced = jax.jit(lambda params: generate(params, IDS, jax.random.key(2), cfg))
    expected, found = (traced(params) for params in (PARAMS, on_mesh((4, 2))))
    assert found.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.slow
def test_low_rank_weights_on_the_mesh():
    update = jax.tree.map(lambda x: x + 0.05, lora.init(PARAMS, 2, jax.random.key(0)))
    params = lora.attach(PARAMS, update, 1.0)
    expected, found = (generate(p, IDS, None, CFG) for p in (params, on_mesh((2, 4), params)))
    assert found.sequences.tolist() == expected.sequences.tolist()


def communicating():
    """Yield greedy search and sampling on all meshes, and other modes where the axis `model` has 4 or 8 devices."""
    for name in STEPS:
        for shape in MESHES if name in ("greedy", "sampling") else MESHES[2:]:
            marks = [pytest.mark.slow] * ((shape, name) != ((2, 4), "greedy"))
            yield pytest.param(shape, name, marks=marks, id=f"{name}-{shape[0]}x{shape[1]}")


@pytest.mark.parametrize(("shape", "name"), list(communicating()))
def test_communication_of_a_step(shape, name):
    """A step's only large transfers are all-reduces over the axis `model`: two per layer and one for the embedding."""
    check_communication(mesh_of_shape(shape), name)


def test_each_device_has_its_part_of_the_weights():
    params = on_mesh((2, 4))
    layer = params["model"]["layers"]["0"]
    parts = {
        "q_proj": layer["self_attn"]["q_proj"]["weight"],
        "k_proj": layer["self_attn"]["k_proj"]["weight"],
        "k_bias": layer["self_attn"]["k_proj"]["bias"],
        "o_proj": layer["self_attn"]["o_proj"]["weight"],
        "down_proj": layer["mlp"]["down_proj"]["weight"],
        "norm": layer["input_layernorm"]["weight"],
        "embedding": params["model"]["embed_tokens"]["weight"],
    }
    found = {name: x.addressable_shards[0].data.shape for name, x in parts.items()}
    assert found == {
        **{"q_proj": (16, 64), "k_proj": (8, 64), "k_bias": (8,), "o_proj": (64, 16)},
        **{"down_proj": (64, 32), "norm": (64,), "embedding": (24, 64)},
    }


def test_heads_are_replicated_over_extra_devices():
    weight = on_mesh((1, 8))["model"]["layers"]["0"]["self_attn"]["k_proj"]["weight"]
    shards = [np.asarray(shard.data) for shard in weight.addressable_shards]
    assert shards[0].shape == (8, 64)
    assert np.array_equal(shards[0], shards[1])
    assert not np.array_equal(shards[1], shards[2])


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((1, 8), ("data", "rows"), r"mesh must have the axes 'data' and 'model', got \['data', 'rows'\]"),
        ((1, 3), ("data", "model"), r"axis 'model' has size 3, .*vocab_size=96.*\): it must be one of \[1, 2, 4, 8\]"),
    ],
)
def test_bad_meshes_are_refused(shape, axes, message):
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), axes)
    with pytest.raises(InputError, match=message):
        shard_params(PARAMS, MODEL, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "axes"), [((1, 1), ("data", "model")), ((8,), ("model",)), ((8,), ("data",)), ((4, 2), ("model", "data"))]
)
def test_meshes_of_other_shapes(shape, axes):
    """Meshes with one device, one axis, axes in a different order, or axes of type Explicit."""
    types = (AxisType.Explicit,) * len(axes)
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), axes, axis_types=types)
    expected, found = (generate(params, IDS, None, CFG) for params in (PARAMS, shard_params(PARAMS, MODEL, mesh)))
    assert found.sequences.tolist() == expected.sequences.tolist()


def test_explicit_mesh_of_the_caller_is_refused():
    params = on_mesh((4, 2))
    mesh = mesh_of_shape((4, 2), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), pytest.raises(InputError, match=r"leave jax\.set_mesh out"):
        generate(params, IDS, None, CFG)


def test_wrong_type_of_mesh_is_refused():
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh, got tuple"):
        shard_params(PARAMS, MODEL, (2, 4))


@pytest.mark.parametrize("shape", [(2, 4), (1, 8)])
def test_load_reads_each_part_once(tmp_path, monkeypatch, shape):
    save_hf(PARAMS, CFG, tmp_path / "checkpoint")
    read = []
    runs = Tensor.runs

    def counted(self, part, array):
        for offset, run in runs(self, part, array):
            read.append((self.file, offset, len(run)))
            yield offset, run

    monkeypatch.setattr(Tensor, "runs", counted)
    params, cfg = load_hf(tmp_path / "checkpoint", mesh=mesh_of_shape(shape))
    assert cfg.model == MODEL
    expected = on_mesh(shape)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert jax.tree.map(lambda x: x.sharding, params) == jax.tree.map(lambda x: x.sharding, expected)
    # A single process has all devices here, so it reads the whole file, each byte once.
    assert sum(size for *_, size in read) == sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    assert len(set(read)) == len(read)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", [(slice(2, 5), slice(None)), (slice(None), slice(3, 4)), (slice(0, 1), slice(1, 3))])
def test_part_of_a_tensor(tmp_path, dtype, part):
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    save_hf(params, CFG, tmp_path / "checkpoint")
    array = params["model"]["layers"]["1"]["mlp"]["up_proj"]["weight"]
    tensor = open_checkpoint(tmp_path / "checkpoint").tensors["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(tensor.read(None, part), np.asarray(array)[part])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load_several_files(tmp_path, monkeypatch, dtype, tied):
    monkeypatch.setattr("convert.shards.MAX_SHARD", 60_000)
    model = dataclasses.replace(MODEL, dtype=dtype, tie_word_embeddings=tied)
    params = random_params(model)
    for shape in ((2, 4), (1, 8)):  # the second iteration overwrites the files of the first
        save_hf(on_mesh(shape, params, model), CFG.replace(model=model), tmp_path / "new", overwrite=True)
        assert len(list((tmp_path / "new").glob("*.safetensors"))) > 2
        saved, cfg = load_hf(tmp_path / "new")
        assert cfg.model == model
        jax.tree.map(np.testing.assert_array_equal, saved, params)
        cast, _ = load_hf(tmp_path / "new", mesh=mesh_of_shape((2, 4)), dtype="float32")
        jax.tree.map(np.testing.assert_array_equal, cast, jax.tree.map(lambda x: x.astype("float32"), params))
    with pytest.raises(CheckpointError, match="exists: choose another name"):
        save_hf(on_mesh((2, 4)), CFG, tmp_path / "new")
