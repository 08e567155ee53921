"""Results of transformers 4.41.1 in its other decode modes, row by row: see README.md."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from options_441 import LONGEST, VALUES, Material
from oracle import Oracle, run_beams, run_tokens, scores_case
from transformers import ConstrainedBeamSearchScorer

BEAM_SETS, GROUP_SETS, CONSTRAINED_SETS, CONTRASTIVE_SETS, CASES = 40, 15, 15, 15, 4
PROCESSORS = (
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "min_new_tokens"),
    *("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "renormalize_logits"),
)


def draw_beams(number: int, groups: bool, rng: np.random.Generator) -> dict:
    """Draw the options of a beam search."""
    parts = int(rng.integers(2, 4)) if groups else 1
    beams = parts * int(rng.integers(1, 4)) if groups else 2 + number % 5
    options = {
        "num_beams": beams,
        "num_return_sequences": int(rng.integers(1, beams + 1)),
        "early_stopping": [False, True, "never"][number % 3],
        "length_penalty": round(float(rng.choice([1.0, 0.0, rng.uniform(-1.5, 0), *rng.uniform(0, 2.5, size=2)])), 3),
        "max_new_tokens": int(rng.integers(3, 21)),
    }
    if groups:
        options |= {"num_beam_groups": parts, "diversity_penalty": round(float(rng.uniform(0.1, 3)), 3)}
    return options


def draw_eos(vocab: int, number: int, rng: np.random.Generator) -> dict:
    """Draw eos and pad ids: no eos id, one, or several. Many eos ids let beams end at different times."""
    ids = rng.permutation(vocab).tolist()
    eos = {0: None, 1: ids[0], 2: ids[:2], 3: ids[: vocab // 12], 4: ids[: vocab // 6]}[number % 5]
    return {"eos_token_id": eos, "pad_token_id": int(rng.integers(vocab))}


def draw_prompts(
    oracles: dict[str, Oracle], sets: int, rng: np.random.Generator
) -> Iterator[tuple[int, str, list[list[int]]]]:
    """Yield the index of each set, its checkpoint, and random prompts."""
    names = [name for name in oracles if "dynamic" not in name]
    for number in range(sets):
        name = names[number % len(names)]
        vocab = oracles[name].vocab
        yield number, name, [rng.integers(vocab, size=int(rng.integers(1, LONGEST + 1))).tolist() for _ in range(CASES)]


def draw_processors(number: int, eos: int | list[int] | None, material: Material) -> dict:
    """Draw the options of 0 to 3 processors, with `min_new_tokens` only if there is an eos token."""
    names = material.rng.choice(PROCESSORS, size=number % 4, replace=False)
    drawn = {str(name): VALUES[str(name)](material) for name in names}
    drawn.setdefault("repetition_penalty", 1.0)
    if eos is None:
        drawn.pop("min_new_tokens", None)
    return drawn


def is_sound(result: dict) -> bool:
    """Return True if the scores show that no sequence contains a banned token."""
    return all(np.isfinite(score) and score > -1e6 for score in result["scores"])


def beam_cases(oracle: Oracle, prompts: list[list[int]], options: dict) -> list[dict]:
    """Return the sound cases of a set. `near_tie` means that a run in float64 generates different tokens."""
    cases = []
    for prompt in prompts:
        result = run_beams(oracle, prompt, options)
        if is_sound(result):
            exact = run_beams(oracle, prompt, options, double=True)
            cases.append({"ids": prompt, "near_tie": exact["sequences"] != result["sequences"]} | result)
    return cases


def beam_goldens(
    oracles: dict[str, Oracle], groups: bool, rng: np.random.Generator, count: int | None = None
) -> list[dict]:
    """Return a list of option sets, each with its cases."""
    sets = []
    for number, name, prompts in draw_prompts(oracles, count or (GROUP_SETS if groups else BEAM_SETS), rng):
        oracle = oracles[name]
        options = draw_beams(number, groups, rng) | draw_eos(oracle.vocab, number, rng)
        options |= draw_processors(number, options["eos_token_id"], Material(oracle, prompts, 3, rng))
        if isinstance(options.get("forced_eos_token_id"), list):
            options["forced_eos_token_id"] = options["forced_eos_token_id"][0]  # several would have equal scores
        sets.append({"checkpoint": name, "options": options, "cases": beam_cases(oracle, prompts, options)})
    return sets


def draw_words(number: int, prompts: list[list[int]], material: Material, eos: list[int]) -> list:
    """Draw phrases and lists of alternatives that contain no eos ids and have many tokens in common."""
    rng, vocab = material.rng, material.vocab
    few = rng.choice([i for i in range(vocab) if i not in eos], size=int(rng.integers(2, 5)), replace=False).tolist()

    def phrase() -> list[int]:
        sources = [rng.integers(vocab, size=8), rng.choice(few, size=8), prompts[int(rng.integers(CASES))]]
        source = np.asarray([*sources, *material.written][int(rng.choice([0, 0, 1, 1, 1, 1, 2, 3, 3]))]).tolist()
        size = min(int(rng.integers(1, 5)), len(source))
        start = int(rng.integers(0, len(source) - size + 1))
        return [i for i in source[start : start + size] if i not in eos] or phrase()

    def alternatives() -> list[list[int]]:
        stem = phrase()[: int(rng.integers(0, 3))]
        drawn: list[list[int]] = []
        for _ in range(int(rng.integers(2, 6))):
            new = [*stem, *phrase()]
            if all(new[: len(old)] != old[: len(new)] for old in drawn):
                drawn.append(new)
        return drawn

    words = [phrase() if number % 3 == 0 or rng.random() < 0.4 else alternatives() for _ in range(1 + number % 4)]
    return [*words, words[0]] if number % 5 == 4 else words


@contextlib.contextmanager
def all_indices() -> Iterator[None]:
    """Give beam indices to beams that do not meet the constraints. Without them, transformers raises a TypeError."""
    original = ConstrainedBeamSearchScorer.finalize

    def finalize(self, input_ids, *given, beam_indices, **more):
        for hypotheses in self._beam_hyps:

            def add(hyp, score, beam_indices=beam_indices, generated_len=None, into=hypotheses.add):
                if not beam_indices or isinstance(beam_indices[0], tuple):
                    row = next(i for i, ids in enumerate(input_ids) if torch.equal(ids, hyp))
                    beam_indices = beam_indices[row]
                into(hyp, score, beam_indices=beam_indices, generated_len=generated_len)

            hypotheses.add = add
        return original(self, input_ids, *given, beam_indices=beam_indices, **more)

    ConstrainedBeamSearchScorer.finalize = finalize
    try:
        yield
    finally:
        ConstrainedBeamSearchScorer.finalize = original


def constrained_goldens(
    oracles: dict[str, Oracle], rng: np.random.Generator, count: int = CONSTRAINED_SETS
) -> list[dict]:
    """Return a list of option sets, each with its cases."""
    sets = []
    for number, name, prompts in draw_prompts(oracles, count, rng):
        oracle = oracles[name]
        material = Material(oracle, prompts, 3, rng)
        options = draw_beams(number, False, rng) | draw_eos(oracle.vocab, number, rng)
        options["repetition_penalty"] = round(float(rng.uniform(0.8, 1.6)), 3) if number % 3 == 1 else 1.0
        eos = np.ravel([] if options["eos_token_id"] is None else options["eos_token_id"]).tolist()
        options["force_words_ids"] = draw_words(number, prompts, material, eos)
        if number % 4 == 3:
            options["suppress_tokens"] = material.tokens(3, 10)
        with all_indices():
            cases = beam_cases(oracle, prompts, options)
        sets.append({"checkpoint": name, "options": options, "cases": cases})
    return sets


def contrastive_goldens(
    oracles: dict[str, Oracle], rng: np.random.Generator, count: int = CONTRASTIVE_SETS
) -> list[dict]:
    """Return a list of option sets, each with its cases. `near_tie`: in float64, different tokens are generated."""
    sets = []
    for number, name, prompts in draw_prompts(oracles, count, rng):
        oracle = oracles[name]
        alpha = float(rng.choice([0.6, rng.uniform(0.05, 1), rng.uniform(1, 2)], p=[0.3, 0.6, 0.1]))
        options = {
            "penalty_alpha": round(alpha, 3),
            "top_k": oracle.vocab if number == 7 else int(rng.integers(2, 9)),
            "max_new_tokens": int(rng.integers(3, 21)),
        }
        options |= draw_eos(oracle.vocab, number, rng)
        options |= draw_processors(number, options["eos_token_id"], Material(oracle, prompts, 3, rng))
        cases = []
        for prompt in prompts:
            tokens, exact = (run_tokens(oracle, prompt, options, double) for double in (False, True))
            if tokens is not None and exact is not None:
                cases.append({"ids": prompt, "near_tie": exact != tokens, "tokens": tokens})
        if cases:  # no case is left if each prompt got a banned token
            sets.append({"checkpoint": name, "options": options, "cases": cases})
    return sets


def first_score_goldens(oracles: dict[str, Oracle], rng: np.random.Generator, count: int) -> list[dict]:
    """Return a list of option sets for sampling, each with its cases; see `scores_case`."""
    sets = []
    for number, name, prompts in draw_prompts(oracles, count, rng):
        oracle = oracles[name]
        options = draw_eos(oracle.vocab, number, rng)
        options |= draw_processors(number, options["eos_token_id"], Material(oracle, prompts, 3, rng))
        options |= {"do_sample": True, "temperature": round(float(rng.uniform(0.5, 2)), 3), "max_new_tokens": 8}
        options |= {"top_k": int(rng.integers(5, 60)), "top_p": round(float(rng.uniform(0.5, 0.98)), 3)}
        cases = [scores_case(oracle, prompt, options) for prompt in prompts]
        sets.append({"checkpoint": name, "options": options, "cases": cases})
    return sets
