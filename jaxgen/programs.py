"""Least-recently-used cache of the compiled programs for eager calls.

A program compiled for a CPU uses 400 to 900 memory maps. Linux limits a process to 65,530 memory maps
(`vm.max_map_count`). Beyond this limit, XLA fails to compile, and the process dies. jax keeps every program compiled
for a function as long as the function exists, so each program here is traced from a separate function object.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.backend import backends
from jax.extend.core import get_opaque_trace_state

from jaxgen.cpu import cpu_flags
from jaxgen.memory import REMEDY, SMALL, check_free
from jaxgen.progress import announced
from jaxgen.recompilation import LOG, log_compilation

_MOST = 64  # maximum number of programs; on a CPU, each uses about 20 MB of memory
_FEW = 8  # number of programs that are kept even if memory maps are scarce
_PROC = Path("/proc")

with jax.ensure_compile_time_eval():  # this module may be imported while the caller's code is being traced
    _EAGER = get_opaque_trace_state()


def under_jit() -> bool:
    """Return True if the caller's code is being traced by `jax.jit`, even if no argument is traced."""
    return _is_transformed() and isinstance(jax.device_put(np.float32(0)), Tracer)


def _is_transformed() -> bool:
    """Return True inside `jax.jit`, and inside transformations such as `jax.grad` that run eagerly."""
    return get_opaque_trace_state() != _EAGER


class Programs:
    """A cache of compiled programs for eager calls. If memory maps are scarce, fewer programs are kept.

    Args:
        most: the maximum number of programs.
    """

    def __init__(self, most: int):
        self.most = most
        self._programs: OrderedDict[tuple, Callable] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, key: tuple, make: Callable[[], Callable]) -> Callable:
        """Return the program for a key. Create a missing program with `make`, and drop other programs if necessary.

        A dropped program is freed once no thread is running it. `Program` builds keys, and `log_compilation` compares
        them.
        """
        with self._lock:
            found = self._programs.get(key)
            if found is not None:
                self._programs.move_to_end(key)
                return found
            others, freed = list(self._programs), []
            while len(self._programs) >= self.most or (len(self._programs) >= _FEW and _maps_are_scarce()):
                freed.append(self._programs.popitem(last=False)[0])
            found = self._programs[key] = make()
        if LOG.isEnabledFor(logging.INFO):
            log_compilation(key, others, freed)
        return found

    def replace(self, key: tuple, by: Callable) -> None:
        """Replace the program for a key, unless it has been dropped."""
        with self._lock:
            if key in self._programs:
                self._programs[key] = by


PROGRAMS = Programs(_MOST)


class Program:
    """A function that is compiled when called eagerly, as with `jax.jit`. `PROGRAMS` caches the compiled programs.

    If the same shapes occur on different devices or under different jax settings, `jax.jit` compiles another program
    within the same entry of `PROGRAMS`.

    While the caller's code is being traced, calls run the function itself.

    Args:
        function: a pure function; its static arguments are passed as keywords.
        name: the name in the log. The default is the function's name.
        static_argnames, donate_argnames: as in `jax.jit`.
    """

    def __init__(
        self,
        function: Callable,
        name: str | None = None,
        *,
        static_argnames: Iterable[str] = (),
        donate_argnames: Iterable[str] = (),
    ):
        functools.update_wrapper(self, function)
        self.name = name or function.__name__
        self._function = function
        self._static, self._donated = tuple(static_argnames), tuple(donate_argnames)

    def __call__(self, *args, **kwargs):
        """Run the program that fits the form of the arguments, compiling it if necessary."""
        if under_jit():
            return self._function(*args, **kwargs)
        static = tuple([(name, kwargs[name]) for name in self._static if name in kwargs])
        traced = {name: value for name, value in kwargs.items() if name not in self._static}
        leaves, structure = jax.tree.flatten((args, traced))
        # `on_cpu` turns on compiler options, which are not allowed under jax.grad. If `cpu` is the only backend, every
        # program runs on a CPU, whatever its arguments are.
        on_cpu = not _is_transformed() and (list(backends()) == ["cpu"] or _runs_on_cpu(leaves))
        # The form of a jax array, without a function call. It is not the `aval` itself: on jax 0.12, the layout in it
        # equals no other if a program loaded from a file has returned the array.
        forms = [
            _form(leaf)
            if (aval := getattr(leaf, "aval", None)) is None
            else (aval.shape, aval.dtype, getattr(aval, "weak_type", False))
            for leaf in leaves
        ]
        key = (self, structure, static, on_cpu, tuple(forms))
        return PROGRAMS.get(key, lambda: _NewProgram(key, self.jit(on_cpu, static)))(*args, **traced)

    def trace(self, *args, **kwargs) -> jax.stages.Traced:
        """Return the result of `jax.jit(...).trace`. The arguments can be abstract shapes on any device."""
        static = [(name, kwargs.pop(name)) for name in self._static if name in kwargs]
        return self.jit(_runs_on_cpu(jax.tree.leaves((args, kwargs))), static).trace(*args, **kwargs)

    def jit(self, on_cpu: bool, static: Iterable[tuple[str, Any]] = ()):
        """Return `jax.jit` of a new function object with the static arguments bound.

        Args:
            on_cpu: whether to use the compiler options for a CPU.
            static: names and values of the static arguments.
        """
        bound = dict(static)

        @functools.wraps(self._function)
        def own(*args, **kwargs):
            return self._function(*args, **kwargs, **bound)

        options = cpu_compiler_options() if on_cpu else None
        return jax.jit(own, donate_argnames=self._donated, compiler_options=options)


