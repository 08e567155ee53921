"""Plan a sharded run without the TPU: compile the run with the TPU's own compiler, and report what it needs.

    python -m benchmarks scale --config DIR --target v5e:8x8 --mesh 4x16 --rows 64 --context 4096

This needs only the TPU's compiler: pip install "jax[tpu]". Memory and communication are those of the compiled program.
The rates are modeled, at the chip's published peaks: the time of a step is the time to read memory or to compute,
whichever is longer, plus the time to communicate. The rates are upper bounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import hlo, measure
from benchmarks.targets import CHIPS, Chip, compile_generate, mesh_for
from jaxgen import GenerationConfig, InputError, JaxgenError, ModelConfig, arguments
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.model.sharding import divide


def main() -> None:
    """Compile and print the plan."""
    args = _arguments()
    try:
        text = plan(args)
        print(text)
        file = f"scale-{args.config.resolve().name}-{args.mesh[0]}x{args.mesh[1]}-{args.rows}.md"
        (measure.folder(args.results, args.target) / file).write_text(f"{text}\n", "utf-8")
    except JaxgenError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")


def plan(args: argparse.Namespace) -> str:
    """Compile and return the plan as Markdown.

    Raises:
        JaxgenError: the model is not supported, cannot be divided in this way, or does not fit.
        OSError: there is no config.json.
    """
    model = dataclasses.replace(
        ModelConfig.from_hf(json.loads((args.config / "config.json").read_text())), dtype=args.dtype
    )
    name, _, topology = args.target.partition(":")
    data, parts = args.mesh
    if data * parts != math.prod(map(int, topology.split("x"))):
        raise InputError(f"--mesh {data}x{parts} needs {data * parts} chips, and {args.target} has another number")
    _divide(model, parts)
    chip = CHIPS[name]
    wanted = lower_bound(model, args, data, parts)
    if wanted > chip.memory:
        raise InputError(
            f"{args.target} as {data}x{parts} does not fit: weights and cache need {wanted / 1e9:.1f} GB per chip of "
            f"{chip.memory / 1e9:.0f}; {_smallest(model, args, name)}"
        )
    start = time.perf_counter()
    cfg = GenerationConfig(
        model=model, max_new_tokens=args.new_tokens, eos_token_id=1, pad_token_id=0, prefill_chunk_size=args.chunk
    )
    mesh = mesh_for(model, args.target, data, parts)
    compiled = compile_generate(cfg, mesh, args.rows, args.context - args.new_tokens)
    return report(model, args, chip, compiled, time.perf_counter() - start)


def _divide(model: ModelConfig, parts: int) -> None:
    """Raise an error if the model cannot be divided into this many parts."""
    divide(model, Mesh(np.array([jax.devices()[0]] * parts).reshape(1, parts), ("data", "model")))


def lower_bound(model: ModelConfig, args: argparse.Namespace, data: int, parts: int) -> float:
    """Return the bytes that the weights and the cache take on each chip."""
    rows = -(-args.rows // data)
    heads = max(1, model.num_key_value_heads // parts)
    cache = 2 * model.num_hidden_layers * rows * args.context * heads * model.head_dim
    return (_weights(model, parts) + cache) * jnp.dtype(model.dtype).itemsize


def _weights(model: ModelConfig, parts: int, chosen: float = 1.0) -> float:
    """Return the number of weights on each chip. Of the experts, only the share that is `chosen` counts."""
    heads = math.gcd(model.num_key_value_heads, parts)
    total = 0.0
    for name, shape in param_shapes(model).items():
        owners = heads if "k_proj" in name or "v_proj" in name else parts
        owners = 1 if "norm" in name or ".gate." in name else owners
        total += math.prod(shape) / owners * (chosen if ".experts." in name else 1)
    return total


def _smallest(model: ModelConfig, args: argparse.Namespace, name: str) -> str:
    """Return the end of an error message: the smallest slice of these chips that could hold weights and cache."""
    for topology in CHIPS[name].slices:
        count = math.prod(map(int, topology.split("x")))
        for parts in (size for size in range(1, count + 1) if count % size == 0):
            try:
                _divide(model, parts)
            except InputError:
                continue
            if lower_bound(model, args, count // parts, parts) < CHIPS[name].memory:
                return f"the smallest that would is {name}:{topology} as {count // parts}x{parts}"
    return f"no slice of {name} that this program knows would"


def report(model: ModelConfig, args: argparse.Namespace, chip: Chip, compiled, seconds: float) -> str:
    """Return the plan as Markdown."""
    data, parts = args.mesh
    chips, itemsize = data * parts, jnp.dtype(model.dtype).itemsize
    memory, program = compiled.memory_analysis(), compiled.as_text()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    step = [c for c in hlo.decode_step(program) if c.is_collective]
    moved = sum(_moved(c, parts) * c.times for c in step)
    passes = -(-(args.context - args.new_tokens) // args.chunk) if args.chunk else 1
    prefill_moved = sum(_moved(c, parts) * c.times for c in hlo.outside_of_decode(program, passes) if c.is_collective)

    # A step reads the experts that its rows choose, here evenly over the chips, and computes with `share` of them.
    share = (model.num_experts_per_tok or 1) / (model.num_experts or 1)
    weights, active = _weights(model, parts), _weights(model, parts, share)
    unread = (weights - _weights(model, parts, min(1.0, args.rows // data * share))) * itemsize
    read = lower_bound(model, args, data, parts) - unread
    rows, tokens = -(-args.rows // data), args.context - args.new_tokens
    attention = 4 * model.num_hidden_layers * model.num_attention_heads // parts * model.head_dim
    times = {
        "reading weights and cache": read / chip.bandwidth,
        "computing": (2 * active + attention * args.context) * rows / chip.flops,
    }
    decode = max(times.values()) + moved / chip.link
    prefill_times = {
        "reading weights": weights * itemsize / chip.bandwidth,
        "computing": rows * tokens * (2 * active + attention * tokens / 2) / chip.flops,
    }
    prefill = max(prefill_times.values()) + prefill_moved / chip.link
    counts = {}
    for c in step:
        counts[c.kind] = counts.get(c.kind, 0) + c.times
    lines = [
        f"## {args.config.resolve().name} on {args.target}, data x model = {data}x{parts}, {args.rows} rows of "
        f"{args.context} tokens, {model.dtype}",
        "",
        "| figure | value |",
        "|---|---|",
        f"| memory per chip: arguments + results + temporaries | {memory.argument_size_in_bytes / 1e9:.2f} + "
        f"{memory.output_size_in_bytes / 1e9:.2f} + {memory.temp_size_in_bytes / 1e9:.2f} = {used / 1e9:.2f} GB of "
        f"{chip.memory / 1e9:.0f} |",
        f"| collectives of a decode step | {', '.join(f'{n} {kind}' for kind, n in counts.items())} |",
        f"| of these with a row's hidden state or more | "
        f"{sum(c.times for c in step if _elements(c) >= rows * model.hidden_size)} |",
        f"| bytes sent by a chip in a decode step | {moved / 1e6:.3f} MB |",
        f"| modeled decode step | {1e3 * decode:.2f} ms: {args.rows / decode:,.0f} tokens/s; "
        f"{_longest(times, moved / chip.link)} binds |",
        f"| modeled prefill | {1e3 * prefill:,.0f} ms: {args.rows * tokens / prefill:,.0f} tokens/s; "
        f"{_longest(prefill_times, prefill_moved / chip.link)} binds |",
        f"| compiled in | {seconds:.0f} s |",
        "",
        f"Chip: {chip.flops / 1e12:.0f} TFLOP/s, {chip.bandwidth / 1e9:.0f} GB/s, links {chip.link / 1e9:.0f} GB/s "
        f"({chip.source}). jax {jax.__version__}, {chips} chips.",
    ]
    return "\n".join(lines)


def _longest(times: dict[str, float], communication: float) -> str:
    times = times | {"communication": communication}
    return max(times, key=times.__getitem__)


def _elements(collective: hlo.Operation) -> int:
    return max((math.prod(dims) for dims in collective.dims), default=0)


def _moved(collective: hlo.Operation, parts: int) -> float:
    """Return the bytes a chip sends for a ring collective. Only tiny collectives use an axis other than `model`."""
    factor = 2 if collective.kind == "all-reduce" else 1
    return factor * collective.nbytes * (parts - 1) / parts


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks scale", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    targets = [
        f"{name}:{topology}"
        for name, topology in itertools.chain(*([(n, t) for t in c.slices] for n, c in CHIPS.items()))
    ]
    parser.add_argument("--config", type=Path, required=True, help="a directory with a config.json")
    parser.add_argument("--target", choices=targets, metavar="CHIP:TOPOLOGY", required=True, help="such as v5e:8x8")
    parser.add_argument("--mesh", type=arguments.mesh, metavar="DATAxMODEL", required=True, help="such as 4x16")
    parser.add_argument("--rows", type=arguments.count, default=8, help="prompts in the batch")
    parser.add_argument("--context", type=arguments.count, default=4096, help="tokens in prompt and answer together")
    parser.add_argument("--new-tokens", type=arguments.count, default=128, help="tokens in the answer")
    parser.add_argument("--chunk", type=arguments.count, help="prefill_chunk_size")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    args = parser.parse_args()
    if args.new_tokens >= args.context:
        parser.error("--new-tokens must be less than --context")
    return args


if __name__ == "__main__":
    main()
