"""The options of the command `jaxgen "PROMPT"`: its own options, and the `GenerationConfig` options that it offers.

This module does not import jax.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxgen import arguments
from jaxgen.cli import train_options
from jaxgen.cli.distributed import wanted
from jaxgen.cli.size_options import add_size
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.errors import InputError
from jaxgen.remote import is_url
from jaxgen.version import __version__

OFFERED = tuple(option for option in OPTIONS.values() if option.command)
_LETTERS = {"max_new_tokens": "n", "temperature": "t", "top_k": "k", "top_p": "p"}
# Matches the name of an option in error messages of `GenerationConfig`, with or without the option's value.
_NAMED = re.compile(
    rf"(?<![-\w])({'|'.join(sorted((option.name for option in OFFERED), key=len, reverse=True))})"
    r"(?:=('[^']*'|\[[^]]*\]|\([^)]*\)|[^\s,;:)]+))?(?![-\w])"
)
# argparse's keyword arguments for an option, by the form of its value; see `Kind.form`.
_FORMS: dict[str, dict[str, Any]] = {
    "flag": {"action": argparse.BooleanOptionalAction},
    "whole": {"type": arguments.whole, "metavar": "N"},
    "number": {"type": float, "metavar": "X"},
    "texts": {"action": "append", "type": arguments.unicode, "metavar": "TEXT"},
    "layers": {"type": arguments.layers, "metavar": "low|high|N,N,..."},
    "json": {"type": arguments.json_value, "metavar": "JSON"},
}


def parser() -> arguments.Parser:
    """Return the command-line parser."""
    result = arguments.Parser(
        reason=_reason,
        prog="jaxgen",
        usage='jaxgen [options] "PROMPT"\n       jaxgen [options] --chat\n       jaxgen [options] --input FILE\n'
        "       jaxgen serve --help\n       jaxgen run-batch --help\n       jaxgen train --help",
        description="Continue a prompt with a checkpoint; without --model, with the bundled model. "
        "Text goes to stdout as it is generated, everything else to stderr.",
        epilog="If a generation option is left out, the checkpoint's generation_config.json applies.",
    )
    _add_sources(result)
    _add_machine(result.add_argument_group("model and machine").add_argument)
    add_generation(result)
    return result


def _reason(flag: str) -> str:
    """Return why `jaxgen` lacks an option of the Python API or of `jaxgen train`; return "" for any other option."""
    words = flag.removeprefix("--").replace("-", "_")
    option = OPTIONS.get(words) or OPTIONS.get(words.removeprefix("no_"))
    if option is not None and not option.command:
        return f"{option.name} {option.refused or 'is set in Python, with cfg.replace'}"
    return "it is an option of jaxgen train" if flag in train_options.parser().flags() else ""


def _add_sources(command: arguments.Parser) -> None:
    add, text = command.add_argument, arguments.unicode
    add("--version", action="version", version=f"jaxgen {__version__}")
    add("prompt", metavar="PROMPT", nargs="?", type=text, help="put it in quotes; - (the default in a pipe) is stdin")
    add("-f", "--prompt-file", type=arguments.file, metavar="FILE", help="the prompt is this file's text")
    add("-c", "--chat", action="store_true", help="start a conversation; /help lists its commands")
    many = "one prompt per line, or JSONL, in which lines may set options; - is stdin"
    add("-i", "--input", type=arguments.source, metavar="FILE", help=many)
    to = "write the answers to --input to this file, as JSONL (default: stdout)"
    add("-o", "--output", type=arguments.target, metavar="FILE", help=to)
    part = "answer every R-th prompt of --input, from number r (0 to R-1) on; the last process merges the answers"
    add("--shard", type=arguments.shard, metavar="r/R", help=part)
    ends = "when one ends, the next prompt begins"
    busy = f"answers to --input generated at a time (default: {EngineSizes.slots}); {ends}"
    add_size(add, "slots", None, busy)
    size = "prompts of --input per batch, for beams and other modes that cannot run in slots (default: 8)"
    add("-b", "--batch-size", type=arguments.count, metavar="N", help=size)
    add("--logprobs", action="store_true", help="add the tokens and their log-probabilities to the answers to --input")
    shown = "also write the answers to PROMPT as a page that shows how likely each token was"
    add("--html", type=arguments.path, metavar="FILE", help=shown)
    add("-s", "--system", type=text, metavar="TEXT", help="a system message before each conversation")
    add("--raw", action="store_true", help="use prompts as they are, without the chat template")
    add("--regex", type=text, metavar="PATTERN", help="answer with text that matches this regular expression")
    add("--json-schema", type=arguments.file, metavar="FILE", help="answer with JSON that follows this schema")
    left = "leave out the keywords of --json-schema that cannot be enforced, and list them (default: an error)"
    add("--json-schema-unsupported", choices=("error", "warn"), help=left)
    away = "the text that --guidance-scale moves away from (default: the last token of the prompt)"
    add("--negative-prompt", type=text, metavar="TEXT", help=away)
    add("--seed", type=arguments.seed, default=0, metavar="N|random", help="the seed for sampling (default: 0)")
    add("--stats", action="store_true", help="report at the end how long loading, compiling and generating took")
    add("--debug", action="store_true", help="show tracebacks, and which programs are compiled and why")


def _add_machine(add: Callable[..., Any]) -> None:
    model = "a Hugging Face checkpoint or a GGUF file: its path, its URL, or its id on the hub; or smollm2"
    add("-m", "--model", metavar="PATH", help=model)
    add("--adapter", type=arguments.path, metavar="DIR", help="a LoRA adapter for the model, as PEFT writes it")
    add("--assistant", metavar="DIR", help="a smaller checkpoint with the same vocabulary, which drafts tokens")
    bits = "round the weights to 8 bits (half the memory, and faster for a few rows) or 4 bits; none: convert them back"
    arguments.add_weights(add, "convert the weights (default: as in the checkpoint)", bits)
    device = "cpu, gpu or tpu, or one of several: gpu:1 (default: jax's)"
    add("--device", type=arguments.device, metavar="NAME", help=device)
    add("--mesh", type=arguments.mesh, metavar="DATAxMODEL", help="split rows and weights across devices, such as 1x8")
    add("--distributed", action="store_true", help="join the other processes that Slurm or Cloud TPU started")
    add("--coordinator", metavar="HOST:PORT", help="join other processes: the address of process 0")
    add("--processes", type=arguments.count, metavar="N", help="how many processes there are")
    add("--process", type=arguments.natural, metavar="I", help="the number of this process, from 0")
    keep = "keep compiled programs in the user's cache directory, so that the next start is fast"
    add("--compile-cache", action=argparse.BooleanOptionalAction, default=True, help=keep)


def add_generation(command: arguments.Parser) -> None:
    """Add the options of `GenerationConfig`; alternatives such as max_length and max_new_tokens cannot be combined."""
    titles = dict.fromkeys(option.group for option in OFFERED)
    sections = {title: command.add_argument_group(title.lower()) for title in titles}
    limits: dict[str, Any] = {}
    for option in OFFERED:
        group = limits.get(option.instead_of) or sections[option.group]
        if option.instead_of and option.instead_of not in limits:
            group = limits[option.name] = group.add_mutually_exclusive_group()
        letter = [f"-{_LETTERS[option.name]}"] if option.name in _LETTERS else []
        note = option.command if isinstance(option.command, str) else ""
        values = ("True", "False", "'never'", "'heuristic'", "'constant'")  # as written in Python
        doc = functools.reduce(lambda text, value: text.replace(value, value.strip("'").lower()), values, option.doc)
        help_text = in_flags(doc).replace("%", "%%") + note
        group.add_argument(*letter, _flag(option.name), help=help_text, **_argument(option.name))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def in_flags(message: str) -> str:
    """Replace the option names in a message with the command's flags, such as `--no-do-sample`."""

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        if OPTIONS[name].kind.form == "flag" and value in ("True", "False"):
            return _flag(name) if value == "True" else _flag(f"no_{name}")
        return _flag(name) + (f" {value}" if value else "")

    return _NAMED.sub(flag, message)


