"""Measure each logits processor and warper, and how a token is chosen, each compiled alone.

    python -m benchmarks.processors --rows 1 8 --model random-0.5b

Prints a table of microseconds, the median over turns. In a turn each of them runs a few times in a row, one after
the other, so what slows the machine for a while slows all of them. In a program that does several they can be cheaper
than their sum: the compiler joins passes over the scores. With --model, the time of a decode step stands beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode import machine
from convert import load_hf
from jaxgen import GenerationConfig, WatermarkingConfig, generate
from jaxgen.decoding import sample
from jaxgen.logits import processors, warpers
from jaxgen.logits.watermark import watermark

HISTORY = 512  # tokens of each row
ENTRIES, WIDTH = 16, 4  # of the tables of sequences


def main() -> None:
    args = _arguments()
    columns = {}
    for rows in args.rows:
        calls = {name: _compiled(*call) for name, call in _calls(args.vocab, rows).items()}
        columns[rows] = _measure(calls, args.turns, args.repeat)
        if args.model is not None:
            columns[rows]["a decode step, greedy"] = _decode_step(args.model, rows)
    device = jax.devices()[0]
    print(f"{device.platform}: {device.device_kind}; host: {machine()}")
    print(f"{args.vocab} tokens in the vocabulary, {HISTORY} in the history; microseconds, median of {args.turns}\n")
    _print_table(columns)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151_936, help="tokens in the vocabulary")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="rows of the batch, a column for each")
    parser.add_argument("--model", help="a checkpoint, to measure a decode step of it as well")
    parser.add_argument("--turns", type=int, default=50, help="turns that the median is over")
    parser.add_argument("--repeat", type=int, default=4, help="runs in a row, of which a turn is the mean")
    args = parser.parse_args()
    if min(*args.rows, args.vocab, args.turns, args.repeat) < 1:
        parser.error("--vocab, --rows, --turns and --repeat must be at least 1")
    return args


def _calls(vocab: int, rows: int) -> dict[str, tuple]:
    """Return what is measured: a function and its arguments, all of them traced."""
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.normal(size=(rows, vocab)) * 3, jnp.float32)
    uncond = jnp.asarray(rng.normal(size=(rows, vocab)) * 3, jnp.float32)
    ids = jnp.asarray(rng.integers(0, min(vocab, 100), (rows, HISTORY)), jnp.int32)
    length = jnp.full(rows, HISTORY, jnp.int32)
    table = jnp.asarray(rng.integers(0, min(vocab, 100), (ENTRIES, WIDTH)), jnp.int32)
    bias = jnp.ones(ENTRIES, jnp.float32)
    eos = jnp.asarray([0, 1, -1, -1], jnp.int32)
    tokens = processors.token_set(eos, vocab)
    seen = jnp.asarray(rng.random((rows, vocab)) < HISTORY / vocab)
    everywhere = jnp.ones(rows, bool)

    def per_row(value: float) -> jax.Array:
        return jnp.full((rows, 1), value, jnp.float32)

    keys = jax.random.split(jax.random.key(0), rows)
    return {
        "one pass over the scores": (lambda x: x * 2.0, scores),
        "guidance": (processors.guidance, scores, uncond, per_row(1.5)),
        f"sequence_bias, {ENTRIES} sequences": (processors.sequence_bias, scores, ids, length, table, bias),
        "encoder_repetition_penalty": (processors.encoder_repetition_penalty, scores, seen, per_row(1.1)),
        "repetition_penalty": (processors.repetition_penalty, scores, seen, per_row(1.1)),
        "no_repeat_ngram, n = 3": (partial(processors.no_repeat_ngram, n=3), scores, ids, length),
        "encoder_no_repeat_ngram, n = 3": (
            partial(processors.encoder_no_repeat_ngram, n=3),
            scores,
            ids,
            length,
            length // 2,
        ),
        f"bad_words, {ENTRIES} sequences": (processors.bad_words, scores, ids, length, table, eos),
        "ban": (processors.ban, scores, tokens, everywhere),
        "allow_only": (processors.allow_only, scores, seen),
        "force": (processors.force, scores, tokens, everywhere),
        "remove_invalid_values": (processors.remove_invalid_values, scores),
        "exponential_decay": (processors.exponential_decay, scores, tokens, length, per_row(1.01)),
        "watermark": (watermark, scores, ids, length, WatermarkingConfig()),
        "renormalize": (processors.renormalize, scores),
        "token_set, 4 ids": (lambda ids: processors.token_set(ids, vocab), eos),
        "temperature": (warpers.temperature, scores, per_row(0.7)),
        "top_h": (warpers.top_h, scores, per_row(0.5)),
        "top_k, k = 20": (warpers.top_k, scores, jnp.full((rows, 1), 20, jnp.int32)),
        "top_p": (warpers.top_p, scores, per_row(0.8)),
        "min_p": (warpers.min_p, scores, per_row(0.1)),
        "typical": (warpers.typical, scores, per_row(0.9)),
        "epsilon": (warpers.epsilon, scores, per_row(0.0003)),
        "eta": (warpers.eta, scores, per_row(0.0003)),
        "greedy choice": (sample.greedy, scores),
        "draw": (sample.draw, keys, jnp.zeros((), jnp.int32), scores),
    }


def _compiled(function: Callable, *arguments: jax.Array) -> Callable[[], jax.Array]:
    return partial(jax.jit(function).lower(*arguments).compile(), *arguments)


def _measure(calls: dict[str, Callable[[], jax.Array]], turns: int, repeat: int) -> dict[str, float]:
    """Return the median microseconds of each call."""
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


def _decode_step(path: str, rows: int, steps: int = 32, turns: int = 5) -> float:
    """Return the microseconds of a step: of a run with so many more, and one without, the difference."""
    params, cfg = load_hf(path)
    ids = np.random.default_rng(0).integers(0, 1000, (rows, 32))
    cfg = GenerationConfig(model=cfg.model, pad_token_id=0)

    def seconds(new_tokens: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(generate(params, ids, None, cfg.replace(max_new_tokens=new_tokens)).sequences)
        return time.perf_counter() - start

    seconds(steps + 1)
    return statistics.median(seconds(steps + 1) - seconds(1) for _ in range(turns)) / steps * 1e6


def _print_table(columns: dict[int, dict[str, float]]) -> None:
    print("| | " + " | ".join(f"{rows} row{'s' * (rows > 1)}" for rows in columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name in next(iter(columns.values())):
        print(f"| {name} | " + " | ".join(f"{column[name]:.0f}" for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
