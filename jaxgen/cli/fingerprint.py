"""Fingerprints of checkpoints. A run can be resumed only if its fingerprints are unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from convert.checkpoint import Checkpoint

_SAMPLE = 4096  # number of bytes to read per tensor; reading whole tensors would take too long


def fingerprint(source: Checkpoint, adapters: Iterable[Path] = ()) -> str:
    """Return a digest of a checkpoint's tensors (names, dtypes, shapes, first bytes) and of the adapters' files."""
    digest = hashlib.sha256()
    for name, tensor in source.tensors.items():
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        with open(tensor.file, "rb") as stream:
            stream.seek(tensor.offset)
            digest.update(stream.read(min(_SAMPLE, tensor.nbytes)))
    for adapter in adapters:
        for file in sorted(adapter.glob("adapter_*")):
            if file.is_file():
                digest.update(file.read_bytes())
    return digest.hexdigest()
