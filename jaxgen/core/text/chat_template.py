"""Chat templates: render conversations to prompts with the checkpoint's jinja code, in a sandbox."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from jaxgen.core.text import sandbox
from jaxgen.errors import ConfigError, InputError, shown

# Short message texts that tokenizers merge with the preceding text in different ways
_STARTS = ("a", "A", " a", "\na", "1", ".", "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{CJK UNIFIED IDEOGRAPH-4E2D}")
ROLES = ("system", "user", "assistant", "tool")  # roles that are allowed even if the template does not name them
LARGEST = 100_000  # maximum number of characters in a template; known templates have at most 30,000
# Variables of the template that are written at the beginning and the end of generation blocks. The values are
# noncharacters, which do not occur in text.
MARKS = {"generation_begins": "\ufdd0", "generation_ends": "\ufdd1"}
_END = "\ufdd2"  # a noncharacter that marks the end of the last message's text


def named(template: Any) -> dict[str, str]:
    """Return the templates in a config's `chat_template` by name; a single template is named "default".

    Raises:
        ConfigError: a template is too large, or `template` is neither a string nor a list of objects that each have the
            keys `name` and `template`.
    """
    if template is None:
        return {}
    entries = template if isinstance(template, list | tuple) else [template]
    if isinstance(template, str):
        entries = [{"name": "default", "template": template}]
    templates = {}
    for entry in entries:
        fields = entry if isinstance(entry, Mapping) else {}
        if not all(isinstance(fields.get(key), str) for key in ("name", "template")):
            raise ConfigError("chat_template must be a string or a list of objects with a name and a template each")
        if len(fields["template"]) > LARGEST:
            size = len(fields["template"])
            raise ConfigError(f"chat_template has {size:,} characters, more than the maximum of {LARGEST:,}")
        templates[fields["name"]] = fields["template"]
    return templates


def render(
    templates: Mapping[str, str],
    conversation: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
    source: str = "",
) -> str:
    """Render one conversation with its template; see `Tokenizer.render_chat`.

    Error messages name `source`, the directory that contains the template.

    Raises:
        InputError: the conversation is malformed, there is no template for it, or the template rejects it.
        ConfigError: the template is not valid jinja, or exceeds the limits of the sandbox.
        TypeError: an argument is not a list of dicts.
    """
    _check_messages(conversation)
    if not conversation:
        raise InputError("a conversation is empty: it needs at least one message")
    for name, given in (("tools", tools), ("documents", documents)):
        if given is not None and (isinstance(given, str) or not all(isinstance(g, Mapping) for g in given)):
            raise TypeError(f"{name} must be a list of dicts, got {given!r}")
    own = chosen(templates, tools)
    if own is None:
        others = f" named default (its templates: {', '.join(sorted(templates))})" if templates else ""
        raise InputError(
            f"this tokenizer has no chat template{others}: use batch on text, or add a chat_template.jinja"
        )
    _check_roles(conversation, own)
    name = f"the chat template{f' of {source}' if source else ''}"
    given = {"messages": conversation, "tools": tools, "documents": documents, **variables}
    try:
        try:
            template = _compile(own)
        except Exception as error:  # jinja's parser and Python's compiler raise many kinds of errors
            raise ConfigError(f"{name} cannot be compiled: {_reason(error)}") from error
        try:
            return sandbox.render(template, {"add_generation_prompt": add_generation_prompt, **given})
        except Exception as error:  # the template is the checkpoint's code and can raise anything
            raise InputError(f"{name} fails on this conversation: {_reason(error)}") from error
    except sandbox.TooMuch as error:
        raise ConfigError(f"{name} {error}") from error


def chosen(templates: Mapping[str, str], tools: Any) -> str | None:
    """Return the template for conversations with these tools, or None if there is none."""
    return templates.get("tool_use" if tools is not None and "tool_use" in templates else "default")


def continued(render: Callable[[list[Mapping[str, Any]]], str], messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation up to the end of its last message's text, so that an answer continues this text.

    `render` renders messages without a generation prompt. Whitespace at the end of the text is kept if the template
    keeps it.

    Raises:
        InputError: the last message has no text, or the template changes it.
    """
    text = str(messages[-1]["content"] or "")
    rendered = render([*messages[:-1], {**messages[-1], "content": f"{text}{_END} "}])
    before, mark, after = rendered.rpartition(_END)
    if not text.strip() or not mark:
        reason = "the chat template changes it" if text.strip() else "it has no text"
        raise InputError(f"cannot continue the last message: {reason}")
    return before if after.startswith(" ") else before.rstrip()


def continuations(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return conversations that begin with `messages` and continue in different ways."""
    _check_messages(messages)
    roles = ("user", "assistant", "user")
    if messages and messages[-1]["role"] == "user":
        roles = roles[1:]
    contents = [[start] for start in _STARTS] + [["a"] * len(roles)]
    return [
        [*messages, *({"role": role, "content": text} for role, text in zip(roles, texts, strict=False))]
        for texts in contents
    ]


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"a conversation must be a list of messages, got {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"message {i} must be a dict, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise InputError(f'message {i} must have a "role" that is a string, got {dict(message)!r}')
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise InputError(
                f'message {i} must have a "content" that is a string or a list of parts, got {dict(message)!r}; '
                "only a message with tool_calls may lack it"
            )


def _check_roles(conversation: Sequence[Mapping[str, Any]], template: str) -> None:
    """Reject a message with an unknown role, which many templates would render and others would silently drop."""
    for i, message in enumerate(conversation):
        role = message["role"]
        if role in ROLES or f"'{role}'" in template or f'"{role}"' in template:
            continue
        raise InputError(
            f"message {i} has the role {shown(role)}, which does not occur in the chat template: use "
            f"{', '.join(ROLES)}, or a role from the template"
        )


class _GenerationBlock(jinja2.ext.Extension):
    """Support for `generation` blocks, which mark answers for training; their content is rendered as usual.

    If the variables in `MARKS` are defined, they are written at the beginning and the end of each block.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begins, ends = (jinja2.nodes.Output([jinja2.nodes.Name(name, "load")], lineno=line) for name in MARKS)
        return jinja2.nodes.Scope([begins, *body, ends], lineno=line)


@functools.lru_cache
def _compile(template: str) -> jinja2.Template:
    extensions = [jinja2.ext.loopcontrols, _GenerationBlock]
    environment = sandbox.Environment({"tojson": _tojson}, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
