from pathlib import Path

import pytest
from checkpoints import GENERATION, LLAMA, QWEN2, weights, write


@pytest.fixture
def qwen2(tmp_path) -> Path:
    return write(tmp_path / "qwen2", QWEN2, weights(QWEN2), GENERATION)


@pytest.fixture
def sharded(tmp_path) -> Path:
    return write(tmp_path / "sharded", LLAMA, weights(LLAMA, "bfloat16"), shards=3)
