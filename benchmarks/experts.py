"""Measure the feed-forward layers of a mixture of experts, in turn with those of transformers.

    python -m benchmarks experts --environments environments --rows 1 8 512

The default shape is that of Qwen3-30B-A3B. In each turn, every program computes the same layers with newly chosen
experts, and jaxgen's process reads an array that does not fit into a cache. The result is a table of medians over all
turns: milliseconds per layer, and ratios of times from the same turn. The matrices of the chosen experts are active.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure
from jaxgen import arguments
from jaxgen.core.model.expert_product import product_of_experts

_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
_MOST_BATCHED = 64  # tokens; `batched_mm` copies every chosen matrix
_READ = 300_000_000  # bytes
_PROGRAM = Path(__file__).parent / "programs" / "experts_program.py"


class Jaxgen:
    """jaxgen's layers with random weights."""

    def __init__(self, args: argparse.Namespace):
        self.width, self.experts = args.width, args.experts
        keys = jax.random.split(jax.random.key(0), (args.layers, 2))
        shapes = [(args.experts, 2 * args.inner, args.width), (args.experts, args.width, args.inner)]
        self.layers = [[_weight(key, shape) for key, shape in zip(pair, shapes, strict=True)] for pair in keys]
        self.long = jnp.ones(_READ // 4, jnp.float32)
        self.add = jax.jit(jnp.sum).lower(self.long).compile()
        self.compiled: dict[int, Any] = {}

    def read(self) -> float:
        """Return the seconds for reading a byte from memory."""
        start = time.perf_counter()
        jax.block_until_ready(self.add(self.long))
        return (time.perf_counter() - start) / _READ

    def run(self, choices: np.ndarray) -> float:
        """Return the seconds per layer for tokens whose experts are `choices [layers, n, k]`."""
        count, chosen = choices.shape[1:]
        x = jnp.ones((count, self.width), jnp.bfloat16)
        arguments = x, jnp.asarray(choices, jnp.int32), jnp.full((count, chosen), 1 / chosen, jnp.float32), self.layers
        if count not in self.compiled:
            self.compiled[count] = jax.jit(_run).lower(*arguments).compile()
            jax.block_until_ready(self.compiled[count](*arguments))
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        jax.block_until_ready(self.compiled[count](*arguments))
        return (time.perf_counter() - start) / len(self.layers)


def _weight(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.stack(
        [jax.random.normal(one, shape[1:], jnp.bfloat16) * 0.02 for one in jax.random.split(key, shape[0])]
    )


def _run(x: jax.Array, choices: jax.Array, shares: jax.Array, layers: list[list[jax.Array]]) -> jax.Array:
    (count, chosen), width = shares.shape, x.shape[1]
    for own, (gate_up, down) in zip(choices.reshape(len(layers), -1), layers, strict=True):
        rows = jnp.broadcast_to(x[:, None], (count, chosen, width)).reshape(-1, width)
        gate, up = jnp.split(product_of_experts(rows, own, gate_up).astype(x.dtype), 2, axis=1)
        out = product_of_experts(jax.nn.silu(gate) * up, own, down).astype(x.dtype).reshape(count, chosen, width)
        x = x + jnp.sum(out.astype(jnp.float32) * shares[..., None], axis=1).astype(x.dtype)
    return x


class Transformers:
    """The layers of transformers, in a process of their own."""

    def __init__(self, args: argparse.Namespace):
        python = args.environments / "transformers" / "bin" / "python"
        shape = [args.experts, args.chosen, args.width, args.inner, args.layers, measure.machine()["cores"]]
        command = [str(python), str(_PROGRAM), *map(str, shape)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"transformers ended with status {self.process.wait()}; its messages are above")
        return json.loads(line)

    def run(self, implementation: str, choices: np.ndarray) -> float:
        """Return the seconds per layer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([implementation, choices.tolist()]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    """Measure and write the table."""
    args, load = _arguments(), os.getloadavg()[0]
    own = Jaxgen(args)
    other = Transformers(args) if args.environments else None
    lines = [_line(args, rows, own, other) for rows in args.rows]
    if other:
        other.stop()
    version = f", transformers {other.version}" if other else ""
    text = [
        f"# Experts with jax {jax.__version__}{version}",
        "",
        f"{measure.machine()['cpu']}, {measure.machine()['cores']} cores, load average {load:.1f} at the start.",
        f"{args.layers} layers of {args.experts} experts, {args.chosen} per token, widths {args.width} and "
        f"{args.inner}, bfloat16; milliseconds per layer, median of {args.turns} turns.",
        "",
        f"| tokens | active MB | reading them | jaxgen | reading / jaxgen | {' | '.join(_IMPLEMENTATIONS)} "
        "| the best / jaxgen |",
        "|---:|" + "---:|" * (5 + len(_IMPLEMENTATIONS)),
        *lines,
    ]
    (measure.folder(args.results) / f"experts-jax-{jax.__version__}.md").write_text("\n".join([*text, ""]), "utf-8")
    print("\n".join(text))


def _line(args: argparse.Namespace, rows: int, own: Jaxgen, other: Transformers | None) -> str:
    rng, seconds, active = np.random.default_rng(0), {}, []
    names = [name for name in _IMPLEMENTATIONS if other and (rows <= _MOST_BATCHED or name != "batched_mm")]
    for turn in range(-1, args.turns):
        choices = rng.random((args.layers, rows, args.experts)).argsort(axis=2)[..., : args.chosen]
        counts = [len(np.unique(layer)) for layer in choices]
        active.append(statistics.mean(counts) * 3 * args.width * args.inner * 2)
        times = {"reading": own.read() * active[-1], "jaxgen": own.run(choices)}
        times |= {name: other.run(name, choices) for name in names if other}
        if turn >= 0:  # the first turn warms up
            for name, value in times.items():
                seconds.setdefault(name, []).append(value)
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    best = min(names, key=medians.__getitem__, default=None)

    def ratio(name: str | None) -> str:
        if name is None:
            return ""
        return f"{statistics.median(a / b for a, b in zip(seconds[name], seconds['jaxgen'], strict=True)):.2f}"

    cells = [
        str(rows),
        f"{statistics.mean(active) / 1e6:.0f}",
        *(f"{medians[name]:.1f}" for name in ("reading", "jaxgen")),
    ]
    cells += [ratio("reading"), *(f"{medians[name]:.1f}" if name in medians else "" for name in _IMPLEMENTATIONS)]
    return f"| {' | '.join([*cells, ratio(best)])} |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks experts", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--environments", type=Path, help="a directory with the transformers environment")
    parser.add_argument("--rows", type=arguments.count, nargs="+", default=[1, 8, 512], help="tokens, a line for each")
    parser.add_argument("--experts", type=arguments.count, default=128)
    parser.add_argument("--chosen", type=arguments.count, default=8, help="experts per token")
    parser.add_argument("--width", type=arguments.count, default=2048, help="the width of a token")
    parser.add_argument("--inner", type=arguments.count, default=768, help="the width inside an expert")
    parser.add_argument("--layers", type=arguments.count, default=2)
    parser.add_argument("--turns", type=arguments.count, default=20, help="the number of turns")
    parser.add_argument("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
