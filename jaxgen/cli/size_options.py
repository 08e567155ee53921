"""Options for the sizes of an engine, derived from `EngineSizes`. This module does not import jax."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxgen import arguments
from jaxgen.core.request.running.engine_sizes import EngineSizes

SIZES = {size.name: size for size in dataclasses.fields(EngineSizes)}


def add_size(add: Callable[..., Any], name: str, default: int | None, text: str = "", flag: str = "") -> None:
    """Add the option of a size by calling `add_argument`. `text` and `flag` replace the size's own help and name."""
    size = SIZES[name].metadata
    read = functools.partial(arguments.whole, least=size["least"])
    text = text or f"{size['text']} (default: {size['unset'] if default is None else default})"
    add(flag or f"--{name.replace('_', '-')}", dest=name, type=read, default=default, metavar="N", help=text)


def sizes_of(options: argparse.Namespace, others: EngineSizes) -> EngineSizes:
    """Return the sizes that are options of a command, with all others from `others`."""
    return dataclasses.replace(others, **{name: value for name, value in vars(options).items() if name in SIZES})
