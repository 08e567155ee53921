"""Read untrusted JSON and other small files of a checkpoint, within limits."""

from __future__ import annotations

import collections
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from jaxgen.errors import ConfigError, InputError, one_line

LARGEST = 10_000_000  # maximum number of bytes; the largest known index of a checkpoint is 9 MB
_DEEPEST = 200  # maximum nesting depth
_KINDS = {str: "string", list: "array", dict: "object", bool: "boolean", type(None): "null"}
_MOST = 500_000  # maximum number of opening brackets; a parsed list or object takes far more memory than its JSON text


def read_file(file: Path, largest: int) -> bytes | None:
    """Return the content of a regular file, or None if the file does not exist.

    Raises:
        ConfigError: the path is a directory, pipe, device or broken link, or the file has more than `largest` bytes.
    """
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # checked first, because opening a pipe would block
            raise ConfigError(f"{file}: not a regular file: {kind_of(file)}")
        with open(file, "rb") as stream:
            data = stream.read(largest + 1)
    except FileNotFoundError as error:
        if os.path.islink(file):
            raise ConfigError(f"{file}: a link to a file that is absent: {os.readlink(file)}") from error
        return None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    if len(data) > largest:
        raise ConfigError(f"{file}: larger than {largest:,} bytes, the maximum")
    return data


def kind_of(file: Path) -> str:
    """Describe a path that is not a regular file."""
    mode = os.stat(file).st_mode
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_json(file: Path, largest: int = LARGEST) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file does not exist.

    Raises:
        ConfigError: as in `read_file` and `json_object`; the message begins with the file's name.
    """
    data = read_file(file, largest)
    return None if data is None else json_object(str(file), data)


def json_object(source: str, data: bytes) -> dict[str, Any]:
    """Return the object in a JSON text. NaN and infinite numbers are allowed, because transformers writes them.

    Raises:
        ConfigError: `parse_json` rejects the text, or the text is not UTF-8, is not an object, or contains too many
            lists and objects. The message begins with `source`.
    """
    if data.count(b"[") + data.count(b"{") > _MOST:
        raise ConfigError(f"{source}: not valid JSON: more than {_MOST:,} lists and objects")
    try:
        value = parse_json(data.decode("utf-8"), finite=False)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from error
    except InputError as error:
        raise ConfigError(f"{source}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: must contain a JSON object, contains {type(value).__name__}")
    return value


def parse_json(text: str, *, finite: bool = True) -> Any:
    """Return the value of a JSON text.

    Raises:
        InputError: the text is not valid JSON, repeats a key in an object, contains half of a surrogate pair, or is
            nested too deeply. If `finite` is True, NaN and infinite numbers are also errors.
    """
    hooks: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite} if finite else {}
    try:
        value = json.loads(text, object_pairs_hook=_unique, **hooks)
        (json.dumps(value, ensure_ascii=False) if "\\u" in text else text).encode("utf-8")
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"character {error.pos + 1}"
        raise InputError(f"not valid JSON: {error.msg} at {place}") from error
    except UnicodeEncodeError as error:
        raise InputError("not valid JSON: a string has half of a surrogate pair, such as \\ud83d") from error
    except RecursionError as error:
        raise InputError("not valid JSON: nested too deeply") from error
    except ValueError as error:  # Python also rejects integers with thousands of digits
        raise InputError(f"not valid JSON: {error}") from error
    if _is_deep(value):
        raise InputError("not valid JSON: nested too deeply")
    return value


def types_of(value: Any) -> tuple[str, ...]:
    """Return the types of a JSON value; an integer is also a number."""
    if type(value) in _KINDS:
        return (_KINDS[type(value)],)
    return ("integer", "number") if isinstance(value, int) or value.is_integer() else ("number",)


def fetch_again(directory: Path, problems: Iterable[str]) -> list[str]:
    """Return advice on repairing a directory, if it was downloaded and its problems are due to damaged files."""
    damaged = any(sign in problem for problem in problems for sign in ("damaged", "truncated", "not valid JSON"))
    if not damaged or directory.parent.name != "snapshots":
        return []
    return [f"{directory} was downloaded: delete {directory.parent.parent}, and the next use downloads it again"]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(digits: str) -> float:
    if abs(number := float(digits)) == float("inf"):
        raise ValueError(f"the number {one_line(digits, 40)} is too large")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        names = ", ".join(sorted(name for name, count in counts.items() if count > 1))
        raise ValueError(f"duplicate keys: {one_line(names, 200)}")
    return result


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST + 1):
        containers = (node for node in level if isinstance(node, dict | list))
        level = [child for node in containers for child in (node.values() if isinstance(node, dict) else node)]
    return bool(level)
