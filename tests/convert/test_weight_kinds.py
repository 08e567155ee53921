"""A kind of weight defined only in this file can be created, loaded, saved, sharded, and used to generate."""

import dataclasses
import json
from typing import Any, ClassVar

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from convert import CheckpointError, load_hf, pool_kv_heads, save_hf, shards
from jaxgen import InputError, fuse_projections, generate, shard_params
from jaxgen.core.model.int8 import Int8
from jaxgen.core.model.weights import Quantized, product
from jaxgen.errors import ConfigError
from jaxgen.training.loop import TrainConfig, TrainState
from tests.support.checkpoints import QWEN2, weights, write

FILE, QUERY = "model.nibbles.safetensors", "model.layers.0.self_attn.q_proj.weight"
IDS = np.arange(3, 9).reshape(2, 3)


@flax.struct.dataclass
class Nibbles:
    """4-bit numbers, two per byte, with one scale for each half of a row."""

    name: ClassVar[str] = "nibbles"
    title: ClassVar[str] = "4-bit"
    tensors: ClassVar[dict[str, str]] = {
        "": "pairs of numbers",
        "_scale": "one scale for each half of a row",
        "_sums": "the sum of each row",
    }

    pairs: Any  # uint8[F, D/2], columns i and i + D/2 in one byte
    scales: Any  # float32[F, 2]
    sums: Any  # int32[F], not used in a product
    dtype: Any = flax.struct.field(pytree_node=False)

    @classmethod
    def from_matrix(cls, matrix, dtype):
        if not np.isfinite(matrix).all():
            raise InputError("is not finite")
        halves = matrix.reshape(len(matrix), 2, -1)
        scales = (np.abs(halves).max(axis=2) / 7).astype(np.float32)
        numbers = np.rint(halves / np.where(scales == 0, 1, scales)[..., None]).astype(np.int32) + 8
        return cls((numbers[:, 0] | numbers[:, 1] << 4).astype(np.uint8), scales, numbers.sum((1, 2), np.int32), dtype)

    def to_matrix(self):
        return np.asarray(self._matrix(np))

    def _matrix(self, numpy):
        halves = numpy.stack([self.pairs & 15, self.pairs >> 4], axis=1).astype(np.float32) - 8
        return (halves * self.scales[..., None]).reshape(self.shape)

    @property
    def shape(self):
        return (self.pairs.shape[0], 2 * self.pairs.shape[1])

    def specs(self, spec):
        rows, _ = spec or (None, None)  # columns are not divided
        return dataclasses.replace(
            self, pairs=PartitionSpec(rows), scales=PartitionSpec(rows), sums=PartitionSpec(rows)
        )

    def product(self, rows, context):
        return product(rows, self._matrix(jnp).astype(rows.dtype), context)

    def look_up(self, ids):
        return jnp.take(self._matrix(jnp).astype(self.dtype), ids, axis=0, mode="fill", fill_value=jnp.nan)


def flat(params) -> dict:
    return flax.traverse_util.flatten_dict(params, sep=".")


def same(left, right) -> bool:
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def tokens(params, cfg) -> list:
    options = {"do_sample": False, "temperature": None, "max_new_tokens": 5, "eos_token_id": None}
    return generate(params, IDS, None, cfg.replace(**options)).sequences.tolist()


@pytest.fixture
def quantized(qwen2):
    return load_hf(qwen2, quantize=Nibbles)


@pytest.fixture
def saved(quantized, tmp_path):
    save_hf(*quantized, tmp_path / "saved")
    return tmp_path / "saved"


def test_each_matrix_is_quantized(quantized):
    params, cfg = quantized
    assert cfg.model.dtype == "float32"
    for name, matrix in weights(QWEN2).items():
        weight = flat(params)[name]
        assert isinstance(weight, Quantized) == (matrix.ndim == 2)
        if matrix.ndim == 2:
            assert same(weight, Nibbles.from_matrix(matrix, np.dtype("float32")))


@pytest.mark.slow
def test_quantized_model_generates_like_its_matrices(quantized):
    params, cfg = quantized
    matrices = {name: jnp.asarray(w.to_matrix()) if isinstance(w, Nibbles) else w for name, w in flat(params).items()}
    expected = tokens(flax.traverse_util.unflatten_dict(matrices, sep="."), cfg)
    assert tokens(params, cfg) == expected
    assert tokens(fuse_projections(params), cfg) == expected


