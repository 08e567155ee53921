"""Measure a token of each decode mode against plain decoding of the same checkpoint, in turn.

    python -m benchmarks.modes --model DIR --out modes.md

The modes take turns, and each turn is set against that of the plain mode it is compared with: what slows the machine
for a while slows both. A turn times a short and a long run; their difference is decoding alone.

What is drafted is fixed by construction. A processor lets every row say the same few tokens again and again, so that
prompt lookup, once it has seen them, and the model's first layers are always right: all drafted tokens are accepted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode import machine
from convert import load_hf
from jaxgen import GenerationConfig, KVCache, generate

PERIOD = 16  # tokens that the text repeats
DRAFTED = 10


@dataclasses.dataclass(frozen=True)
class Mode:
    """A mode to measure: its options, the number of rows, and the name of the mode that it is compared with."""

    options: dict[str, Any]
    against: str
    rows: int = 1
    repeats: bool = False
    copies: bool = False  # each beam has slots of its own, and reordering beams copies their keys and values


def modes(layers: int) -> dict[str, Mode]:
    """Return the modes by name; `layers` is the number of layers that draft."""
    beams = {"num_beams": 4}
    return {
        "greedy, 1 row": Mode({}, "greedy, 1 row"),
        "greedy, 4 rows": Mode({}, "greedy, 4 rows", rows=4),
        "beam search, 4 beams": Mode(beams, "greedy, 4 rows"),
        "the same, each with its own slots": Mode(beams, "greedy, 4 rows", copies=True),
        "diverse beam search, 2 x 2": Mode(beams | {"num_beam_groups": 2, "diversity_penalty": 1.0}, "greedy, 4 rows"),
        "contrastive search, top_k 4": Mode({"penalty_alpha": 0.6, "top_k": 4}, "greedy, 4 rows"),
        "DoLa, high": Mode({"dola_layers": "high", "repetition_penalty": 1.2}, "greedy, 1 row"),
        "greedy, a text that repeats": Mode({}, "greedy, a text that repeats", repeats=True),
        f"prompt lookup, {DRAFTED} tokens": Mode(
            {"prompt_lookup_num_tokens": DRAFTED}, "greedy, a text that repeats", repeats=True
        ),
        f"draft by the first {layers} layers, {DRAFTED} tokens": Mode(
            {
                "assistant_early_exit": layers,
                "num_assistant_tokens": DRAFTED,
                "num_assistant_tokens_schedule": "constant",
            },
            "greedy, a text that repeats",
            repeats=True,
        ),
    }


@jax.tree_util.Partial
def say_again(history, scores):
    """Allow only the token whose number is the row's length modulo the period."""
    return jnp.where(jnp.arange(scores.shape[1])[None, :] == (history.length % PERIOD)[:, None], 0.0, -jnp.inf)


@jax.tree_util.Partial
def _unchanged(history, scores):
    """Change nothing: with it, the program for `Mode.copies` is not taken for the one with shared slots."""
    return scores


@contextlib.contextmanager
def _own_slots():
    """Let no rows share the slots that they write."""
    fork = KVCache.fork
    with mock.patch.object(KVCache, "fork", lambda self, copies, slots, shared=False: fork(self, copies, slots)):
        yield


def main() -> None:
    """Measure, and print a table."""
    args = _arguments()
    params, cfg = load_hf(args.model, dtype=args.dtype)
    cfg = GenerationConfig(model=cfg.model, eos_token_id=None, pad_token_id=0)
    ids = np.random.default_rng(0).integers(0, 1000, (4, args.prompt), np.int32)
    measured = modes(args.layers)
    if args.only:
        chosen = {name: mode for name, mode in measured.items() if args.only in mode.against}
        measured = chosen or measured
    accepted = {name: _warm_up(mode, params, cfg, ids, args) for name, mode in measured.items()}
    turns: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(args.repeat):
        for name, mode in measured.items():
            turns[name].append(_seconds_per_token(mode, params, cfg, ids, args))
    lines = _table(measured, turns, accepted)
    facts = f"{args.model.resolve().name}, {args.dtype}, a prompt of {args.prompt} tokens, {args.short} to "
    facts += f"{args.new_tokens} new tokens, {args.repeat} turns; {machine()}, load {os.getloadavg()[0]:.1f}"
    text = "\n".join(["# Decode modes", "", facts, "", *lines, ""])
    print(text)
    if args.out:
        args.out.write_text(text, "utf-8")


def _run(mode: Mode, params, cfg: GenerationConfig, ids: np.ndarray, new_tokens: int):
    cfg = cfg.replace(max_new_tokens=new_tokens, **mode.options)
    processors = [say_again] * mode.repeats + [_unchanged] * mode.copies
    return jax.block_until_ready(generate(params, ids[: mode.rows], None, cfg, logits_processor=processors))


def _warm_up(mode: Mode, params, cfg: GenerationConfig, ids: np.ndarray, args: argparse.Namespace) -> str:
    """Compile, check that no row ended early, and return the share of accepted tokens."""
    for new_tokens in (args.short, args.new_tokens):
        with _own_slots() if mode.copies else contextlib.nullcontext():
            out = _run(mode, params, cfg, ids, new_tokens)
        if int(out.lengths.min()) != new_tokens:
            raise SystemExit(f"asked for {new_tokens} new tokens, got {out.lengths}")
    return "" if out.drafted is None else f"{int(out.accepted[0])} of {int(out.drafted[0])}"


def _seconds_per_token(mode: Mode, params, cfg: GenerationConfig, ids: np.ndarray, args: argparse.Namespace) -> float:
    seconds = []
    for new_tokens in (args.short, args.new_tokens):
        start = time.perf_counter()
        _run(mode, params, cfg, ids, new_tokens)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / (args.new_tokens - args.short)


def _table(measured: dict[str, Mode], turns: dict[str, list[float]], accepted: dict[str, str]) -> list[str]:
    lines = [
        "| mode | ms per token of a row | time / that of | median | smallest | largest | accepted |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, mode in measured.items():
        ratios = [own / other for own, other in zip(turns[name], turns[mode.against], strict=True)]
        shown = " | ".join(f"{value:.2f}" for value in (statistics.median(ratios), min(ratios), max(ratios)))
        lines.append(
            f"| {name} | {1e3 * statistics.median(turns[name]):.1f} | {mode.against} | {shown} | {accepted[name]} |"
        )
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint directory")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--short", type=int, default=44, help="new tokens of the short run")
    parser.add_argument("--new-tokens", type=int, default=88, help="new tokens of the long run")
    parser.add_argument("--layers", type=int, default=4, help="layers that draft")
    parser.add_argument("--only", help="only the modes that are compared with one whose name has this text")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each mode")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    args = parser.parse_args()
    if not 1 <= args.short < args.new_tokens:
        parser.error("--short must be at least 1 and less than --new-tokens")
    return args


if __name__ == "__main__":
    main()
