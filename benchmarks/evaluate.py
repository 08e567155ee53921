"""Compare jaxgen's model in lm-evaluation-harness with the harness's own model `hf`, on the same tasks.

    python -m benchmarks evaluate --environments DIR
    python -m benchmarks evaluate --environments DIR --model random-0.5b --questions 20 --answers 8 --texts 4

The tasks are made from stories like the bundled model's: few-shot questions with four choices, answers
that end at a stop string, and the perplexity of long texts. First, hf runs each task once with each batch size, and the
fastest size is kept. The run fails if the results of the two models differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.measure import Answer
from benchmarks.program import ROOT, Failed, Kind, Program, Spec
from demo import corpus
from jaxgen import arguments

BUNDLED = ROOT / "jaxgen" / "demo"
KINDS = {
    "jaxgen": Kind("evaluation_program.py", None),
    "hf": Kind("evaluation_program.py", "lm_eval"),
}
TOLERANCE = 1e-3  # maximum relative difference between two log-likelihoods
TIE = 1e-3  # greedy search may choose either of two tokens if their log-probabilities differ by at most this
_COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {FILES}}
test_split: test
"""
TASKS = {
    "choices": """
output_type: multiple_choice
fewshot_split: train
num_fewshot: EXAMPLES
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: "\\n\\n"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}\\n\\n"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: TOKENS, until: ["\\n\\n"], do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


def main() -> None:
    """Measure, print and write the table."""
    args = _arguments()
    measure.read_files(args.model)
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(args, Path(folder))
        try:
            found = compared(args, folder)
        except Failed as error:
            raise SystemExit(str(error)) from error
    lines = table(args, found)
    print("\n".join(lines))
    file = f"evaluate-{args.model.resolve().name}{args.name and '-' + args.name}.md"
    (measure.folder(args.results) / file).write_text("\n".join([*lines, ""]), "utf-8")


def write_tasks(args: argparse.Namespace, folder: Path) -> None:
    """Write the tasks and their data."""
    turns = itertools.chain.from_iterable(corpus.conversations(1, held_out=True))
    texts = (turn["content"] for turn in turns if turn["role"] == "assistant")
    stories = (story for story in texts if story.count("\n\n") == 2)
    rng = random.Random(0)

    def question() -> dict[str, Any]:
        parts = [next(stories).split("\n\n") for _ in range(4)]
        endings = [part[2].split(". ")[0] + "." for part in parts]
        order = rng.sample(range(4), 4)
        choices = [endings[n] for n in order]
        return {"question": "\n\n".join(parts[0][:2]), "choices": choices, "label": order.index(0)}

    rows = {
        "examples": [question() for _ in range(50)],
        "choices": [question() for _ in range(args.questions)],
        "answers": [dict(zip(("question", "answer"), next(stories).split("\n\n"), strict=False))
                    for _ in range(args.answers)],
        "texts": [{"text": "\n\n".join(next(stories) for _ in range(args.stories))} for _ in range(args.texts)],
    }  # fmt: skip
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    for name, text in TASKS.items():
        files = f"test: {folder}/{name}.jsonl" + f", train: {folder}/examples.jsonl" * (name == "choices")
        values = {"FILES": files, "EXAMPLES": str(args.examples), "TOKENS": str(args.tokens)}
        text = f"task: {name}{_COMMON}{text.lstrip()}"
        for word, value in values.items():
            text = text.replace(word, value)
        (folder / f"{name}.yaml").write_text(text)


def compared(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run each task with both models; return versions, results, times, and how much the models' results differ."""
    cache = {"JAX_COMPILATION_CACHE_DIR": f"{folder}/cache", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{folder}/hf"} | cache
    variant = str(args.max_length or "")
    programs = {
        name: Program(Spec(name, variant, "float32"), args.environments, None, "cpu", KINDS[name]) for name in KINDS
    }
    trials: dict[str, dict[str, Answer]] = {task: {} for task in args.tasks}
    turns: dict[str, list[dict[str, Answer]]] = {task: [] for task in args.tasks}
    first, again = {}, {}
    ours, theirs = programs["jaxgen"], programs["hf"]

    def run(program: Program, task: str, size: str = "") -> Answer:
        time.sleep(measure.PAUSE)
        busy, own, start = measure.busy_seconds(), program.cpu_seconds(), time.perf_counter()
        answer = program.ask("evaluate", tasks=folder, task=task, batch_size=size)
        others = measure.busy_seconds() - busy - program.cpu_seconds() + own
        answer["others"] = max(0.0, others / (time.perf_counter() - start))
        print(f"{program.name} {task} {size}: {answer['model_seconds']:.2f} of {answer['seconds']:.2f} s", flush=True)
        return answer

    with ours, theirs:
        for program in (ours, theirs):
            program.start(args.model, **settings)
        for task in args.tasks:
            first[task] = run(ours, task)
            run(ours, task)  # nothing is compiled after this
            trials[task] = {size: run(theirs, task, size) for size in args.batch_sizes}
            size = min(trials[task], key=lambda size: trials[task][size]["model_seconds"])
            for turn in range(args.rounds):
                order = [(ours, ""), (theirs, size)][:: 1 - 2 * (turn % 2)]
                found = {program.spec.kind: run(program, task, size) for program, size in order}
                if found["jaxgen"]["compilations"]:
                    raise Failed(f"{found['jaxgen']['compilations']} compilations while measuring")
                turns[task].append(found)
        differences = {task: differ(turns[task][0], task, ours) for task in args.tasks}
        versions = {name: program.facts["versions"] for name, program in programs.items()}
        ours.stop()
        ours.start(args.model, **settings)
        for task in args.tasks:
            again[task] = run(ours, task)
    return {
        "versions": versions, "trials": trials, "turns": turns, "first": first, "again": again,
        "differences": differences,
    }  # fmt: skip


def differ(found: dict[str, Answer], task: str, ours: Program) -> str:
    """Describe how much the results of the two models differ. Raise `Failed` if they differ too much."""
    own, other = found["jaxgen"], found["hf"]
    if own["requests"] != other["requests"]:
        raise Failed(f"{task}: the models got different requests")
    pairs = [
        (request, *both)
        for requests, *all_of in zip(own["requests"], own["responses"], other["responses"], strict=True)
        for request, *both in zip(requests, *all_of, strict=True)
    ]
    if task == "answers":
        unequal = [(request[0], [a, b]) for request, a, b in pairs if a != b]
        gaps = [ours.ask("gap", context=context, answers=both)["gap"] for context, both in unequal]
        if wrong := [both for (_, both), gap in zip(unequal, gaps, strict=True) if gap > TIE]:
            raise Failed(f"{len(wrong)} of {len(pairs)} answers differ: {wrong[0]}")
        return f"{len(pairs) - len(unequal)} of {len(pairs)} answers equal" + (
            f", in the others the first different token is a tie (up to {max(gaps):.0e})" if gaps else ""
        )
    if task == "choices":
        if own["metrics"] != other["metrics"]:
            raise Failed(f"{task}: {own['metrics']} and {other['metrics']}")
        greedy = sum(a[1] != b[1] for _, a, b in pairs)
        pairs = [(request, a[0], b[0]) for request, a, b in pairs]
    most = max(abs(a - b) / abs(b) for _, a, b in pairs)
    if most > TOLERANCE:
        raise Failed(f"{task}: log-likelihoods differ by up to {most:.1e}")
    said = f"log-likelihoods within {most:.0e}"
    if task != "choices":
        return said
    metrics = ", ".join(f"{name.partition(',')[0]} {value:.3f}" for name, value in own["metrics"].items())
    return f"{metrics} in both, {said}" + (f", {greedy} greedy flags differ" if greedy else "")


def table(args: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    """Return a Markdown table of the times and the differences."""
    ours, theirs = (
        ", ".join(f"{package} {release}" for package, release in found["versions"][kind].items() if package != "numpy")
        for kind in KINDS
    )
    lines = [
        f"## lm-evaluation-harness: {args.model.resolve().name}",
        "",
        f"{measure.machine()['cpu']}, {measure.machine()['cores']} cores; jaxgen with {ours}; hf with {theirs}; float32"
        f"{f', at most {args.max_length} tokens' if args.max_length else ''}. {args.questions} questions with four "
        f"choices and {args.examples} examples, {args.answers} answers of at most {args.tokens} tokens, {args.texts} "
        f"texts of {args.stories} stories. Seconds in the model, tokenizing included; medians (smallest to largest) of "
        f"{args.rounds} rounds, after everything is compiled. The last two columns are of the first run in a process.",
        "",
        "| task | jaxgen, s | hf, s (its batch size) | jaxgen / hf | with the harness's own work "
        "| cores busy with anything else | results "
        "| compiling, s | from the compilation cache, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task in args.tasks:
        turns, trials = found["turns"][task], found["trials"][task]
        size = min(trials, key=lambda size: trials[size]["model_seconds"])
        values = {kind: [turn[kind]["model_seconds"] for turn in turns] for kind in KINDS}
        ratios = [_ratio(turns, name) for name in ("model_seconds", "seconds")]
        cells = [
            task,
            _spread(values["jaxgen"]),
            f"{_spread(values['hf'])} ({size})",
            *map(_spread, ratios),
            _spread([turn[kind]["others"] for turn in turns for kind in KINDS]),
            found["differences"][task],
            f"{found['first'][task]['model_seconds']:.1f}",
            f"{found['again'][task]['model_seconds']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "hf by batch size, one run each, seconds:", "", f"| task | {' | '.join(args.batch_sizes)} |"]
    lines.append("|---" * (len(args.batch_sizes) + 1) + "|")
    for task, trials in found["trials"].items():
        seconds = (f"{trials[size]['model_seconds']:.1f}" for size in args.batch_sizes)
        lines.append(f"| {task} | {' | '.join(seconds)} |")
    return lines


def _ratio(turns: Sequence[dict[str, Answer]], name: str) -> list[float]:
    return [turn["jaxgen"][name] / turn["hf"][name] for turn in turns]


def _spread(values: Sequence[float]) -> str:
    shown = (f"{x:.3g}" for x in (statistics.median(values), min(values), max(values)))
    return "{} ({} to {})".format(*shown)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks evaluate", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--model", type=Path, default=BUNDLED, help="a checkpoint (default: the one in the package)")
    add("--environments", type=Path, metavar="DIR", help="the directory made by `python -m benchmarks environments`")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME", help=", ".join(TASKS))
    add("--questions", type=arguments.count, default=500)
    add("--examples", type=arguments.count, default=2, help="examples before each question")
    add("--answers", type=arguments.count, default=100)
    add("--tokens", type=arguments.count, default=96, help="the maximum number of tokens in an answer")
    add("--texts", type=arguments.count, default=50)
    add("--stories", type=arguments.count, default=5, help="stories in a text, of about 200 tokens each")
    add("--max-length", type=arguments.count, metavar="N", help="tokens in a request (default: the model's context)")
    add("--batch-sizes", nargs="+", default=["1", "8", "16", "auto"], metavar="N", help="hf's batch sizes")
    add("--rounds", type=arguments.count, default=3)
    add("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    add("--name", default="", help="a suffix for the file name")
    return parser.parse_args()


if __name__ == "__main__":
    main()
