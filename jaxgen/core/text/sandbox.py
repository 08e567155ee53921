"""A sandbox for a checkpoint's jinja code, with limits on time and on the size of values.

Jinja's own sandbox isolates a template from the machine, but limits neither its time nor its memory. This sandbox
measures every value that a template creates, and refuses a call whose result could be huge. Because sizes are limited,
no single operation takes long. Checking the clock between operations limits the total time, and works in any thread. A
single operation of a hostile template may still take a second and some hundred MB.
"""

import contextvars
import re
import time
from collections.abc import Callable, Iterator, Mapping, Set, ValuesView
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor
from jinja2 import nodes

SECONDS = 1.0  # maximum CPU time; each million input characters adds `SECONDS` to the maximum
# `LARGEST` is the maximum number of characters in one value or in the output; `_ALL` is the maximum for all values
# together.
LARGEST, _ALL = 1_000_000, 50_000_000
_PER_INPUT, _ALL_PER_INPUT = 60, 300  # growth of `LARGEST` and `_ALL` per input character
_STEPS = 32  # number of steps between two checks of the clock
_NONE: Mapping[str, Any] = MappingProxyType({})
_FACTOR = 100  # values for which only an upper bound is known may be this many times as large
_OBJECT = 50  # an object counts as this many characters
_LARGEST_INTEGER = 100_000  # bits

# These patterns find, in linear time, the format fields that are rejected because their output could be too large.
# A field is rejected if it has a width of four digits, takes its width from an argument, or reads an attribute or item.
# The name in "%(name)9s" can contain any character, and the pattern for "%" does not find where the name ends. A text
# with "%(" is therefore rejected if it contains four digits in a row.
_BRACES = re.compile(r"\{[^{}:]*:[^{}]*\d{4}|\{[^{}]*\{|\{[^{}:!]*[.\[]")
_WIDE = {
    "%": re.compile(r"\A(?=.*?%\().*?\d{4}|%[^%a-zA-Z]*(\d{4}|\*)", re.DOTALL),
    "format": _BRACES,
    "format_map": _BRACES,
}
# These filters and methods can take quadratic time, and no known template uses them.
_REFUSED = set("decode encode pprint striptags urlize wordwrap".split())


class TooMuch(BaseException):
    """Error for a template that exceeds a limit. The base is `BaseException`, because jinja may catch `Exception`."""


