import gc
import os
import signal
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

# Tests spend most of their time compiling. Turning off LLVM's optimizations saves a third; the old emitters of XLA,
# which jaxlib 0.10 still has, save another third. CI runs the parity tests with the default emitters, with and without
# optimizations, and the default tests with the newest jax, which has only the new emitters.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

# A busy machine compiles slowly, and the tests must not depend on when jaxgen reports that.
os.environ["JAXGEN_PROGRESS"] = "0"

import jax
import pytest

from jaxgen import enable_cache
from tests.support.choice import Choice

# Background jobs of a shell ignore Ctrl-C and Ctrl-\, and the processes that tests start would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# JAX keeps more than a million Python objects alive. By default, visiting them takes 7 % of the run.
DEFAULT_GC = gc.get_threshold()
RARE_GC = (50_000, 20, 20)
gc.set_threshold(*RARE_GC)

# Strict, so that an accidental change of shape or dtype is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 8)  # for meshes


def _find_data() -> Path | None:
    named = os.environ.get("JAXGEN_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None


DATA = _find_data()


def pytest_collection_modifyitems(config, items):
    """Deselect the tests that are not in the parts chosen by JAXGEN_SLOW_TESTS and JAXGEN_FILES."""
    slow, files = Choice.of_environment(), Choice.of_environment("JAXGEN_FILES")

    def is_chosen(item: pytest.Item) -> bool:
        name = item.nodeid
        return files.has(name.split("::")[0]) and (item.get_closest_marker("slow") is None or slow.has(name))

    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = filter(is_chosen, items)


@pytest.fixture(autouse=True, scope="session")
def programs(request, tmp_path_factory) -> dict[str, str]:
    """Cache compiled programs on disk; return the environment variables that make other processes cache theirs.

    This process's programs are kept for later runs, in pytest's own cache, which `--cache-clear` empties. Tests kill
    some of the processes that they start, so programs of those are kept for this run only.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    cache = getattr(request.config, "cache", None)  # None with `-p no:cacheprovider`
    jax.config.update("jax_compilation_cache_dir", None)
    with warnings.catch_warnings(record=True):  # others can write to the checkout, say
        kept = None if cache is None else enable_cache(cache.mkdir("programs"))
    if kept is None:
        enable_cache(shared)
    settings = {"jax_compilation_cache_dir": str(shared / "programs"), "jax_persistent_cache_min_compile_time_secs": 0}
    environment = {name.upper(): str(value) for name, value in settings.items()}
    os.environ.update(environment)
    return environment


@pytest.fixture
def default_gc() -> Iterator[None]:
    """Collect garbage as often as Python does by default, for tests of this process's memory."""
    gc.set_threshold(*DEFAULT_GC)
    yield
    gc.set_threshold(*RARE_GC)


@pytest.fixture(scope="session")
def data() -> Path:
    """Return the folder of real checkpoints, tokenizers and test vectors; skip the test if there is none."""
    if DATA is None:
        pytest.skip("no real data: set JAXGEN_DATA or put it at ../shared/data")
    return DATA
