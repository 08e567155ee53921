"""The options of `jaxgen "PROMPT"`: its own, and those of `GenerationConfig` whose records offer them to the command.

Does not import jax.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from jaxgen.cli import arguments
from jaxgen.config.kinds import Choice, Flag, Layers, Text
from jaxgen.config.options import OPTIONS, Option
from jaxgen.model.config import DTYPES

OFFERED = tuple(option for option in OPTIONS.values() if option.command)


def parser() -> arguments.Parser:
    """Return the parser of the command line."""
    result = arguments.Parser(
        prog="jaxgen",
        usage='jaxgen [options] "PROMPT"\n       jaxgen [options] --chat\n       jaxgen [options] --input FILE\n'
        "       jaxgen train --help",
        description="Continue a prompt with a checkpoint; without --model, with the bundled model. "
        "Text goes to stdout as it is generated, everything else to stderr.",
        epilog="If a generation option is left out, the checkpoint's generation_config.json applies.",
    )
    add = result.add_argument
    add("--version", action="version", version=f"jaxgen {version('jaxgen')}")
    add("prompt", metavar="PROMPT", nargs="?", help="put it in quotes")
    add("--model", metavar="DIR", help="a Hugging Face checkpoint's directory, or the id of one on the hub")
    add("--chat", action="store_true", help="start a conversation; /help lists its commands")
    add("--input", metavar="FILE", help="one prompt per line, or JSONL with prompt or messages; - is stdin")
    add("--output", metavar="FILE", help="write the answers to --input to this file, as JSONL (default: stdout)")
    add("--batch-size", type=arguments.count, default=8, metavar="N", help="prompts of --input at once (default: 8)")
    add("--system", metavar="TEXT", help="a system message before each conversation")
    add("--raw", action="store_true", help="use prompts as they are, without the chat template")
    add("--dtype", choices=DTYPES, help="convert the weights (default: as in the checkpoint)")
    add("--seed", type=arguments.natural, default=0, help="the seed for sampling (default: 0)")
    add("--stats", action="store_true", help="report at the end how long loading, compiling and generating took")
    add("--mesh", type=arguments.mesh, metavar="DATAxMODEL", help="divide rows and weights over devices, such as 1x8")
    add("--distributed", action="store_true", help="join the other processes that Slurm or Cloud TPU started")
    add("--coordinator", metavar="HOST:PORT", help="join other processes: the address of process 0")
    add("--processes", type=arguments.count, metavar="N", help="how many processes there are")
    add("--process", type=arguments.natural, metavar="I", help="which of them this is, from 0")
    add(
        "--compile-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep compiled programs in the user's cache directory, so that the next start is fast",
    )
    add("--assistant", metavar="DIR", help="a smaller checkpoint with the same vocabulary, which drafts tokens")
    add("--negative-prompt", metavar="TEXT", help="what --guidance-scale moves away from (default: the last token)")
    add("--regex", metavar="PATTERN", help="answer with text that matches this regular expression")
    add("--json-schema", type=arguments.file, metavar="FILE", help="answer with JSON that follows this schema")
    groups: dict[str, Any] = {}
    for option in OFFERED:
        group = result
        if option.instead_of:
            group = groups.get(option.instead_of) or result.add_mutually_exclusive_group()
            groups[option.name] = group
        note = option.command if isinstance(option.command, str) else ""
        flag = "--" + option.name.replace("_", "-")
        group.add_argument(flag, help=option.doc.replace("%", "%%") + note, **_argument(option))
    return result


def _argument(option: Option) -> dict[str, Any]:
    """Return argparse's keywords for the values of an option."""
    if isinstance(option.kind, Flag):
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(option.kind, Choice):
        texts = {str(value).lower(): value for value in option.kind.values}
        return {"type": functools.partial(arguments.one_of, texts), "metavar": "|".join(texts)}
    if isinstance(option.kind, Text):
        return {"action": "append", "metavar": "TEXT"}
    if isinstance(option.kind, Layers):
        return {"type": arguments.layers, "metavar": "low|high|N,N,..."}
    numbers = {"int": (arguments.whole, "N"), "float": (float, "X")}
    read, metavar = numbers.get(option.kind.type_name, (arguments.json_value, "JSON"))
    return {"type": read, "metavar": metavar}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        InputError: an unknown option, a value that cannot be read, or options that exclude each other.
    """
    command = parser()
    options, rest = command.read(argv)
    if rest:
        command.error(f"{rest[0]!r} follows the prompt {options.prompt!r}: put the whole prompt in quotes")
    sources = {"a prompt": options.prompt is not None, "--chat": options.chat, "--input": options.input is not None}
    chosen = [name for name, given in sources.items() if given]
    if not chosen:
        command.error("no prompt: write it at the end, in quotes, or use --chat or --input")
    if len(chosen) > 1:
        command.error(f"{' and '.join(chosen)} exclude each other: choose one")
    if options.regex is not None and options.json_schema is not None:
        command.error("--regex and --json-schema exclude each other: choose one")
    if options.output is not None and options.input is None:
        command.error("--output is for the answers to --input: use that too, or redirect stdout")
    if options.chat and (options.num_return_sequences or 1) > 1:
        command.error("--chat gives one answer per message: leave out --num-return-sequences")
    if options.chat and (options.max_length is not None or options.min_length is not None):
        command.error("--max-length and --min-length count the prompt, which grows in a --chat: use --max-new-tokens")
    if options.mesh is None and (options.distributed or options.coordinator is not None):
        command.error("several processes divide the weights over their devices: add --mesh DATAxMODEL")
    if options.coordinator is None and (options.processes is not None or options.process is not None):
        command.error("--processes and --process need --coordinator HOST:PORT, the address of process 0")
    if options.processes is not None and (options.process or 0) >= options.processes:
        command.error(f"--process {options.process} must be less than --processes {options.processes}")
    if (options.distributed or options.coordinator is not None) and (options.chat or options.input == "-"):
        command.error("--chat and --input - read stdin, which several processes do not share: write prompts to a file")
    if options.raw and (options.chat or options.system is not None):
        command.error("--raw disables the chat template, which --chat and --system need: choose one")
    return options


def generation_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `GenerationConfig` that the command line sets.

    A limit on the command line also clears the checkpoint's alternative limit.
    """
    values = {option.name: getattr(options, option.name) for option in OFFERED}
    fields = {name: value for name, value in values.items() if value is not None}
    for option in OFFERED:
        if option.instead_of and option.name in fields:
            fields.setdefault(option.instead_of, OPTIONS[option.instead_of].kind.neutral)
    return fields
