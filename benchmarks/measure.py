"""Measure programs in turn, and derive figures from their times."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.program import Failed, Program

RESULTS = Path(__file__).parent / "results"
PAUSE = 0.5  # seconds to wait before a turn, so that the other programs' threads can go to sleep
TRIES = 10  # maximum number of attempts if a turn is disturbed
Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A request to measure: the prompts' sizes, the new tokens of a long and a short run, and transformers' options.

    Attributes:
        short: the number of new tokens in the short run; 0 if only the first token is measured.
        against: the label of the case with which this one is compared.
    """

    label: str
    rows: int
    prompt: int
    new_tokens: int
    short: int
    options: dict[str, Any]
    against: str | None = None

    @property
    def room(self) -> int:
        return self.options.get("capacity", self.prompt + self.new_tokens)

    def lengths(self) -> dict[str, int]:
        if "lora" in self.options:
            return {"training_step": 1}
        return {"first": 1} | ({"short": self.short, "long": self.new_tokens} if self.short else {})


class InTurn:
    """Several programs that run the same cases in turn.

    Only one process can use a TPU, so on a TPU, each program is started, warmed up and stopped in each round.
    """

    def __init__(self, programs: Sequence[Program], model: Path, vocabulary: int):
        self.programs, self.model, self.vocabulary = programs, model, vocabulary
        self.warm: dict[Program, dict[str, Answer]] = {program: {} for program in programs}
        self.turns: dict[tuple[str, str], list[Answer]] = {}
        self.missing: dict[tuple[str, str], dict[str, str]] = {}  # why a program has no turns: not supported, or failed
        self.probes: list[dict[str, float]] = []
        programs[0].start(model)
        self.exclusive = programs[0].facts["platform"] == "tpu" and len(programs) > 1

    def measure(self, cases: Sequence[Case], rounds: int) -> Iterator[list[Answer]]:
        """Measure each case with each program, `rounds` times; after each turn, yield the results so far.

        A program that fails in a case is not measured again in that case. Each round begins with a different program,
        because the first one after the probe is often disturbed.
        """
        for turn in range(rounds):
            first = turn % len(self.programs)
            programs = [*self.programs[first:], *self.programs[:first]]
            order = [(case, program) for case in cases for program in programs]
            if self.exclusive:
                order.sort(key=lambda pair: programs.index(pair[1]))
            self._probe()
            for case, program in order:
                place = (case.label, program.name)
                if place in self.missing:
                    continue
                try:
                    self._wake(program)
                    if reason := self._warm_up(program, case):
                        self.missing[place] = {"refused": reason}
                    else:
                        self.turns.setdefault(place, []).append(self._turn(program, case))
                except Failed as error:
                    self.missing[place] = {"failed": str(error)}
                    self.turns.pop(place, None)
                found = [self._found(case) for case in cases]
                _compare(found, [program.name for program in self.programs])
                yield found

    def _wake(self, program: Program) -> None:
        for other in self.programs:
            if self.exclusive and other is not program and other.process is not None:
                other.stop()
        if program.process is None:
            self.warm[program] = {}
        program.start(self.model)

    def _probe(self) -> None:
        for program in self.programs:
            if program.spec.kind == "jaxgen":
                self._wake(program)
                self.probes.append(program.ask("probe", nbytes=-(-program.facts["step_bytes"] // 4096) * 4096))
                return

    def _run(self, program: Program, case: Case, new_tokens: int) -> Answer:
        ids = np.random.default_rng(0).integers(0, self.vocabulary, (case.rows, case.prompt))
        return program.ask("run", ids=ids.tolist(), new_tokens=new_tokens, room=case.room, options=case.options)

    def _warm_up(self, program: Program, case: Case) -> str | None:
        """Compile for each length, longest first, and check the results. Return the reason if the case is rejected."""
        if case.label in self.warm[program]:
            return None
        answers = {}
        for name, length in reversed(case.lengths().items()):
            answer = answers[name] = self._run(program, case, length)
            if "refused" in answer:
                return answer["refused"]
            if (shape := np.shape(answer["tokens"])) != (case.rows, length):
                raise Failed(f"{case.rows} x {length} new tokens became {shape}")
        slots = {name: answer["slots"] for name, answer in answers.items() if name != "first" and "slots" in answer}
        if len(set(slots.values())) > 1:
            raise Failed(f"the runs have caches of {slots} slots: choose --short nearer to --new-tokens")
        self.warm[program][case.label] = next(iter(answers.values()))
        return None

    def _turn(self, program: Program, case: Case) -> Answer:
        """Time a run of each length, after an untimed run."""
        for _ in range(TRIES):
            time.sleep(PAUSE)
            self._run(program, case, 1)  # wakes up threads and refills caches after the other programs' turns
            busy, own, start = busy_seconds(), program.cpu_seconds(), time.perf_counter()
            answers = {name: self._run(program, case, length) for name, length in case.lengths().items()}
            elapsed = time.perf_counter() - start
            others = (busy_seconds() - busy - program.cpu_seconds() + own) / elapsed
            if compiled := sum(answer["compilations"] for answer in answers.values()):
                raise Failed(f"{compiled} compilations while measuring")
            turn = {name: answer["seconds"] for name, answer in answers.items()}
            turn["process_peak_bytes"] = max(answer["peak_bytes"] for answer in answers.values())
            if not case.short or turn["long"] > turn["short"]:
                return self._figures(program, case, turn) | {"others": max(0.0, others)}
        raise Failed("a long run takes no longer than a short one: raise --new-tokens")

    def _figures(self, program: Program, case: Case, turn: Answer) -> Answer:
        if "training_step" in turn:
            return turn | {"trained_tokens_per_second": case.rows * case.prompt / turn["training_step"]}
        turn["prefill_tokens_per_second"] = case.rows * case.prompt / turn["first"]
        if case.short:
            step = (turn["long"] - turn["short"]) / (case.new_tokens - case.short)
            turn |= {"step": step, "decode_tokens_per_second": case.rows / step}
            turn["weights_bytes_per_second"] = program.facts["step_bytes"] / step
            if self.probes:
                turn["bandwidth_share"] = turn["weights_bytes_per_second"] / self.probes[-1]["bytes_per_second"]
        return turn

    def _found(self, case: Case) -> Answer:
        """Return a case with each program's turns and their summaries, or the reason why a program has none."""
        programs = {}
        for program in self.programs:
            place = (case.label, program.name)
            if place in self.missing:
                programs[program.name] = self.missing[place]
            turns = self.turns.get(place)
            if not turns:
                continue
            figures = {name: summary(turn[name] for turn in turns) for name in turns[0]}
            programs[program.name] = {"turns": turns, "figures": figures}
            warm = self.warm[program].get(case.label, {})
            reference = self.warm[self.programs[0]].get(case.label, {})
            if warm.get("note"):
                programs[program.name]["note"] = warm["note"]
            if warm and reference and not case.options.get("do_sample"):
                equal = np.array(warm["tokens"]) == np.array(reference["tokens"])
                programs[program.name]["equal_leading_tokens"] = np.cumprod(equal, axis=1).sum(axis=1).tolist()
        return dataclasses.asdict(case) | {"programs": programs}


def _compare(cases: list[Answer], names: list[str]) -> None:
    """Add per-turn ratios: times relative to the first program, and steps relative to the case `against`."""
    by_label = {case["label"]: case["programs"] for case in cases}
    for case in cases:
        for name in names:
            own, first = case["programs"].get(name, {}), case["programs"].get(names[0], {})
            other = by_label.get(case["against"], {}).get(name, {})
            for time_of in ("first", "step", "training_step"):
                if name != names[0] and "turns" in own and "turns" in first and time_of in own["figures"]:
                    own["figures"][f"{time_of}_ratio"] = summary(_ratios(own, first, time_of))
            if "turns" in own and "turns" in other:
                own["figures"]["cost"] = summary(_ratios(own, other, "step"))


def _ratios(own: Answer, other: Answer, name: str) -> list[float]:
    # One of the two may not have had its last turn yet.
    return [mine[name] / theirs[name] for mine, theirs in zip(own["turns"], other["turns"], strict=False)]


def in_new_processes(
    programs: Sequence[Program], case: Case, model: Path, vocabulary: int, rounds: int
) -> list[Answer]:
    """Measure start, load, first call and memory in new processes, first without and then with a compilation cache."""
    turns: dict[str, list[Answer]] = {program.name: [] for program in programs}
    for _ in range(rounds):
        for program in programs:
            with tempfile.TemporaryDirectory() as cache:
                cold, warm = [_one_life(program, case, model, vocabulary, cache) for _ in range(2)]
            turns[program.name].append(cold | {"cached_first_call": warm["first_call"]})
    found = {
        name: {"turns": own, "figures": {key: summary(turn[key] for turn in own) for key in own[0]}}
        for name, own in turns.items()
    }
    return [dataclasses.asdict(case) | {"programs": found}]


def _one_life(program: Program, case: Case, model: Path, vocabulary: int, cache: str) -> Answer:
    time.sleep(PAUSE)
    program.start(
        model,
        JAX_COMPILATION_CACHE_DIR=cache,
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        TORCHINDUCTOR_CACHE_DIR=cache,
    )
    ids = np.random.default_rng(0).integers(0, vocabulary, (case.rows, case.prompt)).tolist()
    request = {"ids": ids, "new_tokens": case.new_tokens, "room": case.room, "options": case.options}
    first, second = program.ask("run", **request), program.ask("run", **request)
    program.stop()
    facts = {name: value for name, value in program.facts.items() if name.endswith(("_seconds", "_peak_bytes"))}
    peaks = {name: second[name] for name in ("peak_bytes", "device_peak_bytes") if second[name] is not None}
    facts |= {"first_call": first["seconds"], "compiling": max(0.0, first["seconds"] - second["seconds"])}
    return {name: value for name, value in (facts | peaks).items() if value is not None}


def summary(values: Iterable[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum of the values."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def read_files(model: Path) -> None:
    """Read the weights into the operating system's cache, so that no program reads them from disk."""
    for file in model.glob("*.safetensors"):
        with open(file, "rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def machine() -> Answer:
    """Return facts about the machine on which the figures were measured."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = re.search(r"model name\s*:\s*(.*)", text)
    flags = re.search(r"flags\s*:\s*(.*)", text)
    return {
        "cpu": name[1] if name else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in (flags[1].split() if flags else []) if flag.startswith(("amx", "avx"))],
        "system": platform.platform(),
    }


def folder(results: Path, device: str | None = None) -> Path:
    """Return the folder for a machine's results, named after its accelerator or its CPU."""
    here = machine()
    name = device or f"{here['cpu']} {here['cores']} cores"
    target = results / re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
    target.mkdir(parents=True, exist_ok=True)
    return target


def heading() -> Answer:
    """Return the fields that every result starts with."""
    now = datetime.datetime.now(datetime.UTC)
    return {"date": now.isoformat(timespec="seconds"), "machine": machine(), "load_average": os.getloadavg()}


def busy_seconds() -> float:
    """Return the busy time of all cores together since the machine started, in seconds."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
