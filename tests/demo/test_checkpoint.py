"""The bundled model does what its card says."""

import itertools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

from convert import load_hf
from demo import corpus
from demo.__main__ import held_out_loss, main as make_demo, tell, tokenizer_json
from jaxgen import Tokenizer
from jaxgen.demo import PATH

ROOT = Path(__file__).resolve().parents[2]
GALLERY = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
CARD = (PATH / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo():
    return *load_hf(PATH), Tokenizer.from_pretrained(PATH)


def test_an_existing_directory_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["demo", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        make_demo()
    assert f"error: {tmp_path} exists: choose another name" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert not tmp_path.with_name(tmp_path.name + ".training").exists()


def test_checkpoint_is_small(demo):
    params, cfg, tokenizer = demo
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert sum(file.stat().st_size for file in PATH.iterdir() if file.is_file()) < 4_000_000
    assert cfg.model.vocab_size == len(tokenizer)
    assert f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters" in CARD


@pytest.mark.parametrize(("number", "least"), [(12, 11), pytest.param(50, 45, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_unseen_requests_get_matching_stories(demo, number, least):
    requests = corpus.requests(7, number)
    prompts = [*(request.prompt for request in requests), "Who are you?"]
    *stories, answer = tell(*demo, prompts, rows=number + 1)
    assert "jaxgen" in answer
    complete = 0
    for request, story in zip(requests, stories, strict=True):
        words = re.findall(r"[a-z]+", f"{request.hero} {request.thing}".lower())
        complete += all(word in story.lower() for word in words)
        assert 40 < len(story.split()) < 250, story
        assert story.isascii()
        assert story.rstrip()[-1] in '.!?"', story
    assert complete >= least


@pytest.mark.slow
def test_held_out_loss_matches_the_model_card(demo):
    params, cfg, tokenizer = demo
    stated = float(re.search(r"held-out loss \| ([\d.]+)", CARD)[1])
    assert abs(held_out_loss(params, cfg.model, tokenizer) - stated) < 0.01


def test_gallery_shows_the_first_requests():
    prompts = re.findall(r"^> \*\*(.*)\*\*$", GALLERY, re.MULTILINE)
    assert prompts == [request.prompt for request in corpus.requests(1, 10)]


def test_tokenizer_round_trips_and_compresses(demo):
    tokenizer = demo[2]
    texts = [turn["content"] for talk in itertools.islice(corpus.conversations(5), 50) for turn in talk]
    for text in [*texts, "Ünïcode ☃ and\ttabs\n\n  spaces"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    lengths = [len(tokenizer.encode(text)) / len(text.split()) for text in texts if len(text.split()) > 50]
    assert np.mean(lengths) < 1.8


def test_old_and_new_releases_read_the_same_tokenizer(demo):
    text = (PATH / "tokenizer.json").read_text("utf-8")
    content = json.loads(text)
    # tokenizers 0.19, which transformers 4.41.1 needs, cannot read merges such as ["a", "b"].
    assert all(re.fullmatch(r"[^ ]+ [^ ]+", merge) for merge in content["model"]["merges"])
    # transformers 5 adds this normalizer to a Qwen2 checkpoint's tokenizer; 4.41.1 adds none.
    assert content["normalizer"] == {"type": "NFC"}
    assert tokenizer_json(tokenizers.Tokenizer.from_str(text)) == text
    assert demo[2].encode("cafe\u0301") == demo[2].encode("café")
    assert demo[2].encode("Tell me a story about a fox.") == [553, 339, 259, 333, 340, 259, 960, 90, 16]
