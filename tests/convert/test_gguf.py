"""GGUF files as checkpoints: each architecture's config and tensors, kinds of weights, and the command."""

import dataclasses
import math

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert.__main__
from convert import CheckpointError, load_hf, save_hf
from convert.hf import load_shapes, open_checkpoint
from convert.hub import local_directory
from jaxgen import CausalLM, GenerationConfig, InputError, ModelConfig, generate
from jaxgen.core.model.blocks import FORMATS, Blocks
from jaxgen.core.model.context import NO_CONTEXT
from jaxgen.core.model.grouped import Grouped
from jaxgen.core.model.weights import Packed
from jaxgen.gguf.container import TYPES
from tests.support.gguf_files import model_tensors, stored, write_gguf
from tests.support.models import CONFIG, random_params, slow

SIZES = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 2.0**-20,
}
COMMON = CONFIG | {"intermediate_size": 64, "rms_norm_eps": 2.0**-20}
GELU = "gelu_pytorch_tanh"
GEMMA = {"head_dim": 16, "hidden_activation": GELU, "tie_word_embeddings": True}
LENGTHS = {"attention.key_length": 16, "attention.value_length": 16}
MOE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
MOE_CONFIG = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}

# By a name: the architecture, metadata without its prefix, further tensors, and the config.json of the same model
CASES = {
    "llama": ("llama", {"rope.dimension_count": 8, "vocab_size": 97}, {}, {"model_type": "llama"}),
    "llama-heads": (
        "llama",
        {"rope.dimension_count": 16, "rope.freq_base": 500.0, **LENGTHS},
        {},
        {"model_type": "llama", "head_dim": 16, "rope_theta": 500.0, "tie_word_embeddings": True},
    ),
    "llama-linear": (
        "llama",
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.finetuned": True},
        {},
        {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama3": (
        "llama",
        {"rope.freq_base": 500000.0},
        {"rope_freqs.weight": "llama3"},
        {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ),
    "llama-biases": ("llama", {}, {}, {"model_type": "llama", "attention_bias": True, "mlp_bias": True}),
    "mixtral": (
        "llama",
        {"expert_count": 4, "expert_used_count": 2},
        {},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2": ("qwen2", {"rope.freq_base": 1000000.0}, {}, {"model_type": "qwen2", "rope_theta": 1000000.0}),
    "qwen2-yarn": (
        "qwen2",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
        {},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "qwen3": ("qwen3", LENGTHS, {}, {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}),
    "qwen2moe": (
        "qwen2moe",
        MOE | {"expert_shared_feed_forward_length": 96},
        {},
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 96, **MOE_CONFIG},
    ),
    "qwen3moe": (
        "qwen3moe",
        MOE | LENGTHS,
        {},
        {"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True, **MOE_CONFIG},
    ),
    "gemma": ("gemma", LENGTHS, {}, {"model_type": "gemma", **GEMMA, "hidden_act": GELU}),
    "gemma2": (
        "gemma2",
        LENGTHS | {"attention.sliding_window": 4, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        {},
        {
            **GEMMA,
            "model_type": "gemma2",
            "query_pre_attn_scalar": 16,
            "sliding_window": 4,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3",
        LENGTHS
        | {"attention.sliding_window": 4, "rope.freq_base": 1e6, "block_count": 6}
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        {},
        {
            **GEMMA,
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 16,
            "sliding_window": 4,
            "num_hidden_layers": 6,
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi3": (
        "phi3",
        {"rope.dimension_count": 8, "attention.sliding_window": 0},
        {},
        {"model_type": "phi3", "sliding_window": None},
    ),
    "phi3-long": (
        "phi3",
        {
            "rope.dimension_count": 4,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(128)),
            "attention.sliding_window": 100,
        },
        {"rope_factors_short.weight": [1.0, 1.5], "rope_factors_long.weight": [2.0, 3.0]},
        {
            "model_type": "phi3",
            "sliding_window": 100,
            "original_max_position_embeddings": 128,
            "rope_scaling": {"type": "longrope", **LONG},
            "partial_rotary_factor": 0.5,
        },
    ),
    "granite": (
        "granite",
        {"attention.scale": 0.25, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.5},
        {},
        {
            "model_type": "granite",
            "attention_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.5,
        },
    ),
    "smollm3": ("smollm3", {"block_count": 4}, {}, {"model_type": "smollm3", "num_hidden_layers": 4}),
    "olmo2": ("olmo2", {}, {}, {"model_type": "olmo2"}),
    "olmo3": (
        "olmo2",
        {
            "rope.freq_base": 500000.0,
            "attention.sliding_window": 4,
            "attention.sliding_window_pattern": np.array([True, False]),
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 0.1 * math.log(8) + 1,
        },
        {},
        {
            "model_type": "olmo3",
            "rope_theta": 500000.0,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        },
    ),
}


def divisors_of_llama3(model: ModelConfig) -> list[float]:
    """Compute what llama.cpp's converter writes: 1 for short waves, the factor for long ones, and values between."""
    theta, size, original = model.ropes[0].theta, model.head_dim, 8192
    divisors = []
    for index in range(0, size, 2):
        wave = 2 * math.pi * theta ** (index / size)
        if wave < original / 4:
            divisors.append(1.0)
        elif wave > original:
            divisors.append(8.0)
        else:
            smooth = (original / wave - 1) / 3
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    return divisors


def flat_params(model: ModelConfig) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in flax.traverse_util.flatten_dict(random_params(model), sep=".").items()}


def write_model(path, case: str = "llama", kind: str = "F32", **metadata):
    """Write the file of a case; return it with the model and its parameters."""
    name, keys, tensors, config = CASES[case]
    model = ModelConfig.from_hf(COMMON | config)
    flat = flat_params(model)
    content = model_tensors(flat, name, model.num_attention_heads, model.num_key_value_heads, kind)
    for tensor, values in tensors.items():
        content[tensor] = stored(np.array(divisors_of_llama3(model) if values == "llama3" else values))
    keys = {"general.architecture": name} | {f"{name}.{key}": value for key, value in (SIZES | keys).items()}
    return write_gguf(path, keys | metadata, content), model, flat


@pytest.mark.parametrize("case", CASES)
def test_each_architecture_is_read(tmp_path, case):
    file, model, flat = write_model(tmp_path / "model.gguf", case)
    params, cfg = load_hf(file)
    assert cfg.model == model
    read = flax.traverse_util.flatten_dict(params, sep=".")
    assert read.keys() == flat.keys()
    for name, values in flat.items():
        offset = 1 if "gemma" in case and name.endswith("norm.weight") else 0
        expected = (values + np.float32(offset)) - np.float32(offset)
        np.testing.assert_array_equal(read[name], expected, err_msg=name)


def test_logits_of_llama_are_those_of_the_original(tmp_path):
    file, model, flat = write_model(tmp_path / "model.gguf")
    params, cfg = load_hf(file)
    ids = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    logits = [
        CausalLM(config).apply({"params": values}, ids).logits
        for config, values in ((model, flax.traverse_util.unflatten_dict(flat, sep=".")), (cfg.model, params))
    ]
    np.testing.assert_array_equal(*logits)
    permuted = flat | {"model.layers.0.self_attn.q_proj.weight": flat["model.layers.0.self_attn.q_proj.weight"][::-1]}
    other = CausalLM(model).apply({"params": flax.traverse_util.unflatten_dict(permuted, sep=".")}, ids).logits
    assert np.abs(np.asarray(other - logits[0])).max() > 1e-3  # the order of rows matters


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_packed_weights_are_those_of_the_dense_model(tmp_path, kind):
    file, _, flat = write_model(tmp_path / "model.gguf", "qwen3", kind)
    packed, cfg = load_hf(file, dtype="float32")
    dense, _ = load_hf(file, dtype="float32", quantize="none")
    name = "model.layers.1.mlp.down_proj.weight"
    packed_flat, dense_flat = (flax.traverse_util.flatten_dict(tree, sep=".") for tree in (packed, dense))
    assert isinstance(packed_flat[name], Grouped) == kind.startswith("Q")
    error = np.abs(dense_flat[name] - flat[name]).max()
    assert 0 < error < {"Q4_0": 0.15, "Q4_1": 0.1, "Q8_0": 0.01, "F16": 1e-3, "BF16": 1e-2}[kind]
    if kind.startswith("Q"):
        stored_matrix = jax.tree.map(np.asarray, packed_flat[name]).to_matrix()
        np.testing.assert_array_equal(stored_matrix, dense_flat[name])
    ids = jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
    logits = [np.asarray(CausalLM(cfg.model).apply({"params": tree}, ids).logits) for tree in (packed, dense)]
    np.testing.assert_allclose(*logits, atol=1e-4 * np.abs(logits[0]).max())


def blocks_file(path, kind: str = "Q4_K", names: str = "mlp"):
    """Write a Llama model whose matrices with this part in their names are random blocks."""
    config = COMMON | {"model_type": "llama", "hidden_size": 256, "intermediate_size": 256, "tie_word_embeddings": True}
    model = ModelConfig.from_hf(config)
    flat = flat_params(model)
    tensors = model_tensors(flat, "llama", 4, 2, "Q8_0")
    rng = np.random.default_rng(0)
    for name, (_, shape, _) in list(tensors.items()):
        if names in name and len(shape) == 2:
            count, size = FORMATS[kind].count, FORMATS[kind].size
            data = rng.integers(0, 256, (math.prod(shape) // count, size), np.uint8)
            for at in {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82], "MXFP4": []}.get(kind, [0, 2]):
                data[:, at : at + 2] = np.full((len(data), 1), 0.001, np.float16).view(np.uint8)
            if kind == "MXFP4":
                data[:, 0] = 120
            tensors[name] = (kind, shape, data.tobytes())
    sizes = SIZES | {"embedding_length": 256, "feed_forward_length": 256}
    keys = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in sizes.items()}
    return write_gguf(path, keys, tensors)


@pytest.mark.parametrize("kind", ["Q6_K", *slow("Q4_K", "Q5_K", "Q3_K", "Q2_K", "MXFP4", "IQ4_NL", "Q5_0", "Q5_1")])
def test_blocks_run_like_the_dense_model(tmp_path, kind):
    file = blocks_file(tmp_path / "model.gguf", kind, "")
    packed, cfg = load_hf(file, dtype="float32")
    dense, _ = load_hf(file, dtype="float32", quantize="none")
    assert isinstance(packed["model"]["embed_tokens"]["weight"], Blocks)
    ids = jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
    logits = [np.asarray(CausalLM(cfg.model).apply({"params": tree}, ids).logits) for tree in (packed, dense)]
    np.testing.assert_allclose(*logits, atol=1e-4 * np.abs(logits[0]).max())


def test_a_mixed_file_generates_the_tokens_of_the_dense_model(tmp_path):
    file = blocks_file(tmp_path / "model.gguf", "Q4_K", "ffn_down")
    results = []
    for quantize in (None, "none"):
        params, cfg = load_hf(file, dtype="float32", quantize=quantize)
        kinds = {type(leaf) for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed))}
        assert (kinds >= {Grouped, Blocks}) == (quantize is None)
        out = generate(params, jnp.arange(8, dtype=jnp.int32)[None], None, cfg.replace(max_new_tokens=8))
        results.append(np.asarray(out.sequences))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("case", ["qwen3moe", *slow("mixtral", "qwen2moe")])
@pytest.mark.parametrize("kind", ["Q8_0", *slow("Q4_1")])
def test_packed_experts_run_like_the_dense_model(tmp_path, case, kind):
    file, _, _ = write_model(tmp_path / "model.gguf", case, kind)
    packed, cfg = load_hf(file, dtype="float32")
    dense, _ = load_hf(file, dtype="float32", quantize="none")
    for width in (1, 12):
        ids = jnp.arange(width, dtype=jnp.int32)[None]
        logits = [np.asarray(CausalLM(cfg.model).apply({"params": tree}, ids).logits) for tree in (packed, dense)]
        np.testing.assert_allclose(*logits, atol=1e-4 * np.abs(logits[0]).max())


@pytest.mark.parametrize("case", ["qwen2", "gemma2", "qwen2moe", *slow("qwen3", "olmo2", "mixtral", "qwen3moe")])
def test_float32_vectors_beside_bfloat16_activations(tmp_path, case):
    """Norms, biases and routers are float32 in packed files, and the activations bfloat16, unless a dtype is given."""
    file, _, _ = write_model(tmp_path / "model.gguf", case, "Q8_0")
    params, cfg = load_hf(file)
    assert cfg.model.dtype == "bfloat16"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params["model"]["norm"])} == {"float32"}
    ids = jnp.arange(12, dtype=jnp.int32)[None]
    logits = CausalLM(cfg.model).apply({"params": params}, ids).logits
    exact, cfg = load_hf(file, dtype="float32")
    expected = np.asarray(CausalLM(cfg.model).apply({"params": exact}, ids).logits)
    np.testing.assert_allclose(logits, expected, atol=0.1 * np.abs(expected).max())


def test_experts_in_blocks_are_decoded_one_by_one_or_together():
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (4, 8, 2 * 144), np.uint8)
    data.reshape(4, 8, 2, 144)[..., :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
    weight = Blocks(jnp.asarray(data), "Q4_K", np.dtype(np.float32))
    matrices = weight.to_matrix()
    for rows in (3, 9):
        x = rng.normal(size=(rows, 512)).astype(np.float32)
        experts = rng.integers(-1, 5, rows).astype(np.int32)
        found = jax.jit(lambda x, e: weight.product_of_experts(x, e, NO_CONTEXT))(x, experts)
        expected = [matrices[e] @ row if 0 <= e < 4 else np.zeros(8) for row, e in zip(x, experts, strict=True)]
        np.testing.assert_allclose(found, np.array(expected), rtol=1e-4, atol=1e-3)


def test_look_up_of_blocks_gives_nan_outside_the_table():
    data = np.zeros((3, 176), np.uint8)
    weight = Blocks(jnp.asarray(data), "Q5_K", np.dtype(np.float32))
    rows = np.asarray(weight.look_up(jnp.array([[0, 2, 3, -1]])))
    assert np.isnan(rows[0, 2:]).all()
    assert not np.isnan(rows[0, :2]).any()


def test_the_table_of_types_agrees_with_the_formats():
    sizes = {name: (count, size) for name, count, size in TYPES.values()}
    assert {name: (form.count, form.size) for name, form in FORMATS.items()}.items() <= sizes.items()


def test_other_quantizations_and_shapes(tmp_path):
    file, _, _ = write_model(tmp_path / "model.gguf", "llama", "Q4_1")
    params, cfg = load_hf(file, quantize="int8")
    assert params["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"].name == "int8"
    assert cfg.model.dtype == "bfloat16"
    shapes, _ = load_shapes(file)
    packed, _ = load_hf(file)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), packed)
    with pytest.raises(CheckpointError, match=r"in a form that is not written: load with quantize='none'"):
        save_hf(packed, cfg, tmp_path / "saved")
    dense, cfg = load_hf(file, quantize="none")
    save_hf(dense, cfg, tmp_path / "saved")
    again, _ = load_hf(tmp_path / "saved")
    assert jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and bool((x == y).all()), dense, again))


