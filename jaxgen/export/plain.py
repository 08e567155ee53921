"""Convert trees of jaxgen's types to dicts of arrays with dotted names."""

from __future__ import annotations

from typing import Any

import flax.traverse_util
import jax

from jaxgen.errors import InputError
from jaxgen.model.weights import Quantized

KEYS = "threefry2x32"  # the only kind of random key that gives the same bits on all platforms


def param_names(params: Any) -> Any:
    """Return `params` with each array replaced by its tensor name in a checkpoint.

    Raises:
        InputError: checkpoints cannot store this kind of weight.
    """
    names = {}
    for name, weight in flax.traverse_util.flatten_dict(params, sep=".").items():
        suffixes = weight.tensors if isinstance(weight, Quantized) else ("",)
        structure = jax.tree.structure(weight)
        if structure.num_leaves != len(suffixes):
            raise InputError(
                f"params: {name} is a {type(weight).__name__}, which has no tensors in a checkpoint: merge low-rank "
                "updates with lora.merge first"
            )
        names[name] = jax.tree.unflatten(structure, [name + suffix for suffix in suffixes])
    return flax.traverse_util.unflatten_dict(names, sep=".")


def flat_params(params: Any) -> dict[str, Any]:
    """Return the arrays of `params` in a dict, keyed by their tensor names in a checkpoint."""
    return dict(zip(jax.tree.leaves(param_names(params)), jax.tree.leaves(params), strict=True))


def flatten(tree: Any) -> dict[str, Any]:
    """Return a tree's arrays in a dict, keyed by dotted names."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in paths}
