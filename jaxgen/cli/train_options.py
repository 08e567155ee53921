"""The options of `jaxgen train`. This module does not import jax."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxgen import arguments

EPOCHS, WIDTH, WARMUP = 3, 1024, 0.03
FULL_RATE, LORA_RATE = 1e-5, 2e-4


def parser() -> arguments.Parser:
    """Return the command-line parser."""
    result = arguments.Parser(
        prog="jaxgen train",
        usage="jaxgen train --data FILE --model DIR --out DIR [options]",
        description="Fine-tune a checkpoint: all weights, or with --lora low-rank updates that are "
        "merged into them at the end. Progress goes to stderr.",
        epilog="To resume an interrupted run, repeat the command: it continues from the last saved state, in "
        "OUT.training. To continue a finished run, add --overwrite and increase --steps or --epochs. The losses are "
        "recorded in OUT/training.jsonl and drawn in OUT/training.svg.",
    )
    add = result.add_argument
    forms = 'JSONL: "messages", "conversations", "prompt" with "completion", or "text"'
    add("--data", type=arguments.file, metavar="FILE", help=forms)
    add("--eval-data", type=arguments.file, metavar="FILE", help="held-out data; its loss is reported before and after")
    add("--eval-every", type=arguments.count, metavar="N", help="also report the held-out loss every N steps")
    add("--keep-best", action="store_true", help="write the weights with the lowest held-out loss, not the last ones")
    stop = "stop after N evaluations in a row that did not lower the held-out loss (default: never)"
    add("--patience", type=arguments.count, metavar="N", help=stop)
    add("--model", metavar="DIR", help="a Hugging Face checkpoint: its directory, its URL, or its id on the hub")
    add("--out", type=arguments.path, metavar="DIR", help="the directory to create")
    add("--overwrite", action="store_true", help="replace --out, and the states of the run that wrote it")
    length = result.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=arguments.count, metavar="N", help=f"passes over the data (default: {EPOCHS})")
    length.add_argument("--steps", type=arguments.count, metavar="N", help="number of steps, instead of --epochs")
    add("--batch", type=arguments.count, default=8, metavar="N", help="rows per step (default: 8)")
    add("--width", type=arguments.count, metavar="N", help=f"tokens per row (default: {WIDTH} or the model's context)")
    rate = f"(default: {FULL_RATE}; with --lora {LORA_RATE})"
    add("--learning-rate", type=arguments.positive, metavar="X", help=rate)
    rising = f"share of steps with a rising rate (default: {WARMUP})"
    add("--warmup", type=arguments.share, default=WARMUP, metavar="X", help=rising)
    add("--weight-decay", type=arguments.share, default=0.0, metavar="X", help="(default: 0)")
    add("--clip", type=arguments.positive, default=1.0, metavar="X", help="maximum norm of the gradient (default: 1)")
    add("--accumulate", type=arguments.count, default=1, metavar="N", help="split each batch into N parts, run in turn")
    add("--remat", action="store_true", help="recompute layers instead of storing their results")
    add("--router-loss", action="store_true", help="add the loss that balances the use of experts")
    arguments.add_weights(add, "for computing (default: bfloat16 for bfloat16 weights, else float32)")
    add("--lora", type=arguments.natural, default=0, metavar="RANK", help="rank of updates (default: 0, all weights)")
    add("--lora-alpha", type=arguments.positive, metavar="X", help="scale the updates by X / RANK (default: 2 * RANK)")
    targets = "matrices that get updates, separated by commas, such as q_proj,v_proj (default: all of a layer)"
    add("--targets", type=_names, metavar="NAMES", help=targets)
    kept = "write the updates to --out as an adapter in PEFT's format, instead of a checkpoint with the updates"
    add("--save-adapter", action="store_true", help=kept)
    saved = "steps between saved states (default: 100)"
    add("--save-every", type=arguments.count, default=100, metavar="N", help=saved)
    add("--report-every", type=arguments.count, default=10, metavar="N", help="steps between reports (default: 10)")
    device = "cpu, gpu or tpu, or one of several: gpu:1 (default: jax's)"
    add("--device", type=arguments.device, metavar="NAME", help=device)
    keep = "keep compiled programs in the user's cache directory, so that the next start is fast"
    add("--compile-cache", action=argparse.BooleanOptionalAction, default=True, help=keep)
    add("--debug", action="store_true", help="show tracebacks, and which programs are compiled and why")
    seed = "seed of row order, updates and dropout (default: 0)"
    add("--seed", type=arguments.natural, default=0, metavar="N", help=seed)
    return result


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after "train" into options; raise an `InputError` if one is unknown, missing or invalid."""
    command = parser()
    options, rest = command.read(words)
    if rest:
        command.error(f"{rest[0]!r} does not belong to an option")
    for name, what in (("data", "JSONL file"), ("model", "checkpoint to start from"), ("out", "directory to create")):
        if getattr(options, name) is None:
            command.error(f"--{name} is missing: name the {what}")
    if options.batch % options.accumulate:
        command.error(f"--batch {options.batch} cannot be divided into --accumulate {options.accumulate} parts")
    _check_pairs(command, options)
    return options


def _check_pairs(command: arguments.Parser, options: argparse.Namespace) -> None:
    """Raise an error if an option is given without another one that it needs."""
    needs = {
        "--lora-alpha": (options.lora_alpha, "scales low-rank updates: set --lora RANK too", options.lora),
        "--targets": (options.targets, "chooses where low-rank updates are: set --lora RANK too", options.lora),
        "--save-adapter": (options.save_adapter, "writes low-rank updates: set --lora RANK too", options.lora),
        "--eval-every": (options.eval_every, "evaluates held-out data: set --eval-data FILE too", options.eval_data),
        "--keep-best": (options.keep_best, "compares evaluations: set --eval-every N too", options.eval_every),
        "--patience": (options.patience, "counts evaluations: set --eval-every N too", options.eval_every),
    }
    for name, (given, reason, needed) in needs.items():
        if given and not needed:
            command.error(f"{name} {reason}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
