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
    403: "The page of a web site that sent the request may not use the service.",
    404: "The model or the response does not exist.",
    408: "The body or the answer took too long.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json.",
    421: "The Host header does not have a name of this service.",
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
    _Operation("/v1/responses/{name}", "delete", "Delete a stored response", Deleted, errors=(400, 404)),
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
    _relax_types(components)
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
        content["text/event-stream"] = {"schema": _event(operation.chunk, refs)}
    responses: dict[str, Any] = {"200": {"description": "Success."} | ({"content": content} if content else {})}
    errors = {*operation.errors, 421}  # any request may have a wrong Host header
    if operation.method != "get":
        errors.add(403)
    if operation.body is not None:
        errors.add(415)
    if needs_key and not operation.is_open:
        errors.add(401)
    error = {"application/json": {"schema": refs[id(ErrorBody)]}}
    responses |= {str(status): {"description": _ERRORS[status], "content": error} for status in sorted(errors)}
    if operation.answer is None:
        responses["503"] = {"description": _ERRORS[503]}
    described["responses"] = responses
    if needs_key and not operation.is_open:
        described["security"] = [{"key": []}]
    return described


def _event(chunk: Any, refs: dict[int, Any]) -> dict[str, Any]:
    """Return the schema of each server-sent event of a stream."""
    json: dict[str, Any] = {"type": "string", "contentMediaType": "application/json"}
    if chunk is EVENTS:
        data = json | {"contentSchema": refs[id(chunk)]}
    else:  # a stream that fails has an error as its last chunk
        choices = [refs[id(chunk)], refs[id(ErrorBody)]]
        data = {"anyOf": [{"const": "[DONE]"}, json | {"contentSchema": {"anyOf": choices}}]}
    properties = {"event": {"type": "string"}, "data": data}
    return {"description": "Each event.", "type": "object", "properties": properties, "required": ["data"]}


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
