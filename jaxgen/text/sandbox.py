"""A sandbox for the jinja code of a checkpoint, with limits on time and on the size of values.

Jinja's own sandbox keeps a template away from the machine, but lets it run forever and fill the memory. Here every
value that a template makes is measured; where one operation could make a huge one, its size is estimated first. So
each operation is short, and checking the clock between them bounds the whole, in any thread.
"""

import contextvars
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor
from jinja2 import nodes

SECONDS = 1.0  # of CPU time, plus the same per million input characters
# Characters of a value or the output, and of all values; and more of them per input character.
LARGEST, _ALL = 1_000_000, 50_000_000
_PER_INPUT, _ALL_PER_INPUT = 60, 300
_OBJECT = 50  # characters that count as much as an object
_LARGEST_INTEGER = 100_000  # bits

# Fields whose width has four digits or is a value, and fields with attributes, which are not measured.
_WIDE = {"%": re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)"), "{": re.compile(r"\{[^{}]*(:[^{}]*\d{4}|\{)|\{[^{}:!]*\.")}
# Filters and methods that may write their arguments once for each part of a value.
_MULTIPLYING = {"expandtabs", "indent", "join", "replace", "tojson"}
# Those with a number of characters or items as an argument.
_LENGTHENING = {"batch", "center", "ljust", "rjust", "round", "slice", "zfill"}
# Filters that may read an attribute, or an attribute of an attribute, of each item.
_BY_ATTRIBUTE = {"groupby", "map", "max", "min", "rejectattr", "selectattr", "sort", "sum", "unique"}
# These may take quadratic time, and no known template uses them.
_REFUSED = set("decode encode pprint striptags to_bytes translate urlize wordwrap xmlattr".split())


class TooMuch(BaseException):
    """A template that exceeds a limit. Not an `Exception`, which jinja catches here and there."""


class _Limits:
    def __init__(self, given: Any):
        size = size_of(given, 10**9)
        self.largest = LARGEST + _PER_INPUT * size
        self.all = self.left = _ALL + _ALL_PER_INPUT * size
        self.steps = 0
        self.seconds = SECONDS * (1 + size / 1e6)
        self.deadline = time.thread_time() + self.seconds

    def counted(self, value: Any) -> Any:
        """Return a value that the template made, after counting it."""
        self.steps += 1
        if self.steps % 32 == 0 and time.thread_time() > self.deadline:
            raise TooMuch(f"takes longer than {self.seconds:.3g} s")
        self.left -= 0 if value is None else size_of(value, self.largest)
        if self.left < 0:
            raise TooMuch(f"makes more than {self.all:,} characters in all")
        return value

    def check(self, size: int) -> None:
        """Raise an error if a value of this size would be too large."""
        if size > self.largest:
            raise TooMuch(f"makes a value of more than {self.largest:,} characters")

    def check_call(self, name: str, value: Any, arguments: tuple, sign: str = "{") -> None:
        """Raise an error if a filter or a method of a string would make too much; `sign` begins a format's fields."""
        if name in _REFUSED:
            raise TooMuch(f"uses {name}, which is not offered")
        if name in ("format", "format_map"):
            if _WIDE[sign].search(str(value)):
                raise TooMuch("formats with a width of more than 999 characters, or an attribute")
            self.check(len(str(value)) + str(value).count(sign) * size_of(arguments, self.largest))
        elif name in _MULTIPLYING:
            self.check(size_of(value, self.largest) * (1 + sum(map(_extent, arguments))))
        elif name in _LENGTHENING:
            self.check(sum(map(_extent, arguments)))
        elif name in _BY_ATTRIBUTE and any(str(argument).count(".") > 99 for argument in arguments):
            raise TooMuch(f"passes an attribute of more than 100 parts to {name}")


_limits: contextvars.ContextVar[_Limits] = contextvars.ContextVar("limits")


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render a template of an `Environment`, within limits that grow with the size of its variables.

    Raises:
        TooMuch: a limit was exceeded; the text says which.
    """
    token = _limits.set(_Limits(list(variables.values())))
    try:
        return template.render(variables)
    finally:
        _limits.reset(token)


def size_of(value: Any, largest: int) -> int:
    """Return the characters in nested lists and dicts, plus `_OBJECT` for each object.

    Raises:
        TooMuch: it is more than `largest`.
    """
    size, items = 0, ()
    if isinstance(value, (str, bytes)):
        size = len(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        size, items = _OBJECT * len(value), value
    elif isinstance(value, (dict, Mapping)):
        size, items = 2 * _OBJECT * len(value), (*value, *value.values())
    for item in items:
        if size > largest:
            break
        size += size_of(item, largest)
    if size > largest:
        raise TooMuch(f"makes a value of more than {largest:,} characters")
    return size


def _extent(value: Any) -> int:
    return abs(value) if isinstance(value, int) else len(str(value))


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits; `render` its templates."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any):
        super().__init__(**options)
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]
        plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
        plain.filters |= {**filters, "counted": lambda value: value}
        self.filters = {name: _limited(name, plain.call_filter) for name in plain.filters}
        self.tests = {name: _limited(name, plain.call_test) for name in plain.tests}

    def from_string(self, source: Any, *arguments: Any, **named: Any) -> jinja2.Template:
        """Compile a template."""
        return super().from_string(_Counting().visit(self.parse(source)), *arguments, **named)

    def concat(self, pieces: Any) -> str:  # type: ignore[override]
        """Join the output of a template, a macro or a block."""
        pieces, limits = list(pieces), _limits.get()
        limits.check(sum(map(len, pieces)))
        return limits.counted("".join(pieces))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Calculate `left operator right`."""
        limits = _limits.get()
        if operator == "%" and isinstance(left, str):
            limits.check_call("format", left, (right,), "%")
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (bits * abs(right) if operator == "**" else bits + right.bit_length()) > _LARGEST_INTEGER:
                raise TooMuch(f"makes an integer of more than {_LARGEST_INTEGER:,} bits")
        elif operator == "*" and not isinstance(left, float) and not isinstance(right, float):
            limits.check(_extent(left) * _extent(right))
        return limits.counted(self.binop_table[operator](left, right))

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **named: Any) -> Any:
        """Call a function, method or macro."""
        limits, method = _limits.get(), getattr(__obj, "__wrapped__", __obj)  # jinja wraps `format` and `format_map`
        owner = getattr(method, "__self__", None)
        if len(arguments) > 99:  # the macro may write them
            limits.counted(arguments)
        if isinstance(owner, str | bytes | int) and method.__name__ == "join":
            arguments = tuple(map(list, arguments))
            limits.check_call("join", arguments, (owner,))
        elif isinstance(owner, str | bytes | int):
            limits.check_call(method.__name__, owner, (*arguments, *named.values()))
        return limits.counted(super().call(__context, __obj, *arguments, **named))


def _limited(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or a test with limits. It takes the context, so that jinja does not call it while compiling."""

    @jinja2.pass_context
    def call_within_limits(context: Any, value: Any, *arguments: Any, **named: Any) -> Any:
        limits = _limits.get()
        value = list(value) if name == "join" else value
        limits.check_call(name, value, (*arguments, *named.values()), "%")
        return limits.counted(call(name, value, arguments, named, context=context))

    return call_within_limits


class _Namespace(jinja2.utils.Namespace):
    def __repr__(self) -> str:  # it can contain itself
        return "<Namespace>"


class _Counting(jinja2.visitor.NodeTransformer):
    """Passes what is computed without calling the environment, and each turn of a loop, to the filter "counted"."""

    def generic_visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> nodes.Node:
        """Rewrite a node and those in it."""
        node = super().generic_visit(node, *arguments, **named)
        if isinstance(node, nodes.For):
            node.body.insert(0, nodes.ExprStmt(_counted(nodes.Const(None)), lineno=node.lineno))
            node.test = node.test and _counted(node.test)
        is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        is_tuple = isinstance(node, nodes.Tuple) and node.ctx == "load"
        makes = is_slice or is_tuple or isinstance(node, nodes.List | nodes.Dict | nodes.Concat)
        return _counted(node) if makes else node


def _counted(node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, "counted", [], [], None, None, lineno=node.lineno)
