"""Record when transformers 4.41.1's StopStringCriteria stops, for two small tokenizers (README.md has the format).

Usage, with the packages of requirements-441.txt installed: python make_stop_strings.py --seed N --out FILE.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

TEXT = (
    "Please stop at the opera. The last topper stopped a stopper;\n\nstops? to top it: 'stop, op, sto'!  </s><|end|> "
)
LETTERS = [chr(code) for code in range(32, 127)]
CASES = 32  # per tokenizer


def draw_pieces(rng: np.random.Generator) -> list[str]:
    """Return fixed pieces, and random pieces of the text with 2 to 6 characters."""
    pieces = {"st", "op", "stop", "opera", "sto", "pper", "las", "topper", "s", "to", "pped", "at"}
    while len(pieces) < 150:
        begin, length = rng.integers(len(TEXT) - 2), rng.integers(2, 7)
        pieces.add(TEXT[begin : begin + length])
    return sorted(piece for piece in pieces if len(piece) > 1)


def byte_level(rng: np.random.Generator) -> tuple[tokenizers.Tokenizer, list[str]]:
    """Make a tokenizer like GPT-2's: special tokens, all bytes, and pieces. It only decodes, so it has no merges."""
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    pieces = [encode(piece)[0][0] for piece in draw_pieces(rng)]
    special = ["<|end|>", "</s>"]
    tokens = [*dict.fromkeys([*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces])]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return backend, tokens


def sentencepiece(rng: np.random.Generator) -> tuple[tokenizers.Tokenizer, list[str]]:
    """Make a tokenizer like Llama 2's, with a token for each byte."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [piece.replace(" ", "▁") for piece in [*LETTERS, "é", "€", *draw_pieces(rng)]]
    tokens = [*dict.fromkeys([*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(special)
    return backend, tokens


def draw_strings(rng: np.random.Generator) -> list[str]:
    """Draw stop strings from the text. Sometimes a prefix or suffix of the first one is a stop string, too.

    The first string has at least two characters, because 4.41.1 fails if every string has only one.
    """
    strings = []
    for number in range(rng.integers(1, 4)):
        begin, length = rng.integers(len(TEXT) - 8), rng.integers(1 if number else 2, 9)
        strings.append(str(rng.choice(["stop", "</s>", "<|end|>", *[TEXT[begin : begin + length]] * 5])))
    if rng.random() < 0.3:
        cut = int(rng.integers(1, len(strings[0])))
        strings.append(strings[0][cut:] if rng.random() < 0.5 else strings[0][:cut])
    return strings


def draw_ids(strings: list[str], surface: list[str], rng: np.random.Generator) -> list[int]:
    """Draw a text with whole and partial stop strings, cut it into random tokens, and insert a few other tokens."""
    text = ""
    while len(text) < 45:
        begin, length = rng.integers(len(TEXT) - 8), rng.integers(1, 9)
        string = str(rng.choice(strings))
        text += str(rng.choice([string, string[: int(rng.integers(1, len(string) + 1))], TEXT[begin : begin + length]]))
    ids = []
    while text:
        if rng.random() < 0.04:
            ids.append(int(rng.integers(len(surface))))
        fits = [i for i, token in enumerate(surface) if token and text.startswith(token)]
        ids.append(int(rng.choice(fits)))
        text = text[len(surface[ids[-1]]) :]
    return ids


def record(backend: tokenizers.Tokenizer, tokens: list[str], rng: np.random.Generator) -> dict:
    """Draw cases, and record after each token whether the criteria stop."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    cleaned, indices = StopStringCriteria.clean_tokenizer_vocab(tokenizer)
    surface = [text for _, text in sorted(zip(indices, cleaned, strict=True))]
    cases = []
    for _ in range(CASES):
        strings = draw_strings(rng)
        criteria = StopStringCriteria(tokenizer, strings)
        ids = draw_ids(strings, surface, rng)
        stops = [n for n in range(1, len(ids) + 1) if bool(criteria(torch.tensor([ids[:n]]), None)[0])]
        cases.append({"stop_strings": strings, "ids": ids, "stops": stops})
    special = [token.content for token in backend.get_added_tokens_decoder().values()]
    return {"tokens": tokens, "special": special, "cases": cases}


def main() -> None:
    """Write the file, one case per line."""
    if transformers.__version__ != "4.41.1":
        raise SystemExit(f"this needs transformers 4.41.1, found {transformers.__version__}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    rng = np.random.default_rng([arguments.seed, 3])
    parts = []
    for make in (byte_level, sentencepiece):
        recorded = record(*make(rng), rng)
        cases = ",\n".join(json.dumps(case) for case in recorded["cases"])
        tokens, special = (json.dumps(recorded[name], ensure_ascii=False) for name in ("tokens", "special"))
        parts.append(f'"{make.__name__}": {{"tokens": {tokens},\n"special": {special},\n"cases": [\n{cases}\n]}}')
    arguments.out.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
