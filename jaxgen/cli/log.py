"""jaxgen's log on stderr, for `--debug`."""

import contextlib
import logging
from collections.abc import Iterator

from jaxgen.cli import terminal


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, with its traceback if there is one."""
        terminal.write(f"jaxgen: {record.levelname.lower()}: {self.format(record)}")


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Print log records of level INFO and above while the block runs."""
    logger, handler = logging.getLogger("jaxgen"), _Lines()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
