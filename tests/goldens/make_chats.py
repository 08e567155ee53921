"""Record ids, texts and prompts of tokenizers like published ones, with transformers 5.23.0 (README.md has the format).

Usage, with the packages of requirements-newer.txt installed: python make_chats.py --out DIR. With those of
requirements-441.txt, the script makes the same encodings.json, but no prompts: 4.41.1 lacks `strftime_now`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import shutil
from unittest import mock

import tokenizers
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

WORDS = "hello the user assistant system and model think in is it on er re Hello The What are you answer".split()
WORDS += [" hello", " the", " a", " and", " is", " user", " you", "\n\n", "  ", "    "]
OPENAI_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NO_LIMIT = 1000000000000000019884624838656  # what transformers writes

TEXTS = [
    "hello",
    "",
    " hello  the user",
    "The answer is 12345, not 6.7!\n\nAnd\tyou?",
    "naïve 你好 👋\u200d",
    "a▁b <0x41> ▁",
    "x\n\n\n  y    z \r\n",
    " it is n't , he 's .",
    "{start}user\nhello{end}\n{start}  the  {end}  \n and",
    "a {end} b{end}c\n{end}\n\nd",
    "{bos}hello{eos} the",
    "<unk> <pad> <mask> <s></s>",
]
SYSTEM = {"role": "system", "content": " You are  brief.\n"}
TURNS = [
    {"role": "user", "content": " What is 2+2?\n"},
    {"role": "assistant", "content": "\n4 {x} <b>'\"\n "},
    {"role": "user", "content": "Why? é 你好"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "Ädd", "parameters": {"type": "object"}}}
CHATS = [
    {"messages": TURNS[:1]},
    {"messages": TURNS},
    {"messages": [SYSTEM, *TURNS[:1]]},
    {"messages": [SYSTEM, *TURNS]},
    {"messages": [SYSTEM, *TURNS[:2]], "add_generation_prompt": False},
    {"messages": [TURNS[0], TURNS[0]]},
    {"messages": TURNS, "tools": [TOOL]},
    {"messages": [*TURNS[:2], {"role": "tool", "content": "4"}]},
]
OWN_CHATS = {
    "gemma3": [{"messages": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}]}]}],
    "phi4-mini": [{"messages": [SYSTEM | {"tools": '[{"name": "add"}]'}, TURNS[0]]}],
    "granite": [
        {"messages": TURNS, "documents": [{"title": "t", "text": "one"}, {"text": "two"}]},
        {"messages": TURNS, "controls": {"citations": True}, "documents": [{"text": "one"}]},
        {"messages": TURNS, "controls": {"length": "long"}, "tools": [TOOL], "documents": [{"text": "one"}]},
    ],
    "smollm3": [
        {"messages": TURNS, "enable_thinking": False},
        {"messages": [SYSTEM | {"content": "Brief. /no_think"}, *TURNS]},
        {"messages": [SYSTEM | {"content": "Brief. /system_override"}, *TURNS]},
        {"messages": TURNS, "xml_tools": [TOOL], "python_tools": ["def add(a, b): ..."]},
    ],
    "olmo3": [
        {
            "messages": [
                SYSTEM | {"functions": "[]"},
                {"role": "user", "content": "a", "functions": "[1]"},
                {"role": "assistant", "content": "", "function_calls": "add(1, 2)"},
                {"role": "environment", "content": "3"},
            ]
        }
    ],
}
TEMPLATES = pathlib.Path(__file__).parent / "chat_templates"
FAMILIES = {"gemma3": "gemma3_text", "phi4": "phi3", "phi4-mini": "phi3"}
TODAY = "29 February 2024"  # what strftime_now returns for every format


def merges_of(words: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return merges that make each word a token, from the left; add the new tokens to `vocab`."""
    merges = []
    for word in words:
        for left, letter in zip(itertools.accumulate(word), word[1:], strict=False):
            if left + letter not in vocab:
                vocab[left + letter] = len(vocab)
                merges.append((left, letter))
    return merges


