"""The number of compiled programs, counted by listening to the event that jax records for each compilation."""

import contextlib
from collections.abc import Callable

import jax
import numpy as np

EVENT = "/jax/core/compile/backend_compile_duration"
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **kw: name == EVENT and COMPILED.append(name)
)


@contextlib.contextmanager
def compilations():
    before = len(COMPILED)
    counted = []
    yield counted
    counted.append(len(COMPILED) - before)


@contextlib.contextmanager
def listening(event: str, found: list[str]):
    """Append to `found` each time jax records the event."""

    def listen(name: str, **_):
        if name == event:
            found.append(name)

    jax.monitoring.register_event_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_listener(listen)


def compiled_by_other_values(run: Callable, cfg, **options: Callable) -> int:
    """Return how many programs are compiled by 29 calls of `run(cfg, prompts)` that follow a first call.

    Each call varies the prompts, `repetition_penalty`, eos ids, budget, and the fields in `options`. `options` maps
    each field to a function that draws a value with a NumPy generator.
    """
    rng = np.random.default_rng(0)
    options = {
        "repetition_penalty": lambda rng: float(rng.uniform(1.2, 2)),
        "eos_token_id": lambda rng: rng.integers(0, 50, rng.integers(1, 4)).tolist(),
        "max_new_tokens": lambda rng: int(rng.integers(1, 20)),
    } | options

    def call():
        prompts = [rng.integers(1, 60, rng.integers(1, 20)).tolist() for _ in range(3)]
        run(cfg.replace(**{name: draw(rng) for name, draw in options.items()}), prompts)

    call()
    with compilations() as count:
        for _ in range(29):
            call()
    return count[0]
