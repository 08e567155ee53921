"""Compare slots, in which a new sequence replaces one that ends, with batches that wait for their longest row.

    python -m benchmarks slots --prompts 256 --width 16 64 --answers 1 200 --slots 16

Four programs generate in turn: one with all prompts in slots; one with `generate_many`, from an iterable of the same
prompts; one in batches with as many rows as slots; and one in batches whose answers all have the mean length, so that
no row waits. Lengths are drawn uniformly between the two values of `--answers`. With `--mean`, answers end by chance
instead: after that many tokens on average, and after the larger value of `--answers` at the latest.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure
from convert import load_hf
from jaxgen import GenerationConfig, arguments, generate, generate_many

BUNDLED = Path(__file__).parent.parent / "jaxgen" / "demo"
EOS = 1


def main() -> None:
    """Measure, print and write the table."""
    args = _arguments()
    params, cfg = load_hf(args.model, dtype=args.dtype)
    runs = programs(params, cfg, args)
    tokens = {name: run() for name, run in runs.items()}  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    lines = table(args, {name: [tokens[name] / x for x in seconds[name]] for name in runs})
    print("\n".join(lines))
    device = jax.devices()[0]
    folder = measure.folder(args.results, None if device.platform == "cpu" else device.device_kind)
    file = f"slots-{args.model.resolve().name}-{args.prompts}x{args.sequences}-{args.slots}.md"
    (folder / file).write_text("\n".join([*lines, ""]), "utf-8")


def programs(params, cfg: GenerationConfig, args: argparse.Namespace) -> dict[str, Callable[[], int]]:
    """Return the functions to measure; each returns the number of tokens that it generated."""
    rng = np.random.default_rng(0)
    width, rows = args.width[1], args.slots // args.sequences
    ids = rng.integers(5, min(1000, cfg.model.vocab_size), (args.prompts, width), np.int32)
    mask = np.arange(width)[None, :] >= width - rng.integers(args.width[0], width + 1, args.prompts)[:, None]
    keys = jax.random.split(jax.random.key(0), args.prompts)
    lengths = rng.integers(args.answers[0], args.answers[1] + 1, args.prompts, np.int32)
    limits = np.full_like(lengths, args.answers[1]) if args.mean else lengths
    mean = np.full_like(lengths, args.mean or round(np.mean(lengths)))
    # Do not use the checkpoint's options, which could remove the eos token.
    cfg = GenerationConfig(
        model=cfg.model,
        do_sample=not args.greedy,
        top_k=0,
        num_return_sequences=args.sequences,
        pad_token_id=0,
    )
    ending = cfg.replace(eos_token_id=EOS) if args.mean else cfg
    processors = [functools.partial(_end_by_chance, 1 / args.mean)] if args.mean else None

    def run(cfg: GenerationConfig, some: slice, limits: np.ndarray, processors: list | None) -> int:
        cfg = cfg.replace(max_new_tokens=limits[some])
        inputs = {"attention_mask": mask[some], "logits_processor": processors}
        return int(np.sum(generate(params, ids[some], None if args.greedy else keys[some], cfg, **inputs).lengths))

    def stream() -> int:
        one = ending.replace(max_new_tokens=args.answers[1])
        prompts = ({"ids": ids[n][mask[n]], "max_new_tokens": int(limits[n])} for n in range(args.prompts))
        inputs = {"slots": args.slots, "prompt_width": width, "logits_processor": processors}
        return sum(len(done.tokens) for done in generate_many(params, prompts, keys[0], one, **inputs))

    def in_batches(cfg: GenerationConfig, limits: np.ndarray, processors: list | None) -> int:
        starts = range(0, args.prompts, rows)
        return sum(run(cfg, slice(start, start + rows), limits, processors) for start in starts)

    return {
        "slots": lambda: run(ending.replace(slots=args.slots), slice(None), limits, processors),
        "generate_many": stream,
        "batches": lambda: in_batches(ending, limits, processors),
        "batches of equal answers": lambda: in_batches(cfg, mean, None),
    }


def table(args: argparse.Namespace, speeds: dict[str, list[float]]) -> list[str]:
    """Return a Markdown table of each program's tokens per second, and of the speed of slots relative to it."""
    lines = [
        f"## {args.prompts} prompts x {args.sequences} of {args.model.resolve().name}, {args.slots} slots",
        "",
        f"{measure.machine()['cpu']}, jax {jax.__version__}; prompts of {args.width[0]} to {args.width[1]} tokens, "
        f"{'greedy ' if args.greedy else ''}answers of {f'{args.mean} on average' if args.mean else args.answers[0]} "
        f"to {args.answers[1]}; median (smallest to largest) of {args.rounds} rounds.",
        "",
        "| program | tokens/s | slots against it |",
        "|---|---|---|",
    ]
    for name, values in speeds.items():
        ratio = [own / other for own, other in zip(speeds["slots"], values, strict=True)]
        lines.append(f"| {name} | {_spread(values, 0)} | {_spread(ratio, 2)} |")
    return lines


def _spread(values: list[float], digits: int) -> str:
    shown = (f"{x:,.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    return "{} ({} to {})".format(*shown)


def _end_by_chance(chance: float, history, scores: jax.Array) -> jax.Array:
    """Give the eos id a fixed probability."""
    is_eos = jnp.arange(scores.shape[1])[None, :] == EOS
    others = jax.nn.logsumexp(jnp.where(is_eos, -jnp.inf, scores), axis=-1, keepdims=True)
    return jnp.where(is_eos, others + float(np.log(chance / (1 - chance))), scores)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks slots", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a checkpoint (default: the one in the package)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's")
    parser.add_argument("--prompts", type=arguments.count, default=256)
    parser.add_argument("--width", type=arguments.count, nargs=2, default=[16, 64], help="range of tokens per prompt")
    parser.add_argument("--answers", type=arguments.count, nargs=2, default=[1, 200], help="range of tokens per answer")
    parser.add_argument("--greedy", action="store_true", help="use greedy search instead of sampling")
    parser.add_argument("--mean", type=arguments.count, help="answers end by chance, after this many tokens on average")
    parser.add_argument("--sequences", type=arguments.count, default=1, help="answers per prompt")
    parser.add_argument("--slots", type=arguments.count, default=16)
    parser.add_argument("--rounds", type=arguments.count, default=5)
    parser.add_argument("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    args = parser.parse_args()
    if args.slots % args.sequences or args.prompts * args.sequences % args.slots:
        parser.error("--slots must be a multiple of --sequences and divide the number of answers")
    if args.width[0] > args.width[1] or args.answers[0] > args.answers[1]:
        parser.error("--width and --answers are the smallest and the largest number")
    return args


if __name__ == "__main__":
    main()
