"""The example of GRPO: it learns, other parameters compile nothing, and one compiled function does the same."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.support.compilations import compilations

FILE = Path(__file__).resolve().parents[1] / "docs" / "examples" / "grpo.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grpo():
    spec = importlib.util.spec_from_file_location("grpo", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rank", [None, 4])
def test_rewards_rise_with_no_new_program(grpo, rank, tmp_path):
    trainer = grpo.Trainer(rank)
    grpo.train(trainer, 1)
    with compilations() as count:
        curve = grpo.train(trainer, 12)
    assert count[0] == 0
    assert sum(curve[-4:]) > 1.2 * sum(curve[:4])
    grpo.plot(curve, tmp_path / "rewards.svg")
    assert (tmp_path / "rewards.svg").read_text().startswith("<svg")


def test_one_program_does_the_same(grpo):
    curves = [grpo.train(grpo.Trainer(None), 3, one_program) for one_program in (False, True)]
    np.testing.assert_allclose(curves[0], curves[1], atol=1e-3)
