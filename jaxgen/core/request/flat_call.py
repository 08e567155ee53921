"""A call as a function of dicts of arrays with dotted names, without jaxgen's types."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.config.availability import check_options, refuse_unavailable
from jaxgen.core.config.generation_config import GenerationConfig, model_of, warn_unused
from jaxgen.core.config.generation_options import TRACED
from jaxgen.core.decoding import loop
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.loop import Decoded
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.model.context import Context
from jaxgen.core.model.sharding import mesh_of
from jaxgen.core.model.weights import Packed
from jaxgen.core.request.checks import check_call, check_room, extensions_of
from jaxgen.core.request.prepare import CallInputs, Prepared, prepare
from jaxgen.core.request.random_keys import KEY_IMPL
from jaxgen.errors import ConfigError, InputError

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class FlatCall:
    """A call to `generate`, whose prompts and options are arguments.

    Attributes:
        run: the function of two dicts: the parameters and the inputs. It returns the arguments of `output`.
        params: the shapes of the parameters.
        inputs: the shapes of the inputs.
        values: the values of inputs that `cfg` sets.
        key_impl: the implementation of random keys, the only one that gives the same bits on all platforms.
    """

    run: Callable[[Arrays, Arrays], tuple[Prepared, Decoded]]
    params: Arrays
    inputs: Arrays
    values: dict[str, np.ndarray]
    key_impl: str = KEY_IMPL


def flat_call(
    params: Any, cfg: GenerationConfig, shape: tuple[Any, int], allowed: Any = None, **functions: Any
) -> FlatCall:
    """Return a call of `shape` (B, P). `allowed` is a grammar or None, and `functions` are for `extensions_of`.

    Raises:
        InputError, ConfigError, TypeError: for the same reasons as in `generate`, or because something needs the host.
    """
    model_of(cfg)
    refuse_unavailable(cfg)
    if mesh_of(params) is not None:
        raise InputError("params are divided over a mesh, but an exported program is for one device: pass their shapes")
    for name in ("max_time", "token_healing"):
        if getattr(cfg, name):
            raise ConfigError(f"{name} needs the host, which an exported program does not call: leave it out")
    if allowed is not None and not isinstance(allowed, TokenAutomaton):
        raise TypeError(
            "prefix_allowed_tokens_fn must be a TokenAutomaton: a Python function would have to be called on the "
            "host, which an exported program cannot do"
        )
    if not cfg.on("max_new_tokens"):
        raise ConfigError("max_new_tokens is not set, but an exported program has arrays of fixed size: set it")
    check_options(cfg, shape[0])
    warn_unused(cfg)
    extensions = dataclasses.replace(extensions_of(cfg, **functions), allowed=allowed)
    budget = np.asarray(cfg.max_new_tokens, np.int32)
    if allowed is not None:
        check_room(allowed, cfg, np.atleast_1d(budget))
    run, values = _program(params, cfg, extensions, budget)
    inputs = {"ids": jax.ShapeDtypeStruct(shape, np.int32), "attention_mask": jax.ShapeDtypeStruct(shape, np.bool_)}
    if cfg.on("do_sample"):
        inputs["key"] = jax.ShapeDtypeStruct((2,), np.uint32)
    return FlatCall(run, _shapes(flat_params(params)), inputs | _shapes(values), values)


def _program(
    params, cfg: GenerationConfig, extensions: Extensions, budget: np.ndarray
) -> tuple[Callable[[Arrays, Arrays], tuple[Prepared, Decoded]], dict[str, np.ndarray]]:
    """Return the call as a function of two dicts (parameters and inputs), and the default values of its inputs."""
    capacity = int(budget.max())
    sized = cfg.reset(["max_length"]).replace(max_new_tokens=capacity)  # so that max_new_tokens sets the size of arrays
    leaves, static = sized.tree_flatten()
    on = {name: leaf for name, leaf in zip(TRACED, leaves, strict=True) if leaf is not None}
    values = {name: np.asarray(jnp.asarray(x)) for name, x in flatten(jax.tree.map(jnp.asarray, on)).items()}
    values["max_new_tokens"] = budget
    structure, names = jax.tree.structure(on), param_names(params)

    def run(params: Arrays, inputs: Arrays) -> tuple[Prepared, Decoded]:
        options = jax.tree.unflatten(structure, [inputs[name] for name in values if name != "max_new_tokens"])
        cfg = GenerationConfig.tree_unflatten(static, [options.get(name) for name in TRACED])
        tree = jax.tree.map(params.__getitem__, names)
        check_call(tree, cfg)
        key = jax.random.wrap_key_data(inputs["key"], impl=KEY_IMPL) if "key" in inputs else None
        prepared = prepare(tree, cfg, CallInputs(inputs["ids"], key, inputs["attention_mask"]), extensions, eager=False)
        run = dataclasses.replace(prepared.run, context=Context(divided=False, portable=True))
        budget = jnp.broadcast_to(jnp.minimum(inputs["max_new_tokens"], capacity), prepared.request.budget.shape)
        request = dataclasses.replace(prepared.request, budget=budget)
        return prepared, loop.decode(run, request, prepared.mode)

    return run, values


def _shapes(arrays: Arrays) -> Arrays:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


def param_names(params: Any) -> Any:
    """Return `params` with each array replaced by its tensor name in a checkpoint.

    Raises:
        InputError: checkpoints cannot store this kind of weight.
    """
    names = {}
    for name, weight in flax.traverse_util.flatten_dict(params, sep=".").items():
        suffixes = weight.tensors if isinstance(weight, Packed) else ("",)
        structure = jax.tree.structure(weight)
        if structure.num_leaves != len(suffixes):
            raise InputError(
                f"params: {name} is a {type(weight).__name__}, which has no tensors in a checkpoint: merge low-rank "
                "updates with lora.merge first"
            )
        names[name] = jax.tree.unflatten(structure, [name + suffix for suffix in suffixes])
    return flax.traverse_util.unflatten_dict(names, sep=".")


def flat_params(params: Any) -> Arrays:
    """Return the arrays of `params` in a dict, keyed by their tensor names in a checkpoint."""
    return dict(zip(jax.tree.leaves(param_names(params)), jax.tree.leaves(params), strict=True))


def flatten(tree: Any) -> Arrays:
    """Return a tree's arrays in a dict, keyed by dotted names."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in paths}
