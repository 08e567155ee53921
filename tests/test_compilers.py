"""Programs for machines that are not here, compiled by their own compilers: pip install -e ".[tpu]"."""

import pytest

from benchmarks.targets import mesh_for
from tests.support.communication import MODEL, check_communication

pytestmark = pytest.mark.compilers


@pytest.mark.parametrize("name", ["greedy", "sampling", "beams"])
def test_communication_of_a_step_on_a_tpu(name):
    check_communication(mesh_for(MODEL, "v5e:2x4", 2, 4), name)
