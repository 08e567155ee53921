"""Hugging Face checkpoint directories: config.json, generation_config.json and *.safetensors."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from convert.atomic_directory import new_directory
from convert.errors import CheckpointError
from convert.int8 import check_quantize, dequantized, is_scale, quantized, scale_name, split_scales
from convert.parts import read_parts, shared_directory, write_parts
from convert.shards import CONSTANTS, checkpoint_directory, find_tensors, in_order, read_json, write_json, write_tensors
from convert.tensors import DTYPES, INT8, STORED, Tensor, same_bits
from jaxgen.config.generation_config import GenerationConfig, endless_ids, model_of, warn
from jaxgen.config.kinds import is_tracer
from jaxgen.errors import ConfigError, JaxgenError, shown
from jaxgen.model.causal_lm import param_shapes
from jaxgen.model.config import ModelConfig
from jaxgen.model.fused import separate
from jaxgen.model.int8 import Int8
from jaxgen.model.lowrank import LowRank
from jaxgen.model.sharding import shardings
from jaxgen.text.json_file import fetch_again

TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt "
    "tokenizer.model chat_template.jinja chat_template.json"
).split()

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ALLOWED = ", ".join(dtype.name for dtype in DTYPES.values())
_LARGEST_CONFIG = 1_000_000  # bytes
_SPARE = 1 << 24  # parameters, beyond those of the files, up to which mismatches are listed tensor by tensor


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checked directory; its weights have not been read yet.

    `config` and `generation` are the contents of the two JSON files (`generation` is None if its file does not exist),
    `tensors` the model's parameters by name, and the scales of those that are quantised.
    """

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any] | None
    cfg: GenerationConfig
    tensors: dict[str, Tensor]

    @property
    def quantized(self) -> bool:
        """True if matrices are stored as 8-bit numbers with scales."""
        return any(map(self._is_quantized, self.tensors))

    def dtype(self, wanted: np.dtype | None) -> np.dtype:
        """Return the model's dtype: `wanted`, or if that is None the embedding's; the config's if that is quantised."""
        if wanted is None and self._is_quantized(_EMBEDDING):
            return np.dtype(model_of(self.cfg).dtype)
        return wanted or STORED[self.tensors[_EMBEDDING].dtype]

    def dtype_of(self, name: str, wanted: np.dtype | None) -> np.dtype:
        """Return the dtype to read a tensor in: `wanted` or, if that is None or the tensor quantised, the file's."""
        scales_or_values = is_scale(name, self.tensors) or self._is_quantized(name)
        return STORED[self.tensors[name].dtype] if scales_or_values or wanted is None else wanted

    def sizes(self, wanted: np.dtype | None) -> dict[str, int]:
        """Return the bytes of each tensor in the dtype that `dtype_of` returns."""
        return {
            name: math.prod(tensor.shape) * self.dtype_of(name, wanted).itemsize
            for name, tensor in self.tensors.items()
        }

    def read(self, name: str, wanted: np.dtype | None) -> np.ndarray:
        """Return the values of a tensor in the dtype that `dtype_of` returns."""
        return self.tensors[name].read(self.dtype_of(name, wanted))

    def quantize(self, quantize: str | None) -> Checkpoint:
        """Return a checkpoint whose matrices are all quantised when they are read, or none; None returns this one.

        Raises:
            ConfigError: neither "int8" nor "none" nor None.
        """
        check_quantize(quantize)
        if quantize is None:
            return self
        if quantize == "int8":
            return dataclasses.replace(self, tensors=quantized(self.tensors))
        return dataclasses.replace(self, tensors=dequantized(self.tensors, self.dtype(None)))

    def _is_quantized(self, name: str) -> bool:
        return self.tensors[name].dtype == INT8


