"""transformers under test: eager, with a static cache, or with a static cache and torch.compile."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import transformers
from worker import Program, cores, serve

RELEASE = int(transformers.__version__.partition(".")[0])
MOVED = {"penalty_alpha", "dola_layers", "num_beam_groups"}
EXPERTS = ("grouped_mm", "batched_mm")  # variants that choose the product of experts


class Transformers(Program):
    optimizer: torch.optim.Optimizer | None = None

    def load(self, path: str, dtype: str, variant: str, mesh: list[int] | None) -> dict[str, Any]:
        torch.set_num_threads(cores())
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        options = {"dtype" if RELEASE >= 5 else "torch_dtype": getattr(torch, dtype)}
        if variant in EXPERTS:
            options["experts_implementation"] = variant
        start = time.perf_counter()
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
        self.model = model.to(self.device).eval()
        seconds = time.perf_counter() - start
        self.variant = variant
        model.generation_config = transformers.GenerationConfig()  # ignore the checkpoint's options
        total = sum(weight.nbytes for weight in model.parameters())
        unused = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
        if unused:
            unused -= unused * model.config.num_experts_per_tok // model.config.num_experts
        looked_up = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
        return {
            "seconds": seconds,
            "step_bytes": total - looked_up - unused,
            "platform": self.device,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "build": {"instructions": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()},
        }

    def compiled(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] if self.variant == "compile" else 0

    def train(self, ids: np.ndarray, rank: int) -> None:
        if self.optimizer is None:
            self.model.requires_grad_(False)
            for layer in self.model.model.layers:
                for block, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
                    for name in names:
                        setattr(block, f"{name}_proj", _LowRank(getattr(block, f"{name}_proj"), rank))
            self.trained = [weight for weight in self.model.parameters() if weight.requires_grad]
            self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        texts = torch.from_numpy(ids).long().to(self.device)
        self.model(input_ids=texts, labels=texts, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def generate(self, ids: np.ndarray, new_tokens: int, room: int, options: dict[str, Any]) -> np.ndarray:
        options, processors = dict(options), transformers.LogitsProcessorList()
        options.pop("capacity", None)  # `room` already sets the cache's size
        if period := options.pop("repeats", None):
            processors.append(_Repeat(period))
        if RELEASE >= 5 and (moved := MOVED & set(options)):
            raise NotImplementedError(f"transformers 5 has {', '.join(moved)} only as code to download")
        if self.variant in ("static", "compile"):
            options |= {"cache_implementation": "static", "max_cache_len": room}
            compiled = self.variant == "compile"
            config = transformers.CompileConfig()
            config._compile_all_devices = True  # there is no public switch for compiling on a CPU
            options |= {"compile_config": config} if compiled else {"disable_compile": True}
        prompts = torch.from_numpy(ids).long().to(self.device)
        given = {"attention_mask": torch.ones_like(prompts), "logits_processor": processors, "pad_token_id": 0}
        options = {"do_sample": False, "max_new_tokens": new_tokens} | options
        try:
            sequences = self.model.generate(prompts, **given, **options)
        except ValueError as error:  # incompatible options
            raise NotImplementedError(str(error)) from error
        if self.device == "cuda":
            self.device_peak = torch.cuda.max_memory_allocated()
        return sequences[:, ids.shape[1] :].cpu().numpy()


class _LowRank(torch.nn.Module):
    """A frozen projection plus a trained low-rank update. The update is float32 and is applied in the input's dtype."""

    def __init__(self, frozen: torch.nn.Linear, rank: int):
        super().__init__()
        weight = frozen.weight
        self.frozen = frozen
        self.a = torch.nn.Parameter(torch.randn(rank, weight.shape[1], device=weight.device) / weight.shape[1] ** 0.5)
        self.b = torch.nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + x @ self.a.to(x.dtype).T @ self.b.to(x.dtype).T


class _Repeat(transformers.LogitsProcessor):
    """Allow only the token whose id is the row's length modulo the period."""

    def __init__(self, period: int):
        self.period = period

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, input_ids.shape[1] % self.period] = 0.0
        return allowed


if __name__ == "__main__":
    serve(Transformers(), {"transformers": transformers.__version__, "torch": torch.__version__})
