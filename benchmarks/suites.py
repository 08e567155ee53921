"""Benchmarks with whole checkpoints: jaxgen and other programs run in turn, on the same prompts.

python -m benchmarks decode --model DIR --environments DIR --programs jaxgen transformers llama.cpp:q8_0
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure, plots
from benchmarks.measure import Answer, Case, InTurn
from benchmarks.program import Failed, Program, spec
from jaxgen import arguments
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.model.config import ModelConfig

TEMPERATURE = {"do_sample": True, "temperature": 0.7, "top_k": 0}
NUCLEUS = TEMPERATURE | {"top_k": 20, "top_p": 0.8}
REPEATS = {"repeats": 16}  # repeats a text of 16 tokens, so that every drafted token is accepted
DRAFTED = 10


@dataclasses.dataclass(frozen=True)
class Choice:
    """Options to measure, the rows they need, and the label of the case they are compared with."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    against: str | None = None
    rows: int | None = None


@dataclasses.dataclass(frozen=True)
class Suite:
    """A subcommand. Its cases are all combinations of its rows, prompts and choices."""

    title: str
    columns: str
    rows: tuple[int, ...] = (1,)
    prompts: tuple[int, ...] = (128,)
    new_tokens: int = 64
    short: int | None = None  # None for half of new_tokens
    choices: dict[str, Choice] = dataclasses.field(default_factory=lambda: {"greedy": Choice()})
    new_processes: bool = False  # start a new process for each turn
    axis: str | None = None  # the plot's x-axis


