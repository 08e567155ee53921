"""A limit on the CPU time that hostile input may take."""

import contextlib
import time

# The slowest input takes less than one second on a quiet machine, and up to five on a busy one. Without the package's
# limits, hostile input would take minutes or run forever.
MOST_SECONDS = 10


@contextlib.contextmanager
def bounded(given: object = ""):
    """Check that the `with` block takes less than ten CPU seconds. The error message shows `given`, the input."""
    start = time.process_time()
    try:
        yield
    finally:
        seconds = time.process_time() - start
        assert seconds < MOST_SECONDS, f"{seconds:.1f} CPU seconds: {str(given)[:200]}"
