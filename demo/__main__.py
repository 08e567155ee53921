"""Make the bundled model: `python -m demo OUT`.

Text from `corpus`, a byte-level BPE tokenizer trained on it, a Qwen2 model of 1.8 M parameters trained on the
answers, and the figures of its card. On two CPU cores it takes about an hour; if killed, it resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from convert import load_hf, save_hf
from demo import corpus
from jaxgen import CausalLM, GenerationConfig, ModelConfig, Tokenizer, generate
from jaxgen.training.conversations import chat_examples
from jaxgen.training.dataset import pack, shuffled
from jaxgen.training.loop import TrainConfig, batch_loss, train

VOCABULARY = 1024
WIDTH = 640  # tokens per row, and the longest conversation
ROWS = 8  # per step
TOKENIZER_TEXTS = 20_000
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

MODEL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "max_position_embeddings": WIDTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> None:
    """Make corpus, tokenizer, model and card."""
    options = _arguments()
    work = options.out.with_name(options.out.name + ".training")
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(work, options.seed)
    conversations = itertools.islice(corpus.conversations(options.seed), options.conversations)
    data, cut = pack((example for one in conversations for example in chat_examples(tokenizer, one)), WIDTH)
    _say(f"{options.conversations} conversations in {len(data.ids)} rows of {WIDTH} tokens, {cut} cut")

    model = ModelConfig.from_hf({**MODEL, "torch_dtype": "float32"})
    params = CausalLM(model).init(jax.random.key(options.seed), jnp.zeros((1, 1), jnp.int32))["params"]
    cfg = TrainConfig(steps=options.steps, learning_rate=options.rate, warmup=options.steps // 30, final_rate=0.02)
    run = f"demo {options.seed} {options.conversations}"
    batches = shuffled(data, ROWS, options.seed)
    params = train(params, batches, model=model, cfg=cfg, directory=work, run=run, report=_say)

    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    generation |= {"max_new_tokens": WIDTH // 2, "do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 0.9}
    written = save(params, GenerationConfig.from_hf(generation, model=model), work)
    card(written, options)
    written.rename(options.out)


def make_tokenizer(directory: Path, seed: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the corpus and write its files."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()  # transformers' Qwen2Tokenizer adds it to files without a normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    conversations = itertools.islice(corpus.conversations(seed + 1), TOKENIZER_TEXTS)
    backend.train_from_iterator((turn["content"] for talk in conversations for turn in talk), trainer)
    (directory / "tokenizer.json").write_text(tokenizer_json(backend), "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": STOP,
        "pad_token": END,
        "additional_special_tokens": [START, STOP],
        "clean_up_tokenization_spaces": False,
        "model_max_length": WIDTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return Tokenizer.from_pretrained(directory)


def tokenizer_json(backend: tokenizers.Tokenizer) -> str:
    """Return a byte-level BPE tokenizer as JSON, with merges such as "a b", which releases before 0.20 can read too."""
    content = json.loads(backend.to_str())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    return json.dumps(content, indent=2, ensure_ascii=False)


def save(params, cfg: GenerationConfig, work: Path) -> Path:
    """Write the checkpoint in bfloat16, with its tokenizer, and return its directory."""
    written = work / "checkpoint"
    save_hf(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), cfg, written, overwrite=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(work / name, written / name)
    return written


def card(path: Path, options: argparse.Namespace) -> None:
    """Measure the checkpoint on what it has never seen and write its README.md."""
    params, cfg = load_hf(path)
    tokenizer = Tokenizer.from_pretrained(path)
    assert cfg.model is not None
    loss = held_out_loss(params, cfg.model, tokenizer)
    requests = corpus.requests(0, 200)
    stories = tell(params, cfg, tokenizer, [request.prompt for request in requests])
    told = sum(
        all(word in story.lower() for word in _words(request)) for request, story in zip(requests, stories, strict=True)
    )
    text = CARD.format(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        layers=cfg.model.num_hidden_layers,
        width=cfg.model.hidden_size,
        heads=cfg.model.num_attention_heads,
        kv_heads=cfg.model.num_key_value_heads,
        vocabulary=cfg.model.vocab_size,
        context=WIDTH,
        conversations=options.conversations,
        steps=options.steps,
        rows=ROWS,
        rate=options.rate,
        loss=loss,
        told=told,
    )
    (path / "README.md").write_text(text, "utf-8")
    _say(f"held-out loss {loss:.4f}, {told} of 200 stories have their subject and object")


def held_out_loss(params, model: ModelConfig, tokenizer: Tokenizer) -> float:
    """Return the mean loss per token of answers in 500 conversations with unseen requests."""
    conversations = itertools.islice(corpus.conversations(1, held_out=True), 500)
    data, _ = pack((example for one in conversations for example in chat_examples(tokenizer, one)), WIDTH)
    loss_of = jax.jit(lambda params, batch: batch_loss(params, batch, model))
    batches = shuffled(data, ROWS, 0)
    sums = [loss_of(params, batches(step)) for step in range(len(data.ids) // ROWS)]
    return sum(float(total) for total, _ in sums) / sum(float(count) for _, count in sums)


def tell(params, cfg: GenerationConfig, tokenizer: Tokenizer, prompts: list[str], rows: int = 50) -> list[str]:
    """Return an answer to each prompt, drawn with seed 0."""
    answers = []
    for start in range(0, len(prompts), rows):
        batch = tokenizer.chat([[{"role": "user", "content": prompt}] for prompt in prompts[start : start + rows]])
        key = jax.random.fold_in(jax.random.key(0), start)
        limited = cfg.replace(max_new_tokens=WIDTH - batch.ids.shape[1])
        out = generate(params, batch.ids, key, limited, attention_mask=batch.attention_mask)
        answers += tokenizer.decode_batch(out)
    return answers


def _words(request: corpus.Unseen) -> list[str]:
    return re.findall(r"[a-z]+", f"{request.hero} {request.thing}".lower())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the directory to make for the checkpoint; must not exist")
    parser.add_argument("--steps", type=int, default=2200, help=f"of {ROWS} x {WIDTH} tokens each (default: 2200)")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate (default: 0.003)")
    parser.add_argument("--conversations", type=int, default=100_000, help="to train on (default: 100000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if os.path.lexists(options.out):
        parser.error(f"{options.out} exists: choose another name")
    return options


CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# The bundled model

A Qwen2 model with {parameters:,} parameters that tells short stories on request and answers a few simple questions.
With it, jaxgen can be tried without a download. It knows only the small world of its training text.

| | |
|---|---|
| layers, width, vocabulary | {layers}, {width}, {vocabulary}; embeddings tied, bfloat16 |
| heads | {heads} on {kv_heads} key-value head |
| tokenizer | byte-level BPE, ChatML template |
| context | {context} tokens |
| training text | {conversations:,} conversations made by `corpus.py`: stories, questions and answers |
| training | {steps:,} steps of {rows} x {context} tokens, AdamW at {rate:g}, loss on the answers |
| held-out loss | {loss:.3f} per token of the answers in 500 conversations |
| stories | {told} of 200 unseen requests got a story with the requested hero and thing |

Held-out conversations and unseen requests use combinations of hero, event and thing that are not in the training text.
A request looks like "Tell me a story about a brave fox who lost a key": a hero, and what happens to it. Made-up words
also work.

`python -m demo OUT` builds everything again, including this card.
"""

if __name__ == "__main__":
    main()
