"""The example of GRPO: it learns, and other parameters compile nothing."""

import importlib.util
from pathlib import Path

import pytest

from tests.support.compilations import compilations

FILE = Path(__file__).resolve().parents[1] / "docs" / "examples" / "grpo.py"


@pytest.fixture(scope="module")
def grpo():
    spec = importlib.util.spec_from_file_location("grpo", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_rewards_rise_with_no_new_program(grpo, tmp_path):
    grpo.train(grpo.params, 1)
    with compilations() as count:
        curve = grpo.train(grpo.params, 12)
    assert count[0] == 0
    assert sum(curve[-4:]) > 1.2 * sum(curve[:4])
    grpo.plot(curve, tmp_path / "rewards.svg")
    assert (tmp_path / "rewards.svg").read_text().startswith("<svg")
