"""Generated checkpoints that are damaged or hostile: each causes a one-line error, or loads with a correct result."""

import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from convert import CheckpointError
from convert.errors import SHOWN_PROBLEMS
from jaxgen import json_file
from jaxgen.errors import LONGEST, ConfigError, InputError, JaxgenError, one_line
from tests.support.bounded import MOST_SECONDS, bounded
from tests.support.choice import Choice
from tests.support.damage import cases
from tests.support.templates import HOSTILE

ROOT = Path(__file__).resolve().parents[2]
BYTES = 500 << 20
SEED = Choice.of_environment().seed
# Errors about the conversation rather than a file.
OF_THE_CONVERSATION = ("prompt 0 has no tokens", "this tokenizer has no chat template")


def outcomes(folder: Path, count: int) -> list[dict]:
    """Try `count` cases of each group (0: all of them) in a separate process."""
    command = [sys.executable, "-m", "tests.support.damage", str(SEED), str(count), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RUST_BACKTRACE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Traceback" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(outcome: dict) -> None:
    text, lines = outcome["text"], outcome["text"].split("\n")
    assert outcome["seconds"] < MOST_SECONDS, outcome
    assert outcome["bytes"] < BYTES, outcome
    if outcome["kind"] == "loaded":
        assert not text, outcome
        return
    assert text.replace("\n  - ", "").isprintable(), outcome
    assert len(text) <= LONGEST, outcome
    assert len(lines) == 1 or ("problems" in lines[0] and len(lines) <= 1 + SHOWN_PROBLEMS), outcome
    assert outcome["path"] in text or text.startswith(OF_THE_CONVERSATION), outcome


def check_all(found: list[dict], tried: int, record_property) -> None:
    for outcome in found:
        check(outcome)
    table = collections.Counter((outcome["group"], outcome["kind"]) for outcome in found)
    record_property("damaged", {f"{group}, {kind}": count for (group, kind), count in sorted(table.items())})
    assert len(found) == tried
    refused = sum(count for (_, kind), count in table.items() if kind == "refused")
    assert 0.7 * tried < refused < tried


@pytest.mark.slow
def test_sample_of_damaged_checkpoints_is_refused(tmp_path, record_property):
    expected = cases(SEED, 15)
    assert len(expected) > 100
    assert len({case.group for case in expected}) == 8
    check_all(outcomes(tmp_path, 15), len(expected), record_property)


@pytest.mark.slow
def test_all_damaged_checkpoints_are_refused(tmp_path, record_property):
    expected = cases(SEED, 0)
    assert len(expected) > 9000
    check_all(outcomes(tmp_path, 0), len(expected), record_property)


def test_number_of_hostile_templates():
    assert len(HOSTILE) >= 60


# Tests of functions that the generated cases rely on


def test_error_messages_are_one_line():
    assert one_line("a\n  b\x00\ud800") == "a b\\x00\\ud800"
    assert one_line("x" * 50, 10) == "xxxxxx ..."
    assert one_line("é ☃") == "é ☃"
    for error in (JaxgenError, ConfigError, InputError):
        assert str(error("a\r\nb")) == "a b"


def test_further_problems_are_counted():
    error = CheckpointError([f"p{n}\n{n}" for n in range(30)])
    assert len(error.problems) == 30
    lines = str(error).split("\n  - ")
    assert lines[:2] == ["30 problems, the first 20 of which are:", "p0 0"]
    assert len(lines) == 21
    assert str(CheckpointError(["one"])) == "one"


@pytest.mark.parametrize("count", [2, 5, 20, 300_000])
@pytest.mark.parametrize("length", [1, 90, 95, 100, 141, 1000])
def test_messages_of_many_problems_are_bounded(count, length):
    error = CheckpointError(["x" * length] * count)
    lines = str(error).split("\n  - ")
    assert len(str(error)) <= LONGEST
    assert lines[1:] == error.first == error.problems[: len(error.first)]
    assert len(error.first) == min(count, SHOWN_PROBLEMS) or len(str(error)) > LONGEST - 100 - 505
    shown = "" if len(error.first) == count else f", the first {len(error.first)} of which are"
    assert lines[0] == f"{count} problems{shown}:"


def test_the_command_prints_a_bounded_line(tmp_path, call):
    header = json.dumps({f"a damaged entry, the {n}th of many": {} for n in range(1000)}).encode()
    path = tmp_path / "a directory whose name is quite long"
    path.mkdir()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    status, _, err = call("--list", path)
    assert status == 2
    assert err.count("\n") == 1
    assert len(err) <= LONGEST
    assert re.search(r"1000 problems, the first \d+ of which are: - ", err)


def test_duplicate_keys_do_not_take_quadratic_time(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("{" + ",".join(f'"{n}":1,"{n}":1' for n in range(100_000)) + "}")
    with bounded(), pytest.raises(ConfigError, match="duplicate keys: 0, 1, 10, "):
        json_file.read_json(file)


def test_valid_json_is_read(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"a": {"b": [1, "\\ud83d\\ude00"]}, "b": -Infinity}')
    assert json_file.read_json(file) == {"a": {"b": [1, "😀"]}, "b": float("-inf")}
    assert json_file.read_json(tmp_path / "absent") is None
