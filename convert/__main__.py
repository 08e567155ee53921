"""The command `python -m convert`: a checkpoint to another directory, or a list of what it holds."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np

from convert.atomic_directory import new_directory
from convert.hf import Checkpoint, copy_tokenizer, float_dtype, open_checkpoint, write_checkpoint
from convert.kv_heads import pool_checkpoint
from convert.safetensors import DTYPES, CheckpointError, Tensor
from convert.shards import find_tensors, in_order
from jaxgen.errors import JaxgenError

BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    given = (options.destination, options.dtype, options.kv_heads)
    if options.list and (any(value is not None for value in given) or options.overwrite or options.check):
        parser.error("--list takes a source and nothing else")
    if not options.list and options.destination is None:
        parser.error("the destination is missing")
    try:
        if options.list:
            list_tensors(Path(options.source))
            status = 0
        else:
            status = convert(options)
        sys.stdout.flush()
        return status
    except (JaxgenError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail
            return BROKEN_PIPE
        problems = error.problems if isinstance(error, CheckpointError) else [str(error)]
        print(f"{parser.prog}: {'; '.join(problems)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


def convert(options: argparse.Namespace) -> int:
    """Write the source's checkpoint to the destination, tensor by tensor, and compare them when asked to."""
    source, target = Path(options.source), Path(options.destination)
    _check_apart(source, target)
    wanted = float_dtype(options.dtype)
    checkpoint = open_checkpoint(source)
    if options.kv_heads is not None:
        checkpoint = pool_checkpoint(checkpoint, options.kv_heads)
    layout = {name: (checkpoint.dtype(name, wanted), tensor.shape) for name, tensor in checkpoint.tensors.items()}
    count = itertools.count(1)

    def read(name: str) -> np.ndarray:
        _progress("writing", next(count), len(layout))
        return checkpoint.tensors[name].read(layout[name][0])

    with new_directory(target, overwrite=options.overwrite) as directory:
        copy_tokenizer(source, directory)
        write_checkpoint(directory, _config(checkpoint, wanted), checkpoint.generation, layout, read)
    print(f"{target}: {len(layout)} tensors written")
    if not options.check:
        return 0
    different = compare(checkpoint, open_checkpoint(target), wanted)
    if different:
        print(
            f"{target}: {len(different)} of {len(layout)} tensors differ: {', '.join(different)}",
            file=sys.stderr,
        )
        return FAILED
    print(f"{target}: {len(layout)} tensors read again, all equal")
    return 0


def compare(source: Checkpoint, target: Checkpoint, wanted: np.dtype | None) -> list[str]:
    """Return the names of the tensors whose bytes in `target` are not those of `source`, cast to `wanted`."""
    different = set(source.tensors) ^ set(target.tensors)
    common = [name for name in source.tensors if name in target.tensors]
    for number, name in enumerate(common, 1):
        _progress("comparing", number, len(common))
        dtype = source.dtype(name, wanted)
        if not _equal(source.tensors[name], target.tensors[name], dtype):
            different.add(name)
    return in_order(different)


def list_tensors(path: Path) -> None:
    """Print name, dtype, shape and bytes of every tensor in a directory, and the totals."""
    tensors, _, problems = find_tensors(path)
    if problems:
        raise CheckpointError(problems)
    rows = [
        (name, tensors[name].dtype, str(list(tensors[name].shape)), f"{tensors[name].nbytes:,}")
        for name in in_order(tensors)
    ]
    size = sum(tensor.nbytes for tensor in tensors.values())
    files = len({tensor.file for tensor in tensors.values()})
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    for name, dtype, shape, nbytes in rows:
        print(f"{name:{widths[0]}}  {dtype:{widths[1]}}  {shape:{widths[2]}}  {nbytes:>{widths[3]}}")
    print(f"{len(rows):,} tensors, {size:,} bytes, in {files} file{'' if files == 1 else 's'}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m convert",
        description="Convert a Hugging Face checkpoint to another dtype, layout or head count, or list its tensors.",
    )
    parser.add_argument("source", metavar="SRC", help="a local checkpoint directory")
    parser.add_argument("destination", metavar="DST", nargs="?", help="the directory to make")
    parser.add_argument("--dtype", choices=[dtype.name for dtype in DTYPES.values()], help="default: as in SRC")
    parser.add_argument(
        "--kv-heads", type=int, metavar="N", help="fewer key-value heads, each the mean of a group; default: as in SRC"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint DST")
    parser.add_argument("--check", action="store_true", help="then read DST again and compare every tensor")
    parser.add_argument("--list", action="store_true", help="print the tensors of SRC: name, dtype, shape, bytes")
    return parser


def _check_apart(source: Path, target: Path) -> None:
    """Refuse to write over the source, into it or around it."""
    inner, outer = source.resolve(), target.resolve()
    if inner == outer:
        raise CheckpointError([f"SRC and DST are both {inner}: choose another DST"])
    if inner in outer.parents or outer in inner.parents:
        raise CheckpointError([f"{target} and {source} lie one inside the other: choose another DST"])


def _config(checkpoint: Checkpoint, wanted: np.dtype | None) -> dict:
    """Return the source's config.json with the dtype of what is written."""
    dtype = checkpoint.dtype("model.embed_tokens.weight", wanted).name
    keys = [key for key in ("torch_dtype", "dtype") if key in checkpoint.config] or ["torch_dtype"]
    return checkpoint.config | dict.fromkeys(keys, dtype)


def _equal(source: Tensor, target: Tensor, dtype: np.dtype) -> bool:
    return (DTYPES[target.dtype], target.shape) == (dtype, source.shape) and all(
        np.array_equal(a.view(np.uint8), b.view(np.uint8))
        for a, b in zip(source.cast_chunks(dtype), target.chunks(), strict=True)
    )


def _progress(verb: str, number: int, total: int) -> None:
    """Say on stderr which tensor is at hand, on one line of a terminal or else at every tenth part."""
    text = f"{verb} tensor {number} of {total}"
    if sys.stderr.isatty():
        print(f"\r{text}", end="\n" if number == total else "", file=sys.stderr, flush=True)
    elif number * 10 // total > (number - 1) * 10 // total:
        print(text, file=sys.stderr)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # nothing is computed on a device: leave it to others
    sys.exit(main())
