"""The weights of layers, and products with them.

A weight is a plain array, or an object with a different representation, such as `LowRank`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxgen.control import alike
from jaxgen.core.model import workarounds
from jaxgen.core.model.context import NO_CONTEXT, Context
from jaxgen.errors import InputError


@runtime_checkable
class Weight(Protocol):
    """A matrix `[F, D]` that is not stored as a plain array. A `Weight` is a pytree that replaces a parameter array.

    To add a new kind of weight, write a class with the members of this protocol. Layers use a `Weight` only through
    `linear` and `look_up`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [F, D], regardless of the shapes of the stored arrays."""
        ...

    @property
    def dtype(self) -> Any:
        """The floating-point dtype of the matrix, and of the rows that `look_up` returns."""
        ...

    def specs(self, spec: PartitionSpec) -> Any:
        """Given the matrix's `spec`, return each array's `PartitionSpec`, in a tree with the weight's structure."""
        ...

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Return `rows [n, D]` times the transposed matrix, as float32[n, F]."""
        ...

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows with the indices `ids int32[B, T]`, as `[B, T, D]`; an id outside [0, F) gives NaN."""
        ...


@runtime_checkable
class Packed(Weight, Protocol):
    """A `Weight` that represents a matrix in fewer bits, and that is read from the tensors of a file.

    It is a dataclass whose field `dtype` is static. The first axis of an array indexes the matrix's rows if `specs`
    divides the array as the rows are divided (see `map_rows`). Then each entry depends only on its own row of the
    matrix, so that rows can be read separately and then concatenated. All other arrays belong to the whole matrix. No
    array depends on `dtype`. Weights of one class may differ in their static fields, and an optional array may be None.

    Attributes:
        title: an adjective for messages, such as "8-bit".
    """

    title: ClassVar[str]

    @property
    def tensors(self) -> Mapping[str, str]:
        """Each array's suffix and description, in the order of `jax.tree.leaves`.

        An array's name is the matrix's name plus the suffix.
        """
        ...

    def to_matrix(self) -> np.ndarray:
        """Return the matrix that the weight represents, as float32[n, D]; the weight must be stored in numpy arrays."""
        ...


@runtime_checkable
class Quantized(Packed, Protocol):
    """A `Packed` weight that is converted from a matrix and stored in a checkpoint of jaxgen as separate tensors.

    The first axis of each array indexes the matrix's rows. The first array does not contain floats, and its suffix is
    "". All weights of such a class have the same arrays.

    Attributes:
        name: the value of `quantize` for this kind; a checkpoint stores such weights in `model.{name}.safetensors`.
    """

    name: ClassVar[str]

    @classmethod
    def from_matrix(cls, matrix: np.ndarray, dtype: Any) -> Self:
        """Return a weight, stored in numpy arrays, that represents `matrix float32[n, D]` in `dtype`.

        Raises:
            InputError: the matrix cannot be represented. The message is a predicate, such as "is not finite".
        """
        ...


