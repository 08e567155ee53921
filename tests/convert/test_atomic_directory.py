import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from convert.atomic_directory import new_directory, replaced
from convert.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]


def fill(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "out"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_target_appears_only_when_complete(target):
    with new_directory(target) as directory:
        fill(directory, "new")
        assert not target.exists()
        assert directory.parent == target.parent
        assert directory.name.startswith(".")
    assert names(target.parent) == ["out"]
    assert (target / "config.json").read_text() == "new"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [False, True])
def test_error_leaves_the_target_unchanged(target, error, existing):
    if existing:
        target.mkdir()
        fill(target, "old")

    def write():
        with new_directory(target, overwrite=True) as directory:
            fill(directory, "new")
            raise error

    with pytest.raises(type(error)):
        write()
    assert names(target.parent) == (["out"] if existing else [])
    assert not existing or (target / "config.json").read_text() == "old"


def test_failed_rename_restores_the_old_target(target, monkeypatch):
    target.mkdir()
    fill(target, "old")
    rename = Path.rename

    def fail(self, other):
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output"), new_directory(target, overwrite=True) as directory:
        fill(directory, "new")
    assert names(target.parent) == ["out"]
    assert (target / "config.json").read_text() == "old"


def test_empty_target_directory_is_replaced(target):
    target.mkdir()
    with new_directory(target) as directory:
        fill(directory, "new")
    assert (target / "config.json").read_text() == "new"


def test_symlink_to_a_checkpoint_is_preserved(tmp_path, target):
    (tmp_path / "real").mkdir()
    fill(tmp_path / "real", "old")
    target.symlink_to("real")
    with new_directory(target, overwrite=True) as directory:
        fill(directory, "new")
    assert target.is_symlink()
    assert (tmp_path / "real" / "config.json").read_text() == "new"


def test_files_and_unrelated_directories_are_never_replaced(tmp_path, target):
    def refusal(overwrite: bool = True) -> str:
        with pytest.raises(CheckpointError) as caught, new_directory(target, overwrite=overwrite):
            pytest.fail("the block must not run")
        return str(caught.value)

    target.write_text("")
    assert "is a file" in refusal()
    target.unlink()
    target.mkdir()
    (target / "letter.txt").write_text("")
    assert "is neither a checkpoint (no config.json) nor an adapter" in refusal()
    fill(target, "old")
    assert "overwrite=True (--overwrite)" in refusal(overwrite=False)
    (target / ".git").mkdir()
    assert "contains folders that would be deleted (.git)" in refusal()
    target = tmp_path / "absent" / "out"
    assert "absent is not a directory" in refusal()
    assert names(tmp_path) == ["out"]


def test_target_created_meanwhile_is_not_replaced(target):
    def write():
        with new_directory(target) as directory:
            fill(directory, "new")
            target.mkdir()
            fill(target, "other")

    with pytest.raises(CheckpointError, match="overwrite=True"):
        write()
    assert names(target.parent) == ["out"]
    assert (target / "config.json").read_text() == "other"


def test_leftovers_of_dead_writers_are_removed(tmp_path, target):
    alive, dead, similar = (tmp_path / f".out.{number}.partial" for number in ("00000000", "11111111", "x"))
    for path in (alive, dead, similar):
        path.mkdir()
        fill(path, "half")
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with new_directory(target) as directory:
            fill(directory, "new")
    finally:
        os.close(lock)
    assert names(tmp_path) == [alive.name, similar.name, "out"]


def test_interrupted_replacement_is_undone_first(target):
    replaced(target).mkdir()
    fill(replaced(target), "old")
    with pytest.raises(CheckpointError, match="exists"), new_directory(target):
        pytest.fail("the block must not run")
    assert names(target.parent) == ["out"]
    assert (target / "config.json").read_text() == "old"


@pytest.mark.slow
def test_killed_writer_leaves_no_partial_target(tmp_path):
    command = [sys.executable, "-m", "tests.support.killed_writer", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "intact\n"), done.stderr
