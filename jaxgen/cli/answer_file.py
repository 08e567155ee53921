"""The file of answers, which appears only when it is complete. Interrupted runs can be resumed.

Until FILE is complete, its directory contains a partial file for each shard that has answers:
  FILE.partial          the whole input
  FILE.2-of-8.partial   --shard 2/8

A partial file is locked while its writer runs. The file has these lines, in the order in which prompts were answered:
  {"run": {...}}                         everything that the following answers depend on: input, model, options, ...
  {"index": 7, "answers": [{...}, ...]}  a prompt's position in the input, and its lines in FILE

Any partial file may contain any index, so the number of shards can change when a run is resumed. The process that
answers the last prompt merges all partial files.

This module does not import jax.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgen.cli import terminal
from jaxgen.errors import InputError, shown

# A resumed run may change these options, which affect only rounding. With a 16-bit dtype, changing any of these options
# causes a warning.
_ROUNDING = ("--slots", "--batch-size", "--shard", "--device", "--mesh")
_RUN, _ANSWERS = re.compile(rb'\{"run": \{.*\}\}\n'), re.compile(rb'\{"index": (\d+), "answers": \[.*\]\}\n')


class Shard(NamedTuple):
    """The prompts whose index modulo `count` is `number`."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


WHOLE = Shard(0, 1)


