import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import save_file

from convert import CheckpointError, load_hf, save_hf
from convert.hf import load_shapes
from jaxgen import GenerationConfig, Tokenizer, fuse_projections
from jaxgen.errors import ConfigError, InputError, JaxgenWarning
from jaxgen.training import lora
from tests.support.bounded import bounded
from tests.support.checkpoints import GENERATION, LLAMA, MISTRAL, QWEN2, QWEN3, shapes, weights, write
from tests.support.tokenizers import byte_level, llama

ROOT = Path(__file__).resolve().parents[2]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY, NORM, EMBEDDING = (
    "model.layers.1.self_attn.q_proj.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
)


def flat(params) -> dict:
    return flatten_dict(params, sep=".")


def same(params, tensors: dict) -> bool:
    """Return True if the parameters and these tensors are bit-identical."""
    arrays = flat(params)
    return arrays.keys() == tensors.keys() and all(
        isinstance(arrays[name], jax.Array)
        and arrays[name].dtype == tensor.dtype
        and arrays[name].shape == tensor.shape
        and np.asarray(arrays[name]).tobytes() == tensor.tobytes()
        for name, tensor in tensors.items()
    )


def problems(path: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        load_hf(path)
    return caught.value.problems


def edit(file: Path, **changes) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


# Reading


def test_names_values_and_configs(qwen2):
    params, cfg = load_hf(qwen2)
    assert same(params, weights(QWEN2))
    assert params["model"]["layers"]["1"]["mlp"]["down_proj"]["weight"].shape == (16, 24)
    assert "lm_head" not in params
    assert (cfg.do_sample, cfg.temperature, cfg.eos_token_id, cfg.pad_token_id) == (True, 0.5, (2, 3), 0)
    assert cfg.bos_token_id is None
    assert (cfg.model.model_type, cfg.model.vocab_size, cfg.model.dtype) == ("qwen2", 40, "float32")


def test_shards(sharded):
    params, cfg = load_hf(str(sharded))
    assert same(params, weights(LLAMA, "bfloat16"))
    assert cfg.model.dtype == "bfloat16"  # the tensors' dtype, although config.json says float32


def test_generation_fields_of_config_json_are_the_fallback(tmp_path):
    config = QWEN2 | {"temperature": 0.25, "max_length": 33, "use_cache": False, "pad_token_id": None}
    _, cfg = load_hf(write(tmp_path / "x", config, weights(QWEN2)))
    assert (cfg.bos_token_id, cfg.eos_token_id, cfg.temperature, cfg.max_length) == (1, 2, 0.25, 33)
    assert cfg.use_cache
    assert cfg.pad_token_id is None


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, np.dtype(np.float32)])
def test_load_casts_to_the_requested_dtype(qwen2, dtype):
    params, cfg = load_hf(qwen2, dtype=dtype)
    assert same(params, {name: tensor.astype(np.dtype(dtype)) for name, tensor in weights(QWEN2).items()})
    assert cfg.model.dtype == np.dtype(dtype).name


def test_each_tensor_keeps_its_own_dtype(tmp_path):
    tensors = weights(QWEN2, "bfloat16") | {NORM: np.ones(16, np.float32)}
    params, cfg = load_hf(write(tmp_path / "x", QWEN2, tensors))
    assert same(params, tensors)
    assert cfg.model.dtype == "bfloat16"


def test_single_file_with_another_name_is_loaded(qwen2):
    (qwen2 / SINGLE).rename(qwen2 / "weights.safetensors")
    assert same(load_hf(qwen2)[0], weights(QWEN2))
    (qwen2 / "more.safetensors").write_bytes(b"")
    (problem,) = problems(qwen2)
    assert "several files (more.safetensors, weights.safetensors)" in problem


def test_tied_head_equal_to_the_embedding_is_dropped(tmp_path):
    tensors = weights(QWEN2)
    tied = tensors | {"lm_head.weight": tensors[EMBEDDING]}
    assert same(load_hf(write(tmp_path / "same", QWEN2, tied))[0], tensors)
    other = tensors | {"lm_head.weight": -tensors[EMBEDDING]}
    (problem,) = problems(write(tmp_path / "other", QWEN2, other))
    assert "lm_head.weight differs from model.embed_tokens.weight" in problem
    assert "tie_word_embeddings" in problem


