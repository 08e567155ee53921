"""A limit on the CPU time that hostile input may take."""

import contextlib
import time

# The slowest input takes less than one second on a quiet machine, and five on a busy one. Without the product's own
# limits, hostile input would take minutes or run forever.
MOST_SECONDS = 10


@contextlib.contextmanager
def bounded(given: object = ""):
    """Check that the body takes at most ten CPU seconds. `given` describes the input in the message."""
    start = time.process_time()
    try:
        yield
    finally:
        seconds = time.process_time() - start
        assert seconds < MOST_SECONDS, f"{seconds:.1f} CPU seconds: {str(given)[:200]}"
