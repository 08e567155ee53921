"""Measure how much each workaround for XLA's CPU compiler gains, by running a program with and without it, in turn.

    python -m benchmarks workarounds --model random-0.5b

Run this with each new release of jax. If a workaround gains nothing with that release, and nothing with the oldest
supported release, remove it. The workarounds for the GPU compiler are tested in tests/test_compilers.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jaxlib
import numpy as np

from benchmarks import hlo, measure
from convert import load_hf
from jaxgen import GenerationConfig
from jaxgen.core.config.generation_config import model_of
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.modes import mode_of
from jaxgen.core.model import cache_storage, workarounds
from jaxgen.core.request.driver import run_whole
from jaxgen.core.request.prepare import CallInputs, Prepared, prepare

_PROMPT, _FEW, _MORE = 128, 1, 17  # tokens
_MB = 1e6

Changes = tuple[tuple[Any, str, Any], ...]  # the object, the attribute name and the replacement of each function


def _same(x: Any) -> Any:
    return x


def _plain_sum(x: jax.Array, axis: int, initial: float) -> jax.Array:
    del initial
    return x.sum(axis)


def _in_the_open(function: Callable, *arguments: Any) -> Any:
    return function(*arguments)


@dataclasses.dataclass(frozen=True)
class Workaround:
    """A workaround for XLA's CPU compiler.

    Attributes:
        name: a short description.
        without: replacements that turn the workaround off.
        rows, dtype, quantize, options: a case that needs the workaround.
        also: changes made to both programs, if another workaround would hide the effect of this one.
    """

    name: str
    without: Changes
    rows: int = 1
    dtype: str = "bfloat16"
    quantize: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    also: Changes = ()

    @property
    def case(self) -> str:
        """A description of the case."""
        options = [f"{name}={value}" for name, value in self.options]
        return ", ".join([f"{self.rows} row{'s' * (self.rows > 1)}", self.quantize or self.dtype, *options])


def _no_lanes(rows: int, columns: int) -> bool:
    return False


_BRANCH = (workarounds, "in_branch", _in_the_open)
_ROUNDED = (workarounds, "_lane_sum", _plain_sum)
_ZEROS = (workarounds, "_lane_sum", lambda x, axis, _, sum=workarounds._lane_sum: sum(x, axis, 0.0))
_LANES = (workarounds, "fits_lanes", _no_lanes)
_ORDER = (workarounds, "rounded", _same)
_NO_BARRIER = mock.Mock(wraps=jax.lax, optimization_barrier=_same)

WORKAROUNDS = (
    Workaround("vector lanes", (_LANES,)),
    Workaround("vector lanes", (_LANES,), quantize="int8"),
    Workaround("vector lanes", (_LANES,), options=(("num_beams", 2),)),
    Workaround("the lanes' branch", (_BRANCH,)),
    Workaround("the lanes' branch", (_BRANCH,), quantize="int8"),
    Workaround("rounding of the lanes' sums", (_ROUNDED,)),
    Workaround("rounding of the lanes' sums", (_ROUNDED,), quantize="int8"),
    Workaround("different zeros of the lanes' sums", (_ZEROS,)),
    Workaround("different zeros of the lanes' sums", (_ZEROS,), quantize="int8"),
    Workaround("two rows for one, without lanes", ((workarounds, "two_rows", _in_the_open),), also=(_LANES,)),
    Workaround("weights first, rounded", ((workarounds, "weight_first", _in_the_open),), rows=8),
    Workaround("weights first, rounded", ((workarounds, "weight_first", _in_the_open),), rows=8, dtype="float32"),
    Workaround("rounding of weights first", (_ORDER,), rows=8),
    Workaround("rounding of weights first", (_ORDER,), rows=8, dtype="float32"),
    Workaround("embeddings read in a branch", ((workarounds, "_look_up_in_branch", _in_the_open),)),
    Workaround("16-bit caches as whole numbers", ((cache_storage, "stored_dtype", np.dtype),)),
    Workaround("barrier around 8-bit products", ((workarounds, "lax", _NO_BARRIER),), rows=4, quantize="int8"),
    Workaround("8-bit weights converted in a branch", (_BRANCH,), rows=16, quantize="int8"),
    Workaround("barrier around top-k", ((workarounds, "lax", _NO_BARRIER),), options=(("num_beams", 4),)),
)


@dataclasses.dataclass
class Form:
    """A compiled program and its measurements."""

    program: Callable[[int], Any]
    compile_seconds: float
    maps: int
    temporaries: int
    stored: int
    seconds: list[float] = dataclasses.field(default_factory=list)

    def run(self) -> None:
        """Time a step."""
        times = []
        for new_tokens in (_FEW, _MORE):
            start = time.perf_counter()
            jax.block_until_ready(self.program(new_tokens))
            times.append(time.perf_counter() - start)
        self.seconds.append((times[1] - times[0]) / (_MORE - _FEW))

    @property
    def step(self) -> float:
        """The median seconds per step."""
        return statistics.median(self.seconds)


def main() -> None:
    args = _arguments()
    load, lines = os.getloadavg()[0], []
    for (dtype, quantize), group in _groups(args.only).items():
        params, cfg = load_hf(args.model, dtype=dtype, quantize=quantize)
        cfg = GenerationConfig(model=cfg.model, eos_token_id=None, pad_token_id=0, max_new_tokens=_MORE)
        for workaround in group:
            lines.append(_line(workaround, *_measure(workaround, params, cfg, args.turns)))
            print(lines[-1], flush=True)
        del params
    head = [
        f"# Workarounds with jax {jax.__version__} and jaxlib {jaxlib.__version__}",
        "",
        f"{measure.machine()['cpu']}, {measure.machine()['cores']} cores, load average {load:.1f} at the start. "
        f"`{args.model.name}`, {_PROMPT} tokens per prompt; a step is the median of {args.turns}.",
        "",
        "Each pair is the program with the workaround and without it: milliseconds per step of decoding, megabytes "
        "that the step stores (of conditionals, all branches), megabytes of temporaries, seconds to compile, and "
        "memory maps.",
        "",
        "| workaround | case | ms per step | stored | temporaries | compile | maps |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    file = measure.folder(args.results) / f"workarounds-jax-{jax.__version__}.md"
    file.write_text("\n".join([*head, *lines, ""]), "utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks workarounds", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", type=Path, required=True, help="a directory with a checkpoint")
    parser.add_argument("--turns", type=int, default=5, help="the number of turns")
    parser.add_argument("--only", default="", help="measure only workarounds whose names contain this text")
    parser.add_argument("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error("--turns must be at least 1")
    return args


def _groups(only: str) -> dict[tuple[str, str | None], list[Workaround]]:
    """Group the selected workarounds by the dtype and quantization of the weights."""
    groups: dict[tuple[str, str | None], list[Workaround]] = {}
    for workaround in WORKAROUNDS:
        if only in workaround.name:
            groups.setdefault((workaround.dtype, workaround.quantize), []).append(workaround)
    return groups


def _measure(workaround: Workaround, params: Any, cfg: GenerationConfig, turns: int) -> tuple[Form, Form]:
    """Return the programs with and without a workaround, after running them in turn."""
    cfg = cfg.replace(**dict(workaround.options))
    ids = np.random.default_rng(0).integers(0, model_of(cfg).vocab_size, (workaround.rows, _PROMPT))
    with_it, without = (
        _compile(changes, params, cfg, ids) for changes in (workaround.also, workaround.also + workaround.without)
    )
    for form in (with_it, without):
        jax.block_until_ready(form.program(_MORE))
    for turn in range(turns):
        for form in (with_it, without)[:: 1 - 2 * (turn % 2)]:
            form.run()
    return with_it, without


def _compile(changes: Changes, params: Any, cfg: GenerationConfig, ids: np.ndarray) -> Form:
    prepared = _prepare(params, cfg, ids)
    gc.collect()
    jax.clear_caches()  # otherwise, cached traces with other functions would be used
    maps, start = _maps(), time.perf_counter()
    compiled = lower(changes, prepared, cfg).compile()
    seconds = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    assert analysis is not None
    stored = sum(op.nbytes * op.times for op in hlo.decode_step(compiled.as_text()))

    def program(new_tokens: int) -> Any:
        budget = _prepare(params, cfg.replace(max_new_tokens=new_tokens), ids).request.budget
        return compiled(prepared.run, dataclasses.replace(prepared.request, budget=budget))

    return Form(program, seconds, _maps() - maps, analysis.temp_size_in_bytes, stored)


def _prepare(params: Any, cfg: GenerationConfig, ids: np.ndarray) -> Prepared:
    return prepare(params, cfg, CallInputs(ids, attention_mask=np.ones_like(ids)), Extensions(), eager=True)


def lower(changes: Changes, prepared: Prepared, cfg: GenerationConfig) -> jax.stages.Lowered:
    """Trace and lower a call's program while `changes` are in effect."""
    with contextlib.ExitStack() as stack:
        for place, name, replacement in changes:
            stack.enter_context(mock.patch.object(place, name, replacement))
        return run_whole.trace(prepared.run, prepared.request, mode=mode_of(cfg)).lower()


def _maps() -> int:
    with open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)


def _line(workaround: Workaround, *forms: Form) -> str:
    def pair(write: Callable[[Form], str]) -> str:
        return " / ".join(write(form) for form in forms)

    cells = [
        workaround.name,
        workaround.case,
        pair(lambda form: f"{form.step * 1e3:.1f}"),
        pair(lambda form: f"{form.stored / _MB:.1f}"),
        pair(lambda form: f"{form.temporaries / _MB:.0f}"),
        pair(lambda form: f"{form.compile_seconds:.1f}"),
        pair(lambda form: f"{form.maps}"),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
