"""The README's code runs as it stands, on a tiny checkpoint under the name of the one that it speaks of."""

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
    return folder


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_python(workplace, monkeypatch):
    found = blocks("python")
    assert len(found) >= 8
    monkeypatch.chdir(workplace)
    names: dict = {}
    for block in found:
        exec(compile(block, "README.md", "exec"), names)
    assert (workplace / "copy-of-qwen" / "model.safetensors").exists()


def test_commands(workplace):
    commands = [line for block in blocks("") for line in block.splitlines()]
    run = [line for line in commands if line.startswith(("python -m jaxgen", "python -m convert"))]
    assert len(run) == 3
    for command in run:
        command = command.replace("python -m", f"{sys.executable} -m", 1)
        done = subprocess.run(command, shell=True, cwd=workplace, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_links_lead_somewhere():
    headings = {
        re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", README, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in headings
        else:
            assert (ROOT / target).exists()
