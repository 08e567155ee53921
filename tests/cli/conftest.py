import shutil
from pathlib import Path

import pytest

from convert import save_hf
from jaxgen.cli import main as cli
from jaxgen.core.text.tokenizer import Tokenizer
from tests.support.models import counting_config, counting_params
from tests.support.tokenizers import CHATML, byte_level_backend, save


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """Save a counting model: "B" follows "A", and any token with an id of 64 or more is followed by "!", token 0."""
    folder = tmp_path_factory.mktemp("command") / "counting"
    cfg = counting_config(vocab_size=len(Tokenizer(byte_level_backend())))
    save_hf(counting_params(cfg), cfg, folder)
    return save(folder, byte_level_backend(), tokenizer_config={"eos_token": "<|im_end|>"})


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.fixture
def talking(copy) -> Path:
    """Add a chat template to the saved model."""
    (copy / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return copy


@pytest.fixture
def run(capsys):
    """Return a function that runs the command in this process and returns its status, stdout and stderr."""

    def run(*arguments) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def refused(run):
    """Return a function that runs a command, checks that all it prints is a one-line error, and returns that line."""

    def refused(*arguments) -> str:
        status, out, err = run(*arguments)
        assert (status, out) == (2, "")
        assert err.startswith("jaxgen: error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        return err

    return refused
