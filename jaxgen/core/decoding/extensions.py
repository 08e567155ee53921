"""The caller's additions to a run: processors, criteria, a grammar, stop strings and a hook."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import numpy as np

from jaxgen.core.grammar.stop_strings import StopStrings
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.logits.history import History
from jaxgen.core.logits.pipeline import accepts
from jaxgen.errors import InputError


@flax.struct.dataclass
class Extensions:
    """The arguments of `generate` that every step uses, as a pytree.

    Attributes:
        processors: functions `(History, scores float32[rows, V], RowOptions) -> scores`, or without the last argument.
        criteria: functions `(History, scores float32[rows, V]) -> bool[rows]`, called after a token is appended.
        allowed: the automaton or function that determines which tokens may follow; None allows all tokens.
        stop_strings: the automaton of the stop strings, or None.
        hook: an object whose methods are called before and after each pass of the model, or None.
    """

    processors: tuple[Any, ...] = ()
    criteria: tuple[Any, ...] = ()
    allowed: TokenAutomaton | HostFunction | None = None
    stop_strings: StopStrings | None = None
    hook: Any = None


@jax.tree_util.register_pytree_node_class
class StaticCallable:
    """Wrapper that makes any object a pytree without leaves. The object is static and is compared with `==`."""

    def __init__(self, value: Any):
        self.value = value

    def __call__(self, *args: Any) -> Any:
        """Call the object."""
        return self.value(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.value)

    def tree_flatten(self):
        """Return no leaves."""
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value, leaves):
        """Wrap the object again."""
        return cls(value)


def as_pytree(value: Any) -> Any:
    """Return a function or object unchanged if it is a pytree; otherwise wrap it in a pytree without leaves."""
    leaves = jax.tree.leaves(value)
    return StaticCallable(value) if len(leaves) == 1 and leaves[0] is value else value


def functions(name: str, given: Sequence[Callable]) -> tuple[Any, ...]:
    """Check a list of functions, and return them as callable pytrees."""
    if callable(given):
        raise TypeError(f"{name} must be a list of functions: pass [function]")
    if not isinstance(given, Sequence) or not all(map(callable, given)):
        raise TypeError(f"{name} must be a list of functions, got {given!r}")
    for function in given:
        if type(function).__module__.partition(".")[0] == "transformers":
            raise TypeError(
                f"{name} contains transformers' {type(function).__name__}, which computes with torch: set the "
                "equivalent option of GenerationConfig, or write a function of (history, scores) with jax.numpy"
            )
        if name != "logits_processor" or not accepts(function, "history", "scores", "options"):
            check_arguments(name, function, "history", "scores")
    return tuple(as_pytree(function) for function in given)


def check_arguments(name: str, function: Any, *arguments: str) -> None:
    """Raise an error if the caller's function, passed as `name`, cannot be called with `arguments`."""
    if not accepts(function, *arguments):
        own = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{name} {own}{inspect.signature(function)} must accept ({', '.join(arguments)})")


@flax.struct.dataclass
class HostFunction:
    """`prefix_allowed_tokens_fn`, called on the host in every step for every row that is not done.

    The compiled program receives the function's number as an argument, so a new function does not cause recompilation.
    """

    number: jax.Array | np.ndarray
    vocab: int = flax.struct.field(pytree_node=False)

    def __call__(self, history: History) -> jax.Array:
        """Return the tokens that the function allows, bool[rows, V]."""
        shape = jax.ShapeDtypeStruct((history.ids.shape[0], self.vocab), np.dtype(bool))
        return jax.pure_callback(_ask, shape, self.number, history.ids, history.length, history.done)


_NUMBERS = itertools.count()
_CALLED: dict[int, HostCalls] = {}


class HostCalls:
    """A host function that compiled programs refer to by number.

    In an eager call to generate(), an exception in the function is stored in `error` and every row ends. At the end of
    an eager call, the number is released and no longer refers to the function. Under the caller's jit, the number is
    never released, because the compiled program contains it as a constant. An exception in the function then surfaces
    as a JAX error.
    """

    def __init__(self, function: Callable[[int, np.ndarray], Sequence[int]], vocab: int, beams: int, eager: bool):
        self.function, self.vocab, self.beams, self.eager = function, vocab, beams, eager
        self.error: BaseException | None = None
        self.number = next(_NUMBERS)
        _CALLED[self.number] = self

    @property
    def pytree(self) -> HostFunction:
        """The pytree through which a compiled program calls the function."""
        return HostFunction(np.asarray(self.number, np.int32), self.vocab)

    def close(self) -> None:
        """Unregister the function."""
        _CALLED.pop(self.number, None)

    def allowed(self, row: int, ids: np.ndarray) -> np.ndarray:
        """Call the function for a row, check its result, and return the allowed ids, int[n]."""
        tokens = list(self.function(row, ids))
        if not tokens:
            raise InputError(f"prefix_allowed_tokens_fn returned no token for row {row}: it must allow at least one")
        allowed = np.asarray(tokens)
        if not np.issubdtype(allowed.dtype, np.integer) or allowed.ndim != 1:
            raise InputError(f"prefix_allowed_tokens_fn must return a list of token ids, got {tokens!r} for row {row}")
        if allowed.min() < 0 or allowed.max() >= self.vocab:
            raise InputError(f"prefix_allowed_tokens_fn returned an id outside the vocabulary for row {row}")
        return allowed


def _ask(number, ids, length, done) -> np.ndarray:
    calls = _CALLED[int(number)]
    result = np.zeros((len(ids), calls.vocab), bool)
    ids, length, done = (np.asarray(x) for x in (ids, length, done))
    if calls.error is not None:
        return result  # allow no tokens, so that the run ends and generate() raises the error
    for row in np.flatnonzero(~done):
        try:
            result[row, calls.allowed(int(row) // calls.beams, ids[row, : length[row]])] = True
        except BaseException as error:
            if not calls.eager:
                raise
            calls.error = error
            return np.zeros_like(result)
    return result
