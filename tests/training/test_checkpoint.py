"""Saved training states: damage is found, and a killed writer leaves the earlier states intact."""

import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import InputError
from jaxgen.errors import JaxgenWarning
from jaxgen.training.checkpoint import intact_steps, newest_notes, read_state, remove_states, write_state

STATE = {"weight": jax.random.normal(jax.random.key(0), (40, 50)), "step": jnp.int32(3)}
LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), STATE)


def steps(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "states").iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        write_state(directory, STATE, step, {"step": step}, keep=[1])
    return directory


@pytest.fixture
def directory(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def damages(content: bytes) -> Iterator[bytes | None]:
    """Yield damaged versions of a file's content: missing, truncated, or with one flipped bit."""
    yield None
    yield from {content[: int(part * len(content))] for part in (0.0, 0.3, 0.9)} - {content}
    draw = random.Random(len(content))
    for place in {0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(4))}:
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        yield bytes(flipped)


def test_damage_is_detected_and_the_previous_state_is_used(directory):
    files = [file for file in (directory / "states" / "2").rglob("*") if file.is_file()]
    assert len(files) > 8
    for file in files:
        content = file.read_bytes()
        for damaged in damages(content):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            with pytest.warns(JaxgenWarning, match="the state of step 2 in .* is damaged and will not be used") as told:
                assert intact_steps(directory) == [1]
            assert len(told) == 1
            assert newest_notes(directory)["step"] in (1, 2)
            file.write_bytes(content)
    assert intact_steps(directory) == [1, 2]
    jax.tree.map(np.testing.assert_array_equal, read_state(directory, 2, LIKE), STATE)


def test_notes_with_a_flipped_bit_are_rejected(directory):
    notes = directory / "states" / "2" / "notes.json"
    notes.write_text(notes.read_text().replace("2", "3"))
    assert newest_notes(directory) == {"step": 1}


def test_error_explains_what_to_do_if_all_states_are_damaged(directory):
    for step in (1, 2):
        (directory / "states" / str(step) / "notes.json").write_text("")
    for read in (intact_steps, newest_notes):
        with pytest.raises(InputError) as raised:
            read(directory)
        assert str(raised.value) == (
            f"{directory}: all 2 saved states are damaged (step 2: notes.json differs from its checksum); "
            "remove it to start again"
        )


def test_a_damaged_state_is_replaced(directory):
    (directory / "states" / "2" / "notes.json").unlink()
    (directory / "states" / "3.partial").mkdir()
    write_state(directory, STATE, 2, {"step": 2}, keep=[1])
    assert steps(directory) == ["1", "2"]
    assert intact_steps(directory) == [1, 2]
    write_state(directory, STATE, 5, {"step": 5}, keep=[2])
    assert steps(directory) == ["2", "5"]


def test_other_files_are_not_touched(directory):
    states = directory / "states"
    for name in ("9", "٣", ".DS_Store", "2/.nfs0001", "2/arrays/.DS_Store", "notes.partial"):
        (states / name).write_text("x")
    (states / "backup").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert intact_steps(directory) == [1, 2]
    assert newest_notes(directory) == {"step": 2}
    write_state(directory, STATE, 3, {"step": 3}, keep=[2])
    others = [".DS_Store", "9", "backup", "notes.partial", "٣"]
    assert steps(directory) == sorted(["2", "3", *others])
    assert (states / "2" / ".nfs0001").exists()
    remove_states(directory)
    assert steps(directory) == sorted(others)


@pytest.mark.parametrize("name", ["9", "9.partial"])
def test_a_file_with_the_name_of_a_state_is_renamed(directory, name):
    (directory / "states" / name).write_text("x")
    write_state(directory, STATE, 9, {"step": 9}, keep=[2])
    assert steps(directory) == ["2", "9", f"{name}.displaced"]
    assert (directory / "states" / f"{name}.displaced").read_text() == "x"
    assert intact_steps(directory) == [2, 9]


def test_missing_checksum_lines_are_detected(directory):
    sums = directory / "states" / "2" / "SHA256SUMS"
    lines = sums.read_text().splitlines(keepends=True)
    for part in (lines[:-1], lines[1:], lines[:2], []):
        sums.write_text("".join(part))
        with pytest.warns(JaxgenWarning, match="SHA256SUMS (is incomplete|cannot be read)"):
            assert intact_steps(directory) == [1]


def test_checksums_are_those_of_sha256sum(directory):
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(command, cwd=directory / "states" / "2", check=False).returncode == 0


def test_directory_without_states(tmp_path):
    assert intact_steps(tmp_path) == []
    assert newest_notes(tmp_path) is None


@pytest.mark.slow
def test_a_killed_writer_leaves_the_earlier_states_intact(tmp_path):
    command = [sys.executable, "-m", "tests.support.killed_states", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kills, outcomes = map(int, done.stdout.split())
    assert kills > 20
    assert outcomes == 2
