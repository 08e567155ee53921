"""jaxgen under test."""

from __future__ import annotations

import functools
import time
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from on_jax import JaxProgram
from worker import serve

from benchmarks.probe import probe
from convert import load_hf
from jaxgen import GenerationConfig, JaxgenError, fuse_projections, generate
from jaxgen.training import lora
from jaxgen.training.loop import TrainBatch, TrainConfig, TrainState, train_step


class Jaxgen(JaxProgram):
    step = None  # the compiled training step

    def load(self, path: str, dtype: str, variant: str, mesh: list[int] | None) -> dict[str, Any]:
        devices = None if mesh is None else jax.make_mesh(tuple(mesh), ("data", "model"))
        start = time.perf_counter()
        quantize = variant if variant in ("int8", "int4") else None
        self.params, cfg = load_hf(path, dtype=dtype, quantize=quantize, mesh=devices)
        if variant == "fused":
            self.params = fuse_projections(self.params, donate=True)
        jax.block_until_ready(self.params)
        seconds = time.perf_counter() - start
        self.cfg = GenerationConfig(model=cfg.model, eos_token_id=None, pad_token_id=0)
        looked_up = self.params["model"]["embed_tokens"] if "lm_head" in self.params else {}
        experts = [layer["mlp"].get("experts", {}) for layer in self.params["model"]["layers"].values()]
        unused = _bytes(experts)
        if unused:
            unused -= unused * cfg.model.num_experts_per_tok // cfg.model.num_experts
        return {"seconds": seconds, "step_bytes": _bytes(self.params) - _bytes(looked_up) - unused} | self.device()

    def generate(self, ids: np.ndarray, new_tokens: int, room: int, options: dict[str, Any]) -> np.ndarray:
        options, extensions = dict(options), {}
        budget = new_tokens
        if options.pop("capacity", None):  # a large budget that rows do not use up
            budget = room - ids.shape[1]
            extensions["stopping_criteria"] = [jax.tree_util.Partial(_stop_after, np.int32(new_tokens))]
        if period := options.pop("repeats", None):
            extensions["logits_processor"] = [jax.tree_util.Partial(_repeat, np.int32(period))]
        key = jax.random.key(0) if options.get("do_sample") else None
        cfg = self.cfg.replace(max_new_tokens=budget, **options)
        try:
            out = generate(self.params, ids, key, cfg, attention_mask=np.ones_like(ids), **extensions)
        except JaxgenError as error:
            raise NotImplementedError(str(error)) from error
        self.output, width = out, ids.shape[1]
        return np.asarray(out.sequences)[:, width : width + new_tokens]

    def train(self, ids: np.ndarray, rank: int) -> None:
        if self.step is None:
            settings = TrainConfig(steps=1000, dtype=self.cfg.model.dtype)
            self.state = TrainState.create(lora.init(self.params, rank, jax.random.key(0)), settings)
            step = functools.partial(train_step, model=self.cfg.model, cfg=settings)
            self.step = jax.jit(step, donate_argnums=0)
        labels = np.where(np.arange(ids.shape[1]) > 0, ids, -100)
        self.state, metrics = self.step(self.state, TrainBatch(ids, labels, np.ones_like(ids)), self.params)
        metrics.loss.block_until_ready()

    def run(self, ids: list[list[int]], new_tokens: int, room: int, options: dict[str, Any]) -> dict[str, Any]:
        answer = super().run(ids, new_tokens, room, options)
        if "lora" in options:
            return answer
        drafted = self.output.drafted
        accepted = None if drafted is None else f"{int(self.output.accepted[0])} of {int(drafted[0])} accepted"
        return answer | {"slots": self.output.cache.slots, "note": accepted}

    def probe(self, nbytes: int) -> dict[str, Any]:
        return probe(nbytes)


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _stop_after(new_tokens, history, scores):
    return history.step >= new_tokens


def _repeat(period, history, scores):
    """Allow only the token whose id is the row's length modulo the period."""
    return jnp.where(jnp.arange(scores.shape[1])[None, :] == (history.length % period)[:, None], 0.0, -jnp.inf)


if __name__ == "__main__":
    modules = {"jax": jax, "jaxlib": jaxlib, "flax": flax}
    serve(Jaxgen(), {name: module.__version__ for name, module in modules.items()})