def has_packed(params: Any) -> bool:
    """Return True if a tree of parameters contains a `Packed` weight, even inside another weight."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Packed))
    return any(isinstance(leaf, Packed) for leaf in leaves)


def output_axis(weight: Any) -> int:
    """Return the axis of outputs in each array of a parameter: 1 for a stack of matrices `[E, F, D]`, otherwise 0."""
    return 1 if len(weight.shape) == 3 else 0


def map_rows(function: Callable, *weights: Any) -> Any:
    """Apply a function to the arrays whose `output_axis` indexes the rows of the matrix.

    With several weights, the function gets one array of each. The arrays that belong to the whole matrix are taken from
    the first weight. A weight that is a plain array is mapped as a whole.
    """
    first = weights[0]
    if not isinstance(first, Packed):
        return function(*weights)
    specs = first.specs(PartitionSpec(*[None] * output_axis(first), "rows", None))
    return jax.tree.map(
        lambda spec, own, *others: function(own, *others) if "rows" in spec else own, specs, first, *weights[1:]
    )


def input_unit(weight: Any) -> int:
    """Return the number at whose multiples a weight's inputs can be split across a mesh.

    A weight whose inputs cannot be split everywhere has a property `input_unit`.
    """
    return getattr(weight, "input_unit", 1)


def parameter(module: nn.Module, name: str, shape: tuple[int, ...], init: Callable, dtype: str) -> Any:
    """Return a parameter of a layer: an array or, for a matrix, possibly a `Weight`.

    Every layer declares its parameters with this function. Under `init`, parameters are created as arrays of `dtype`.

    Raises:
        InputError: the parameter is missing or does not fit.
    """
    if module.is_initializing():
        return module.param(name, init, shape, dtype)
    value = module.get_variable("params", name)
    reason = "is missing" if value is None else mismatch(value, shape)
    if reason is not None:
        raise InputError(f"params do not fit the model: {'.'.join((*module.path, name))} {reason}")
    return value


def mismatch(value: Any, shape: tuple[int, ...]) -> str | None:
    """Return the reason why `value` cannot be a parameter of this shape, or None if `value` fits."""
    if not isinstance(value, np.ndarray | jax.Array | Weight):
        return f"is of type {type(value).__name__}, wanted an array of floats"
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return f"is {value.dtype}, wanted an array of floats"
    if tuple(value.shape) != shape:
        return f"has shape {list(value.shape)}, wanted {list(shape)}"
    return None


def linear(
    x: jax.Array, weight: jax.Array | Weight, bias: jax.Array | None = None, context: Context = NO_CONTEXT
) -> jax.Array:
    """Map `x [..., D]` to `x Wᵀ + b`, of shape `[..., F]` and x's dtype. The shape of `weight` is [F, D], as in torch.

    Products are accumulated in float32. As in torch, float32 operands are never rounded to lower precision, regardless
    of `jax_default_matmul_precision`.
    """
    out = product(x.reshape(-1, x.shape[-1]), weight, context)
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def product(rows: jax.Array, weight: jax.Array | Weight, context: Context = NO_CONTEXT) -> jax.Array:
    """Return `rows [n, D]` times the transposed `weight [F, D]`, as float32[n, F]."""
    if isinstance(weight, Weight):
        return weight.product(rows, context)
    return _product(*alike(rows, weight), context.divided, context.portable)


def look_up(ids: jax.Array, table: jax.Array | Weight) -> jax.Array:
    """Return the rows of `table [V, D]` at `ids int32[B, T]`, as `[B, T, D]`; an id outside [0, V) gives NaN."""
    if isinstance(table, Weight):
        return table.look_up(ids)
    ids = jnp.where(ids < 0, table.shape[0], ids)  # a negative index would wrap around
    return workarounds.look_up(_gather, ids, table)


def precision(dtype) -> lax.Precision | None:
    """Return the precision at which products of this dtype match those in torch: full float32, not TF32 or bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(rows: jax.Array, weight: jax.Array, divided: bool | None, portable: bool) -> jax.Array:
    """Multiply using the platform's implementation; the gradient multiplies in the operands' dtype, as in torch.

    jax's default gradient would convert the 16-bit factor to float32, the dtype of the result's gradient.
    """
    return workarounds.product(_contract, rows, weight, divided, portable)


def _keep_operands(rows: jax.Array, weight: jax.Array, divided: bool | None, portable: bool):
    return _product(rows, weight, divided, portable), (rows, weight)


def _gradients(divided: bool | None, portable: bool, operands: tuple[jax.Array, jax.Array], change: jax.Array):
    rows, weight = operands
    change = change.astype(weight.dtype)
    to_rows, to_weight = _contract(change, weight, 1, 0), _contract(change, rows, 0, 0)
    return to_rows.astype(rows.dtype), to_weight.astype(weight.dtype)


_product.defvjp(_keep_operands, _gradients)


def _contract(left: jax.Array, right: jax.Array, left_axis: int = 1, right_axis: int = 1) -> jax.Array:
    """Contract one axis of each matrix; the result is float32."""
    return lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=precision(right.dtype),
        preferred_element_type=jnp.float32,
    )


def _gather(ids: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan)
