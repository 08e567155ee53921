"""transformers' experts under test, for `benchmarks/experts.py`. Each line of the input asks for one measurement."""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts


def main() -> None:
    experts, chosen, width, inner, layers, cores = map(int, sys.argv[1:])
    torch.set_num_threads(cores)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=width, moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=chosen
    )
    with torch.device("meta"):
        stacks = [Qwen3MoeExperts(config).to(torch.bfloat16) for _ in range(layers)]
    for stack in stacks:
        stack.to_empty(device="cpu")
        for weight in stack.parameters():
            for matrix in weight.data:
                matrix.normal_(std=0.02)
    _say(transformers.__version__)
    for line in sys.stdin:
        implementation, choices = json.loads(line)
        for stack in stacks:
            stack.config._experts_implementation = implementation
        choices = torch.tensor(choices)
        x = torch.ones(choices.shape[1], width, dtype=torch.bfloat16)
        shares = torch.full(choices.shape[1:], 1 / chosen, dtype=torch.bfloat16)
        start = time.perf_counter()
        with torch.no_grad():
            for own, stack in zip(choices, stacks, strict=True):
                x = x + stack(x, own, shares)
        _say((time.perf_counter() - start) / layers)


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
