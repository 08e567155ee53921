"""The --output file: an interrupted writer neither loses nor duplicates an answer."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxgen.cli import answer_file as module
from jaxgen.cli.answer_file import Shard, answer_file
from jaxgen.errors import InputError
from tests.support.answers import ANSWERS, PROMPTS, RUN, WHOLE, header, lines, partial, summed, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def target(tmp_path):
    return tmp_path / "answers"


@pytest.fixture
def own(target):
    return target.with_name("answers.partial")


def files(target):
    return sorted(path.name for path in target.parent.iterdir())


def test_complete_run_leaves_one_file(target):
    assert write(target) == 0
    assert target.read_bytes() == WHOLE
    assert files(target) == ["answers"]
    with pytest.raises(InputError, match="answers exists: choose another name, or remove it"):
        write(target)


def test_lines_are_flushed_when_written(target, own):
    with answer_file(target, RUN, prompts=PROMPTS) as file:
        file.write(7, ANSWERS[7])
        assert own.read_bytes() == partial(7)
        file.write(3, ANSWERS[3])
        assert own.read_bytes() == partial(7, 3)
    assert write(target) == 2
    assert target.read_bytes() == WHOLE


@pytest.mark.slow
def test_killed_run_is_continued(target, own):
    left = partial(*range(PROMPTS - 1, -1, -1))
    for length in [*range(0, len(left), 23), len(left) - 1, len(left)]:
        own.write_bytes(left[:length])
        assert write(target) == max(left[:length].count(b"\n") - 1, 0)
        assert target.read_bytes() == WHOLE
        assert files(target) == ["answers"]
        target.unlink()


@pytest.mark.slow
def test_files_survive_kills_parallel_shards_and_full_disks(tmp_path):
    command = [sys.executable, "-m", "tests.support.answers", str(tmp_path), "30"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert seen["kills"]["killed"] >= 30
    assert seen["kills"]["continued"] > 5
    assert seen["kills"]["wrong"] == seen["kills"]["refused"] == 0
    assert seen["shards"] == {"rounds": 20, "wrong": 0}
    assert seen["disk"]["refused"] > 10
    assert seen["disk"]["torn"] == seen["disk"]["wrong"] == 0


@pytest.mark.parametrize("name", ["--input", "--temperature", "--seed", "--new"])
@pytest.mark.parametrize("place", ["answers.partial", "answers.1-of-3.partial"])
def test_file_of_another_run_is_refused(target, name, place):
    target.with_name(place).write_bytes(partial(1))
    with pytest.raises(InputError, match=f"{place} is from a run with different values of {name}: repeat that"):
        write(target, run={**RUN, name: "another"})
    assert files(target) == [place]
    assert target.with_name(place).read_bytes() == partial(1)
    target.with_name(place).write_bytes(header())  # a header without answers
    write(target, run={**RUN, name: "another"})
    assert target.read_bytes() == WHOLE


@pytest.mark.parametrize("content", [b"notes", b'{"prompt": "A"}\n', lines({"index": 0, "answers": []})])
def test_unrelated_file_is_refused(target, own, content):
    own.write_bytes(content)
    with pytest.raises(InputError, match="was not written by this command: remove it, or choose another"):
        write(target)
    assert own.read_bytes() == content


def test_damaged_line_is_answered_again(target, own, capsys):
    whole = partial(*range(PROMPTS))
    begins = [0, *(place + 1 for place, byte in enumerate(whole) if byte == 10)]
    for number in range(2, PROMPTS + 2):
        begin, end = begins[number - 1 : number + 1]
        for place in (begin, begin + 12, begin + 40, (begin + end) // 2, end - 2):
            damaged = bytearray(whole)
            damaged[place] ^= 1
            own.write_bytes(damaged)
            assert write(target) == PROMPTS - 1
            assert target.read_bytes() == WHOLE
            target.unlink()
            text = f"jaxgen: warning: {own} is damaged in line {number}: the prompt of this line is answered again\n"
            assert capsys.readouterr().err == text
    for place in (begins[1] - 1, begins[2] - 1):  # two lines become one
        own.write_bytes(whole[:place] + b" " + whole[place + 1 :])
        if place < begins[1]:
            with pytest.raises(InputError, match="is damaged in its first line: remove the file to start over"):
                write(target)
        else:
            assert write(target) == PROMPTS - 2
            assert target.read_bytes() == WHOLE
            target.unlink()


class TestShards:
    def test_last_shard_merges_the_files(self, target, capsys):
        assert write(target, shard=Shard(1, 3)) == 0
        assert files(target) == ["answers.1-of-3.partial"]
        note = "jaxgen: note: 13 of 20 prompts have no answer yet, in --shard 0/3, 2/3: "
        assert capsys.readouterr().err.startswith(note)
        write(target, shard=Shard(0, 3))
        assert "6 of 20 prompts have no answer yet, in --shard 2/3: " in capsys.readouterr().err
        write(target, shard=Shard(2, 3))
        assert target.read_bytes() == WHOLE
        assert files(target) == ["answers"]

    def test_a_different_number_of_shards_continues(self, target):
        target.with_name("answers.1-of-3.partial").write_bytes(partial(1, 4, 7)[:-9])  # prompt 7's line is cut short
        target.with_name("answers.2-of-3.partial").write_bytes(partial(2))
        assert write(target, shard=Shard(0, 2)) == 3
        assert target.with_name("answers.0-of-2.partial").read_bytes().count(b"\n") == 1 + 8
        assert write(target) == 3 + 8
        assert target.read_bytes() == WHOLE
        assert files(target) == ["answers"]

    def test_more_shards_than_prompts(self, target):
        write(target)
        target.unlink()
        assert write(target, shard=Shard(25, 30)) == 0
        assert files(target) == []

    def test_any_writer_merges_complete_files(self, target):
        target.with_name("answers.1-of-2.partial").write_bytes(partial(*range(1, 20, 2)))
        target.with_name("answers.0-of-2.partial").write_bytes(partial(*range(0, 20, 2)))
        target.with_name("answers.0-of-2.partial.merging").write_bytes(b"of a merge that was killed")
        assert write(target, shard=Shard(1, 2)) == 20
        assert target.read_bytes() == WHOLE
        assert files(target) == ["answers"]

    def test_equal_answers_of_two_files_are_merged(self, target, own):
        own.write_bytes(partial(3, 4))
        target.with_name("answers.0-of-2.partial").write_bytes(partial(4, 6))
        assert write(target) == 3
        assert target.read_bytes() == WHOLE

    def test_different_answers_of_two_files_are_not_mixed(self, target, own):
        own.write_bytes(partial(3, 4))
        target.with_name("answers.0-of-2.partial").write_bytes(header() + summed({"index": 4, "answers": [1]}))
        assert write(target) == 2
        before, after = (lines(*itertools.chain(*answers)) for answers in (ANSWERS[:4], ANSWERS[5:]))
        assert target.read_bytes() in (WHOLE, before + b"1\n" + after)

    @pytest.mark.parametrize("shard", [Shard(1, 3), Shard(0, 1)])
    def test_concurrent_writers_only_repeat_work(self, target, shard):
        with answer_file(target, RUN, prompts=PROMPTS, shard=shard) as file:
            file.write(1, ANSWERS[1])
            assert write(target) == 1
            assert target.read_bytes() == WHOLE
            file.write(4, ANSWERS[4])
        assert target.read_bytes() == WHOLE
        assert files(target) == ["answers"]

    def test_merge_can_be_repeated_after_a_full_disk(self, target, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(module.os, "fsync", full)
            with pytest.raises(OSError, match="No space"):
                write(target)
            patched.undo()
            patched.setattr(module, "_write_merged", full)
            with pytest.raises(
                InputError, match=r"answers cannot be written: No space left on device; the answers are"
            ):
                write(target)
        assert write(target) == 20
        assert files(target) == ["answers"]


def test_failed_writer_without_answers_leaves_no_file(target):
    with pytest.raises(RuntimeError, match="not today"), answer_file(target, RUN, prompts=PROMPTS):
        raise RuntimeError("not today")
    assert files(target) == []


@pytest.mark.parametrize("name", ["missing/answers", "file/answers", "x" * 300])
def test_unwritable_path_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"answers cannot be written|x+ cannot be written"):
        write(tmp_path / name)
    assert module.recorded(tmp_path / name) == {}


@pytest.mark.parametrize("function", ["_write_merged", "_done"])
def test_slower_of_two_mergers_succeeds(target, monkeypatch, function):
    """This writer and another one find that no prompt is left, and the other one is faster."""
    merge = getattr(module, function)

    def late(*args):
        result = merge(*args)
        if target.with_name("answers.partial").read_bytes().count(b"\n") > PROMPTS:
            target.write_bytes(WHOLE)
            target.with_name("answers.partial").unlink()
        return result

    monkeypatch.setattr(module, function, late)
    write(target)
    assert target.read_bytes() == WHOLE
    assert files(target) == ["answers"]
