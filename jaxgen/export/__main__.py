"""`python -m jaxgen.export`: write a checkpoint's programs to a file, or describe an exported file."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from convert import load_hf
from convert.hf import load_shapes
from jaxgen import arguments
from jaxgen.arguments import BAD_INPUT, BROKEN_PIPE, INTERRUPTED, Parser
from jaxgen.cli.options import add_generation, generation_fields, in_flags
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import JaxgenError, JaxgenWarning, one_line
from jaxgen.export.file import read_description, summary
from jaxgen.export.generate import export_generate
from jaxgen.export.lowering import PLATFORMS

PROGRAM = "python -m jaxgen.export"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, with the same codes as `jaxgen.cli.main.main`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", JaxgenWarning)
            warnings.showwarning = lambda message, *_: _say(in_flags(str(message)))
            options = _parse(words)
            if options.out is not None:
                _export(options)
            if options.describe:
                print(summary(read_description(options.out or options.source)), flush=True)
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
        return BROKEN_PIPE
    except (JaxgenError, ImportError, OSError) as error:
        _say(in_flags(str(error)))
        return BAD_INPUT
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED


def _say(text: str) -> None:
    print(f"{PROGRAM}: {one_line(text)}", file=sys.stderr)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} MODEL OUT [options]\n       {PROGRAM} FILE --describe",
        description="Export generate() for a checkpoint's model to a file that runs with jax alone. Weights are "
        "arguments of the program.",
        epilog="If a generation option is left out, the checkpoint's generation_config.json applies.",
    )
    add = parser.add_argument
    add("source", metavar="MODEL", help="a local checkpoint directory; with --describe alone, an exported file")
    add("out", metavar="OUT", nargs="?", type=arguments.path, help="the file to write")
    add("--describe", action="store_true", help="describe the file's programs, their inputs and outputs")
    add("--weights", type=arguments.path, metavar="FILE", help="also write the weights, as one safetensors file")
    size = "prompts per call, or any (default: 1)"
    add("-b", "--batch-size", type=_batch, default=1, metavar="N|any", help=size)
    width = "columns of prompts (default: 128)"
    add("--prompt-width", type=arguments.count, default=128, metavar="N", help=width)
    add("--platforms", type=_platforms, default=PLATFORMS, metavar="A,B", help=f"(default: {','.join(PLATFORMS)})")
    bits = "8- or 4-bit weights; none: dequantize MODEL's (default: as in MODEL)"
    arguments.add_weights(add, "dtype of the weights (default: as in MODEL)", bits)
    add_generation(parser)
    options, rest = parser.read(words)
    if rest:
        parser.error(f"{rest[0]!r} comes after MODEL and OUT: leave it out")
    if options.out is None and not options.describe:
        parser.error("OUT is missing: name the file to write, or add --describe to describe FILE")
    if options.weights is not None:
        if options.out is None:
            parser.error("--weights needs OUT, the file of the programs")
        if options.weights.absolute() == options.out.absolute():
            parser.error(f"--weights {options.weights} is the same file as OUT: choose another name")
        if not options.weights.absolute().parent.is_dir():
            parser.error(f"--weights {options.weights}: there is no directory {options.weights.absolute().parent}")
    return options


def _batch(text: str) -> int | str:
    return text if text == "any" else arguments.count(text)


def _platforms(text: str) -> list[str]:
    return text.split(",")


def _export(options: argparse.Namespace) -> None:
    source = Path(options.source)
    load: Any = load_shapes if options.weights is None else load_hf
    params, cfg = load(source, dtype=options.dtype, quantize=options.quantize)
    cfg = cfg.replace(**generation_fields(options))
    programs = export_generate(
        params,
        cfg,
        batch=None if options.batch_size == "any" else options.batch_size,
        prompt_width=options.prompt_width,
        platforms=options.platforms,
        tokenizer=None if cfg.stop_strings is None else Tokenizer.from_pretrained(options.source),
    )
    programs.save(options.out)
    if options.weights is not None:
        save_file({name: np.asarray(x) for name, x in programs.params(params).items()}, options.weights)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # no device is needed, so leave the accelerator to other processes
    sys.exit(main())
