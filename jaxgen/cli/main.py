"""The command: `jaxgen "PROMPT"`, `jaxgen --chat`, `jaxgen --input FILE`, `jaxgen train ...`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert import CheckpointError, load_hf
from convert.hf import open_checkpoint
from convert.hub import local_directory
from jaxgen import demo
from jaxgen.cli import arguments
from jaxgen.cli.arguments import BAD_INPUT, BROKEN_PIPE, FAILED, INTERRUPTED
from jaxgen.cli.batch import read_lines, write_answers
from jaxgen.cli.chat import Chat, converse
from jaxgen.cli.timing import Stats
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.reference import OPTIONS
from jaxgen.errors import InputError, JaxgenError, JaxgenWarning
from jaxgen.generation import generate
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.model.config import DTYPES
from jaxgen.request.memory import check_memory
from jaxgen.text.streaming import TextStreamer
from jaxgen.text.tokenizer import Batch, Tokenizer

DEFAULT_NEW_TOKENS = 256
SHOWN_PROBLEMS = 3
PROBLEM_WIDTH = 240  # a cut file would name all tensors that it lost

# Fields of GenerationConfig, which the command spells with hyphens. Of LIMITS, one of each line can be given.
LIMITS = (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length"))
WHOLE_NUMBERS = (
    "top_k num_return_sequences no_repeat_ngram_size encoder_no_repeat_ngram_size prefill_chunk_size".split()
)
FLOATS = (
    "temperature top_h top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty "
    "guidance_scale max_time"
).split()
SWITCHES = ("do_sample", "renormalize_logits", "remove_invalid_values")
STRUCTURED = (
    "eos_token_id suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id bad_words_ids "
    "sequence_bias exponential_decay_length_penalty forced_decoder_ids watermarking_config"
).split()
NOTES = {
    "max_new_tokens": f" (default: the checkpoint's, or {DEFAULT_NEW_TOKENS})",
    "num_return_sequences": "; several come at the end, a blank line between them",
    "sequence_bias": ", here [[[id, ...], bias], ...]",
}


def parser() -> arguments.Parser:
    """Return the parser of the command line."""
    result = arguments.Parser(
        prog="jaxgen",
        usage='jaxgen [options] "PROMPT"\n       jaxgen [options] --chat\n       jaxgen [options] --input FILE\n'
        "       jaxgen train --help",
        description="Continue a prompt with a Qwen2 or Llama checkpoint; without --model with the small one that comes "
        "with jaxgen. Text goes to stdout as it comes, everything else to stderr.",
        epilog="Where an option of generation is left out, the checkpoint's generation_config.json holds.",
    )
    add = result.add_argument
    add("prompt", metavar="PROMPT", nargs="?", help="put it in quotes")
    add("--model", metavar="DIR", help="a Hugging Face checkpoint's directory, or the id of one on the hub")
    add("--chat", action="store_true", help="hold a conversation; /help tells what can be said besides")
    add("--input", metavar="FILE", help="one prompt per line, or JSONL with prompt or messages; - is stdin")
    add("--output", metavar="FILE", help="where the answers to --input go, as JSONL (default: stdout)")
    add("--batch-size", type=arguments.count, default=8, metavar="N", help="prompts of --input at once (default: 8)")
    add("--system", metavar="TEXT", help="a system message before each conversation")
    add("--raw", action="store_true", help="take prompts as they are, without the chat template")
    add("--dtype", choices=DTYPES, help="convert the weights (default: as in the checkpoint)")
    add("--seed", type=arguments.seed, default=0, help="of what is drawn (default: 0)")
    add("--stats", action="store_true", help="say at the end how long loading, compiling and generating took")
    add("--negative-prompt", metavar="TEXT", help="what --guidance-scale goes away from (default: the last token)")
    add("--regex", metavar="PATTERN", help="answer with text that this regular expression matches")
    add("--json-schema", metavar="FILE", help="answer with JSON of this schema")
    for limits in LIMITS:
        group = result.add_mutually_exclusive_group()
        for name in limits:
            group.add_argument(_option(name), type=arguments.whole, metavar="N", help=_help(name))
    for name in SWITCHES:
        add(_option(name), action=argparse.BooleanOptionalAction, help=_help(name))
    for name in WHOLE_NUMBERS:
        add(_option(name), type=arguments.whole, metavar="N", help=_help(name))
    for name in FLOATS:
        add(_option(name), type=float, metavar="X", help=_help(name))
    add("--stop-strings", action="append", metavar="TEXT", help="end when this was said; can be given several times")
    for name in STRUCTURED:
        add(_option(name), type=arguments.json_value, metavar="JSON", help=_help(name))
    return result


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0: done; 1: the machine failed, for lack of memory for example; 2: bad input; 130: Ctrl-C; 141: nobody
    reads the text any more. What is wrong is said in one line on stderr, and so is each warning.
    """
    words = sys.argv[1:] if words is None else words
    with warnings.catch_warnings():
        warnings.simplefilter("always", JaxgenWarning)
        warnings.showwarning = _show_warning
        try:
            if words[:1] == ["train"]:
                from jaxgen.cli import train  # optax takes a second to import

                train.main(words[1:])
            else:
                _run(_parse(words))
            print(end="", flush=True)
            return 0
        except JaxgenError as error:
            say("error", _shortened(error) if isinstance(error, CheckpointError) else error)
            return BAD_INPUT
        except BrokenPipeError:
            _discard_stdout()
            return BROKEN_PIPE
        except OSError as error:
            say("error", error)
            _discard_stdout()
            return BAD_INPUT
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            say("error", str(error) or "out of memory")
            return FAILED
        except KeyboardInterrupt:
            return INTERRUPTED