def test_saved_rotary_constants_are_ignored(tmp_path):
    constants = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32) for n in range(2)}
    assert same(load_hf(write(tmp_path / "x", LLAMA, weights(LLAMA) | constants))[0], weights(LLAMA))


def test_bad_load_options_are_refused(qwen2):
    for quantize in ("int5", "", 8):
        with pytest.raises(ConfigError, match=f"'none', None or a class with from_matrix, got {quantize!r}"):
            load_hf(qwen2, quantize=quantize)
    with pytest.raises(InputError, match=r"mesh must have the axes 'data' and 'model', got \['x'\]"):
        load_hf(qwen2, mesh=jax.sharding.Mesh(jax.devices(), "x"))
    for dtype in ("int8", "nothing", np.float64):
        with pytest.raises(ConfigError, match="is not one of float32, bfloat16, float16"):
            load_hf(qwen2, dtype=dtype)
    with pytest.raises(TypeError, match="dtype must be one of float32"):
        load_hf(qwen2, dtype=[16])


def test_overflowing_values_are_reported_together(tmp_path):
    tensors = weights(QWEN2)
    tensors[NORM][3] = tensors[QUERY][0, 0] = 1e6
    path = write(tmp_path / "x", QWEN2, tensors)
    with pytest.raises(CheckpointError) as caught:
        load_hf(path, dtype="float16")
    assert {problem.split(": ")[1] for problem in caught.value.problems} == {NORM, QUERY}


@pytest.mark.parametrize("shards", [1, 2])
def test_tensors_of_a_base_model_get_its_prefix(tmp_path, shards):
    tensors = weights(QWEN3 | {"tie_word_embeddings": True})
    config = QWEN3 | {"tie_word_embeddings": True, "architectures": ["Qwen3Model"]}
    stored = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    stored["rotary_emb.inv_freq"] = np.ones(3, np.float32)
    path = write(tmp_path / "x", config, stored, shards=shards)
    assert same(load_hf(path)[0], tensors)
    assert load_shapes(path)[0]["model"]["norm"]["weight"].shape == (16,)
    assert flat(load_hf(path, quantize="int8")[0]).keys() == tensors.keys()
    stored["layers.0.more.weight"] = np.ones(3, np.float32)
    (problem,) = problems(write(tmp_path / "y", config, stored))
    assert "model.layers.0.more.weight [3] is unexpected" in problem


def test_base_model_without_a_head_is_refused(tmp_path):
    stored = {
        name.removeprefix("model."): tensor for name, tensor in weights(LLAMA).items() if name != "lm_head.weight"
    }
    (problem,) = problems(write(tmp_path / "x", LLAMA, stored))
    assert "lm_head.weight [40, 16] is missing: if the head is the embedding, set tie_word_embeddings" in problem
    assert problem.endswith("; a base model has no head")


def test_heads_for_other_tasks_are_ignored_with_a_warning(tmp_path):
    others = {"v_head.summary.weight": np.ones((1, 16), np.float32), "v_head.summary.bias": np.ones(1, np.float32)}
    for name, heads in {"trl": others, "score": {"score.weight": np.ones((1, 16), np.float32)}}.items():
        path = write(tmp_path / name, QWEN2, weights(QWEN2) | heads, shards=2)
        with pytest.warns(JaxgenWarning, match=rf"^{path}: heads for other tasks are ignored: ") as seen:
            params, _ = load_hf(path)
        assert same(params, weights(QWEN2))
        assert all(head in str(seen[0].message) for head in heads)


def test_ignored_keys_and_tensors_are_named_in_one_warning(tmp_path):
    config = QWEN2 | {"unsloth_fixed": True, "transformers.js_config": {}}
    config["rope_scaling"] = {"type": "linear", "factor": 2.0, "finetuned": True}
    generation = GENERATION | {"cache_implementation": "dynamic", "of_a_trainer": 3}
    path = write(tmp_path / "x", config, weights(QWEN2) | {"score.weight": np.ones((1, 16), np.float32)}, generation)
    with pytest.warns(JaxgenWarning) as seen:
        _, cfg = load_hf(path)
    assert [str(warning.message) for warning in seen] == [
        f"{path}: config.json: unknown keys are ignored, as in transformers: transformers.js_config, unsloth_fixed; "
        "config.json: rope_scaling (rope_type linear): ignored, as in transformers: finetuned; "
        "generation_config.json: cache_implementation='dynamic' is ignored: it does not change the generated tokens; "
        "generation_config.json: unknown options are ignored: of_a_trainer; "
        "heads for other tasks are ignored: score.weight"
    ]
    assert (cfg.cache_implementation, cfg.temperature) == (None, 0.5)


