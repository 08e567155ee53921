"""Fingerprints of checkpoints, which tell if a run can be continued."""

from __future__ import annotations

import hashlib

from convert.hf import Checkpoint

_SAMPLE = 4096  # bytes of each tensor: to read all would take long


def fingerprint(source: Checkpoint) -> str:
    """Return a digest of a checkpoint's tensors: their names, dtypes, shapes and first bytes."""
    digest = hashlib.sha256()
    for name, tensor in source.tensors.items():
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        with open(tensor.file, "rb") as stream:
            stream.seek(tensor.offset)
            digest.update(stream.read(min(_SAMPLE, tensor.nbytes)))
    return digest.hexdigest()
