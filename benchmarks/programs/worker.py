"""The protocol of a program under test. This file runs in the program's own interpreter and needs only numpy.

Requests and answers are JSON objects, one per line, on stdin and stdout. A program first sends a hello when its imports
are done. It then answers requests for methods such as `load` and `run`, and sleeps between requests.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np


class Program:
    """A program under test; subclasses load a checkpoint and generate with it."""

    device_peak: int | None = None  # peak bytes on an accelerator

    def load(self, path: str, dtype: str, variant: str, mesh: list[int] | None) -> dict[str, Any]:
        """Load a checkpoint; return facts, including `step_bytes`, the bytes of weights that one row's step reads."""
        raise NotImplementedError

    def generate(self, ids: np.ndarray, new_tokens: int, room: int, options: dict[str, Any]) -> np.ndarray:
        """Return the `new_tokens` tokens that follow each row of `ids int32[B, P]`, as an array on the host.

        A cache of fixed size has `room` >= P + new_tokens cache slots per row. `options` are transformers' options.
        Rows must not end early: ignore the eos token. Raise `NotImplementedError` for an unsupported option.
        """
        raise NotImplementedError

    def train(self, ids: np.ndarray, rank: int) -> None:
        """Take an AdamW step on low-rank updates of all projections, training on the texts `ids int32[B, P]`."""
        raise NotImplementedError("no training step")

    def compiled(self) -> int:
        """Return the number of compilations so far."""
        return 0

    def run(self, ids: list[list[int]], new_tokens: int, room: int, options: dict[str, Any]) -> dict[str, Any]:
        """Generate, or take a training step if the option `lora` is set; return seconds, tokens and compilations."""
        prompts, compiled = np.array(ids, np.int32), self.compiled()
        start = time.perf_counter()
        if "lora" in options:
            self.train(prompts, options["lora"])
            tokens = prompts[:, :1]  # placeholders for generated tokens
        else:
            tokens = self.generate(prompts, new_tokens, room, options)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": tokens.tolist(), "compilations": self.compiled() - compiled}


def serve(program: Program, versions: dict[str, str]) -> None:
    """Answer the requests on stdin until it is closed."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep the output of libraries out of the answers
    versions = {"python": sys.version.split()[0], "numpy": np.__version__} | versions
    print(json.dumps({"versions": versions, "peak_bytes": peak_memory()}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(program, request.pop("do"))(**request)
        except NotImplementedError as error:
            answer = {"refused": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        memory = {"peak_bytes": peak_memory(), "device_peak_bytes": program.device_peak}
        print(json.dumps(answer | memory), file=answers)


def cores() -> int:
    """Return the number of cores that the process may use."""
    return len(os.sched_getaffinity(0))


def peak_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0
