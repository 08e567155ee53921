"""Compiled programs, kept for what would compile them again."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def programs_in(directory: Path) -> Iterator[dict[str, str]]:
    """Keep compiled programs in a directory, from which equal ones are taken: also those of a new `jax.jit`.

    Gives the environment with which other processes do the same.
    """
    settings = {"jax_compilation_cache_dir": str(directory), "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # what was compiled before may have settled that there is none
    yield {name.upper(): str(value) for name, value in settings.items()}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
