"""Hugging Face checkpoint directories: config.json, generation_config.json and *.safetensors."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.atomic_directory import new_directory
from convert.safetensors import DTYPES, CheckpointError, Tensor
from convert.shards import (
    CONSTANTS,
    Layout,
    checkpoint_directory,
    find_tensors,
    in_order,
    read_json,
    write_json,
    write_tensors,
)
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.errors import ConfigError, JaxgenError, NotBuiltYetError
from jaxgen.model.causal_lm import param_shapes
from jaxgen.model.config import ModelConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A directory found to be sound, its weights still on the disk.

    `config` and `generation` hold the two JSON files (`generation` is None where there is none), `tensors`
    the model's parameters by name.
    """

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any] | None
    cfg: GenerationConfig
    tensors: dict[str, Tensor]

    def dtype(self, name: str, wanted: np.dtype | None) -> np.dtype:
        """Return the dtype in which to give a tensor: the wanted one, else that of the file."""
        return DTYPES[self.tensors[name].dtype] if wanted is None else wanted


def load_hf(path, *, dtype=None, quantize=None, mesh=None) -> tuple[dict[str, Any], GenerationConfig]:
    """Read the parameters and the generation config of a Hugging Face directory.

    Parameters are nested dicts, their keys the parts of the names in the checkpoint, matrices `[out, in]`:
    `params["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"]`. A tied model has no `lm_head`. Host
    memory holds one tensor at a time on its way to the device.

    `dtype`: float32, bfloat16 or float16, as a name or a dtype; None keeps that of each tensor. The result's
    `cfg.model.dtype` is that of the embedding. Without a generation_config.json the generation fields of
    config.json count, as in HF's `GenerationConfig.from_model_config`, but for `use_cache`, which changes no
    token.

    Raises:
        CheckpointError: all that is wrong with the checkpoint.
        NotBuiltYetError: `quantize` or `mesh`.
    """
    for option, value in (("quantize", quantize), ("mesh", mesh)):
        if value is not None:
            raise NotBuiltYetError(f"load_hf: {option}={value!r} is not built yet: leave it out")
    wanted = float_dtype(dtype)
    checkpoint = open_checkpoint(path)
    arrays: dict[str, jax.Array] = {}
    problems: list[str] = []
    # The largest first: where the device is not the host, both hold a tensor for a moment.
    for name, tensor in sorted(checkpoint.tensors.items(), key=lambda item: -item[1].nbytes):
        try:
            arrays[name] = jax.device_put(tensor.read(checkpoint.dtype(name, wanted))).block_until_ready()
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError(problems)
    params: dict[str, Any] = {}
    for name in checkpoint.tensors:
        *parents, leaf = name.split(".")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = arrays[name]
    model = dataclasses.replace(model_config(checkpoint.cfg), dtype=checkpoint.dtype(_EMBEDDING, wanted).name)
    return params, checkpoint.cfg.replace(model=model)


def save_hf(params: Mapping[str, Any], cfg: GenerationConfig, path, *, overwrite: bool = False) -> None:
    """Write parameters, nested as `load_hf` returns them, and `cfg` to a directory that transformers loads.

    `cfg.model` describes the model; its `dtype` does not matter, as arrays are written in theirs. The
    directory appears complete or not at all. `overwrite` replaces an existing checkpoint and keeps its
    tokenizer files; whatever else it holds is deleted.

    Raises:
        CheckpointError: all that is wrong with the parameters, or `path` is in use.
    """
    model = model_config(cfg)
    arrays = check_params(params, model)
    generation = cfg.to_hf()
    config = dataclasses.replace(model, dtype=arrays[_EMBEDDING].dtype.name).to_hf()
    config |= {key: generation[key] for key in ("bos_token_id", "eos_token_id") if key in generation}
    layout = {name: (arrays[name].dtype, arrays[name].shape) for name in in_order(arrays)}
    target = Path(path)
    with new_directory(target, overwrite=overwrite) as directory:
        copy_tokenizer(target, directory)
        write_checkpoint(directory, config, generation, layout, lambda name: _to_host(arrays[name]))


