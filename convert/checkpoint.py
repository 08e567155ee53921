"""An open checkpoint directory: its configs, and its weights in files."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from convert.experts import by_file_name
from convert.packed.writing import config_of, in_files
from convert.quantized import converted, kind_in, tensors_of
from convert.tensors import DTYPES, STORED, Tensor
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.model.feed_forward import FUSED
from jaxgen.core.model.layout import parts_of
from jaxgen.core.model.quantization import kind_of
from jaxgen.core.model.weights import Packed, Quantized, map_rows

EMBEDDING = "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint directory; its weights have not been read yet.

    `config` is the content of config.json. `generation` is the content of generation_config.json, or None if this file
    is missing. `weights` maps each parameter's name to a `Tensor`, or to a `Packed` weight whose arrays are `Tensor`s.
    A tensor may be `Computed` from other tensors when it is read.
    """

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any] | None
    cfg: GenerationConfig
    weights: dict[str, Any]

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all weights, by name."""
        return tensors_of(self.weights)

    @property
    def kind(self) -> type[Packed] | None:
        """The kind of the first packed weight, or None if there are none."""
        return kind_in(self.weights)

    def dtype(self, wanted: np.dtype | None) -> np.dtype:
        """Return `wanted` or, if it is None, the embedding's dtype (from the config if the embedding is packed)."""
        embedding = self.weights[EMBEDDING]
        return wanted or (embedding.dtype if isinstance(embedding, Packed) else DTYPES[embedding.dtype])

    def dtype_of(self, name: str, wanted: np.dtype | None) -> np.dtype:
        """Return a tensor's dtype in memory: its own if `wanted` is None or the weight is packed, else `wanted`."""
        if wanted is None or not isinstance(self.weights.get(name), Tensor):
            return STORED[self.tensors[name].dtype]
        return wanted

    def sizes(self, wanted: np.dtype | None) -> dict[str, int]:
        """Return each tensor's size in bytes, after a cast to the dtype that `dtype_of` returns."""
        return {
            name: math.prod(tensor.shape) * self.dtype_of(name, wanted).itemsize
            for name, tensor in self.tensors.items()
        }

    def read(self, name: str, wanted: np.dtype | None) -> np.ndarray:
        """Return a tensor's values, cast to the dtype that `dtype_of` returns."""
        return self.tensors[name].read(self.dtype_of(name, wanted))

    def separated(self) -> Checkpoint:
        """Return a checkpoint whose fused projections are read as separate ones."""
        weights: dict[str, Any] = {}
        for name, weight in self.weights.items():
            path = name.split(".")
            if len(path) < 2 or path[-2] not in FUSED:
                weights[name] = weight
                continue
            for part, start, end in parts_of(path[-2], self.cfg.model, weight.shape[0]):
                cut = functools.partial(_rows, start=start, end=end)
                weights[".".join((*path[:-2], part, path[-1]))] = map_rows(cut, weight)
        return dataclasses.replace(self, weights=weights)

    def by_file_name(self) -> Checkpoint:
        """Return a checkpoint whose weights have their names and forms in files, and the config that describes them.

        There is a weight for each matrix of an expert.

        Raises:
            CheckpointError: there are packed weights that files cannot contain.
        """
        weights = by_file_name(self.weights, self.cfg.model)
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        return dataclasses.replace(self, config=config | config_of(weights), weights=in_files(weights))

    def quantize(self, quantize: str | type[Quantized] | None) -> Checkpoint:
        """Return a checkpoint that converts matrices to the given kind as it reads them; for None, return `self`."""
        kind = kind_of(quantize)
        if quantize is None:
            return self
        dtype = self.dtype(None)
        weights = {name: converted(name, weight, kind, dtype) for name, weight in self.weights.items()}
        return dataclasses.replace(self, weights=weights)


def _rows(tensor: Tensor, start: int, end: int) -> Tensor:
    return tensor.rows(start, end)
