"""The distributions that transformers 4.41.1 samples from, and the tokens that each warper keeps in random rows."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import torch
from options_441 import MARGIN, hf_arguments, prepared_lists, process
from oracle import Oracle, write_lines
from processors_441 import boundary_distance, draw_scores, probabilities
from transformers.generation import logits_process as hf

VOCAB = 41
ROW = [3, 17, 8, 3, 30, 17]  # the tokens so far; the first PROMPT of them are the prompt
PROMPT = 4
BIASES = {"sequence_bias": [[[5], 2.0], [[17, 9], 3.0], [[30, 17, 3], -2.5], [[3, 12], 6.0]]}
# top_h was added in a later release. 4.41.1 ignores it, and returns the scores before top_h.
SETTINGS: list[dict] = [
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"typical_p": 0.7},
    {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.05},
    {"top_h": 0.6},
    {"repetition_penalty": 1.5},
    BIASES,
    {"temperature": 1.8},
    {"temperature": 1.5, "top_k": 25},
    {"temperature": 1.4, "top_p": 0.95},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.3, "typical_p": 0.9},
    {"temperature": 1.5, "epsilon_cutoff": 0.01},
    {"temperature": 1.5, "eta_cutoff": 0.02},
    {"temperature": 1.6, "top_h": 0.85},
    {"repetition_penalty": 1.2, "temperature": 0.9, "top_k": 20, "top_p": 0.9},
    BIASES | {"repetition_penalty": 0.8, "no_repeat_ngram_size": 2, "min_p": 0.01, "typical_p": 0.95},
]
# These settings are for the logits of a real checkpoint, after prompts of the lengths in LENGTHS.
OF_THE_MODEL: list[dict] = [
    {"temperature": 1.3, "top_k": 40, "top_p": 0.95},
    {"repetition_penalty": 1.6, "temperature": 1.5, "min_p": 0.01},
    {"temperature": 1.2, "typical_p": 0.9, "eta_cutoff": 0.003, "renormalize_logits": True},
]
LENGTHS = (6, 2)

WIDTHS = (32, 64)  # vocabulary sizes of the rows
WARPERS: dict[str, tuple[type, Callable[[np.random.Generator, int], float]]] = {
    "top_k": (hf.TopKLogitsWarper, lambda rng, vocab: int(rng.integers(1, vocab + 3))),
    "top_p": (hf.TopPLogitsWarper, lambda rng, vocab: rng.uniform(0.02, 0.995)),
    "min_p": (hf.MinPLogitsWarper, lambda rng, vocab: np.exp(rng.uniform(-7, -0.1))),
    "typical_p": (hf.TypicalLogitsWarper, lambda rng, vocab: rng.uniform(0.02, 0.99)),
    "epsilon_cutoff": (hf.EpsilonLogitsWarper, lambda rng, vocab: np.exp(rng.uniform(-7, -0.5))),
    "eta_cutoff": (hf.EtaLogitsWarper, lambda rng, vocab: np.exp(rng.uniform(-7, -0.5))),
}


def processed(
    oracle: Oracle, options: dict, prompt: list[int], ids: list[int], logits: np.ndarray
) -> np.ndarray | None:
    """Return the scores [V], or None if they are not spread out or a warper comes close to its boundary."""
    arguments = hf_arguments({"options": {"top_k": 0} | options}, 0, len(logits)) | {"do_sample": True}
    lists = prepared_lists(oracle.model, arguments, torch.tensor([prompt]))
    scores, distance, _ = process(lists, ids, logits, logits)
    share = probabilities(scores)
    return scores if distance >= MARGIN and share.max() < 0.8 and np.sum(share > 1e-3) >= 4 else None


def distribution(oracle: Oracle, options: dict, rng: np.random.Generator) -> dict:
    """Draw logits for a setting, and return the scores that 4.41.1 computes from them."""
    scores = None
    while scores is None:
        logits = (rng.standard_normal(VOCAB) * 1.5).astype(np.float32)
        scores = processed(oracle, options, ROW[:PROMPT], ROW, logits)
    return {"options": options, "ids": ROW, "prompt_length": PROMPT} | listed(logits=logits, scores=scores)


def first_step(oracle: Oracle, checkpoint: str, options: dict, rng: np.random.Generator) -> dict:
    """Draw prompts for a setting, and return the scores of their first new tokens."""
    prompts, scores = [], []
    for length in LENGTHS:
        of_prompt = None
        while of_prompt is None:
            prompt = rng.integers(0, oracle.vocab, size=length)
            logits = oracle.forward(prompt[None]).logits[0, -1].numpy()
            of_prompt = processed(oracle, options, prompt.tolist(), prompt.tolist(), logits)
        prompts.append(prompt.tolist())
        scores.append(of_prompt)
    return {"options": options, "checkpoint": checkpoint, "prompts": prompts} | listed(scores=np.stack(scores))


def listed(**arrays: np.ndarray) -> dict:
    """Return float32 arrays as lists, each number with as few digits as possible."""
    return {name: [[float(str(x)) for x in row] for row in np.atleast_2d(array)] for name, array in arrays.items()}


def kept(rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw rows of scores, many with ties, and return which tokens each warper keeps."""
    scores = np.full((rows, max(WIDTHS)), -np.inf, np.float32)
    vocab = rng.choice(WIDTHS, size=rows)
    arrays = {"vocab": vocab.astype(np.int16), "scores": scores}
    for row, size in enumerate(vocab):
        scores[row, :size] = draw_scores(size, rng)
    for name, (kind, draw) in WARPERS.items():
        values, survivors = np.zeros(rows, np.float32), np.zeros(scores.shape, bool)
        near = np.zeros(rows, bool)
        for row, size in enumerate(vocab):
            value = draw(rng, size)
            values[row] = value
            warper = kind(value if isinstance(value, int) else float(values[row]))
            given = scores[row, :size]
            survivors[row, :size] = torch.isfinite(warper(None, torch.from_numpy(given.copy())[None]))[0].numpy()
            near[row] = boundary_distance(warper, given) < 1e-5
        arrays |= {f"{name}_value": values, f"{name}_kept": np.packbits(survivors, axis=-1), f"{name}_near": near}
    return arrays


def write_statistics(
    oracles: dict[str, Oracle], checkpoint: str, out: pathlib.Path, rows: int, seed: list[int]
) -> None:
    """Write the settings with their scores, and `rows` rows with the tokens that are kept."""
    oracle, rng = oracles[checkpoint], np.random.default_rng(seed)
    settings = [distribution(oracle, options, rng) for options in SETTINGS]
    settings += [first_step(oracle, checkpoint, options, rng) for options in OF_THE_MODEL]
    write_lines(out / "statistics.json", settings)
    np.savez_compressed(out / "kept.npz", **kept(rows, rng))
