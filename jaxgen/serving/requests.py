"""Convert requests to prompts for the engine."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgspec

from jaxgen.core.config.ends import with_end_of_turn
from jaxgen.core.config.tables import eos_list
from jaxgen.core.grammar.grammar import Grammar
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.request.prompt import Prompt, PromptReader
from jaxgen.core.request.random_keys import seed_keys
from jaxgen.core.text.spelled import Spelled
from jaxgen.core.text.streaming import StopCut, TextStream
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError, check_whole, shown
from jaxgen.serving.answer_text import Answer
from jaxgen.serving.echo import Echo, echo_of
from jaxgen.serving.encoding import Encoder, texts_of
from jaxgen.serving.formats.format import schema_of
from jaxgen.serving.formats.hermes import Hermes
from jaxgen.serving.grammars import CompiledGrammar, GrammarSource
from jaxgen.serving.http_errors import ApiError, about
from jaxgen.serving.protocol import (
    ChatRequest,
    Common,
    CompletionRequest,
    JsonFormat,
    NamedFormat,
    Structured,
    TokenizeRequest,
)
from jaxgen.serving.rendering import Rendered, Renderer
from jaxgen.serving.tools import Tools

_MOST_SEQUENCES = 128  # OpenAI's limit for `n`
_COMPLETION_TOKENS = 16  # default max_tokens for completions, as in OpenAI's API
_LONGEST_ID = 256  # maximum number of characters in a request's id
_PLAIN = Rendered("", None, Hermes(), None, False)  # for a completion, whose answer is only text
_SAME = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request that has been read and validated.

    Attributes:
        prompts: the prompts for the engine.
        echoes: the prompts' texts if they are repeated in the answer (`echo`); otherwise None.
        sequences: the number of sequences per prompt.
        logprobs: the number of most likely tokens to show for each token; None for no log-probabilities.
        prompt_logprobs: the number of most likely tokens to show for each token of a prompt, or None.
        answer: a function that creates an empty answer.
        budget: the maximum number of tokens in an answer; 0 if nothing is generated.
        call_id: a function that returns a new id for a call.
        source: the grammar that the answers follow, or None.
        left_out: what the request's schemas have that is not enforced.
    """

    prompts: list[Prompt]
    echoes: list[Echo] | None
    sequences: int
    logprobs: int | None
    prompt_logprobs: int | None
    answer: Callable[[], Answer]
    budget: int
    call_id: Callable[[], str] = _PLAIN.form.call_id
    source: GrammarSource | None = None
    left_out: Sequence[str] = ()

    def answers(self) -> list[Answer]:
        """Return an empty answer for each sequence of each prompt."""
        return [self.answer() for _ in range(len(self.prompts) * self.sequences)]


