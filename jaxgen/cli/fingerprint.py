"""Digests that tell if a run can be continued: of checkpoints, without reading all of their bytes."""

from __future__ import annotations

from typing import Protocol

from convert.hf import Checkpoint

_SAMPLE = 4096  # bytes of each tensor


class Digest(Protocol):
    """A hash of hashlib."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""


def add_tensors(digest: Digest, source: Checkpoint) -> None:
    """Add a checkpoint's tensors to a digest, by their names, dtypes, shapes and first bytes."""
    for name, tensor in source.tensors.items():
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        with open(tensor.file, "rb") as stream:
            stream.seek(tensor.offset)
            digest.update(stream.read(min(_SAMPLE, tensor.nbytes)))