_DECODE = "step decode_tokens_per_second weights_bytes_per_second bandwidth_share step_ratio others"
_PREFILL = "first prefill_tokens_per_second first_ratio others"
SUITES = {
    "prefill": Suite("Prefill", _PREFILL, rows=(1, 8), prompts=(128, 512), new_tokens=1, axis="prompt"),
    "decode": Suite("Prefill and decode of one row", f"first first_ratio {_DECODE}"),
    "batch": Suite("Decode against the size of the batch", _DECODE, rows=(1, 2, 4, 8, 16), axis="rows"),
    "context": Suite(
        "Decode against the length of the prompt",
        f"first first_ratio {_DECODE}",
        prompts=(128, 1024, 4096),
        new_tokens=128,
        short=8,
        axis="prompt",
    ),
    "capacity": Suite(
        "Caches that are larger than the text",
        "step decode_tokens_per_second cost step_ratio others",
        choices={f"{slots} tokens": Choice({"capacity": slots}, "256 tokens") for slots in (256, 4096, 32768)}
        | {"32768 tokens in 8 bits": Choice({"capacity": 32768, "cache_dtype": "int8"}, "256 tokens")},
    ),
    "sampling": Suite(
        "What sampling costs",
        "step decode_tokens_per_second cost step_ratio others",
        choices={
            "greedy": Choice(),
            "temperature": Choice(TEMPERATURE, "greedy"),
            "top-k, top-p": Choice(NUCLEUS, "greedy"),
            "top-k, top-p, repetition penalty": Choice(NUCLEUS | {"repetition_penalty": 1.1}, "greedy"),
        },
    ),
    "modes": Suite(
        "Decode modes",
        "step cost step_ratio others",
        new_tokens=88,
        choices={
            "greedy": Choice(),
            "greedy, 4 rows": Choice(rows=4),
            "4 beams": Choice({"num_beams": 4}, "greedy, 4 rows"),
            "2 x 2 diverse beams": Choice(
                {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, "greedy, 4 rows"
            ),
            "contrastive search, top-k 4": Choice({"penalty_alpha": 0.6, "top_k": 4}, "greedy, 4 rows"),
            "DoLa, high": Choice({"dola_layers": "high", "repetition_penalty": 1.2}, "greedy"),
            "greedy, a text that repeats": Choice(REPEATS),
            f"prompt lookup, {DRAFTED} tokens": Choice(
                REPEATS | {"prompt_lookup_num_tokens": DRAFTED}, "greedy, a text that repeats"
            ),
            f"draft by the first 4 layers, {DRAFTED} tokens": Choice(
                REPEATS
                | {
                    "assistant_early_exit": 4,
                    "num_assistant_tokens": DRAFTED,
                    "num_assistant_tokens_schedule": "constant",
                },
                "greedy, a text that repeats",
            ),
        },
    ),
    "train": Suite(
        "A training step of low-rank updates",
        "training_step trained_tokens_per_second training_step_ratio process_peak_bytes others",
        prompts=(512,),
        new_tokens=1,
        choices={"LoRA of rank 8": Choice({"lora": 8})},
    ),
    "startup": Suite(
        "Start and compilation", "start_seconds load_seconds first_call compiling cached_first_call", new_processes=True
    ),
    "load": Suite("Load", "load_seconds load_peak_bytes", new_processes=True),
    "memory": Suite("Memory", "import_peak_bytes load_peak_bytes peak_bytes device_peak_bytes", new_processes=True),
}

# Each figure's column heading, and the factor that converts the figure to the heading's unit.
FIGURES = {
    "first": ("first token, ms", 1e3),
    "prefill_tokens_per_second": ("prefill, tokens/s", 1),
    "step": ("step, ms", 1e3),
    "decode_tokens_per_second": ("decode, tokens/s", 1),
    "weights_bytes_per_second": ("weights, GB/s", 1e-9),
    "bandwidth_share": ("of the bandwidth, %", 100),
    "first_ratio": ("first token: time / that of the first program", 1),
    "step_ratio": ("step: time / that of the first program", 1),
    "cost": ("step: time / that of the case compared with", 1),
    "training_step": ("step, ms", 1e3),
    "trained_tokens_per_second": ("tokens/s", 1),
    "training_step_ratio": ("step: time / that of the first program", 1),
    "process_peak_bytes": ("peak memory of the process, MB", 1e-6),
    "others": ("cores busy with anything else", 1),
    "start_seconds": ("start, s", 1),
    "load_seconds": ("load, s", 1),
    "first_call": ("first call, s", 1),
    "compiling": ("of that not in the second call, s", 1),
    "cached_first_call": ("first call with what was compiled before, s", 1),
    "import_peak_bytes": ("peak memory after import, MB", 1e-6),
    "load_peak_bytes": ("after load, MB", 1e-6),
    "peak_bytes": ("at the end, MB", 1e-6),
    "device_peak_bytes": ("of the device, MB", 1e-6),
}


def main(name: str, words: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the table, all measurements and plots to the results directory.

    Raise SystemExit if a program failed in a case, after measuring the other cases.
    """
    suite = SUITES[name]
    args = _arguments(name, suite, words)
    config = json.loads((args.model / "config.json").read_text("utf-8"))
    cases = _cases(suite, args)
    measure.read_files(args.model)
    result = measure.heading() | {"subcommand": name, "title": suite.title, "columns": suite.columns.split()}
    result |= {"axis": suite.axis, "mesh": args.mesh, "model": _model(args.model, config)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_exit())
        programs = [
            stack.enter_context(Program(one, args.environments, args.mesh, args.device)) for one in args.programs
        ]
        if suite.new_processes:
            found = measure.in_new_processes(programs, cases[0], args.model, config["vocab_size"], args.rounds)
            file = _write(result | _facts(programs, found), args)
        else:
            in_turn = InTurn(programs, args.model, config["vocab_size"])
            # Write after each turn, so that an interrupted run loses at most one turn.
            for found in in_turn.measure(cases, args.rounds):
                if in_turn.probes:
                    result["probe"] = {
                        key: measure.summary(probe[key] for probe in in_turn.probes)
                        for key in ("bytes_per_second", "flops")
                    }
                file = _write(result | _facts(programs, found), args)
    print(file.with_suffix(".md").read_text("utf-8"))
    print(f"written: {', '.join(str(path) for path in (file, *plots.draw(file)))}", file=sys.stderr)
    failed = [
        f"{name}, {case['label']}: {own['failed']}"
        for case in found
        for name, own in case["programs"].items()
        if "failed" in own
    ]
    if failed:
        raise SystemExit("\n".join(failed))


@contextlib.contextmanager
def _as_exit() -> Iterator[None]:
    """If a program fails and the measurement cannot continue, exit with the error message."""
    try:
        yield
    except Failed as error:
        raise SystemExit(str(error)) from error


def _facts(programs: Sequence[Program], found: list[Answer]) -> Answer:
    rounds = max(len(own.get("turns", ())) for case in found for own in case["programs"].values())
    started = {program.name: program.facts for program in programs if program.facts}
    return {"rounds": rounds, "programs": started, "cases": found}


def _write(result: Answer, args: argparse.Namespace) -> Path:
    """Write the measurements as JSON and as a table; return the path of the JSON file."""
    first = next(iter(result["programs"].values()))
    folder = measure.folder(args.results, None if first["platform"] == "cpu" else first["device"])
    mesh = f"-mesh-{args.mesh[0]}x{args.mesh[1]}" if args.mesh else ""
    file = folder / f"{result['subcommand']}-{result['model']['name']}{mesh}{args.name and '-' + args.name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    file.with_suffix(".md").write_text(table(result), "utf-8")
    return file


def _model(path: Path, config: dict[str, Any]) -> Answer:
    """Return the model's name and the number of weights that take part in a step's matrix products."""
    shapes = param_shapes(ModelConfig.from_hf(config))
    looked_up = math.prod(shapes["model.embed_tokens.weight"]) if "lm_head.weight" in shapes else 0
    return {"name": path.resolve().name, "weights": sum(map(math.prod, shapes.values())) - looked_up}


def _cases(suite: Suite, args: argparse.Namespace) -> list[Case]:
    cases, chosen = [], suite.choices
    if args.only:
        named = [name for name in chosen if args.only in name]
        named += [one.against for name, one in chosen.items() if name in named and one.against]
        chosen = {name: one for name, one in chosen.items() if name in named}
    for prompt in args.prompt:
        for rows in args.rows:
            for name, choice in chosen.items():
                place = [f"{rows} x {prompt} tokens"] if len(args.rows) * len(args.prompt) > 1 else []
                label = ", ".join([name] * (len(suite.choices) > 1) + place) or f"{rows} x {prompt} tokens"
                against = choice.against and ", ".join([choice.against, *place])
                cases.append(
                    Case(label, choice.rows or rows, prompt, args.new_tokens, args.short, choice.options, against)
                )
    if not cases:
        raise SystemExit(f"--only {args.only}: there are {', '.join(suite.choices)}")
    return cases


def table(result: Answer) -> str:
    """Return a Markdown table of medians, with the smallest and largest values in brackets."""
    shown = [
        column
        for column in result["columns"]
        if any(column in own.get("figures", {}) for case in result["cases"] for own in case["programs"].values())
    ]
    lines = [
        f"# {result['title']}: {result['model']['name']}",
        "",
        f"{result['date'][:10]}, {result['machine']['cpu']}, {result['machine']['cores']} cores, load average "
        f"{result['load_average'][0]:.1f} at the start; medians of {result['rounds']} rounds, smallest and largest in "
        "brackets."
        + (f" jaxgen on a mesh of {result['mesh'][0]} x {result['mesh'][1]} devices." if result["mesh"] else ""),
    ]
    if "probe" in result:
        bandwidth, flops = (result["probe"][name]["median"] / 1e9 for name in ("bytes_per_second", "flops"))
        lines.append(f"Reading memory: {bandwidth:.1f} GB/s. Product of large bfloat16 matrices: {flops:,.0f} GFLOP/s.")
    lines += ["", "| case | program | " + " | ".join(FIGURES[column][0] for column in shown) + " |"]
    lines.append("|---|---|" + "---|" * len(shown))
    for case in result["cases"]:
        for program, own in case["programs"].items():
            reasons = [f"{kind}: {own[kind]}" for kind in ("refused", "failed") if kind in own]
            if reasons:
                cells = (reasons + [""] * len(shown))[: max(1, len(shown))]
            else:
                cells = [_cell(own["figures"].get(column), FIGURES[column][1]) for column in shown]
            note = f" ({own['note']})" if "note" in own else ""
            lines.append(f"| {case['label']}{note} | {program} | " + " | ".join(cells) + " |")
    builds: dict[str, list[str]] = {}
    for name, facts in result["programs"].items():
        builds.setdefault(_build(facts), []).append(name)
    lines += ["", *(f"- {', '.join(names)}: {build}" for build, names in builds.items()), ""]
    return "\n".join(lines)


def _cell(figure: dict[str, float] | None, factor: float) -> str:
    if figure is None:
        return "-"
    median, least, most = (_number(figure[name] * factor) for name in ("median", "min", "max"))
    return f"{median} ({least}–{most})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _build(facts: Answer) -> str:
    """Describe a program's device and versions and, if known, its build."""
    named = {"device": facts["device"]} | facts["versions"] | facts.get("build", {})
    return ", ".join(f"{name} {value}" for name, value in named.items() if value).replace(" | ", ", ")


def _arguments(name: str, suite: Suite, words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", usage="%(prog)s [options]", description=suite.title
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a Hugging Face checkpoint directory")
    add("--programs", type=spec, nargs="+", default=[spec("jaxgen")], metavar="NAME[:VARIANT][:DTYPE]",
        help="jaxgen:{fused,int8}, transformers:{eager,static,compile,grouped_mm,batched_mm}, "
        "llama.cpp:{bfloat16,q8_0,q4_0}, keras-hub; the others are compared with the first")  # fmt: skip
    add("--environments", type=Path, metavar="DIR", help="the directory made by `python -m benchmarks environments`")
    add("--rounds", type=arguments.count, default=5, help="turns of each program")
    add("--rows", type=arguments.count, nargs="+", default=suite.rows, help="prompts in the batch")
    add("--prompt", type=arguments.count, nargs="+", default=suite.prompts, help="tokens per prompt")
    add("--new-tokens", type=arguments.count, default=suite.new_tokens, help="new tokens in the long run")
    add("--short", type=arguments.count, default=suite.short, help="new tokens in the short run, by default half")
    add("--only", metavar="TEXT", help="only cases whose names contain this text, and those they are compared with")
    add("--mesh", type=arguments.mesh, metavar="DATAxMODEL", help="divide jaxgen's weights over devices, such as 1x4")
    add("--device", choices=("cpu",), help="set to cpu to ignore an accelerator")
    add("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    add("--name", default="", help="a suffix for the file names")
    args = parser.parse_args(words)
    args.short = args.short or args.new_tokens // 2
    if args.new_tokens > 1 and args.short >= args.new_tokens:
        parser.error("--short must be less than --new-tokens")
    if not (args.model / "config.json").exists():
        parser.error(f"{args.model} has no config.json")
    return args
