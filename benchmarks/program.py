"""Programs under test. Each is a process with its own interpreter, and sleeps between requests."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FLOATS = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of program: its file, environment, variants and dtypes. The first variant and dtype are the defaults."""

    file: str
    environment: str | None  # its directory, named after the package; None for this interpreter
    variants: tuple[str, ...] = ("",)
    dtypes: tuple[str, ...] = FLOATS


KINDS = {
    "jaxgen": Kind("jaxgen_program.py", None, ("", "fused", "int8", "int4")),
    "transformers": Kind(
        "transformers_program.py", "transformers", ("eager", "static", "compile", "grouped_mm", "batched_mm")
    ),
    "llama.cpp": Kind("llama_cpp_program.py", "llama_cpp", dtypes=("bfloat16", "q8_0", "q4_0")),
    "keras-hub": Kind("keras_hub_program.py", "keras_hub"),
}
SPOKEN = {"int8": "8-bit", "int4": "4-bit", "static": "static cache", "compile": "torch.compile"}


@dataclasses.dataclass(frozen=True)
class Spec:
    """A program as named on the command line: its kind, its variant and the dtype of its weights."""

    kind: str
    variant: str
    dtype: str

    @property
    def name(self) -> str:
        return ":".join(filter(None, (self.kind, self.variant, self.dtype)))

    @property
    def spoken(self) -> str:
        """A readable name that leaves out defaults: "jaxgen, 8-bit", "llama.cpp q8_0"."""
        dtype = "" if self.dtype == KINDS[self.kind].dtypes[0] else f" {self.dtype}"
        variant = "" if self.variant == KINDS[self.kind].variants[0] else f", {SPOKEN.get(self.variant, self.variant)}"
        return f"{self.kind}{dtype}{variant}"


def spec(text: str) -> Spec:
    """Parse a program such as `jaxgen`, `transformers:static:float32` or `llama.cpp:q8_0`."""
    kind, *words = text.split(":")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{kind!r} is not one of {', '.join(KINDS)}")
    chosen = {"variant": KINDS[kind].variants[0], "dtype": KINDS[kind].dtypes[0]}
    for word in words:
        if word not in KINDS[kind].variants + KINDS[kind].dtypes:
            allowed = [name for name in KINDS[kind].variants + KINDS[kind].dtypes if name]
            raise argparse.ArgumentTypeError(f"{text!r}: {word!r} is not one of {', '.join(allowed)}")
        chosen["variant" if word in KINDS[kind].variants else "dtype"] = word
    return Spec(kind, **chosen)


class Failed(Exception):
    """Raised if a program fails, or if its results or times are not valid."""


class Program:
    """A program under test, as a context manager that ends its process on exit."""

    def __init__(
        self,
        spec: Spec,
        environments: Path | None,
        mesh: tuple[int, int] | None,
        device: str | None,
        kind: Kind | None = None,
    ):
        self.spec, self.name = spec, spec.name
        own, kind = kind, kind or KINDS[spec.kind]
        self.command = [_interpreter(kind, environments), str(Path(__file__).parent / "programs" / kind.file)]
        if own is not None:
            self.command.append(spec.kind)
        self.mesh = mesh if spec.kind == "jaxgen" else None
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if self.mesh:
            self.environment["JAX_NUM_CPU_DEVICES"] = str(mesh[0] * mesh[1])
        if device == "cpu":
            self.environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self.process: subprocess.Popen[str] | None = None
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self, model: Path, **environment: str) -> None:
        """Start the process and load the checkpoint, unless this has been done already. Can raise `Failed`."""
        if self.process is not None:
            return
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | self.environment | environment,
        )
        try:
            hello = self._answer()
            started = time.perf_counter() - begin
            loaded = self.ask("load", path=str(model.resolve()), dtype=self.spec.dtype, variant=self.spec.variant,
                              mesh=self.mesh)  # fmt: skip
            if "refused" in loaded:
                raise Failed(loaded["refused"])
        except Failed:
            self.stop()
            raise
        self.facts = {
            "versions": hello["versions"],
            "start_seconds": started,
            "load_seconds": loaded.pop("seconds"),
            "import_peak_bytes": hello["peak_bytes"],
            "load_peak_bytes": loaded.pop("peak_bytes"),
        } | loaded

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer. Raise `Failed` if the program fails or has ended."""
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_answer` reports that the process has ended
            self.process.stdin.write(json.dumps({"do": do} | request) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.stop()
            raise Failed(f"it ended with status {status}; its messages are above")
        answer = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process so far."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()
            self.process = None


def _interpreter(kind: Kind, environments: Path | None) -> str:
    if kind.environment is None or (environments is None and find_spec(kind.environment)):
        return sys.executable
    if environments is None:
        raise SystemExit(f"{kind.environment} is not installed here: give --environments DIR")
    python = environments / kind.environment / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} does not exist: run python -m benchmarks environments {environments}")
    return str(python)
