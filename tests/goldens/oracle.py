"""Code shared by the scripts for goldens: tiny random checkpoints, and runs of transformers on single rows.

All random numbers come from NumPy, so that a seed gives the same weights and prompts with every release of torch.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import pathlib
import shutil
import warnings

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A random checkpoint: its config, the standard deviation of its weights, and the contents of its other files."""

    config: transformers.PretrainedConfig
    std: float = 0.35
    generation: dict = dataclasses.field(default_factory=dict)
    eos_ids: int = 1
    dtype: str = "float32"

    def save(self, path: pathlib.Path, rng: np.random.Generator) -> None:
        """Write the checkpoint, with nonzero biases, norm weights other than one, and logits that are spread out."""
        config = copy.deepcopy(self.config)
        bos, pad, *eos = (int(i) for i in rng.choice(config.vocab_size, size=2 + self.eos_ids, replace=False))
        config.bos_token_id, config.pad_token_id, config.eos_token_id = bos, pad, eos[0]
        config.initializer_range = self.std
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.from_numpy(rng.standard_normal(parameter.shape, dtype=np.float32))
                bias = name.endswith("bias")
                parameter.copy_(1 + 0.3 * noise if "norm" in name else (0.5 if bias else self.std) * noise)
        ids = {"bos_token_id": bos, "pad_token_id": pad, "eos_token_id": eos if len(eos) > 1 else eos[0]}
        model.generation_config = GenerationConfig(**ids, **self.generation)
        model.to(getattr(torch, self.dtype)).save_pretrained(path, safe_serialization=True)


def shape(vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    """Return the sizes of a model by their names in config.json."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


class Oracle:
    """A checkpoint loaded by transformers, in float32 with eager attention and a fresh state for each call."""

    def __init__(self, path: pathlib.Path):
        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").float().eval()
        self.vocab = self.model.config.vocab_size
        self._rope = [(m, m.inv_freq.clone()) for m in self.model.modules() if hasattr(m, "inv_freq")]

    def reset(self) -> None:
        """Undo the growth of a dynamic RoPE, which 4.41.1 would carry over to the next call."""
        for module, inv_freq in self._rope:
            module.register_buffer("inv_freq", inv_freq.clone(), persistent=False)

    def forward(self, ids: np.ndarray, mask: np.ndarray | None = None, *, gradients: bool = False, **options):
        """Call the model on ids [B, T]. Positions count real tokens, as in generate."""
        self.reset()
        mask = np.ones_like(ids) if mask is None else mask
        positions = np.where(mask == 1, np.cumsum(mask, axis=-1) - 1, 1)
        arrays = {"input_ids": ids, "attention_mask": mask, "position_ids": positions} | options
        inputs = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in arrays.items()}
        with torch.set_grad_enabled(gradients):
            return self.model(**inputs, use_cache=False, return_dict=True)

    def gradients(self, ids: np.ndarray, mask: np.ndarray, labels: np.ndarray, **options) -> dict[str, np.ndarray]:
        """Return the gradients of the loss, by parameter name.

        A row's first token is not a label, because left padding would predict it. Padding attends to every position, so
        that label's gradient would depend on whether the mask is added to the scores or replaces them.
        """
        labels = np.where(np.cumsum(mask, axis=-1) == 1, -100, labels)
        self.model.zero_grad()
        self.forward(ids, mask, gradients=True, labels=labels, **options).loss.backward()
        return {name: parameter.grad.numpy() for name, parameter in self.model.named_parameters()}

    def greedy(self, ids: list[int], options: dict) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Generate from one row alone. Return its sequence, processed scores and raw logits [steps, V]."""
        self.reset()
        prompt = torch.tensor([ids])
        outputs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # generation_config.json sets sampling options although do_sample=False
            out = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **outputs, **options
            )
        return out.sequences[0].tolist(), torch.cat(out.scores).numpy(), torch.cat(out.logits).numpy()


