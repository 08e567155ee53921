"""Write a checkpoint of random bfloat16 weights in exactly the shape that a config.json describes.

Speed and memory depend on shapes alone: such a checkpoint stands for the real one where that is not at hand.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from convert.atomic_directory import new_directory
from convert.hf import copy_tokenizer
from convert.safetensors import CheckpointError, write_file
from convert.shards import INDEX, SINGLE, Layout, in_order, read_json, write_json
from jaxgen.model.causal_lm import param_shapes
from jaxgen.model.config import ModelConfig

_CHUNK = 1 << 20  # elements drawn at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="a directory with config.json")
    parser.add_argument("out", type=Path, help="the directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1, help="files to spread the tensors over")
    parser.add_argument("--tokenizer", type=Path, help="a directory with tokenizer files, before those of CONFIG")
    args = parser.parse_args()

    config, problems = read_json(args.config / "config.json")
    if config is None:
        parser.error("; ".join(problems) or f"{args.config} has no config.json")
    generation, _ = read_json(args.config / "generation_config.json")
    shapes = param_shapes(ModelConfig.from_hf(config))
    layout = {name: (np.dtype(ml_dtypes.bfloat16), shapes[name]) for name in in_order(shapes)}
    if not 1 <= args.shards <= len(layout):
        parser.error(f"--shards must be between 1 and the number of tensors, {len(layout)}")
    std = config.get("initializer_range", 0.02)
    seeds = {name: (args.seed, number) for number, name in enumerate(layout)}

    try:
        with new_directory(args.out) as directory:
            write_json(directory / "config.json", config | {_dtype_key(config): "bfloat16"})
            if generation is not None:
                write_json(directory / "generation_config.json", generation)
            for source in filter(None, (args.config, args.tokenizer)):
                copy_tokenizer(source, directory)
            _write(directory, layout, args.shards, lambda name: draw(name, shapes[name], std, seeds[name]))
    except CheckpointError as error:
        parser.error(str(error))


def draw(name: str, shape: tuple[int, ...], std: float, seed: tuple[int, int]) -> np.ndarray:
    """Return random values: norms around one, everything else, biases too, around zero."""
    rng = np.random.default_rng(seed)
    center, std = (1.0, 0.1) if "norm" in name else (0.0, std)
    flat = np.empty(math.prod(shape), ml_dtypes.bfloat16)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        part[:] = center + std * rng.standard_normal(part.size, np.float32)
    return flat.reshape(shape)


def _dtype_key(config: dict) -> str:
    return "dtype" if "dtype" in config else "torch_dtype"


def _write(directory: Path, layout: Layout, shards: int, read) -> None:
    if shards == 1:
        write_file(directory / SINGLE, layout, read)
        return
    weight_map = {}
    for number, names in enumerate(_split(layout, shards), 1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        write_file(directory / file, {name: layout[name] for name in names}, read)
        weight_map |= dict.fromkeys(names, file)
    size = sum(_nbytes(layout, name) for name in layout)
    write_json(
        directory / INDEX,
        {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _split(layout: Layout, shards: int) -> list[list[str]]:
    """Cut the tensors, in their order, into `shards` runs of about the same size, none of them empty."""
    names = list(layout)
    total = sum(_nbytes(layout, name) for name in names)
    runs: list[list[str]] = [[]]
    size = 0
    for index, name in enumerate(names):
        left = shards - len(runs)
        if runs[-1] and left and (size >= total * len(runs) / shards or len(names) - index <= left):
            runs.append([])
        runs[-1].append(name)
        size += _nbytes(layout, name)
    return runs


def _nbytes(layout: Layout, name: str) -> int:
    dtype, shape = layout[name]
    return dtype.itemsize * math.prod(shape)


if __name__ == "__main__":
    main()
