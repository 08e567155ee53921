"""Tokens that the warpers of transformers 4.41.1 keep, for option values right up to their bounds."""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from transformers.generation import logits_process as hf

VOCABULARIES = (7, 1024, 151_936)
WARPERS = {
    "top_k": hf.TopKLogitsWarper,
    "top_p": hf.TopPLogitsWarper,
    "min_p": hf.MinPLogitsWarper,
    "typical_p": hf.TypicalLogitsWarper,
    "epsilon_cutoff": hf.EpsilonLogitsWarper,
    "eta_cutoff": hf.EtaLogitsWarper,
}
SMALL = [np.nextafter(np.float32(0), np.float32(1)), np.finfo(np.float32).tiny, 1e-30, 1e-10, 1e-6, 1e-3]
LARGE = [0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999, 0.9999999, np.nextafter(np.float32(1), np.float32(0))]
NUMBERS = np.array([*SMALL, *LARGE], np.float32)  # from the smallest float32 above 0 to the largest below 1


def draw_rows(vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ten kinds of rows, float32[10, V]. They are sorted and have few digits, so that the file is small."""
    normal = np.round(rng.standard_normal((7, vocab)) * 64) / 64
    flat, peaked, steep = np.full(vocab, 1.25), normal[0] * 8, normal[1] * 64
    tied, far = np.round(normal[2]), normal[3] * 4 + 2000
    alone, half, single = np.full(vocab, -np.inf), normal[4].copy(), normal[5].copy()
    alone[0], half[: vocab // 2], single[0] = -7.0, -np.inf, 80.0
    two = np.where(np.arange(vocab) % 3 == 0, 20.0, -20.0)
    rows = np.stack([flat, normal[6], peaked, steep, tied, far, alone, half, single, two])
    return np.sort(rows, axis=-1).astype(np.float32)


def write_bounds(out: pathlib.Path, seed: list[int]) -> None:
    """Write rows of scores, and the tokens that each warper keeps for each value.

    The largest vocabulary is computed in float64: torch's float32 sums over so many tokens can be off by 2e-4.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {"values": NUMBERS}
    for vocab in VOCABULARIES:
        scores = arrays[f"{vocab}_scores"] = draw_rows(vocab, rng)
        counts = arrays[f"{vocab}_counts"] = np.array([1, 2, vocab - 1, vocab, vocab + 5], np.int32)
        for name, kind in WARPERS.items():
            values = counts.tolist() if name == "top_k" else NUMBERS.tolist()
            given = torch.from_numpy(scores).to(torch.float64 if vocab > 1024 else torch.float32)
            kept = [torch.isfinite(kind(value)(None, given.clone())).numpy() for value in values]
            arrays[f"{vocab}_{name}"] = np.packbits(np.stack(kept), axis=-1)
    np.savez_compressed(out / "bounds.npz", **arrays)