def test_the_command_converts_and_lists(tmp_path, capsys):
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b"]}
    tokens |= {"tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.eos_token_id": 2}
    file, _, _ = write_model(tmp_path / "model.gguf", "qwen2", "Q8_0", **tokens)
    run = convert.__main__.main
    assert run([str(file), str(tmp_path / "out")]) == 2
    assert "in a form that is not written: load with quantize='none'" in capsys.readouterr().err
    assert run([str(file), str(tmp_path / "out"), "--quantize", "none", "--check"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
    written, cfg = load_hf(tmp_path / "out")
    dense, _ = load_hf(file, quantize="none")
    assert cfg.eos_token_id == 2
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), written, dense))
    capsys.readouterr()
    assert run([str(file), "--list"]) == 0
    assert "blk.1.ffn_down.weight     Q8_0" in capsys.readouterr().out


def test_ends_and_names_of_the_metadata(tmp_path):
    ids = {f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(("bos", "eos", "eot", "eom"), 3)}
    file, _, _ = write_model(tmp_path / "model.gguf", **ids, **{"general.name": "x", "llama.pooling_type": 0})
    cfg = open_checkpoint(file).cfg
    assert isinstance(cfg, GenerationConfig)
    assert (cfg.bos_token_id, list(cfg.eos_token_id)) == (3, [4, 5, 6])