def _run(options: argparse.Namespace) -> None:
    # Everything is checked before the weights are read, which can take long.
    stats = Stats()
    directory = local_directory(options.model) if options.model is not None else demo.PATH
    cfg = _with_options(open_checkpoint(directory).cfg, options)
    assert cfg.model is not None
    tokenizer = Tokenizer.from_pretrained(directory)
    room = functools.partial(budget, cfg, options)
    lines = read_lines(options.input, options.system, tokenizer, options.raw, room) if options.input else None
    batch = _encode(tokenizer, options) if lines is None and not options.chat else None
    chat = Chat(tokenizer, cfg.model.context_length, options.system) if options.chat else None
    rows, width = (1, 1) if batch is None else batch.ids.shape
    if lines is None:
        cfg = cfg.replace(max_new_tokens=room(0 if batch is None else width))
    else:
        rows, width = min(options.batch_size, len(lines)), max(len(line.ids) for line in lines)
        cfg = cfg.replace(max_new_tokens=max(line.budget for line in lines))
    more = _more(cfg, options, tokenizer)
    streams = 2 if cfg.on("guidance_scale") else 1
    check_memory(directory, cfg, rows * streams, width, dtype=options.dtype)
    with stats.loading():
        params, loaded = load_hf(directory, dtype=options.dtype)
    cfg = cfg.replace(model=loaded.model)

    key = jax.random.key(options.seed) if cfg.do_sample else None
    if chat is not None:
        converse(chat, params, cfg, key, stats, more)
    elif lines is not None:
        write_answers(lines, params, cfg, key, tokenizer, options.batch_size, options.output, stats, more)
    elif batch is not None:
        _answer(batch, params, cfg, key, tokenizer, stats, more)
    if options.stats:
        for line in stats.lines():
            say("stats", line)


