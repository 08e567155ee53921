"""Query the free memory of devices, and reject calls that need more than is free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxgen.errors import InputError

SMALL = 2**28  # calls that need fewer bytes are not checked, because a check could take longer than the call
# Ways to reduce the memory of a call, for error messages.
REMEDY = "fewer prompts, sequences or slots at a time, shorter prompts, fewer new tokens, or an 8-bit cache_dtype"
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class NotEnoughMemory(InputError):
    """A call needs more memory than is free."""


def check_free(what: str, needed: int, devices: Iterable[Any], remedy: str) -> None:
    """Raise `NotEnoughMemory` unless each device has `needed` free bytes. All CPU devices share the same memory.

    The error message begins with `what`, with {} replaced by the required size, and suggests `remedy`.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    device = min(local, key=lambda device: device.id)
    count, where = (len(local), "") if device.platform == "cpu" else (1, f" on {device}")
    free = free_bytes(device)
    if free is not None and needed * count > free:
        raise NotEnoughMemory(
            f"{what.format(size_text(needed * count))}, but only {size_text(free)} is free{where}: try {remedy}"
        )


def free_bytes(device) -> int | None:
    """Return the number of bytes that can still be allocated on a `jax.Device`, or None if it is unknown.

    For a CPU, this is the memory that Linux reports as available, or less if a control group (version 2) limits it.
    """
    if device.platform == "cpu":
        return min([*_available(), *_left_in_control_groups()], default=None)
    statistics = device.memory_stats() or {}
    limit, used = statistics.get("bytes_limit", -1), statistics.get("bytes_in_use", -1)
    return limit - used if limit > 0 and used >= 0 else None


def _available() -> Iterator[int]:
    """Yield the number of bytes that the kernel can allocate without swapping."""
    for line in _lines(_PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _left_in_control_groups() -> Iterator[int]:
    """Yield the number of bytes left in each control group that limits this process. The page cache counts as free."""
    for line in _lines(_PROC / "self" / "cgroup"):
        if not line.startswith("0::/"):
            continue
        own = _CGROUPS / line.removeprefix("0::/")
        for group in (own, *own.parents):
            limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
            if limit and used and limit[0] != "max":
                statistics = dict(entry.split() for entry in _lines(group / "memory.stat"))
                pages = sum(int(statistics.get(name, 0)) for name in ("active_file", "inactive_file"))
                yield max(0, int(limit[0]) - int(used[0]) + pages)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def size_text(count: int) -> str:
    """Format a number of bytes as megabytes or gigabytes."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