def test_unknown_metadata_is_named(tmp_path):
    file, _, _ = write_model(tmp_path / "model.gguf", **{"llama.new_thing": 3, "general.sampling.temp": 0.5})
    with pytest.warns(match=r"unknown metadata is ignored: llama\.new_thing, general\.sampling\.temp"):
        open_checkpoint(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "bert"}, r"the architecture 'bert' is not implemented; it must be one of gemma, "),
        ({"llama.attention.sliding_window": 7}, r"llama\.attention\.sliding_window=7 is not implemented"),
        ({"llama.attention.value_length": 12}, r"value_length=12 is not implemented: it must be 8"),
        ({"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 2.0}, r"type='su' is not implemented"),
        ({"llama.attention.head_count": 7}, r"num_attention_heads 7 is not a multiple"),
        ({"llama.attention.head_count": "x"}, r"num_attention_heads must be a whole number"),
        ({"llama.attention.head_count_kv": np.array([2, 1], np.int32)}, r"differs between layers"),
        ({"llama.block_count": 3}, r"model\.layers\.2\.\S+ \[\d+.*is missing"),
        ({"llama.block_count": 2**40}, r"num_hidden_layers must be a whole number"),
        ({"llama.feed_forward_length": 2**30}, r"describes \d+ parameters, but the file has"),
        ({"llama.rope.freq_base": "x"}, r"rope_theta must be"),
        ({"tokenizer.ggml.eos_token_id": "x"}, r"eos_token_id has the wrong type: 'x'"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(tmp_path, changes, message):
    file, _, _ = write_model(tmp_path / "model.gguf", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_hf(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blk.0.attn_sinks.weight", stored(np.ones(4)), r"blk\.0\.attn_sinks\.weight \[4\] is unexpected"),
        ("blk.00.attn_q.weight", stored(np.ones(4)), r"blk\.00\.attn_q\.weight \[4\] is unexpected"),
        ("blk.0.attn_norm.weight", stored(np.ones(32), "Q8_0"), r"input_layernorm\.weight has shape \[1, 32\]"),
        ("blk.0.attn_q.weight", stored(np.ones((64, 32)), "Q4_0"), r"q_proj\.weight has shape \[64, 32\]"),
        ("rope_freqs.weight", stored(np.full(4, 3.0)), r"rope_freqs\.weight is not Llama 3's scaling"),
        ("rope_freqs.weight", stored(np.zeros(4)), r"rope_freqs\.weight must have positive numbers"),
        ("rope_freqs.weight", stored(np.ones((4, 32)), "Q8_0"), r"must have one axis of floats"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, name, tensor, message):
    _, keys, _, config = CASES["llama"]
    model = ModelConfig.from_hf(COMMON | config)
    tensors = model_tensors(flat_params(model), "llama", 4, 2) | {name: tensor}
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in (SIZES | keys).items()}
    with pytest.raises(CheckpointError, match=message):
        load_hf(write_gguf(tmp_path / "model.gguf", metadata, tensors))


def test_split_files_are_one_checkpoint(tmp_path):
    _, keys, _, config = CASES["llama"]
    model = ModelConfig.from_hf(COMMON | config)
    tensors = list(model_tensors(flat_params(model), "llama", 4, 2).items())
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in (SIZES | keys).items()}
    files = [tmp_path / f"model-0000{number + 1}-of-00003.gguf" for number in range(3)]
    for number, file in enumerate(files):
        split = {"split.no": number, "split.count": 3, "split.tensors.count": len(tensors)}
        write_gguf(file, (metadata if number == 0 else {}) | split, dict(tensors[number::3]))
    whole, _, _ = write_model(tmp_path / "model.gguf")
    params, expected = load_hf(files[0])[0], load_hf(whole)[0]
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), params, expected))
    with pytest.raises(CheckpointError, match="is a part of a model: pass the first one"):
        load_hf(files[1])
    files[2].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.gguf: No such file"):
        load_hf(files[0])
    files[1].rename(files[2])
    files[0].with_name("elsewhere.gguf").rename(files[1])
    with pytest.raises(CheckpointError, match=r"part 2 of 3, counted from 0, which its name does not"):
        load_hf(files[0])


def test_a_file_at_a_url_is_copied(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "there").mkdir()
    file, _, _ = write_model(tmp_path / "there" / "model[1].gguf")
    copy = local_directory(f"file://{file}")
    assert copy.is_relative_to(tmp_path / "cache")
    assert copy.read_bytes() == file.read_bytes()
    assert local_directory(f"file://{file}") == copy


def test_paths_and_the_name_of_an_installed_model(tmp_path, monkeypatch):
    file, _, _ = write_model(tmp_path / "model.GGUF")
    assert local_directory(file) == file
    assert load_hf(file)[1].model.num_hidden_layers == 2
    for path, message in (
        (tmp_path / "absent.gguf", "no such file"),
        ("absent.gguf", "neither|no such file|huggingface"),
    ):
        with pytest.raises(InputError, match=message):
            local_directory(path)
    with pytest.raises(CheckpointError, match="No such file"):
        load_hf(tmp_path / "absent.gguf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(CheckpointError, match=r"smollm2: no \*\.safetensors"):
        load_hf("smollm2")
    assert dataclasses.is_dataclass(open_checkpoint(file))