def check_params(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return the arrays of nested parameters by dotted name, "model.norm.weight" and so on.

    Raises:
        CheckpointError: all that is wrong with them.
    """
    arrays, problems = _flatten(params)
    problems += _mismatch({name: array.shape for name, array in arrays.items()}, model, "params")
    problems += [
        f"params: {name} has dtype {array.dtype}, which must be one of {_allowed()}"
        for name, array in arrays.items()
        if array.dtype not in DTYPES.values()
    ]
    if problems:
        raise CheckpointError(problems)
    return arrays


def model_config(cfg: GenerationConfig) -> ModelConfig:
    """Return the model's config.

    Raises:
        ConfigError: there is none.
        TypeError: `cfg` is something else.
    """
    if not isinstance(cfg, GenerationConfig):
        raise TypeError(f"cfg must be a GenerationConfig, got {type(cfg).__name__}")
    if cfg.model is None:
        raise ConfigError("cfg.model is None: give the ModelConfig, cfg.replace(model=...)")
    return cfg.model


def open_checkpoint(path) -> Checkpoint:
    """Read and check everything about a checkpoint but its weights' values.

    Raises:
        CheckpointError: all that is wrong, each with file and key.
    """
    path = checkpoint_directory(path)
    tensors, listed, problems = find_tensors(path)
    config, faults = read_json(path / "config.json")
    problems += faults
    if config is None and not faults:
        problems.append(f"{path / 'config.json'} is missing: copy it from where the checkpoint comes from")
    generation, faults = read_json(path / "generation_config.json")
    problems += faults
    model = cfg = None
    if config is not None:
        model, cfg, faults = _configs(path, config, generation)
        problems += faults
    if model is not None:
        tensors, faults = _parameters(path, tensors, listed, model)
        problems += faults
    if problems or config is None or cfg is None:
        raise CheckpointError(problems)
    return Checkpoint(path, config, generation, cfg, tensors)


def float_dtype(dtype: Any) -> np.dtype | None:
    """Return the dtype for a name or anything that numpy takes for a dtype; None stays None.

    Raises:
        ConfigError: not one of float32, bfloat16 and float16.
        TypeError: no dtype at all.
    """
    if dtype is None:
        return None
    try:
        result = np.dtype(dtype)
    except TypeError as error:
        if isinstance(dtype, str):
            raise ConfigError(f"dtype {dtype!r} is not one of {_allowed()}") from error
        raise TypeError(f"dtype must be one of {_allowed()}, got {dtype!r}") from error
    if result not in DTYPES.values():
        raise ConfigError(f"dtype {str(result)!r} is not one of {_allowed()}")
    return result


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    layout: Layout,
    read: Callable[[str], np.ndarray],
) -> None:
    """Write both configs and the tensors, which `read` returns by name, into an empty directory."""
    write_json(directory / "config.json", config)
    if generation is not None:
        write_json(directory / "generation_config.json", generation)
    write_tensors(directory, layout, read)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the tokenizer's files, those that there are."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _configs(
    path: Path, config: dict[str, Any], generation: dict[str, Any] | None
) -> tuple[ModelConfig | None, GenerationConfig | None, list[str]]:
    """Return both configs, None for one that cannot be honoured, and why."""
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
    """Return the tensors that are the model's parameters, in order, and what is wrong with them."""
    tensors = {name: tensors[name] for name in in_order(tensors) if not CONSTANTS.fullmatch(name)}
    problems = [
        f"{tensor.file}: {name} has dtype {tensor.dtype}, which must be one of {', '.join(DTYPES)}"
        for name, tensor in tensors.items()
        if tensor.dtype not in DTYPES
    ]
    head, embedding = tensors.get(_HEAD), tensors.get(_EMBEDDING)
    if model.tie_word_embeddings and head and embedding and not problems:
        del tensors[_HEAD]
        if not _same(head, embedding):
            problems.append(
                f"{head.file}: {_HEAD} differs from {_EMBEDDING}, though tie_word_embeddings is true in "
                "config.json: set it to false to keep both, or remove the tensor"
            )
    where = {name: tensor.file for name, tensor in tensors.items()}
    problems += _mismatch({name: tensor.shape for name, tensor in tensors.items()}, model, path, where, listed)
    return tensors, problems


def _mismatch(
    shapes: Mapping[str, tuple[int, ...]],
    model: ModelConfig,
    source: Any,
    where: Mapping[str, Any] | None = None,
    listed: Collection[str] | None = (),
) -> list[str]:
    """List what is missing, unexpected or misshapen.

    `source` is named for what is missing, `where` has the file of each tensor, `listed` names that are there,
    though perhaps unreadable; None where nobody can tell, and then nothing counts as missing.
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
    """Return the arrays of nested dicts by dotted name, and what else was found."""
    arrays: dict[str, Any] = {}
    problems = []

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
        return {}, ["params: the model's variables were given: give their entry, variables['params']"]
    for name, value in walk(params):
        if isinstance(value, np.ndarray | jax.Array):
            arrays[name] = value
        else:
            problems.append(f"params: {name} must be an array, got {type(value).__name__}")
    return arrays, problems


def _to_host(array: Any) -> np.ndarray:
    """Return an array's values without leaving a copy of them on the host.

    A jax array on an accelerator keeps the numpy array that it was once turned into for as long as it lives;
    the copy made here does not live long.
    """
    if isinstance(array, jax.Array) and any(device.platform != "cpu" for device in array.devices()):
        array = jax.device_put(array, array.sharding, may_alias=False)
    return np.asarray(array)


def _same(left: Tensor, right: Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and all(
        np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(left.chunks(), right.chunks(), strict=True)
    )


def _allowed() -> str:
    return ", ".join(dtype.name for dtype in DTYPES.values())
