"""A sandbox for the jinja code of a checkpoint, with limits on what it computes.

Jinja's own sandbox keeps a template away from the machine, but lets it run for ever and fill the memory. Here every
value that a template makes is measured, and the sum of all is limited. So each step is short, and a deadline that is
checked between the steps of Python bounds the whole, in any thread and without signals.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import json
import os
import pprint
import re
import string
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import markupsafe

SECONDS = 1.0  # of CPU time, and as much again for each million of characters of input
# Characters of the output and of a value, to which come some for each character of input.
LARGEST_OUTPUT, LARGEST = 1_000_000, 10_000_000
_PER_INPUT = 60
_ALL = 5  # times the largest value: the sum of all
_OBJECT = 50  # characters that count as much as an object
_DEEPEST = 200  # lists and dicts in each other
_LARGEST_INTEGER = 100_000  # bits
_LARGEST_ARGUMENT = 1_000_000
_LARGEST_INDENT = 16

# Fields with a width of four digits or more, or of a width that is a value.
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*(:[^{}]*\d{4}|\{)")

# The code in which a template spends its time. An error raised elsewhere, as in a callback of the garbage collector,
# would be lost.
_PACKAGES, _MODULES = (jinja2, markupsafe, json), (textwrap, pprint, string)
_TRACED = (
    "<template>",
    *(os.path.dirname(inspect.getfile(package)) for package in _PACKAGES),
    *map(inspect.getfile, _MODULES),
)


class TooMuch(BaseException):
    """A template that exceeds a limit. Not an `Exception`, which jinja catches here and there."""


@dataclasses.dataclass
class _Limits:
    deadline: float
    largest: int
    left: int


_limits: contextvars.ContextVar[_Limits] = contextvars.ContextVar("limits")


@contextlib.contextmanager
def limited(given: Any = (), *, rendering: bool = True) -> Iterator[int]:
    """Limit a template that is compiled or rendered in this block; yield the most characters of output.

    The limits grow with the size of `given`, the template's input. The deadline is checked at each line of Python while
    rendering, which makes it ten times slower, and else at each call.

    Raises:
        TooMuch: a limit was exceeded; the text says which.
    """
    size = size_of(given, 10**9)
    largest = LARGEST + _PER_INPUT * size
    seconds = SECONDS * (1 + size / 1e6)
    limits = _Limits(time.thread_time() + seconds, largest, _ALL * largest)
    token, tracer = _limits.set(limits), sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_TRACED):
            return None
        # A generator may be resumed to be closed, and then an error would be lost.
        resumed = event != "line" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if not resumed and time.thread_time() > limits.deadline:
            raise TooMuch(f"takes longer than {seconds:.3g} s")
        return trace if rendering else None

    sys.settrace(trace)
    try:
        yield LARGEST_OUTPUT + _PER_INPUT * size
    finally:
        sys.settrace(tracer)
        _limits.reset(token)


def size_of(value: Any, largest: int) -> int:
    """Return the characters in nested lists and dicts, plus `_OBJECT` for each object.

    Raises:
        TooMuch: it is more than `largest`, or nested too deeply.
    """
    total, level = 0, [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, Mapping):
                total += 2 * _OBJECT * len(item)
                below += (*item.keys(), *item.values()) if total <= largest else ()
            elif isinstance(item, list | tuple | set | frozenset):
                total += _OBJECT * len(item)
                below += item if total <= largest else ()
            if total > largest:
                raise TooMuch(f"makes a value of more than {largest:,} characters")
        if not below:
            return total
        level = below
    raise TooMuch(f"nests values more than {_DEEPEST} deep")


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits; compile and render its templates inside `limited`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any):
        super().__init__(optimized=False, **options)
        self.code_generator_class = _Generator
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"], self.filters["urlize"]

    def limit_filters(self) -> None:
        """Measure what the filters make; call this after the last filter was added."""
        self.filters = {name: _limited_filter(self, name, function) for name, function in self.filters.items()}

    def counted(self, value: Any) -> Any:
        """Return a value that the template made, after counting it."""
        if not isinstance(value, int | float | None):
            limits = _limits.get()
            limits.left -= size_of(value, limits.largest)
            if limits.left < 0:
                raise TooMuch(f"makes more than {_ALL * limits.largest:,} characters in all")
        return value

    def check(self, size: int) -> None:
        """Raise an error if a value of this size would be too large; called before it is made."""
        largest = _limits.get().largest
        if size > largest:
            raise TooMuch(f"makes a value of more than {largest:,} characters")

    def concat(self, pieces: Any) -> str:  # type: ignore[override]
        """Join the output of a macro or a block."""
        pieces = list(pieces)
        self.check(sum(map(len, pieces)))
        return self.counted("".join(pieces))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Calculate `left operator right`."""
        if operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            count, other = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(other, int):
                _check_integer(count.bit_length() + other.bit_length())
            elif not isinstance(other, float):
                self.check(max(count, 0) * max(size_of(other, _limits.get().largest), 1))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_integer(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str | bytes):
            self.check_format(left, right, "%", _WIDE_PERCENT)
        return self.counted(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a safe form of the method `format` or `format_map` of a string."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def format_within_limits(*arguments: Any, **named: Any) -> str:
            self.check_format(value.__self__, (arguments, named), "{", _WIDE_BRACES)
            return wrapped(*arguments, **named)

        return format_within_limits

    def check_format(self, form: Any, values: Any, sign: str, wide: re.Pattern) -> None:
        """Raise an error if a formatted string would be too large."""
        form = form.decode("latin-1") if isinstance(form, bytes) else form
        if wide.search(form):
            raise TooMuch("formats with a width of more than 999 characters")
        self.check(form.count(sign) * size_of(values, _limits.get().largest) + len(form))

    def call(__self, __context: Any, __obj: Any, *arguments: Any, **named: Any) -> Any:
        """Call a function, method or macro."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            arguments = __self.check_method(owner, __obj.__name__, arguments, named)
        return __self.counted(super().call(__context, __obj, *arguments, **named))

    def check_method(self, owner: Any, name: str, arguments: tuple, named: Mapping[str, Any]) -> tuple:
        """Raise an error if a method of a string or a number would make too much; return the arguments."""
        length = len(owner) if isinstance(owner, str | bytes) else 1
        numbers = [value for value in (*arguments, *named.values()) if isinstance(value, int)]
        if name == "join" and len(arguments) == 1:
            pieces = self.pieces(arguments[0], owner)
            return (pieces,)
        if name == "replace" and len(arguments) > 1:
            self.check_replace(owner, *arguments[:2])
        elif name in ("split", "rsplit", "splitlines"):
            self.check(_OBJECT * length)
        elif name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
            self.check(max(numbers, default=0))
        elif name == "expandtabs":
            self.check(length * max(numbers, default=8))
        elif name in ("translate", "encode", "decode"):  # a table has any size; codecs of Python's take quadratic time
            raise TooMuch(f"calls {name}, which is not offered")
        return arguments

    def pieces(self, value: Any, separator: Any) -> list:
        """Return what a separator joins as a list."""
        if isinstance(value, str | bytes):
            self.check(_OBJECT * len(value))
        pieces = list(value)
        self.check(size_of(pieces, _limits.get().largest) + len(pieces) * len(separator))
        return pieces

    def check_replace(self, text: Any, old: Any, new: Any) -> None:
        """Raise an error if a text with replacements would be too large."""
        if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
            self.check(len(text) + text.count(old) * len(new))

    def check_filter(self, name: str, value: Any, arguments: tuple, named: Mapping[str, Any]) -> Any:
        """Raise an error if a filter would make too much; return the filtered value."""
        others = (*arguments, *named.values())
        if any(isinstance(other, int) and abs(other) > _LARGEST_ARGUMENT for other in others):
            raise TooMuch(f"passes a number above {_LARGEST_ARGUMENT:,} to {name}")
        text = str(value) if isinstance(value, str) else ""
        if name == "indent":
            widths = [other if isinstance(other, int) else len(str(other)) for other in others]
            self.check((text.count("\n") + 1) * (max(widths, default=4) + len(text)))
        elif name == "tojson":
            sizes = [other if isinstance(other, int) else len(str(other)) for other in others]
            if max(sizes, default=0) > _LARGEST_INDENT:
                raise TooMuch(f"indents JSON by more than {_LARGEST_INDENT}")
        elif name == "replace" and len(others) > 1:
            self.check_replace(text, *others[:2])
        elif name == "format":
            self.check_format(text, (arguments, named), "%", _WIDE_PERCENT)
        elif name == "join":
            return self.pieces(value, str(others[0]) if others else "")
        elif name in ("list", "sort", "slice", "dictsort", "groupby"):
            self.check(_OBJECT * len(text))
        elif name == "sum" and any(isinstance(other, list | tuple) for other in others[-1:]):
            raise TooMuch("sums lists")
        return value


class _Namespace(jinja2.utils.Namespace):
    """A namespace that is not written out: it can contain itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _counting(visit: Callable[..., None], applies: Callable[[Any], bool] = lambda node: True) -> Callable[..., None]:
    @functools.wraps(visit)
    def visit_and_count(self: Any, node: Any, *arguments: Any, **named: Any) -> None:
        if not applies(node):
            return visit(self, node, *arguments, **named)
        self.write("environment.counted(")
        visit(self, node, *arguments, **named)
        self.write(")")

    return visit_and_count


class _Generator(jinja2.compiler.CodeGenerator):
    """Writes code in which values that are made without a call of the environment are counted too.

    Nothing is computed while compiling.
    """

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    visit_List = _counting(jinja2.compiler.CodeGenerator.visit_List)
    visit_Dict = _counting(jinja2.compiler.CodeGenerator.visit_Dict)
    visit_Concat = _counting(jinja2.compiler.CodeGenerator.visit_Concat)
    visit_Tuple = _counting(jinja2.compiler.CodeGenerator.visit_Tuple, lambda node: node.ctx == "load")
    visit_Getitem = _counting(
        jinja2.compiler.CodeGenerator.visit_Getitem, lambda node: isinstance(node.arg, jinja2.nodes.Slice)
    )


def _limited_filter(environment: Environment, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = int(hasattr(function, "jinja_pass_arg"))  # the context or the like comes before the value

    @functools.wraps(function)
    def filter_within_limits(*arguments: Any, **named: Any) -> Any:
        before, value, after = arguments[:first], arguments[first], arguments[first + 1 :]
        value = environment.check_filter(name, value, after, named)
        return environment.counted(function(*before, value, *after, **named))

    return filter_within_limits


def _check_integer(bits: int) -> None:
    if bits > _LARGEST_INTEGER:
        raise TooMuch(f"makes an integer of more than {_LARGEST_INTEGER:,} bits")
