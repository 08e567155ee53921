"""Make the goldens for the block formats of GGUF files, with the package gguf (see README.md).

Usage, with numpy and gguf 0.19.0 installed: python make_gguf.py --seed N --out DIR.
"""

from __future__ import annotations

import argparse
import pathlib

import gguf
import numpy as np

# The places of float16 numbers in the blocks of each type
HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "MXFP4": ()},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    arrays = {}
    for name, places in HALVES.items():
        kind = gguf.GGMLQuantizationType[name]
        count, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (max(4, 512 // count), size), np.uint8)
        for place in places:
            halves = rng.normal(size=(len(blocks), 1)).astype(np.float16)
            blocks[:, place : place + 2] = halves.view(np.uint8)
        if name == "MXFP4":  # exponents; the first represent the smallest numbers
            blocks[:, 0] = [0, 1, 2, *rng.integers(100, 150, len(blocks) - 3)]
        arrays[name] = blocks
        arrays[f"{name}_values"] = gguf.quants.dequantize(blocks, kind)
    options.out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out / "blocks.npz", **arrays)


if __name__ == "__main__":
    main()
