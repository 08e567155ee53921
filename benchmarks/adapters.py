"""Measure the cost of several adapters in one batch by timing decode steps with and without them, in turn.

    python -m benchmarks adapters --model random-0.5b --adapters 8 --rank 16

Each row uses one adapter, for all linear layers. Rows share adapters if there are fewer adapters than rows. `python -m
benchmarks compile --target h100 --adapters 8 --rank 16` reports what such a step does on an H100.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure
from convert import load_hf
from jaxgen import GenerationConfig, arguments, generate
from jaxgen.core.model.lowrank import Adapters

BUNDLED = Path(__file__).parent.parent / "jaxgen" / "demo"


def main() -> None:
    """Measure, print and write the table."""
    args = _arguments()
    measure.read_files(args.model)
    params, loaded = load_hf(args.model, dtype=args.dtype)
    cfg = GenerationConfig(model=loaded.model, pad_token_id=0)
    chosen = [row % args.adapters for row in range(args.rows)]
    runs = {
        "none": (params, cfg),
        "adapters": (attach(params, args.adapters, args.rank), cfg.replace(adapter=chosen)),
    }
    ids = np.random.default_rng(0).integers(0, loaded.model.vocab_size, (args.rows, args.prompt))

    def seconds(name: str, tokens: int) -> float:
        params, cfg = runs[name]
        start = time.perf_counter()
        out = generate(params, ids, None, cfg.replace(max_new_tokens=tokens), attention_mask=np.ones_like(ids))
        out.sequences.block_until_ready()
        return time.perf_counter() - start

    few, many = args.tokens // 4, args.tokens
    for name in runs:
        seconds(name, many)  # compiles
    steps: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(args.rounds):
        for name in list(runs)[:: 1 - 2 * (turn % 2)]:
            steps[name].append((-seconds(name, few) + seconds(name, many)) / (many - few))
    ratios = [own / other for own, other in zip(steps["adapters"], steps["none"], strict=True)]
    plain, with_them = ([1e3 * step for step in steps[name]] for name in ("none", "adapters"))
    lines = [
        f"## Adapters: {args.model.resolve().name}, {cfg.model.dtype}",
        "",
        f"{measure.machine()['cpu']}, {measure.machine()['cores']} cores, jax {jax.__version__}; {args.adapters} "
        f"adapters of rank {args.rank} for all linear layers, {args.rows} rows; medians (smallest to largest) of "
        f"{args.rounds} rounds.",
        "",
        "| step without adapters, ms | with them, ms | ratio |",
        "|---|---|---|",
        f"| {_spread(plain, 1)} | {_spread(with_them, 1)} | {_spread(ratios, 2)} |",
    ]
    print("\n".join(lines))
    file = f"adapters-{args.model.resolve().name}-{args.adapters}x{args.rank}.md"
    (measure.folder(args.results) / file).write_text("\n".join([*lines, ""]), "utf-8")


def attach(params: Any, count: int, rank: int) -> Any:
    """Return parameters with random adapters for the linear layers. Also works on shapes, under `jax.eval_shape`."""

    def walk(node: Any, name: str) -> Any:
        if isinstance(node, dict):
            return {key: walk(child, f"{name}.{key}") for key, child in node.items()}
        if ".layers." not in name or node.ndim != 2:
            return node
        features, columns = node.shape
        key = jax.random.key(len(name))
        a = 0.01 * jax.random.normal(key, (count, 1, rank, columns), jnp.float32)
        b = 0.01 * jax.random.normal(key, (count, rank, features), jnp.float32)
        return Adapters(node, a.astype(node.dtype), b.astype(node.dtype), (features,))

    return walk(params, "")


def _spread(values: list[float], digits: int) -> str:
    shown = (f"{x:,.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    return "{} ({} to {})".format(*shown)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks adapters", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--model", type=Path, default=BUNDLED, help="a checkpoint (default: the one in the package)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's")
    add("--adapters", type=arguments.count, default=8)
    add("--rank", type=arguments.count, default=16)
    add("--rows", type=arguments.count, default=8)
    add("--prompt", type=arguments.count, default=32, help="tokens in each prompt")
    add("--tokens", type=arguments.count, default=32, help="tokens in the longer of two runs; the other has a quarter")
    add("--rounds", type=arguments.count, default=5)
    add("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
