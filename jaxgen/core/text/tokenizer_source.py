"""Read a tokenizer and its settings from a checkpoint: a directory, or a GGUF file."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jaxgen.core.text.gguf_tokenizer import read_gguf_tokenizer
from jaxgen.core.text.tokenizer_config import read_config
from jaxgen.core.text.tokenizer_file import read_backend
from jaxgen.errors import ConfigError, InputError, JaxgenError
from jaxgen.gguf.installed import gguf_file
from jaxgen.json_file import fetch_again


class Source(NamedTuple):
    """A tokenizer as read: the library's object, its settings, the file that it comes from, and the checkpoint."""

    backend: tokenizers.Tokenizer
    config: dict[str, Any]
    file: Path
    checkpoint: Path


def read_source(path: str | PathLike[str]) -> Source:
    """Read the tokenizer of a checkpoint, as described in `Tokenizer.from_pretrained`.

    Raises:
        InputError: there is no tokenizer.
        ConfigError: a file is damaged.
    """
    file = gguf_file(path)
    if file is not None:
        return _read_gguf(file)
    directory = Path(path)
    if not os.path.isdir(directory):
        raise InputError(f"{directory} is not a directory: from_pretrained reads a local HF directory or a GGUF file")
    file = directory / "tokenizer.json"
    try:
        backend, config = read_backend(file), read_config(directory)
    except JaxgenError as error:
        raise ConfigError("; ".join([str(error), *fetch_again(directory, [f"damaged: {error}"])])) from error
    if backend is None:
        found = ", ".join(sorted(p.name for p in directory.iterdir())) or "nothing"
        raise InputError(
            f"{directory} has no tokenizer.json (it has: {found}). Slow tokenizers (tokenizer.model, "
            "vocab.json with merges.txt) cannot be read: save a fast one there"
        )
    return Source(backend, config, file, directory)


def _read_gguf(file: Path) -> Source:
    """Read the tokenizer.json beside a GGUF file, with the settings in the same directory, or else the metadata."""
    beside = file.parent / "tokenizer.json"
    try:
        backend = read_backend(beside)
        if backend is None:
            return Source(*read_gguf_tokenizer(file), file, file)
        return Source(backend, read_config(file.parent), beside, file.parent)
    except JaxgenError as error:
        raise ConfigError("; ".join([str(error), *fetch_again(file.parent, [f"damaged: {error}"])])) from error
