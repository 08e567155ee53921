"""The command: `python -m jaxgen --model DIR "PROMPT"`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np

from convert import CheckpointError, load_hf
from convert.hf import open_checkpoint
from jaxgen.errors import InputError, JaxgenError, JaxgenWarning
from jaxgen.generate import generate
from jaxgen.generation_config import GenerationConfig
from jaxgen.model.config import DTYPES, ModelConfig
from jaxgen.streaming import TextStreamer
from jaxgen.tokenizer import Batch, Tokenizer

FAILED, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
DEFAULT_NEW_TOKENS = 256
SHOWN_PROBLEMS = 3
PROBLEM_WIDTH = 240  # a cut file would name all tensors that it lost

# Fields of GenerationConfig, which the command spells with hyphens. Of LIMITS, one of each line can be given.
LIMITS = (
    {
        "max_new_tokens": f"the most tokens to generate (default: the checkpoint's, or {DEFAULT_NEW_TOKENS})",
        "max_length": "the most tokens of prompt and answer together",
    },
    {
        "min_new_tokens": "no end before so many generated tokens",
        "min_length": "no end before so many tokens of prompt and answer together",
    },
)
WHOLE_NUMBERS = {
    "top_k": "draw from the k likeliest tokens; 0 for all",
    "num_return_sequences": "answers to draw; several come at the end, a blank line between them",
}
FLOATS = {
    "temperature": "divide the scores by this; above 1 is wilder",
    "top_p": "draw from the likeliest tokens that make up this mass",
    "min_p": "draw from tokens at least this fraction as likely as the likeliest",
    "repetition_penalty": "above 1 discourages tokens that were there before",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; it raises InputError where argparse would exit."""
    result = _Parser(
        prog="python -m jaxgen",
        usage='python -m jaxgen --model DIR [options] "PROMPT"',
        description="Continue a prompt with a Qwen2 or Llama checkpoint. Text goes to stdout as it comes.",
        epilog="Where an option of generation is left out, the checkpoint's generation_config.json holds.",
        allow_abbrev=False,
    )
    result.add_argument("prompt", metavar="PROMPT", nargs="?", help="put it in quotes")
    result.add_argument("--model", metavar="DIR", help="a Hugging Face checkpoint's directory")
    result.add_argument("--raw", action="store_true", help="take the prompt as it is, without the chat template")
    result.add_argument("--dtype", choices=DTYPES, help="convert the weights (default: as in the checkpoint)")
    result.add_argument("--seed", type=_seed, default=0, help="of what is drawn (default: 0)")
    result.add_argument(
        "--do-sample",
        action=argparse.BooleanOptionalAction,
        help="draw tokens, or take the likeliest",
    )
    for limits in LIMITS:
        group = result.add_mutually_exclusive_group()
        for name, text in limits.items():
            group.add_argument(_option(name), type=_whole, metavar="N", help=text)
    for name, text in WHOLE_NUMBERS.items():
        result.add_argument(_option(name), type=_whole, metavar="N", help=text)
    for name, text in FLOATS.items():
        result.add_argument(_option(name), type=float, metavar="X", help=text)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0: done; 1: the machine failed, for lack of memory for example; 2: bad input; 130: Ctrl-C; 141: nobody
    reads the text any more. What is wrong is said in one line on stderr, and so is each warning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", JaxgenWarning)
        warnings.showwarning = _show_warning
        try:
            _run(_parse(arguments))
            print(end="", flush=True)
            return 0
        except JaxgenError as error:
            _say("error", _shortened(error) if isinstance(error, CheckpointError) else error)
            return BAD_INPUT
        except BrokenPipeError:
            _discard_stdout()
            return BROKEN_PIPE
        except OSError as error:
            _say("error", error)
            _discard_stdout()
            return BAD_INPUT
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            _say("error", str(error) or "out of memory")
            return FAILED
        except KeyboardInterrupt:
            return INTERRUPTED


