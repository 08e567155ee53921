"""Make tiny random checkpoints, and record what transformers 4.41.1 computes from them (see README.md for the format).

Usage, with the packages of requirements-441.txt installed: python make_441.py --seed N --out DIR [--cases N].
"""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from assisted_441 import EXPERT_ASSISTANTS, assisted_goldens
from bounds_441 import write_bounds
from modes_441 import beam_goldens, constrained_goldens, contrastive_goldens, first_score_goldens
from options_441 import LONGEST, option_goldens, prepared_lists
from oracle import Checkpoint, Oracle, forward_goldens, greedy_run, shape, start, write_lines
from outputs_441 import output_goldens
from processors_441 import probabilities, processor_goldens
from statistics_441 import write_statistics
from transformers import LlamaConfig, MixtralConfig, Qwen2Config, Qwen2MoeConfig
from transformers.generation.logits_process import TopPLogitsWarper

CHECKPOINTS = {
    "qwen2-gqa-tied": Checkpoint(
        Qwen2Config(
            **shape(vocab=97, hidden=32, mlp=32, layers=3, heads=4, kv_heads=2),
            **{
                "tie_word_embeddings": True,
                "rope_theta": 1e6,
                "max_position_embeddings": 256,
                "rms_norm_eps": 1e-6,
            },
        ),
        generation={
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
            "repetition_penalty": 1.1,
        },
        eos_ids=2,
    ),
    "qwen2-mqa": Checkpoint(
        Qwen2Config(
            **shape(vocab=101, hidden=40, mlp=32, layers=2, heads=5, kv_heads=1),
            **{
                "rope_theta": 1e4,
                "max_position_embeddings": 128,
                "rms_norm_eps": 1e-2,
                "attention_dropout": 0.1,
            },
        ),
        std=0.3,
    ),
    "qwen2-mha-bf16": Checkpoint(
        Qwen2Config(
            **shape(vocab=131, hidden=48, mlp=40, layers=2, heads=4, kv_heads=4),
            **{"rope_theta": 250.0, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
            hidden_act="gelu_pytorch_tanh",
        ),
        std=0.25,
        generation={"repetition_penalty": 1.05},
        dtype="bfloat16",
    ),
    "llama-mha": Checkpoint(
        LlamaConfig(
            **shape(vocab=97, hidden=32, mlp=40, layers=2, heads=4, kv_heads=4),
            **{"rope_theta": 5e5, "max_position_embeddings": 128, "rms_norm_eps": 1e-5},
        ),
    ),
    "llama-gqa-biases-tied": Checkpoint(
        LlamaConfig(
            **shape(vocab=103, hidden=32, mlp=36, layers=2, heads=8, kv_heads=2),
            **{
                "tie_word_embeddings": True,
                "rope_theta": 1e4,
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-6,
            },
            **{"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
        ),
        std=0.4,
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    ),
    "llama-mqa-linear": Checkpoint(
        LlamaConfig(
            **shape(vocab=109, hidden=32, mlp=32, layers=2, heads=2, kv_heads=1),
            **{
                "rope_theta": 1e4,
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-5,
                "attention_bias": True,
            },
            rope_scaling={"type": "linear", "factor": 2.5},
        ),
    ),
    "llama-gqa-dynamic": Checkpoint(
        LlamaConfig(
            **shape(vocab=97, hidden=32, mlp=32, layers=2, heads=4, kv_heads=2),
            **{"rope_theta": 1e3, "max_position_embeddings": 12, "rms_norm_eps": 1e-5, "mlp_bias": True},
            rope_scaling={"type": "dynamic", "factor": 2.0},
        ),
    ),
}
EXPERTS = {  # with the loss of the router
    "qwen2-moe": Checkpoint(
        Qwen2MoeConfig(
            **shape(vocab=97, hidden=32, mlp=40, layers=4, heads=4, kv_heads=2),
            **{"rope_theta": 1e4, "max_position_embeddings": 128, "rms_norm_eps": 1e-6},
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": False},
            **{"shared_expert_intermediate_size": 28, "mlp_only_layers": [1], "router_aux_loss_coef": 0.1},
        ),
    ),
    "mixtral": Checkpoint(
        MixtralConfig(
            **shape(vocab=101, hidden=32, mlp=24, layers=2, heads=4, kv_heads=1),
            **{"rope_theta": 1e6, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "sliding_window": None},
            **{"num_local_experts": 5, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1},
        ),
    ),
}
FULL_OUTPUTS = ("qwen2-gqa-tied", "llama-gqa-biases-tied")  # with hidden states, attentions and a loss


def draw_lengths(group: int, rng: np.random.Generator) -> dict:
    """Draw a greedy group's limits on the length, and its penalty. Every row can reach its minimum length."""
    options: dict = {}
    if group % 3 == 2:
        widest = options["max_length"] = int(rng.integers(LONGEST + 2, LONGEST + 17))
        room = widest - LONGEST
    else:
        room = options["max_new_tokens"] = int(rng.choice([1, 7, 12, 16, 20, 24], p=[0.05, 0.15, *[0.2] * 4]))
        widest = room + 1
    kind = rng.choice(["none", "length", "new", "both"], p=[0.4, 0.25, 0.25, 0.1])
    if kind in ("length", "both"):
        options["min_length"] = int(rng.integers(2, widest + 1))
    if kind in ("new", "both"):
        options["min_new_tokens"] = int(rng.integers(0 if kind == "both" else 1, room + 1))
    if rng.random() < 0.6:
        options["repetition_penalty"] = round(float(rng.choice([1.0, *rng.uniform(0.6, 2.0, size=4)])), 3)
    return options


def draw_ids(oracle: Oracle, options: dict, prompts: list[list[int]], rng: np.random.Generator) -> dict:
    """Draw eos and pad ids. An eos id is a token that the model, if not stopped, generates early, late or never."""
    free = options | {"eos_token_id": None, "max_new_tokens": 24}
    runs = [oracle.greedy(prompt, free)[0][len(prompt) :] for prompt in prompts]
    early, later, late = (
        int(run[rng.integers(*r)]) for run, r in zip(runs[:3], [(0, 4), (3, 9), (6, 16)], strict=True)
    )
    never = int(rng.choice([i for i in range(oracle.vocab) if all(i not in run for run in runs)]))
    eos = {
        "none": None,
        "never": never,
        "early": early,
        "late": late,
        "list": [*dict.fromkeys([never, early, later, late][: int(rng.integers(2, 5))])],
    }
    role = rng.choice(["checkpoint", *eos], p=[0.1, 0.1, 0.1, 0.25, 0.2, 0.25])
    ids = {} if role == "checkpoint" else {"eos_token_id": eos[role]}
    if rng.random() < 0.6:
        ids["pad_token_id"] = int(rng.integers(0, oracle.vocab))
    return ids


def greedy_goldens(
    oracles: dict[str, Oracle], rng: np.random.Generator, count: int = 40
) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Return groups of 5 rows, one set of options per group, and the steps of each first row with at most 16."""
    groups, steps = [], {}
    for g in range(count):
        name = list(oracles)[g % len(oracles)]
        oracle = oracles[name]
        lengths = rng.permutation([1, rng.integers(2, 8), 12, rng.integers(13, LONGEST), LONGEST])
        prompts = [rng.integers(0, oracle.vocab, size=n).tolist() for n in lengths]
        options = draw_lengths(g, rng)
        options |= draw_ids(oracle, options, prompts, rng)
        runs = [greedy_run(oracle, prompt, options, rng) for prompt in prompts]
        groups.append({"checkpoint": name, "options": options, "cases": [run for run, _, _ in runs]})
        if len(runs[0][1]) <= 16:
            steps |= {f"{g}_scores": runs[0][1], f"{g}_logits": runs[0][2]}
    return groups, steps


def draw_sampling(vocab: int, rng: np.random.Generator) -> dict:
    """Draw a setting of the processors and warpers, and the ids that they see."""
    length = int(rng.integers(2, 33))
    new = int(rng.integers(0, min(length, 6)))
    eos = [int(i) for i in rng.choice(vocab, size=3, replace=False)][: int(rng.integers(1, 4))]

    def around(values: np.ndarray) -> list[float]:
        return [round(float(value), 4) for value in values]

    knobs = {
        "temperature": [1.0, 0.1, *around(np.exp(rng.uniform(-1, 1, size=5)))],
        "top_k": [0, 1, int(rng.integers(2, vocab)), int(rng.integers(2, 12)), vocab, vocab + 7],
        "top_p": [0.0, 1e-6, 1.0, *around(rng.uniform(0.05, 0.995, size=9))],
        "min_p": [0.0, 1.0, *around(np.exp(rng.uniform(-7, -0.7, size=8)))],
        "repetition_penalty": [1.0, *around(rng.uniform(0.5, 2.0, size=4))],
        "min_length": [0, length, length + 1, length + 5],
        "min_new_tokens": [0, new, new + 1, new + 4],
    }
    options: dict = {"do_sample": True, "max_new_tokens": 64, "eos_token_id": eos if len(eos) > 1 else eos[0]}
    for name, values in knobs.items():
        if rng.random() < (0.25 if name in ("min_length", "min_new_tokens") else 0.45):
            options[name] = values[rng.integers(len(values))]
    ids = rng.integers(0, vocab, size=length).tolist()
    return {"vocab": vocab, "options": options, "prompt_length": length - new, "ids": ids}


def draw_logits(vocab: int, rng: np.random.Generator) -> tuple[str, np.ndarray]:
    """Draw logits, float32[V]: normal numbers, sometimes with exact ties, many -inf or both, or one constant."""
    kind = str(rng.choice(["normal", "ties", "inf", "ties-inf", "constant"], p=[0.5, 0.2, 0.15, 0.1, 0.05]))
    logits = rng.standard_normal(vocab) * rng.choice([0.5, 1.0, 2.0, 5.0])
    if kind.startswith("ties"):
        logits = np.round(logits * 2) / 2
    if kind == "constant":
        logits = np.full(vocab, 1.25)
    if kind.endswith("inf"):
        some = rng.choice(vocab, size=6, replace=False)  # at least these stay finite; some may be eos ids
        logits[(rng.random(vocab) < rng.choice([0.1, 0.5, 0.9])) & ~np.isin(np.arange(vocab), some)] = -np.inf
    return kind, logits.astype(np.float32)


def top_p_report(scores: np.ndarray, kept: np.ndarray, top_p: float) -> dict:
    """Report how close the cumulative mass comes to the boundary of top_p, and whether a tie is split there."""
    cumulative = np.cumsum(np.sort(probabilities(scores)))[:-1]  # the best token is always kept
    members = np.flatnonzero(scores == scores[kept].min())
    survivors = members[kept[members]]
    return {
        "top_p_gap": float(np.min(np.abs(cumulative - (1 - top_p)))),
        "top_p_splits_tie": len(survivors) < len(members),
        "highest_ids_kept": bool(np.array_equal(survivors, members[-len(survivors) :])),
    }


def sampling_scores(oracle: Oracle, case: dict, logits: np.ndarray) -> tuple[np.ndarray, dict]:
    """Return the scores after the processors and warpers that generate builds, and a report on boundaries."""
    ids = torch.tensor([case["ids"]])
    processors, warpers = prepared_lists(oracle.model, case["options"], ids[:, : case["prompt_length"]])
    scores, report = torch.from_numpy(logits.copy())[None], {}
    for processor in [*processors, *warpers]:
        before, scores = scores, processor(ids, scores)
        if isinstance(processor, TopPLogitsWarper):
            report |= top_p_report(before[0].numpy(), torch.isfinite(scores[0]).numpy(), processor.top_p)
        if type(processor).__name__ == "MinPLogitsWarper" and 0 < processor.min_p < 1:
            p = probabilities(before[0].numpy())
            report["min_p_gap"] = float(np.min(np.abs(p / (processor.min_p * p.max()) - 1)))
    return scores[0].numpy(), report


def sampling_goldens(oracle: Oracle, rng: np.random.Generator) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Return 100 settings and their scores. A setting within 1e-5 of a boundary is redrawn, with at most 20 draws."""
    cases, arrays = [], {}
    for i, vocab in enumerate([97] * 80 + [1031] * 16 + [4099] * 4):
        for _ in range(20):
            case = draw_sampling(vocab, rng)
            kind, logits = draw_logits(vocab, rng)
            scores, report = sampling_scores(oracle, case, logits)
            near = min(report.get("top_p_gap", 1.0), report.get("min_p_gap", 1.0)) < 1e-5
            if not near:
                break
        cases.append(case | {"kind": kind, "near_boundary": near} | report)
        arrays |= {f"{i}_logits": logits, f"{i}_scores": scores}
    return cases, arrays


def make_experts(seed: int, out: pathlib.Path, dense: dict[str, Oracle]) -> None:
    """Make the goldens of models with experts. `dense` has models that draft for them."""
    oracles = {}
    for i, (name, checkpoint) in enumerate(EXPERTS.items()):
        rng = np.random.default_rng([seed, 13, i])
        path = out / "checkpoints" / name
        checkpoint.save(path, rng)
        oracles[name] = oracle = Oracle(path)
        arrays = forward_goldens(oracle, [5, 11, 18], rng, full=True, output_router_logits=True)
        np.savez_compressed(out / "logits" / f"{name}.npz", **arrays)
    groups, _ = greedy_goldens(oracles, np.random.default_rng([seed, 14]), 6)
    write_lines(out / "expert_greedy.json", groups)
    write_lines(out / "expert_beams.json", beam_goldens(oracles, False, np.random.default_rng([seed, 15]), 6))
    write_lines(out / "expert_contrastive.json", contrastive_goldens(oracles, np.random.default_rng([seed, 16]), 4))
    write_lines(out / "expert_group_beams.json", beam_goldens(oracles, True, np.random.default_rng([seed, 17]), 4))
    write_lines(out / "expert_constrained.json", constrained_goldens(oracles, np.random.default_rng([seed, 18]), 4))
    write_lines(out / "expert_sampling.json", first_score_goldens(oracles, np.random.default_rng([seed, 19]), 6))
    for i, (name, lookup) in enumerate({"expert_assisted": False, "expert_prompt_lookup": True}.items()):
        rng = np.random.default_rng([seed, 20, i])
        drafts = assisted_goldens(dense | oracles, lookup, rng, EXPERT_ASSISTANTS, 6)
        write_lines(out / f"{name}.json", drafts)


def main() -> None:
    """Make all goldens."""
    seed, out, cases = start("4.41.1", cases=500)
    oracles = {}
    for i, (name, checkpoint) in enumerate(CHECKPOINTS.items()):
        rng = np.random.default_rng([seed, 0, i])
        path = out / "checkpoints" / name
        checkpoint.save(path, rng)
        oracles[name] = oracle = Oracle(path)
        # In 4.41.1, a batch's longest row sets the dynamic RoPE base of all rows, so only single rows are compared.
        batch, full = "dynamic" not in name, name in FULL_OUTPUTS
        arrays = forward_goldens(oracle, [5, 11, 18], rng, batch=batch, full=full)
        np.savez_compressed(out / "logits" / f"{name}.npz", **arrays)

    groups, steps = greedy_goldens(oracles, np.random.default_rng([seed, 1]))
    write_lines(out / "greedy.json", groups)
    np.savez_compressed(out / "greedy_steps.npz", **steps)

    settings, arrays = sampling_goldens(oracles["llama-mha"], np.random.default_rng([seed, 2]))
    write_lines(out / "sampling.json", settings)
    np.savez_compressed(out / "sampling.npz", **arrays)

    np.savez_compressed(out / "processors.npz", **processor_goldens(cases, [seed, 4]))

    groups, arrays = option_goldens(oracles, cases, np.random.default_rng([seed, 5]))
    write_lines(out / "options.json", groups)
    np.savez_compressed(out / "options.npz", **arrays)

    rng = np.random.default_rng([seed, 6])
    outputs = {name: output_goldens(oracles[name], rng) for name in FULL_OUTPUTS}
    arrays = {f"{name}.{field}": value for name, fields in outputs.items() for field, value in fields.items()}
    np.savez_compressed(out / "outputs.npz", **arrays)

    write_statistics(oracles, "llama-mha", out, 20 * cases, [seed, 7])

    write_lines(out / "beams.json", beam_goldens(oracles, False, np.random.default_rng([seed, 8])))
    write_lines(out / "group_beams.json", beam_goldens(oracles, True, np.random.default_rng([seed, 9])))
    write_lines(out / "assisted.json", assisted_goldens(oracles, False, np.random.default_rng([seed, 10])))
    write_lines(out / "prompt_lookup.json", assisted_goldens(oracles, True, np.random.default_rng([seed, 11])))
    write_lines(out / "contrastive.json", contrastive_goldens(oracles, np.random.default_rng([seed, 10])))
    write_lines(out / "constrained.json", constrained_goldens(oracles, np.random.default_rng([seed, 10])))

    write_bounds(out, [seed, 12])
    make_experts(seed, out, oracles)


if __name__ == "__main__":
    main()
