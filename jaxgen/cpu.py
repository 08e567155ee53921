"""The instruction sets of this machine's CPU."""

from __future__ import annotations

import functools
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the names of the instruction sets that this machine's CPU has, as Linux reports them."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(flag for line in lines if line.startswith("flags") for flag in line.split())
