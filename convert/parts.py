"""Parameters split across the devices of a mesh. Each process reads and writes its own parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from convert.atomic_directory import new_directory
from convert.errors import CheckpointError
from convert.experts import Part
from convert.shards import plan, write_index
from convert.tensors import Tensor, allocate_file, read_header


def read_parts(tensor: Tensor, dtype: np.dtype | None, sharding: jax.sharding.Sharding) -> jax.Array:
    """Read a tensor's parts onto several devices; a part that more than one device needs is read only once."""
    read: dict[tuple, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        key = tuple((axis.start, axis.stop) for axis in index)
        if key not in read:
            read[key] = tensor.read(dtype, index)
        return read[key]

    return jax.make_array_from_callback(tensor.shape, sharding, part)


def write_parts(directory: Path, arrays: Mapping[str, Any], stem: str) -> None:
    """Write arrays to a checkpoint's files. All processes must call this function, and each writes its own parts."""
    sizes = {name: array.nbytes for name, array in arrays.items()}
    files = plan(sizes, None, stem)
    with _together(directory):
        if jax.process_index() == 0:
            for name, tensors in files.items():
                allocate_file(directory / name, {tensor: arrays[tensor] for tensor in tensors})
            write_index(directory, files, sizes)
    with _together(directory):
        for name in files:
            for tensor in read_header(directory / name).values():
                for index, part in _own_parts(arrays[tensor.name]):
                    tensor.write(index, part)


@contextlib.contextmanager
def shared_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield the same new directory in all processes; process 0 creates it, and renames it when the block exits."""
    with contextlib.ExitStack() as stack:
        path, error = "", None
        if jax.process_index() == 0:
            try:
                path = str(stack.enter_context(new_directory(target, overwrite=overwrite)))
            except (CheckpointError, OSError) as failure:  # the other processes are waiting for this result
                error = failure
        sent = np.frombuffer(path.encode().ljust(4096, b"\0"), np.ubyte)  # a path has at most 4096 bytes
        path = np.asarray(multihost_utils.broadcast_one_to_all(sent)).tobytes().rstrip(b"\0").decode()
        if not path:
            raise error or CheckpointError([f"{target}: process 0 could not prepare it: see its message"])
        if not Path(path).is_dir():
            raise CheckpointError(
                [f"process {jax.process_index()} does not see {path}: save to a directory that all processes share"]
            )
        yield Path(path)
    multihost_utils.sync_global_devices("moved")


@contextlib.contextmanager
def _together(directory: Path) -> Iterator[None]:
    """Run the block in all processes and wait for all of them; if one fails, raise an error in every process."""
    error = None
    try:
        yield
    except Exception as failure:  # raised below, after the other processes have been notified
        error = failure
    failed = np.ravel(multihost_utils.process_allgather(np.ravel([error is not None])))
    if error is not None:
        raise error
    if failed.any():
        number = int(np.flatnonzero(failed)[0])
        raise CheckpointError([f"{directory}: process {number} could not write its parts: see its message"])


def _own_parts(array: Any) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Yield the parts of an array that this process writes; each part is written by exactly one process."""
    if isinstance(array, Part):
        for (experts, *rest), part in _own_parts(array.array):
            first, end, _ = experts.indices(array.array.shape[0])
            if first <= array.expert < end:
                yield tuple(rest), part[array.expert - first]
        return
    if isinstance(array, np.ndarray) or array.is_fully_replicated:
        if jax.process_index() == 0:
            yield (slice(None),) * array.ndim, np.asarray(array)
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield shard.index, np.asarray(shard.data)
