"""Make the goldens for DoLa, which 4.41.1 lacks, with transformers 4.45.2 (see README.md for the format).

Usage, with the packages of requirements-445.txt installed: python make_445.py --seed N --out DIR.
"""

from __future__ import annotations

import copy
import json
import warnings

import numpy as np
import torch
from oracle import Checkpoint, Oracle, shape, start, write_lines
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from transformers.generation import utils

LONGEST = 16
CHECKPOINTS = {
    "qwen2-tied": Checkpoint(
        Qwen2Config(**shape(61, 16, 16, 12, 4, 2), tie_word_embeddings=True, max_position_embeddings=64), std=0.3
    ),
    "llama": Checkpoint(LlamaConfig(**shape(53, 16, 20, 7, 2, 1), max_position_embeddings=64), std=0.3),
    "llama-small": Checkpoint(LlamaConfig(**shape(67, 16, 16, 2, 2, 2), max_position_embeddings=64), std=0.3),
}
LAYERS = {
    "qwen2-tied": ["low", "high", [0, 3, 7, 11], [9]],
    "llama": ["low", "high", [6, 1, 4], [0]],
    "llama-small": ["low", "high", [1, 0], [1]],
}
# The numbers of layers for which the meaning of "low" and "high" is recorded, with and without tied embeddings.
DEPTHS = (*range(1, 13), 24, 28, 39, 40, 41, 42, 63)


class Stop(Exception):
    """Raised to end a run once the layers are known."""


def named_layers() -> list[dict]:
    """Return the candidate layers for each depth in DEPTHS, or null where transformers fails."""
    original, named = utils._dola_select_contrast, []
    chosen: list[int] = []

    def select(layers, premature, final):
        chosen[:] = layers
        raise Stop

    utils._dola_select_contrast = select
    for depth in DEPTHS:
        for tied in (False, True):
            config = LlamaConfig(**shape(5, 4, 4, depth, 1, 1), tie_word_embeddings=tied)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            for name in ("low", "high"):
                try:
                    model.generate(torch.tensor([[1]]), max_new_tokens=1, dola_layers=name, do_sample=False)
                except Stop:
                    named.append({"depth": depth, "tied": tied, "name": name, "layers": [*chosen] or None})
    utils._dola_select_contrast = original
    return named


def draw_options(number: int, name: str, vocab: int, rng: np.random.Generator) -> dict:
    """Draw the options of a set."""
    eos = rng.choice(vocab, size=3, replace=False).tolist()
    options: dict = {
        "dola_layers": LAYERS[name][number // len(LAYERS)],
        "max_new_tokens": int(rng.integers(4, 13)),
        "repetition_penalty": round(float(rng.uniform(1.2, 1.6)), 3),
        "eos_token_id": [None, eos[0], eos][rng.integers(3)],
        "pad_token_id": 0,
    }
    if rng.random() < 0.4:
        options |= {"no_repeat_ngram_size": 2, "suppress_tokens": [int(i) for i in rng.integers(vocab, size=4)]}
    if number % 4 == 2:
        options["guidance_scale"] = round(float(rng.uniform(0.3, 2.5)), 3)
    if number % 4 == 3:  # drawn tokens are not compared, but their scores are
        options |= {"do_sample": True, "temperature": round(float(rng.uniform(0.5, 2)), 3), "top_k": 9}
    return options


def run(oracle: Oracle, case: dict, options: dict, double: bool = False) -> tuple[list[int], list[list[float]]]:
    """Generate from one row. Return the generated tokens and the processed scores of each step."""
    oracle.reset()
    model = copy.deepcopy(oracle.model).double() if double else oracle.model
    torch.set_default_dtype(torch.float64 if double else torch.float32)  # for the attention mask
    prompt = torch.tensor([case["ids"]])
    more = {"negative_prompt_ids": torch.tensor([case["negative_ids"]])} if "negative_ids" in case else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            output_scores=True,
            return_dict_in_generate=True,
            **{"do_sample": False, **options, **more},
        )
    torch.set_default_dtype(torch.float32)
    return out.sequences[0, len(case["ids"]) :].tolist(), [step[0].tolist() for step in out.scores]


def dola_goldens(oracles: dict[str, Oracle], rng: np.random.Generator) -> list[dict]:
    """Return a list of option sets, each with its cases. `near_tie`: in float64, other tokens are chosen or banned."""
    sets = []
    for number in range(12):
        name = list(oracles)[number % len(oracles)]
        oracle, cases = oracles[name], []
        options = draw_options(number, name, oracle.vocab, rng)
        torch.manual_seed(int(rng.integers(2**31)))
        for _ in range(4):
            case = {"ids": rng.integers(oracle.vocab, size=int(rng.integers(1, LONGEST + 1))).tolist()}
            if "guidance_scale" in options:
                case["negative_ids"] = rng.integers(oracle.vocab, size=int(rng.integers(1, 5))).tolist()
            try:
                tokens, scores = run(oracle, case, options)
                exact, exact_scores = run(oracle, case, options, double=True)
            except RuntimeError:  # no token is left to draw
                continue
            if np.isneginf(np.max(scores, axis=-1)).any():  # no token is left, and 4.45.2 chooses token 0
                continue
            banned = [np.isneginf(steps[0]).tolist() for steps in (scores, exact_scores)]
            near = banned[0] != banned[1]
            if "do_sample" not in options:
                case["tokens"], near = tokens, near or tokens != exact
            first = [None if np.isneginf(score) else round(score, 6) for score in scores[0]]
            cases.append(case | {"first_scores": first, "near_tie": near})
        sets.append({"checkpoint": name, "options": options, "cases": cases})
    return sets


def main() -> None:
    """Make all goldens."""
    seed, out = start("4.45.2")
    oracles = {}
    for i, (name, checkpoint) in enumerate(CHECKPOINTS.items()):
        checkpoint.save(out / "checkpoints" / name, np.random.default_rng([seed, 10, i]))
        oracles[name] = Oracle(out / "checkpoints" / name)
    write_lines(out / "dola.json", dola_goldens(oracles, np.random.default_rng([seed, 11])))
    (out / "dola_layers.json").write_text(json.dumps(named_layers()) + "\n")


if __name__ == "__main__":
    main()
