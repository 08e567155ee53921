"""The fields of a prompt: the format of `Engine.submit`, `generate_many` and the command's --input."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxgen.core.config.availability import check_options
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.decoding.rng import seed_key
from jaxgen.core.grammar.keywords import given
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import ConfigError, InputError, JaxgenError, check_whole, shown

SOURCES = ("text", "prompt", "messages", "ids")
GRAMMARS = ("json_schema", "regex", "allowed")
FIELDS = (*SOURCES, "index", "n", "seed", "key", *GRAMMARS, "unsupported", "metadata")
# Options of a prompt that are not values in the compiled program.
OF_HOST = ("max_new_tokens", "stop_strings", "num_return_sequences", "output_logprobs", "top_logprobs", "min_length")
LARGEST_INDEX = 2**32 - 1  # fold_in reads 32 bits
_CLOSE = 0.82  # `difflib`'s ratio from which a name is a misspelling
_COMPILED = 64  # maximum number of cached grammars
# Warpers that never remove the most likely token.
_KEEP_FIRST = {"top_h", "top_k", "top_p", "min_p", "epsilon_cutoff", "eta_cutoff"}
_LARGEST_COUNT = 65_536  # maximum number of sequences of a prompt, each of which takes memory on the host
_RANGES = {"index": (0, LARGEST_INDEX), "n": (1, _LARGEST_COUNT), "num_return_sequences": (1, _LARGEST_COUNT)}
_TEMPLATE = "render the chat template yourself, with Tokenizer.render_chat, and pass its ids"
# Names with a meaning in other libraries, without underscores: the option to use, or a sentence that says what to do.
_ELSEWHERE = {
    "stop": "stop_strings",
    "stopsequences": "stop_strings",
    "stoptokenids": "eos_token_id",
    "ignoreeos": "set eos_token_id to null",
    "maxtokens": "max_new_tokens",
    "maxcompletiontokens": "max_new_tokens",
    "maxoutputtokens": "max_new_tokens",
    "mintokens": "min_new_tokens",
    "numsamples": "n",
    "nsamples": "n",
    "bestof": "set n, and choose among the answers",
    "seeds": "set seed, or n for several answers",
    "temp": "temperature",
    "greedy": "set temperature to 0",
    "logitbias": "sequence_bias",
    "badwords": "bad_words_ids",
    "responseformat": "json_schema",
    "schema": "json_schema",
    "guidedjson": "json_schema",
    "guidedregex": "regex",
    "guidedchoice": 'use regex, such as "yes|no"',
    "grammar": "use regex or json_schema",
    "system": "write messages that begin with a system message",
    "tools": _TEMPLATE,
    "chattemplatekwargs": _TEMPLATE,
    "enablethinking": _TEMPLATE,
    "options": "make each option a field of the prompt",
    "samplingparams": "make each option a field of the prompt",
}


def known_fields(prompt: Any, own_data: bool = False) -> dict[str, Any]:
    """Return a prompt as a dict of fields: a string is its text, and anything but a string or a dict is its ids.

    Raise an error for a field that prompts do not have; if `own_data` is True, only if it seems to be an option.
    """
    if isinstance(prompt, str):
        return {"text": prompt}
    if not isinstance(prompt, Mapping):
        return {"ids": prompt}
    for name in prompt:
        if name in FIELDS or name in OPTIONS:
            continue
        advice = hint(name)
        if own_data and advice is not None:
            advice = f"{advice if advice.endswith('?') else f'{advice}.'} Put data of your own in metadata"
        if advice is not None or not own_data:
            raise ConfigError(f"unknown option {shown(name)}: {advice or 'put data of your own in metadata'}")
    return dict(prompt)


def hint(name: Any) -> str | None:
    """Return what to do about an unknown field that probably stands for an option; None for any other name."""
    word = str(name)[:100].lower().replace("-", "_")
    bare = word.replace("_", "")
    names = [each for each in (*OPTIONS, *FIELDS) if each != "slots"]  # a prompt never has `slots`
    same = [each for each in names if each.replace("_", "") == bare]
    meant = _ELSEWHERE.get(bare)
    if meant is None:
        options = [each for each in names if each not in FIELDS or each in ("json_schema", "regex")]
        meant = next(iter(same or difflib.get_close_matches(word, options, n=1, cutoff=_CLOSE)), None)
    return f"did you mean {meant!r}?" if meant in (*OPTIONS, *FIELDS) else meant


class PromptFields(NamedTuple):
    """The fields of a prompt.

    Attributes:
        source: the name of the field that contains the prompt.
        content: the value of this field.
        others: all other fields, in the given order.
    """

    source: str
    content: Any
    others: dict[str, Any]

    @property
    def own(self) -> dict[str, Any]:
        """The other fields that apply to the prompt, without the caller's own data."""
        known = {*FIELDS, *OPTIONS} - {"metadata"}
        return {name: value for name, value in self.others.items() if name in known}


def read_fields(prompt: Any, own_data: bool = False) -> PromptFields:
    """Return the fields of a prompt, which may be a string, ids or a dict.

    Raise an error if a field is unknown or if the prompt is missing, or if the index or the number of sequences is
    invalid. `own_data` is as in `known_fields`.
    """
    fields = known_fields(prompt, own_data)
    source = _source_of(fields)
    content = fields.pop(source)
    for name, limits in _RANGES.items():
        if name in fields:
            fields[name] = check_whole(name, fields[name], *limits)
    return PromptFields(source, content, fields)


