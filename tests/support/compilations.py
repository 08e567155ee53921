"""The number of compiled programs, counted by jax's own event for each compilation."""

import contextlib

import jax

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
