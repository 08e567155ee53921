"""The goldens of tests/goldens or of the folder that JAXGEN_GOLDENS names, and the runs that they describe."""

import os
from pathlib import Path

from convert import load_hf
from tests.support.models import left_pad

GOLDENS = Path(os.environ.get("JAXGEN_GOLDENS") or Path(__file__).parents[1] / "goldens" / "seed0")
LOADED = {}


def load(folder: Path):
    if folder not in LOADED:
        LOADED[folder] = load_hf(folder, dtype="float32")
    return LOADED[folder]


def prepare(source: str, group: dict):
    params, cfg = load(GOLDENS / source / "checkpoints" / group["checkpoint"])
    cfg = cfg.replace(do_sample=False, temperature=1.0, top_p=1.0, top_k=50, min_p=None).replace(**group["options"])
    if cfg.on("min_new_tokens"):
        cfg = cfg.replace(min_length=0)
    ids, mask = left_pad([case["ids"] for case in group["cases"]])
    return params, cfg, ids, mask