def _more(cfg: GenerationConfig, options: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what generate() takes besides prompts and config."""
    assert cfg.model is not None
    more: dict[str, Any] = {"tokenizer": tokenizer}
    if options.negative_prompt is not None:
        if not cfg.on("guidance_scale"):
            raise InputError("--negative-prompt is for --guidance-scale: give that too")
        more["negative_prompt_ids"] = _encode_text(tokenizer, options, options.negative_prompt).ids
    if options.regex is not None:
        more["prefix_allowed_tokens_fn"] = TokenAutomaton.from_regex(
            options.regex, tokenizer, vocab_size=cfg.model.vocab_size
        )
    if options.json_schema is not None:
        schema = Path(options.json_schema).read_text("utf-8")
        more["prefix_allowed_tokens_fn"] = TokenAutomaton.from_json_schema(
            schema, tokenizer, vocab_size=cfg.model.vocab_size
        )
    return more


def _answer(
    batch: Batch, params, cfg: GenerationConfig, key, tokenizer: Tokenizer, stats: Stats, more: dict[str, Any]
) -> None:
    if cfg.num_return_sequences == 1:
        streamer = stats.watch(TextStreamer(tokenizer, skip_prompt=True))
        generate(params, batch.ids, key, cfg, attention_mask=batch.attention_mask, streamer=streamer, **more)
        return
    with stats.generating() as generated:
        out = generate(params, batch.ids, key, cfg, attention_mask=batch.attention_mask, **more)
        generated(out.lengths)
    print("\n\n".join(tokenizer.decode_batch(out)))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    command = parser()
    options, rest = command.read(words)
    if rest:
        command.error(f"{rest[0]!r} comes after the prompt {options.prompt!r}: put the whole prompt in quotes")
    ways = {"a prompt": options.prompt is not None, "--chat": options.chat, "--input": options.input is not None}
    chosen = [name for name, given in ways.items() if given]
    if not chosen:
        command.error("no prompt: write it at the end, in quotes, or use --chat or --input")
    if len(chosen) > 1:
        command.error(f"{' and '.join(chosen)} exclude each other: choose one")
    if options.regex is not None and options.json_schema is not None:
        command.error("--regex and --json-schema exclude each other: choose one")
    if options.output is not None and options.input is None:
        command.error("--output is for the answers to --input: give that too, or redirect stdout")
    if options.chat and (options.num_return_sequences or 1) > 1:
        command.error("--chat has one answer: leave out --num-return-sequences")
    if options.chat and (options.max_length is not None or options.min_length is not None):
        command.error("--max-length and --min-length count the prompt, which grows in a --chat: use --max-new-tokens")
    if options.raw and (options.chat or options.system is not None):
        command.error("--raw means no chat template, which --chat and --system need: choose one")
    return options


def _encode(tokenizer: Tokenizer, options: argparse.Namespace) -> Batch:
    if tokenizer.chat_template is None or options.raw:
        if options.system is not None:
            raise InputError("--system needs a chat template, which this tokenizer lacks: put the text into the prompt")
        if not options.prompt and not tokenizer.encode(""):
            raise InputError("the prompt is empty and this tokenizer puts no BOS token in front: write a prompt")
    return _encode_text(tokenizer, options, options.prompt)


def _encode_text(tokenizer: Tokenizer, options: argparse.Namespace, text: str) -> Batch:
    if tokenizer.chat_template is None or options.raw:
        return tokenizer.batch([text])
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return tokenizer.chat([[*system, {"role": "user", "content": text}]])


def _with_options(cfg: GenerationConfig, options: argparse.Namespace) -> GenerationConfig:
    """Put the options into the checkpoint's config."""
    names = (*WHOLE_NUMBERS, *FLOATS, *SWITCHES, *STRUCTURED, "stop_strings", "max_new_tokens")
    names += ("min_new_tokens", "min_length")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    # What the command says about a limit wins over what the checkpoint says about the other form of it.
    if "min_length" in given:
        given["min_new_tokens"] = None
    elif "min_new_tokens" in given:
        given["min_length"] = 0
    return cfg.replace(**given)


def budget(cfg: GenerationConfig, options: argparse.Namespace, prompt: int) -> int:
    """Return how many tokens may follow a prompt of so many."""
    assert cfg.model is not None
    held = cfg.model.context_length
    if prompt >= held:
        raise InputError(f"the prompt has {prompt} tokens and the model holds {held}, answer included: shorten it")
    if options.max_length is not None:
        if options.max_length <= prompt:
            raise InputError(
                f"--max-length {options.max_length} counts the prompt, which has {prompt} tokens: raise it, "
                "or give --max-new-tokens"
            )
        new_tokens = int(options.max_length) - prompt
    elif options.max_new_tokens is not None:
        new_tokens = int(options.max_new_tokens)
    else:
        return min(_default_new_tokens(cfg, prompt), held - prompt)
    if prompt + new_tokens > held:
        raise InputError(
            f"the model holds {held} tokens, of which the prompt takes {prompt}: "
            f"--max-new-tokens can be {held - prompt} at most"
        )
    return new_tokens


def _default_new_tokens(cfg: GenerationConfig, prompt: int) -> int:
    if cfg.on("max_new_tokens"):
        return int(np.max(np.asarray(cfg.max_new_tokens)))
    if cfg.max_length > prompt and cfg.max_length != GenerationConfig.max_length:
        return cfg.max_length - prompt
    return DEFAULT_NEW_TOKENS


def _help(name: str) -> str:
    return OPTIONS[name].text.replace("%", "%%") + NOTES.get(name, "")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shortened(error: CheckpointError) -> str:
    shown = [
        textwrap.shorten(problem, PROBLEM_WIDTH, placeholder=" ...") for problem in error.problems[:SHOWN_PROBLEMS]
    ]
    rest = error.problems[SHOWN_PROBLEMS:]
    return "; ".join(shown) + (f"; and {len(rest)} more" if rest else "")


def say(kind: str, text: object) -> None:
    """Print one line on stderr."""
    print(f"jaxgen: {kind}:", *(line.strip() for line in str(text).splitlines()), file=sys.stderr)


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    say("warning", message)


def _discard_stdout() -> None:
    """Let nothing that is still buffered fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