class _NewProgram:
    """Placeholder that compiles a program on the first call. The program then replaces the placeholder.

    Args:
        key: the program's key in `PROGRAMS`.
        function: a function returned by `jax.jit`.
    """

    def __init__(self, key: tuple, function: Any):
        self._key, self._function = key, function
        self._needed: int | None = None
        self._lock = threading.Lock()

    def __call__(self, *args, **kwargs):
        """Run the program, or raise an `InputError` if it needs more memory than is free."""
        if _is_transformed():  # jit compiles a separate program
            return self._function(*args, **kwargs)
        with self._lock:
            if self._needed is None:
                with announced(self._key[0].name):
                    self._needed = bytes_taken(self._function.lower(*args, **kwargs).compile())
        if self._needed > SMALL:
            devices = _devices(jax.tree.leaves((args, kwargs)))
            # With several processes, one process must not reject a call that the other processes start.
            if all(device.process_index == jax.process_index() for device in devices):
                check_free("this call needs {}", self._needed, devices, REMEDY)
        PROGRAMS.replace(self._key, self._function)
        # When called with the same arguments, the function finds the compiled program in jax's caches.
        return self._function(*args, **kwargs)


def bytes_taken(compiled: jax.stages.Compiled) -> int:
    """Return the number of bytes that a running program needs on each device in addition to its arguments."""
    memory: Any = compiled.memory_analysis()  # None if the compiler does not report memory use
    if memory is None:
        return 0
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def program(name: str | None = None, **argnames: Iterable[str]) -> Callable[[Callable], Program]:
    """Return a decorator that creates a `Program` with these arguments."""
    return functools.partial(Program, name=name, **argnames)


def cpu_compiler_options() -> dict[str, Any]:
    """Return the options with which XLA's CPU compiler produces the fastest programs on this machine."""
    return {"xla_cpu_prefer_vector_width": "512"} if "avx512f" in cpu_flags() else {}


def _form(leaf: Any) -> Hashable:
    """Return the form of an argument that is not a jax array: everything about its value that affects the program."""
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf)), False


def _runs_on_cpu(leaves: list[Any]) -> bool:
    """Return True if a program with these arguments runs on a CPU."""
    return next(iter(_devices(leaves))).platform == "cpu"


def _devices(leaves: list[Any]) -> Collection[Any]:
    """Return the devices that a program with these arguments runs on.

    jax uses the devices that the arguments are committed to or, if none is committed, the default device.
    """
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and getattr(leaf, "committed", isinstance(leaf, jax.ShapeDtypeStruct)):
            return sharding.device_set
    return [default_device()]


def default_device() -> Any:
    """Return the device on which jax places arrays by default."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]  # platform or None


def _maps_are_scarce() -> bool:
    """Return True if the process uses more than half of the memory maps that Linux allows."""
    try:
        most = int((_PROC / "sys/vm/max_map_count").read_text())
        with (_PROC / "self/maps").open("rb") as maps:
            return sum(1 for _ in maps) > most // 2
    except OSError:  # not Linux, so no limit is known
        return False
