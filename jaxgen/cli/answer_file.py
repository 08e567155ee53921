"""The file of --output: it appears when it is complete, and a run that was interrupted continues it.

While the file `answers` is written, its directory contains:
  answers.partial       the answers so far, in the order of the prompts; locked while its writer runs
  answers.partial.run   the run that it belongs to: digests of prompts and model, options, batch sizes, devices

Does not import jax.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgen.cli import terminal
from jaxgen.errors import InputError

# Values of a run that change its answers by rounding alone: another value is accepted, with a warning in 16 bits.
_ROUNDING = ("--batch-size", "--device", "--mesh")
_EARLIER = "earlier"  # in a record: the values of `_ROUNDING` that the run had before


class AnswerFile:
    """An open file of answers.

    Attributes:
        done: the number of prompts whose answers were there when it was opened.
    """

    def __init__(self, stream: io.FileIO, name: Path, done: int):
        self.done = done
        self._stream, self._name = stream, name

    def write(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Append the answers to some prompts, a line for each.

        Raises:
            InputError: they cannot be written, for example because the disk is full; what was there is kept.
        """
        end = self._stream.tell()
        data = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers).encode()
        try:
            while data:
                data = data[self._stream.write(data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._stream.truncate(end)
            raise InputError(
                f"{self._name} cannot be written: {error.strerror}; the answers before are in it: repeat the command "
                "to continue it"
            ) from error


@contextlib.contextmanager
def answer_file(
    target: Path, run: Mapping[str, Any], *, prompts: int, copies: int, batch_size: int
) -> Iterator[AnswerFile]:
    """Open the file of answers to `prompts`, `copies` lines for each; it gets its name when the block ends.

    Args:
        target: the file to write.
        run: what the answers depend on; values are JSON. Those of `_ROUNDING` may change.
        prompts: the number of prompts.
        copies: the number of answers to each.
        batch_size: answers are kept in multiples of this many prompts, so that the batches of the whole run are the
            same as without an interruption.

    Raises:
        InputError: the file exists, cannot be written, is being written, or the partial file belongs to another run.
    """
    _refuse_existing(target)
    partial, record = _partial(target), _record(target)
    try:
        stream = io.FileIO(partial, "a+")
    except OSError as error:
        raise InputError(f"--output {target} cannot be written: {error.strerror}: {partial}") from error
    with stream:
        _lock(stream, partial)
        _refuse_existing(target)  # again: its writer may have just finished
        done, end = _complete(stream, prompts, copies, batch_size)
        earlier: list[dict[str, Any]] = []
        if os.fstat(stream.fileno()).st_size:
            earlier = _check_run(partial, record, run)
            changed = _changes(earlier, run)
            if changed and 0 < done < prompts and run.get("--dtype") in ("bfloat16", "float16"):
                rounded = f"in {run['--dtype']} this changes the rounding, so some answers may differ from"
                terminal.say("warning", f"{partial} was begun with {changed}: {rounded} those of an uninterrupted run")
        stream.truncate(end)
        stream.seek(end)
        try:
            if not done:
                _write_record(record, run)
            elif _changes(earlier[-1:], run):
                _write_record(record, {**run, _EARLIER: earlier})
            yield AnswerFile(stream, partial, done)
            os.fsync(stream.fileno())
            _refuse_existing(target)
            partial.rename(target)
            record.unlink()
            _unfinished(record).unlink(missing_ok=True)
        finally:
            if not os.fstat(stream.fileno()).st_size:  # nothing to continue
                partial.unlink(missing_ok=True)
                record.unlink(missing_ok=True)


def recorded(target: Path) -> Mapping[str, Any]:
    """Return the run of the partial file; empty if there is none."""
    try:
        run = json.loads(_record(target).read_bytes())
    except (OSError, ValueError):
        return {}
    return run if isinstance(run, dict) else {}


def _partial(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def _record(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial.run")


def _unfinished(record: Path) -> Path:
    return record.with_name(f"{record.name}.partial")


def _write_record(record: Path, run: Mapping[str, Any]) -> None:
    """Replace the record at once: a writer that is killed leaves the one that was there."""
    unfinished = _unfinished(record)
    unfinished.write_text(json.dumps(run), encoding="utf-8")
    unfinished.replace(record)


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise InputError(f"--output {target} exists: choose another name, or remove it")


def _lock(stream: io.FileIO, partial: Path) -> None:
    """Lock the partial file until it is closed; raise an error if another process has it or has removed it."""
    free = True
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free = False
    except OSError:  # some network file systems have no locks
        pass
    if not (free and partial.exists() and os.path.samestat(os.fstat(stream.fileno()), partial.stat())):
        raise InputError(f"{partial} is being written by another process: choose another --output")


def _complete(stream: io.FileIO, prompts: int, copies: int, batch_size: int) -> tuple[int, int]:
    """Return the number of prompts with all of their answers, in whole batches, and the bytes of these."""
    stream.seek(0)
    reader = io.BufferedReader(stream)
    lines = end = done = size = 0
    for line in reader:
        if not (line.startswith(b"{") and line.endswith(b"}\n")):  # torn
            break
        lines, end = lines + 1, end + len(line)
        if lines % copies == 0 and (lines // copies % batch_size == 0 or lines == prompts * copies):
            done, size = lines // copies, end
    reader.detach()  # it would close the file
    return done, size


def _check_run(partial: Path, record: Path, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Raise an error if the partial file belongs to another run; return the values of `_ROUNDING` that it has had."""
    advice = "repeat that command to continue it, or remove the file to start over"
    try:
        before = json.loads(record.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{partial} exists without {record.name}, which says what it is: remove it") from error
    now = json.loads(json.dumps(run))
    earlier = [*before.pop(_EARLIER, []), {name: before[name] for name in _ROUNDING if name in before}]
    other = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if refused := [name for name in other if name not in _ROUNDING]:
        raise InputError(f"{partial} is from a run with other values of {', '.join(refused)}: {advice}")
    return earlier


def _changes(earlier: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> str:
    """Return in words the earlier values that differ from the present ones."""
    found = [f"{name} {value}" for form in earlier for name, value in form.items() if value != run[name]]
    return ", ".join(dict.fromkeys(found))
