"""The file of --output: whatever interrupts its writer, nothing is lost and nothing is there twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxgen.cli.answer_file import answer_file
from jaxgen.errors import InputError
from tests.support.answers import BATCH, COPIES, PROMPTS, RUN, WHOLE, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def target(tmp_path):
    return tmp_path / "answers"


@pytest.fixture
def partial(target):
    return target.with_name("answers.partial")


@pytest.fixture
def record(target):
    return target.with_name("answers.partial.run")


def files(target):
    return sorted(path.name for path in target.parent.iterdir())


def test_written_at_once(target):
    assert write(target) == 0
    assert target.read_bytes() == WHOLE
    assert files(target) == ["answers"]
    with pytest.raises(InputError, match="answers exists: choose another name, or remove it"):
        write(target)


def test_whatever_a_kill_leaves_is_continued(target, partial, record):
    for length in [*range(0, len(WHOLE), 7), len(WHOLE) - 1, len(WHOLE)]:
        partial.write_bytes(WHOLE[:length])
        record.write_text(json.dumps(RUN))
        complete = WHOLE[:length].count(b"\n") // COPIES
        assert write(target) == (complete if complete == PROMPTS else complete // BATCH * BATCH)
        assert target.read_bytes() == WHOLE
        assert files(target) == ["answers"]
        target.unlink()


def test_killed_writers_and_full_disks(tmp_path):
    command = [sys.executable, "-m", "tests.support.answers", str(tmp_path), "30"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert seen["kills"]["killed"] == 30
    assert seen["kills"]["continued"] > 5
    assert seen["kills"]["wrong"] == 0
    assert seen["disk"]["refused"] > 10
    assert seen["disk"]["torn"] == seen["disk"]["wrong"] == 0


@pytest.mark.parametrize("name", ["--input", "--temperature", "--seed", "--new"])
def test_the_file_of_another_run_is_refused(target, partial, record, name):
    lines = WHOLE[: WHOLE.index(b"\n") + 1]
    partial.write_bytes(lines)
    record.write_text(json.dumps(RUN))
    with pytest.raises(InputError, match=f"is from a run with other values of {name}: repeat that"):
        write(target, run={**RUN, name: "another"})
    assert (partial.read_bytes(), json.loads(record.read_text())) == (lines, RUN)
    record.write_text("torn")
    with pytest.raises(InputError, match="which says what it is: remove it"):
        write(target)
    assert partial.read_bytes() == lines


SIZES = {"prompts": PROMPTS, "copies": COPIES, "batch_size": BATCH}
ROUNDING = {"--dtype": "bfloat16", "--batch-size": BATCH, "--device": "cpu", "--mesh": "1x1"}


@pytest.mark.parametrize(("name", "before"), [("--batch-size", 8), ("--device", "NVIDIA H100"), ("--mesh", "1x8")])
def test_another_rounding_is_accepted_with_a_warning_in_16_bits(target, partial, record, capsys, name, before):
    def resume(before, now, kept=1):
        target.unlink(missing_ok=True)
        partial.write_bytes(WHOLE[: len(WHOLE) * kept // 2])
        record.write_text(json.dumps(before))
        write(target, run=now)
        assert target.read_bytes() == WHOLE
        return capsys.readouterr().err

    begun = RUN | ROUNDING | {name: before}
    line = resume(begun, RUN | ROUNDING)
    assert line.startswith(
        f"jaxgen: warning: {partial} was begun with {name} {before}: in bfloat16 this changes the rounding"
    )
    assert line.count("\n") == 1
    assert "in float16" in resume(begun | {"--dtype": "float16"}, RUN | ROUNDING | {"--dtype": "float16"})
    assert resume(RUN | ROUNDING, RUN | ROUNDING) == ""
    assert resume(begun | {"--dtype": "float32"}, RUN | ROUNDING | {"--dtype": "float32"}) == ""
    assert resume(begun, RUN | ROUNDING, kept=0) == ""  # nothing to continue
    assert resume(begun, RUN | ROUNDING, kept=2) == ""  # nothing to add


def test_a_run_that_had_several_forms_remembers_them(target, partial, record, capsys):
    small, large = RUN | ROUNDING, RUN | ROUNDING | {"--batch-size": 8}

    def interrupted(run):
        with pytest.raises(RuntimeError), answer_file(target, run, **SIZES):
            raise RuntimeError
        return capsys.readouterr().err

    partial.write_bytes(WHOLE[: len(WHOLE) // 2])
    record.write_text(json.dumps(small))
    assert "was begun with" not in interrupted(small)
    assert f"--batch-size {BATCH}:" in interrupted(large)
    assert "--batch-size 8:" in interrupted(small)  # although it began with this one


def test_a_writer_that_fails_leaves_nothing_if_nothing_was_written(target):
    with (
        pytest.raises(RuntimeError, match="not today"),
        answer_file(target, RUN, **SIZES),
    ):
        raise RuntimeError("not today")
    assert files(target) == []


def test_one_writer_at_a_time(target):
    message = "is being written by another process"
    with answer_file(target, RUN, prompts=0, copies=1, batch_size=1), pytest.raises(InputError, match=message):
        write(target)


@pytest.mark.parametrize("name", ["missing/answers", "file/answers", "x" * 300])
def test_a_place_that_cannot_be_written(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--output .* cannot be written"):
        write(tmp_path / name)