class Reader:
    """Reads requests for a model.

    A field that is invalid or unsupported raises an ApiError, a ValueError or a TypeError.

    Args:
        prompts: the engine's reader, which checks the prompts. Its config must set `output_logprobs`, and its
            `top_logprobs` is the maximum that a request may ask for.
        context: the maximum number of tokens in a prompt and its answer together.
        most_prompts: the maximum number of prompts in a request.
        thoughts: if True, thoughts are separated from the content of answers.
    """

    def __init__(
        self,
        prompts: PromptReader,
        context: int,
        most_prompts: int,
        thoughts: bool = True,
    ):
        cfg, tokenizer = prompts.cfg, prompts.tokenizer
        assert tokenizer is not None
        self._prompts, self.cfg, self.tokenizer, self._most_prompts = prompts, cfg, tokenizer, most_prompts
        self._lengths = dataclasses.replace(prompts.lengths, context=context)
        ended = with_end_of_turn(cfg, tokenizer)
        self._eos, self._more_eos = eos_list(ended.eos_token_id), ended is not cfg
        self._renderer = Renderer(tokenizer, thoughts)
        self._tokenizers: dict[tuple[str, ...], Tokenizer] = {(): tokenizer}  # by the special tokens in a grammar
        self.encoder = Encoder(tokenizer, prompts.options.width)

    def completion(self, request: CompletionRequest, adapter: int = -1) -> Asked:
        """Read a request for completions from the adapter with this number, or from the model itself (-1)."""
        texts = texts_of(request.prompt, "prompt")
        if len(texts) > (limit := self._most_prompts):
            raise ApiError(400, f"prompt has {len(texts)} prompts, but at most {limit} are accepted", "prompt")
        rows = [self._encoded(prompt, request.add_special_tokens) for prompt in texts]
        shown_logprobs = self._top(request.logprobs, "logprobs")
        limit = _COMPLETION_TOKENS if request.max_tokens is None else _whole("max_tokens", request.max_tokens, 0)
        of_prompts = shown_logprobs if request.echo else None
        if request.prompt_logprobs is not None:
            of_prompts = max(of_prompts or 0, self._top(request.prompt_logprobs, "prompt_logprobs") or 0)
        if limit == 0 and not request.echo and request.prompt_logprobs is None:
            raise ApiError(400, "max_tokens must be at least 1, unless echo is true", "max_tokens")
        asked = self._asked(request, adapter, rows, limit, shown_logprobs, of_prompts, _PLAIN)
        if not request.echo:
            return asked
        pairs = zip(asked.prompts, texts, strict=True)
        echoes = [
            echo_of(self.tokenizer, read.ids.tolist(), text if isinstance(text, str) else None) for read, text in pairs
        ]
        return dataclasses.replace(asked, echoes=echoes)

    def chat(self, request: ChatRequest, adapter: int = -1) -> Asked:
        """Read a request for chat completions; `adapter` is as in `completion`."""
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
        with about("tools"):
            tools = Tools.of(request.tools, request.tool_choice, request.parallel_tool_calls)
        with about("messages"):
            prompt = self._renderer.prompt(request, tools)
        ids = self.encoder.encode(prompt.text, "messages")
        top = self._top(request.top_logprobs or 0, "top_logprobs") if request.logprobs else None
        of_prompt = self._top(request.prompt_logprobs, "prompt_logprobs")
        limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        limit = None if limit is None else _whole("max_tokens", limit, 1)
        return self._asked(request, adapter, [ids], limit, top, of_prompt, prompt)

    def conversation(self, request: ChatRequest | TokenizeRequest, tools: Tools | None) -> list[int]:
        """Return the ids of the conversation in a request."""
        with about("messages"):
            text = self._renderer.prompt(request, tools).text
        return self.encoder.encode(text, "messages")

    def _asked(
        self,
        request: Common,
        adapter: int,
        rows: list[list[int]],
        limit: int | None,
        logprobs: int | None,
        of_prompts: int | None,
        prompt: Rendered,
    ) -> Asked:
        """Read the fields shared by requests for completions and for chat completions."""
        if (name := request.request_id) is not None and not (name.isprintable() and len(name) <= _LONGEST_ID):
            text = f"request_id must have at most {_LONGEST_ID} printable characters, got {len(name)}: {shown(name)}"
            raise ApiError(400, text, "request_id")
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise ApiError(400, f"best_of={request.best_of} is not supported: leave it out, or pass n", "best_of")
        if request.stream and request.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs is not offered with stream: leave one of them out", "prompt_logprobs")
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options needs stream to be true", "stream_options")
        if request.truncate_prompt_tokens is not None:
            length = _whole("truncate_prompt_tokens", request.truncate_prompt_tokens)
            rows = [row[-length:] for row in rows]
        where = "messages" if isinstance(request, ChatRequest) else "prompt"
        with about(where):
            budgets = [self._lengths.budget(len(row), limit) for row in rows]
        options = self._options(request, max(budgets))
        source = self._source(request, prompt)
        if logprobs is None:
            options["output_logprobs"] = None
        else:
            options["top_logprobs"] = logprobs
        if adapter >= 0:
            options["adapter"] = adapter
        keys = _keys(request.seed, len(rows)) if options["do_sample"] else [None] * len(rows)
        with about(where):
            prompts = [
                # A prompt that is only scored has a budget of 0, which no prompt of an engine has.
                dataclasses.replace(
                    self._prompts.read({"ids": row, "max_new_tokens": budget or 1, "key": key, **options}),
                    budget=budget,
                )
                for row, budget, key in zip(rows, budgets, keys, strict=True)
            ]

        skips, keeps = request.skip_special_tokens, request.include_stop_str_in_output

        def answer() -> Answer:
            stream = TextStream(self.tokenizer, skip_special_tokens=skips, kept=prompt.marks)
            cut = StopCut(options.get("stop_strings", ()), keeps)
            is_forced = prompt.tools is not None and prompt.tools.named
            return Answer(stream, cut, prompt.thoughts(), prompt.calls(), is_forced)

        call_id = prompt.form.call_id
        return Asked(prompts, None, options.get("n", 1), logprobs, of_prompts, answer, max(budgets), call_id, source)

    def _encoded(self, prompt: str | list[int], adds_special: bool) -> list[int]:
        return self.encoder.encode(prompt, "prompt", adds_special) if isinstance(prompt, str) else prompt

    def _top(self, number: int | None, name: str) -> int | None:
        """Check that `number`, the requested number of most likely tokens, is in range, and return `number`."""
        return None if number is None else _whole(name, number, 0, self.cfg.top_logprobs)

    def _options(self, request: Common, limit: int) -> dict[str, Any]:
        """Return a request's options, keyed by the engine's names; `limit` is the maximum number of new tokens."""
        options: dict[str, Any] = {name: getattr(request, name) for name in _SAME if getattr(request, name) is not None}
        if options.get("top_k") == -1:  # vLLM's value for "off"
            options["top_k"] = 0
        options["do_sample"] = request.temperature != 0
        if request.temperature is not None:
            options["temperature"] = request.temperature
        if request.min_tokens:
            options["min_new_tokens"] = _whole("min_tokens", request.min_tokens, 1, limit)
        if request.n is not None:
            options["n"] = _whole("n", request.n, 1, _MOST_SEQUENCES)
        if stops := [request.stop] if isinstance(request.stop, str) else request.stop:
            options["stop_strings"] = stops
        if request.stop_token_ids or request.ignore_eos or self._more_eos:
            options["eos_token_id"] = [
                *([] if request.ignore_eos else self._eos),
                *(request.stop_token_ids or ()),
            ] or None
        if request.logit_bias:
            options["sequence_bias"] = _bias(request.logit_bias)
        if request.bad_words:
            options["bad_words_ids"] = self._bad_words(request.bad_words)
        return options

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        self.encoder.check(words, "bad_words")
        spelled = [start + word for word in words for start in ("", " ")]
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in spelled]

    def _source(self, request: Common, prompt: Rendered) -> GrammarSource | None:
        """Return the grammar that an answer must follow, or None."""
        left_out = [] if request.unsupported == "warn" else None
        structures = {"structured_outputs": request.structured_outputs}
        for kind in ("json", "regex", "choice"):
            if (value := getattr(request, f"guided_{kind}")) is not None:
                structures[f"guided_{kind}"] = Structured(**{kind: value})
        structures["response_format"] = _response_format(request)
        structures = {name: structure for name, structure in structures.items() if structure is not None}
        if prompt.tools is not None and prompt.tools.forced:
            if structures:
                text = f"{min(structures)} cannot be combined with a tool_choice that requires a tool call"
                raise ApiError(400, text, min(structures))
            tools, form = prompt.tools, prompt.form
            key = (type(form).__name__, tools.key)
            name = "the grammar of the tool calls"
            return self._compiled("tools", key, name, lambda: tools.grammar(form, left_out), prompt, left_out)
        if len(structures) > 1:
            raise ApiError(
                400, f"{' and '.join(structures)} both constrain the answer: pass one of them", min(structures)
            )
        if not structures:
            return None
        [(name, structure)] = structures.items()
        return self._structured(name, structure, prompt, left_out)

    def _structured(
        self, name: str, structure: Structured, prompt: Rendered, left_out: list[str] | None
    ) -> GrammarSource:
        fields = msgspec.structs.asdict(structure)
        asked = {field: value for field, value in fields.items() if value not in (None, False)}
        if len(asked) != 1:
            raise ApiError(400, f"{name} must have exactly one of json, regex, choice and json_object", name)
        [(kind, value)] = asked.items()
        if kind == "choice":
            if not value or not all(value):
                where = name if name == "guided_choice" else f"{name}.choice"
                raise ApiError(400, f"{where} must have texts, and none may be empty", where)
            kind, value = "regex", "|".join(f"(?:{_escaped(text)})" for text in value)
        if kind == "regex":
            return self._compiled(name, (kind, value), "the pattern", lambda: Grammar.regex(value), prompt, None)
        schema = {"type": "object"} if kind == "json_object" else value
        key = ("json", schema if isinstance(schema, str) else json.dumps(schema))
        grammar = functools.partial(schema_of, schema, "the schema", left_out)
        return self._compiled(name, key, "the schema", grammar, prompt, left_out)

    def _compiled(
        self,
        field: str,
        key: Any,
        name: str,
        read: Callable[[], Grammar],
        prompt: Rendered,
        left_out: list[str] | None,
    ) -> GrammarSource:
        """Return the grammar in a field, which `read` reads; the thought of an answer to `prompt` may come first.

        `read` adds what cannot be enforced to `left_out`, if this is a list.
        """
        before, marks = prompt.before, prompt.marks
        tokenizer = self._tokenizers.setdefault(marks, Spelled(self.tokenizer, marks)) if marks else self.tokenizer

        def build() -> CompiledGrammar:
            grammar, vocab = read() if before is None else before + read(), self.cfg.model.vocab_size
            automaton = TokenAutomaton.from_expression(grammar, tokenizer, name=name, vocab_size=vocab)
            return CompiledGrammar(automaton, left_out or ())

        return GrammarSource((key, prompt.key, left_out is None), build, field)


