"""Open a GGUF file as a checkpoint."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoint import Checkpoint
from convert.errors import CheckpointError
from convert.gguf import config as metadata
from convert.gguf.architectures import Architecture, architecture_of
from convert.gguf.weights import name_of, plain, weight_of
from convert.published import read_configs
from convert.tensors import DTYPES
from jaxgen.core.model.config import ModelConfig
from jaxgen.errors import ConfigError, JaxgenError, one_line, shown, warn
from jaxgen.gguf.container import GgufFile, read_gguf
from jaxgen.json_file import fetch_again

_PACKED_DTYPE = "bfloat16"  # of the activations of a model whose embedding is packed
_SPARE = 1 << 24  # metadata may describe up to twice as many parameters as the file contains, plus this many
_LONGEST_FACTORS = 4096  # numbers in a tensor with settings of RoPE


def open_gguf(path: Path) -> Checkpoint:
    """Return the checkpoint in a GGUF file. One warning names all metadata that is ignored.

    The names and shapes of the weights have not been compared with those of the model.

    Raises:
        CheckpointError: the file cannot be used; the message lists the problems.
    """
    try:
        file = read_gguf(path)
        _, architecture = architecture_of(file)
        config, notes = metadata.config_of(file, functools.partial(_factors, file))
    except JaxgenError as error:
        problems = [str(error)]
        raise CheckpointError([*problems, *fetch_again(path.parent, problems)]) from error
    embedding = file.tensors[metadata.EMBEDDING].type
    config["torch_dtype"] = DTYPES[embedding].name if embedding in DTYPES else _PACKED_DTYPE
    model, cfg, problems, ignored = read_configs(path, config, None, source=path)
    if model is None or cfg is None or problems:
        raise CheckpointError(problems)
    stored = sum(math.prod(entry.shape) for entry in file.tensors.values())
    if model.matrix_parameters > 2 * stored + _SPARE:  # tracing a model of this size could run out of memory
        fault = f"describes {shown(model.matrix_parameters)} parameters, but the file has {stored}"
        raise CheckpointError([f"{path}: the metadata {fault}"])
    weights = _weights(file, architecture, model)
    if notes := [*notes, *ignored]:
        warn(one_line(f"{path}: {'; '.join(notes)}"))
    return Checkpoint(path, config, None, cfg, weights)


def _factors(file: GgufFile, name: str) -> np.ndarray:
    """Return the numbers in a tensor that holds settings of RoPE."""
    entry = file.tensors[name]
    if entry.type not in DTYPES or len(entry.shape) != 1 or entry.shape[0] > _LONGEST_FACTORS:
        raise ConfigError(f"{file.path}: {name} must have one axis of floats, is {entry.type}{list(entry.shape)}")
    values = plain(entry).read(np.dtype(np.float32))
    if not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise ConfigError(f"{file.path}: {name} must have positive numbers")
    return values


def _weights(file: GgufFile, architecture: Architecture, model: ModelConfig) -> dict[str, Any]:
    """Return the weights by name; tensors that are not parameters keep their names in the file."""
    weights: dict[str, Any] = {}
    for entry in file.tensors.values():
        if entry.name in (metadata.FREQUENCIES, metadata.LONG, metadata.SHORT):
            continue
        name = name_of(entry.name, architecture)
        weights[name or entry.name] = plain(entry) if name is None else weight_of(entry, name, architecture, model)
    return weights
