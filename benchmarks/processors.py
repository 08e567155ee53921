"""Measure each logits processor, each warper and the choice of a token, all compiled separately.

    python -m benchmarks processors --rows 1 8

Each option is set to the example value in its declaration. The result is a table of medians over all turns, in
microseconds. Each turn runs every function a few times, so a temporary slowdown of the machine affects all functions.
In one program, several functions can take less than the sum of their times, because XLA fuses passes over the scores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure
from jaxgen import GenerationConfig, History, ModelConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.config.option import GUIDANCE, WARP, Option
from jaxgen.core.decoding import sample
from jaxgen.core.logits import processors, warpers
from jaxgen.core.logits.row_options import RowOptions

HISTORY = 512  # tokens in each row, half of them generated


def main() -> None:
    args = _arguments()
    columns, load = {}, os.getloadavg()[0]
    for rows in args.rows:
        calls = {name: _compiled(*call) for name, call in _calls(args.vocab, rows).items()}
        columns[rows] = _measure(calls, args.turns, args.repeat)
    device = jax.devices()[0]
    lines = [
        "# Processors and warpers",
        "",
        f"{device.device_kind}; host: {measure.machine()['cpu']}, load average {load:.1f} at the start.",
        f"{args.vocab} tokens in the vocabulary, {HISTORY} in the history; microseconds, median of {args.turns}.",
        "",
        *_table(columns),
    ]
    folder = measure.folder(args.results, None if device.platform == "cpu" else device.device_kind)
    (folder / "processors.md").write_text("\n".join([*lines, ""]), "utf-8")
    print("\n".join(lines))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks processors", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--vocab", type=int, default=151_936, help="tokens in the vocabulary")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="rows in the batch, one column for each")
    parser.add_argument("--turns", type=int, default=50, help="the number of turns")
    parser.add_argument("--repeat", type=int, default=4, help="runs in a turn, whose mean counts")
    parser.add_argument("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    args = parser.parse_args()
    if min(*args.rows, args.vocab, args.turns, args.repeat) < 1:
        parser.error("--vocab, --rows, --turns and --repeat must be at least 1")
    return args


def _calls(vocab: int, rows: int) -> dict[str, tuple]:
    """For each line of the table, return a function and its arguments, all of them traced."""
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.normal(size=(rows, vocab)) * 3, jnp.float32)
    uncond = jnp.asarray(rng.normal(size=(rows, vocab)) * 3, jnp.float32)
    seen = jnp.asarray(rng.random((rows, vocab)) < HISTORY / vocab)
    history = History(
        ids=jnp.asarray(rng.integers(0, min(vocab, 100), (rows, HISTORY)), jnp.int32),
        length=jnp.full(rows, HISTORY, jnp.int32),
        prompt_length=jnp.full(rows, HISTORY // 2, jnp.int32),
        budget=jnp.full(rows, HISTORY // 2 + 1, jnp.int32),
        done=jnp.zeros(rows, bool),
        unknown=jnp.zeros(rows, jnp.int32),
        seen=seen,
        prompt_seen=seen,
        chosen=jnp.asarray(rng.integers(0, vocab, (rows, 3)), jnp.int32),
    )
    calls = {"one pass over the scores": (lambda x: x * 2.0, scores)}
    for option in OPTIONS.values():
        if option.stage == GUIDANCE:
            calls[option.name] = (processors.guidance, scores, uncond, jnp.full((rows, 1), 1.5, jnp.float32))
        elif option.stage:
            transform = partial(_transform, option.name)
            calls[option.name] = (transform, _config(option, vocab), history, scores)
    keys = jax.random.split(jax.random.key(0), rows)
    return calls | {
        "allow_only": (processors.allow_only, scores, seen),
        "greedy choice": (sample.greedy, scores),
        "draw": (sample.draw, keys, jnp.zeros((), jnp.int32), scores),
    }


def _config(option: Option, vocab: int) -> GenerationConfig:
    """Return a config in which only this option is on, with its example value."""
    model = ModelConfig.from_hf(
        {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": vocab, "hidden_size": 64,
            "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
            "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "tie_word_embeddings": True,
        }
    )  # fmt: skip
    fields = {option.name: option.examples[0]} | {name: OPTIONS[name].examples[0] for name in option.needs}
    return GenerationConfig(model=model, top_k=0).replace(do_sample=option.stage == WARP, **fields)


def _transform(name: str, cfg: GenerationConfig, history: History, scores: jax.Array) -> jax.Array:
    """Apply one processor or warper, as the pipeline does."""
    return (processors.PROCESSORS | warpers.WARPERS)[name](history, scores, RowOptions.of(cfg, scores.shape[0]))


def _compiled(function: Callable, *arguments: jax.Array) -> Callable[[], jax.Array]:
    return partial(jax.jit(function).lower(*arguments).compile(), *arguments)


def _measure(calls: dict[str, Callable[[], jax.Array]], turns: int, repeat: int) -> dict[str, float]:
    """Return each call's median time in microseconds."""
    for call in calls.values():
        jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeat):
                jax.block_until_ready(call())
            seconds[name].append((time.perf_counter() - start) / repeat)
    return {name: statistics.median(times) * 1e6 for name, times in seconds.items()}


def _table(columns: dict[int, dict[str, float]]) -> list[str]:
    heads = [f"{rows} row{'s' * (rows > 1)}" for rows in columns]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(columns)]
    for name in next(iter(columns.values())):
        lines.append(f"| {name} | " + " | ".join(f"{column[name]:.0f}" for column in columns.values()) + " |")
    return lines


if __name__ == "__main__":
    main()
