"""The service: an ASGI application that implements OpenAI's protocol on top of an engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxgen.decoding.stop_reasons import StopReason
from jaxgen.engine.engine import Engine
from jaxgen.errors import InputError, shown
from jaxgen.model.lowrank import adapter_count
from jaxgen.scoring.text import score
from jaxgen.serving.errors import NO_RETRY, ApiError, api_error
from jaxgen.serving.limits import Limits
from jaxgen.serving.live import Live, in_thread
from jaxgen.serving.metrics import Metrics
from jaxgen.serving.page import page
from jaxgen.serving.protocol import (
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
    decode,
)
from jaxgen.serving.replies import Replies
from jaxgen.serving.requests import Asked, Reader, compiles
from jaxgen.serving.scored import Scored, TokenTexts
from jaxgen.serving.stream import EventStream, leaves
from jaxgen.serving.text import Answer, Delta
from jaxgen.serving.tools import Tools
from jaxgen.version import __version__

_PREPARING = 2  # number of threads that read requests
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
    ):
        cfg, tokenizer = engine.cfg, engine.tokenizer
        if tokenizer is None or cfg.output_logprobs is None:
            raise InputError("a service needs an engine with a tokenizer and output_logprobs: set both")
        context = context or cfg.model.context_length
        self._reader = Reader(cfg, tokenizer, engine.prompt_width, context, engine.id_entries)
        self._engine, self._params, self._name = engine, params, name
        self._adapters = {name: -1} | {adapter: number for number, adapter in enumerate(adapters)}
        if len(adapters) != adapter_count(params):
            raise InputError(
                f"params have {adapter_count(params)} adapters, but there are {len(adapters)} names for them"
            )
        if len(self._adapters) <= len(adapters):
            raise InputError(f"the model and its adapters must have different names, got {[name, *adapters]}")
        self._fingerprint, self._limits = fingerprint, limits or Limits()
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._texts, self._created = TokenTexts(tokenizer), int(time.time())
        # Without a chat template, the web page offers text completion.
        kind = "text" if tokenizer.chat_template is None else "chat"
        shown_tokens = min(_ALTERNATIVES, cfg.top_logprobs)
        self._html = page({"kind": kind, "model": name, "alternatives": shown_tokens, "needs_key": bool(keys)})
        self._pool = concurrent.futures.ThreadPoolExecutor(_PREPARING, "jaxgen request")
        # Compiling a grammar can take seconds, and other requests must not wait for it.
        self._compiling = concurrent.futures.ThreadPoolExecutor(1, "jaxgen grammar")
        self._scoring = concurrent.futures.ThreadPoolExecutor(1, "jaxgen scores")
        self.metrics = Metrics(name, self._gauges)

    @property
    def is_open(self) -> bool:
        """True while the engine accepts prompts."""
        return self._engine.is_open

    def app(self) -> Starlette:
        """Return the application; when it shuts down, the engine finishes the submitted requests."""
        routes = [
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._model), methods=["GET"]),
            Route("/tokenize", self._guarded(self._tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self._detokenize), methods=["POST"]),
            Route("/tokenizer_info", self._guarded(self._tokenizer_info), methods=["GET"]),
            *(Route(path, self._health, methods=["GET"]) for path in ("/health", "/v1/health", "/ping")),
            Route("/version", self._version, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/", self._page, methods=["GET"]),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: self._not_found})

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await in_thread(None, self._engine.close)
        for pool in (self._pool, self._compiling, self._scoring):
            pool.shutdown(wait=False)

    def _gauges(self) -> dict[str, float]:
        counts = self._engine.counts()
        gauges = {"num_requests_running": counts.running, "num_requests_waiting": counts.waiting}
        return gauges | {"kv_cache_usage_perc": min(counts.running / self._engine.slots, 1.0)}

    def _guarded(self, handler: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        """Return a handler that first checks the client's key, and reports errors in OpenAI's format."""

        async def handle(request: Request) -> Any:
            try:
                self._check_key(request)
                result = await handler(request)
                return result if isinstance(result, Response) else _json(200, result)
            except ClientDisconnect:
                self.metrics.count("request_cancelled_total")
                return Response(status_code=499)  # no client is left to read the response
            except Exception as error:
                return self._refused(api_error(error))

        return handle

    def _refused(self, error: ApiError) -> Response:
        self.metrics.count("request_error_total", status=str(error.status))
        return _json(error.status, error.body, error.headers)

    async def _not_found(self, request: Request, error: Any) -> Response:
        reason = "is not a path of this service" if error.status_code == 404 else f"does not take {request.method}"
        return self._refused(ApiError(error.status_code, f"{shown(request.url.path)} {reason}", headers=error.headers))

    def _check_key(self, request: Request) -> None:
        if not self._keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        # Compare all keys, so that the response time does not reveal anything about them.
        found = [hmac.compare_digest(digest, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(found):
            raise ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY")

    async def _body(self, request: Request) -> bytes:
        most, seconds = self._limits.body, self._limits.body_seconds
        too_large = ApiError(413, f"the body is larger than the {most} bytes that are accepted")
        if int(request.headers.get("content-length", "0") or 0) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_large
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {seconds:g} seconds", headers=NO_RETRY) from error
        return bytes(body)

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

    async def _answer(self, http: Request, kind: type[Common], read: Callable[[Any], Asked]) -> Any:
        """Return the answer to a request, or a stream that sends the answer."""
        request = decode(await self._body(http), kind)
        started = time.monotonic()
        model = self._named(request.model)
        asked: Asked = await in_thread(self._compiling if compiles(request) else self._pool, read, request)
        if len(asked.prompts) > (most := self._engine.most_waiting):
            raise ApiError(400, f"prompt has {len(asked.prompts)} prompts, but at most {most} are accepted", "prompt")
        if (adapter := self._adapters[model]) >= 0:
            for prompt in asked.prompts:
                prompt["adapter"] = adapter
        replies = Replies(request, asked, model, self._fingerprint, self._texts)
        self.metrics.observe("request_params_n", asked.sequences)
        self.metrics.observe("request_params_max_tokens", asked.budget)
        live = Live(asked, self._engine, self.metrics, started, streams=bool(request.stream))
        if request.stream:
            scored = await self._until_left(http, self._scored(asked), live)
            await self._submit(live)
            return EventStream(self._events(replies, live, scored), live, self._limits, self.metrics)
        return await self._until_left(http, self._whole(replies, live), live)

    async def _submit(self, live: Live) -> None:
        if not live.asked.budget:
            return
        await in_thread(self._pool, live.submit)
        lengths = [len(prompt["ids"]) for prompt in live.asked.prompts]
        self.metrics.count("prompt_tokens_total", sum(lengths))
        self.metrics.count("prefix_cache_queries_total", sum(lengths))
        for length in lengths:
            self.metrics.observe("request_prompt_tokens", length)

    async def _until_left(self, http: Request, work: Any, live: Live) -> Any:
        """Run a coroutine and return its result; cancel it if the client disconnects or time runs out."""
        task, left = asyncio.ensure_future(work), asyncio.ensure_future(leaves(http.receive))
        try:
            await asyncio.wait({task, left}, timeout=self._limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if left.done():
                raise ClientDisconnect
            self.metrics.count("request_cancelled_total")
            raise ApiError(408, f"the answer took more than {self._limits.seconds:g} seconds", headers=NO_RETRY)
        finally:
            if not task.done() or task.exception() is not None:
                live.cancel()
            for each in (task, left):
                each.cancel()

    async def _whole(self, replies: Replies, live: Live) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        scored = await self._scored(live.asked)
        await self._submit(live)
        answers = live.asked.answers()
        deltas = dict([pair async for group in self._deltas(answers, live) for pair in group])
        choices = [(answer, deltas[place]) for place, answer in enumerate(answers)]
        return replies.whole(choices, replies.usage(answers, live.cached_tokens), scored)

    async def _deltas(self, answers: list[Answer], live: Live) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Yield groups of additions that became available together, each addition with the index of its answer."""
        left = len(answers)
        if not live.asked.budget:
            yield [(place, Delta("", [], [], None, "length")) for place in range(left)]
            return
        while left:
            happened = [await live.news.get()]
            while not live.news.empty():
                happened.append(live.news.get_nowait())
            group = []
            for place, news in happened:
                handle = live.handles[place // live.asked.sequences]
                if handle.failure is not None:
                    raise handle.failure
                if news.stop_reason:
                    done = handle.completion(news.sequence)
                    if done.error:
                        status = 500 if news.stop_reason == StopReason.NOT_A_NUMBER else 400
                        raise ApiError(status, f"the answer cannot continue: {done.error}", headers=NO_RETRY)
                    if not live.streams:  # only this event was queued, so it must contain all tokens
                        news = news._replace(tokens=done.tokens, logprobs=done.logprobs)
                group.append((place, answers[place].put(news)))
                if news.stop_reason:
                    left -= 1
                    self._ended(answers[place], live.started)
            yield group
        self.metrics.count("prefix_cache_hits_total", live.cached_tokens)

    def _ended(self, answer: Answer, started: float) -> None:
        """Update the metrics for a sequence that has ended."""
        reason = {StopReason.LENGTH: "length", StopReason.CANCELLED: "abort"}.get(answer.reason, "stop")
        self.metrics.count("request_success_total", finished_reason=reason)
        self.metrics.observe("request_generation_tokens", answer.count)
        self.metrics.observe("e2e_request_latency_seconds", time.monotonic() - started)

    async def _scored(self, asked: Asked) -> list[Scored] | None:
        """Return the log-probabilities of the prompts' tokens, or None if they were not requested."""
        if asked.prompt_logprobs is None:
            return None
        return [await in_thread(self._scoring, self._score, prompt, asked) for prompt in asked.prompts]

    def _score(self, prompt: dict[str, Any], asked: Asked) -> Scored:
        # top_logprobs is always the maximum, so that only one program is compiled for each width.
        ids, cfg = prompt["ids"], self._reader.cfg.replace(adapter=prompt.get("adapter", -1))
        scores = score(
            self._params, [ids], cfg, attention_mask=np.ones((1, len(ids)), bool), top_logprobs=cfg.top_logprobs
        )
        row = jax.tree.map(lambda x: np.asarray(x)[0], scores)
        return Scored(ids, row, asked.prompt_logprobs or 0, is_beginning=True)

    async def _events(
        self, replies: Replies, live: Live, scored: list[Scored] | None
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield groups of chunks that are ready to be sent; a group is empty if the new tokens add nothing to send."""
        options = replies.request.stream_options or StreamOptions()
        answers, begun = live.asked.answers(), set()

        def chunk(place: int, delta: Delta) -> dict[str, Any]:
            of_prompt = None if scored is None else scored[place // live.asked.sequences]
            body = replies.chunk(place, answers[place], delta, place not in begun, of_prompt)
            begun.add(place)
            if options.continuous_usage_stats:
                return body | {"usage": replies.usage(answers, live.cached_tokens)}
            return body | ({"usage": None} if options.include_usage else {})

        async for group in self._deltas(answers, live):
            yield [chunk(place, delta) for place, delta in group if _says_something(delta, place not in begun)]
        if options.include_usage:
            yield [replies.last(replies.usage(answers, live.cached_tokens))]

    async def _models(self, _: Request) -> Any:
        return {"object": "list", "data": [self._card(name) for name in self._adapters]}

    async def _model(self, request: Request) -> Any:
        return self._card(self._named(request.path_params["name"]))

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "jaxgen"}
        card |= {"max_model_len": self._reader.context}
        return card if name == self._name else card | {"parent": self._name}

    async def _tokenize(self, request: Request) -> Any:
        asked = decode(await self._body(request), TokenizeRequest)
        self._named(asked.model)
        return await in_thread(self._pool, self._tokens, asked)

    def _tokens(self, asked: TokenizeRequest) -> dict[str, Any]:
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "pass either prompt or messages")
        if asked.prompt is None:
            ids = self._reader.conversation(asked, Tools.of(asked.tools, None, None))
        else:
            ids = self._reader.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
        body = {"count": len(ids), "max_model_len": self._reader.context, "tokens": ids}
        return body | ({"token_strs": [self._texts.text(token) for token in ids]} if asked.return_token_strs else {})

    async def _detokenize(self, request: Request) -> Any:
        asked = decode(await self._body(request), DetokenizeRequest)
        self._named(asked.model)
        return {"prompt": await in_thread(self._pool, self._reader.tokenizer.decode, asked.tokens, False)}

    async def _tokenizer_info(self, _: Request) -> Any:
        tokenizer = self._reader.tokenizer
        return tokenizer.special_tokens | {"chat_template": tokenizer.chat_template}

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self.is_open else 503)

    async def _version(self, _: Request) -> Response:
        return _json(200, {"version": __version__})

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _page(self, _: Request) -> Response:
        headers = {"content-security-policy": "frame-ancestors 'none'"}  # so that no other site can embed the page
        return Response(self._html, headers=headers, media_type="text/html")


def _says_something(delta: Delta, is_first: bool) -> bool:
    return bool(is_first or delta.text or delta.calls or delta.finish or delta.logprobs is not None)


def _json(status: int, body: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
