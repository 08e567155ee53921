"""Store compiled programs on disk, so that later processes do not have to compile them again.

jax's compilation cache decides what is stored and under which key. Its own files have no checksum unless zlib is the
compressor, its limit on their size needs another package, and it never replaces a damaged file. `_Store` therefore
takes the place of the class that reads and writes these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxgen.errors import InputError, warn
from jaxgen.remote import cache_directory

_LIMIT = 1 << 30  # maximum size in bytes, of the programs for all machines
_LAYOUT = "3"  # version of the files: a checksum and what jax stores
_CHECKSUM = hashlib.sha256
_SIZE = _CHECKSUM().digest_size
_PROGRAM, _PART = ".program", ".program-part"  # the names of files, and of those that are not yet complete


def enable_cache(directory: str | os.PathLike[str] | None = None) -> str | None:
    """Store the programs that this process compiles on disk, and load those that earlier processes have stored.

    This sets jax's compilation cache, so the programs of your own `jax.jit` are stored too. Programs must still be
    traced and lowered. The least recently used programs are removed when all of them together exceed 1 GB.

    The programs are native code. Therefore nothing is stored, with a warning that gives the reason, if another user
    owns the directory or can write to it. A damaged file causes a warning, and its program is compiled again.

    Args:
        directory: where to create the folder `jaxgen-programs`. The default is the folder `jaxgen/programs` in
            `$XDG_CACHE_HOME` or `~/.cache`.

    Returns:
        The folder with this machine's programs, or what jax's setting `jax_compilation_cache_dir` already contains.
        None if nothing is stored, because of a warning or of jax's setting `jax_enable_compilation_cache`.

    Raises:
        InputError: if `directory` is given and jax already stores programs elsewhere.
    """
    settings = jax.config.values
    if not settings["jax_enable_compilation_cache"]:
        return None
    before = settings["jax_compilation_cache_dir"] or None
    if before is not None and directory is None:
        return before
    try:
        root = (cache_directory() / "programs" if directory is None else Path(directory) / "jaxgen-programs").resolve()
        own = root / _machine()
        if before is not None:
            if Path(before) == own:
                return before
            raise InputError(f"jax already stores compiled programs in {before}: leave directory out")
        _create(own)
        problem = _problem(own, root)
    except (OSError, RuntimeError) as error:  # `Path.home` raises the latter if the user has no home directory
        problem, root, own = str(error), Path(), Path()
    problem = problem or _install(_Store(own, root), own)
    if problem is not None:
        warn(f"compiled programs are not stored: {problem}")
        return None
    return str(own)


def _install(store: _Store, directory: Path) -> str | None:
    """Let jax use a store. Return why it cannot; None if it does."""
    try:
        from jax._src import compilation_cache  # there is no public name for the store
    except ImportError:
        compilation_cache = None
    if not hasattr(compilation_cache, "_cache"):
        return f"jax {jax.__version__} stores them in a way that this version of jaxgen does not know"
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache._cache = store  # pyright: ignore[reportOptionalMemberAccess]
    return None


class _Store:
    """Files of compiled programs, each with a checksum, with the interface of jax's `CacheInterface`.

    The least recently used files are removed.

    Args:
        directory: the files of this kind of machine.
        root: the folder that contains the directories of all machines; the size of all their files is limited.
    """

    def __init__(self, directory: Path, root: Path):
        self._path = directory  # a name that jax expects
        self._root = root

    def get(self, key: str) -> bytes | None:
        """Return what was stored for a key; None if there is nothing or if it is damaged."""
        file = self._file(key)
        try:
            content = file.read_bytes()
            os.utime(file)  # now it is the most recently used one
        except FileNotFoundError:
            return None
        except OSError as error:
            warn(f"a program cannot be read and is compiled again: {error}")
            return None
        checksum, value = content[:_SIZE], content[_SIZE:]
        if _CHECKSUM(value).digest() != checksum:
            warn(f"{file} is damaged: its program is compiled again")
            return None
        return value

    def put(self, key: str, value: bytes) -> None:
        """Store a value atomically, because several processes may write the same file."""
        file, part = self._file(key), None
        try:
            with tempfile.NamedTemporaryFile(dir=file.parent, suffix=_PART, delete=False) as stream:
                part = Path(stream.name)
                stream.write(_CHECKSUM(value).digest() + value)
            part.replace(file)
            self._make_room()
        except OSError as error:  # for example, the disk is full
            if part is not None:
                part.unlink(missing_ok=True)
            warn(f"a program cannot be stored: {error}")

    def _file(self, key: str) -> Path:
        return self._path / f"{key}{_PROGRAM}"

    def _make_room(self) -> None:
        """Remove the least recently used files until the rest take up at most `_LIMIT` bytes."""
        kept = 0
        for _, size, file in sorted(_files(self._root), reverse=True):
            kept += size
            if kept > _LIMIT:
                file.unlink(missing_ok=True)


def _files(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the time, the size and the path of each file of a program in the folders of `root`."""
    for file in (*root.glob(f"*/*{_PROGRAM}"), *root.glob(f"*/*{_PART}")):
        with contextlib.suppress(FileNotFoundError):  # another process has just removed or renamed it
            found = file.stat()
            yield found.st_mtime, found.st_size, file


def _machine() -> str:
    """Return a name for the format of the files and for this CPU, whose instruction set compiled programs use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    kind = " ".join([_LAYOUT, platform.machine(), jax.__version__, *sorted(flags)])
    return hashlib.sha256(kind.encode()).hexdigest()[:16]


def _create(directory: Path) -> None:
    """Create a directory and its missing parents, all of them for this user only."""
    for folder in reversed([directory, *directory.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def _problem(directory: Path, root: Path) -> str | None:
    """Return why other users could change the files in a directory; None if they cannot, or if this is not POSIX.

    `directory` is a resolved path in `root`.
    """
    if not hasattr(os, "geteuid"):
        return None
    for folder in (directory, *directory.parents):
        found = folder.stat()
        if found.st_uid not in (os.geteuid(), 0):
            return f"{folder} belongs to another user"
        is_ours = folder.is_relative_to(root)
        # Above `root`, a home directory may be open to its owner's group, and in /tmp nobody can replace our folder.
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH if is_ours else stat.S_IWOTH)
        if others and (is_ours or not found.st_mode & stat.S_ISVTX):
            return f"other users can write to {folder}"
    if not os.access(directory, os.W_OK):
        return f"{directory} cannot be written"
    return None
