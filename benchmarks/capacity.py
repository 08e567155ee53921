"""Measure decoding in caches of several capacities that are filled alike: a step should cost what is filled.

    python -m benchmarks.capacity --model DIR --capacity 256 32768

The programs take turns, and each is set against the first capacity's turn just before it. A turn is the difference
of a long and a short run of greedy steps in one cache, so that what is constant drops out.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from convert import load_hf
from jaxgen import KVCache
from jaxgen.model.causal_lm import forward


def main() -> None:
    args = _arguments()
    jax.config.update("jax_enable_compilation_cache", False)
    params, cfg = load_hf(args.model, dtype=args.dtype)
    ids = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (args.rows, args.filled), np.int32)
    caches = []
    for capacity in args.capacity:
        cache = KVCache.create(cfg.model, args.rows, capacity)
        out = jax.jit(functools.partial(forward, cfg.model, logits_to_keep=1))(params, ids, cache=cache)
        caches.append(out.cache)
    print(f"{args.rows} rows, {args.filled} slots filled, {args.steps} steps, {args.dtype}")

    run = jax.jit(functools.partial(_decode, cfg.model))
    begin = jnp.asarray(ids[:, -1:])

    def measure(cache: KVCache, steps: int) -> tuple[float, float]:
        start, busy = time.perf_counter(), time.process_time()
        jax.block_until_ready(run(params, begin, cache, steps))
        return time.perf_counter() - start, time.process_time() - busy

    speeds: list[list[float]] = [[] for _ in caches]
    work: list[list[float]] = [[] for _ in caches]
    for turn in range(args.repeat + 1):  # the first one compiles
        for index, cache in enumerate(caches):
            short, long = measure(cache, 1), measure(cache, 1 + args.steps)
            if turn:
                speeds[index].append(args.rows * args.steps / (long[0] - short[0]))
                work[index].append((long[1] - short[1]) / args.steps)
    for capacity, speed, busy in zip(args.capacity, speeds, work, strict=True):
        ratio = statistics.median(a / b for a, b in zip(speed, speeds[0], strict=True))
        print(
            f"{capacity:6d} slots: {statistics.median(speed):7.2f} tokens/s, {ratio:.2f} of the first; "
            f"{statistics.median(busy) * 1e3:.1f} ms of CPU time per step"
        )


def _decode(model, params, token: jax.Array, cache: KVCache, steps: jax.Array) -> jax.Array:
    """Choose `steps` tokens greedily after `token int32[B, 1]`; return the last."""

    def step(_, state: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        token, cache = state
        out = forward(model, params, token, cache=cache)
        return jnp.argmax(out.logits, axis=-1).astype(jnp.int32), out.cache

    return lax.fori_loop(0, steps, step, (token, cache))[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint directory")
    parser.add_argument("--capacity", type=int, nargs="+", default=[256, 4096, 32768], help="slots of the caches")
    parser.add_argument("--filled", type=int, default=160, help="tokens in each cache before the steps")
    parser.add_argument("--steps", type=int, default=40, help="decode steps of a turn")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeat", type=int, default=5, help="turns")
    args = parser.parse_args()
    if args.filled + args.steps + 1 > min(args.capacity):
        parser.error(f"--filled and --steps need more than {min(args.capacity)} slots, the smallest --capacity")
    return args


if __name__ == "__main__":
    main()