def load_hf(path, *, dtype=None, quantize=None, mesh=None) -> tuple[dict[str, Any], GenerationConfig]:
    """Read the parameters and the generation config of a Hugging Face directory.

    Parameters are nested dicts; their keys are the parts of the checkpoint's names. Matrices are `[out, in]`:
    `params["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"]`. A tied model has no `lm_head`. Tensors are read and
    cast one at a time, the largest first: on the CPU the peak of memory is that of the parameters, or three times the
    largest tensor if that is more. Without a generation_config.json the generation fields of config.json are used, as
    in HF's `GenerationConfig.from_model_config`, except `use_cache`, which changes no token.

    An `eos_token_id` that is not in the vocabulary causes a warning: it can never end a text.

    Args:
        path: the directory.
        dtype: float32, bfloat16 or float16, as a name or a dtype; None keeps that of each tensor. The result's
            `cfg.model.dtype` is that of the embedding. Where matrices are quantised, it is the dtype of activations
            and of the other parameters; the matrices stay as they are.
        quantize: "int8" makes a `jaxgen.model.int8.Int8` of each matrix, also of the embedding and the head: 8-bit
            numbers with a scale for each output channel. "none" makes arrays in `dtype` of the matrices that
            `python -m convert --quantize int8` has written. None keeps them as they are stored.
        mesh: a `jax.sharding.Mesh` with the axes `data` and `model`, over whose devices the parameters are divided.
            Each process reads only the bytes of its own devices' parts.

    Raises:
        CheckpointError: all problems of the checkpoint.
        InputError: a mesh that the model cannot be divided over.
        ConfigError: a `quantize` or `dtype` that is not offered.
    """
    wanted = float_dtype(dtype)
    checkpoint = open_checkpoint(path)
    model = dataclasses.replace(model_of(checkpoint.cfg), dtype=checkpoint.dtype(wanted).name)
    checkpoint = checkpoint.quantize(quantize)
    if endless := endless_ids(checkpoint.cfg.eos_token_id, model):
        file = checkpoint.path / ("config.json" if checkpoint.generation is None else "generation_config.json")
        vocabulary = f"the vocabulary is 0 to {model.vocab_size - 1}"
        warn(f"{file}: eos_token_id has {endless}, which never end a text: {vocabulary}")
    divided = None if mesh is None else shardings(model, mesh, checkpoint.tensors)
    arrays: dict[str, jax.Array] = {}
    problems: list[str] = []
    # The largest first: for a moment a tensor is in memory as it was read, as it was cast and as a jax array.
    for name, tensor in sorted(checkpoint.tensors.items(), key=lambda item: -item[1].nbytes):
        try:
            if divided is None:
                array = jax.device_put(checkpoint.read(name, wanted))
            else:
                array = read_parts(tensor, checkpoint.dtype_of(name, wanted), divided[name])
            arrays[name] = array.block_until_ready()
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError(problems)
    params: dict[str, Any] = {name: arrays[name] for name in checkpoint.tensors if not is_scale(name, arrays)}
    for name, array in params.items():
        if array.dtype == np.int8:
            params[name] = Int8(array, arrays[scale_name(name)], np.dtype(model.dtype))
    return flax.traverse_util.unflatten_dict(params, sep="."), checkpoint.cfg.replace(model=model)


def save_hf(params: Mapping[str, Any], cfg: GenerationConfig, path, *, overwrite: bool = False) -> None:
    """Write parameters, nested as `load_hf` returns them, and `cfg` to a directory that transformers loads.

    `cfg.model` describes the model; its `dtype` matters for quantised parameters only, others keep their own. The
    directory appears complete or not at all. `overwrite` replaces an existing checkpoint and keeps its
    tokenizer files; everything else in it is deleted. Parameters on an accelerator are copied to the host one shard
    at a time: 5 GB at most, or one larger tensor. Quantised parameters are written to model.int8.safetensors, which
    `load_hf` reads and transformers does not. Parameters that are divided over a mesh are not collected: each
    process writes its own parts, into a directory that all processes can see.

    Raises:
        CheckpointError: all problems of the parameters, or `path` exists and may not be replaced.
    """
    model = model_of(cfg)
    arrays = check_params(params, model)
    _check_values(arrays)
    generation = cfg.to_hf()
    stored = arrays[_EMBEDDING].dtype.name
    config = dataclasses.replace(model, dtype=model.dtype if stored == "int8" else stored).to_hf()
    config |= {key: generation[key] for key in ("bos_token_id", "eos_token_id") if key in generation}
    target = Path(path)
    if any(isinstance(array, jax.Array) and len(array.sharding.device_set) > 1 for array in arrays.values()):
        with shared_directory(target, overwrite=overwrite) as directory:
            if jax.process_index() == 0:
                copy_tokenizer(target, directory)
                write_configs(directory, config, generation)
            write_parts(directory, {name: arrays[name] for name in in_order(arrays)})
        return
    with new_directory(target, overwrite=overwrite) as directory:
        copy_tokenizer(target, directory)
        write_arrays(directory, config, generation, arrays)


