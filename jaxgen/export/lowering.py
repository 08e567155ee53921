"""Export a function for several platforms, and describe exported programs."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import jax
from jax import export

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.request.flat_call import FlatCall
from jaxgen.errors import ConfigError, InputError
from jaxgen.export.file import FORMAT, forms
from jaxgen.version import __version__

PLATFORMS = ("cpu", "cuda", "tpu")
_ALLOWED = (*PLATFORMS, "rocm")
_TRACEBACKS = "jax_traceback_in_locations_limit"


def check_platforms(platforms: Sequence[str]) -> None:
    """Raise an error if a platform is unknown, or if `flatbuffers` is not installed."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError(
            "flatbuffers, which jax needs to store programs, is missing: in the clone of jaxgen, run "
            'pip install -e ".[export]"'
        )
    if isinstance(platforms, str) or not platforms or not set(platforms) <= set(_ALLOWED):
        raise InputError(f"platforms must be a list of some of {', '.join(_ALLOWED)}, got {platforms!r}")


def exported(function: Callable, platforms: Sequence[str], *arguments: Any) -> export.Exported:
    """Export a function for arguments with the given shapes.

    Raises:
        ConfigError: the function calls back to the host, calls a kernel that jax cannot export, or uses an operation
            that one of the platforms lacks.
    """
    jitted = jax.jit(function)
    try:
        with _without_tracebacks():
            if calls := sorted(_callbacks(jitted.trace(*arguments).jaxpr.jaxpr)):
                raise ConfigError(
                    f"logits_processor, stopping_criteria or hook calls the host through {', '.join(calls)}, which an "
                    "exported program cannot do: compute with jax alone"
                )
            return export.export(jitted, platforms=tuple(platforms))(*arguments)
    except jax.errors.JAXTypeError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise _explained(error) from error


def _explained(error: Exception) -> Exception:
    """Translate an error from jax into an error that says what to do."""
    text = str(error)
    if "custom call" in text:
        return ConfigError(f"a kernel of logits_processor, stopping_criteria or hook cannot be exported: {text}")
    if isinstance(error, NotImplementedError) and "lowering" in text:
        return ConfigError(f"an operation is not available on all platforms: name fewer in platforms; jax says: {text}")
    return error


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Omit source paths and line numbers from programs, because they take up a quarter of the space."""
    limit = jax.config.values[_TRACEBACKS]
    jax.config.update(_TRACEBACKS, 0)
    try:
        yield
    finally:
        jax.config.update(_TRACEBACKS, limit)


def _callbacks(jaxpr: Any) -> set[str]:
    """Return the names of the operations that call back to the host."""
    found = set()
    for equation in jaxpr.eqns:
        if "callback" in equation.primitive.name:
            found.add(equation.primitive.name)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found |= _callbacks(inner)
    return found


def description(call: FlatCall, cfg: GenerationConfig, outputs: Any, program: export.Exported) -> dict[str, Any]:
    """Return a description of an exported `generate`.

    Args:
        call: the call.
        cfg: the options.
        outputs: the shapes of the outputs by name.
        program: the exported program.
    """
    partitionable = getattr(jax.config, "jax_threefry_partitionable", True)
    return {
        "format": FORMAT,
        "kind": "generate",
        "model": f"{cfg.model.model_type}, {cfg.model.dtype}, {cfg.model.num_hidden_layers} layers",
        "mode": cfg.mode,
        "options": {name: str(value) for name, value in _static(cfg, call.inputs)},
        "programs": {"generate": "(params, inputs) -> outputs"},
        "platforms": list(program.platforms),
        "devices": program.nr_devices,
        "versions": {name: version(name) for name in ("jax", "jaxlib")} | {"jaxgen": __version__},
        "calling_convention_version": program.calling_convention_version,
        "loads_with": f"jaxlib from 3 weeks before to 6 months after the release of {version('jaxlib')}",
        "random": f"{call.key_impl}, jax_threefry_partitionable={partitionable}",
        "stop_reasons": {reason.name: int(reason) for reason in StopReason},
        "inputs": forms(call.inputs),
        "outputs": forms(outputs),
        "params": forms(call.params),
    }


def _static(cfg: GenerationConfig, inputs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the options that are part of the program and differ from their defaults."""
    given = {name.partition(".")[0] for name in inputs}
    for name, option in OPTIONS.items():
        value = getattr(cfg, name)
        if name not in given and name in cfg.enabled and value is not option.default:
            yield name, value