class AnswerFile:
    """An open partial file.

    Attributes:
        done: for each prompt, 1 if a partial file already contained its answers when this file was opened, else 0.
    """

    def __init__(self, stream: io.FileIO, name: Path, done: bytearray):
        self.done = done
        self._stream, self._name = stream, name

    def write(self, index: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Append a prompt's answers. If they cannot be written, raise an `InputError` and keep the earlier answers."""
        self._append({"index": index, "answers": answers})

    def _append(self, entry: Mapping[str, Any]) -> None:
        end = self._stream.tell()
        data = (json.dumps(entry, ensure_ascii=False) + "\n").encode()
        try:
            while data:
                data = data[self._stream.write(data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._stream.truncate(end)
            raise InputError(
                f"{self._name} cannot be written: {error.strerror}; it has all earlier answers: repeat the command to "
                "continue it"
            ) from error


@contextlib.contextmanager
def answer_file(target: Path, run: Mapping[str, Any], *, prompts: int, shard: Shard = WHOLE) -> Iterator[AnswerFile]:
    """Open a shard's partial file; when the block exits, write `target` if all shards are complete.

    Args:
        target: the file for the answers, in the order of the prompts.
        run: everything that the answers depend on, as JSON values. Values named in `_ROUNDING` may differ between runs.
        prompts: the number of prompts in the whole input.
        shard: the prompts that this process answers.

    Raises:
        InputError: the file exists or cannot be written, another process is writing the same shard, or a partial file
            is from a different run.
    """
    _refuse_existing(target)
    which = "" if shard.count == 1 else f".{shard.number}-of-{shard.count}"
    own = target.with_name(f"{target.name}{which}.partial")
    run = json.loads(json.dumps(run))  # turns tuples into lists, for the comparison with partial files
    try:
        stream = io.FileIO(own, "a+")
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}: {own}") from error
    with stream:
        _lock(stream, own)
        part, begin = _Part(own, prompts), 0
        try:
            _refuse_existing(target)  # check again, because another process may have just written the file
            parts = [part, *[other for other in _parts(target, prompts) if other.path != own]]
            _refuse_other_shards(target, parts, shard)
            done = _check_runs([each for each in parts if each.indices], run, prompts, shard)
            stream.truncate(part.end if part.indices else 0)
            stream.seek(0, os.SEEK_END)
            file = AnswerFile(stream, own, done)
            if not part.indices or part.runs[-1] != run:
                file._append({"run": run})
            begin = stream.tell()
            yield file
            os.fsync(stream.fileno())
        finally:
            if not part.indices and os.fstat(stream.fileno()).st_size <= begin:  # nothing to resume
                own.unlink(missing_ok=True)
    _merge(target, prompts, own, shard.count)


def recorded(target: Path) -> Mapping[str, Any]:
    """Return the first `run` recorded in a partial file, or an empty dict if no run is recorded."""
    with contextlib.suppress(OSError):
        for path in _partials(target):
            with open(path, "rb") as stream:
                line = stream.readline()
            if _RUN.fullmatch(line):
                return _read_json(line, path)["run"]
    return {}


def _partials(target: Path) -> list[Path]:
    """Return the partial files, in the same order in all processes."""
    name = re.compile(re.escape(target.name) + r"(\.\d+-of-\d+)?\.partial")
    return sorted(path for path in target.parent.iterdir() if name.fullmatch(path.name) and path.is_file())


def _merging(partial: Path) -> Path:
    """Return the name of the merged file while it is being written."""
    return partial.with_name(f"{partial.name}.merging")


def _read_json(line: bytes, path: Path) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(
            f"{path} is damaged in the line that begins with {shown(line[:40])}: remove the line, and "
            "repeat the command"
        ) from error


class _Part:
    """The current contents of a partial file.

    Attributes:
        path: the file's path.
        runs: the runs that wrote to the file.
        indices, offsets: the index of each prompt with answers, and the offset of its line.
        end: the number of bytes up to the end of the last complete line.

    Raises:
        InputError: the file was not written by this command, or is damaged.
    """

    def __init__(self, path: Path, prompts: int):
        self.path, self.end = path, 0
        self.runs: list[dict[str, Any]] = []
        self.indices, self.offsets = array.array("q"), array.array("q")
        with open(path, "rb") as stream:
            for line in stream:
                if _RUN.fullmatch(line):
                    self.runs.append(_read_json(line, path)["run"])
                elif (match := _ANSWERS.fullmatch(line)) and self.runs and int(match[1]) < prompts:
                    self.indices.append(int(match[1]))
                    self.offsets.append(self.end)
                elif not self.runs and not b'{"run": '.startswith(line[:8]):
                    raise InputError(
                        f"{path} was not written by this command: remove it, or choose another output file"
                    )
                else:  # an incomplete line
                    break
                self.end += len(line)


def _parts(target: Path, prompts: int) -> list[_Part]:
    """Read the partial files, skipping files that another process removes in the meantime."""
    parts = []
    for path in _partials(target):
        with contextlib.suppress(FileNotFoundError):
            parts.append(_Part(path, prompts))
    return parts


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise InputError(f"{target} exists: choose another name, or remove it")


def _lock(stream: io.FileIO, partial: Path) -> None:
    """Lock a partial file until it is closed; raise an error if another process has locked or removed it."""
    free = _locked(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not (free and partial.exists() and os.path.samestat(os.fstat(stream.fileno()), partial.stat())):
        raise InputError(f"{partial} is being written by another process: wait for it, or choose another output file")


def _locked(stream: Any, operation: int) -> bool:
    """Lock a file; return False if another process has locked it."""
    try:
        fcntl.flock(stream, operation)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems do not support locks
        pass
    return True


def _refuse_other_shards(target: Path, parts: Sequence[_Part], shard: Shard) -> None:
    """Raise an error if a process with a different number of shards is running, because the shards would overlap.

    Each process locks its own file before checking other files, so if two processes start together, at least one fails.
    """
    own = re.compile(rf"\.\d+-of-{shard.count}\.partial" if shard.count > 1 else r"\.partial")
    for part in parts:
        if own.fullmatch(part.path.name.removeprefix(target.name)):
            continue
        with open(part.path, "rb") as stream:
            if not _locked(stream, fcntl.LOCK_SH | fcntl.LOCK_NB):
                raise InputError(
                    f"{part.path} is being written by a process with another number of shards, or is being merged "
                    "with the others: wait for the process, or end it"
                )


def _check_runs(parts: Sequence[_Part], run: Mapping[str, Any], prompts: int, shard: Shard) -> bytearray:
    """Return the result of `_done`, or raise an error if any answers are from a different run.

    Print a warning if this run rounds differently from the runs that wrote the answers.
    """
    for part in parts:
        for before in part.runs:
            other = [name for name in {**before, **run} if before.get(name) != run.get(name)]
            if refused := [name for name in other if name not in _ROUNDING]:
                raise InputError(
                    f"{part.path} is from a run with different values of {', '.join(refused)}: repeat that command to "
                    "continue it, or remove the file to start over"
                )
    done = _done(parts, prompts)
    if run.get("--dtype") in ("bfloat16", "float16") and not all(done[shard.number :: shard.count]):
        rounded = f"in {run['--dtype']} this changes the rounding, so some answers may differ from"
        for part in parts:
            forms = [(name, before[name]) for before in part.runs for name in _ROUNDING if name in before]
            changed = dict.fromkeys(f"{name} {value}" for name, value in forms if value != run.get(name))
            if changed:
                text = f"{part.path} was begun with {', '.join(changed)}: {rounded} those of an uninterrupted run"
                terminal.say("warning", text)
    return done


def _done(parts: Sequence[_Part], prompts: int) -> bytearray:
    """Return 1 for each prompt that has answers, and 0 for any other prompt."""
    done = bytearray(prompts)
    for part in parts:
        for index in part.indices:
            done[index] = 1
    return done


def _merge(target: Path, prompts: int, own: Path, shards: int) -> None:
    """Merge and remove the partial files; if some prompts have no answers yet, only print their shards.

    Two processes that finish at the same time may both find that no prompts are left. Therefore, a process
    locks the first partial file before it merges the files, and removes this file last.
    """
    merged = _merging(own)
    try:
        done = _done(_parts(target, prompts), prompts)
        if os.path.lexists(target):  # another process has already merged the files
            return
        if left := prompts - sum(done):
            numbers = sorted({index % shards for index in range(prompts) if not done[index]})
            which = ", ".join(str(Shard(number, shards)) for number in numbers)
            text = f"{left:,} of {prompts:,} prompts have no answer yet, in --shard {which}"
            terminal.say("note", f"{text}: {target} is written when all are answered")
            return
        with open(_partials(target)[0], "rb") as first:
            _locked(first, fcntl.LOCK_EX)
            if os.path.lexists(target):  # another process has already merged the files
                return
            _write_merged(merged, _parts(target, prompts), prompts)
            _refuse_existing(target)
            merged.rename(target)
            for path in reversed(_partials(target)):
                _merging(path).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
    except (OSError, IndexError) as error:
        merged.unlink(missing_ok=True)  # frees space on a full disk
        if os.path.lexists(target):  # without locks, another process may have merged the files in the meantime
            return
        raise InputError(
            f"{target} cannot be written: {getattr(error, 'strerror', error)}; the answers are in the partial files: "
            "repeat the command"
        ) from error


def _write_merged(merged: Path, parts: Sequence[_Part], prompts: int) -> None:
    """Write the answers in the order of the prompts."""
    terminal.show("writing the answers in the order of the prompts")
    places = array.array("q", [-1]) * prompts, array.array("q", [-1]) * prompts
    with contextlib.ExitStack() as stack, open(merged, "wb") as stream:
        files = [stack.enter_context(open(part.path, "rb")) for part in parts]

        def line(number: int, offset: int) -> bytes:
            files[number].seek(offset)
            return files[number].readline()

        for number, part in enumerate(parts):
            for index, offset in zip(part.indices, part.offsets, strict=True):
                first, at = places[0][index], places[1][index]
                if first >= 0 and line(first, at) != line(number, offset):
                    raise InputError(
                        f"{parts[first].path} and {part.path} have different answers to prompt {index}: remove one of "
                        "the files and repeat the command"
                    )
                places[0][index], places[1][index] = number, offset
        for index in range(prompts):
            number = places[0][index]
            answers = _read_json(line(number, places[1][index]), parts[number].path)["answers"]
            stream.writelines((json.dumps(answer, ensure_ascii=False) + "\n").encode() for answer in answers)
        stream.flush()
        os.fsync(stream.fileno())
