"""Cache of compiled programs on disk, so that the next process does not have to compile them again.

`jaxgen.program_files` stores jaxgen's programs for one device; jax's compilation cache stores all other programs.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax

from jaxgen.programs import PROGRAMS

_LIMIT = 1 << 30  # maximum size in bytes
_LAYOUT = "2"  # version of the directory's layout; version 1 used only jax's cache, and not `jaxgen.program_files`


def keep_programs() -> None:
    """Store compiled programs in the user's cache directory if jax's cache is enabled and has no directory yet."""
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] is not None or not settings["jax_enable_compilation_cache"]:
        return
    directory = _directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _make_room(directory)
    except OSError:  # the home directory is read-only, so nothing is cached
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    PROGRAMS.directory = directory


def _directory() -> Path:
    """Return a directory specific to this CPU, because compiled programs use the CPU's instruction set."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    kind = " ".join([_LAYOUT, platform.machine(), jax.__version__, *sorted(flags)])
    return Path(home) / "jaxgen" / "programs" / hashlib.sha256(kind.encode()).hexdigest()[:16]


def _make_room(directory: Path) -> None:
    """Remove the oldest programs until the rest take up at most `_LIMIT` bytes."""
    files = sorted(((file.stat().st_mtime, file.stat().st_size, file) for file in directory.iterdir()), reverse=True)
    kept = 0
    for _, size, file in files:
        kept += size
        if kept > _LIMIT:
            file.unlink(missing_ok=True)
