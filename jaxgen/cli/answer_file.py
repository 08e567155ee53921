"""The file of answers, which appears only when it is complete. Interrupted runs can be resumed.

Until FILE is complete, its directory contains a partial file for each shard that has answers:
  FILE.partial          the whole input
  FILE.2-of-8.partial   --shard 2/8

A partial file has these lines, in the order in which prompts were answered:
  {"crc32": "1c29...", "run": {...}}                         everything that the following answers depend on
  {"crc32": "90b3...", "index": 7, "answers": [{...}, ...]}  a prompt's position in the input, and its lines in FILE

A line whose checksum is wrong is ignored, so its prompt is answered again. Any partial file may contain any index, so
the number of shards can change when a run is resumed. The process that answers the last prompt merges the files.

This module does not import jax.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgen.cli import terminal
from jaxgen.errors import InputError

_BEGIN = b'{"crc32": "'
_LINE = re.compile(_BEGIN + rb'([0-9a-f]{8})", (?:"run": |"index": (\d+), )')
_SUMMED = len(_BEGIN) + 11  # the number of bytes before those from which the checksum is computed


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
        data = _line(entry)
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
        run: everything that the answers depend on, as JSON values.
        prompts: the number of prompts in the whole input.
        shard: the prompts that this process answers.

    Raises:
        InputError: the file exists or cannot be written, or a partial file is from a different run.
    """
    if os.path.lexists(target):
        raise InputError(f"{target} exists: choose another name, or remove it")
    which = "" if shard.count == 1 else f".{shard.number}-of-{shard.count}"
    name = target.with_name(f"{target.name}{which}.partial")
    run = json.loads(json.dumps(run))  # turns tuples into lists, for the comparison with partial files
    try:
        stream = io.FileIO(name, "a+")
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}: {name}") from error
    with stream:
        part, begin = _Partial(name, prompts), 0
        try:
            parts = [part, *(other for other in _read_partials(target, prompts) if other.path != name)]
            for each in parts:
                _check(each, run)
            stream.truncate(part.end if part.offsets else 0)
            stream.seek(0, os.SEEK_END)
            file = AnswerFile(stream, name, _done(parts, prompts))
            if not part.offsets:
                file._append({"run": run})
            begin = stream.tell()
            yield file
            os.fsync(stream.fileno())
        finally:
            if not part.offsets and os.fstat(stream.fileno()).st_size <= begin:  # nothing to resume
                name.unlink(missing_ok=True)
    _merge(target, prompts, name, shard.count)


def recorded(target: Path) -> Mapping[str, Any]:
    """Return the `run` of a partial file, or an empty dict if there is none."""
    with contextlib.suppress(OSError):
        for path in _partials(target):
            with open(path, "rb") as stream:
                line = stream.readline()
            if (match := _match(line)) and match[2] is None:
                return json.loads(line)["run"]
    return {}


def _line(entry: Mapping[str, Any]) -> bytes:
    """Return a line of a partial file, with its checksum."""
    rest = json.dumps(entry, ensure_ascii=False).encode()[1:] + b"\n"
    return b'%b%08x", %b' % (_BEGIN, zlib.crc32(rest), rest)


def _match(line: bytes) -> re.Match[bytes] | None:
    """Return the match of the beginning of a line, or None if the line is cut off or damaged."""
    match = _LINE.match(line)
    return match if match and int(match[1], 16) == zlib.crc32(line[_SUMMED:]) else None


def _partials(target: Path) -> list[Path]:
    """Return the partial files, in the same order in all processes."""
    name = re.compile(re.escape(target.name) + r"(\.\d+-of-\d+)?\.partial")
    return sorted(path for path in target.parent.iterdir() if name.fullmatch(path.name) and path.is_file())


def _merging(partial: Path) -> Path:
    """Return the name of the merged file while it is being written."""
    return partial.with_name(f"{partial.name}.merging")