def _source_of(fields: Mapping[str, Any]) -> str:
    """Return the name of the field that contains the prompt, and check its form; ids are checked elsewhere."""
    found = [name for name in SOURCES if name in fields]
    if len(found) != 1:
        got = f"got {' and '.join(found)}" if found else "it has none of them"
        raise InputError(f"a prompt must have exactly one of {', '.join(SOURCES)}: {got}")
    (name,) = found
    if name in ("text", "prompt") and not isinstance(fields[name], str):
        raise TypeError(f'"{name}" must be a string, got {shown(fields[name])}')
    if name == "messages" and not _is_conversation(fields[name]):
        example = '{"role": "...", "content": "..."}'
        raise InputError(f'"messages" must be a list of at least one {example}, got {shown(fields[name])}')
    return name


def _is_conversation(messages: Any) -> bool:
    """Return True if `messages` is a non-empty list of dicts, each of which has a role."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    )


def translated(prompt: Any, tokenizer: Tokenizer | None, vocab_size: int, key_impl: str | None) -> dict[str, Any]:
    """Return a prompt's fields in the terms of the engine: `ids`, `index`, `key`, `allowed`, `metadata`, and options.

    Raise an error if a field is unknown or invalid, or if two fields exclude each other.
    """
    source, content, fields = read_fields(prompt)
    if source != "ids":
        if tokenizer is None:
            raise InputError(f"a prompt given as {source} needs a tokenizer: pass tokenizer=, or ids")
        if source == "messages":
            content = tokenizer.encode(tokenizer.render_chat(content), add_special_tokens=False)
        else:
            content = tokenizer.encode(content)
    fields["ids"] = content
    for several in (("n", "num_return_sequences"), ("seed", "key"), GRAMMARS):
        if len(found := [name for name in several if name in fields]) > 1:
            raise InputError(f"{' and '.join(found)} exclude each other: pass one of them")
    if "n" in fields:
        fields["num_return_sequences"] = fields.pop("n")
    if "seed" in fields:
        fields["key"] = seed_key(fields.pop("seed"), key_impl or "threefry2x32")
    if "unsupported" in fields and "json_schema" not in fields:
        raise InputError("unsupported is about keywords of a json_schema: pass that too, or leave it out")
    unsupported = fields.pop("unsupported", "error")
    for name in ("json_schema", "regex"):
        if name in fields:
            fields["allowed"] = _automaton(name, fields.pop(name), tokenizer, vocab_size, unsupported)
    return fields


def with_own(
    cfg: GenerationConfig, own: Mapping[str, Any], allowed: Collection[str], hint: str = ""
) -> GenerationConfig:
    """Return the config with a prompt's own options applied. `temperature=0` means greedy search.

    Raise an error if an option is not among the names in `allowed`, or if the prompt's decode mode does not read it;
    `hint` is added to the error about a name. With `temperature=0`, the warpers that always keep the most likely token
    are accepted: they do not change the result.
    """
    fields = dict(own)
    greedy = _is_zero(fields.get("temperature"))
    if greedy:
        if fields.get("do_sample"):
            raise ConfigError("temperature=0 means greedy search, but do_sample is True: leave one of them out")
        if (count := fields.get("num_return_sequences", cfg.num_return_sequences)) > 1 and cfg.num_beams == 1:
            raise ConfigError(
                f"temperature=0 means greedy search, which gives one answer, but {count} are asked for: set n to 1, or "
                "leave temperature=0 out"
            )
        fields |= {"temperature": None, "do_sample": False}
    if fields.get("output_logprobs", fields) is None:
        fields.setdefault("top_logprobs", 0)
    cfg = cfg.replace(**fields)
    for name in own:
        if name not in allowed and not (greedy and name == "temperature"):
            raise ConfigError(f"{name} is part of the program: set it in the config, for all prompts{hint}")
    check_options(cfg, 1)
    ignored = {option.name for option in cfg.unread()} - (_KEEP_FIRST if greedy else set())
    for name, value in own.items():
        if OPTIONS[name].kind.prompt_count(getattr(cfg, name)) is not None:
            raise ConfigError(f"{name} must be a single value for this prompt, got {shown(value)}")
        if name in ignored and OPTIONS[name].is_given(getattr(cfg, name)):
            sampling = "" if greedy or cfg.on("do_sample") else "set do_sample=True too, or "
            raise ConfigError(f"{cfg.mode} does not read {name}={shown(value)}: {sampling}leave it out")
    return cfg


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _automaton(name: str, value: Any, tokenizer: Tokenizer | None, vocab_size: int, unsupported: Any) -> TokenAutomaton:
    if tokenizer is None:
        raise InputError(f"{name} needs a tokenizer: pass tokenizer=")
    if name == "regex" and not isinstance(value, str):
        raise TypeError(f"regex must be a string, got {shown(value)}")
    if not isinstance(value, str | Mapping):
        try:
            value = given(value)
        except TypeError as error:
            raise TypeError(f"{name} must be a JSON schema, got {shown(value)}") from error
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name} must be a JSON schema: {error}") from error
    try:
        return _compiled(name, text, tokenizer, vocab_size, str(unsupported))
    except JaxgenError as error:
        raise type(error)(f"{name}: {error}") from error


@functools.lru_cache(maxsize=_COMPILED)
def _compiled(name: str, text: str, tokenizer: Tokenizer, vocab_size: int, unsupported: Any) -> TokenAutomaton:
    if name == "regex":
        return TokenAutomaton.from_regex(text, tokenizer, vocab_size=vocab_size)
    return TokenAutomaton.from_json_schema(text, tokenizer, vocab_size=vocab_size, unsupported=unsupported)
