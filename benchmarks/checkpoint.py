"""Write a checkpoint of random bfloat16 weights with exactly the shapes that a config.json describes.

Speed and memory use depend only on shapes, so such a checkpoint can replace a real one that is not available.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

from convert.atomic_directory import new_directory
from convert.errors import CheckpointError
from convert.experts import names_in_files
from convert.hf import copy_tokenizer, write_checkpoint
from convert.shards import in_order, read_json
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.model.config import ModelConfig

_CHUNK = 1 << 20  # elements that one thread draws at once


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks checkpoint", usage="%(prog)s CONFIG OUT [options]", description=__doc__
    )
    parser.add_argument("config", type=Path, help="a directory with a config.json")
    parser.add_argument("out", type=Path, help="the directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--shards", type=int, default=1, help="split into files of 1/N of the size: N files or a few more", metavar="N"
    )
    parser.add_argument("--tokenizer", type=Path, help="a directory with tokenizer files, instead of CONFIG's")
    args = parser.parse_args()

    config, problems = read_json(args.config / "config.json")
    if config is None:
        parser.error("; ".join(problems) or f"{args.config} has no config.json")
    generation, _ = read_json(args.config / "generation_config.json")
    shapes = _shapes_in_files(ModelConfig.from_hf(config))
    names = in_order(shapes)
    sizes = {name: math.prod(shapes[name]) * 2 for name in names}
    if not 1 <= args.shards <= len(names):
        parser.error(f"--shards must be between 1 and the number of tensors, {len(names)}")
    max_shard = math.ceil(sum(sizes.values()) / args.shards)
    std = config.get("initializer_range", 0.02)
    seeds = {name: (args.seed, number) for number, name in enumerate(names)}
    config |= {"dtype" if "dtype" in config else "torch_dtype": "bfloat16"}

    def read(name: str) -> np.ndarray:
        return draw(name, shapes[name], std, seeds[name])

    try:
        with new_directory(args.out) as directory:
            for source in filter(None, (args.config, args.tokenizer)):
                copy_tokenizer(source, directory)
            write_checkpoint(directory, config, generation, sizes, read, max_shard)
    except CheckpointError as error:
        parser.error(str(error))


def _shapes_in_files(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors, in which each expert has its own matrices."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in param_shapes(model).items():
        names = names_in_files(name, model)
        shapes |= dict.fromkeys(names, shape[1:] if len(shape) == 3 else shape)
    return shapes


def draw(name: str, shape: tuple[int, ...], std: float, seed: tuple[int, int]) -> np.ndarray:
    """Return random values: around one for norms, around zero for everything else, including biases."""
    center, std = (1.0, 0.1) if "norm" in name else (0.0, std)
    flat = np.empty(math.prod(shape), ml_dtypes.bfloat16)

    def fill(start: int) -> None:
        part = flat[start : start + _CHUNK]
        part[:] = center + std * np.random.default_rng((*seed, start)).standard_normal(part.size, np.float32)

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, range(0, flat.size, _CHUNK)))
    return flat.reshape(shape)


if __name__ == "__main__":
    main()
