"""The OpenAPI document of the service, made from the records of its requests and answers."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import msgspec

from jaxgen.serving.embeddings import EmbeddingList, EmbeddingRequest
from jaxgen.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from jaxgen.serving.reply_records import (
    DetokenizedText,
    ErrorBody,
    ModelCard,
    ModelList,
    TokenizerInfo,
    Tokens,
    Version,
)
from jaxgen.serving.response_records import Deleted, ResponseBody, ResponseRequest
from jaxgen.version import __version__

_JSON = "application/json"


class _Operation(NamedTuple):
    """An operation.

    Attributes:
        path, method, summary: OpenAPI's fields.
        answer: the record of the answer, or its media type; None if it has no body.
        body: the record of the request's body, or None.
        is_open: True if no key is needed.
    """

    path: str
    method: str
    summary: str
    answer: Any
    body: Any = None
    is_open: bool = False


_OPERATIONS = (
    _Operation("/v1/chat/completions", "post", "Answer a conversation, as OpenAI does", _JSON, ChatRequest),
    _Operation("/v1/completions", "post", "Continue texts, as OpenAI does", _JSON, CompletionRequest),
    _Operation("/v1/responses", "post", "Create a response", ResponseBody, ResponseRequest),
    _Operation("/v1/responses/{name}", "get", "Read a stored response", ResponseBody),
    _Operation("/v1/responses/{name}", "delete", "Delete a stored response", Deleted),
    _Operation("/v1/embeddings", "post", "Turn texts into vectors", EmbeddingList, EmbeddingRequest),
    _Operation("/v1/models", "get", "List the model and its adapters", ModelList),
    _Operation("/v1/models/{name}", "get", "Describe the model or an adapter", ModelCard),
    _Operation("/tokenize", "post", "Convert a text or messages to ids", Tokens, TokenizeRequest),
    _Operation("/detokenize", "post", "Convert ids to text", DetokenizedText, DetokenizeRequest),
    _Operation("/tokenizer_info", "get", "Describe the tokenizer", TokenizerInfo),
    _Operation("/version", "get", "Return the version", Version, is_open=True),
    _Operation("/metrics", "get", "Return metrics for Prometheus", "text/plain", is_open=True),
    _Operation("/openapi.json", "get", "Return this document", _JSON, is_open=True),
    _Operation("/", "get", "Return the chat page", "text/html", is_open=True),
    *(
        _Operation(path, "get", "Say whether the service accepts requests", None, is_open=True)
        for path in ("/health", "/v1/health", "/ping")
    ),
)


@functools.cache
def openapi(needs_key: bool) -> bytes:
    """Return the document as JSON; `needs_key` says whether clients need an API key."""
    records = [ErrorBody]
    for operation in _OPERATIONS:
        records += [record for record in operation[3:5] if isinstance(record, type)]
    _, components = msgspec.json.schema_components(records, ref_template="#/components/schemas/{name}")
    _relax_types(components)
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, needs_key)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jaxgen", "version": __version__, "description": "OpenAI's API for a local model."},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(document)


def _described(operation: _Operation, needs_key: bool) -> dict[str, Any]:
    """Return OpenAPI's description of an operation."""
    name = operation.path.strip("/").replace("/", "_").replace("{name}", "one").replace(".", "_") or "page"
    described: dict[str, Any] = {"operationId": f"{operation.method}_{name}", "summary": operation.summary}
    if "{name}" in operation.path:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [parameter]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body)}
    answer: dict[str, Any] = {"description": "Success."}
    if isinstance(operation.answer, str):
        schema = {"type": "object" if operation.answer == _JSON else "string"}
        answer["content"] = {operation.answer: {"schema": schema}}
    elif operation.answer is not None:
        answer["content"] = _json(operation.answer)
    if "stream" in getattr(operation.body, "__struct_fields__", ()):
        answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"description": "An error; the message says what to do.", "content": _json(ErrorBody)}
    if operation.answer is None:
        error = {"description": "The service is shutting down, or the Host header does not have one of its names."}
    described["responses"] = {"200": answer, "default": error}
    if needs_key and not operation.is_open:
        described["security"] = [{"key": []}]
    return described


def _json(record: type[Any]) -> dict[str, Any]:
    """Return the description of a JSON body with the fields of a record."""
    return {_JSON: {"schema": {"$ref": f"#/components/schemas/{record.__name__}"}}}


def _relax_types(components: dict[str, Any]) -> None:
    """Say that a `type` may be left out: of a message in the input of a response, and where there is only one type."""
    items = components["ResponseRequest"]["properties"]["input"]["anyOf"][1]["items"]
    message = items["discriminator"]["mapping"]["message"].rpartition("/")[2]
    components[message]["required"].remove("type")
    del items["discriminator"]  # a discriminator must be required
    for record in ("ResponseRequest", "ReasoningItem", "FunctionCallOutput", "AllowedTools"):
        for field in components[record]["properties"].values():
            for schema in field.get("anyOf", [field]):
                if name := schema.get("items", {}).get("$ref", "").rpartition("/")[2]:
                    required = [key for key in components[name]["required"] if key != "type"]
                    schema["items"] = components[name] | {"required": required}
