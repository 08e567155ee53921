"""Checkpoints with experts: names in files and in memory, quantization, parts, and errors."""

import shutil
import tracemalloc

import flax.traverse_util
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from convert import CheckpointError, load_hf, save_hf
from convert.experts import Stack
from convert.hf import open_checkpoint
from convert.shards import find_tensors
from jaxgen import GenerationConfig, fuse_projections
from jaxgen.core.model.int8 import Int8
from tests.support.goldens import GOLDENS
from tests.support.models import model_config, random_params

FOLDERS = [GOLDENS / "441" / "checkpoints" / name for name in ("qwen2-moe", "mixtral")]
FOLDERS += [GOLDENS / "newer" / "checkpoints" / name for name in ("qwen3-moe", "qwen3-moe-steps")]
QWEN2, MIXTRAL, QWEN3, _ = FOLDERS
WEIGHTS = "model.safetensors"

each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def flat(params):
    return flax.traverse_util.flatten_dict(params, sep=".")


def check_same(left, right):
    left, right = flat(left), flat(right)
    assert left.keys() == right.keys()
    for name, value in left.items():
        for one, other in zip(jax.tree.leaves(value), jax.tree.leaves(right[name]), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)


def changed(folder, target, change):
    """Copy a checkpoint to `target`, with the tensors that `change` returns."""
    shutil.copytree(folder, target)
    save_file(change(load_file(folder / WEIGHTS)), target / WEIGHTS)
    return target


@each_folder
def test_files_have_the_names_of_transformers(folder, tmp_path):
    params, cfg = load_hf(folder)
    stored = load_file(folder / WEIGHTS)
    for saved in (params, fuse_projections(params)):
        save_hf(saved, cfg, tmp_path / "saved", overwrite=True)
        written = load_file(tmp_path / "saved" / WEIGHTS)
        assert written.keys() == stored.keys()
        assert all(np.array_equal(written[name], stored[name]) for name in stored)
    assert load_hf(tmp_path / "saved")[1].model == cfg.model


