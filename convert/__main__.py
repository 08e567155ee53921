"""`python -m convert`: convert a checkpoint and write it to a new directory, or list its tensors."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.adapter import merge_adapter
from convert.atomic_directory import new_directory
from convert.checkpoint import Checkpoint
from convert.errors import CheckpointError
from convert.hf import copy_tokenizer, float_dtype, open_checkpoint
from convert.kv_heads import pool_checkpoint
from convert.quantized import file_stem, stored_kind
from convert.shards import checkpoint_directory, find_tensors, in_order, write_checkpoint
from convert.tensors import DTYPES, same_bits
from jaxgen.arguments import BAD_INPUT, BROKEN_PIPE, FAILED, INTERRUPTED, Parser
from jaxgen.core.model.int8 import Int8
from jaxgen.core.model.quantization import CHOICES, all_built_in
from jaxgen.errors import ConfigError, JaxgenError, JaxgenWarning, one_line
from jaxgen.gguf.container import read_gguf
from jaxgen.gguf.installed import gguf_file

PROGRAM = "python -m convert"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, with the same codes as `jaxgen.cli.main.main`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", JaxgenWarning)
            warnings.showwarning = lambda message, *_: print(f"{PROGRAM}: warning: {message}", file=sys.stderr)
            options = _parse(words)
            if options.list:
                list_tensors(Path(options.source))
                status = 0
            else:
                status = convert(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
        return BROKEN_PIPE
    except (JaxgenError, OSError) as error:
        print(f"{PROGRAM}: {one_line(str(error))}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED


def convert(options: argparse.Namespace) -> int:
    """Convert the source checkpoint shard by shard, check the result if asked to, and return the exit status."""
    source, target = gguf_file(options.source) or Path(options.source), Path(options.destination)
    inner, outer = source.resolve(), target.resolve()
    if inner == outer:
        raise CheckpointError([f"SRC and DST are both {inner}: choose another DST"])
    if inner in outer.parents or outer in inner.parents:
        raise CheckpointError([f"one of {target} and {source} contains the other: choose another DST"])
    wanted = float_dtype(options.dtype)
    checkpoint = open_checkpoint(source)
    if (kind := checkpoint.kind) and options.dtype is not None and options.quantize is None:
        others = f", or --quantize {kind.name} to convert only the other tensors" if issubclass(kind, Int8) else ""
        raise ConfigError(
            f"{source} has {kind.title} matrices, which --dtype does not affect: add --quantize none to convert them "
            f"to {options.dtype}{others}"
        )
    if options.merge_adapter is not None:
        checkpoint = merge_adapter(checkpoint, options.merge_adapter)
    if options.kv_heads is not None:
        checkpoint = pool_checkpoint(checkpoint, options.kv_heads)
    dtype = checkpoint.dtype(wanted).name
    checkpoint = checkpoint.quantize(options.quantize).by_file_name()
    dtypes = [key for key in ("torch_dtype", "dtype") if key in checkpoint.config] or ["torch_dtype"]
    config = checkpoint.config | dict.fromkeys(dtypes, dtype)
    sizes = checkpoint.sizes(wanted)
    progress = _Progress("writing", len(sizes))

    def read(name: str) -> np.ndarray:
        progress.count()
        return checkpoint.read(name, wanted)

    with new_directory(target, overwrite=options.overwrite) as directory:
        copy_tokenizer(source, directory)
        write_checkpoint(directory, config, checkpoint.generation, sizes, read, None, file_stem(checkpoint.kind))
    print(f"{target}: {len(sizes)} tensors written")
    if not options.check:
        return 0
    different = compare(checkpoint, open_checkpoint(target).by_file_name(), wanted)
    if different:
        print(f"{target}: {len(different)} of {len(sizes)} tensors differ: {', '.join(different)}", file=sys.stderr)
        return FAILED
    print(f"{target}: {len(sizes)} tensors read again, all equal")
    return 0


def compare(source: Checkpoint, target: Checkpoint, wanted: np.dtype | None) -> list[str]:
    """Return the names of tensors that only one checkpoint has, or that differ once `source` is cast to `wanted`."""
    different = set(source.tensors) ^ set(target.tensors)
    common = [name for name in source.tensors if name in target.tensors]
    progress = _Progress("comparing", len(common))
    for name in common:
        progress.count()
        if not same_bits(source.read(name, wanted), target.read(name, None)):
            different.add(name)
    return in_order(different)


def list_tensors(path: Path) -> None:
    """Print every tensor's name, dtype, shape and size in bytes, followed by the totals."""
    tensors: Mapping[str, Any]
    if (file := gguf_file(path)) is not None:
        tensors = read_gguf(file).tensors
        types = {name: tensor.type for name, tensor in tensors.items()}
    else:
        kind = stored_kind(checkpoint_directory(path), all_built_in())
        tensors, _, problems = find_tensors(path, file_stem(kind))
        if problems:
            raise CheckpointError(problems)
        types = {name: tensor.dtype for name, tensor in tensors.items()}
    rows = [
        (name, types[name], str(list(tensors[name].shape)), f"{tensors[name].nbytes:,}") for name in in_order(tensors)
    ]
    size = sum(tensor.nbytes for tensor in tensors.values())
    files = len({tensor.file for tensor in tensors.values()})
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    for name, dtype, shape, nbytes in rows:
        print(f"{name:{widths[0]}}  {dtype:{widths[1]}}  {shape:{widths[2]}}  {nbytes:>{widths[3]}}")
    print(f"{len(rows):,} tensors, {size:,} bytes, in {files} file{'' if files == 1 else 's'}")


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog=PROGRAM,
        description="Convert a Hugging Face checkpoint to another dtype, 8 bits or fewer heads, or list its tensors.",
        epilog="Needs memory for one file of DST (at most 5 GB, or one larger tensor) plus the tensor being cast; "
        "--check afterwards needs memory for two copies of a tensor.",
    )
    add = parser.add_argument
    add("source", metavar="SRC", help="a local checkpoint directory, or a GGUF file")
    add("destination", metavar="DST", nargs="?", help="the directory to write")
    add(
        "--dtype",
        choices=[dtype.name for dtype in DTYPES.values()],
        help="convert all but 8-bit matrices; default: as in SRC",
    )
    add("--kv-heads", type=int, metavar="N", help="fewer key-value heads, each the mean of a group; default: as in SRC")
    bits = "write matrices as 8-bit numbers, for jaxgen alone; none: convert such matrices back; default: as in SRC"
    add("--quantize", choices=CHOICES, help=bits)
    add("--merge-adapter", metavar="DIR", help="first add a LoRA adapter, as PEFT writes it, to the matrices")
    add("--overwrite", action="store_true", help="replace the checkpoint DST")
    add("--check", action="store_true", help="read DST again at the end, and compare every tensor")
    add("--list", action="store_true", help="print the tensors of SRC: name, dtype, shape, bytes")
    options, rest = parser.read(words)
    if rest:
        parser.error(f"{rest[0]!r} comes after SRC and DST: leave it out")
    given = (options.destination, options.dtype, options.kv_heads, options.quantize, options.merge_adapter)
    if options.list and (any(value is not None for value in given) or options.overwrite or options.check):
        parser.error("--list needs a source and nothing else")
    if options.merge_adapter is not None and options.kv_heads is not None:
        parser.error(
            "--merge-adapter and --kv-heads change the same matrices: write two checkpoints, one after the other"
        )
    if not options.list and options.destination is None:
        parser.error("the destination is missing")
    return options


class _Progress:
    """Reports progress on stderr every ten seconds."""

    def __init__(self, verb: str, total: int):
        self.verb, self.total, self.number = verb, total, 0
        self.next = time.monotonic() + 10

    def count(self) -> None:
        """Count the next tensor, before it is read."""
        self.number += 1
        if time.monotonic() >= self.next:
            print(f"{self.verb} tensor {self.number} of {self.total}", file=sys.stderr, flush=True)
            self.next = time.monotonic() + 10


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # this command needs no accelerator
    sys.exit(main())
