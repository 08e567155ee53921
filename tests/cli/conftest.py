import shutil
from pathlib import Path

import pytest

from convert import save_hf
from jaxgen.cli import main as cli
from jaxgen.text.tokenizer import Tokenizer
from tests.support.models import counting_config, counting_params
from tests.support.tokenizers import byte_level_backend, save


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A model that counts: after A comes B, and after a token beyond the first 64, the first one, "!"."""
    folder = tmp_path_factory.mktemp("command") / "counting"
    cfg = counting_config(vocab_size=len(Tokenizer(byte_level_backend())))
    save_hf(counting_params(cfg), cfg, folder)
    return save(folder, byte_level_backend(), tokenizer_config={"eos_token": "<|im_end|>"})


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.fixture
def run(capsys):
    """Run the command in this process; returns its exit status and what it wrote."""

    def run(*arguments) -> tuple[int, str, str]:
        status = cli.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def refused(run):
    """Run the command, which must say what is wrong in one line and nothing else; returns the line."""

    def refused(*arguments) -> str:
        status, out, err = run(*arguments)
        assert (status, out) == (2, "")
        assert err.startswith("jaxgen: error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        return err

    return refused
