"""keras-hub on JAX under test."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import json
import time
from typing import Any

import jax
import keras
import keras_hub
import numpy as np
from on_jax import JaxProgram
from worker import serve


class KerasHub(JaxProgram):
    def load(self, path: str, dtype: str, variant: str, mesh: list[int] | None) -> dict[str, Any]:
        start = time.perf_counter()
        self.model = keras_hub.models.CausalLM.from_preset(path, dtype=dtype, preprocessor=None)
        jax.block_until_ready([weight.value for weight in self.model.weights])
        seconds = time.perf_counter() - start
        backbone = self.model.backbone
        total = sum(weight.value.nbytes for weight in backbone.weights)
        looked_up = 0 if backbone.tie_word_embeddings else backbone.token_embedding.embeddings.value.nbytes
        self.samplers: dict[str, Any] = {}
        return {"seconds": seconds, "step_bytes": total - looked_up} | self.device()

    def generate(self, ids: np.ndarray, new_tokens: int, room: int, options: dict[str, Any]) -> np.ndarray:
        self._choose({name: value for name, value in options.items() if name != "capacity"})
        # keras-hub's prefill fills the cache for the whole padded text: prompt and answer. Therefore, both runs have
        # texts of `room` tokens, and the short run has a longer prompt. Their times differ only by the decode steps.
        room = ids.shape[1] + 1 if new_tokens == 1 else room
        start = room - new_tokens
        text = np.zeros((len(ids), room), np.int32)
        text[:, :start] = np.take(ids, np.arange(start), axis=1, mode="wrap")
        given = np.broadcast_to(np.arange(room) < start, text.shape)
        out = self.model.generate({"token_ids": text, "padding_mask": given}, stop_token_ids=None)
        return np.asarray(out["token_ids"])[:, start:]

    def _choose(self, options: dict[str, Any]) -> None:
        """Select the sampler for these options; compile only if the options are new."""
        name = json.dumps(options)
        if name not in self.samplers:
            self.model.compile(sampler=_sampler(options))
            self.samplers[name] = self.model.sampler, self.model.make_generate_function()
        self.model.sampler, self.model.generate_function = self.samplers[name]


def _sampler(options: dict[str, Any]):
    samplers = keras_hub.samplers
    match options:
        case {} if not options:
            return samplers.GreedySampler()
        case {"do_sample": True, "temperature": t, "top_k": k, "top_p": p, **rest} if not rest:
            return samplers.TopPSampler(p=p, k=k, temperature=t, seed=0)
        case {"do_sample": True, "temperature": t, "top_k": 0, **rest} if not rest:
            return samplers.RandomSampler(temperature=t, seed=0)
        case {"num_beams": beams, **rest} if not rest:
            return samplers.BeamSampler(num_beams=beams)
    raise NotImplementedError(f"no sampler for {options}")


if __name__ == "__main__":
    modules = {"keras-hub": keras_hub, "keras": keras, "jax": jax}
    serve(KerasHub(), {name: module.__version__ for name, module in modules.items()})
