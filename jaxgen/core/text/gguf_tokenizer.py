"""Build the tokenizer of a GGUF file from its metadata."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxgen.core.text.tokenizer_file import library_errors
from jaxgen.errors import ConfigError, shown
from jaxgen.gguf.container import GgufFile, read_gguf

_SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # types of tokens
_LONGEST = 1000  # maximum number of characters in a token; splitting it into two takes quadratic time
_MOST_ADDED = 20_000  # maximum number of special and user-defined tokens; Gemma 3 has 6,400
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(contractions)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"%(contractions)s|\p{{N}}%(digits)s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|" + _REST
)


@dataclasses.dataclass(frozen=True)
class _Split:
    """The rules by which text is split into words, before merges.

    Attributes:
        words: the regular expression; None for that of GPT-2.
        digits: whether each digit is a word.
        composes: whether characters are first composed (NFC).
        whole: whether a word that is a token needs no merges.
        add_bos: whether texts begin with BOS if the metadata does not say so.
    """

    words: str | None = None
    digits: bool = False
    composes: bool = False
    whole: bool = False
    add_bos: bool = False


_LLAMA3 = _Split(_WORDS % "{1,3}", whole=True, add_bos=True)
_CL100K = _Split(_WORDS % "{1,3}")
_O200K = _Split(_CASES % {"contractions": _CONTRACTIONS + "?", "digits": "{1,3}"})
_BY_SPLIT = (
    (_LLAMA3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_CL100K, "dbrx smaug-bpe"),
    (_Split(_CASES % {"contractions": "", "digits": ""}, whole=True, add_bos=True), "tekken"),
    (_O200K, "gpt-4o llama4 kanana2"),
    (_Split(_WORDS % "", composes=True), "qwen2 megrez"),
    (_Split(_WORDS % ""), "deepseek-r1-qwen"),
    (_Split(digits=True), "smollm refact starcoder"),
    (_Split(), "gpt-2 gpt2 phi-2 olmo mpt"),
)
# By `tokenizer.ggml.pre`; the names and their meanings are llama.cpp's.
SPLITS = {name: split for split, names in _BY_SPLIT for name in names.split()}


def read_gguf_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer in a GGUF file, and its settings in the format of a tokenizer_config.json.

    Raises:
        ConfigError: the file is damaged, or its tokenizer is not implemented.
    """
    file = read_gguf(path)
    kind = file.get("tokenizer.ggml.model", str)
    if kind is None:
        raise ConfigError(f"{path} has no tokenizer (tokenizer.ggml.model): put a tokenizer.json beside it")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"{path}: tokenizers of the kind {shown(kind)} are not implemented, only gpt2 and llama: put a "
            "tokenizer.json beside the file"
        )
    tokens = _tokens(file)
    types = _numbers(file, "token_type", len(tokens))
    with library_errors(str(path)):
        backend, add_bos = (_byte_level if kind == "gpt2" else _sentence_piece)(file, tokens, types)
        _add_tokens(file, backend, tokens, types, kind)
    return backend, _settings(file, backend, tokens, add_bos)


def _tokens(file: GgufFile) -> list[str]:
    tokens = _strings(file, "tokens") or []
    if not tokens:
        raise ConfigError(f"{file.path}: tokenizer.ggml.tokens is missing or empty")
    if file.get("general.architecture", str, "").startswith("gemma"):  # the converter wrote tokens of spaces as spaces
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    if (count := len(set(tokens))) < len(tokens):
        raise ConfigError(f"{file.path}: damaged: {len(tokens) - count} tokens in tokenizer.ggml.tokens are not unique")
    if longest := next((token for token in tokens if len(token) > _LONGEST), None):
        raise ConfigError(f"{file.path}: the token {shown(longest)} has more than {_LONGEST} characters")
    return tokens


