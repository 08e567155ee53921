"""`jaxgen run-batch` refuses bad options and files before it loads anything, and continues after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxgen.cli.main import main
from tests.support.processes import started

ROOT = Path(__file__).resolve().parents[2]


def line(number: int, **body) -> str:
    body = {"messages": [{"role": "user", "content": f"Tell me a story about {number} foxes"}], **body}
    return json.dumps({"custom_id": f"n{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["in"], "the following arguments are required: OUTPUT"),
        (["in", "out", "more"], "'more' does not belong to an option"),
        (["in", "out", "--adapter", "a=b", "--adapter", "a=c"], "--adapter has the same name twice"),
        (["in", "out", "--port", "1"], "unknown option --port"),
        (["nowhere", "out"], "nowhere: No such file"),
        (["in", "out", "--model", "/nowhere"], "neither a directory nor a hub id"),
        (["bad", "out"], "bad, line 2: url must be "),
        (["in", "in"], "in exists: choose another name, or remove it"),
    ],
)
def test_bad_arguments_are_refused(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text(line(1))
    Path("bad").write_text(line(1) + line(2).replace("chat/completions", "images"))
    assert main(["run-batch", *words]) == 2
    assert text in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.slow
def test_killed_run_continues(tmp_path):
    count = 60
    lines = [line(number, seed=number, max_tokens=200, ignore_eos=True) for number in range(count - 1)]
    (tmp_path / "in").write_text("".join([*lines, line(count - 1, max_tokens=0)]))
    partial, out = tmp_path / "out.partial", tmp_path / "out"
    command = [sys.executable, "-m", "jaxgen", "run-batch", tmp_path / "in", out, "--slots", "2", "--prompt-width"]
    command = [*map(str, command), "64", "--max-new-tokens", "200"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with started(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while not partial.exists() or partial.read_bytes().count(b"\n") < 4:  # the run and three answers
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    before = [json.loads(text) for text in partial.read_text().splitlines(keepends=True) if text.endswith("\n")][1:]
    assert 3 <= len(before) < count
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 1  # the last request is refused
    assert f"{len(before)} of {count} requests were answered before" in done.stderr
    assert "1 request could not be answered: see the field response" in done.stderr
    entries = [json.loads(text) for text in out.read_text().splitlines()]
    assert [entry["custom_id"] for entry in entries] == [f"n{number}" for number in range(count)]
    assert [entries[each["index"]] for each in before] == [each["answers"][0] for each in before]
    responses = [entry["response"] for entry in entries]
    assert [response["status_code"] for response in responses] == [200] * (count - 1) + [400]
    assert {response["body"]["usage"]["completion_tokens"] for response in responses[:-1]} == {200}
    assert not partial.exists()
