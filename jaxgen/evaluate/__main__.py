"""`python -m jaxgen.evaluate`: run lm-evaluation-harness tasks on a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgen import arguments
from jaxgen.cli import terminal
from jaxgen.errors import InputError, JaxgenError

PROGRAM = "python -m jaxgen.evaluate"
_MODEL = "jaxgen"  # the name of this model type in the harness


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, which is 2 for bad input."""
    try:
        options, rest = _parse(words)
        with terminal.ticking("starting"):
            try:
                import lm_eval.models  # makes the harness register its own models first
                from lm_eval.__main__ import cli_evaluate
                from lm_eval.api.registry import model_registry
            except ModuleNotFoundError as error:
                raise InputError(
                    f'{error.name} is missing: in the clone of jaxgen, run pip install -e ".[eval]"'
                ) from error
            assert lm_eval.models
            model_registry.register(_MODEL)(_model(options))
            sys.argv = [PROGRAM, "run", "--model", _MODEL, *rest]
            terminal.erase()  # the harness shows its own progress
            cli_evaluate()
        return 0
    except (JaxgenError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return arguments.BAD_INPUT


def _parse(words: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return jaxgen's options, and the remaining words (the harness's options)."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s --model DIR --tasks NAME ... [options]",
        description="Evaluate a checkpoint on lm-evaluation-harness tasks.",
        epilog="All other options are the harness's: --tasks, --num_fewshot, --limit, --include_path, --output_path, "
        "--log_samples, --apply_chat_template, --gen_kwargs, --use_cache, ...: see python -m lm_eval run --help.",
        allow_abbrev=False,
        formatter_class=arguments.Help,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a checkpoint: its directory, its URL, or its id on the hub")
    add("--adapter", type=Path, metavar="DIR", help="a LoRA adapter for the model, as PEFT writes it")
    bits = "round the weights to 8 bits; none: convert 8-bit weights back"
    arguments.add_weights(add, "convert the weights (default: as in the checkpoint)", bits)
    add("--slots", type=arguments.count, default=32, metavar="N", help="answers generated at a time (default: 32)")
    tokens = "tokens scored at a time (default: 8192, on a CPU 1024)"
    add("--batch-tokens", type=arguments.count, metavar="N", help=tokens)
    longest = "maximum tokens of a text and its answer (default: the model's context)"
    add("--max-length", type=arguments.count, metavar="N", help=longest)
    most = "maximum tokens per answer if the task sets no limit (default: 256)"
    add("--max-gen-toks", type=arguments.count, default=256, metavar="N", help=most)
    keep = "keep compiled programs in the user's cache directory"
    add("--compile-cache", action=argparse.BooleanOptionalAction, default=True, help=keep)
    return parser.parse_known_args(words)


def _model(options: argparse.Namespace) -> type:
    """Return the class that the harness instantiates as the model."""
    from jaxgen.cli.answer import load_model, open_model
    from jaxgen.compile_cache import enable_cache
    from jaxgen.core.text.tokenizer import Tokenizer
    from jaxgen.evaluate.lm import JaxgenLM

    if options.compile_cache:
        enable_cache()
    source = open_model(options, [] if options.adapter is None else [options.adapter])

    class Loaded(JaxgenLM):
        def __init__(self, **given: Any):
            if unknown := given.keys() - {"batch_size", "max_batch_size", "device"}:  # the harness adds these options
                raise InputError(
                    f"--model_args has {min(unknown)}, which is not an option here: see --help for the model's options"
                )
            params, cfg = load_model(source, options.adapter, options, mesh=None)
            sizes = {"slots": options.slots, "batch_tokens": options.batch_tokens}
            sizes |= {"max_length": options.max_length, "max_gen_toks": options.max_gen_toks}
            super().__init__(params, cfg, Tokenizer.from_pretrained(source.path), name=options.model, **sizes)

    return Loaded


if __name__ == "__main__":
    sys.exit(main())
