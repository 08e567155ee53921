"""The `jaxgen` command: a prompt, `--chat` or `--input FILE`, or one of `serve`, `run-batch` and `train`."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from jaxgen.arguments import BAD_INPUT, BROKEN_PIPE, FAILED, INTERRUPTED
from jaxgen.cli import distributed, terminal
from jaxgen.cli.options import in_flags, parse
from jaxgen.cli.run_batch_options import parse as parse_run_batch
from jaxgen.cli.serve_options import parse as parse_serve
from jaxgen.cli.train_options import parse as parse_train
from jaxgen.errors import GenerationError, JaxgenError, JaxgenWarning, one_line
from jaxgen.progress import COMPILING

SHOWN_PROBLEMS = 3  # a message about a truncated file lists every missing tensor
_IN_A_LINE = re.compile(r"--input .+, line \d+: ")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    The status is 0 for success, 2 for bad input, 130 for Ctrl-C, and 141 if stdout is closed. The status is 1 for
    failures at run time, such as too little memory, a lost process, or an answer that could not be completed. Each
    error or warning is one line on stderr.
    """
    argv = sys.argv[1:] if argv is None else argv
    with warnings.catch_warnings():
        warnings.simplefilter("once", JaxgenWarning)  # each batch may cause the same warning
        warnings.showwarning = lambda message, *_: terminal.say("warning", _named(str(message)))
        try:
            with contextlib.suppress(SystemExit), _log(argv):  # --help and --version raise SystemExit
                if argv[:1] == ["train"]:
                    _train(argv[1:])
                elif argv[:1] == ["serve"]:
                    _serve(argv[1:])
                elif (status := _run_batch(argv[1:]) if argv[:1] == ["run-batch"] else _answer(argv)) != 0:
                    return status
            print(end="", flush=True)
            return 0
        except (JaxgenError, OSError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
            status = _explained(error)
            if "--debug" in argv:
                traceback.print_exc()
            if distributed.is_joined():
                sys.stdout.flush()
                os._exit(status)  # jax would otherwise wait five minutes for the other processes
            return status


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, with its traceback if there is one."""
        terminal.write(f"jaxgen: {record.levelname.lower()}: {self.format(record)}")


class _LongCompilations(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless there is a status, which already shows that the command is waiting."""
        if not terminal.is_shown():
            terminal.write(self.format(record))


@contextlib.contextmanager
def _log(argv: Sequence[str]) -> Iterator[None]:
    """While the block runs, print reports of long compilations and, with --debug, all other records from INFO on."""
    logger, handler, reports = logging.getLogger("jaxgen"), _Lines(), _LongCompilations()
    level = logger.level
    if "--debug" in argv:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    COMPILING.addHandler(reports)
    COMPILING.propagate = False
    try:
        yield
    finally:
        COMPILING.propagate = True
        COMPILING.removeHandler(reports)
        logger.removeHandler(handler)
        logger.setLevel(level)


def _explained(error: BaseException) -> int:
    """Print what went wrong and return the exit status; re-raise unexpected errors."""
    match error:
        case JaxgenError():
            terminal.say("error", _shortened(error))
            return FAILED if isinstance(error, GenerationError) else BAD_INPUT
        case BrokenPipeError():
            _discard_stdout()
            return BROKEN_PIPE
        case OSError():
            name = f"{error.filename}: " if error.filename else ""
            terminal.say("error", one_line(f"{name}{error.strerror or error}"))
            _discard_stdout()
            return BAD_INPUT
        case KeyboardInterrupt():
            return INTERRUPTED
        case _ if isinstance(error, MemoryError) or type(error).__name__ == "JaxRuntimeError":  # without importing jax
            advice = f" (if {distributed.LOST})" if distributed.is_joined() else ""
            terminal.say("error", (str(error) or "out of memory") + advice)
            return FAILED
    raise error


def _answer(argv: Sequence[str]) -> int:
    options = parse(argv)
    has_others = distributed.wanted(options)
    if has_others and (status := distributed.supervise()) is not None:
        return status
    with terminal.ticking("starting"):  # after the fork in `supervise`, because it starts a thread
        if has_others:
            distributed.join(options)
        from jaxgen.cli.answer import answer  # --help does not need jax, and importing jax takes a second

        with _device(options):
            stats = answer(options)
    if options.stats:
        for line in stats.lines():
            terminal.say("stats", line)
    if stats.failed:
        answers = "1 answer" if stats.failed == 1 else f"{stats.failed:,} answers"
        terminal.say("error", f"{answers} could not be completed: see the field error")
    return FAILED if stats.failed else 0


def _train(argv: Sequence[str]) -> None:
    options = parse_train(argv)
    with terminal.ticking("starting"):
        from jaxgen.cli.train import train_and_save

        with _device(options):
            train_and_save(options)


def _serve(argv: Sequence[str]) -> None:
    options = parse_serve(argv)
    with terminal.ticking("starting"):
        from jaxgen.cli.serve import serve

        with _device(options):
            serve(options)


def _run_batch(argv: Sequence[str]) -> int:
    options = parse_run_batch(argv)
    with terminal.ticking("starting"):
        from jaxgen.cli.run_batch import run_batch

        with _device(options):
            failed = run_batch(options)
    if failed:
        requests = "1 request" if failed == 1 else f"{failed:,} requests"
        terminal.say("error", f"{requests} could not be answered: see the field response")
    return FAILED if failed else 0


@contextlib.contextmanager
def _device(options: Any) -> Iterator[None]:
    """Use the chosen device, and the compile cache if it is enabled; all modules must be imported first."""
    from jaxgen.cli.device import use_device
    from jaxgen.compile_cache import enable_cache

    if not gc.isenabled():  # `__main__` disabled it
        gc.freeze()  # exempts the modules imported so far from garbage collection
        gc.enable()
    if getattr(options, "compile_cache", False):
        enable_cache()
    with use_device(options.device):
        yield


def _shortened(error: JaxgenError) -> str:
    """Return the text of an error; for a `convert.CheckpointError`, only the first few problems."""
    problems = getattr(error, "problems", None)
    if problems is None:
        return _named(str(error))
    more = len(problems) - SHOWN_PROBLEMS
    return "; ".join(problems[:SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _named(text: str) -> str:
    """Return a message with flags instead of names of options, unless it is about a file, which contains names."""
    return text if "config.json" in text or _IN_A_LINE.match(text) else in_flags(text)


def _discard_stdout() -> None:
    """Redirect stdout to the null device, so that flushing buffered text at exit does not fail again."""
    if sys.stdout is None:
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