@pytest.mark.parametrize("max_shard", [None, 1500])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_custom_kind_is_saved_and_loaded(qwen2, tmp_path, monkeypatch, dtype, max_shard):
    params, cfg = load_hf(qwen2, quantize=Nibbles, dtype=dtype)
    monkeypatch.setattr(shards, "MAX_SHARD", max_shard or shards.MAX_SHARD)
    save_hf(fuse_projections(params), cfg, tmp_path / "saved")
    names = {file.name for file in (tmp_path / "saved").glob("*.safetensors*")}
    assert names == {FILE} if max_shard is None else len(names) > 3
    assert all(name.startswith("model.nibbles") for name in names)
    assert json.loads((tmp_path / "saved/config.json").read_text())["torch_dtype"] == (dtype or "float32")
    for wanted in (None, dtype):
        read, read_cfg = load_hf(tmp_path / "saved", quantize=Nibbles, dtype=wanted)
        assert same(read, params)
        assert read_cfg == cfg


@pytest.mark.slow
def test_custom_kind_is_divided_over_a_mesh(qwen2, quantized, saved, tmp_path):
    params, cfg = quantized
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    expected = tokens(params, cfg)
    divided = shard_params(params, cfg.model, mesh)
    for other in (
        divided,
        load_hf(qwen2, quantize=Nibbles, mesh=mesh)[0],
        load_hf(saved, quantize=Nibbles, mesh=mesh)[0],
    ):
        assert same(other, params)
        assert [leaf.sharding for leaf in jax.tree.leaves(other)] == [x.sharding for x in jax.tree.leaves(divided)]
        up = other["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"]
        assert {part.data.shape for part in up.pairs.addressable_shards} == {(12, 8)}
    assert tokens(divided, cfg) == expected
    save_hf(divided, cfg, tmp_path / "again")
    assert same(load_file(tmp_path / "again" / FILE), load_file(saved / FILE))


def test_one_kind_is_converted_to_another(qwen2, quantized, tmp_path):
    save_hf(*load_hf(qwen2, quantize="int8"), tmp_path / "8")
    params, cfg = load_hf(tmp_path / "8", quantize=Nibbles)
    save_hf(*load_hf(tmp_path / "8", quantize="none"), tmp_path / "none")
    assert same(params, load_hf(tmp_path / "none", quantize=Nibbles)[0])
    params["model"]["embed_tokens"]["weight"] = Int8.from_matrix(np.ones((40, 16), np.float32), np.dtype("float32"))
    with pytest.raises(CheckpointError, match=r"weights of the kinds .* cannot be stored in one checkpoint"):
        save_hf(params, cfg, tmp_path / "mixed")


def test_unsupported_uses_are_refused(qwen2, quantized, saved, tmp_path):
    params, cfg = quantized
    with pytest.raises(InputError, match="params are quantized and cannot be trained"):
        TrainState.create(params, TrainConfig(steps=1))
    with pytest.raises(ConfigError, match="quantized, so their heads cannot be pooled"):
        pool_kv_heads(params, cfg, 1)
    with pytest.raises(CheckpointError, match="weight has dtype U8, which must be one of F32"):
        load_hf(saved)
    good = load_file(saved / FILE)
    save_file(good | {f"{QUERY}_scale": good[f"{QUERY}_scale"][:, :1]}, saved / FILE)
    with pytest.raises(CheckpointError) as caught:
        load_hf(saved, quantize=Nibbles)
    needed = "4-bit matrices need float32[16, 2], one scale for each half of a row"
    assert caught.value.problems == [f"{saved}: {QUERY}_scale is F32[16, 1]: {needed}"]
    save_file(good | {QUERY: good[QUERY][:, :5]}, saved / FILE)
    with pytest.raises(CheckpointError, match=r"has shape \[16, 10\], the config needs \[16, 16\]"):
        load_hf(saved, quantize=Nibbles)
    infinite = weights(QWEN2)
    infinite[QUERY][2, 5] = np.inf
    with pytest.raises(CheckpointError, match=f"{QUERY} is not finite"):
        load_hf(write(tmp_path / "infinite", QWEN2, infinite), quantize=Nibbles)