class _Partial:
    """The current contents of a partial file.

    Attributes:
        path: the file's path.
        run: the run that wrote the file; empty if the file has none.
        offsets: the offset of the line of each prompt with answers, by the prompt's index.
        damaged: the numbers of the damaged lines, counted from 1.
        end: the number of bytes up to the end of the last complete line.

    Raises:
        InputError: the file was not written by this command, or its first line is damaged.
    """

    def __init__(self, path: Path, prompts: int):
        self.path, self.end = path, 0
        self.run: dict[str, Any] = {}
        self.offsets: dict[int, int] = {}
        self.damaged: list[int] = []
        with open(path, "rb") as stream:
            for number, line in enumerate(stream, 1):
                match = _match(line)
                if match is None and number == 1 and not _BEGIN.startswith(line[: len(_BEGIN)]):
                    raise InputError(
                        f"{path} was not written by this command: remove it, or choose another output file"
                    )
                if not line.endswith(b"\n"):  # the writer was killed
                    break
                if match is None and number == 1:
                    raise InputError(f"{path} is damaged in its first line: remove the file to start over")
                if match is None:
                    self.damaged.append(number)
                elif match[2] is None:
                    self.run = json.loads(line)["run"]
                elif int(match[2]) < prompts:
                    self.offsets[int(match[2])] = self.end
                self.end += len(line)


def _read_partials(target: Path, prompts: int) -> list[_Partial]:
    """Read the partial files, skipping files that another process removes in the meantime."""
    parts = []
    for path in _partials(target):
        with contextlib.suppress(FileNotFoundError):
            parts.append(_Partial(path, prompts))
    return parts


def _check(part: _Partial, run: Mapping[str, Any]) -> None:
    """Raise an `InputError` if a partial file has answers of a different run; warn of damaged lines."""
    other = [name for name in {**part.run, **run} if part.run.get(name) != run.get(name)]
    if part.offsets and other:
        raise InputError(
            f"{part.path} is from a run with different values of {', '.join(other)}: repeat that command to continue "
            "it, or remove the file to start over"
        )
    for number in part.damaged:
        text = f"{part.path} is damaged in line {number}: the prompt of this line is answered again"
        terminal.say("warning", text)


def _done(parts: Sequence[_Partial], prompts: int) -> bytearray:
    """Return 1 for each prompt that has answers, and 0 for any other prompt."""
    done = bytearray(prompts)
    for part in parts:
        for index in part.offsets:
            done[index] = 1
    return done


def _merge(target: Path, prompts: int, partial: Path, shards: int) -> None:
    """Merge and remove the partial files; if some prompts have no answers yet, only print their shards.

    Two processes that finish at the same time may both merge the files. The result is the same.
    """
    merged = _merging(partial)
    try:
        parts = _read_partials(target, prompts)
        done = _done(parts, prompts)
        if os.path.lexists(target):  # another process has already merged the files
            return
        if left := prompts - sum(done):
            numbers = sorted({index % shards for index in range(prompts) if not done[index]})
            which = ", ".join(str(Shard(number, shards)) for number in numbers)
            text = f"{left:,} of {prompts:,} prompts have no answer yet, in --shard {which}"
            terminal.say("note", f"{text}: {target} is written when all are answered")
            return
        _write_merged(merged, parts, prompts)
        merged.replace(target)
        for part in parts:
            _merging(part.path).unlink(missing_ok=True)
            part.path.unlink(missing_ok=True)
    except OSError as error:
        merged.unlink(missing_ok=True)  # frees space on a full disk
        if os.path.lexists(target):
            return
        raise InputError(
            f"{target} cannot be written: {error.strerror}; the answers are in the partial files: repeat the command"
        ) from error


def _write_merged(merged: Path, parts: Sequence[_Partial], prompts: int) -> None:
    """Write the answers in the order of the prompts."""
    terminal.show("writing the answers in the order of the prompts")
    with contextlib.ExitStack() as stack, open(merged, "wb") as stream:
        opened = [stack.enter_context(open(part.path, "rb")) for part in parts]
        for index in range(prompts):
            number = next(number for number, part in enumerate(parts) if index in part.offsets)
            opened[number].seek(parts[number].offsets[index])
            answers = json.loads(opened[number].readline())["answers"]
            stream.writelines((json.dumps(answer, ensure_ascii=False) + "\n").encode() for answer in answers)
        stream.flush()
        os.fsync(stream.fileno())
