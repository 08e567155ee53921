"""Check that peft 0.11.1 computes the goldens' logits with adapters that jaxgen has read and written.

Usage, with the packages of requirements-peft.txt installed: python check_adapters.py GOLDENS SAVED.
make_peft.py creates GOLDENS.
SAVED contains CHECKPOINT/ADAPTER for each adapter that jaxgen has written.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import torch
import transformers
from oracle import Oracle
from peft import PeftModel


def main() -> None:
    """Compare all adapters, and stop at the first that differs."""
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    goldens, saved = map(pathlib.Path, sys.argv[1:])
    folders = sorted(path.parent for path in saved.rglob("adapter_config.json"))
    for folder in folders:
        name = folder.parent.name
        model = PeftModel.from_pretrained(Oracle(goldens / "checkpoints" / name).model, folder).eval()
        with np.load(goldens / "logits" / f"{name}.{folder.name}.npz") as arrays, torch.no_grad():
            for i in range(3):
                ids = torch.from_numpy(arrays[f"ids_{i}"].astype(np.int64))[None]
                np.testing.assert_allclose(model(ids).logits[0].numpy(), arrays[f"logits_{i}"], rtol=0, atol=1e-4)
    if not folders:
        raise SystemExit(f"{saved} has no adapters")
    print(f"{len(folders)} adapters: the same logits")


if __name__ == "__main__":
    main()
