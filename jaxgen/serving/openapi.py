"""The OpenAPI document of the service, made from the records of its requests and answers."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import msgspec

from jaxgen.serving.embeddings import EmbeddingList, EmbeddingRequest
from jaxgen.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from jaxgen.serving.reply_records import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DetokenizedText,
    ErrorBody,
    ModelCard,
    ModelList,
    TokenizerInfo,
    Tokens,
    Version,
)
from jaxgen.serving.response_records import EVENTS, Deleted, ResponseBody, ResponseRequest
from jaxgen.version import __version__


class _Operation(NamedTuple):
    """An operation.

    Attributes:
        path, method, summary: OpenAPI's fields.
        answer: the record of the answer, or the media type of an answer that is not JSON; None if it has no body.
        body: the record of the request's body, or None.
        chunk: the record of the data of each event if `stream` is true; None if nothing is streamed.
        errors: the possible statuses of errors.
        is_open: True if no key is needed.
    """

    path: str
    method: str
    summary: str
    answer: Any
    body: Any = None
    chunk: Any = None
    errors: tuple[int, ...] = ()
    is_open: bool = False


_READING = (400, 408, 413, 500)  # errors of all requests that have a body
_ANSWERING = (400, 404, 408, 413, 429, 500, 503)
_ERRORS = {
    400: "The request is invalid or cannot be honored; the message names the field.",
    401: "The API key is missing or wrong.",
    404: "The model or the response does not exist.",
    408: "The body or the answer took too long.",
    413: "The body is too large.",
    429: "Too many requests are waiting; Retry-After says when to try again.",
    500: "The service failed.",
    503: "The service is shutting down.",
}
_OPERATIONS = (
    _Operation(
        "/v1/chat/completions",
        "post",
        "Answer a conversation",
        ChatCompletion,
        ChatRequest,
        ChatCompletionChunk,
        _ANSWERING,
    ),
    _Operation(
        "/v1/completions", "post", "Continue texts", Completion, CompletionRequest, Completion, errors=_ANSWERING
    ),
    _Operation("/v1/responses", "post", "Create a response", ResponseBody, ResponseRequest, EVENTS, errors=_ANSWERING),
    _Operation("/v1/responses/{name}", "get", "Read a stored response", ResponseBody, errors=(400, 404)),
    _Operation("/v1/responses/{name}", "delete", "Delete a stored response", Deleted, errors=(404,)),
    _Operation(
        "/v1/embeddings",
        "post",
        "Turn texts into vectors",
        EmbeddingList,
        EmbeddingRequest,
        errors=(400, 404, 408, 413, 500),
    ),
    _Operation("/v1/models", "get", "List the model and its adapters", ModelList),
    _Operation("/v1/models/{name}", "get", "Describe the model or an adapter", ModelCard, errors=(404,)),
    _Operation(
        "/tokenize", "post", "Convert a text or messages to ids", Tokens, TokenizeRequest, errors=(404, *_READING)
    ),
    _Operation(
        "/detokenize", "post", "Convert ids to text", DetokenizedText, DetokenizeRequest, errors=(404, *_READING)
    ),
    _Operation("/tokenizer_info", "get", "Describe the tokenizer", TokenizerInfo),
    _Operation("/version", "get", "Return the version", Version, is_open=True),
    _Operation("/metrics", "get", "Return metrics for Prometheus", "text/plain", is_open=True),
    _Operation("/openapi.json", "get", "Return this document", "application/json", is_open=True),
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
        given = (operation.answer, operation.body, operation.chunk)
        records += [record for record in given if record is not None and not isinstance(record, str)]
    schemas, components = msgspec.json.schema_components(records, ref_template="#/components/schemas/{name}")
    refs = dict(zip(map(id, records), schemas, strict=True))
    _relax_messages(components)
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, refs, needs_key)
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


def _described(operation: _Operation, refs: dict[int, Any], needs_key: bool) -> dict[str, Any]:
    """Return OpenAPI's description of an operation; `refs` has the schema of each record, by its `id`."""
    name = operation.path.strip("/").replace("/", "_").replace("{name}", "one").replace(".", "_") or "page"
    described: dict[str, Any] = {"operationId": f"{operation.method}_{name}", "summary": operation.summary}
    if "{name}" in operation.path:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [parameter]
    if operation.body is not None:
        content = {"application/json": {"schema": refs[id(operation.body)]}}
        described["requestBody"] = {"required": True, "content": content}
    content: dict[str, Any] = {}
    if isinstance(operation.answer, str):
        schema = {"type": "object" if operation.answer == "application/json" else "string"}
        content[operation.answer] = {"schema": schema}
    elif operation.answer is not None:
        content["application/json"] = {"schema": refs[id(operation.answer)]}
    if operation.chunk is not None:
        stream = {"type": "string", "contentMediaType": "application/json", "contentSchema": refs[id(operation.chunk)]}
        stream["description"] = "Server-sent events. contentSchema describes the data of each."
        content["text/event-stream"] = {"schema": stream}
    responses: dict[str, Any] = {"200": {"description": "Success."} | ({"content": content} if content else {})}
    errors = [*operation.errors, *([401] if needs_key and not operation.is_open else [])]
    error = {"application/json": {"schema": refs[id(ErrorBody)]}}
    responses |= {str(status): {"description": _ERRORS[status], "content": error} for status in sorted(errors)}
    if operation.answer is None:
        responses["503"] = {"description": _ERRORS[503]}
    described["responses"] = responses
    if needs_key and not operation.is_open:
        described["security"] = [{"key": []}]
    return described


def _relax_messages(components: dict[str, Any]) -> None:
    """Say that the type of a message may be left out in the input of a response."""
    items = components["ResponseRequest"]["properties"]["input"]["anyOf"][1]["items"]
    message = items["discriminator"]["mapping"]["message"].rpartition("/")[2]
    components[message]["required"].remove("type")
    del items["discriminator"]  # a discriminator must be required