def _byte_level(file: GgufFile, tokens: list[str], types: np.ndarray | None) -> tuple[Tokenizer, bool]:
    """Return a tokenizer that merges bytes, as GPT-2 does, and whether texts begin with BOS by default."""
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in SPLITS:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre is {shown(name)}, which does not say how to split text into words: put "
            f"the model's tokenizer.json beside the file (known names: {', '.join(SPLITS)})"
        )
    split, end = SPLITS[name], len(tokens)
    while types is not None and end and types[end - 1] == _UNUSED:
        end -= 1  # padding of the embedding, which text must not match
    vocabulary = dict(zip(tokens[:end], range(end), strict=True))
    merges = _merges(file)
    if merges is None:
        raise ConfigError(f"{file.path}: tokenizer.ggml.merges is missing")
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.words is not None:
        steps.append(pre_tokenizers.Split(Regex(split.words), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.words is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    if split.composes:
        backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend, split.add_bos


def _sentence_piece(file: GgufFile, tokens: list[str], types: np.ndarray | None) -> tuple[Tokenizer, bool]:
    """Return a tokenizer that merges characters, as SentencePiece does; bytes stand for unknown characters."""
    is_gemma = file.get("general.architecture", str, "").startswith("gemma")
    merges = _merges(file)
    if merges is None:
        scores = -np.arange(len(tokens)) if is_gemma else _numbers(file, "scores", len(tokens))
        if scores is None:
            raise ConfigError(f"{file.path}: tokenizer.ggml.scores is missing")
        merges = _derived_merges(tokens, scores, types)
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    unknown = _special_token(file, tokens, "unknown")
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    has_prefix = not is_gemma and file.get("tokenizer.ggml.add_space_prefix", bool, True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    steps.append(normalizers.Replace(" ", _SPACE))
    backend.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    if is_gemma:
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")  # pyright: ignore
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)  # pyright: ignore[reportAttributeAccessIssue]
    return backend, True


def _derived_merges(tokens: list[str], scores: np.ndarray, types: np.ndarray | None) -> list[tuple[str, str]]:
    """Return all ways to make a normal token from two others, those of tokens with the highest scores first."""
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    normal = np.ones(len(tokens), bool) if types is None else types == _NORMAL
    merges: list[tuple[str, str]] = []
    # Of the splits of a token, the first is that whose left part is the longest, as in transformers.
    for index in np.argsort(-scores.astype(np.float64), kind="stable").tolist():
        token = tokens[index]
        if normal[index]:
            merges += [
                (left, right)
                for end in range(len(token) - 1, 0, -1)
                if (left := token[:end]) in ids and (right := token[end:]) in ids
            ]
    return merges


def _add_tokens(file: GgufFile, backend: Tokenizer, tokens: list[str], types: np.ndarray | None, kind: str) -> None:
    """Register control tokens, which are special, and user-defined ones, which are found in text before merges."""
    if types is None:
        return
    # As in Phi-3's tokenizer.json, a special token takes the spaces after it.
    strips = kind == "llama" and file.get("general.architecture", str) == "phi3"
    found = {kind: np.flatnonzero(types == kind).tolist() for kind in (_CONTROL, _USER_DEFINED)}
    if (count := sum(map(len, found.values()))) > _MOST_ADDED:
        raise ConfigError(f"{file.path}: {count} special and user-defined tokens, more than {_MOST_ADDED:,}")
    for kind_of_token, indices in found.items():
        special = kind_of_token == _CONTROL
        added = [
            AddedToken(
                tokens[index],
                special=special,
                normalized=False,
                rstrip=strips and special and tokens[index] not in ("<s>", "<unk>", "<|endoftext|>"),
            )
            for index in indices
            if tokens[index]
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _settings(file: GgufFile, backend: Tokenizer, tokens: list[str], add_bos: bool) -> dict[str, Any]:
    """Return the settings, after adding BOS and EOS to the texts if the metadata asks for it."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: _special_token(file, tokens, key) for name, key in _SPECIAL.items()}
    added = []
    for name, wanted in (("bos", add_bos), ("eos", False)):
        token = config[f"{name}_token"]
        if file.get(f"tokenizer.ggml.add_{name}_token", bool, wanted):
            if token is None:
                raise ConfigError(
                    f"{file.path}: texts must begin or end with {name.upper()}, but {name}_token_id is missing"
                )
            added.append([(token, tokens.index(token))])
        else:
            added.append([])
    before, after = added
    if before or after:
        template = [*(token for token, _ in before), "$A", *(token for token, _ in after)]
        backend.post_processor = TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=template, special_tokens=before + after
        )
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": file.get(key, str)
        for key in file.metadata
        if key == prefix or key.startswith(f"{prefix}.")
    }
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _special_token(file: GgufFile, tokens: list[str], name: str) -> str | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = file.get(key, int)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ConfigError(f"{file.path}: {key} is {index}, but the tokenizer has {len(tokens)} tokens")
    return tokens[index]


def _strings(file: GgufFile, name: str) -> list[str] | None:
    value = file.get(f"tokenizer.ggml.{name}", (list, np.ndarray))
    if value is not None and not isinstance(value, list):
        raise ConfigError(f"{file.path}: tokenizer.ggml.{name} must be a list of strings")
    return value


def _numbers(file: GgufFile, name: str, count: int) -> np.ndarray | None:
    value = file.get(f"tokenizer.ggml.{name}", (list, np.ndarray))
    if value is not None and (not isinstance(value, np.ndarray) or len(value) != count):
        raise ConfigError(f"{file.path}: tokenizer.ggml.{name} must have a number for each of the {count} tokens")
    return value


def _merges(file: GgufFile) -> list[tuple[str, str]] | None:
    merges = _strings(file, "merges")
    if merges is None:
        return None
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    if wrong := next((pair for pair in pairs if len(pair) != 2), None):
        raise ConfigError(f"{file.path}: damaged: the merge {shown(' '.join(wrong))} must have two tokens")
    return pairs
