"""The command: `python -m jaxgen --model DIR "PROMPT"`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import jax

from convert import load_hf
from jaxgen.errors import JaxgenError
from jaxgen.generate import generate
from jaxgen.generation_config import GenerationConfig
from jaxgen.model.config import DTYPES
from jaxgen.streaming import TextStreamer
from jaxgen.tokenizer import Batch, Tokenizer

_DEFAULT_NEW_TOKENS = 256

# Options of GenerationConfig by their type; the command spells them with hyphens.
_KNOBS = {
    "max_new_tokens": (int, f"the most tokens to generate (default {_DEFAULT_NEW_TOKENS}, or what the model holds)"),
    "max_length": (int, "the most tokens of prompt and answer together"),
    "min_new_tokens": (int, "no end before so many generated tokens"),
    "min_length": (int, "no end before so many tokens of prompt and answer together"),
    "temperature": (float, "divide the scores by this; above 1 is wilder"),
    "top_k": (int, "draw from the k likeliest tokens; 0 for all"),
    "top_p": (float, "draw from the likeliest tokens that make up this mass"),
    "min_p": (float, "draw from tokens at least this fraction as likely as the likeliest"),
    "repetition_penalty": (float, "above 1 discourages tokens that were used before"),
    "num_return_sequences": (int, "answers to draw for the prompt; more than one are not streamed"),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m jaxgen",
        description="Continue a prompt with a Qwen2 or Llama checkpoint. The text goes to stdout as it comes.",
        epilog="An option left out is as the checkpoint's generation_config.json says.",
    )
    result.add_argument("prompt", metavar="PROMPT")
    result.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face checkpoint directory")
    result.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    result.add_argument("--dtype", choices=DTYPES, help="convert the weights to this (default: the checkpoint's)")
    result.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    result.add_argument(
        "--do-sample", action=argparse.BooleanOptionalAction, default=None, help="draw tokens, or take the likeliest"
    )
    for name, (kind, text) in _KNOBS.items():
        result.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status: 0, 2 for bad input (one line on stderr), 130 for Ctrl-C."""
    options = parser().parse_args(arguments)
    try:
        _run(options)
        sys.stdout.flush()
    except (JaxgenError, TypeError) as error:
        print(f"jaxgen: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the text has gone; what is buffered for them must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _run(options: argparse.Namespace) -> None:
    tokenizer = Tokenizer.from_pretrained(options.model)
    if tokenizer.chat_template is not None and not options.raw:
        batch = tokenizer.chat([[{"role": "user", "content": options.prompt}]])
    else:
        batch = tokenizer.batch([options.prompt])
    params, cfg = load_hf(options.model, dtype=options.dtype)
    cfg = _configure(cfg, options, batch)
    key = jax.random.key(options.seed) if cfg.do_sample else None
    if cfg.num_return_sequences == 1:
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        generate(params, batch.ids, key, cfg, attention_mask=batch.attention_mask, streamer=streamer)
    else:
        out = generate(params, batch.ids, key, cfg, attention_mask=batch.attention_mask)
        print("\n\n".join(tokenizer.decode_batch(out)))


def _configure(cfg: GenerationConfig, options: argparse.Namespace, batch: Batch) -> GenerationConfig:
    fields: dict[str, Any] = {name: getattr(options, name) for name in (*_KNOBS, "do_sample")}
    cfg = cfg.replace(**{name: value for name, value in fields.items() if value is not None})
    length_given = cfg.on("max_new_tokens") or cfg.max_length != GenerationConfig.max_length
    if not length_given:
        assert cfg.model is not None
        room = cfg.model.max_position_embeddings - batch.ids.shape[1]
        cfg = cfg.replace(max_new_tokens=max(1, min(_DEFAULT_NEW_TOKENS, room)))
    return cfg
