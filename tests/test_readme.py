"""The README's code runs as it stands, on a tiny checkpoint under the name of the one that it speaks of."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from convert import save_hf
from jaxgen import GenerationConfig
from tests.models import model_config, random_params
from tests.tokenizers import CHATML, byte_level_backend, save

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
NAME = "Qwen2.5-0.5B-Instruct"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory in which the checkpoint lies."""
    folder = tmp_path_factory.mktemp("readme")
    backend = byte_level_backend()
    model = model_config(vocab_size=300)
    end = backend.token_to_id("<|im_end|>")
    cfg = GenerationConfig(model=model, eos_token_id=[end], pad_token_id=backend.token_to_id("<|end|>"))
    save_hf(random_params(model), cfg, folder / NAME)
    save(folder / NAME, backend, tokenizer_config={"eos_token": "<|im_end|>", "chat_template": CHATML})
    talk = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Well."}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 5, encoding="utf-8")
    return folder


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [block for name, block in fenced if name == language]


@pytest.mark.slow
def test_python(workplace, monkeypatch):
    found = blocks("python")
    assert len(found) >= 8
    monkeypatch.chdir(workplace)
    names: dict = {}
    for block in found:
        exec(compile(block, "README.md", "exec"), names)
    assert (workplace / "copy-of-qwen" / "model.safetensors").exists()


def commands() -> list[str]:
    lines = [line for block in blocks("") for line in block.splitlines()]
    return [line for line in lines if re.search(r"^jaxgen |\| jaxgen |^python -m (jaxgen|convert) ", line)]


@pytest.mark.parametrize("command", commands())
def test_command(workplace, command):
    command = command.replace("python -m", f"{sys.executable} -m")
    command = re.sub(r"(^|\| )jaxgen ", rf"\1{sys.executable} -m jaxgen ", command)
    done = subprocess.run(command, shell=True, cwd=workplace, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout or " train " in command


def test_all_commands_are_found():
    assert len(commands()) == 6


def test_links_lead_somewhere():
    headings = {
        re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", README, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in headings
        elif not target.startswith("https://"):
            assert (ROOT / target).exists()