class _Limits:
    def __init__(self, given: Any):
        size = size_of(given, 10**9)
        self.largest = LARGEST + _PER_INPUT * size
        self.all = self.left = _ALL + _ALL_PER_INPUT * size
        self.steps = 0
        self.seconds = SECONDS * (1 + size / 1e6)
        self.deadline = time.thread_time() + self.seconds

    def counted(self, value: Any) -> Any:
        """Count one step, add the size of a value that the template created to the total, and return the value."""
        self.count(1)
        self.left -= 0 if value is None else size_of(value, self.largest)
        if self.left < 0:
            raise TooMuch(f"creates more than {self.all:,} characters in total")
        return value

    def count(self, steps: int) -> None:
        """Count steps, and check the clock every `_STEPS` steps."""
        self.steps += steps
        if self.steps >= _STEPS:
            self.steps = 0
            if time.thread_time() > self.deadline:
                raise TooMuch(f"takes longer than {self.seconds:.3g} s")

    def check(self, size: int) -> None:
        """Raise an error if a value of `size` characters would be too large."""
        if size > self.largest:
            raise TooMuch(f"creates a value of more than {self.largest:,} characters")

    def check_call(self, name: str, value: Any, arguments: tuple, named: Mapping[str, Any] = _NONE) -> None:
        """Reject a filter or string method whose result could be more than `_FACTOR` times too large.

        The bound assumes that the result contains the arguments once for each character of `value`, and that an integer
        argument is a number of characters.
        """
        if name in _REFUSED:
            raise TooMuch(f"uses {name}, which is not allowed")
        if name in _WIDE and _WIDE[name].search(str(value)):
            raise TooMuch("has a format field with a width of more than 999 characters, an attribute or an item")
        if name in ("default", "d"):  # returns one of its arguments
            return
        extent = sum(map(_extent, (*arguments, *named.values())))
        if name == "replace" and isinstance(value, str) and len(arguments) > 1 and not named:
            times = value.count(str(arguments[0]))
        else:
            times = size_of(value, self.largest)
        self.check(max(extent, times * extent // _FACTOR))


_limits: contextvars.ContextVar[_Limits] = contextvars.ContextVar("limits")


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render a template from an `Environment`, within limits that grow with the size of the variables.

    Raises:
        TooMuch: a limit was exceeded; the message says which.
    """
    token = _limits.set(_Limits(list(variables.values())))
    try:
        return template.render(variables)
    finally:
        _limits.reset(token)


def size_of(value: Any, largest: int) -> int:
    """Return the number of characters in a value and its contents, plus `_OBJECT` for each item, key and value.

    Raises:
        TooMuch: the size exceeds `largest`.
    """
    size, items = 0, ()
    if isinstance(value, (str, bytes)):
        size = len(value)
    elif isinstance(value, (list, tuple, Set, ValuesView)):
        size, items = _OBJECT * len(value), value
    elif isinstance(value, (dict, Mapping)):
        size, items = 2 * _OBJECT * len(value), (*value, *value.values())
    for item in items:
        if size > largest:
            break
        size += size_of(item, largest)
    if size > largest:
        raise TooMuch(f"creates a value of more than {largest:,} characters")
    return size


def _extent(value: Any) -> int:
    return abs(value) if isinstance(value, int) else size_of(value, 10**9)


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. Call `render` to render its templates."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any):
        super().__init__(finalize=_output, **options)
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]
        plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
        plain.filters |= {
            **filters,
            "counted": lambda value: value,
            "steps": lambda number: _limits.get().count(number),
            "concatenated": lambda values: self.concat(map(str, values)),
        }
        plain.getitem = self.getitem
        self.filters = {name: _limited(name, plain.call_filter) for name in plain.filters}
        self.tests = {name: _limited(name, plain.call_test, checked=False) for name in plain.tests}

    def from_string(self, source: Any, *arguments: Any, **named: Any) -> jinja2.Template:
        """Compile a template."""
        return super().from_string(_Counting().visit(self.parse(source)), *arguments, **named)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item or attribute; the filters read each part of a path such as "a.b.c" by this method."""
        _limits.get().count(1)
        return super().getitem(obj, argument)

    def concat(self, pieces: Any) -> str:  # type: ignore[override]
        """Join the output of a template, a macro or a block."""
        limits, size, kept = _limits.get(), 0, []
        for piece in pieces:
            size += len(piece)
            limits.check(size)
            kept.append(piece)
        return limits.counted("".join(kept))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`."""
        limits = _limits.get()
        if operator == "%" and isinstance(left, str):
            limits.check_call("%", left, (right,))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (bits * abs(right) if operator == "**" else bits + right.bit_length()) > _LARGEST_INTEGER:
                raise TooMuch(f"creates an integer of more than {_LARGEST_INTEGER:,} bits")
        elif operator == "*" and not isinstance(left, float) and not isinstance(right, float):
            limits.check(_extent(left) * _extent(right))
        return limits.counted(self.binop_table[operator](left, right))

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **named: Any) -> Any:
        """Call a function, method or macro."""
        limits, method = _limits.get(), getattr(__obj, "__wrapped__", __obj)  # jinja wraps `format` and `format_map`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if len(arguments) > 99:  # a macro can output all its arguments
            limits.counted(arguments)
        if isinstance(owner, str | bytes | int):
            if name == "join":
                arguments = tuple(map(list, arguments))
            limits.check_call(name, owner, arguments, named)
        return limits.counted(super().call(__context, __obj, *arguments, **named))


def _limited(name: str, call: Callable[..., Any], checked: bool = True) -> Callable[..., Any]:
    """Return a function that calls a jinja filter or jinja test within the limits; `checked` is False for a test."""

    @jinja2.pass_context  # keeps jinja from calling the function at compile time
    def call_within_limits(context: Any, value: Any, *arguments: Any, **named: Any) -> Any:
        limits = _limits.get()
        value = list(value) if name == "join" or isinstance(value, Iterator) else value
        if checked:
            limits.check_call("%" if name == "format" else name, value, arguments, named)
        return limits.counted(call(name, value, arguments, named, context=context))

    return call_within_limits


@jinja2.pass_context  # keeps jinja from calling the function at compile time
def _output(context: Any, value: Any) -> str:
    """Return the text that the template writes for a value."""
    limits = _limits.get()
    if not isinstance(value, str):
        size_of(value, limits.largest)  # raises an error if the text would be too large
        value = str(value)
    return limits.counted(value)


class _Namespace(jinja2.utils.Namespace):
    def __repr__(self) -> str:  # a namespace can contain itself
        return "<Namespace>"


class _Counting(jinja2.visitor.NodeTransformer):
    """Rewrites a template to count loop iterations, macro calls, and operations that do not call the environment.

    A comparison with a constant is cheap, so it only adds one step to the enclosing loop iteration or macro call.
    """

    def generic_visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> nodes.Node:
        """Rewrite a node and its children."""
        node = super().generic_visit(node, *arguments, **named)
        if isinstance(node, nodes.For | nodes.Macro):
            steps = nodes.Const(1 + sum(1 for _ in node.find_all(nodes.Compare)))
            node.body.insert(0, nodes.ExprStmt(_filtered(steps, "steps", node.lineno), lineno=node.lineno))
        if isinstance(node, nodes.For):
            node.test = node.test and _counted(node.test)
        if isinstance(node, nodes.Compare):
            operands = [node.expr, *(operand.expr for operand in node.ops)]
            return node if any(isinstance(operand, nodes.Const) for operand in operands) else _counted(node)
        if isinstance(node, nodes.Concat):
            return _filtered(nodes.Tuple(node.nodes, "load"), "concatenated", node.lineno)
        is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        is_tuple = isinstance(node, nodes.Tuple) and node.ctx == "load"
        makes = is_slice or is_tuple or isinstance(node, nodes.List | nodes.Dict)
        return _counted(node) if makes else node


def _counted(node: nodes.Node) -> nodes.Filter:
    return _filtered(node, "counted", node.lineno)


def _filtered(node: nodes.Node, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line)