def test_other_files_in_the_directory_are_ignored(qwen2):
    for name in ("adapter_model.safetensors", "value_head.safetensors", "training_args.bin", "pytorch_model.bin"):
        (qwen2 / name).write_bytes(b"PK")
    assert same(load_hf(qwen2)[0], weights(QWEN2))


# Faulty checkpoints


def test_all_problems_are_reported_together(tmp_path):
    tensors = weights(QWEN2)
    del tensors[NORM]
    tensors[QUERY] = tensors[QUERY][:8]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((2, 3), np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((24, 16), np.int32)
    path = write(tmp_path / "x", QWEN2, tensors, {"temperature": -1.0, "do_sample": True})
    expected = [
        f"{path / 'generation_config.json'}: temperature must be > 0",
        f"{path / SINGLE}: model.layers.0.mlp.up_proj.weight has dtype I32",
        f"{path / SINGLE}: {QUERY} has shape [8, 16], the config needs [16, 16]",
        f"{path}: {NORM} [16] is missing",
        f"{path / SINGLE}: model.layers.2.mlp.up_proj.weight [2, 3] is unexpected",
    ]
    found = problems(path)
    assert len(found) == len(expected)
    for problem, start in zip(found, expected, strict=True):
        assert problem.startswith(start)


def test_names_with_a_prefix_are_among_the_problems_shown(tmp_path):
    path = write(tmp_path / "x", QWEN2, {f"_orig_mod.{name}": tensor for name, tensor in weights(QWEN2).items()})
    with pytest.raises(CheckpointError) as caught:
        load_hf(path)
    shown = str(caught.value)
    assert f"{EMBEDDING} [40, 16] is missing" in shown
    assert f"_orig_mod.{EMBEDDING} [40, 16] is unexpected" in shown


def test_loading_an_adapter_as_a_model_is_refused(qwen2):
    (qwen2 / SINGLE).rename(qwen2 / "adapter_model.safetensors")
    (problem,) = problems(qwen2)
    assert problem == (
        f"{qwen2}: no *.safetensors of a model, only an adapter: load its base model, then call load_adapter"
    )


def test_config_json(qwen2):
    edit(qwen2 / "config.json", vocab_size=..., rope_theta=...)
    (problem,) = problems(qwen2)
    assert problem.startswith(f"{qwen2 / 'config.json'}: ")
    assert "vocab_size" in problem
    (qwen2 / "config.json").write_text("[")
    assert "config.json: not valid JSON" in problems(qwen2)[0]
    (qwen2 / "config.json").write_text("[]")
    assert "config.json: must contain a JSON object, contains list" in problems(qwen2)[0]
    (qwen2 / "config.json").unlink()
    assert "config.json is missing" in problems(qwen2)[0]
    (qwen2 / SINGLE).unlink()
    assert len(problems(qwen2)) == 2


def test_eos_token_outside_the_vocabulary_draws_a_warning(qwen2):
    edit(qwen2 / "generation_config.json", eos_token_id=[2, 40, 10**9])
    with pytest.warns(
        JaxgenWarning, match=r"generation_config\.json: eos_token_id has \[40, 1000000000\], which never"
    ):
        _, cfg = load_hf(qwen2)
    assert cfg.eos_token_id == (2, 40, 10**9)
    assert cfg.replace(do_sample=False).eos_token_id == (2, 40, 10**9)
    with pytest.raises(ConfigError, match="eos_token_id contains the token 40, which can never end a text"):
        cfg.replace(eos_token_id=40)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 10_000}, {"head_dim": 10**9}, {"vocab_size": 2**31 - 1}])
def test_config_much_larger_than_the_files_is_refused(qwen2, changes):
    edit(qwen2 / "config.json", **changes)
    with bounded():
        found = problems(qwen2)
    assert f"{qwen2 / 'config.json'}: describes " in found[0] or "is missing" in found[0]


