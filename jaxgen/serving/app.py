"""The service: an ASGI application that implements OpenAI's protocol on top of an engine."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxgen.core.scoring.pooling import Pooling
from jaxgen.engine.engine import Engine
from jaxgen.errors import InputError, shown
from jaxgen.serving.answering import LARGE, Answering
from jaxgen.serving.api_keys import Keys
from jaxgen.serving.arrival import Arrival
from jaxgen.serving.doors import Doors, check_json
from jaxgen.serving.embeddings import Embedder, EmbeddingRequest
from jaxgen.serving.exchange import Sending, receive_body
from jaxgen.serving.http_errors import ApiError, about, api_error, renaming
from jaxgen.serving.in_flight import Account, BytesInFlight
from jaxgen.serving.limits import Limits
from jaxgen.serving.live import Live, in_thread
from jaxgen.serving.metrics import Metrics
from jaxgen.serving.openapi import openapi
from jaxgen.serving.page import page
from jaxgen.serving.paths import PlainPaths
from jaxgen.serving.protocol import (
    Body,
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode,
)
from jaxgen.serving.replies import Replies
from jaxgen.serving.reply_records import DetokenizedText, ModelCard, ModelList, Tokens, Version
from jaxgen.serving.requests import Asked, Reader
from jaxgen.serving.response_input import RENAMED, chat_request, conversation, read_request, references
from jaxgen.serving.response_records import Deleted, Item
from jaxgen.serving.response_store import ResponseStore
from jaxgen.serving.response_writer import ResponseWriter, new_response
from jaxgen.serving.scored import TokenTexts
from jaxgen.serving.stream import EventStream
from jaxgen.serving.tools import Tools
from jaxgen.version import __version__

# The name in errors of a field that has two names, and the other name
_COMPLETION_TOKENS = re.compile(r"\bmax_tokens\b"), "max_completion_tokens"
_TOKEN = 200  # approximate size of a token in an answer of /tokenize
_COPIES = 5  # number of times that a response of the Responses API, with its events, contains its text
_ALTERNATIVES = 5  # number of most likely tokens that the page shows for each token


class Service:
    """Answers requests with an engine.

    Args:
        engine: the engine. It must have a tokenizer and `output_logprobs`, and should have `stop_in_prompt=False`.
        params: the parameters, used to score prompts.
        name: the model's name in requests.
        context: the maximum number of tokens in a prompt and its answer together; by default the model's context.
        fingerprint: identifies the weights, their dtype and their quantization.
        adapters: the names of the adapters in `params`, in order. A request selects one by its name.
        keys: the clients' API keys; if empty, no key is required.
        limits: limits for requests.
        pooling: how the model turns a text into a vector, for embeddings.
        cors_origins: the origins of pages in browsers that may use the service, such as `https://example.org`; "*" for
            all.
        allowed_hosts: the names that the Host header of a request may have, in addition to this machine's own. If
            empty, any name may be used.
        thoughts: if True, the thoughts of a model whose chat template has tags for them are separated from the content.
    """

    def __init__(
        self,
        engine: Engine,
        params: Any,
        name: str,
        *,
        context: int | None = None,
        fingerprint: str = "",
        adapters: Sequence[str] = (),
        keys: Sequence[str] = (),
        limits: Limits | None = None,
        pooling: Pooling | None = None,
        cors_origins: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        thoughts: bool = True,
    ):
        cfg, tokenizer = engine.cfg, engine.tokenizer
        if tokenizer is None or cfg.output_logprobs is None:
            raise InputError("a service needs an engine with a tokenizer and output_logprobs: set both")
        self._context = context or cfg.model.context_length
        self._limits = limits or Limits()
        most = max(1, int(self._limits.share * engine.most_waiting))
        self._reader = Reader(engine.prompts, self._context, most, thoughts)
        self._engine, self._params, self._name = engine, params, name
        self._adapters = {name: -1} | {adapter: number for number, adapter in enumerate(adapters)}
        if len(adapters) != (count := engine.prompts.options.adapters):
            raise InputError(f"params have {count} adapters, but there are {len(adapters)} names for them")
        if len(self._adapters) <= len(adapters):
            raise InputError(f"the model and its adapters must have different names, got {[name, *adapters]}")
        self._fingerprint = fingerprint
        self._has_clients = len(keys) > 1
        self._keys = Keys(keys)
        self._texts, self._created = TokenTexts(tokenizer), int(time.time())
        # Without a chat template, the web page offers text completion.
        kind = "text" if tokenizer.chat_template is None else "chat"
        shown_tokens = min(_ALTERNATIVES, cfg.top_logprobs)
        self._html = page({"kind": kind, "model": name, "alternatives": shown_tokens, "needs_key": bool(keys)})
        self.metrics = Metrics(name, self._gauges)
        self._origins, self._hosts = list(cors_origins), list(allowed_hosts)
        self._embedder = Embedder(params, cfg, self._reader.encoder, pooling or Pooling(), engine.prompt_width)
        self._responses = ResponseStore(self._limits.stored)
        self._answering = Answering(engine, params, cfg, self._limits, self.metrics, self._texts)
        self._in_flight = BytesInFlight(self._limits.in_flight)

    @property
    def is_open(self) -> bool:
        """True while the engine accepts prompts."""
        return self._engine.is_open

    def app(self) -> Starlette:
        """Return the application; when it shuts down, the engine finishes the submitted requests."""
        routes = [
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/responses", self._guarded(self._respond), methods=["POST"]),
            Route("/v1/responses/{name}", self._guarded(self._stored), methods=["GET", "DELETE"]),
            Route("/v1/embeddings", self._guarded(self._embeddings), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._model), methods=["GET"]),
            Route("/tokenize", self._guarded(self._tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self._detokenize), methods=["POST"]),
            Route("/tokenizer_info", self._guarded(self._tokenizer_info), methods=["GET"]),
            *(Route(path, self._health, methods=["GET"]) for path in ("/health", "/v1/health", "/ping")),
            Route("/version", self._version, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
            Route("/", self._page, methods=["GET"]),
        ]
        doors = Middleware(Doors, refuse=self._refused, hosts=self._hosts, origins=self._origins)
        middleware = [doors, Middleware(PlainPaths)]
        if self._origins:
            # The headers are not limited, because OpenAI's clients send their own.
            options: dict[str, Any] = {
                "allow_origins": self._origins,
                "allow_headers": ["*"],
                "allow_methods": ["GET", "POST", "DELETE"],
            }
            cors = Middleware(CORSMiddleware, **options, expose_headers=["retry-after", "x-should-retry"])
            middleware.insert(0, cors)
        handlers: Any = {HTTPException: self._not_found}
        return Starlette(routes=routes, middleware=middleware, lifespan=self._lifespan, exception_handlers=handlers)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await in_thread(None, self._engine.close)
        self._answering.close()

    def _gauges(self) -> dict[str, float]:
        counts = self._engine.counts()
        gauges = {"num_requests_running": counts.running, "num_requests_waiting": counts.waiting}
        return gauges | {"kv_cache_usage_perc": min(counts.running / self._engine.slots, 1.0)}

    def _guarded(self, handler: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """Return a handler that first checks the client's key, and reports errors in OpenAI's format."""

        async def handle(request: Request) -> Any:
            group = self._group(request)
            account = Account(self._in_flight, group)
            request.state.arrival = Arrival(time.monotonic(), self._limits.seconds, group, account)
            try:
                self._check_key(request)
                response = await self._response(await handler(request), account)
            except ClientDisconnect:
                self.metrics.count("request_cancelled_total")
                response = Response(status_code=499)  # no client is left to read the response
            except Exception as error:
                response = self._refused(api_error(error))
            except BaseException:
                account.close()
                raise
            return Sending(response, account, self._limits.seconds)

        return handle

    def _group(self, request: Request) -> Any:
        """Identify a client by its key if there are several keys, and otherwise by its connection."""
        if self._has_clients:
            return self._keys.client(request.headers.get("authorization", ""))
        return request.scope.get("client")

    async def _response(self, result: Any, account: Account) -> Response:
        """Return the response for what a handler returned. Large ones are encoded in another thread."""
        if isinstance(result, Response):
            return result
        if account.bytes < LARGE:
            return _json(200, result)
        return await in_thread(self._answering.large, _json, 200, result)

    def _refused(self, error: ApiError) -> Response:
        self.metrics.count("request_error_total", status=str(error.status))
        return _json(error.status, error.body, error.headers)

    async def _not_found(self, request: Request, error: Any) -> Response:
        reason = "is not a path of this service" if error.status_code == 404 else f"does not take {request.method}"
        return self._refused(ApiError(error.status_code, f"{shown(request.url.path)} {reason}", headers=error.headers))

    def _check_key(self, request: Request) -> None:
        if not self._keys.admit(request.headers.get("authorization", "")):
            raise ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY")

    async def _read(self, http: Request, read: Callable[[bytes], Body]) -> Body:
        """Receive the body of a request, and parse it, in another thread if it is large."""
        check_json(http.headers)
        body = await receive_body(http, self._limits, http.state.arrival.account)
        return read(body) if len(body) < LARGE else await in_thread(self._answering.large, read, body)

    async def _in_thread(self, http: Request, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the threads for requests of this size; stop waiting if the client disconnects."""
        pool = self._answering.pool_for(http.state.arrival.account.bytes)
        return await self._answering.until_left(http, in_thread(pool, function, *arguments))

    def _named(self, name: str | None) -> str:
        """Return the name of the model or adapter that a request is for."""
        name = name or self._name
        if name not in self._adapters:
            raise ApiError(404, f"the model {shown(name)} does not exist: use {' or '.join(self._adapters)}", "model")
        return name

    async def _completions(self, request: Request) -> Any:
        return await self._answer(request, CompletionRequest, self._reader.completion)

    async def _chat(self, request: Request) -> Any:
        return await self._answer(request, ChatRequest, self._reader.chat)

    async def _answer(self, http: Request, kind: type[Common], read: Callable[[Any, int], Asked]) -> Any:
        """Return the answer to a request, or a stream that sends the answer."""
        request = await self._read(http, lambda body: decode(body, kind))
        names = [] if getattr(request, "max_completion_tokens", None) is None else [_COMPLETION_TOKENS]
        with renaming(names):
            live = await self._begin(http, request, read)
        replies = Replies(request, live.asked, self._named(request.model), self._fingerprint, self._texts)
        if request.stream:
            scored = await self._answering.until_left(http, self._answering.scored(live.asked), live)
            await self._answering.submit(live)
            return EventStream(self._answering.chunks(replies, live, scored), live, self._limits, self.metrics)
        return await self._answering.until_left(http, self._answering.whole(replies, live), live)

    async def _begin(self, http: Request, request: Common, read: Callable[[Any, int], Asked], **sizes: int) -> Live:
        """Read a request for the model or adapter that it names; `sizes` are further arguments of `Answering.begin`."""
        adapter = self._adapters[self._named(request.model)]
        work = self._answering.begin(request, read, adapter, http.state.arrival, **sizes)
        return await self._answering.until_left(http, work)

    async def _respond(self, http: Request) -> Any:
        """Return the response to a request of the Responses API, or a stream of its events."""
        request = await self._read(http, read_request)
        name = request.previous_response_id
        repeated = 3 * http.state.arrival.account.bytes  # bytes of the request in the first and the last events
        model, account = self._named(request.model), http.state.arrival.account
        previous = None if name is None else self._responses.previous(name).items
        stored = {item: self._responses.maker(item).items for item in references(request)}
        account.add(2 * sum(map(len, {*stored.values(), previous or b""})))

        def read() -> tuple[list[Item], ChatRequest]:
            items = conversation(request, previous, stored)
            return items, chat_request(request, items)

        items, chat = await self._in_thread(http, read)
        with renaming(RENAMED):
            live = await self._begin(http, chat, self._reader.chat, repeated=repeated, copies=_COPIES)
        writer = ResponseWriter(new_response(request, model, self._reader.cfg), self._texts, live.asked)
        events = self._answering.response_events(writer, live, items, self._responses)
        if request.stream:
            await self._answering.submit(live)
            return EventStream(events, live, self._limits, self.metrics, writer.fail, b"")
        await self._answering.until_left(http, self._answering.exhaust(events, live), live)
        return writer.response

    async def _stored(self, http: Request) -> Any:
        """Return or delete a stored response."""
        if http.query_params:
            name = next(iter(http.query_params))
            raise ApiError(400, f"{shown(name)} is not supported: a response is returned whole", name)
        if http.method == "DELETE":
            self._responses.delete(name := http.path_params["name"])
            return Deleted(id=name)
        return Response(self._responses.get(http.path_params["name"]).body, media_type="application/json")

    async def _embeddings(self, http: Request) -> Any:
        request = await self._read(http, lambda body: decode(body, EmbeddingRequest))
        model, account = self._named(request.model), http.state.arrival.account
        rows = await self._in_thread(http, self._embedder.read, request)
        account.add(self._embedder.answer_bytes(request, len(rows), self._limits.answer))
        tokens = sum(map(len, rows))
        self.metrics.count("prompt_tokens_total", tokens)
        vectors = await self._answering.until_left(
            http, self._answering.vectors(self._embedder, rows, self._adapters[model])
        )
        return self._embedder.answer(request, vectors, tokens, model)

    async def _models(self, _: Request) -> Any:
        return ModelList(data=[self._card(name) for name in self._adapters])

    async def _model(self, request: Request) -> Any:
        return self._card(self._named(request.path_params["name"]))

    def _card(self, name: str) -> ModelCard:
        parent = msgspec.UNSET if name == self._name else self._name
        return ModelCard(id=name, created=self._created, max_model_len=self._context, parent=parent)

    async def _tokenize(self, request: Request) -> Any:
        asked = await self._read(request, lambda body: decode(body, TokenizeRequest))
        self._named(asked.model)
        return await self._in_thread(request, self._tokens, asked, request.state.arrival.account)

    def _tokens(self, asked: TokenizeRequest, account: Account) -> Tokens:
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "pass either prompt or messages")
        if asked.prompt is None:
            with about("tools"):
                tools = Tools.of(asked.tools, None, None)
            ids = self._reader.conversation(asked, tools)
        else:
            ids = self._reader.encoder.encode(asked.prompt, "prompt", asked.add_special_tokens)
        account.add(_TOKEN * len(ids))
        texts = list(map(self._texts.text, ids)) if asked.return_token_strs else msgspec.UNSET
        return Tokens(count=len(ids), max_model_len=self._context, tokens=ids, token_strs=texts)

    async def _detokenize(self, request: Request) -> Any:
        asked = await self._read(request, lambda body: decode(body, DetokenizeRequest))
        self._named(asked.model)
        text = await self._in_thread(request, self._text, asked, request.state.arrival.account)
        return DetokenizedText(prompt=text)

    def _text(self, asked: DetokenizeRequest, account: Account) -> str:
        vocab = self._reader.cfg.model.vocab_size
        for index, token in enumerate(asked.tokens):
            if token >= vocab:
                where = f"tokens[{index}]"
                raise ApiError(400, f"{where} is {token}, but the ids of the vocabulary are 0 to {vocab - 1}", where)
        size = sum(len(self._texts.bytes(token)) for token in asked.tokens)
        if size > (limit := self._limits.answer):
            raise ApiError(400, f"tokens have {size:,} bytes of text, but at most {limit:,} are accepted", "tokens")
        account.add(2 * size)
        return self._reader.tokenizer.decode(asked.tokens, False)

    async def _tokenizer_info(self, _: Request) -> Any:
        tokenizer = self._reader.tokenizer
        return tokenizer.special_tokens | {"chat_template": tokenizer.chat_template}

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self.is_open else 503)

    async def _version(self, _: Request) -> Response:
        return _json(200, Version(version=__version__))

    async def _openapi(self, _: Request) -> Response:
        return Response(openapi(bool(self._keys)), media_type="application/json")

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _page(self, _: Request) -> Response:
        headers = {"content-security-policy": "frame-ancestors 'none'"}  # so that no other site can embed the page
        return Response(self._html, headers=headers, media_type="text/html")


def _json(status: int, body: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
