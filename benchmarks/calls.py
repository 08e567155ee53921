"""Count the files and functions of jaxgen that one call of `generate()` uses, and the Python calls that it makes.

    python -m benchmarks calls
    python -m benchmarks calls --mode qwen --list

The first call traces the program; the next one runs the compiled program. Lambdas and generators count as functions.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import os
from collections.abc import Callable

import jax
import numpy as np

import jaxgen
from benchmarks.modes import MODES
from convert import load_hf
from jaxgen import demo, generate

ROOT = os.path.dirname(jaxgen.__file__) + os.sep

_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")

Function = tuple[str, str]  # file and qualified name


def main() -> None:
    """Count calls and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks calls", description=__doc__.partition("\n")[0])
    parser.add_argument("--mode", choices=MODES, default="greedy")
    parser.add_argument("--list", action="store_true", help="also print the functions, by file")
    args = parser.parse_args()
    first, next_one = count_calls(args.mode)
    print("| call | files | functions | calls |\n|---|---|---|---|")
    for name, counted in (("first, which traces", first), ("next", next_one)):
        print(f"| {name} | {len({file for file, _ in counted})} | {len(counted)} | {counted.total()} |")
    if args.list:
        for (file, function), count in sorted(first.items()):
            print(f"{file} {function} {count}")


def count_calls(mode: str) -> tuple[collections.Counter[Function], collections.Counter[Function]]:
    """Return how often each function runs in the first and in the second call with the bundled model."""
    params, cfg = load_hf(demo.PATH)
    cfg = cfg.replace(max_new_tokens=8, **{"do_sample": False} | MODES[mode])
    ids = np.array([[5, 6, 7, 8]], np.int32)
    key = jax.random.key(0) if cfg.on("do_sample") else None

    def call() -> None:
        generate(params, ids, key, cfg, attention_mask=np.ones_like(ids))

    return counted(call), counted(call)


def counted(call: Callable[[], None]) -> collections.Counter[Function]:
    """Return how often each jaxgen function runs during `call`, including lambdas and generators."""
    profile = cProfile.Profile(subcalls=False, builtins=False)
    profile.runcall(call)
    found: collections.Counter[Function] = collections.Counter()
    for entry in profile.getstats():
        code = entry.code
        # Before Python 3.12, comprehensions are functions too; they are not counted.
        if isinstance(code, str) or code.co_name in _COMPREHENSIONS or not code.co_filename.startswith(ROOT):
            continue
        file = code.co_filename.removeprefix(ROOT)
        found[file, f"{code.co_qualname}:{code.co_firstlineno}"] += entry.callcount
    return found


if __name__ == "__main__":
    main()
