"""Tokenizers and chat templates like those of published checkpoints, compared with transformers' results."""

import json
from pathlib import Path

import pytest

from jaxgen import Tokenizer
from jaxgen.core.text import chat_template
from jaxgen.errors import InputError

CHATS = Path(__file__).parents[1] / "goldens" / "seed0" / "chats"
NAMES = sorted(folder.name for folder in CHATS.iterdir() if folder.is_dir())
ENCODINGS, PROMPTS = (json.loads((CHATS / f"{name}.json").read_text("utf-8")) for name in ("encodings", "prompts"))


@pytest.fixture(autouse=True)
def _today(monkeypatch):
    class Clock:
        def now(self):
            return self

        def strftime(self, form):
            return "29 February 2024"

    monkeypatch.setattr(chat_template, "datetime", Clock())


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request) -> tuple[str, Tokenizer]:
    return request.param, Tokenizer.from_pretrained(CHATS / request.param)


def test_texts(tokenizer):
    name, tok = tokenizer
    assert len(ENCODINGS[name]) >= 12
    for case in ENCODINGS[name]:
        ids = tok.encode(case["text"])
        assert ids == case["ids"], case["text"]
        assert tok.encode(case["text"], add_special_tokens=False) == case["plain"]
        assert tok.decode(ids) == case["decoded"]
        assert tok.decode(ids, skip_special_tokens=False) == case["decoded_whole"]


def test_prompts(tokenizer):
    name, tok = tokenizer
    assert len(PROMPTS[name]) >= 8
    for golden in PROMPTS[name]:
        options = {"add_generation_prompt": True} | golden
        messages, prompt, ids, error = (options.pop(key, None) for key in ("messages", "prompt", "ids", "error"))
        if error is not None:
            with pytest.raises(InputError) as raised:
                tok.render_chat(messages, **options)
            assert str(raised.value).endswith(f"{CHATS / name} fails on this conversation: {error}")
            continue
        assert tok.render_chat(messages, **options) == prompt
        (row,), _ = tok.chat(messages, **options)
        assert row.tolist() == ids
        if name.startswith("gemma"):
            assert ids.count(tok.bos_token_id) == 1


def test_saved_tokenizers_are_the_same(tokenizer, tmp_path):
    name, tok = tokenizer
    tok.save_pretrained(tmp_path / name)
    saved = Tokenizer.from_pretrained(tmp_path / name)
    for case in ENCODINGS[name]:
        assert saved.encode(case["text"]) == case["ids"]
    assert saved.render_chat(PROMPTS[name][0]["messages"]) == PROMPTS[name][0]["prompt"]


def test_token_bytes(tokenizer):
    name, tok = tokenizer
    table, text = tok.token_bytes(), "The answer is 12345.\n\nnaïve 你好 👋  "
    joined = b"".join(table[index] or b"" for index in tok.encode(text)).decode()
    assert joined == (" " + text if name == "phi3" else text)  # Llama 2's tokenizers put a space before texts
