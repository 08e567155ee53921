"""Cache of compiled programs for eager calls. The least recently used programs are freed.

A program compiled for a CPU takes 400 to 900 memory maps of its process. Linux allows a process 65,530
(`vm.max_map_count`); beyond that, XLA cannot compile and the process dies. jax keeps every program compiled for a
function as long as the function exists, so here each program is traced from its own function object.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.backend import backends
from jax.extend.core import get_opaque_trace_state

from jaxgen.recompilation import LOG, log_compilation

_MOST = 64  # programs; each takes about 20 MB of a CPU's memory
_FEW = 8  # programs kept even if the caller's own programs use up the memory maps
_PROC = Path("/proc")

with jax.ensure_compile_time_eval():  # this module may be imported while the caller's code is traced
    _EAGER = get_opaque_trace_state()


def under_jit() -> bool:
    """Return True if the caller's code is being traced by `jax.jit`, even if no argument is."""
    return _is_transformed() and isinstance(jax.device_put(np.float32(0)), Tracer)


def _is_transformed() -> bool:
    """Return True inside `jax.jit`, and inside transformations such as `jax.grad` that run eagerly."""
    return get_opaque_trace_state() != _EAGER


class Programs:
    """The compiled programs of eager calls, limited in number and by the memory maps left to the process.

    Attributes:
        most: the maximum number of programs.
        directory: where programs for the default device are also stored, for other processes; None for nowhere. Only
            use it in processes that do not change jax's settings, like the command.
    """

    def __init__(self, most: int):
        self.most = most
        self.directory: Path | None = None
        self._programs: OrderedDict[tuple, Callable] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, key: tuple, make: Callable[[], Callable]) -> Callable:
        """Return the program for a key, created by `make` if there is none; others may be dropped to make room for it.

        A dropped program is freed once no thread runs it. Keys are those of `Program`, which the log explains.
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


PROGRAMS = Programs(_MOST)


class Program:
    """A function that is compiled when called eagerly, like `jax.jit` of it, with its programs in `PROGRAMS`.

    If the same shapes occur on other devices, or under other settings of jax, `jax.jit` compiles again, in the same
    entry.

    While the caller's code is being traced, calls run the function itself.

    Args:
        function: a pure function; its static arguments are passed as keywords.
        name: the name in the log; by default the function's name.
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
        """Run the program for arguments of this form; compile it if necessary."""
        if under_jit():
            return self._function(*args, **kwargs)
        static = tuple([(name, kwargs[name]) for name in self._static if name in kwargs])
        traced = {name: value for name, value in kwargs.items() if name not in self._static}
        leaves, structure = jax.tree.flatten((args, traced))
        on_cpu = not _is_transformed() and (_only_cpus() or _runs_on_cpu(leaves))  # in jax.grad, jit accepts no options
        # The form of a jax array is its attribute; isinstance would take longer.
        forms = [_form(leaf) if (aval := getattr(leaf, "aval", None)) is None else aval for leaf in leaves]
        stored = PROGRAMS.directory is not None and not (_is_transformed() or _is_elsewhere(leaves))
        key = (self, structure, static, on_cpu, stored, tuple(forms))
        return PROGRAMS.get(
            key, lambda: self._in_file(on_cpu, static, structure, forms) if stored else self.jit(on_cpu, static)
        )(*args, **traced)

    def _in_file(self, on_cpu: bool, static: tuple, structure, forms: list) -> Callable:
        """Return the program for arguments of this form, which is read from a file, or written to it, when called."""
        from jaxgen.program_files import StoredProgram  # most processes do not need its imports

        forms = [f"{form} {getattr(form, 'weak_type', False)}" for form in forms]
        made_from = structure, static, self._donated, forms, cpu_compiler_options() if on_cpu else None
        function = self.jit(on_cpu, static)
        return StoredProgram(cast(Path, PROGRAMS.directory), default_device(), function, made_from)

    def trace(self, *args, **kwargs) -> jax.stages.Traced:
        """Return the result of `jax.jit(...).trace`: the program before compilation, for shapes on any device."""
        static = [(name, kwargs.pop(name)) for name in self._static if name in kwargs]
        return self.jit(_runs_on_cpu(jax.tree.leaves((args, kwargs))), static).trace(*args, **kwargs)

    def jit(self, on_cpu: bool, static: Iterable[tuple[str, Any]] = ()):
        """Return `jax.jit` of a new function object, to which the static arguments are bound.

        Args:
            on_cpu: whether to use the compiler's options for a CPU.
            static: names and values.
        """
        bound = dict(static)

        @functools.wraps(self._function)
        def own(*args, **kwargs):
            return self._function(*args, **kwargs, **bound)

        options = cpu_compiler_options() if on_cpu else None
        return jax.jit(own, donate_argnames=self._donated, compiler_options=options)


def program(name: str | None = None, **argnames: Iterable[str]) -> Callable[[Callable], Program]:
    """Return a decorator that creates a `Program`, with the same arguments except the function."""
    return functools.partial(Program, name=name, **argnames)


@functools.cache
def cpu_compiler_options() -> dict[str, Any]:
    """Return the options for which XLA's CPU compiler produces the fastest programs on this machine."""
    return {"xla_cpu_prefer_vector_width": "512"} if "avx512f" in _cpu_flags() else {}


def _form(leaf: Any) -> Hashable:
    """Return the form of an argument that is not a jax array: all that a program depends on."""
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf))


def _is_elsewhere(leaves: list[Any]) -> bool:
    """Return True if an array is not only on the default device."""
    here = {default_device()}
    return any(sharding.device_set != here for leaf in leaves if (sharding := getattr(leaf, "sharding", None)))


def _only_cpus() -> bool:
    return list(backends()) == ["cpu"]


def _runs_on_cpu(leaves: list[Any]) -> bool:
    """Return True if a program with these arguments runs on a CPU.

    jax runs a program on the devices that its arguments are committed to, or otherwise on the default device.
    """
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and getattr(leaf, "committed", isinstance(leaf, jax.ShapeDtypeStruct)):
            return next(iter(sharding.device_set)).platform == "cpu"
    return default_device().platform == "cpu"


def default_device() -> Any:
    """Return the device on which jax places arrays by default."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]


def _maps_are_scarce() -> bool:
    """Return True if the process has used half of the memory maps that Linux allows it."""
    try:
        most = int((_PROC / "sys/vm/max_map_count").read_text())
        with (_PROC / "self/maps").open("rb") as maps:
            return sum(1 for _ in maps) > most // 2
    except OSError:  # not Linux, so no limit is known
        return False


def _cpu_flags() -> set[str]:
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}
