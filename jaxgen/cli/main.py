"""The command: `jaxgen "PROMPT"`, `jaxgen --chat`, `jaxgen --input FILE`, `jaxgen train ...`."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence

from jaxgen.cli import distributed
from jaxgen.cli.arguments import BAD_INPUT, BROKEN_PIPE, FAILED, INTERRUPTED
from jaxgen.cli.options import parse
from jaxgen.cli.train_options import parse as parse_train
from jaxgen.errors import JaxgenError, JaxgenWarning

SHOWN_PROBLEMS = 3
PROBLEM_WIDTH = 240  # a truncated file would name all of its lost tensors


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0: done; 1: a failure of the machine, such as too little memory, or the loss of another process; 2: bad input;
    130: Ctrl-C; 141: stdout was closed.
    Each error and each warning is one line on stderr.
    """
    status = FAILED  # of an error that nobody expected
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        return status
    finally:
        if status != 0:
            distributed.leave(status)


def _run(argv: Sequence[str]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("always", JaxgenWarning)
        warnings.showwarning = _show_warning
        try:
            if argv[:1] == ["train"]:
                _train(argv[1:])
            elif (status := _answer(argv)) != 0:
                return status
            print(end="", flush=True)
            return 0
        except JaxgenError as error:
            _say("error", _shortened(error))
            return BAD_INPUT
        except BrokenPipeError:
            _discard_stdout()
            return BROKEN_PIPE
        except OSError as error:
            _say("error", error)
            _discard_stdout()
            return BAD_INPUT
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and type(error).__name__ != "JaxRuntimeError":  # without importing it
                raise
            _say("error", str(error) or "out of memory")
            return FAILED
        except KeyboardInterrupt:
            return INTERRUPTED


def _answer(argv: Sequence[str]) -> int:
    options = parse(argv)
    if distributed.wanted(options):
        if not distributed.is_child():
            return distributed.supervise(argv)
        distributed.join(options)
    from jaxgen.cli.answer import answer  # jax takes a second to import, and --help does not need it
    from jaxgen.cli.programs import keep_programs

    if options.compile_cache:
        keep_programs()
    stats = answer(options)
    if options.stats:
        for line in stats.lines():
            _say("stats", line)
    return 0


def _train(argv: Sequence[str]) -> None:
    options = parse_train(argv)
    from jaxgen.cli.train import train_and_save

    train_and_save(options)


def _shortened(error: JaxgenError) -> str:
    """Return the text of an error; of a `convert.CheckpointError` only the first problems."""
    problems = getattr(error, "problems", None)
    if problems is None:
        return str(error)
    shown = [textwrap.shorten(problem, PROBLEM_WIDTH, placeholder=" ...") for problem in problems[:SHOWN_PROBLEMS]]
    more = len(problems) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _say(kind: str, text: object) -> None:
    """Print one line on stderr."""
    print(f"jaxgen: {kind}:", *(line.strip() for line in str(text).splitlines()), file=sys.stderr)


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    _say("warning", message)


def _discard_stdout() -> None:
    """Redirect stdout to the null device, so that buffered text does not fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
