"""Find the tokens of a conversation that the model generates, by rendering the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxgen.core.text.chat_template import MARKS
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError, shown
from jaxgen.training.examples import IGNORED, Example, ids_after
from jaxgen.training.messages import read_messages, thought_and_text, with_calls, with_texts

# The end of a generation prompt that begins a thought, or that contains an empty one
_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")
_BEGINNING, _EMPTY = re.compile(r"\s*<think>\s*"), re.compile(r"\s*<think>\s*</think>\s*")
# Forms in which templates accept calls: arguments as objects, and the content of a message that has only calls. The
# first form in which the template writes all calls is used.
_FORMS = ((True, ""), (True, None), (False, ""), (False, None))
_PROBE = "probe_of_call_{}_"


def chat_examples(
    tokenizer: Tokenizer,
    conversation: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    learnt_from: int = 0,
    **template_kwargs: Any,
) -> list[Example]:
    """Return the examples for a conversation. Only what the model generates has labels: answers and their end tokens.

    The ids before an answer are exactly those of `tokenizer.chat` for the messages before it, and no token spans the
    boundary. An answer is added to the example of the answers before it if the ids before it begin with this example.
    If not, for example because the template drops earlier thoughts, a new example begins. Messages after the last
    answer are left out.

    Messages before number `learnt_from`, and answers whose `weight` is 0, are only read. If the template has generation
    blocks, the tokens outside these blocks have no labels, except for end tokens. A thought that the template drops
    although the model would generate it is added in the form `<think>...</think>`.

    Raises:
        InputError: the conversation has no answer or begins with an answer, or the template does not write everything
            that an answer contains.
        TypeError: `conversation` is not a list of messages.
    """
    messages = read_messages(conversation)
    weights = [message.pop("weight", 1) for message in messages]
    if wrong := [weight for weight in weights if weight not in (0, 1)]:
        raise InputError(f"the weight of a message must be 0 or 1, got {shown(wrong[0])}")
    learnt = [
        number
        for number, (message, weight) in enumerate(zip(messages, weights, strict=True))
        if number >= learnt_from and weight and message.get("role") == "assistant"
    ]
    if not learnt:
        raise InputError("the conversation has no answer: at least one message must have the role assistant")
    if learnt[0] == 0:
        raise InputError("the conversation begins with an answer: add the question before it")
    template = _Template(tokenizer, {"tools": tools, **template_kwargs})
    return _examples(template, _with_accepted_calls(template, messages[: learnt[-1] + 1]), learnt)


@dataclass(frozen=True)
class _Template:
    """The chat template of a tokenizer, with the arguments that all messages of a conversation share."""

    tokenizer: Tokenizer
    arguments: Mapping[str, Any]

    @property
    def source(self) -> str:
        """The template's code: of the template for conversations with these tools, if there are several."""
        return self.tokenizer.chat_template_for(self.arguments["tools"]) or ""

    def question(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text after which the model generates an answer."""
        return self.tokenizer.render_chat(messages, **self.arguments)

    def answered(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of messages, and the parts of it that the template wants to be learnt."""
        text = self.tokenizer.render_chat(messages, False, **self.arguments)
        if "endgeneration" not in self.source:
            return text, [(0, len(text))]
        return text, _marked_parts(text, self.tokenizer.render_chat(messages, False, **{**self.arguments, **MARKS}))

    def check_tools(self, question: str) -> None:
        """Raise an error if the template does not write all tools."""
        for tool in self.arguments["tools"] or []:
            name = tool.get("function", tool).get("name")
            if isinstance(name, str) and json.dumps(name, ensure_ascii=False)[1:-1] not in question:
                raise InputError(
                    f"the chat template does not write the tool {shown(name)}: remove it, describe it in the system "
                    "message, or pass it in chat_template_kwargs under the name that the template uses"
                )

    @property
    def writes_thoughts(self) -> bool:
        """True if the template treats a part of an answer as a thought."""
        return "</think>" in self.source


def _marked_parts(text: str, marked: str) -> list[tuple[int, int]]:
    """Return the beginning and end of each generation block in `text`. In `marked`, the blocks are marked."""
    begins, ends = MARKS.values()
    found, start, position = [], 0, 0
    for piece in re.split(f"([{begins}{ends}])", marked):
        if piece == begins:
            start = position
        elif piece == ends:
            found.append((start, position))
        else:
            position += len(piece)
    if re.sub(f"[{begins}{ends}]", "", marked) != text:
        raise InputError("the generation blocks of the chat template cannot be found in this conversation")
    return found


class _Answer(NamedTuple):
    """A generated text, and the parts of it that are learnt, each with its beginning and end."""

    text: str
    parts: list[tuple[int, int]]


def _examples(template: _Template, messages: list[dict[str, Any]], learnt: list[int]) -> list[Example]:
    tokenizer, examples = template.tokenizer, []
    example = Example([], [])
    for number in learnt:
        question = template.question(messages[:number])
        template.check_tools(question)
        answer = _answer(template, question, messages[: number + 1])
        before = tokenizer.encode(question, add_special_tokens=False)
        ids, labels = _tokens(tokenizer, question, answer)
        if all(label == IGNORED for label in labels):
            continue
        if before[: len(example.ids)] != example.ids:
            examples.append(example)
            example = Example([], [])
        read = [IGNORED] * (len(before) - len(example.ids))
        example = Example(before + ids, example.labels + read + labels)
    if not example.ids:
        raise InputError("the chat template has no generation block that contains an answer of this conversation")
    return [*examples, example]


def _answer(template: _Template, question: str, messages: list[dict[str, Any]]) -> _Answer:
    """Return what the model generates after the question in order to give the last message as its answer."""
    where = f"message {len(messages) - 1}"
    rendered, parts = template.answered(messages)
    thought, said = thought_and_text(messages[-1])
    prompt = _THOUGHT.search(question)  # the thought with which the generation prompt ends
    opens, added = prompt is not None and not prompt[1], ""
    if prompt is not None and not opens and thought:
        raise InputError(f"{where} has a thought, but the generation prompt ends with an empty thought: remove either")
    follows = rendered.startswith(question)
    start = len(question) if follows else _start(template, question, prompt, rendered, messages)
    if start is None:
        raise InputError(
            f"{where}: the chat template writes this answer without the generation prompt before it, so the tokens to "
            'learn cannot be found: train on "text" instead'
        )
    end = _end(template, rendered, messages)
    body = rendered[start:end]
    writes_thought, writes_text = _written(template, messages) if thought or said not in body else (True, True)
    if opens and "</think>" not in body and (thought or not follows):
        added = f"{thought}\n</think>\n\n"
    elif thought and not writes_thought:
        if not template.writes_thoughts:
            advice = 'write it as "<think>...</think>" at the beginning of the content, or remove it'
            raise InputError(f"{where}: the chat template does not write the thought: {advice}")
        added = f"<think>\n{thought}\n</think>\n\n"
    body = body.lstrip("\n") if added else body
    text = added + body
    if said and not writes_text:
        raise InputError(f"{where}: the chat template does not write the text {shown(said)}: remove it")
    shift = len(added) - (end - len(body))
    inside = [(max(begin + shift, len(added)), min(end + shift, len(text))) for begin, end in parts]
    return _Answer(text, [(0, len(added)), *inside])


def _written(template: _Template, messages: list[dict[str, Any]]) -> tuple[bool, bool]:
    """Return whether the template writes the thought of the last message, and whether it writes its text."""
    thought, text = "probe_of_thought_", "probe_of_text_"
    rendered = template.answered([*messages[:-1], with_texts(messages[-1], thought, text)])[0]
    return thought in rendered, text in rendered


def _end(template: _Template, rendered: str, messages: list[dict[str, Any]]) -> int:
    """Return the position in `rendered` where the turn of the last message ends.

    Some templates write the eos token after the end of the turn and a newline, at the end of a conversation only.
    """
    end, eos = len(rendered.rstrip()), template.tokenizer.eos_token or ""
    before = rendered[:end].removesuffix(eos)
    if before.rstrip() == before or len(before) == end:
        return end
    continued = template.question(messages)
    only_here = continued.startswith(before.rstrip()) and not continued.startswith(rendered[:end])
    return len(before.rstrip()) if only_here else end


def _start(
    template: _Template,
    question: str,
    prompt: re.Match[str] | None,
    rendered: str,
    messages: Sequence[Mapping[str, Any]],
) -> int | None:
    """Return the position in `rendered` where the answer begins, or None if it cannot be found.

    `rendered` does not begin with `question`, because the template writes the thought at the end of the generation
    prompt differently, or not at all, when the answer follows, or because it writes earlier messages differently. In
    the second case, the answer begins after the text of the message before it and the generation prompt.
    """
    base = question if prompt is None else question[: prompt.start()]
    start = len(base)
    if not rendered.startswith(base):
        asked = str(messages[-2].get("content") or "").strip()
        plain = template.answered(messages[:-1])[0]
        tails = [base[base.rfind(asked) :]] if asked and asked in base else []
        tails += [base[len(plain) :]] if base.startswith(plain) else []
        # A different count would mean that the last occurrence belongs to another message.
        tail = next((tail for tail in tails if tail and rendered.count(tail) == base.count(tail)), None)
        if tail is None:
            return None
        start = rendered.rfind(tail) + len(tail)
    if prompt is None:
        return start
    own = (_EMPTY if prompt[1] else _BEGINNING).match(rendered, start)
    return start if own is None else own.end()


def _with_accepted_calls(template: _Template, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with calls in the first form in which the template writes all of them.

    Raises:
        InputError: the template writes the calls in none of the forms.
    """
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    if not calls:
        return messages
    names = iter(range(len(calls)))
    renamed = [_renamed(message, names) for message in messages]
    advice = "write them in the content, in the model's own format"
    problem = InputError(f"the chat template does not write calls, or does not write arguments as JSON: {advice}")
    for form in _FORMS:
        try:
            text = template.answered([with_calls(message, *form) for message in renamed])[0]
        except InputError as error:
            problem = error if form == _FORMS[0] else problem
            continue
        python = any(str(call["arguments"]) in text for call in calls if call["arguments"] and form[0])
        if all(_PROBE.format(number) in text for number in range(len(calls))) and not python:
            return [with_calls(message, *form) for message in messages]
    raise problem


def _renamed(message: dict[str, Any], numbers: Iterator[int]) -> dict[str, Any]:
    """Return a message whose calls have names that occur nowhere else."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "name": _PROBE.format(next(numbers))}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _tokens(tokenizer: Tokenizer, question: str, answer: _Answer) -> tuple[list[int], list[int]]:
    """Return the ids and labels of an answer. Its last token has a label if any token has."""
    ids = ids_after(tokenizer, question, answer.text)
    flags = _flags(tokenizer, question, answer, ids)
    labels = [token if flag else IGNORED for token, flag in zip(ids, flags, strict=True)]
    if any(flags):
        labels[-1] = ids[-1]
    return ids, labels


def _flags(tokenizer: Tokenizer, question: str, answer: _Answer, ids: list[int]) -> list[bool]:
    """Return, for each of the answer's ids, whether its token has characters in a part that is learnt."""
    covered = [False] * len(answer.text)
    for begin, end in answer.parts:
        covered[begin:end] = [True] * max(end - begin, 0)
    if all(covered):
        return [True] * len(ids)
    encoding, start = tokenizer.backend.encode(question + answer.text, add_special_tokens=False), len(question)
    if encoding.ids[-len(ids) :] != ids:
        encoding, start = tokenizer.backend.encode(answer.text, add_special_tokens=False), 0
    offsets = encoding.offsets[-len(ids) :]
    return [any(covered[max(begin - start, 0) : end - start]) for begin, end in offsets]