def test_generation_config_json(qwen2):
    edit(qwen2 / "generation_config.json", do_sample="yes")
    (problem,) = problems(qwen2)
    assert problem.startswith(f"{qwen2 / 'generation_config.json'}: do_sample must be")


def test_directory_without_weights_is_refused(qwen2):
    (qwen2 / SINGLE).unlink()
    assert "no *.safetensors: download" in problems(qwen2)[0]
    (qwen2 / "pytorch_model.bin").write_bytes(b"")
    (problem,) = problems(qwen2)
    assert "pytorch_model.bin" in problem
    assert "save_pretrained" in problem


def test_dangling_link_is_reported(qwen2):
    (qwen2 / SINGLE).unlink()
    (qwen2 / SINGLE).symlink_to("absent")
    (problem,) = problems(qwen2)
    assert problem.startswith(f"{qwen2 / SINGLE}: No such file")


def test_path_that_is_not_a_directory_is_refused(qwen2, tmp_path, monkeypatch):
    assert "is a file: pass the directory that contains it" in problems(qwen2 / SINGLE)[0]
    assert "pass a local checkpoint directory" in problems(tmp_path / "absent")[0]
    assert "Hub" in problems(Path("Qwen/Qwen2.5-0.5B-Instruct"))[0]
    (tmp_path / ".absent.replaced").mkdir()
    assert ".absent.replaced is the old one: rename it back" in problems(tmp_path / "absent")[0]


