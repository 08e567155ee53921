"""Small files that come with a checkpoint, read without trust: JSON objects, templates, tokenizers."""

from __future__ import annotations

import collections
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxgen.errors import ConfigError, one_line

LARGEST = 10_000_000  # bytes of JSON; the index of the largest known checkpoint has 9 MB
_DEEPEST = 100  # lists and objects in each other
_MOST = 500_000  # brackets: each list and object takes far more memory than text


def read_file(file: Path, largest: int) -> bytes | None:
    """Return the content of a regular file, or None if there is no such file.

    Raises:
        ConfigError: a directory, pipe or device, a link to nothing, or more than `largest` bytes.
    """
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # before it is opened: a pipe would wait for its writer
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
        raise ConfigError(f"{file}: larger than {largest:,} bytes, the most that is read")
    return data


def kind_of(file: Path) -> str:
    """Return what a path is that is not a regular file, in words."""
    mode = os.stat(file).st_mode
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_json(file: Path, largest: int = LARGEST) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if there is no such file.

    Raises:
        ConfigError: as in `read_file` and `json_object`; the text begins with the file's name.
    """
    data = read_file(file, largest)
    return None if data is None else json_object(str(file), data)


def json_object(source: str, data: bytes) -> dict[str, Any]:
    """Return the object that JSON text describes; `source` begins the text of an error.

    Raises:
        ConfigError: not valid JSON, not an object, a key twice in one object, half of a surrogate pair, nested too
            deeply, or too many lists and objects.
    """
    if data.count(b"[") + data.count(b"{") > _MOST:
        raise ConfigError(f"{source}: not valid JSON: more than {_MOST:,} lists and objects")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{source}: not valid JSON: a string has half of a surrogate pair") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: not valid JSON: nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: must contain a JSON object, contains {type(value).__name__}")
    if _is_deep(value):
        raise ConfigError(f"{source}: not valid JSON: nested too deeply")
    return value


def fetch_again(directory: Path, problems: Iterable[str]) -> list[str]:
    """Return how to repair a directory with these problems, if its files are damaged and a hub has them."""
    damaged = any(sign in problem for problem in problems for sign in ("damaged", "truncated", "not valid JSON"))
    if not damaged or directory.parent.name != "snapshots":
        return []
    return [f"{directory} was downloaded: delete {directory.parent.parent}, and the next use downloads it again"]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        names = ", ".join(sorted(name for name, count in counts.items() if count > 1))
        raise ValueError(f"duplicate names: {one_line(names, 200)}")
    return result


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        children = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for group in children for child in group if isinstance(child, dict | list)]
        if not level:
            return False
    return True