def test_an_expert_is_a_part_of_its_parameter():
    params, _ = load_hf(MIXTRAL)
    stored = load_file(MIXTRAL / WEIGHTS)
    mlp = params["model"]["layers"]["1"]["mlp"]
    prefix = "model.layers.1.block_sparse_moe"
    np.testing.assert_array_equal(mlp["gate"]["weight"], stored[f"{prefix}.gate.weight"])
    for name, own in {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.items():
        np.testing.assert_array_equal(mlp["experts"][name]["weight"][3], stored[f"{prefix}.experts.3.{own}.weight"])


def together(tensors):
    """Return the tensors as transformers 5 writes them with `save_original_format=False`."""
    own = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    result, experts = {}, {}
    for name, tensor in tensors.items():
        name = name.replace("block_sparse_moe", "mlp")
        if ".experts." not in name:
            result[name] = tensor
            continue
        prefix, rest = name.split(".experts.")
        _, projection, _ = rest.split(".")  # the files' order of the experts is numeric, because there are few
        experts.setdefault((prefix, own.get(projection, projection)), []).append(tensor)
    for prefix in {prefix for prefix, _ in experts}:
        gate, up, down = (np.stack(experts[prefix, name]) for name in ("gate_proj", "up_proj", "down_proj"))
        result[f"{prefix}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        result[f"{prefix}.experts.down_proj"] = down
    return result


@each_folder
def test_experts_that_are_stored_together_are_read(folder, tmp_path):
    stacked = changed(folder, tmp_path / "stacked", lambda tensors: together(dict(sorted(tensors.items()))))
    check_same(load_hf(stacked)[0], load_hf(folder)[0])
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    check_same(load_hf(stacked, mesh=mesh)[0], load_hf(folder)[0])


def test_another_number_of_experts_is_refused(tmp_path):
    def more(tensors):
        stacked = together(dict(sorted(tensors.items())))
        return {name: np.concatenate([x, x[:1]]) if ".experts." in name else x for name, x in stacked.items()}

    with pytest.raises(CheckpointError, match=r"experts.down_proj \[8, 32, 20\] is unexpected"):
        load_hf(changed(QWEN3, tmp_path / "changed", more))


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(EXPERT), rf"{EXPERT} \[20, 32\] is missing"),
        (
            without(EXPERT, EXPERT.replace("2.up", "4.up")),
            rf"{EXPERT} \[20, 32\] and 1 others like it are missing",
        ),
        (without("model.layers.0.mlp.gate.weight"), r"model.layers.0.mlp.gate.weight \[7, 32\] is missing"),
        (
            lambda tensors: tensors | {EXPERT: tensors[EXPERT][:-1].copy()},
            rf"{EXPERT} is F32\[19, 32\], but .*0.up_proj.weight is F32\[20, 32\]",
        ),
        (
            lambda tensors: tensors | {EXPERT: tensors[EXPERT].astype(np.float16)},
            rf"{EXPERT} is F16\[20, 32\], but .*0.up_proj.weight is F32\[20, 32\]",
        ),
        (
            lambda tensors: tensors | {EXPERT.replace("2.up", "7.up"): tensors[EXPERT]},
            r"experts.7.up_proj.weight \[20, 32\] is unexpected",
        ),
        (
            lambda tensors: tensors | {"model.layers.0.mlp.experts.down_proj": np.zeros((7, 32, 20), np.float32)},
            r"model.layers.0.mlp.experts.down_proj contains experts that the files also have separately",
        ),
    ],
)
def test_faults_name_the_expert(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load_hf(changed(QWEN3, tmp_path / "changed", change))
    assert len(caught.value.problems) == 1


@each_folder
def test_routers_are_never_quantized(folder, tmp_path):
    params, cfg = load_hf(folder, quantize="int8")
    whole = flat(load_hf(folder)[0])
    quantized = {name for name, weight in flat(params).items() if isinstance(weight, Int8)}
    matrices = {name for name, weight in whole.items() if weight.ndim > 1}
    assert matrices - quantized == {name for name in matrices if ".gate." in name or "shared_expert_gate" in name}
    for name in quantized:
        weight = flat(params)[name]
        assert weight.scales.shape == whole[name].shape[:-1]
        error = np.abs(np.asarray(weight.values) * np.asarray(weight.scales)[..., None] - whole[name])
        assert (error <= 0.51 * np.asarray(weight.scales)[..., None]).all()
    save_hf(params, cfg, tmp_path / "saved")
    check_same(load_hf(tmp_path / "saved")[0], params)


@each_folder
def test_command_converts_experts(folder, tmp_path, call):
    small, again = tmp_path / "small", tmp_path / "again"
    assert call(folder, tmp_path / "half", "--dtype", "bfloat16", "--check")[0] == 0
    assert set(open_checkpoint(tmp_path / "half").by_file_name().weights) == set(load_file(folder / WEIGHTS))
    assert call(folder, small, "--quantize", "int8", "--check")[0] == 0
    check_same(load_hf(small)[0], load_hf(folder, quantize="int8")[0])
    assert call(small, again, "--quantize", "none", "--check")[0] == 0
    assert set(load_file(again / WEIGHTS)) == set(load_file(folder / WEIGHTS))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_parts_of_experts_are_read_and_written(tmp_path, quantize):
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    model = model_config(model_type="qwen3_moe", vocab_size=64, intermediate_size=16, **sizes)
    save_hf(random_params(model), GenerationConfig(model=model), tmp_path / "one")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "model"))
    params, cfg = load_hf(tmp_path / "one", quantize=quantize, mesh=mesh)
    check_same(params, load_hf(tmp_path / "one", quantize=quantize)[0])
    up = jax.tree.leaves(params["model"]["layers"]["0"]["mlp"]["experts"]["up_proj"])
    assert [leaf.addressable_shards[0].data.shape[:2] for leaf in up] == [(5, 2)] * len(up)
    save_hf(params, cfg, tmp_path / "parts")
    check_same(load_hf(tmp_path / "parts")[0], params)


def test_a_stack_is_read_expert_by_expert(tmp_path):
    tensors = {str(number): np.full((256, 256), number, np.float32) for number in range(32)}
    save_file(tensors, tmp_path / "model.safetensors")
    found, _, _ = find_tensors(tmp_path)
    stack = Stack.of(*[found[str(number)] for number in range(32)])
    tracemalloc.start()
    values = stack.read(np.dtype(np.float32))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.1 * values.nbytes
    np.testing.assert_array_equal(values[:, 0, 0], np.arange(32))
