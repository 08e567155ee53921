"""Measurements of free memory."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxgen import InputError, memory
from jaxgen.memory import check_free, free_bytes, size_text

CPU = SimpleNamespace(platform="cpu")


def test_free_memory_of_an_accelerator():
    def device(statistics):
        return SimpleNamespace(platform="gpu", memory_stats=lambda: statistics)

    assert free_bytes(device({"bytes_limit": 100, "bytes_in_use": 30, "peak_bytes_in_use": 50})) == 70
    for unknown in (None, {}, {"bytes_in_use": 30}, {"bytes_limit": -1, "bytes_in_use": -1}):
        assert free_bytes(device(unknown)) is None


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Fake /proc and /sys: 4 GB are available, and the process is in the control group a/b."""
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  8000000 kB\nMemFree: 1000 kB\nMemAvailable:  4000000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("1:name=systemd:/\n0::/a/b\n")
    (tmp_path / "cgroup" / "a" / "b").mkdir(parents=True)
    return tmp_path


def limit(group: Path, maximum: str, current: int, pages: int = 0):
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 7\nfile {pages}\ninactive_file {pages // 2}\nactive_file {pages // 2}\n")


def test_free_memory_of_the_host(machine):
    assert free_bytes(CPU) == 4_000_000 * 1024
    limit(machine / "cgroup" / "a" / "b", "max", 10**9)
    assert free_bytes(CPU) == 4_000_000 * 1024


@pytest.mark.parametrize("group", [".", "a", "a/b"])
def test_control_group_limits_free_memory(machine, group):
    limit(machine / "cgroup" / group, "1000000", 300_000)
    assert free_bytes(CPU) == 700_000
    limit(machine / "cgroup" / group, "1000000", 300_000, pages=200_000)  # the kernel can reclaim these pages
    assert free_bytes(CPU) == 900_000
    limit(machine / "cgroup" / group, "1000000", 1_200_000)
    assert free_bytes(CPU) == 0
    limit(machine / "cgroup" / group, str(10**13), 0)
    assert free_bytes(CPU) == 4_000_000 * 1024


def test_free_memory_is_unknown_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_PROC", tmp_path / "absent")
    assert free_bytes(CPU) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux reports it")
def test_free_memory_of_this_machine():
    free = free_bytes(jax.local_devices(backend="cpu")[0])
    assert free is not None
    assert 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(("platform", "most"), [("cpu", 50), ("gpu", 100)])
def test_cpu_devices_share_one_memory(platform, most, monkeypatch):
    """`most` bytes are free for each of this process's two devices. The third device belongs to another process."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: {1: 100, 2: 90}[device.id])
    devices = [
        SimpleNamespace(platform=platform, process_index=process, id=n) for n, process in ((2, 0), (0, 1), (1, 0))
    ]
    check_free("it needs {}", most, devices, "less")
    with pytest.raises(InputError, match=r"^it needs 0.0 MB, but only 0.0 MB is free.*: try less$"):
        check_free("it needs {}", most + 1, devices, "less")


def test_size_text():
    assert size_text(31_250_000_000) == "31.2 GB"
    assert size_text(31_250_000) == "31.2 MB"
