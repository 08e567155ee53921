"""The options of `jaxgen run-batch`. This module does not import jax."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxgen import arguments
from jaxgen.cli.serve_options import SERVED, add_model_options, read
from jaxgen.cli.size_options import add_size


def parser() -> arguments.Parser:
    """Return the command-line parser."""
    result = arguments.Parser(
        prog="jaxgen run-batch",
        usage="jaxgen run-batch INPUT OUTPUT [options]",
        description="Answer the requests in one of OpenAI's batch files, as `jaxgen serve` would, without a server.",
        epilog="A run that was stopped continues if you repeat the command.",
    )
    add = result.add_argument
    add("input", metavar="INPUT", type=arguments.source, help="the file of requests, one per line")
    add("output", metavar="OUTPUT", type=arguments.target, help="the file for the answers, in the same order")
    add("--model", metavar="MODEL", help="a checkpoint: its directory, URL or id on the hub (default: bundled)")
    queue = "maximum number of prompts in a request (default: 256)"
    add_size(add, "most_waiting", SERVED.most_waiting, queue, "--queue")
    add_model_options(result)
    return result


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after "run-batch" as `read` does."""
    return read(parser(), words)
