"""Check that transformers 5.23.0 computes the goldens' logits from checkpoints that jaxgen has read and written.

Usage, with the packages of requirements-newer.txt installed: python check_saved.py GOLDENS SAVED.
make_newer.py creates GOLDENS.
SAVED contains one folder for each checkpoint of GOLDENS.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import torch
import transformers
from oracle import Oracle


def main() -> None:
    """Compare all checkpoints, and stop at the first that differs."""
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    goldens, saved = map(pathlib.Path, sys.argv[1:])
    names = sorted(path.name for path in (goldens / "checkpoints").iterdir())
    for name in names:
        oracle = Oracle(saved / name)
        with np.load(goldens / "logits" / f"{name}.npz") as arrays:
            for i in range(3):
                expected = arrays[f"logits_{i}"]
                found = oracle.forward(arrays[f"ids_{i}"].astype(np.int64)[None]).logits[0].numpy()
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name)
    print(f"{len(names)} checkpoints: the same logits")


if __name__ == "__main__":
    main()