def left_pad(rows: list[np.ndarray], rng: np.random.Generator, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask, int64[B, T]. The padding contains random ids, which must not matter."""
    width = max(map(len, rows))
    ids = rng.integers(0, vocab, size=(len(rows), width))
    mask = np.zeros((len(rows), width), np.int64)
    for b, row in enumerate(rows):
        ids[b, width - len(row) :], mask[b, width - len(row) :] = row, 1
    return ids, mask


def forward_goldens(
    oracle: Oracle, lengths: list[int], rng: np.random.Generator, *, batch: bool = True, full: bool = False, **more
) -> dict[str, np.ndarray]:
    """Return the logits of each row alone and of the left-padded batch; if `full`, also the batch's other outputs.

    `more` has further options for the outputs and the gradients of a full batch.
    """
    rows = [rng.integers(0, oracle.vocab, size=n) for n in lengths]
    arrays: dict[str, np.ndarray] = {}
    for i, row in enumerate(rows):
        arrays[f"ids_{i}"] = row.astype(np.int32)
        arrays[f"logits_{i}"] = oracle.forward(row[None]).logits[0].numpy()
    if not batch:
        return arrays
    ids, mask = left_pad(rows, rng, oracle.vocab)
    options: dict = {}
    if full:
        labels = np.where((mask == 0) | (rng.random(ids.shape) < 0.25), -100, ids)
        options = {"labels": labels, "output_hidden_states": True, "output_attentions": True, **more}
    out = oracle.forward(ids, mask, **options)
    real = mask.astype(np.float32)
    arrays |= {"ids": ids.astype(np.int32), "attention_mask": mask.astype(np.int32)}
    arrays["logits"] = out.logits.numpy() * real[:, :, None]
    if full:
        gradients = oracle.gradients(ids, mask, options["labels"], **more)
        arrays |= {f"gradient:{name}": value for name, value in gradients.items()}
        arrays |= {"labels": options["labels"].astype(np.int32), "loss": out.loss.numpy()}
        arrays["hidden_states"] = torch.stack(out.hidden_states).numpy() * real[None, :, :, None]
        arrays["attentions"] = torch.stack(out.attentions).numpy() * real[None, :, None, :, None]
        if more.get("output_router_logits"):
            router_logits = torch.stack(out.router_logits).reshape(-1, *ids.shape, out.router_logits[0].shape[-1])
            arrays["router_logits"] = router_logits.numpy() * real[None, :, :, None]
    return arrays


def smallest_gap(scores: np.ndarray) -> float:
    """Return the smallest distance between the best two scores of any step."""
    best = np.sort(scores, axis=-1)[:, -2:]
    return float(np.min(best[:, 1] - best[:, 0]))


def greedy_run(
    oracle: Oracle, prompt: list[int], options: dict, rng: np.random.Generator
) -> tuple[dict, np.ndarray, np.ndarray]:
    """Run one row. If two scores are less than 1e-3 apart, so that rounding could swap them, draw a new prompt."""
    while True:
        sequence, scores, logits = oracle.greedy(prompt, options)
        gap = smallest_gap(scores)
        if gap >= 1e-3:
            return {"ids": prompt, "sequence": sequence, "smallest_gap": round(gap, 5)}, scores, logits
        print(f"drawn again: a greedy run with a gap of {gap:.1e}")
        prompt = rng.integers(0, oracle.vocab, size=len(prompt)).tolist()


def in_float64(model):
    """Return a copy of a model in float64. The default products of experts in release 5 cannot compute in it."""
    model = copy.deepcopy(model).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def generate(oracle: Oracle, ids: list[int], options: dict, double: bool):
    """Generate from one row, in float32 or (with `double`) in float64."""
    oracle.reset()
    model = in_float64(oracle.model) if double else oracle.model
    torch.set_default_dtype(torch.float64 if double else torch.float32)  # for the attention mask
    prompt = torch.tensor([ids])
    options = {"do_sample": False} | options | {"output_scores": True, "return_dict_in_generate": True}
    if "sequence_bias" in options:
        options["sequence_bias"] = {tuple(ids): bias for ids, bias in options["sequence_bias"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    torch.set_default_dtype(torch.float32)
    return out


def run_beams(oracle: Oracle, ids: list[int], options: dict, double: bool = False) -> dict:
    """Run a beam search of one row. Return the sequences without prompt and padding, their scores and beam indices."""
    out = generate(oracle, ids, options, double)
    eos = options["eos_token_id"]
    ends = {None} if eos is None else {eos} if isinstance(eos, int) else {*eos}
    sequences, indices = [], []
    for sequence, places in zip(out.sequences[:, len(ids) :].tolist(), out.beam_indices.tolist(), strict=True):
        length = next((i for i, token in enumerate(sequence) if token in ends), len(sequence))
        ended = length < len(sequence)
        # transformers writes the first eos id, whichever one ended the beam, so it is left out.
        sequences.append({"tokens": sequence[:length], "ended": ended})
        indices.append(places[: length + ended])
    return {"sequences": sequences, "scores": out.sequences_scores.tolist(), "beam_indices": indices}


def run_tokens(oracle: Oracle, ids: list[int], options: dict, double: bool = False) -> list[int] | None:
    """Return the tokens that are generated from one row, or None if one of them is banned."""
    out = generate(oracle, ids, options, double)
    # Prompt lookup can generate more tokens than requested.
    tokens = out.sequences[0, len(ids) :].tolist()[: options["max_new_tokens"]]
    banned = any(scores[0, token] == -np.inf for scores, token in zip(out.scores[: len(tokens)], tokens, strict=True))
    return None if banned else tokens


def run_assisted(
    oracle: Oracle, ids: list[int], options: dict, assistant: Oracle | None, double: bool
) -> list[int] | None:
    """Return the tokens that are generated from one row, or None if one of them is banned."""
    if assistant is not None:  # a copy, because a run changes num_assistant_tokens
        draft = copy.deepcopy(assistant.model)
        for name in ("num_assistant_tokens", "num_assistant_tokens_schedule"):
            setattr(draft.generation_config, name, options[name])
        options = options | {"assistant_model": in_float64(draft) if double else draft}
    return run_tokens(oracle, ids, options, double)


def first_scores(oracle: Oracle, ids: list[int], options: dict, double: bool) -> list[float | None]:
    """Return the processed scores of the first sampled token; None stands for -inf."""
    scores = generate(oracle, ids, options | {"max_new_tokens": 1}, double).scores[0][0].tolist()
    return [None if score == -np.inf else score for score in scores]


def scores_case(oracle: Oracle, ids: list[int], options: dict) -> dict:
    """Return a case with `first_scores`. `near_tie` means that a run in float64 bans different tokens."""
    found, exact = (first_scores(oracle, ids, options, double) for double in (False, True))
    near = [score is None for score in found] != [score is None for score in exact]
    return {"ids": ids, "first_scores": found, "near_tie": near}


def write_lines(path: pathlib.Path, items: list[dict]) -> None:
    """Write a JSON array, one item per line."""
    path.write_text("[\n" + ",\n".join(json.dumps(item) for item in items) + "\n]\n")


def start(version: str, **numbers: int) -> tuple:
    """Read the command line, check the release, and create the empty output folder with its manifest.

    `numbers` maps further options to their defaults. Return the seed, the folder, and the values of these options.
    """
    if transformers.__version__ != version:
        raise SystemExit(f"this needs transformers {version}, found {transformers.__version__}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    seed, out = arguments.seed, arguments.out
    if (out / "manifest.json").exists():
        shutil.rmtree(out)
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} holds other files: name a new folder")
    (out / "logits").mkdir(parents=True)
    versions = {"transformers": version, "torch": torch.__version__, "numpy": np.__version__}
    (out / "manifest.json").write_text(json.dumps({"seed": seed} | versions, indent=2) + "\n")
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    return seed, out, *(getattr(arguments, name) for name in numbers)
