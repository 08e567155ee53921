"""transformers beside jaxgen: generate with the same checkpoint and prompts, one measurement per request.

`decode.py --peer PYTHON` starts it; it needs torch and transformers and nothing of jaxgen. The first line on
stdin is a JSON object, the set-up; each further line is a number of new tokens. Each line is answered by one
JSON object on stdout.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import numpy
import torch
import transformers


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries is not an answer
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    setup = json.loads(sys.stdin.readline())
    device = setup["device"]
    imported = peak_memory()
    start = time.perf_counter()
    model = load(setup)
    load_seconds = time.perf_counter() - start
    ids = torch.tensor(setup["ids"], device=device)
    hello = {
        "versions": {
            "python": sys.version.split()[0],
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "load_seconds": load_seconds,
        "import_peak_bytes": imported,
        "load_peak_bytes": peak_memory(),
    }
    print(json.dumps(hello), file=answers)
    for request in sys.stdin:
        print(json.dumps(measure(model, ids, int(request))), file=answers)


def load(setup: dict):
    """Load the model so that its own generation config holds the set-up's options and nothing else."""
    name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    options = {name: getattr(torch, setup["dtype"])}
    model = transformers.AutoModelForCausalLM.from_pretrained(setup["model"], **options)
    model = model.to(setup["device"]).eval()
    model.generation_config = transformers.GenerationConfig(**setup["generation"])
    if setup["compile"]:
        model.generation_config.cache_implementation = "static"
        if not hasattr(model, "get_compiled_call"):  # later releases compile a static cache's steps themselves
            model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    return model


def measure(model, ids: torch.Tensor, new_tokens: int) -> dict:
    """Generate `new_tokens` per row and say how long that took."""
    mask = torch.ones_like(ids)
    synchronize(ids)
    start = time.perf_counter()
    sequences = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens)
    synchronize(ids)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "tokens": sequences[:, ids.shape[1] :].tolist(),
        "peak_bytes": peak_memory(),
        "device_peak_bytes": torch.cuda.max_memory_allocated() if ids.is_cuda else None,
    }


def synchronize(ids: torch.Tensor) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize()


def peak_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


if __name__ == "__main__":
    main()
