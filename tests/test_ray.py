"""The Ray Data example: two actors give the answers of one engine, and an interrupted run resumes."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxgen import Tokenizer, demo, generate_many, load_hf

ROOT = Path(__file__).resolve().parents[1]
SLOTS, WIDTH, NEW_TOKENS = 4, 32, 12


@pytest.mark.slow
def test_two_actors(tmp_path, programs, monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed: install the extra test")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    prompts = [f"Tell me a story about {number} foxes" for number in range(20)]
    prompts[7] = "too long " * WIDTH
    (tmp_path / "prompts").write_text("\n".join(prompts), encoding="utf-8")
    answers = tmp_path / "answers"
    command = [sys.executable, ROOT / "docs/examples/ray_data.py", tmp_path / "prompts", answers, "--batch", "5"]
    command += ["--slots", str(SLOTS), "--prompt-width", str(WIDTH), "--max-new-tokens", str(NEW_TOKENS)]

    def run() -> dict[int, dict]:
        subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=500)
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
        assert sorted(row["index"] for row in rows) == list(range(20))
        return {row["index"]: row for row in rows}

    first = run()
    params, cfg = load_hf(demo.PATH)
    cfg, tokenizer = cfg.replace(max_new_tokens=NEW_TOKENS), Tokenizer.from_pretrained(demo.PATH)
    texts = [{"text": prompt} for prompt in prompts]
    sizes = {"slots": SLOTS, "prompt_width": WIDTH}
    for done in generate_many(params, texts, jax.random.key(0), cfg, tokenizer=tokenizer, **sizes):
        row = {"index": done.index, "text": done.text or "", "tokens": done.tokens}
        assert first[done.index] == row | {"stop_reason": done.stop_reason.name, "error": done.error or ""}
    assert "but at most 32 are accepted" in first[7]["error"]

    lines = answers.read_bytes().splitlines(keepends=True)
    answers.write_bytes(b"".join(lines[:12]) + lines[12][:20])
    assert run() == first
    assert answers.read_bytes().startswith(b"".join(lines[:12]))
