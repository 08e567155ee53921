"""One of two processes with four devices each: load, generate, save, and print what came out as JSON."""

import json
import sys

import jax
import numpy as np

from convert import load_hf, save_hf
from convert.tensors import Tensor
from jaxgen import JaxgenError, generate, score


def main(process: int, port: int, shape: tuple[int, int], checkpoint: str, target: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=10)
    read, runs = [], Tensor.runs

    def counted(self, part, array):
        for offset, run in runs(self, part, array):
            read.append(len(run))
            yield offset, run

    Tensor.runs = counted  # pyright: ignore
    params, cfg = load_hf(checkpoint, mesh=jax.make_mesh(shape, ("data", "model")))
    Tensor.runs = runs
    result: dict = {"read": sum(read)}
    ids = np.arange(3, 30, dtype=np.int32).reshape(3, 9)
    for name, more in OPTIONS.items():
        changed = cfg.replace(max_new_tokens=6, **more)
        key = jax.random.key(4) if changed.do_sample else None
        out = generate(params, ids, key, changed)
        result[name] = np.asarray(out.sequences).tolist()
        if changed.output_scores:
            result["best"] = np.asarray(out.scores).max(axis=-1).round(3).tolist()
    result["again"] = np.asarray(generate(params, ids[:, :2], None, cfg, cache=out.cache).sequences).tolist()
    result["score"] = np.asarray(score(params, ids[:2], cfg).logprobs).round(3).tolist()
    try:
        generate(params, ids, None, cfg.replace(max_time=1.0))
    except JaxgenError as error:
        result["max_time"] = str(error)
    save_hf(params, cfg, target)
    try:
        save_hf(params, cfg, target)
    except JaxgenError as error:
        result["again_saved"] = type(error).__name__
    print("RESULT", json.dumps(result), flush=True)


OPTIONS = {
    "sampling": {"do_sample": True, "top_k": 30, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3, "do_sample": False},
    "assisted": {"prompt_lookup_num_tokens": 2, "do_sample": False},
    "greedy": {"do_sample": False, "output_scores": True},
}

if __name__ == "__main__":
    process, port, data, model = map(int, sys.argv[1:5])
    main(process, port, (data, model), *sys.argv[5:])
