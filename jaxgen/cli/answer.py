"""The `jaxgen` command's work: load a checkpoint and answer a prompt, a conversation or a file of prompts."""

from __future__ import annotations

import argparse
import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert import load_hf
from convert.hf import open_checkpoint
from convert.hub import local_directory
from jaxgen import demo
from jaxgen.cli.batch import check_target, prompt_ids, read_lines, write_answers
from jaxgen.cli.chat import Chat, converse
from jaxgen.cli.options import generation_fields
from jaxgen.cli.printing import generate_and_print
from jaxgen.cli.timing import Stats
from jaxgen.config.generation_config import GenerationConfig, model_of
from jaxgen.errors import InputError
from jaxgen.grammar.keywords import LONGEST
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.request.assistant import check_assistant
from jaxgen.request.memory import check_memory
from jaxgen.text.tokenizer import Batch, Tokenizer

DEFAULT_NEW_TOKENS = 256


def answer(options: argparse.Namespace) -> Stats:
    """Print the answers to stdout, or to --output; return the timings.

    All input is checked before the weights are read, which can take long.

    Raises:
        JaxgenError: bad input, or a checkpoint that cannot be read.
        OSError: a file that cannot be read or written.
    """
    stats = Stats()
    directory = local_directory(options.model) if options.model is not None else demo.PATH
    cfg = open_checkpoint(directory).cfg.replace(**generation_fields(options))
    tokenizer = Tokenizer.from_pretrained(directory)
    if cfg.token_healing and tokenizer.chat_template is not None and not options.raw:
        raise InputError(
            "--token-healing continues the prompt's own text, and the chat template ends in its own: add --raw, or "
            "leave it out"
        )
    if options.chat and cfg.num_return_sequences > 1:
        raise InputError(
            f"--chat gives one answer per message, and the checkpoint sets num_return_sequences="
            f"{cfg.num_return_sequences}: add --num-return-sequences 1"
        )
    # Process 0 writes the answers; the others discard their stdout.
    target = options.output if options.output is not None and jax.process_index() == 0 else None
    check_target(target)
    room = functools.partial(budget, cfg, options)
    lines = read_lines(options.input, options.system, tokenizer, options.raw, room) if options.input else None
    batch = _encode(tokenizer, options, options.prompt) if lines is None and not options.chat else None
    chat = Chat(tokenizer, model_of(cfg).context_length, options.system) if options.chat else None
    rows, width = (1, 1) if batch is None else batch.ids.shape
    if lines is None:
        cfg = cfg.replace(max_new_tokens=room(0 if batch is None else width))
    else:
        rows, width = min(options.batch_size, len(lines)), max(len(line.ids) for line in lines)
        cfg = cfg.replace(max_new_tokens=max(line.budget for line in lines))
    more = _further_arguments(cfg, options, tokenizer)
    streams = 2 if cfg.on("guidance_scale") else 1
    assistant = None if options.assistant is None else local_directory(options.assistant)
    if assistant is not None:
        check_assistant(open_checkpoint(assistant).cfg, cfg)
    if options.mesh is None:
        check_memory(directory, cfg, rows * streams, width, dtype=options.dtype, assistant=assistant)
    with stats.loading():
        mesh = None if options.mesh is None else mesh_of_devices(options.mesh)
        params, loaded = load_hf(directory, dtype=options.dtype, mesh=mesh)
        if assistant is not None:
            more["assistant"] = load_hf(assistant, dtype=options.dtype, mesh=mesh)
    cfg = cfg.replace(model=loaded.model)

    key = jax.random.key(options.seed) if cfg.do_sample else None
    if chat is not None:
        converse(chat, params, cfg, key, stats, more)
    elif lines is not None:
        write_answers(lines, params, cfg, key, tokenizer, options.batch_size, target, stats, more)
    elif batch is not None:
        mask = batch.attention_mask
        generate_and_print(params, batch.ids, key, cfg, stats, attention_mask=mask, **more)
    return stats


def mesh_of_devices(sizes: tuple[int, int]) -> jax.sharding.Mesh:
    """Return a mesh of all devices, those of other processes too, with `sizes` of the axes data and model."""
    if math.prod(sizes) != jax.device_count():
        raise InputError(
            f"--mesh {sizes[0]}x{sizes[1]} needs {math.prod(sizes)} devices, and there are {jax.device_count()}"
        )
    return jax.make_mesh(sizes, ("data", "model"))


def _further_arguments(cfg: GenerationConfig, options: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the further keywords of generate()."""
    more: dict[str, Any] = {"tokenizer": tokenizer}
    if options.negative_prompt is not None:
        if not cfg.on("guidance_scale"):
            raise InputError("--negative-prompt needs --guidance-scale: set that too")
        more["negative_prompt_ids"] = _encode(tokenizer, options, options.negative_prompt).ids
    vocab = model_of(cfg).vocab_size
    if options.regex is not None:
        more["prefix_allowed_tokens_fn"] = TokenAutomaton.from_regex(options.regex, tokenizer, vocab_size=vocab)
    if options.json_schema is not None:
        more["prefix_allowed_tokens_fn"] = _automaton(options.json_schema, tokenizer, vocab)
    return more


def _automaton(schema: Path, tokenizer: Tokenizer, vocab: int) -> TokenAutomaton:
    """Read a JSON schema; raise an error that names its file."""
    try:
        with schema.open("rb") as file:
            data = file.read(4 * LONGEST + 4)  # more is too long anyway
        return TokenAutomaton.from_json_schema(data.decode("utf-8-sig"), tokenizer, vocab_size=vocab)
    except OSError as error:
        raise InputError(f"{schema} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{schema} is not text in UTF-8: {error.reason} at byte {error.start + 1}") from error
    except InputError as error:
        raise InputError(f"{schema}: {error}") from error


def _encode(tokenizer: Tokenizer, options: argparse.Namespace, text: str) -> Batch:
    return tokenizer.pad([prompt_ids({"prompt": text}, options.system, tokenizer, options.raw)])


def budget(cfg: GenerationConfig, options: argparse.Namespace, prompt: int) -> int:
    """Return the maximum number of new tokens after a prompt of `prompt` tokens."""
    context = model_of(cfg).context_length
    if prompt >= context:
        raise InputError(
            f"the prompt has {prompt} tokens and the model's context is {context}, answer included: shorten it"
        )
    if options.max_length is not None:
        if options.max_length <= prompt:
            raise InputError(
                f"--max-length {options.max_length} counts the prompt, which has {prompt} tokens: raise it, "
                "or set --max-new-tokens"
            )
        new_tokens = int(options.max_length) - prompt
    elif options.max_new_tokens is not None:
        new_tokens = int(options.max_new_tokens)
    else:
        return min(_default_new_tokens(cfg, prompt), context - prompt)
    if prompt + new_tokens > context:
        raise InputError(
            f"the model's context is {context} tokens, and the prompt has {prompt}: "
            f"--max-new-tokens can be at most {context - prompt}"
        )
    return new_tokens


def _default_new_tokens(cfg: GenerationConfig, prompt: int) -> int:
    if cfg.on("max_new_tokens"):
        return int(np.max(np.asarray(cfg.max_new_tokens)))
    if cfg.max_length > prompt and cfg.max_length != GenerationConfig.max_length:
        return cfg.max_length - prompt
    return DEFAULT_NEW_TOKENS
