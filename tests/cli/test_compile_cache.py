"""The command caches its compiled programs on disk, and limits the size of the cache."""

import os
import subprocess
import sys

import pytest

from jaxgen.cli import compile_cache


def test_the_oldest_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "_LIMIT", 250)
    for number in range(5):
        (tmp_path / str(number)).write_bytes(b"x" * 100)
        os.utime(tmp_path / str(number), (number, number))
    compile_cache._make_room(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


@pytest.mark.slow
def test_the_next_process_finds_them(tmp_path, checkpoint):
    def run(home, *options):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        environment |= {"XDG_CACHE_HOME": str(home)}
        command = [sys.executable, "-m", "jaxgen", "--model", str(checkpoint), "--max-new-tokens", "3", *options, "A"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == "BCD\n"
        return {path: path.stat().st_mtime_ns for path in home.rglob("*.program")}

    kept = run(tmp_path / "home")
    assert kept
    assert run(tmp_path / "home") == kept  # nothing was recompiled
    assert not run(tmp_path / "other", "--no-compile-cache")
    (tmp_path / "file").write_text("")
    run(tmp_path / "file")  # the cache directory cannot be created