def sentencepiece(special: list[str], gemma: bool) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer with byte fallback, like Gemma's or Llama 2's."""
    letters = sorted({*"▁\n\t", *"".join(WORDS).replace(" ", ""), *map(chr, range(33, 127)), "é", "你"})
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = merges_of([word.replace(" ", "▁") for word in WORDS], vocab)
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(special)
    return backend


def byte_level(pattern: str | None, digits: bool = False) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer of bytes, like GPT-2's."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = merges_of([word.replace(" ", "Ġ").replace("\n", "Ċ") for word in WORDS], vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    steps: list = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def with_bos(backend: tokenizers.Tokenizer, bos: str) -> tokenizers.Tokenizer:
    """Let a tokenizer put a token before each text."""
    special = [(bos, backend.token_to_id(bos))]
    backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=special)
    return backend


def add(backend: tokenizers.Tokenizer, tokens: list[str], special: bool = True, **flags) -> tokenizers.Tokenizer:
    """Add tokens with the same flags."""
    added = [tokenizers.AddedToken(token, normalized=False, special=special, **flags) for token in tokens]
    (backend.add_special_tokens if special else backend.add_tokens)(added)
    return backend


def kinds() -> dict[str, tuple[tokenizers.Tokenizer, dict]]:
    """Return each tokenizer, and its tokenizer_config.json without the list of added tokens."""
    base = {"clean_up_tokenization_spaces": False, "model_max_length": NO_LIMIT}
    gemma = sentencepiece(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], gemma=True)
    add(gemma, ["<start_of_turn>", "<end_of_turn>"])
    with_bos(add(gemma, ["\n\n", "▁▁▁", "<b>"], special=False), "<bos>")
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    gemma_config = base | names | {"add_bos_token": True, "add_eos_token": False, "tokenizer_class": "GemmaTokenizer"}
    gemma_config |= {"sp_model_kwargs": {}, "spaces_between_special_tokens": False, "use_default_system_prompt": False}
    turns = {"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]}
    gemma3 = tokenizers.Tokenizer.from_str(gemma.to_str())
    image = {"image_token": "<start_of_image>"}
    phi3 = sentencepiece(["<unk>", "<s>", "</s>"], gemma=False)
    add(phi3, ["</s>", "<|endoftext|>"], rstrip=False)
    add(phi3, ["<|assistant|>", "<|system|>", "<|end|>", "<|user|>"], rstrip=True)
    end = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    phi3_config = base | {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    phi3_config |= {"unk_token": "<unk>", "add_bos_token": False, "add_eos_token": False, "legacy": False}
    gpt2 = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "unk_token": "<|endoftext|>"}
    chatml = ["<|im_start|>", "<|im_end|>"]
    phi4 = add(byte_level(OPENAI_PATTERN), ["<|endoftext|>", *chatml, "<|im_sep|>"], lstrip=True, rstrip=True)
    mini = add(byte_level(OPENAI_PATTERN), ["<|endoftext|>"])
    add(mini, ["<|assistant|>", "<|end|>", "<|user|>", "<|system|>"], rstrip=True)
    add(mini, ["<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"], special=False, rstrip=True)
    granite = add(byte_level(None, digits=True), ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"])
    granite_end = dict.fromkeys((*end, "unk_token"), "<|end_of_text|>")
    smollm3 = add(byte_level(OPENAI_PATTERN), ["<|begin_of_text|>", "<|end_of_text|>", *chatml])
    add(smollm3, ["<think>", "</think>", "<tool_call>", "</tool_call>"], special=False)
    smollm3_config = base | {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    olmo2 = add(byte_level(OPENAI_PATTERN), ["<|endoftext|>", "<|pad|>"])
    olmo3 = add(byte_level(OPENAI_PATTERN), ["<|endoftext|>", "<|pad|>", *chatml])
    add(olmo3, ["<functions>", "</functions>", "<function_calls>", "</function_calls>"], special=False)
    olmo = base | {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    return {
        "gemma": (gemma, gemma_config | turns),
        "gemma3": (add(gemma3, [*image.values()]), gemma_config | {"extra_special_tokens": image} | image),
        "phi3": (phi3, phi3_config | {"tokenizer_class": "LlamaTokenizer"}),
        "phi4": (phi4, base | end | gpt2),
        "phi4-mini": (mini, base | end | gpt2 | {"add_bos_token": False, "tokenizer_class": "GPT2TokenizerFast"}),
        "granite": (granite, base | gpt2 | granite_end | {"add_bos_token": False, "errors": "replace"}),
        "smollm3": (
            with_bos(smollm3, "<|begin_of_text|>"),
            smollm3_config | {"tokenizer_class": "PreTrainedTokenizerFast"},
        ),
        "olmo2": (olmo2, olmo | gpt2),
        "olmo3": (olmo3, olmo | gpt2 | {"eos_token": "<|im_end|>"}),
    }


def write(folder: pathlib.Path, backend: tokenizers.Tokenizer, config: dict) -> None:
    """Write a tokenizer's files, as they are published, and a config.json that names the family."""
    folder.mkdir(parents=True)
    content = json.loads(backend.to_str())
    merges = content["model"]["merges"]  # 4.41.1 reads only merges that are strings
    content["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    template = (TEMPLATES / f"{folder.name}.jinja").read_text("utf-8")
    added = content["added_tokens"]
    listed = {str(token["id"]): {name: token[name] for name in token if name != "id"} for token in added}
    family = FAMILIES.get(folder.name, folder.name)
    config |= {"added_tokens_decoder": listed, "chat_template": template}
    files = {"tokenizer": content, "tokenizer_config": config, "config": {"model_type": family}}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value, ensure_ascii=False) + "\n", "utf-8")


def encodings(tokenizer) -> list[dict]:
    """Return for each text its ids, with and without added special tokens, and the text of the ids."""
    own = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    names = {"bos": tokenizer.bos_token or "", "eos": tokenizer.eos_token, "start": own[-2], "end": own[-1]}
    cases = []
    for text in TEXTS:
        text = text.format(**names)
        ids = tokenizer.encode(text)
        plain = tokenizer.encode(text, add_special_tokens=False)
        texts = [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)]
        cases.append({"text": text, "ids": ids, "plain": plain, "decoded": texts[0], "decoded_whole": texts[1]})
    return cases


def prompt(tokenizer, chat: dict) -> dict:
    """Return a prompt and its ids, or the error of the template."""
    options = {"add_generation_prompt": True} | chat
    messages = options.pop("messages")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        return chat | {"error": str(error)}
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return chat | {"prompt": text, "ids": ids}


def main() -> None:
    """Make all goldens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True)
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    encoded, prompts, newest = {}, {}, transformers.__version__ == "5.23.0"
    for name, (backend, config) in kinds().items():
        folder = out / name
        write(folder, backend, config)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        encoded[name] = encodings(tokenizer)
        if newest:
            with mock.patch("transformers.utils.chat_template_utils.datetime") as clock:
                clock.now.return_value.strftime.return_value = TODAY
                prompts[name] = [prompt(tokenizer, chat) for chat in (*CHATS, *OWN_CHATS.get(name, []))]
            if name == "olmo3":  # published files by release 5
                tokenizer.save_pretrained(folder)
    for file, content in {"encodings": encoded, "prompts": prompts}.items():
        if content:
            (out / f"{file}.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
