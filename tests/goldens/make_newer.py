"""Make the goldens for what 4.41.1 lacks or computes differently, with transformers 5.23.0 (see README.md).

Usage, with the packages of requirements-newer.txt installed: python make_newer.py --seed N --out DIR.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
from oracle import (
    Checkpoint,
    Oracle,
    forward_goldens,
    greedy_run,
    run_assisted,
    run_beams,
    scores_case,
    shape,
    start,
    write_lines,
)
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

SMALL = shape(vocab=97, hidden=32, mlp=32, layers=2, heads=4, kv_heads=2)
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}


def longrope(original: int) -> Phi3Config:
    """Return a config whose rows use the long factors if they have more than `original` tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 250.0, "partial_rotary_factor": 0.5}
    return Phi3Config(
        **SMALL,
        max_position_embeddings=256,
        original_max_position_embeddings=original,
        rope_parameters=rope | {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]},
    )


CHECKPOINTS = {
    "llama-llama3": Checkpoint(
        LlamaConfig(
            **SMALL,
            max_position_embeddings=256,
            head_dim=16,
            rope_parameters={
                **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
            },
        ),
    ),
    "llama-yarn": Checkpoint(
        LlamaConfig(**SMALL, max_position_embeddings=128, rope_parameters=YARN | {"rope_theta": 100.0})
    ),
    "llama-yarn-attention-factor": Checkpoint(
        LlamaConfig(
            **SMALL,
            max_position_embeddings=128,
            head_dim=16,
            rope_parameters=YARN | {"attention_factor": 1.3, "beta_fast": 1.0, "beta_slow": 0.05},
        ),
    ),
    "llama-yarn-mscale": Checkpoint(
        LlamaConfig(
            **SMALL,
            max_position_embeddings=128,
            head_dim=16,
            rope_parameters=YARN | {"mscale": 1.5, "mscale_all_dim": 0.7, "beta_fast": 4.0, "truncate": False},
        ),
    ),
    "qwen2-yarn": Checkpoint(
        Qwen2Config(
            **shape(vocab=101, hidden=32, mlp=40, layers=2, heads=4, kv_heads=1),
            max_position_embeddings=128,
            rope_parameters=YARN | {"rope_theta": 1e3},
            tie_word_embeddings=True,
        ),
    ),
    "llama-head-dim": Checkpoint(
        LlamaConfig(
            **shape(vocab=103, hidden=40, mlp=32, layers=2, heads=4, kv_heads=2),
            max_position_embeddings=128,
            head_dim=6,
            rope_parameters={"rope_type": "default", "rope_theta": 300.0},
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "llama-linear": Checkpoint(
        LlamaConfig(
            **SMALL,
            max_position_embeddings=128,
            rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        ),
    ),
    "qwen2-window": Checkpoint(
        Qwen2Config(
            **shape(vocab=97, hidden=32, mlp=28, layers=3, heads=4, kv_heads=2),
            max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=1,
        ),
        eos_ids=2,
    ),
    "qwen3-tied": Checkpoint(
        Qwen3Config(
            **shape(vocab=89, hidden=32, mlp=40, layers=2, heads=4, kv_heads=2),
            max_position_embeddings=128,
            head_dim=12,
            rope_parameters={"rope_type": "default", "rope_theta": 1e3},
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-window-biases": Checkpoint(
        Qwen3Config(
            **shape(vocab=83, hidden=28, mlp=32, layers=3, heads=4, kv_heads=1),
            max_position_embeddings=128,
            head_dim=6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=7,
            max_window_layers=1,
        ),
    ),
    "mistral-window": Checkpoint(
        MistralConfig(
            **shape(vocab=97, hidden=32, mlp=32, layers=2, heads=4, kv_heads=2),
            max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            sliding_window=4,
        ),
    ),
    "mistral-tied": Checkpoint(
        MistralConfig(
            **shape(vocab=79, hidden=32, mlp=28, layers=2, heads=4, kv_heads=1),
            max_position_embeddings=128,
            head_dim=10,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            sliding_window=None,
            tie_word_embeddings=True,
        ),
    ),
}
# Further families, with everything in use that differs from Llama. 20 has an irrational square root.
GEMMA = shape(vocab=97, hidden=20, mlp=24, layers=2, heads=4, kv_heads=2) | {"max_position_embeddings": 128}
FIVE = shape(vocab=97, hidden=24, mlp=24, layers=5, heads=4, kv_heads=2) | {"max_position_embeddings": 128}
FAMILIES = {
    "gemma": Checkpoint(
        GemmaConfig(**GEMMA, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e3}),
    ),
    "gemma2": Checkpoint(
        Gemma2Config(
            **GEMMA | {"num_hidden_layers": 3},
            head_dim=8,
            query_pre_attn_scalar=20,
            sliding_window=4,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e3},
        ),
    ),
    "gemma3": Checkpoint(
        Gemma3TextConfig(
            **GEMMA | {"num_hidden_layers": 4},
            head_dim=8,
            query_pre_attn_scalar=20,
            sliding_window=4,
            sliding_window_pattern=3,
            final_logit_softcapping=5.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
    ),
    "phi3-window": Checkpoint(
        Phi3Config(
            **SMALL,
            max_position_embeddings=128,
            sliding_window=5,
            rope_parameters={"rope_type": "default", "rope_theta": 250.0},
            tie_word_embeddings=True,
        ),
    ),
    "phi3-longrope-short": Checkpoint(longrope(64)),
    "phi3-longrope-long": Checkpoint(longrope(4)),
    "granite": Checkpoint(
        GraniteConfig(
            **SMALL,
            max_position_embeddings=128,
            attention_multiplier=0.2,
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            logits_scaling=2.5,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        ),
    ),
    "smollm3": Checkpoint(
        SmolLM3Config(
            **FIVE,
            use_sliding_window=True,
            sliding_window=4,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        ),
    ),
    "olmo2": Checkpoint(
        Olmo2Config(
            **SMALL, max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 100.0}
        ),
    ),
    "olmo3": Checkpoint(
        Olmo3Config(
            **FIVE,
            sliding_window=4,
            attention_bias=True,
            rope_parameters={
                "full_attention": YARN | {"rope_theta": 100.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
    ),
}
EXPERTS = {  # with the loss of the router
    "qwen3-moe": Checkpoint(
        Qwen3MoeConfig(
            **shape(vocab=97, hidden=32, mlp=40, layers=3, heads=4, kv_heads=2),
            max_position_embeddings=128,
            head_dim=12,
            rope_parameters={"rope_type": "default", "rope_theta": 1e3},
            num_experts=7,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            router_aux_loss_coef=0.1,
        ),
    ),
    "qwen3-moe-steps": Checkpoint(
        Qwen3MoeConfig(
            **shape(vocab=89, hidden=32, mlp=36, layers=4, heads=4, kv_heads=1),
            max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
    ),
}
DRAFTS = {"qwen3-moe": "llama-llama3", "qwen3-moe-steps": "qwen3-tied"}  # assistants with the same vocabulary
OLD_SPELLING = ("qwen2-yarn", "qwen3-tied", "mistral-window")  # saved with config.json as written by releases before 5


def spell_as_before_5(path: pathlib.Path) -> None:
    """Rewrite a config.json to use rope_theta, rope_scaling, torch_dtype and, for Qwen2, an inactive sliding_window."""
    config = json.loads(path.read_text())
    config.pop("layer_types", None)
    if config["model_type"] == "qwen2":
        config["sliding_window"] = config["max_position_embeddings"]
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype")}
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind} | rope
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def greedy_goldens(name: str, oracle: Oracle, rng: np.random.Generator, lengths: tuple[int, ...]) -> dict:
    """Return 3 rows with one set of options. The first eos id is one that the first row would generate anyway."""
    options: dict = {"max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    prompts = [rng.integers(0, oracle.vocab, size=n).tolist() for n in lengths]
    free = oracle.greedy(prompts[0], options)[0][len(prompts[0]) :]
    options["eos_token_id"] = [free[9], int(rng.integers(0, oracle.vocab))]
    cases = [greedy_run(oracle, prompt, options, rng)[0] for prompt in prompts]
    return {"checkpoint": name, "options": options, "cases": cases}


def mode_goldens(name: str, oracle: Oracle, assistant: Oracle, rng: np.random.Generator) -> list[dict]:
    """Return one set of options, with its cases, for each other decode mode. `near_tie` is as in `modes_441`."""
    ids = rng.integers(0, oracle.vocab, size=(3, 6))
    prompts = [rng.choice(row, size=n).tolist() for row, n in zip(ids, (9, 14, 22), strict=True)]  # tokens repeat
    base = {"max_new_tokens": 12, "pad_token_id": 0, "repetition_penalty": 1.2}
    base["eos_token_id"] = rng.choice(oracle.vocab, size=2, replace=False).tolist()
    beams = base | {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.7}
    lookup = base | {"prompt_lookup_num_tokens": 4}
    drafts = base | {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    sampling = base | {"do_sample": True, "temperature": 1.7, "top_k": 20, "top_p": 0.9}

    def tokens(prompt: list[int], options: dict, draft: Oracle | None) -> dict:
        found, exact = (run_assisted(oracle, prompt, options, draft, double) for double in (False, True))
        return {"tokens": found, "near_tie": exact != found}

    def searched(prompt: list[int], options: dict) -> dict:
        found, exact = (run_beams(oracle, prompt, options, double) for double in (False, True))
        return found | {"near_tie": exact["sequences"] != found["sequences"]}

    runs = {
        "beams": (beams, lambda prompt: searched(prompt, beams)),
        "prompt_lookup": (
            lookup := base | {"prompt_lookup_num_tokens": 4},
            lambda prompt: tokens(prompt, lookup, None),
        ),
        "assisted": (assisted := base | drafts, lambda prompt: tokens(prompt, assisted, assistant)),
        "sampling": (sampling, lambda prompt: scores_case(oracle, prompt, sampling)),
    }
    return [
        {"checkpoint": name, "mode": mode, "options": options, "cases": [{"ids": ids} | run(ids) for ids in prompts]}
        for mode, (options, run) in runs.items()
    ]


def make(
    out: pathlib.Path,
    name: str,
    checkpoint: Checkpoint,
    rng: np.random.Generator,
    texts: tuple[int, ...] = (7, 30, 48),
    prompts: tuple[int, ...] = (26, 3, 40),
    **full,
) -> tuple[Oracle, dict]:
    """Make a checkpoint and its logits. Return its oracle and greedy goldens. For `full`, see `forward_goldens`."""
    path = out / "checkpoints" / name
    checkpoint.save(path, rng)
    if name in OLD_SPELLING:
        spell_as_before_5(path / "config.json")
    oracle = Oracle(path)
    arrays = forward_goldens(oracle, list(texts), rng, **full)
    np.savez_compressed(out / "logits" / f"{name}.npz", **arrays)
    return oracle, greedy_goldens(name, oracle, rng, prompts)


def make_experts(seed: int, out: pathlib.Path) -> None:
    """Make the goldens of models with experts."""
    groups, modes = [], []
    for i, (name, checkpoint) in enumerate(EXPERTS.items()):
        rng = np.random.default_rng([seed, 4, i])
        oracle, greedy = make(out, name, checkpoint, rng, full=True, output_router_logits=True)
        groups.append(greedy)
        assistant = Oracle(out / "checkpoints" / DRAFTS[name])
        for run in mode_goldens(name, oracle, assistant, np.random.default_rng([seed, 5, i])):
            modes.append(run | {"assistant": DRAFTS[name] if run["mode"] == "assisted" else None})
    write_lines(out / "expert_greedy.json", groups)
    write_lines(out / "expert_modes.json", modes)


def main() -> None:
    """Make all goldens."""
    seed, out = start("5.23.0")
    groups, modes = [], []
    assistant = None
    for i, (name, checkpoint) in enumerate((CHECKPOINTS | FAMILIES).items()):
        rng, full = np.random.default_rng([seed, 3, i]), name in FAMILIES
        sizes = ((5, 18, 11), (26, 9, 40)) if full else ()
        oracle, greedy = make(out, name, checkpoint, rng, *sizes, full=full)
        assistant = assistant or oracle
        groups.append(greedy)
        if full:
            modes += mode_goldens(name, oracle, assistant, rng)
    write_lines(out / "greedy.json", groups)
    write_lines(out / "modes.json", modes)
    make_experts(seed, out)


if __name__ == "__main__":
    main()
