"""Read a tokenizer's settings from a checkpoint's files, and add the tokens listed in them."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxgen.core.model.families import FAMILIES, TEXT_PARTS
from jaxgen.core.text import chat_template
from jaxgen.core.text.tokenizer_file import library_errors
from jaxgen.errors import ConfigError, shown
from jaxgen.json_file import read_file, read_json
from jaxgen.utf8_text import decoded

# All files that a tokenizer may have in a checkpoint's directory
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt "
    "tokenizer.model chat_template.jinja chat_template.json"
).split()
TEMPLATE_FOLDER = "additional_chat_templates"  # templates other than the default, each in NAME.jinja
TOKENIZER_PATHS = (*TOKENIZER_FILES, TEMPLATE_FOLDER)
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Defaults of the tokenizer classes for keys that tokenizer_config.json lacks (null counts as a value)
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "LlamaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    },
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    },
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "tokenizer_class": str,
    "model_max_length": (int, float),
    "truncation_side": str,
    "added_tokens_decoder": Mapping,
    "additional_special_tokens": (list, tuple),
    **dict.fromkeys(("add_bos_token", "add_eos_token"), bool),
    **dict.fromkeys(("clean_up_tokenization_spaces", "split_special_tokens"), bool),
}
_MOST_ADDING = 20_000_000  # maximum product of the number of added tokens and the number of calls that add them


def read_config(directory: Path) -> dict[str, Any]:
    """Return the settings from a directory's files, merged into the format of a modern tokenizer_config.json."""
    config = read_json(directory / "tokenizer_config.json") or {}
    if not config.get("tokenizer_class"):
        model = read_json(directory / "config.json") or {}
        model_type = str(model.get("model_type"))
        family = FAMILIES.get(TEXT_PARTS[model_type][0] if model_type in TEXT_PARTS else model_type)
        config["tokenizer_class"] = model.get("tokenizer_class") or (family.tokenizer if family else None)
    if "added_tokens_decoder" not in config:
        additional = _additional(directory, config)
        config.update(read_json(directory / "special_tokens_map.json") or {})
        known = {repr(token) for token in additional}
        additional += [token for token in _additional(directory, config) if repr(token) not in known]
        config["additional_special_tokens"] = additional
        special = [_content(token) for token in (*map(config.get, _SPECIAL_NAMES), *additional)]
        config["added_tokens_decoder"] = {
            str(index): {"content": token, "special": token in special, "normalized": token not in special}
            for token, index in (read_json(directory / "added_tokens.json") or {}).items()
        }
    files = {file.stem: file for file in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))}
    templates = {}
    for name, file in {"default": directory / "chat_template.jinja", **files}.items():
        if (data := read_file(file, 4 * chat_template.LARGEST)) is not None:
            templates[name] = decoded(str(file), data)
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        templates = chat_template.named(config.get("chat_template")) | templates
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _additional(directory: Path, config: Mapping[str, Any]) -> list[Any]:
    tokens = config.get("additional_special_tokens") or []
    if not isinstance(tokens, list):
        raise ConfigError(f"{directory}: additional_special_tokens must be a list, got {shown(tokens)}")
    return list(tokens)


def check_types(config: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a setting of the wrong type."""
    for name, kind in _TYPES.items():
        value = config.get(name)
        if value is not None and not isinstance(value, kind):
            wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ConfigError(f"{name} of the tokenizer's config must be of type {wanted}, got {shown(value)}")


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def _added_token(token: Any, special: bool) -> AddedToken:
    flags = dict(token) if isinstance(token, Mapping) else {"normalized": False}
    flags = {name: flags[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in flags}
    if wrong := [name for name, flag in flags.items() if not isinstance(flag, bool)]:
        raise ConfigError(f"{', '.join(wrong)} of the added token {shown(_content(token))} must be true or false")
    return AddedToken(_content(token) or "", special=special, **flags)


def add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> dict[str, Any]:
    """Add the config's tokens to the backend, as HF does; return the special tokens by name."""
    named = {name: config[name] for name in _SPECIAL_NAMES if config.get(name) is not None}
    additional = list(config.get("additional_special_tokens") or ())
    for name, token in (*named.items(), *(("additional_special_tokens", token) for token in additional)):
        if not isinstance(_content(token), str):
            raise ConfigError(f"{name} of the tokenizer's config must be a string, got {shown(token)}")
    special = {_content(token): token for token in (*named.values(), *additional)}

    listed: dict[int, Mapping[str, Any]] = {}
    for index, token in (config.get("added_tokens_decoder") or {}).items():
        is_token = isinstance(token, Mapping) and isinstance(token.get("content"), str)
        if not is_token or not str(index).isdecimal() or len(str(index)) > 10:
            raise ConfigError(f"added_tokens_decoder must map ids to tokens, got {shown(index)}: {shown(token)}")
        listed[int(index)] = token
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known |= {_content(token) for token in listed.values()}
    tokens = [
        _added_token(token, bool(token.get("special")) or _content(token) in special)
        for _, token in sorted(listed.items())
    ]
    tokens += [_added_token(token, True) for content, token in special.items() if content not in known]
    # Ids are assigned in the order of the calls, so each call adds a run of consecutive tokens that are all special or
    # all non-special. In old releases of the library, `add_tokens` ignores `special`, so special tokens need
    # `add_special_tokens`.
    runs = [(special, list(run)) for special, run in itertools.groupby(tokens, key=lambda token: token.special)]
    if len(runs) * len(tokens) > _MOST_ADDING:
        raise ConfigError(f"{len(tokens)} added tokens, in which special and other tokens alternate {len(runs)} times")
    with library_errors("the added tokens"):
        for is_special, run in runs:
            (backend.add_special_tokens if is_special else backend.add_tokens)(run)
    for index, token in listed.items():
        if backend.token_to_id(token["content"]) != index:
            raise ConfigError(
                f"the added token {shown(token['content'])} has the id {index} in tokenizer_config.json and "
                f"{backend.token_to_id(token['content'])} with this tokenizer.json: the files do not match"
            )
    names: dict[str, Any] = {name: _content(token) for name, token in named.items()}
    if additional:
        names["additional_special_tokens"] = [_content(token) for token in additional]
    return names