def _response_format(request: Common) -> Structured | None:
    """Return the constraint in a chat request's `response_format`, or None."""
    match getattr(request, "response_format", None):
        case JsonFormat():
            return Structured(json_object=True)
        case NamedFormat(json_schema=named):
            return Structured(json=named.schema)
    return None


def _whole(name: str, value: int, minimum: int = 1, maximum: int | None = None) -> int:
    """Return the value of a field, or raise an `ApiError` if it is out of range."""
    with about(name):
        return check_whole(name, value, minimum, maximum)


def _bias(biases: dict[str, float]) -> dict[tuple[int], float]:
    for token, bias in biases.items():
        if not re.fullmatch("[0-9]{1,9}", token, re.ASCII):
            raise ApiError(400, f"logit_bias: {shown(token)} is not a token id", "logit_bias")
        if not -100 <= bias <= 100:
            raise ApiError(400, f"logit_bias must be from -100 to 100, got {bias} for {token}", "logit_bias")
    return {(int(token),): bias for token, bias in biases.items()}


def _escaped(text: str) -> str:
    return "".join("\\" + c if c.isascii() and not (c.isalnum() or c.isspace() or c == "_") else c for c in text)


def _keys(seed: int | None, count: int) -> list[jax.Array]:
    """Return a random key for each prompt. Equal seeds give equal keys, and the first prompt gets the seed's key."""
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little")
    try:
        return seed_keys(seed, count)
    except InputError as error:
        raise ApiError(400, str(error), "seed") from error
