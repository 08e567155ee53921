"""Tokens that transformers 4.41.1 generates with an assistant or prompt lookup, row by row: see README.md."""

from __future__ import annotations

import numpy as np
from modes_441 import draw_eos, draw_processors
from options_441 import LONGEST, Material
from oracle import Oracle, run_assisted

SETS, CASES = 15, 4
# For each checkpoint, its possible assistants, which have the same vocabulary.
ASSISTANTS = {
    "qwen2-gqa-tied": ("llama-mha", "qwen2-gqa-tied"),
    "llama-mha": ("qwen2-gqa-tied", "llama-mha"),
    "qwen2-mqa": ("qwen2-mqa",),
    "llama-mqa-linear": ("llama-mqa-linear",),
}
EXPERT_ASSISTANTS = {  # the model, the assistant or both have experts
    "qwen2-moe": ("llama-mha", "qwen2-moe"),
    "mixtral": ("qwen2-mqa", "mixtral"),
    "llama-mha": ("qwen2-moe",),
}


def draw_drafts(lookup: bool, number: int, rng: np.random.Generator) -> dict:
    """Draw the number of new tokens and the options for drafting."""
    options: dict = {"max_new_tokens": int(rng.integers(2, 25))}
    if lookup:
        sizes = {} if number % 3 == 0 else {"max_matching_ngram_size": int(rng.integers(1, 5))}
        return options | {"prompt_lookup_num_tokens": int(rng.integers(1, 9))} | sizes
    schedule = ["heuristic", "constant", "heuristic_transient"][number % 3]
    return options | {"num_assistant_tokens": int(rng.integers(1, 8)), "num_assistant_tokens_schedule": schedule}


def draw_prompt(vocab: int, lookup: bool, rng: np.random.Generator) -> list[int]:
    """Draw a prompt. For prompt lookup, it has few distinct tokens."""
    tokens = rng.integers(vocab, size=3 if lookup else vocab)
    return rng.choice(tokens, size=int(rng.integers(1, LONGEST + 1))).tolist()


def end_without_eos(prompts: list[list[int]], options: dict, vocab: int) -> None:
    """Replace an eos token at the end of a prompt. If lookup found no draft, 4.41.1 would generate nothing after it."""
    eos = options["eos_token_id"]
    ids = {eos} if isinstance(eos, int) else set(eos or [])
    for prompt in prompts:
        if prompt[-1] in ids:
            prompt[-1] = min(set(range(vocab)) - ids)


def assisted_goldens(
    oracles: dict[str, Oracle],
    lookup: bool,
    rng: np.random.Generator,
    assistants: dict[str, tuple[str, ...]] = ASSISTANTS,
    count: int = SETS,
) -> list[dict]:
    """Return a list of option sets, each with its cases. `near_tie`: in float64, different tokens are generated."""
    sets = []
    for number in range(count):
        name = list(assistants)[number % len(assistants)]
        oracle, assistant = oracles[name], None if lookup else str(rng.choice(assistants[name]))
        prompts = [draw_prompt(oracle.vocab, lookup, rng) for _ in range(CASES)]
        options = draw_drafts(lookup, number, rng) | draw_eos(oracle.vocab, number, rng)
        if lookup:
            end_without_eos(prompts, options, oracle.vocab)
        options |= draw_processors(number, options["eos_token_id"], Material(oracle, prompts, 3, rng))
        cases = []
        for prompt in prompts:
            draft = None if assistant is None else oracles[assistant]
            tokens, exact = (run_assisted(oracle, prompt, options, draft, double) for double in (False, True))
            if tokens is not None and exact is not None:
                cases.append({"ids": prompt, "tokens": tokens, "near_tie": exact != tokens})
        if cases:  # no case is left if each prompt got a banned token
            sets.append({"checkpoint": name, "assistant": assistant, "options": options, "cases": cases})
    return sets
