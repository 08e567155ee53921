"""Models with experts on meshes: each device has whole experts, reads only these, and gives the same tokens."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from convert import load_hf, save_hf
from convert.hf import open_checkpoint
from convert.tensors import Tensor
from jaxgen import CausalLM, GenerationConfig, InputError, generate, generate_many, score, shard_params
from jaxgen.core.model.int8 import Int8
from jaxgen.training.loop import TrainBatch, TrainConfig, TrainState, train_step
from tests.support.communication import EXPERTS, check_communication
from tests.support.models import model_config, random_params, slow

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
MODELS = {
    "qwen2_moe": model_config(
        **SIZES | EIGHT | {"head_dim": None, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 24},
        num_hidden_layers=3,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": model_config(**SIZES, **EIGHT, model_type="qwen3_moe", norm_topk_prob=True),
    "mixtral": model_config(
        **SIZES | {"head_dim": None, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
}
MODEL = MODELS["qwen2_moe"]
PARAMS = {name: random_params(model, scale=0.2) for name, model in MODELS.items()}
CFG = GenerationConfig(model=MODEL, max_new_tokens=8, pad_token_id=0, eos_token_id=[1, 2])
IDS = np.random.default_rng(0).integers(3, 96, (6, 9), np.int32)
MASK = np.arange(9)[None, :] >= np.array([0, 3, 5, 0, 1, 2])[:, None]
KEY = jax.random.key(3)
MESHES = [(2, 1), (1, 4), (2, 2), (1, 2), (2, 4)]
UP = "model.layers.0.mlp.experts.up_proj.weight"


def mesh_of_shape(shape):
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ("data", "model"))


def on_mesh(shape, params=None, model=MODEL):
    return shard_params(PARAMS["qwen2_moe"] if params is None else params, model, mesh_of_shape(shape))


def experts_of(params, layer="0"):
    return params["model"]["layers"][layer]["mlp"]["experts"]


@pytest.mark.parametrize("shape", MESHES)
def test_each_device_has_whole_experts(shape):
    experts = experts_of(on_mesh(shape))
    each = 8 // shape[1]
    for name, size in (("gate_proj", (20, 32)), ("up_proj", (20, 32)), ("down_proj", (32, 20))):
        shards = experts[name]["weight"].addressable_shards
        assert [shard.data.shape for shard in shards] == [(each, *size)] * math.prod(shape)
        first = sorted({shard.index[0].start or 0 for shard in shards})
        assert first == list(range(0, 8, each))


def test_widths_are_divided_if_experts_cannot_be():
    model = dataclasses.replace(MODELS["qwen3_moe"], num_experts=6)
    params = random_params(model, scale=0.2)
    divided = on_mesh((1, 4), params, model)
    assert experts_of(divided)["up_proj"]["weight"].addressable_shards[0].data.shape == (6, 5, 32)
    assert experts_of(divided)["down_proj"]["weight"].addressable_shards[0].data.shape == (6, 32, 5)
    cfg = CFG.replace(model=model)
    expected, found = (generate(p, IDS, None, cfg, attention_mask=MASK) for p in (params, divided))
    assert found.sequences.tolist() == expected.sequences.tolist()


def test_mesh_that_divides_neither_is_refused():
    model = dataclasses.replace(MODELS["qwen3_moe"], num_experts=7, moe_intermediate_size=21)
    with pytest.raises(InputError, match=r"num_experts=7 or moe_intermediate_size=21, .*: it must be one of \[1\]"):
        shard_params(random_params(model), model, mesh_of_shape((1, 2)))


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "top_k": 30, "top_p": 0.9, "temperature": 0.8},
    "slots": {"slots": 3, "do_sample": True, "num_return_sequences": 2, "max_new_tokens": [3, 8, 1, 5, 8, 2]},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunks": {"prefill_chunk_size": 4},
}


def on_meshes():
    """Yield greedy search on all meshes, for each family in turn, and each other mode on one or two."""
    families = list(MODELS)
    for number, mode in enumerate(MODES):
        for place, shape in enumerate(MESHES):
            if mode == "greedy" or place in (number % 5, (number + 2) % 5):
                family = families[(number + place) % 3]
                marks = [pytest.mark.slow] * ((shape, mode) not in (((1, 4), "greedy"), ((2, 2), "beams")))
                yield pytest.param(shape, mode, family, marks=marks, id=f"{mode}-{shape[0]}x{shape[1]}-{family}")


@pytest.mark.parametrize(("shape", "mode", "family"), list(on_meshes()))
def test_mesh_generates_the_same_tokens(shape, mode, family):
    model, params = MODELS[family], PARAMS[family]
    cfg = CFG.replace(model=model, **MODES[mode])
    key = KEY if cfg.do_sample else None
    expected, found = (generate(p, IDS, key, cfg, attention_mask=MASK) for p in (params, on_mesh(shape, params, model)))
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.lengths.tolist() == expected.lengths.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 4), (2, 1), (2, 2)])
def test_logits_and_gradients(shape):
    """Also with rows that the axis `data` does not divide, and in a program that is given only the parameters."""
    divided = on_mesh(shape)

    def logits(params, ids):
        return CausalLM(MODEL).apply({"params": params}, ids).logits

    def loss(params):
        out = CausalLM(MODEL).apply({"params": params}, ids, labels=ids, output_router_logits=True)
        return out.loss

    for rows in (4, 3):
        ids = jnp.asarray(IDS[:rows])
        expected, found = (jax.jit(logits)(params, ids) for params in (PARAMS["qwen2_moe"], divided))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    expected, found = (jax.jit(jax.grad(loss))(params) for params in (PARAMS["qwen2_moe"], divided))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, expected)


@pytest.mark.slow
def test_an_engine_on_the_mesh():
    prompts = [{"ids": row[keep], "max_new_tokens": 2 + n} for n, (row, keep) in enumerate(zip(IDS, MASK, strict=True))]
    cfg = CFG.replace(do_sample=True, prefill_chunk_size=4)
    alone, found = (
        [done.tokens for done in generate_many(params, prompts, KEY, cfg, slots=3, prompt_width=9, ordered=True)]
        for params in (PARAMS["qwen2_moe"], on_mesh((2, 4)))
    )
    assert alone == found


@pytest.mark.slow
def test_under_the_callers_jit():
    """The mesh of the experts is known there too, unlike that of the rows."""
    traced = jax.jit(lambda params: generate(params, IDS, None, CFG).sequences)
    divided = on_mesh((1, 4))
    np.testing.assert_array_equal(traced(divided), traced(PARAMS["qwen2_moe"]))
    assert "f32[8,20,32]" not in traced.lower(divided).compile().as_text()


@pytest.mark.slow
def test_score_replays_experts_on_the_mesh():
    cfg = CFG.replace(output_routed_experts=True)
    divided = on_mesh((2, 2))
    expected, found = (generate(p, IDS[:4], None, cfg) for p in (PARAMS["qwen2_moe"], divided))
    assert found.routed_experts.tolist() == expected.routed_experts.tolist()
    given = {"routed_experts": expected.routed_experts, "attention_mask": expected.attention_mask}
    one, other = (score(p, expected.sequences, CFG, **given).logprobs for p in (PARAMS["qwen2_moe"], divided))
    np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_training():
    settings = TrainConfig(steps=2, learning_rate=0.01, eps=1e-3, router_loss=True)
    batch = TrainBatch(IDS[:4], IDS[:4], np.ones_like(IDS[:4]))

    def trained(params):
        state = TrainState.create(params, settings)
        step = jax.jit(lambda state: train_step(state, batch, model=MODEL, cfg=settings))
        for _ in range(2):
            state, metrics = step(state)
        return state.params, metrics.loss

    (expected, loss), (found, divided_loss) = trained(PARAMS["qwen2_moe"]), trained(on_mesh((2, 2)))
    np.testing.assert_allclose(divided_loss, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_load_generate_and_save(tmp_path, quantize):
    save_hf(PARAMS["qwen2_moe"], CFG, tmp_path / "one")
    alone, cfg = load_hf(tmp_path / "one", quantize=quantize)
    divided, _ = load_hf(tmp_path / "one", quantize=quantize, mesh=mesh_of_shape((2, 4)))
    weight = experts_of(divided)["down_proj"]["weight"]
    assert isinstance(weight, Int8) is (quantize == "int8")
    assert {x.addressable_shards[0].data.shape[0] for x in jax.tree.leaves(weight)} == {2}
    expected, found = (generate(p, IDS, None, cfg, attention_mask=MASK) for p in (alone, divided))
    assert found.sequences.tolist() == expected.sequences.tolist()
    save_hf(divided, cfg, tmp_path / "two")
    saved, _ = load_hf(tmp_path / "two")
    jax.tree.map(np.testing.assert_array_equal, saved, alone)


def test_only_the_chosen_experts_are_read(tmp_path, monkeypatch):
    save_hf(PARAMS["qwen2_moe"], CFG, tmp_path / "one")
    names, runs = [], Tensor.runs

    def counted(self, part, array):
        names.append(self.name)
        return runs(self, part, array)

    tensor = open_checkpoint(tmp_path / "one").tensors[UP]
    monkeypatch.setattr(Tensor, "runs", counted)
    part = tensor.read(None, (slice(2, 4), slice(0, 20), slice(0, 32)))
    np.testing.assert_array_equal(part, experts_of(PARAMS["qwen2_moe"])["up_proj"]["weight"][2:4])
    assert names == [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in (2, 3)]


@pytest.mark.parametrize(
    ("shape", "name"), [((2, 4), "greedy"), *slow(((8, 1), "greedy"), ((1, 8), "sampling"), ((2, 4), "beams"))]
)
def test_communication_of_a_step(shape, name):
    """The experts of a layer need one all-reduce, as a dense layer does; no matrix of an expert is sent or copied."""
    program = check_communication(mesh_of_shape(shape), name, EXPERTS)
    each = 16 // shape[1]
    assert f"f32[{each},72,1024]" in program
    assert shape[1] == 1 or "f32[16,72,1024]" not in program