def in_settings(message: str) -> str:
    """Replace option names and flags in a message with the words of /set, such as `do_sample false`."""

    def name_of(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        return name if name in OPTIONS else match[0]

    def named(match: re.Match[str]) -> str:
        name, value = match.groups()
        return name + (f" {value.lower() if value in ('True', 'False', 'None') else value}" if value else "")

    named_flags = re.sub(r"(?:argument )?(?:-\w/)?--([a-z][a-z-]*)", name_of, message)
    return _NAMED.sub(named, named_flags).removesuffix("; see jaxgen --help")


def _argument(name: str) -> dict[str, Any]:
    """Return argparse's keyword arguments for an option."""
    kind = OPTIONS[name].kind
    if kind.form != "choice":
        return _FORMS[kind.form]
    texts = {str(value).lower(): value for value in kind.values}
    return {"type": functools.partial(arguments.one_of, texts), "metavar": "|".join(texts)}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options in `argv`; raise an `InputError` if options are unknown or invalid, or cannot be combined."""
    command = parser()
    options, rest = command.read(argv)
    if rest:
        command.error(f"{rest[0]!r} follows the prompt {options.prompt!r}: put the whole prompt in quotes")
    sources = {
        "a prompt": options.prompt is not None,
        "--prompt-file": options.prompt_file is not None,
        "--chat": options.chat,
        "--input": options.input is not None,
    }
    chosen = [name for name, given in sources.items() if given]
    if not chosen and sys.stdin is not None and not sys.stdin.isatty():
        options.prompt = "-"
    elif not chosen:
        command.error("no prompt: write it at the end, in quotes, or use --prompt-file, --chat or --input")
    if len(chosen) > 1:
        command.error(f"{' and '.join(chosen)} exclude each other: choose one")
    _refuse_conflicts(command, options)
    return options


def _refuse_conflicts(command: arguments.Parser, options: argparse.Namespace) -> None:
    """Raise an error for options that cannot be combined."""
    if options.regex is not None and options.json_schema is not None:
        command.error("--regex and --json-schema exclude each other: choose one")
    if options.json_schema_unsupported is not None and options.json_schema is None:
        command.error("--json-schema-unsupported is about --json-schema: use that too, or leave it out")
    if options.output is not None and options.input is None:
        command.error("--output is for the answers to --input: use that too, or redirect stdout")
    for name in ("slots", "batch_size"):
        if getattr(options, name) is not None and options.input is None:
            command.error(f"{_flag(name)} is for the prompts of --input: use that too, or leave it out")
    if options.shard is not None and options.output is None:
        command.error("--shard records the answers of several processes in files: add --output, the same for all")
    if options.shard is not None and is_url(options.output or ""):
        command.error("--shard merges files in the directory of --output, so it cannot be a URL: name a shared file")
    if options.shard is not None and options.seed is None:
        command.error("--seed random draws a different seed in each shard: pass a number")
    if options.logprobs and options.input is None:
        command.error("--logprobs adds to the JSON lines of --input: use that too")
    if options.html is not None and (options.chat or options.input is not None):
        command.error("--html shows the answers to one prompt: leave out --chat or --input")
    if options.device is not None and options.device[1] is not None and options.mesh is not None:
        command.error("--mesh uses all devices of a platform: leave out the number in --device")
    if options.chat and (options.num_return_sequences or 1) > 1:
        command.error("--chat gives one answer per message: leave out --num-return-sequences")
    if options.chat and (options.max_length is not None or options.min_length is not None):
        command.error("--max-length and --min-length count the prompt, which grows in --chat: use --max-new-tokens")
    several = wanted(options)
    if several and options.mesh is None:
        command.error("several processes divide the weights over their devices: add --mesh DATAxMODEL")
    if options.coordinator is None and (options.processes is not None or options.process is not None):
        command.error("--processes and --process need --coordinator HOST:PORT, the address of process 0")
    if options.processes is not None and (options.process or 0) >= options.processes:
        command.error(f"--process {options.process} must be less than --processes {options.processes}")
    if several and (options.chat or "-" in (options.input, options.prompt)):
        command.error("--chat and - read stdin, which several processes do not share: write prompts to a file")
    if several and options.seed is None:
        command.error("--seed random draws a different seed in each process: pass a number")
    if options.raw and (options.chat or options.system is not None):
        command.error("--raw disables the chat template, which --chat and --system need: choose one")


def setting(text: str) -> dict[str, Any]:
    """Return the fields of `GenerationConfig` that `/set NAME VALUE` sets, with the named field first.

    Raise an `InputError` if the name is unknown or does not apply to conversations, or if the value cannot be read.
    """
    name, _, value = text.partition(" ")
    name, value = name.lstrip("-").replace("-", "_"), value.strip()
    names = [option.name for option in OFFERED if option.name not in ("max_length", "min_length", "token_healing")]
    if name not in names:
        raise InputError(f"{name} is not an option of a conversation{arguments.suggestion(name, names)}")
    if name == "num_return_sequences":
        raise InputError("a conversation has one answer per message")
    if not value:
        raise InputError(f"/set {name} needs a value")
    if OPTIONS[name].kind.form == "flag":
        if value not in ("true", "false"):
            raise InputError(f"{name} must be true or false")
        words = [_flag(name if value == "true" else f"no_{name}")]
    else:
        words = [f"{_flag(name)}={value}"]
    fields = generation_fields(parser().read(words)[0])
    return {name: fields.pop(name, None), **fields}  # generation_fields omits an option set to none


def generation_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `GenerationConfig` that the command line sets.

    A limit on the command line overrides the checkpoint's limit, even if the two limits have different names. For
    example, --max-length clears max_new_tokens. A temperature of 0 means greedy search.
    """
    values = {option.name: getattr(options, option.name) for option in OFFERED}
    fields = {name: value for name, value in values.items() if value is not None}
    if fields.get("temperature") == 0:
        if fields.get("do_sample"):
            raise InputError("--temperature 0 means greedy search, which excludes --do-sample: leave one of them out")
        del fields["temperature"]
        fields["do_sample"] = False
    for option in OFFERED:
        if option.instead_of and option.name in fields:
            fields.setdefault(option.instead_of, OPTIONS[option.instead_of].kind.neutral)
    return fields
