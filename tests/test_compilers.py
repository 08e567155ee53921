"""Programs for machines that are not here, compiled by their own compilers: pip install -e ".[tpu]"."""

import pytest

from benchmarks.targets import mesh_for
from tests.support.communication import MODEL, STEPS, check_communication

pytestmark = pytest.mark.compilers


@pytest.mark.parametrize(("name", "shape"), [*((name, (2, 4)) for name in STEPS), ("sampling", (1, 8))])
def test_communication_of_a_step_on_a_tpu(name, shape):
    check_communication(mesh_for(MODEL, "v5e:2x4", *shape), name)
