"""lm-evaluation-harness under test: with jaxgen's model, or with its own model `hf` on torch."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from worker import Program, cores, serve

_CALLS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


class Evaluation(Program):
    """A program that evaluates a model with the harness."""

    lm: Any
    in_model: float

    def load(self, path: str, dtype: str, variant: str, mesh: list[int] | None) -> dict[str, Any]:
        start = time.perf_counter()
        self.lm = self.model(path, dtype, int(variant) if variant else None)
        for name in _CALLS:
            setattr(self.lm, name, self._timed(getattr(self.lm, name)))
        return {"seconds": time.perf_counter() - start}

    def model(self, path: str, dtype: str, max_length: int | None) -> Any:
        """Return the model, wrapped in the harness's interface."""
        raise NotImplementedError

    def evaluate(self, tasks: str, task: str, batch_size: str) -> dict[str, Any]:
        """Run a task from the directory `tasks`.

        Return its metrics, each document's requests and responses, the number of compilations, the total seconds, and
        the seconds spent in the model.
        """
        if batch_size:
            is_auto = batch_size == "auto"
            self.lm.batch_size_per_gpu, self.lm.batch_schedule = "auto" if is_auto else int(batch_size), 1
        manager, self.in_model, compiled = TaskManager(include_path=tasks, include_defaults=False), 0.0, self.compiled()
        start = time.perf_counter()
        found = lm_eval.simple_evaluate(model=self.lm, tasks=[task], task_manager=manager, bootstrap_iters=0)
        seconds = time.perf_counter() - start
        samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        metrics = {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
        return {
            "seconds": seconds,
            "model_seconds": self.in_model,
            "compilations": self.compiled() - compiled,
            "metrics": {name: value for name, value in metrics.items() if "stderr" not in name},
            "requests": [[list(map(str, given)) for given in sample["arguments"]] for sample in samples],
            "responses": [[response[0] for response in sample["resps"]] for sample in samples],
        }

    def _timed(self, function: Any) -> Any:
        def run(*given: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*given, **options)
            self.in_model += time.perf_counter() - start
            return result

        return run


class Jaxgen(Evaluation):
    count = 0

    def model(self, path: str, dtype: str, max_length: int | None) -> Any:
        import jax

        from jaxgen import Tokenizer, load_hf
        from jaxgen.evaluate.lm import JaxgenLM

        jax.monitoring.register_event_duration_secs_listener(self._heard)
        params, cfg = load_hf(path, dtype=dtype)
        self.tokenizer = Tokenizer.from_pretrained(path)
        return JaxgenLM(params, cfg, self.tokenizer, max_length=max_length)

    def _heard(self, event: str, seconds: float, **facts: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def compiled(self) -> int:
        return self.count

    def gap(self, context: str, answers: list[str]) -> dict[str, Any]:
        """Compare two answers at the first token that differs; return the difference in log-probability."""
        from jaxgen import score_many

        before = self.tokenizer.encode(context)
        own, other = (self.tokenizer.encode(context + answer)[len(before) :] for answer in answers)
        place = next((n for n, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
        if place is None:
            return {"gap": float("inf")}  # one answer ended before the other
        pairs = [(before + own[:place], [one]) for one in (own[place], other[place])]
        scores = score_many(self.lm._params, pairs, self.lm._cfg)
        return {"gap": abs(scores[0].total - scores[1].total)}


class HF(Evaluation):
    def model(self, path: str, dtype: str, max_length: int | None) -> Any:
        import torch
        import transformers
        from lm_eval.models.huggingface import HFLM

        torch.set_num_threads(cores())
        transformers.utils.logging.disable_progress_bar()
        return HFLM(pretrained=path, dtype=dtype, device="cpu", max_length=max_length)


if __name__ == "__main__":
    (kind,) = sys.argv[1:]
    packages = {"jaxgen": ("lm_eval", "jax"), "hf": ("lm_eval", "transformers", "torch")}[kind]
    serve({"jaxgen": Jaxgen, "hf": HF}[kind](), {name: version(name) for name in packages})