def test_a_damaged_file_hides_no_other_problem(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    edit(sharded / "config.json", vocab_size=41)
    truncated, *rest = problems(sharded)
    assert truncated.startswith(f"{shard}: truncated")
    assert 1 <= len(rest) <= 2
    assert all("the config needs [41, 16]" in problem for problem in rest)


def test_the_index(sharded):
    first, second, third = (sharded / f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
    second.unlink()
    assert problems(sharded) == [f"{second}: absent, though {INDEX} names it"]
    tensors = weights(LLAMA, "bfloat16")
    inside = [name for name, file in index(sharded).items() if file == second.name]
    moved, kept = inside[0], {name: tensors[name] for name in inside[1:]}
    save_file(kept | {"stray": np.ones(1, np.float32)}, second)
    found = problems(sharded)
    assert f"{second}: stray is not in {INDEX}" in found
    assert f"{second}: {moved} is absent, though {INDEX} puts it there" in found
    assert any(problem.startswith(f"{second}: stray [1] is unexpected") for problem in found)
    assert len(found) == 3
    save_file(kept | {moved: tensors[moved]}, second)
    save_file(read(third) | {moved: tensors[moved]}, third)
    assert problems(sharded) == [f"{third}: {moved} is also in {second.name}"]
    save_file(kept, second)
    assert problems(sharded) == [f"{second}: {moved} is absent, though {INDEX} puts it there: it is in {third.name}"]
    assert first.exists()


@pytest.mark.parametrize("weight_map", [None, [], {}, {EMBEDDING: 1}, {EMBEDDING: "../x.safetensors"}, {EMBEDDING: ""}])
def test_index_without_files_is_refused(sharded, weight_map):
    edit(sharded / INDEX, weight_map=weight_map)
    (problem,) = problems(sharded)
    assert problem.startswith(f"{sharded / INDEX}: weight_map must map each tensor to the name of a file")


def test_an_index_beside_a_single_file(sharded):
    save_file(weights(LLAMA), sharded / SINGLE)
    (problem,) = problems(sharded)
    assert "remove the outdated one" in problem
    (sharded / INDEX).write_text("{")
    assert f"{sharded / INDEX}: not valid JSON" in problems(sharded)[0]


def index(path: Path) -> dict[str, str]:
    return json.loads((path / INDEX).read_text())["weight_map"]


def read(file: Path) -> dict[str, np.ndarray]:
    with safe_open(file, "np") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


# Writing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("config", [QWEN2, LLAMA, QWEN3, MISTRAL], ids=lambda config: config["model_type"])
def test_round_trip_preserves_every_byte(tmp_path, config, dtype):
    tensors = weights(config, dtype)
    params, cfg = load_hf(write(tmp_path / "a", config, tensors, GENERATION))
    save_hf(params, cfg, tmp_path / "b")
    assert (tmp_path / "b" / SINGLE).read_bytes() == (tmp_path / "a" / SINGLE).read_bytes()
    again, cfg_again = load_hf(tmp_path / "b")
    assert cfg_again == cfg
    save_hf(again, cfg_again, tmp_path / "c")
    for file in (tmp_path / "b").iterdir():
        assert file.read_bytes() == (tmp_path / "c" / file.name).read_bytes()
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written["torch_dtype"] == dtype
    assert {key: value for key, value in config.items() if key not in ("torch_dtype", "eos_token_id")}.items() <= (
        written | {"bos_token_id": 1}
    ).items()
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text()) == GENERATION


def test_large_checkpoints_are_sharded(tmp_path, sharded, monkeypatch):
    monkeypatch.setattr("convert.shards.MAX_SHARD", 2000)
    params, cfg = load_hf(sharded)
    save_hf(params, cfg, tmp_path / "b")
    tensors = weights(LLAMA, "bfloat16")
    shards = sorted((tmp_path / "b").glob("*.safetensors"))
    assert [shard.name for shard in shards] == [
        f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))
    ]
    assert len(shards) > 3
    content = [read(shard) for shard in shards]
    assert all(len(part) == 1 or sum(t.nbytes for t in part.values()) <= 2000 for part in content)
    together = {name: tensor for part in content for name, tensor in part.items()}
    assert together.keys() == tensors.keys()
    assert all(together[name].tobytes() == tensors[name].tobytes() for name in tensors)
    written = json.loads((tmp_path / "b" / INDEX).read_text())
    assert written["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    assert written["weight_map"] == {name: shards[n].name for n, part in enumerate(content) for name in part}
    assert same(load_hf(tmp_path / "b")[0], tensors)


def test_numpy_arrays_of_any_layout_are_written(tmp_path, qwen2):
    params, cfg = load_hf(qwen2)
    fortran = jax.tree.map(lambda array: np.asfortranarray(array), params)
    save_hf(fortran, cfg, tmp_path / "b")
    assert (tmp_path / "b" / SINGLE).read_bytes() == (qwen2 / SINGLE).read_bytes()


def test_mixed_dtypes_are_kept_and_the_config_has_the_embeddings_dtype(tmp_path):
    tensors = weights(QWEN2, "float16") | {NORM: np.ones(16, np.float32)}
    params, cfg = load_hf(write(tmp_path / "a", QWEN2, tensors))
    save_hf(params, cfg, tmp_path / "b")
    assert (tmp_path / "b" / SINGLE).read_bytes() == (tmp_path / "a" / SINGLE).read_bytes()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "float16"


def test_all_errors_of_a_wrong_tree_are_listed(tmp_path, qwen2):
    params, cfg = load_hf(qwen2)
    del params["model"]["norm"]
    params["lm_head"] = {"weight": jnp.ones((40, 16))}
    layers = params["model"]["layers"]
    layers["0"]["mlp"]["up_proj"]["weight"] = jnp.ones((16, 24))
    layers["0"]["mlp"]["down_proj"]["weight"] = jnp.ones((16, 24), jnp.int8)
    layers["1"]["mlp"]["up_proj"]["weight"] = [1.0]
    params["a.b"] = jnp.ones(1)
    with pytest.raises(CheckpointError) as caught:
        save_hf(params, cfg, tmp_path / "b")
    starts = [
        "params: the key 'a.b' must be one part of a name",
        "params: model.layers.1.mlp.up_proj.weight must be an array, got list",
        "params: model.layers.1.mlp.up_proj.weight [24, 16] is missing",
        f"params: {NORM} [16] is missing",
        "params: lm_head.weight [40, 16] is unexpected",
        "params: model.layers.0.mlp.up_proj.weight has shape [16, 24], the config needs [24, 16]",
        "params: model.layers.0.mlp.down_proj.weight_scale is missing: 8-bit matrices need float32[16]",
    ]
    assert len(caught.value.problems) == len(starts)
    for start in starts:
        assert any(problem.startswith(start) for problem in caught.value.problems), start
    assert not (tmp_path / "b").exists()


def test_save_refuses_traced_or_wrong_arguments(tmp_path, qwen2):
    params, cfg = load_hf(qwen2)
    with pytest.raises(CheckpointError, match=r"params are traced: call save_hf outside of jax\.jit"):
        jax.jit(lambda params: save_hf(params, cfg, tmp_path / "b"))(params)
    with pytest.raises(ConfigError, match=r"cfg.model is None"):
        save_hf(params, cfg.replace(model=None), tmp_path / "b")
    with pytest.raises(TypeError, match="cfg must be a GenerationConfig, got ModelConfig"):
        save_hf(params, cfg.model, tmp_path / "b")
    with pytest.raises(TypeError, match="params must be a nested dict of arrays, got list"):
        save_hf([], cfg, tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"^params: .* pass their entry, variables\['params'\]$"):
        save_hf({"params": params}, cfg, tmp_path / "b")
    with pytest.raises(ConfigError, match="temperature has one value per prompt"):
        save_hf(params, GenerationConfig(model=cfg.model, temperature=np.array([0.5, 1.0])), tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["qwen2"]


@pytest.mark.parametrize("fused", [False, True])
def test_save_refuses_attached_low_rank_updates(tmp_path, qwen2, fused):
    params, cfg = load_hf(qwen2)
    updates = lora.init(params, 2, jax.random.key(0), ("q_proj", "up_proj"))
    attached = lora.attach(params, updates, 0.5)
    with pytest.raises(CheckpointError) as caught:
        save_hf(fuse_projections(attached) if fused else attached, cfg, tmp_path / "b")
    (problem,) = caught.value.problems
    assert re.fullmatch(
        r"params: model\.layers\.0\.\S+ and others: low-rank updates are attached, .*: call lora\.merge first, .*",
        problem,
    )
    save_hf(lora.merge(params, updates, 0.5), cfg, tmp_path / "b")


def test_overwriting_keeps_only_the_tokenizer(tmp_path, qwen2):
    params, cfg = load_hf(qwen2)
    (qwen2 / "tokenizer.json").write_text("{}")
    (qwen2 / "pytorch_model.bin").write_text("old")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        save_hf(params, cfg, qwen2)
    save_hf(jax.tree.map(lambda array: array + 1, params), cfg, qwen2, overwrite=True)
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in qwen2.iterdir()) == names
    assert same(load_hf(qwen2)[0], {name: tensor + 1 for name, tensor in weights(QWEN2).items()})


def test_tokenizer_is_saved_with_the_model(tmp_path, qwen2):
    params, cfg = load_hf(qwen2)
    cfg = cfg.replace(model=dataclasses.replace(cfg.model, vocab_size=300))
    table = np.zeros((300, cfg.model.hidden_size), np.float32)
    params["model"]["embed_tokens"]["weight"] = table
    if "lm_head" in params:
        params["lm_head"]["weight"] = table
    tok = byte_level()
    save_hf(params, cfg, tmp_path / "b", tokenizer=tok)
    assert Tokenizer.from_pretrained(tmp_path / "b").encode("hello") == tok.encode("hello")
    (tmp_path / "b" / "special_tokens_map.json").write_text("{}")
    save_hf(params, cfg, tmp_path / "b", tokenizer=llama(), overwrite=True)  # nothing of the other tokenizer is left
    assert Tokenizer.from_pretrained(tmp_path / "b").encode("hello") == llama().encode("hello")
    assert not (tmp_path / "b" / "special_tokens_map.json").exists()
    with pytest.raises(TypeError, match=r"tokenizer must be a jaxgen\.Tokenizer, got str"):
        save_hf(params, cfg, tmp_path / "c", tokenizer="qwen2")
    params, cfg = load_hf(qwen2)
    with pytest.raises(CheckpointError, match=r"the tokenizer has 263 tokens, but the model has 40: it belongs to"):
        save_hf(params, cfg, tmp_path / "c", tokenizer=tok)
    assert not (tmp_path / "c").exists()


def test_options_of_a_call_are_not_saved(tmp_path, qwen2):
    params, cfg = load_hf(qwen2)
    loop = cfg.replace(num_return_sequences=3, do_sample=True, temperature=[0.5, 0.7], top_k=None, max_new_tokens=7)
    save_hf(params, loop, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text()) == GENERATION
    save_hf(params, loop.replace(eos_token_id=[2, 5], pad_token_id=3), tmp_path / "c")  # these describe the model
    assert json.loads((tmp_path / "c" / "config.json").read_text())["pad_token_id"] == 3
    saved = GENERATION | {"eos_token_id": [2, 5], "pad_token_id": 3}
    assert json.loads((tmp_path / "c" / "generation_config.json").read_text()) == saved
    assert json.loads((tmp_path / "c" / "config.json").read_text())["eos_token_id"] == [2, 5]
    save_hf(params, GenerationConfig.from_hf({"top_k": 7}, cfg.model), tmp_path / "d")
    assert json.loads((tmp_path / "d" / "generation_config.json").read_text()) == {"top_k": 7}
    save_hf(params, GenerationConfig(model=cfg.model, top_k=8).replace(top_p=0.5), tmp_path / "e")
    assert json.loads((tmp_path / "e" / "generation_config.json").read_text()) == {"top_k": 8, "top_p": 0.5}


def test_saving_a_deleted_array_keeps_the_old_checkpoint(tmp_path, qwen2):
    params, cfg = load_hf(qwen2)
    before = (qwen2 / SINGLE).read_bytes()
    params["model"]["norm"]["weight"].delete()
    with pytest.raises(CheckpointError, match=r"params: model\.norm\.weight was deleted, being donated to"):
        save_hf(params, cfg, qwen2, overwrite=True)
    assert (qwen2 / SINGLE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["qwen2"]


@pytest.mark.parametrize("name", ["stories260K-hf", "stories260K-qwen2-hf", "babyllama105-hf"])
def test_real_checkpoints_round_trip_byte_for_byte(data, tmp_path, name):
    source = data / "checkpoints" / name
    params, cfg = load_hf(source)
    save_hf(params, cfg, tmp_path / "b")
    before, after = read(source / SINGLE), read(tmp_path / "b" / SINGLE)
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    assert load_hf(tmp_path / "b")[1] == cfg


# Imports and memory


def run(code: str, *arguments) -> str:
    """Run a Python program in a separate process, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_import_does_not_import_torch_or_initialize_a_device():
    code = (
        "import sys, convert, convert.__main__\n"
        "from jax._src import xla_bridge\n"
        "print({'torch', 'transformers'} & set(sys.modules), xla_bridge.backends_are_initialized())"
    )
    assert run(code) == "set() False\n"


PEAK = """
import re, sys, convert, convert.__main__

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

before = peak()
"""
LOAD_AND_SAVE = """
params, cfg = convert.load_hf(sys.argv[1], dtype=sys.argv[3] or None)
print(peak() - before)
convert.save_hf(params, cfg, sys.argv[2])
print(peak() - before)
"""
CONVERT = """
assert convert.__main__.main([*sys.argv[1:3], *(["--dtype", sys.argv[3]] if sys.argv[3] else [])]) == 0
"""


@pytest.fixture(scope="module")
def half_billion(tmp_path_factory):
    """Yield the path and size in bytes of a three-file bfloat16 checkpoint with the shapes of Qwen2.5-0.5B."""
    config = QWEN2 | {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    }
    block = np.random.default_rng(0).normal(size=1 << 20).astype(jnp.bfloat16)
    tensors = {name: np.resize(block, shape) for name, shape in shapes(config).items()}
    path = write(tmp_path_factory.mktemp("half_billion") / "x", config, tensors, shards=3)
    yield path, sum(tensor.nbytes for tensor in tensors.values())
    shutil.rmtree(path)  # pytest would keep those of the last three runs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["", "float32"])
def test_peak_memory_of_loading_and_saving_is_the_parameters(half_billion, tmp_path, dtype):
    path, size = half_billion
    size *= 2 if dtype else 1
    loading, saving = map(int, run(PEAK + LOAD_AND_SAVE, path, tmp_path / "out", dtype).split())
    shutil.rmtree(tmp_path / "out")
    assert size > 900e6
    assert 0.95 * size < loading <= 1.1 * size
    assert saving <= 1.1 * size


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["", "float32"])
def test_peak_memory_of_converting_is_one_shard(half_billion, tmp_path, dtype):
    path, size = half_billion
    limit = f"convert.shards.MAX_SHARD = {size // 3}\n"
    *_, peak = run(PEAK + limit + CONVERT + "print(peak() - before)", path, tmp_path / "out", dtype).split()
    largest = max(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    shutil.rmtree(tmp_path / "out")
    assert largest > 300e6
    assert 0.95 * largest < int(peak) <= 1.6 * largest
