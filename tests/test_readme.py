"""The README's code runs as it stands, on a tiny checkpoint under the name of the one that it speaks of."""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import convert.__main__
from convert import save_hf
from jaxgen import GenerationConfig
from jaxgen.cli import main as cli
from tests.support.models import model_config, random_params
from tests.support.tokenizers import CHATML, byte_level_backend, save

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


def marked(command: str):
    """Leave what takes long and is run elsewhere with other options to CI."""
    slow = any(word in command for word in ("train", "--input", "--model"))
    return pytest.param(command, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("command", [marked(command) for command in commands()])
def test_command(workplace, command, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    piped, _, command = command.rpartition(" | ")
    if piped:
        given = subprocess.run(piped, shell=True, capture_output=True, text=True, check=True)
        monkeypatch.setattr(sys, "stdin", io.StringIO(given.stdout))
    program, *words = shlex.split(command)
    if program == "jaxgen":
        status = cli.main(words)
    else:
        assert words[:2] == ["-m", "convert"]
        status = convert.__main__.main(words[2:])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert out or words[0] == "train"


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
