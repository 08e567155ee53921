"""Small tokenizers for tests, of the two kinds that real checkpoints have."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxgen.core.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level_backend() -> tokenizers.Tokenizer:
    """Return a BPE tokenizer like GPT-2's, Qwen2's and Llama 3's: 256 bytes, four merges, three added tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "Ġhe"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "he")]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|im_start|>", "<|im_end|>"])
    return backend


def llama_backend() -> tokenizers.Tokenizer:
    """Return a BPE tokenizer like Llama 2's (SentencePiece): byte fallback, leading space, BOS from a template."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdehilmnorstvw.,!?'\ufffd", "he", "ll", "hell", "▁a", "▁hell", "▁▁"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "a"), ("▁", "hell"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return backend


def byte_level(**config) -> Tokenizer:
    config = {"eos_token": "<|im_end|>", "pad_token": "<|end|>", "chat_template": CHATML, **config}
    return Tokenizer(byte_level_backend(), {"clean_up_tokenization_spaces": False, **config})


def llama(**config) -> Tokenizer:
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(llama_backend(), {**special, "clean_up_tokenization_spaces": False, **config})


def save(folder: Path, backend: tokenizers.Tokenizer, **files) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
