"""Stop the construction of a grammar, which can take seconds, from another thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class _Check(threading.local):
    call: Callable[[], object] | None = None


_check = _Check()


@contextlib.contextmanager
def stoppable(check: Callable[[], object]) -> Iterator[None]:
    """Call `check` often while the block constructs grammars in this thread; an exception that it raises ends them."""
    outer, _check.call = _check.call, check
    try:
        yield
    finally:
        _check.call = outer


def check_stop() -> None:
    """Raise the exception that ends the current construction, if it must end."""
    if _check.call is not None:
        _check.call()
