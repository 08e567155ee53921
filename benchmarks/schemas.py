"""Count how many JSON schemas of a collection are accepted, and judge random texts of each.

    python -m benchmarks schemas --schemas jsonschemabench/data --tokenizer TOKENIZER_DIR

The collection is a folder with a folder of *.json files for each data set, such as JSONSchemaBench's. The schemas are
drawn from all data sets, in proportion to their sizes. The jsonschema library judges the texts, with the draft that a
schema names, and with formats. (Where a schema without `$schema` has OpenAPI's `nullable: true`, null is added first.)
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import platform
import random
import signal
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
from jsonschema.validators import validator_for

from benchmarks import measure
from jaxgen import TokenAutomaton, Tokenizer
from jaxgen.core.grammar.byte_automaton import ByteAutomaton, compile_expression, distances, edges
from jaxgen.core.grammar.json_schema import read_schema
from jaxgen.errors import InputError

SEED = 2026  # the committed choice
LENGTHS = (5, 40, 200, 800)  # bytes after which a random text takes the shortest way to its end


class Result(NamedTuple):
    """The result for one schema: the reason for a refusal, or the cost of the automaton and the texts it forbids."""

    name: str
    refusal: str | None = None
    states: int = 0
    seconds: float = 0.0
    forbidden: tuple[str, ...] = ()
    judged: bool = False


def main() -> None:
    args = _arguments()
    tokenizer = None if args.tokenizer is None else Tokenizer.from_pretrained(args.tokenizer)
    load = os.getloadavg()[0]
    files = _chosen(args.schemas, args.count, args.seed)
    rng = np.random.default_rng(args.seed)
    plain = [_result(file, "error", tokenizer, args.limit, args.texts, rng) for file in files]
    # An accepted schema has no keyword to leave out.
    lenient = [
        result if result.refusal is None else _result(file, "warn", tokenizer, args.limit, 0, rng)
        for file, result in zip(files, plain, strict=True)
    ]
    for result in plain:
        found = [f"FORBIDDEN {text}" for text in result.forbidden]
        found += [f"refused: {result.refusal}"] if result.refusal else []
        for line in found:
            print(f"{result.name}: {line[:300]}")
    lines = [
        "# JSON schemas",
        "",
        f"{len(files)} schemas, seed {args.seed}; {'with' if tokenizer else 'without'} a tokenizer.",
        f"CPU seconds; host: {measure.machine()['cpu']}, load average {load:.1f} at the start; {_versions()}.",
        "",
        *_table(plain, lenient, args.texts),
    ]
    print("\n".join(lines))
    if args.results is not None:
        (measure.folder(args.results, None) / "schemas.md").write_text("\n".join([*lines, ""]), "utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks schemas", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--schemas", type=Path, required=True, metavar="DIR", help="a folder for each data set")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="also build the table of tokens")
    parser.add_argument("--count", type=int, default=279, help="schemas to draw")
    parser.add_argument("--seed", type=int, default=SEED, help="of the choice and of the texts")
    parser.add_argument("--texts", type=int, default=20, help="random texts of each schema")
    parser.add_argument("--limit", type=float, default=60.0, help="CPU seconds for a schema; more is a hang")
    parser.add_argument("--results", type=Path, metavar="DIR", help="write a table into this folder")
    return parser.parse_args()


def _chosen(folder: Path, count: int, seed: int) -> list[Path]:
    """Draw files from all data sets in proportion to their sizes (by largest remainders)."""
    sets = {part: sorted(part.glob("*.json")) for part in sorted(folder.iterdir()) if part.is_dir()}
    total = sum(map(len, sets.values()))
    shares = {part: count * len(files) / total for part, files in sets.items()}
    sizes = {part: int(share) for part, share in shares.items()}
    for part in sorted(sets, key=lambda part: sizes[part] - shares[part])[: count - sum(sizes.values())]:
        sizes[part] += 1
    source = random.Random(seed)
    return [file for part, files in sets.items() for file in source.sample(files, sizes[part])]


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError after a number of CPU seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _result(
    file: Path, unsupported: Any, tokenizer: Tokenizer | None, limit: float, texts: int, rng: np.random.Generator
) -> Result:
    name, schema = f"{file.parent.name}/{file.stem}", json.loads(file.read_text("utf-8"))
    start = time.process_time()
    try:
        with _limited(limit):
            expression = read_schema(schema, unsupported=unsupported, left_out=[])
            if tokenizer is not None:
                TokenAutomaton.from_expression(expression, tokenizer)
                seconds = time.process_time() - start
            automaton = compile_expression(expression, "the schema")
            if tokenizer is None:
                seconds = time.process_time() - start
    except InputError as error:
        return Result(name, str(error))
    except TimeoutError:
        return Result(name, "hang")
    judge = _judge(schema) if texts else None
    forbidden = [] if judge is None else [text for text in _texts(automaton, texts, rng) if not _is_valid(judge, text)]
    return Result(name, None, len(automaton.table), seconds, tuple(forbidden), judge is not None)


def _judge(schema: Any) -> Any:
    """Return the validator of a schema, or None if it is not valid in its own draft, nor in draft 4 or 7."""
    if isinstance(schema, dict) and "$schema" not in schema:
        schema = _with_null(schema)
    own = validator_for(schema, default=jsonschema.Draft202012Validator)
    for draft in (own, jsonschema.Draft7Validator, jsonschema.Draft4Validator):
        with contextlib.suppress(jsonschema.SchemaError):
            draft.check_schema(schema)
            return draft(schema, format_checker=draft.FORMAT_CHECKER)
    return None


def _with_null(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_null(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: _with_null(part) for name, part in schema.items()}
    return {"anyOf": [{"type": "null"}, parts]} if schema.get("nullable") is True else parts


def _is_valid(judge: Any, text: str) -> bool:
    return judge.is_valid(json.loads(text, parse_int=lambda digits: int(digits[:4000])))


def _texts(automaton: ByteAutomaton, count: int, rng: np.random.Generator) -> Iterator[str]:
    """Yield random texts, each of which takes the shortest way to its end after a random number of bytes."""
    table, accepting = automaton.table, automaton.accepting
    source, target = edges(table)
    distance = distances(accepting, target, source)
    for _ in range(count):
        state, text, longest = automaton.start, b"", rng.choice(LENGTHS)
        while True:
            choices = np.flatnonzero(table[state] >= 0)
            if len(text) > longest:
                choices = choices[distance[table[state, choices]] < distance[state]]
            if not choices.size or (accepting[state] and rng.random() < 0.3):
                break
            byte = rng.choice(choices)
            state, text = table[state, byte], text + bytes([byte])
        yield text.decode()


def _versions() -> str:
    names = ("jax", "numpy", "jsonschema")
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])


def _table(plain: list[Result], lenient: list[Result], texts: int) -> list[str]:
    accepted = [result for result in plain if result.refusal is None]
    seconds = np.array([result.seconds for result in accepted])
    states = np.array([result.states for result in accepted])
    sets = collections.Counter(result.name.split("/")[0] for result in plain)
    of_set = collections.Counter(result.name.split("/")[0] for result in accepted)
    forbidden = sum(len(result.forbidden) for result in plain)
    judged = sum(result.judged for result in accepted)
    return [
        "| what | figure |",
        "|---|---|",
        f"| accepted | {len(accepted)} of {len(plain)} |",
        f"| accepted with unsupported='warn' | {sum(result.refusal is None for result in lenient)} |",
        f"| forbidden texts | {forbidden} of {judged * texts} |",
        f"| hangs | {sum(result.refusal == 'hang' for result in [*plain, *lenient])} |",
        f"| states: median, 95 %, largest | {_figures(states, '.0f')} |",
        f"| compile time: median, 95 %, largest | {_figures(seconds, '.2f')} |",
        f"| accepted by data set | {', '.join(f'{name} {of_set[name]} of {size}' for name, size in sets.items())} |",
    ]


def _figures(values: np.ndarray, form: str) -> str:
    return ", ".join(f"{value:{form}}" for value in np.percentile(values, [50, 95, 100])) if values.size else "-"
