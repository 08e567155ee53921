"""Profile decode steps: report a step's slowest operations, its copies to the host, and its modeled time.

    python -m benchmarks profile --model DIR --mode qwen --form fused

Two runs of different lengths are profiled; their difference is decoding alone. The modeled step takes as long as
reading all weights and the cache at the measured bandwidth.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from benchmarks import measure
from benchmarks.modes import MODES
from benchmarks.probe import probe
from convert import load_hf
from jaxgen import GenerationConfig, arguments, fuse_projections, generate
from jaxgen.core.config.generation_config import model_of
from jaxgen.core.request.cache_memory import cache_bytes

_SHORT = 8  # new tokens in the run that is subtracted
_MOST = 10  # operations that are listed
_RUNS = 5


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation in a decode step: how often it runs per step, on average, and its total seconds per step."""

    name: str
    times: float
    seconds: float

    @property
    def to_host(self) -> bool:
        """True if the operation is a copy from the device to the host."""
        return "MemcpyD2H" in self.name


def operations(run: Callable[[int], object], short: int, long: int) -> list[Operation]:
    """Return the operations in a step, the longest first. `run(n)` generates n tokens and is already compiled."""
    times: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    for sign, new_tokens in ((-1, short), (1, long)):
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                run(new_tokens)
            (file,) = Path(directory).rglob("*.xplane.pb")
            for name, duration in _events(jax.profiler.ProfileData.from_file(str(file))):
                times[name] += sign
                seconds[name] += sign * duration
    steps = long - short
    found = [Operation(name, times[name] / steps, seconds[name] / steps) for name in times if times[name] > 0]
    return sorted(found, key=lambda one: -one.seconds)


def _events(profile: jax.profiler.ProfileData) -> Iterator[tuple[str, float]]:
    """Yield the name and seconds of every event on a GPU's streams, a TPU's core or the threads of XLA's CPU client."""
    for plane in profile.planes:
        for line in plane.lines:
            name = line.name or ""
            on_device = plane.name.startswith("/device:") and (name.startswith("Stream") or name == "XLA Ops")
            if on_device or (plane.name == "/host:CPU" and name.startswith("tf_XLAEigen")):
                for event in line.events:
                    if not event.name.startswith("ThunkExecutor"):  # this event contains the others
                        yield event.name, event.duration_ns / 1e9


def main() -> None:
    """Profile, and write the report."""
    args = _arguments()
    params, cfg = load_hf(args.model, quantize="int8" if args.form == "int8" else None)
    if args.form == "fused":
        params = fuse_projections(params, donate=True)
    model = model_of(cfg)
    cfg = GenerationConfig(model=model, eos_token_id=None, pad_token_id=0, **MODES[args.mode])
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (args.rows, args.prompt))
    key = jax.random.key(0) if cfg.do_sample else None

    def run(new_tokens: int) -> None:
        out = generate(params, ids, key, cfg.replace(max_new_tokens=new_tokens), attention_mask=np.ones_like(ids))
        jax.block_until_ready(out.sequences)

    for new_tokens in (_SHORT, args.new_tokens):
        run(new_tokens)
    step = measure.summary(_step(run, args.new_tokens) for _ in range(_RUNS))
    found = operations(run, _SHORT, args.new_tokens)

    looked_up = [] if model.tie_word_embeddings else jax.tree.leaves(params["model"]["embed_tokens"])
    nbytes = sum(x.nbytes for x in jax.tree.leaves(params)) - sum(x.nbytes for x in looked_up)
    nbytes += cache_bytes(model, args.rows, args.prompt + args.new_tokens // 2, cfg.cache_dtype)
    bandwidth = probe(-(-nbytes // 4096) * 4096)["bytes_per_second"]
    device = jax.devices()[0]
    name = f"{args.model.resolve().name}-{args.mode}-{args.rows}-{args.form}"
    copies = [one for one in found if one.to_host]
    lines = [
        f"# Profile of a decode step: {args.model.resolve().name}, {args.mode}",
        "",
        f"{args.rows} rows, {args.prompt} + {args.new_tokens} tokens, {args.form} weights, {device.device_kind}, jax "
        f"{jax.__version__}.",
        "",
        "| figure | value |",
        "|---|---|",
        f"| step, not profiled | {1e3 * step['median']:.3f} ms ({1e3 * step['min']:.3f}–{1e3 * step['max']:.3f}), "
        f"{args.rows / step['median']:,.1f} tokens/s |",
        f"| modeled: {nbytes / 1e6:,.0f} MB at {bandwidth / 1e9:,.0f} GB/s | {1e3 * nbytes / bandwidth:.3f} ms, "
        f"{args.rows * bandwidth / nbytes:,.1f} tokens/s |",
        f"| all operations, profiled | {1e3 * sum(one.seconds for one in found):.3f} ms |",
        f"| number of operations | {sum(one.times for one in found):.1f} |",
        f"| of these copies to the host | {sum(one.times for one in copies):.1f} |",
        "",
        "| operation | times per step | µs per step | of the step, % |",
        "|---|---:|---:|---:|",
        *(_row(one, step["median"]) for one in found[:_MOST]),
        "",
    ]
    text = "\n".join(lines)
    print(text)
    folder = measure.folder(args.results, None if device.platform == "cpu" else device.device_kind)
    (folder / f"profile-{name}.md").write_text(text, "utf-8")


def _row(one: Operation, step: float) -> str:
    return f"| {one.name[:100]} | {one.times:.1f} | {1e6 * one.seconds:.1f} | {100 * one.seconds / step:.1f} |"


def _step(run: Callable[[int], object], new_tokens: int) -> float:
    start = time.perf_counter()
    run(_SHORT)
    between = time.perf_counter()
    run(new_tokens)
    return (2 * between - start - time.perf_counter()) / (_SHORT - new_tokens)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks profile", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint directory")
    parser.add_argument("--mode", choices=MODES, default="greedy", help="how tokens are chosen")
    parser.add_argument("--form", choices=("plain", "fused", "int8"), default="plain", help="the form of the weights")
    parser.add_argument("--rows", type=arguments.count, default=1, help="prompts in the batch")
    parser.add_argument("--prompt", type=arguments.count, default=128, help="tokens in each prompt")
    parser.add_argument("--new-tokens", type=arguments.count, default=64, help=f"tokens in each answer, over {_SHORT}")
    parser.add_argument("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    args = parser.parse_args()
    if args.new_tokens <= _SHORT:
        parser.error(f"--new-tokens must be over {_SHORT}")
    return args


if __name__ == "__main__":
    main()
