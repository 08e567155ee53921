"""`jaxgen serve` rejects bad options before it loads anything, and serves from startup until SIGTERM."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from jaxgen.cli.main import main
from jaxgen.cli.serve_options import parse
from tests.support.processes import started

NAMES = ["localhost", "evil.example"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--port", "70000"], "--port 70000 must be at most 65535"),
        (["--prot", "1"], "unknown option --prot: did you mean --port?"),
        (["a", "b"], "'b' does not belong to an option"),
        (["--slots", "0"], "0 must be at least 1"),
        (["--max-in-flight", "9"], f"--max-in-flight 9 must be at least {560 * 2**20} with --max-body 4194304 and"),
        (["--max-answer", str(2**29)], "change one of them"),
        (["--cors-origin", "http://a/"], "must be SCHEME://HOST"),
        (["--cors-origin", "example.org"], "must be SCHEME://HOST"),
        (["--allowed-host", "example.org:80/"], "must be a name such as example.org"),
        (["--allowed-host", "a:80"], "must be a name such as example.org"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key", "good", "--api-key", "secret "], "--api-key begins or ends with whitespace"),
        (["--ssl-keyfile", str(ROOT / "LICENSE")], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", str(ROOT / "LICENSE")], "both must be PEM files"),
        (["--response-store-bytes", "-1"], "-1 must be at least 0"),
        (["--host", "999.1.1.1"], "--host 999.1.1.1"),
        (["nowhere", "--port", "0"], "nowhere"),
    ],
)
def test_bad_arguments_are_refused(words, text, capsys):
    assert main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "secret" not in error


@pytest.mark.parametrize("key", ["", "secret\n", "secretключ"])
def test_unusable_key_in_the_environment_is_refused(key, monkeypatch, capsys):
    monkeypatch.setenv("JAXGEN_API_KEY", key)
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert "JAXGEN_API_KEY" in error
    assert "secret" not in error
    assert parse(["--api-key", "good"]).api_key == ["good"]  # which takes precedence


def test_port_in_use_is_an_error(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert main(["serve", "--port", str(other.getsockname()[1])]) == 2
    assert re.search(r"--port \d+ of 127\.0\.0\.1: Address already in use", capsys.readouterr().err)


@pytest.mark.slow
def test_service_starts_answers_and_stops(tmp_path):
    command = [sys.executable, "-m", "jaxgen", "serve", "--port", "0", "--slots", "2", "--prompt-width", "64"]
    command += ["--max-new-tokens", "64", "--api-key", "one", "--api-key", "two", "--name", "mine"]
    command += ["--cors-origin", "http://[::1]:3000", "--response-store-bytes", "0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # plugins for other devices may print warnings
    with started(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        found = (re.search(r"mine at (http://127\.0\.0\.1:\d+/v1)", line) for line in process.stderr)
        url = next(filter(None, found))  # raises StopIteration if the process exits first
        with httpx.Client(base_url=url[1], headers={"Authorization": "Bearer two"}, timeout=60) as http:
            [card] = http.get("/models").json()["data"]
            assert (card["id"], card["max_model_len"]) == ("mine", 640)
            origin = {"Origin": "http://[::1]:3000"}
            assert http.get("/models", headers=origin).headers["access-control-allow-origin"] == origin["Origin"]
            response = http.post("/responses", json={"input": "Hello", "max_output_tokens": 1}).json()
            assert response["store"] is False
            assert len(http.post("/embeddings", json={"input": "Hello"}).json()["data"][0]["embedding"]) == 192
            # The address is this machine's, so the Host header must be, too.
            assert [http.get("/models", headers={"Host": name}).status_code for name in NAMES] == [200, 421]
            messages = [{"role": "user", "content": "Who are you?"}]
            answer = http.post("/chat/completions", json={"messages": messages, "temperature": 0}).json()
            assert "jaxgen" in answer["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
