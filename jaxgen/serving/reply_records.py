"""Records of errors, and of the answers of small requests."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class _Record(msgspec.Struct):
    """A record without unknown fields. A field with the default UNSET may be absent."""


class Error(_Record):
    """An error message. `code` is the status, unless OpenAI has a name for the error."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(_Record):
    """The body of an answer with a status of 400 or more."""

    error: Error


class ModelCard(_Record, kw_only=True):
    """The model or an adapter; `parent` is an adapter's model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxgen"
    max_model_len: int
    parent: str | msgspec.UnsetType = msgspec.UNSET


class ModelList(_Record, kw_only=True):
    """The model and its adapters."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(_Record):
    """The ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizedText(_Record):
    """The text of ids."""

    prompt: str


class Version(_Record):
    """The version of jaxgen."""

    version: str


class TokenizerInfo(msgspec.Struct):
    """Special tokens by name, and the chat template."""

    chat_template: Any
