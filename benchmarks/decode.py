"""Measure loading, prefill and decode of a checkpoint, alone or in turn with transformers.

    python -m benchmarks.decode --model DIR --peer /path/to/python-with-torch --out result.json

One turn of a program times three lengths: one new token (the prefill), a short run and a long one. The
difference of the last two is decoding alone. With a peer the programs take turns, A B A B, and each turn of
jaxgen is set against the peer's that follows it: what slows the machine for a while slows both.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np

from convert import load_hf
from jaxgen import GenerationConfig, generate

SAMPLE = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
PAUSE = 0.5  # seconds between turns, for the threads of the other program to fall asleep
SETTINGS = ("dtype", "rows", "prompt", "new_tokens", "short", "repeat", "mode")
COMPILED = "/jax/core/compile/backend_compile_duration"


class Jaxgen:
    """This program's side: the checkpoint, loaded, and the prompts."""

    def __init__(self, path: Path, dtype: str, mode: str, ids: np.ndarray):
        self.import_peak_bytes = peak_memory()
        start = time.perf_counter()
        self.params, cfg = load_hf(path, dtype=dtype)
        jax.block_until_ready(self.params)
        self.load_seconds = time.perf_counter() - start
        self.load_peak_bytes = peak_memory()
        self.cfg = GenerationConfig(model=cfg.model, **generation_options(mode))
        self.key = jax.random.key(0) if mode == "sample" else None
        self.ids = ids
        self.mask = np.ones_like(ids)
        self.slots = 0

    def measure(self, new_tokens: int) -> tuple[float, np.ndarray]:
        """Return the seconds that `new_tokens` per row take, and the tokens."""
        cfg = self.cfg.replace(max_new_tokens=new_tokens)
        start = time.perf_counter()
        out = jax.block_until_ready(generate(self.params, self.ids, self.key, cfg, attention_mask=self.mask))
        seconds = time.perf_counter() - start
        self.slots = out.cache.slots
        return seconds, np.asarray(out.sequences)[:, self.ids.shape[1] :]

    def facts(self) -> dict[str, Any]:
        """Return versions, load time and peaks of memory."""
        modules = {"jax": jax, "jaxlib": jaxlib, "flax": flax, "numpy": np}
        return {
            "versions": {"python": platform.python_version()}
            | {name: module.__version__ for name, module in modules.items()},
            "device": jax.devices()[0].device_kind,
            "load_seconds": self.load_seconds,
            "import_peak_bytes": self.import_peak_bytes,
            "load_peak_bytes": self.load_peak_bytes,
            "peak_bytes": peak_memory(),
            "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        }

    def step_bytes(self) -> int:
        """Return the bytes of weights that a decode step reads: an embedding only looked up does not count."""
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        tied = "lm_head" not in self.params
        return total - (0 if tied else self.params["model"]["embed_tokens"]["weight"].nbytes)


class Peer:
    """transformers in a process of its own, which waits while it is not asked."""

    def __init__(self, python: str, path: Path, dtype: str, mode: str, ids: np.ndarray, compiled: bool):
        script = Path(__file__).with_name("transformers_peer.py")
        self.process = subprocess.Popen([python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        setup = {
            "model": str(path.resolve()),
            "dtype": dtype,
            "device": "cuda" if jax.default_backend() == "gpu" else "cpu",
            "compile": compiled,
            "generation": generation_options(mode),
            "ids": ids.tolist(),
        }
        self.hello = self._ask(json.dumps(setup))
        self.peaks: dict[str, Any] = {}

    def measure(self, new_tokens: int) -> tuple[float, np.ndarray]:
        """Return the seconds that `new_tokens` per row take, and the tokens."""
        answer = self._ask(str(new_tokens))
        self.peaks = {name: answer[name] for name in ("peak_bytes", "device_peak_bytes")}
        return answer["seconds"], np.array(answer["tokens"])

    def facts(self) -> dict[str, Any]:
        """Return versions, load time and peaks of memory."""
        return self.hello | self.peaks

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(line, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise SystemExit(f"the peer ended with status {self.process.wait()}; its messages are above")
        return json.loads(answer)


Measure = Callable[[int], tuple[float, np.ndarray]]


def main() -> None:
    args = _arguments()
    if args.peer:  # two programs share the accelerator, and each would take most of its memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.45")
    jax.config.update("jax_enable_compilation_cache", False)  # the first call is to be a cold one
    if args.compile and jax.default_backend() != "gpu":
        raise SystemExit(f"--compile is for a peer on CUDA, and jax runs on {jax.default_backend()}")
    _read_files(args.model)
    result = _measure(args)
    _report(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load, warm up, take turns, and return all that is to be known about it."""
    load_average = os.getloadavg()
    vocabulary = json.loads((args.model / "config.json").read_text("utf-8"))["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocabulary, (args.rows, args.prompt), np.int32)
    ours = Jaxgen(args.model, args.dtype, args.mode, ids)
    first = _warm_up(ours.measure, args)
    _check_slots(ours, args)
    peer, peer_first = None, 0.0
    if args.peer:
        peer = Peer(args.peer, args.model, args.dtype, args.mode, ids, args.compile)
        peer_first = _warm_up(peer.measure, args)

    turns: list[dict[str, float]] = []
    peer_turns: list[dict[str, float]] = []
    with _no_compilation():
        for _ in range(args.repeat):
            turns.append(_turn(ours.measure, args))
            if peer:
                peer_turns.append(_turn(peer.measure, args))

    step_bytes = ours.step_bytes()
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average": load_average,
        "settings": {name: getattr(args, name) for name in SETTINGS} | generation_options(args.mode),
        "model": {"name": args.model.resolve().name, "weight_bytes_per_step": step_bytes},
        "jaxgen": ours.facts() | _speeds(turns, first, args, step_bytes),
    }
    if peer:
        result["peer"] = peer.facts() | _speeds(peer_turns, peer_first, args, step_bytes)
        result["ratios"] = _ratios(result["jaxgen"], result["peer"])
        if args.mode == "greedy":
            result["equal_leading_tokens"] = _agreement(ours.measure, peer.measure, args)
        peer.close()
    return result


def generation_options(mode: str) -> dict[str, Any]:
    """Return the options that both programs generate with; no eos id, so that nothing ends early."""
    return {"eos_token_id": None, "pad_token_id": 0, **(SAMPLE if mode == "sample" else {"do_sample": False})}


def machine() -> dict[str, Any]:
    """Return what the figures belong to."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    return {
        "cpu": name[1] if name else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


def peak_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint directory")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rows", type=int, default=1, help="prompts in the batch")
    parser.add_argument("--prompt", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="new tokens of the long run")
    parser.add_argument("--short", type=int, help="new tokens of the short run, by default half of it")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each program")
    parser.add_argument("--mode", default="greedy", choices=("greedy", "sample"))
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter with torch and transformers")
    parser.add_argument("--compile", action="store_true", help="static cache and torch.compile for the peer")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    args.short = args.short or args.new_tokens // 2
    if not 1 <= args.short < args.new_tokens:
        parser.error("--short must be at least 1 and less than --new-tokens")
    if min(args.rows, args.prompt, args.repeat) < 1:
        parser.error("--rows, --prompt and --repeat must be at least 1")
    if args.compile and not args.peer:
        parser.error("--compile is for the peer: give --peer")
    return args


def _read_files(path: Path) -> None:
    """Bring the files into the operating system's cache, so that who loads first does not load slower."""
    for file in path.glob("*.safetensors"):
        with open(file, "rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def _warm_up(measure: Measure, args: argparse.Namespace) -> float:
    """Run all lengths once, the longest first, and return the seconds of the very first call."""
    first, tokens = measure(args.new_tokens)
    if tokens.shape != (args.rows, args.new_tokens):
        raise SystemExit(f"asked for {args.rows} x {args.new_tokens} new tokens, got {tokens.shape}")
    measure(args.short)
    measure(1)
    return first


def _check_slots(ours: Jaxgen, args: argparse.Namespace) -> None:
    """Refuse two lengths that run in caches of different size: their difference is not decoding alone."""
    slots = []
    for length in (args.short, args.new_tokens):
        ours.measure(length)
        slots.append(ours.slots)
    if slots[0] != slots[1]:
        raise SystemExit(
            f"{args.short} new tokens run in a cache of {slots[0]} slots and {args.new_tokens} in one of "
            f"{slots[1]}: choose --short nearer to --new-tokens"
        )


@contextlib.contextmanager
def _no_compilation() -> Iterator[None]:
    """Refuse figures with a compilation in them."""
    compilations: list[float] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == COMPILED:
            compilations.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield
    jax.monitoring.unregister_event_duration_listener(listen)
    if compilations:
        raise SystemExit(f"{len(compilations)} compilations while measuring: the figures mean nothing")


def _turn(measure: Measure, args: argparse.Namespace) -> dict[str, float]:
    time.sleep(PAUSE)
    measure(1)  # its threads and caches come back from the other program's turn
    lengths = {"first": 1, "short": args.short, "long": args.new_tokens}
    return {name: measure(length)[0] for name, length in lengths.items()}


def _speeds(
    turns: list[dict[str, float]], first_call: float, args: argparse.Namespace, step_bytes: int
) -> dict[str, Any]:
    steps = args.new_tokens - args.short
    decode = [turn["long"] - turn["short"] for turn in turns]
    if min(decode) <= 0:
        raise SystemExit("in a turn the long run took no longer than the short one: raise --new-tokens")
    tokens = [args.rows * steps / seconds for seconds in decode]
    first = statistics.median(turn["first"] for turn in turns)
    return {
        "turns": [turn | {"decode_tokens_per_second": speed} for turn, speed in zip(turns, tokens, strict=True)],
        "first_call_seconds": first_call,
        "compile_seconds": max(0.0, first_call - statistics.median(turn["long"] for turn in turns)),
        "first_token_seconds": first,
        "prefill_tokens_per_second": args.rows * args.prompt / first,
        "decode_tokens_per_second": statistics.median(tokens),
        "weights_gigabytes_per_second": statistics.median(tokens) / args.rows * step_bytes / 1e9,
    }


def _ratios(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Return how many times faster jaxgen is, pair by pair."""
    pairs = list(zip(ours["turns"], peer["turns"], strict=True))
    speed = "decode_tokens_per_second"
    ratios = {
        "prefill": [theirs["first"] / mine["first"] for mine, theirs in pairs],
        "decode": [mine[speed] / theirs[speed] for mine, theirs in pairs],
    }
    return {
        name: {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "pairs": values,
        }
        for name, values in ratios.items()
    }


def _agreement(ours: Measure, theirs: Measure, args: argparse.Namespace) -> list[int]:
    """Return how many leading tokens of each row the programs have in common."""
    equal = ours(args.new_tokens)[1] == theirs(args.new_tokens)[1]
    return np.cumprod(equal, axis=1).sum(axis=1).tolist()


_ROWS = (
    ("load, s", "load_seconds", 1),
    ("peak memory after import, MB", "import_peak_bytes", 1e-6),
    ("peak memory after load, MB", "load_peak_bytes", 1e-6),
    ("peak memory, MB", "peak_bytes", 1e-6),
    ("peak memory of the device, MB", "device_peak_bytes", 1e-6),
    ("first call, s", "first_call_seconds", 1),
    ("of that compilation, s", "compile_seconds", 1),
    ("time to first token, ms", "first_token_seconds", 1e3),
    ("prefill, tokens/s", "prefill_tokens_per_second", 1),
    ("decode, tokens/s", "decode_tokens_per_second", 1),
    ("weights read, GB/s", "weights_gigabytes_per_second", 1),
)


def _report(result: dict[str, Any]) -> None:
    settings, machine = result["settings"], result["machine"]
    print(
        f"{result['model']['name']}, {settings['dtype']}, {settings['mode']}: {settings['rows']} x "
        f"{settings['prompt']} tokens and {settings['short']} or {settings['new_tokens']} more; "
        f"{machine['cpu']}, {machine['cores']} cores"
    )
    sides = [side for side in ("jaxgen", "peer") if side in result]
    names = {"jaxgen": "jaxgen"}
    if "peer" in result:
        names["peer"] = f"transformers {result['peer']['versions']['transformers']}"
    print(f"{'':32}" + "".join(f"{names[side]:>22}" for side in sides))
    for label, name, scale in _ROWS:
        values = [result[side].get(name) for side in sides]
        if any(value is not None for value in values):
            cells = ["-" if value is None else f"{value * scale:.2f}" for value in values]
            print(f"{label:32}" + "".join(f"{cell:>22}" for cell in cells))
    for name, ratio in result.get("ratios", {}).items():
        print(f"{name}: jaxgen is {ratio['median']:.2f} x as fast ({ratio['min']:.2f} to {ratio['max']:.2f})")
    if "equal_leading_tokens" in result:
        print(f"equal leading tokens per row: {result['equal_leading_tokens']} of {settings['new_tokens']}")


if __name__ == "__main__":
    main()
