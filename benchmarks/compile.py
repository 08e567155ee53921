"""Compile `generate()` for a machine that is not available, with its compiler, and report on a decode step.

    python -m benchmarks compile --target h100 --config DIR --rows 1 --mode qwen
    python -m benchmarks compile --target v5e:2x2 --config DIR

This needs only the compiler: pip install "jax[tpu]", or for h100, the packages named in this folder's README. The rate
is modeled: all bytes move at the chip's published bandwidth, and each operation adds a fixed time.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from benchmarks import adapters, hlo, measure
from benchmarks.modes import MODES
from benchmarks.targets import CHIPS, FORMS, compile_generate, device_for
from jaxgen import GenerationConfig, ModelConfig, arguments
from jaxgen.core.config.generation_config import model_of
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.request.cache_memory import cache_bytes

_LARGE = 1_000_000  # bytes


def main() -> None:
    """Compile and print the report."""
    args = _arguments()
    model = ModelConfig.from_hf(json.loads((args.config / "config.json").read_text()))
    model = dataclasses.replace(model, dtype=args.dtype)
    cfg = GenerationConfig(
        **{"model": model, "max_new_tokens": args.new_tokens, "eos_token_id": 1, "pad_token_id": 0},
        **{"cache_dtype": args.cache_dtype, **MODES[args.mode]},
    )
    attach = None
    if args.adapters:
        cfg = cfg.replace(adapter=[row % args.adapters for row in range(args.rows)])
        attach = functools.partial(adapters.attach, count=args.adapters, rank=args.rank)
    start = time.perf_counter()
    compiled = compile_generate(cfg, device_for(args.target), args.rows, args.prompt, args.form, attach)
    text = report(args, cfg, compiled, time.perf_counter() - start)
    print(text)
    parts = [args.config.resolve().name, args.mode, str(args.rows), args.form, *filter(None, [args.cache_dtype])]
    parts += [f"{args.adapters}x{args.rank}"] * bool(args.adapters)
    file = f"compile-{'-'.join(parts)}.md"
    (measure.folder(args.results, args.target) / file).write_text(f"{text}\n", "utf-8")
    if args.hlo:
        args.hlo.write_text(compiled.as_text())


def report(args: argparse.Namespace, cfg: GenerationConfig, compiled, seconds: float) -> str:
    """Return a Markdown report of what a decode step does."""
    model, chip = model_of(cfg), CHIPS[args.target.partition(":")[0]]
    memory, program = compiled.memory_analysis(), compiled.as_text()
    step = hlo.decode_step(program, hlo.shortest_branch)
    count, most = hlo.count(step), hlo.count(hlo.decode_step(program))
    kinds = collections.Counter()
    for operation in step:
        kinds[operation.kind] += operation.times
    inner = sum(operation.times for operation in step if operation.times > 1)
    written = sum(operation.nbytes * operation.times for operation in step)
    large = sorted((o for o in step if o.nbytes >= _LARGE), key=lambda o: -o.nbytes)

    shapes = param_shapes(model)
    weights = sum(map(math.prod, shapes.values()))
    if not model.tie_word_embeddings:  # a step reads only a few rows of the embedding table
        weights -= math.prod(shapes["model.embed_tokens.weight"])
    rows = args.rows * max(cfg.num_beams, cfg.num_return_sequences)
    nbytes = 1 if args.form == "int8" else np.dtype(model.dtype).itemsize
    read = weights * nbytes + cache_bytes(model, rows, args.prompt + args.new_tokens // 2, cfg.cache_dtype)
    layers = [shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]
    read += args.adapters * args.rank * sum(map(sum, layers)) * np.dtype(model.dtype).itemsize
    moving, launching = (read + 2 * written) / chip.bandwidth, count * chip.launch
    lines = [
        f"## {args.config.resolve().name}, {args.mode}, {args.rows} rows, {args.prompt} + {args.new_tokens} tokens, "
        f"{model.dtype}, {args.form} weights, {f'{args.adapters} adapters of rank {args.rank}, ' * bool(args.adapters)}"
        f"{cfg.cache_dtype or model.dtype} cache, on {args.target}",
        "",
        "| figure | value |",
        "|---|---|",
        f"| compiled in | {seconds:.1f} s |",
        f"| memory: arguments, temporaries | {memory.argument_size_in_bytes / 1e6:.1f}, "
        f"{memory.temp_size_in_bytes / 1e6:.1f} MB |",
        f"| operations of a decode step, inner loops times their passes, the shortest branches | {count} |",
        f"| the same, all branches | {most} |",
        f"| of these in inner loops | {inner} |",
        f"| per layer | {count / model.num_hidden_layers:.1f} |",
        f"| kinds | {', '.join(f'{kind} {number}' for kind, number in kinds.most_common(8))} |",
        f"| collectives | {sum(o.times for o in step if o.is_collective)} |",
        f"| bytes written | {written / 1e6:.3f} MB |",
        f"| bytes of weights, adapters and cache, and twice those written | {(read + 2 * written) / 1e6:.0f} MB |",
        f"| of these results of more than {_LARGE / 1e6:.0f} MB | {sum(o.nbytes for o in large) / 1e6:.1f} MB |",
        *(f"| large result | {o.nbytes / 1e6:.2f} MB x {o.times}: {o.kind} for {o.name[-60:]} |" for o in large[:4]),
        f"| modeled step | {1e6 * moving:.0f} us for bytes + {1e6 * launching:.0f} us for operations: "
        f"{args.rows / (moving + launching):,.0f} tokens/s |",
        "",
        f"Chip: {chip.bandwidth / 1e9:.0f} GB/s ({chip.source}), {1e6 * chip.launch:.1f} us per operation (assumed). "
        f"jax {jax.__version__}.",
    ]
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compile", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--target", required=True, help="h100, or a TPU slice such as v5e:2x2; only one of its chips is used"
    )
    parser.add_argument("--config", type=Path, required=True, help="a directory with a config.json")
    parser.add_argument("--rows", type=arguments.count, default=1, help="prompts in the batch")
    parser.add_argument("--prompt", type=arguments.count, default=128, help="tokens in each prompt")
    parser.add_argument("--new-tokens", type=arguments.count, default=128, help="tokens in each answer")
    parser.add_argument("--mode", choices=MODES, default="greedy", help="how tokens are chosen")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--cache-dtype", choices=("int8",), help="by default that of the weights")
    parser.add_argument("--form", default="plain", choices=FORMS, help="the form of the weights")
    parser.add_argument("--adapters", type=int, default=0, help="adapters in the batch, for all linear layers")
    parser.add_argument("--rank", type=arguments.count, default=16, help="the rank of the adapters")
    parser.add_argument("--hlo", type=Path, help="write the optimized program to this file")
    parser.add_argument("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    args = parser.parse_args()
    if args.target.partition(":")[0] not in CHIPS:
        parser.error(f"--target must begin with one of {', '.join(CHIPS)}, got {args.target}")
    return args


if __name__ == "__main__":
    main()
