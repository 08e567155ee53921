from pathlib import Path

import pytest

from convert.__main__ import main
from tests.support.checkpoints import GENERATION, LLAMA, QWEN2, weights, write


@pytest.fixture
def qwen2(tmp_path) -> Path:
    return write(tmp_path / "qwen2", QWEN2, weights(QWEN2), GENERATION)


@pytest.fixture
def sharded(tmp_path) -> Path:
    return write(tmp_path / "sharded", LLAMA, weights(LLAMA, "bfloat16"), shards=3)


@pytest.fixture
def call(capsys):
    """Return a function that runs the command and returns its exit status, stdout and stderr."""

    def call(*arguments) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            status = exit_.code
        return status, *capsys.readouterr()

    return call