def check_params(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return the arrays of nested parameters by dotted name, "model.norm.weight" and so on.

    Raises:
        CheckpointError: all of their problems.
    """
    arrays, problems = _flatten(separate(params, model))
    weights, faults = split_scales(arrays)
    problems += [f"params: {fault}" for fault in faults]
    problems += _mismatch({name: array.shape for name, array in weights.items()}, model, "params")
    problems += [
        f"params: {name} has dtype {array.dtype}, which must be one of {_ALLOWED}"
        for name, array in weights.items()
        if array.dtype not in STORED.values()
    ]
    if problems:
        raise CheckpointError(problems)
    return arrays


def _check_values(arrays: Mapping[str, Any]) -> None:
    """Raise an error for arrays whose values cannot be read."""
    if any(map(is_tracer, arrays.values())):
        raise CheckpointError(["params are traced: call save_hf outside of jax.jit"])
    deleted = [name for name, array in arrays.items() if isinstance(array, jax.Array) and array.is_deleted()]
    if deleted:
        reason = "being donated to a compiled function: use the function's result"
        raise CheckpointError([f"params: {name} was deleted, {reason}" for name in deleted])


def open_checkpoint(path) -> Checkpoint:
    """Read and check everything in a checkpoint except the values of its weights.

    Raises:
        CheckpointError: all problems, each with its file and key.
    """
    path = checkpoint_directory(path)
    tensors, listed, problems = find_tensors(path)
    config, faults = read_json(path / "config.json", _LARGEST_CONFIG)
    problems += faults
    if config is None and not faults:
        problems.append(f"{path / 'config.json'} is missing: copy it from the source of the checkpoint")
    generation, faults = read_json(path / "generation_config.json", _LARGEST_CONFIG)
    problems += faults
    model = cfg = None
    if config is not None:
        model, cfg, faults = _configs(path, config, generation)
        problems += faults
    if model is not None:
        tensors, faults = _parameters(path, tensors, listed, model)
        problems += faults
    if problems or config is None or cfg is None:
        raise CheckpointError([*problems, *fetch_again(path, problems)])
    return Checkpoint(path, config, generation, cfg, tensors)


def float_dtype(dtype: Any) -> np.dtype | None:
    """Return the dtype for a name or anything else that numpy accepts as a dtype; None stays None.

    Raises:
        ConfigError: not one of float32, bfloat16 and float16.
        TypeError: not a dtype.
    """
    if dtype is None:
        return None
    try:
        result = np.dtype(dtype)
    except TypeError as error:
        if isinstance(dtype, str):
            raise ConfigError(f"dtype {dtype!r} is not one of {_ALLOWED}") from error
        raise TypeError(f"dtype must be one of {_ALLOWED}, got {dtype!r}") from error
    if result not in DTYPES.values():
        raise ConfigError(f"dtype {str(result)!r} is not one of {_ALLOWED}")
    return result


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    sizes: Mapping[str, int],
    read: Callable[[str], np.ndarray],
    max_shard: int | None = None,
) -> None:
    """Write both configs and the tensors, as `write_tensors` does, into an empty directory."""
    write_configs(directory, config, generation)
    write_tensors(directory, sizes, read, max_shard)


def write_configs(directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> None:
    """Write config.json, and generation_config.json if there is one."""
    write_json(directory / "config.json", config)
    if generation is not None:
        write_json(directory / "generation_config.json", generation)


def write_arrays(
    directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None, arrays: Mapping[str, Any]
) -> None:
    """Write both configs and arrays by dotted name, as `check_params` returns them, into an empty directory."""
    sizes = {name: arrays[name].nbytes for name in in_order(arrays)}
    write_checkpoint(directory, config, generation, sizes, lambda name: _to_host(arrays[name]))


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy those of `TOKENIZER_FILES` that exist."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _configs(
    path: Path, config: dict[str, Any], generation: dict[str, Any] | None
) -> tuple[ModelConfig | None, GenerationConfig | None, list[str]]:
    """Return both configs, None for one that cannot be used, and the problems."""
    problems: list[str] = []
    model = cfg = None
    try:
        model = ModelConfig.from_hf(config)
    except (JaxgenError, TypeError) as error:
        problems.append(f"{path / 'config.json'}: {error}")
    source = "generation_config.json"
    if generation is None:
        source = "config.json"
        names = {field.name for field in dataclasses.fields(GenerationConfig)} - {"model", "use_cache"}
        generation = {name: value for name, value in config.items() if name in names}
    try:
        cfg = GenerationConfig.from_hf(generation, model=model)
    except (JaxgenError, TypeError) as error:
        problems.append(f"{path / source}: {error}")
    return model, cfg, problems


def _parameters(
    path: Path, tensors: dict[str, Tensor], listed: set[str] | None, model: ModelConfig
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors that are the model's parameters, in order, and their problems."""
    tensors = {name: tensors[name] for name in in_order(tensors) if not CONSTANTS.fullmatch(name)}
    problems = [
        f"{tensor.file}: {name} has dtype {tensor.dtype}, which must be one of {', '.join(STORED)}"
        for name, tensor in tensors.items()
        if tensor.dtype not in STORED
    ]
    head, embedding = tensors.get(_HEAD), tensors.get(_EMBEDDING)
    if model.tie_word_embeddings and head and embedding and not problems:
        del tensors[_HEAD]
        if not same_bits(head.read(), embedding.read()):
            problems.append(
                f"{head.file}: {_HEAD} differs from {_EMBEDDING}, though tie_word_embeddings is true in "
                "config.json: set it to false to keep both, or remove the tensor"
            )
    stored = sum(math.prod(tensor.shape) for tensor in tensors.values())
    described = _parameter_count(model)
    if described > 2 * stored + _SPARE:  # tracing the model would take as much memory as it describes
        fault = f"describes {shown(described)} parameters, but the files that can be read have {stored}"
        return tensors, [*problems, f"{path / 'config.json'}: {fault}"]
    weights, faults = split_scales(tensors)
    problems += [f"{path}: {fault}" for fault in faults]
    where = {name: tensor.file for name, tensor in weights.items()}
    problems += _mismatch({name: tensor.shape for name, tensor in weights.items()}, model, path, where, listed)
    return tensors, problems


def _parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters in matrices, computed without tracing the model."""
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    layer = model.hidden_size * (3 * model.intermediate_size + heads * model.head_dim)
    tables = 1 if model.tie_word_embeddings else 2
    return tables * model.vocab_size * model.hidden_size + model.num_hidden_layers * layer


def _mismatch(
    shapes: Mapping[str, tuple[int, ...]],
    model: ModelConfig,
    source: Any,
    where: Mapping[str, Any] | None = None,
    listed: Collection[str] | None = (),
) -> list[str]:
    """List tensors that are missing, unexpected or of a wrong shape.

    Messages name `source` for a missing tensor and `where[name]` for others. `listed`: names that are known to exist
    even if their file is damaged, and so are not missing; None if even the names are unknown, and then nothing is
    reported missing.
    """
    expected = param_shapes(model)
    problems = []
    if listed is not None:
        missing = in_order(set(expected) - set(shapes) - set(listed))
        problems += [f"{source}: {name} {list(expected[name])} is missing" for name in missing]
    for name, shape in shapes.items():
        file = source if where is None else where[name]
        if name not in expected:
            problems.append(f"{file}: {name} {list(shape)} is unexpected: the config has no such parameter")
        elif tuple(shape) != tuple(expected[name]):
            problems.append(f"{file}: {name} has shape {list(shape)}, the config needs {list(expected[name])}")
    return problems


def _flatten(params: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the arrays of nested dicts by dotted name, and the problems of the rest.

    Raises:
        CheckpointError: the whole tree is of another kind.
    """
    arrays: dict[str, Any] = {}
    problems, attached = [], []

    def walk(node: Any) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            if not isinstance(key, str) or "." in key:
                problems.append(f"params: the key {key!r} must be one part of a name, such as 'layers' or '0'")
            elif isinstance(value, Mapping):
                yield from ((f"{key}.{name}", leaf) for name, leaf in walk(value))
            else:
                yield key, value

    if not isinstance(params, Mapping):
        raise TypeError(f"params must be a nested dict of arrays, got {type(params).__name__}")
    if set(params) == {"params"}:
        raise CheckpointError(["params: these are the model's variables: pass their entry, variables['params']"])
    for name, value in walk(params):
        if isinstance(value, np.ndarray | jax.Array):
            arrays[name] = value
        elif isinstance(value, Int8):
            arrays |= {name: value.values, scale_name(name): value.scales}
        elif isinstance(value, LowRank):
            attached.append(name)
        else:
            problems.append(f"params: {name} must be an array, got {type(value).__name__}")
    if attached:
        where = attached[0] + (" and others" if len(attached) > 1 else "")
        fault = f"params: {where}: low-rank updates are attached, which a checkpoint cannot store"
        raise CheckpointError([f"{fault}: call lora.merge first, on the parameters without them, and save its result"])
    return arrays, problems


def _to_host(array: Any) -> np.ndarray:
    """Return an array's values without leaving a copy of them on the host.

    A jax array on an accelerator caches its numpy copy for as long as it lives. So a temporary copy of the array is
    converted instead.
    """
    if isinstance(array, jax.Array) and any(device.platform != "cpu" for device in array.devices()):
        array = jax.device_put(array, array.sharding, may_alias=False)
    return np.asarray(array)
