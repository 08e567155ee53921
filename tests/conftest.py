import os
import signal
from importlib.metadata import version
from pathlib import Path

# Compiling is most of the time. LLVM's optimizations are a third of it; XLA's former emitters, which 0.10 still has,
# save another third. CI runs parity with the emitters that users have, without and with the optimizations, and the
# default tests with the newest jax, which has no other emitters.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.support.slow_tests import Choice

# A shell's background jobs ignore interrupts, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Strict, so that a shape or a dtype that changes by accident is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 8)  # for meshes


def _find_data() -> Path | None:
    named = os.environ.get("JAXGEN_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None


DATA = _find_data()


def pytest_collection_modifyitems(config, items):
    """Leave out the slow tests that JAXGEN_SLOW_TESTS does not choose."""
    choice = Choice.of_environment()
    left_out = [item for item in items if item.get_closest_marker("slow") and not choice.has(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="session")
def programs(tmp_path_factory) -> dict[str, str]:
    """Keep on disk what this run compiles, for other files and processes; the environment that these need."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    settings = {"jax_compilation_cache_dir": str(shared / "programs"), "jax_persistent_cache_min_compile_time_secs": 0}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # what was compiled while importing may have settled that there is none
    environment = {name.upper(): str(value) for name, value in settings.items()}
    os.environ.update(environment)  # of the processes that tests start
    return environment


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real checkpoints, tokenizers and vectors; skips where it is absent."""
    if DATA is None:
        pytest.skip("no real data: set JAXGEN_DATA or put it at ../shared/data")
    return DATA
