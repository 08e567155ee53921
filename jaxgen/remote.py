"""Files and checkpoints at URLs, such as gs://bucket/file, read and written with fsspec.

fsspec is imported when a URL is used. This module does not import jax.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxgen.errors import InputError, JaxgenError, one_line

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+", re.DOTALL)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is a URL, such as gs://bucket/file."""
    return _URL.match(os.fspath(path)) is not None


def cache_directory() -> Path:
    """Return the folder `jaxgen` in `$XDG_CACHE_HOME` or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgen"


def read(url: str) -> bytes:
    """Return a file's content."""
    with _system(url) as (system, path):
        return system.cat_file(path)


def exists(url: str) -> bool:
    """Return True if there is a file or a directory at a URL."""
    with _system(url) as (system, path):
        return system.exists(path)


def write(url: str, file: Path) -> None:
    """Copy a local file to a URL."""
    with _system(url) as (system, path):
        if (parent := path.rpartition("/")[0]) and not system.isdir(parent):
            system.makedirs(parent, exist_ok=True)  # does nothing in an object store
        system.put_file(str(file), path)


def local_copy(url: str, small: Sequence[str], large: Sequence[str], check: Callable[[Path], object]) -> Path:
    """Copy a directory's files to the cache, and return the copy.

    The copy is found again as long as the files at the URL are the same, by their sizes, times or checksums.

    Args:
        url: the directory.
        small, large: patterns of names, such as "*.json" or "folder/*". Files that match none of them are left out.
        check: called with a directory that has only the small files, before the large ones are copied.
    """
    with _system(url) as (system, path):
        system.invalidate_cache()
        found = system.find(path, maxdepth=2, detail=True)
        sizes = {file[len(path) :].lstrip("/"): (file, info["size"]) for file, info in found.items()}
        names = [[name for name in sorted(sizes) if _matches(name, group)] for group in (small, large)]
        if not any(names):
            raise InputError(f"{url} has none of the files of a checkpoint: pass the directory that contains them")
        state = [url, *((name, sizes[name][1], system.ukey(sizes[name][0])) for group in names for name in group)]
        name = re.sub(r"[^\w.-]", "_", url.rstrip("/").rpartition("/")[2])
        root = cache_directory() / "models"
        target = root / f"{name}-{hashlib.sha256(repr(state).encode()).hexdigest()[:16]}"
        if target.is_dir():
            return target
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=root) as folder:
            copy = Path(folder) / "copy"
            copy.mkdir()
            for group in names:
                for each in group:
                    _copy(system, url, *sizes[each], copy / each)
                if group is names[0]:
                    check(copy)
            try:
                copy.rename(target)
            except OSError:
                if not target.is_dir():  # otherwise, another process has just made the same copy
                    raise
    return target


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a name matches a pattern in which * stands for anything but a slash."""
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _copy(system: Any, url: str, source: str, size: int | None, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    system.get_file(source, str(target))
    if size is not None and target.stat().st_size != size:
        raise InputError(f"{url}: {target.name} arrived with {target.stat().st_size} of {size} bytes: try again")


@contextlib.contextmanager
def _system(url: str) -> Iterator[tuple[Any, str]]:
    """Yield fsspec's file system for a URL, and the path in it; turn errors in the block into an `InputError`."""
    try:
        import fsspec.core
    except ModuleNotFoundError as error:
        advice = 'to use URLs, run pip install -e ".[remote]" in the clone of jaxgen'
        raise InputError(f"{url}: {error.name} is missing: {advice}") from error
    try:
        yield fsspec.core.url_to_fs(url)
    except JaxgenError:
        raise
    except ImportError as error:  # of the package for this kind of URL, which the message names
        raise InputError(f"{url}: {one_line(str(error))}") from error
    except FileNotFoundError as error:
        raise InputError(f"{url} does not exist") from error
    except Exception as error:  # each package has exceptions of its own, which share no class
        raise InputError(f"{url}: {type(error).__name__}: {one_line(str(error))}") from error
