"""The GRPO example: rewards rise without recompilation, and `--one-program` gives the same results."""

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
def test_rewards_rise_without_new_programs(grpo, rank, tmp_path):
    weights, state, step = grpo.trainer(rank)
    weights, state, _ = grpo.train(weights, state, step, 1)
    with compilations() as count:
        *_, curve = grpo.train(weights, state, step, 14)
    assert count[0] == 0
    assert sum(curve[-5:]) > 1.2 * sum(curve[:5])
    grpo.plot(curve, tmp_path / "rewards.svg")
    assert (tmp_path / "rewards.svg").read_text().startswith("<svg")


def test_single_program_gives_the_same_result(grpo):
    curves = [grpo.train(*grpo.trainer(one_program=whole), 3)[2] for whole in (False, True)]
    np.testing.assert_allclose(curves[0], curves[1], atol=1e-3)
