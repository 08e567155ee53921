"""The option `--html`."""

import json

import numpy as np
import pytest

from tests.serving.test_page import settings_of


@pytest.mark.slow
def test_page_has_answers_and_log_probabilities(run, checkpoint, tmp_path):
    page = tmp_path / "page.html"
    options = ("--model", checkpoint, "A", "-n", 3, "--num-beams", 2, "--num-return-sequences", 2)
    status, out, err = run(*options, "--html", page)
    assert (status, err) == (0, "")
    settings = settings_of(page.read_text("utf-8"))
    assert (settings["kind"], settings["model"], settings["prompt"]) == ("recorded", str(checkpoint), "A")
    assert "\n\n".join(answer["text"] for answer in settings["answers"]) + "\n" == out
    for answer in settings["answers"]:
        assert answer["note"] == "3 tokens · length"
        assert "".join(token["token"] for token in answer["tokens"]) == answer["text"]
        for token in answer["tokens"]:
            likely = {other["token"]: other["logprob"] for other in token["top_logprobs"]}
            assert len(token["top_logprobs"]) == 5
            assert token["logprob"] == pytest.approx(likely.get(token["token"], token["logprob"]), abs=1e-6)
            assert bytes(token["bytes"]).decode() == token["token"]
    likeliest = settings["answers"][0]["tokens"][0]
    assert likeliest["token"] == "B"
    assert likeliest["logprob"] == pytest.approx(0, abs=1e-3)


@pytest.mark.slow
def test_page_values_equal_those_of_logprobs(run, checkpoint, tmp_path):
    page, lines = tmp_path / "page.html", tmp_path / "lines.txt"
    lines.write_text("A\n")
    options = ("--model", checkpoint, "-n", 4)
    assert run(*options, "A", "--html", page)[0] == 0
    _, out, _ = run(*options, "--input", lines, "--logprobs")
    (answer,) = settings_of(page.read_text("utf-8"))["answers"]
    wanted = [token["logprob"] for token in json.loads(out)["logprobs"]]
    np.testing.assert_allclose([token["logprob"] for token in answer["tokens"]], wanted, atol=1e-5)


def test_only_own_pages_are_overwritten(run, refused, checkpoint, tmp_path):
    page, other = tmp_path / "page.html", tmp_path / "thesis.html"
    for prompt in ("A", "B"):
        assert run("--model", checkpoint, prompt, "-n", 1, "--html", page)[0] == 0
    assert settings_of(page.read_text("utf-8"))["prompt"] == "B"
    other.write_text("<!doctype html>")
    assert "was not written by this command" in refused("--model", checkpoint, "A", "--html", other)
    assert other.read_text() == "<!doctype html>"
    assert "does not exist" in refused("--model", checkpoint, "A", "--html", tmp_path / "no" / "page.html")
    assert "is a directory" in refused("--model", checkpoint, "A", "--html", tmp_path)


@pytest.mark.parametrize("source", [("--chat",), ("--input", "-")])
def test_html_requires_a_single_prompt(refused, checkpoint, source):
    assert "--html shows the answers to one prompt" in refused("--model", checkpoint, *source, "--html", "page.html")