def _run(options: argparse.Namespace) -> None:
    # Everything is checked before the weights are read, which can take long.
    cfg = open_checkpoint(options.model).cfg
    tokenizer = Tokenizer.from_pretrained(options.model)
    batch = _encode(tokenizer, options)
    cfg = _configure(cfg, options, batch.ids.shape[1])
    params, loaded = load_hf(options.model, dtype=options.dtype)
    cfg = cfg.replace(model=loaded.model)
    key = jax.random.key(options.seed) if cfg.do_sample else None
    if cfg.num_return_sequences == 1:
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        generate(params, batch.ids, key, cfg, attention_mask=batch.attention_mask, streamer=streamer)
    else:
        out = generate(params, batch.ids, key, cfg, attention_mask=batch.attention_mask)
        print("\n\n".join(tokenizer.decode_batch(out)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    command = parser()
    options, rest = command.parse_known_args(arguments)
    for word in rest:
        if word.startswith("-"):
            known = [name for action in command._actions for name in action.option_strings]
            near = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            command.error(f"unknown option {word}" + (f": did you mean {near[0]}?" if near else ""))
    if rest:
        command.error(f"{rest[0]!r} comes after the prompt {options.prompt!r}: put the whole prompt in quotes")
    if options.model is None:
        command.error("no model: give the directory of a checkpoint, --model DIR")
    if options.prompt is None:
        command.error("no prompt: write it at the end, in quotes")
    if not Path(options.model).is_dir():
        command.error(f"--model {options.model} is no directory: give that of a Hugging Face checkpoint")
    return options


def _encode(tokenizer: Tokenizer, options: argparse.Namespace) -> Batch:
    if tokenizer.chat_template is not None and not options.raw:
        return tokenizer.chat([[{"role": "user", "content": options.prompt}]])
    if not options.prompt and not tokenizer.encode(""):
        raise InputError("the prompt is empty and this tokenizer puts no BOS token in front: write a prompt")
    return tokenizer.batch([options.prompt])


def _configure(cfg: GenerationConfig, options: argparse.Namespace, prompt: int) -> GenerationConfig:
    """Put the options into the checkpoint's config and settle how many tokens follow the prompt's."""
    names = (*WHOLE_NUMBERS, *FLOATS, "do_sample", "max_new_tokens", "min_new_tokens", "min_length")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    # What the command says about a limit wins over what the checkpoint says about the other form of it.
    if "min_length" in given:
        given["min_new_tokens"] = None
    elif "min_new_tokens" in given:
        given["min_length"] = 0
    cfg = cfg.replace(**given)
    assert cfg.model is not None
    held = _held(cfg.model)
    if prompt >= held:
        raise InputError(f"the prompt has {prompt} tokens and the model holds {held}, answer included: shorten it")
    if options.max_length is not None:
        if options.max_length <= prompt:
            raise InputError(
                f"--max-length {options.max_length} counts the prompt, which has {prompt} tokens: raise it, "
                "or give --max-new-tokens"
            )
        new_tokens = options.max_length - prompt
    elif options.max_new_tokens is not None:
        new_tokens = options.max_new_tokens
    else:
        return cfg.replace(max_new_tokens=min(_default_new_tokens(cfg, prompt), held - prompt))
    if prompt + new_tokens > held:
        raise InputError(
            f"the model holds {held} tokens, of which the prompt takes {prompt}: "
            f"--max-new-tokens can be {held - prompt} at most"
        )
    return cfg.replace(max_new_tokens=new_tokens)


def _held(model: ModelConfig) -> int:
    """Return how many tokens the model's positions are made for; a scaled RoPE stretches them."""
    original = model.rope.original_max_position_embeddings or model.max_position_embeddings
    return max(model.max_position_embeddings, int(original * (model.rope.factor or 1)))


def _default_new_tokens(cfg: GenerationConfig, prompt: int) -> int:
    if cfg.on("max_new_tokens"):
        return int(np.max(np.asarray(cfg.max_new_tokens)))
    if cfg.max_length > prompt and cfg.max_length != GenerationConfig.max_length:
        return cfg.max_length - prompt
    return DEFAULT_NEW_TOKENS


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from error
    if abs(value) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text} is out of range: stay below 2**31")
    return value


def _seed(text: str) -> int:
    seed = _whole(text)
    if seed < 0:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0")
    return seed


def _shortened(error: CheckpointError) -> str:
    shown = [
        textwrap.shorten(problem, PROBLEM_WIDTH, placeholder=" ...") for problem in error.problems[:SHOWN_PROBLEMS]
    ]
    rest = error.problems[SHOWN_PROBLEMS:]
    return "; ".join(shown) + (f"; and {len(rest)} more" if rest else "")


def _say(kind: str, text: object) -> None:
    print(f"jaxgen: {kind}:", *(line.strip() for line in str(text).splitlines()), file=sys.stderr)


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    _say("warning", message)


def _discard_stdout() -> None:
    """Let nothing that is still buffered fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
