"""Attack a server, and measure what other clients notice, its memory, and the sizes of its answers.

    python -m benchmarks attack [--model DIR]

One client sends requests in turn, first alone, and then during each attack and during all of them together. Attackers
run in processes of their own. All requests are seeded. Then requests of each hostile kind are sent, and the server's
resident memory after the first is compared with that after the last.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks import measure, serving
from jaxgen import arguments

_LARGE = 4_000_000  # bytes; the server's limit for a body is 4 MiB
_TOKENS = 32  # in an answer to the client
_WIDTH, _SLOTS = 1024, 8  # sizes of the server
_HEADERS = 16  # connections whose headers are not complete
_FIELDS, _ENTRY = 400, 150  # bytes of a token's chunk, and of a log-probability, that a client may expect


def main() -> None:
    """Measure, print and write the table."""
    args = _arguments()
    with serving.started(serving.server("jaxgen --max-new-tokens 128"), args) as (address, process):
        lines = [
            *_table("another client", _client(address, args)),
            *_table("requests", _requests(address, process, args)),
        ]
    machine = f"{measure.machine()['cpu']}; {_SLOTS} slots; one client, with answers of {_TOKENS} tokens."
    lines = ["# A server under attack", "", machine, "", *lines]
    print("\n".join(lines))
    file = measure.folder(args.results, None) / f"attack-{args.model.resolve().name}.md"
    file.write_text("\n".join([*lines, ""]), "utf-8")


def _client(address: str, args: argparse.Namespace) -> list[dict[str, str]]:
    """Measure a client alone and during attacks."""
    _ask(address, args.seconds)  # warm up
    alone, wait = _ask(address, args.seconds)
    rows = [_row("none", alone, alone, wait)]
    for name, kinds in {**{name: [name] for name in ATTACKS}, "all": list(ATTACKS)}.items():
        with _attacked(address, kinds):
            time.sleep(1)
            speed, wait = _ask(address, args.seconds)
        rows.append(_row(name, speed, alone, wait))
    return rows


def _row(attack: str, speed: float, alone: float, wait: float) -> dict[str, str]:
    row = {"attack": attack, "tokens/s": f"{speed:.1f}", "share": f"{speed / alone:.2f}"}
    row["longest wait, s"] = f"{wait:.2f}"
    print(row, file=sys.stderr)
    return row


def _ask(address: str, seconds: float) -> tuple[float, float]:
    """Send requests in turn for some time; return the tokens per second, and the longest time for an answer."""
    body = {"max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    begin, tokens, longest, number = time.monotonic(), 0, 0.0, 0
    with httpx.Client(base_url=address, timeout=600, trust_env=False) as http:
        while time.monotonic() - begin < seconds:
            number, sent = number + 1, time.monotonic()
            answer = http.post("/v1/completions", json={**body, "prompt": f"Tell me about {number} hens"})
            longest = max(longest, time.monotonic() - sent)
            tokens += answer.raise_for_status().json()["usage"]["completion_tokens"]
    return tokens / (time.monotonic() - begin), longest


@contextlib.contextmanager
def _attacked(address: str, kinds: list[str]) -> Iterator[None]:
    """Run attacks during the block, each client in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    clients = [(kind, number) for kind in kinds for number in range(ATTACKS[kind][0])]
    ready = spawn.Semaphore(0)
    processes = [spawn.Process(target=_repeat, args=(address, *client, ready), daemon=True) for client in clients]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            ready.acquire()
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _repeat(address: str, kind: str, number: int, ready: Semaphore) -> None:
    os.nice(19)  # attackers would have processors of their own
    rng = random.Random(number)
    _text()
    ready.release()
    while True:
        with contextlib.suppress(httpx.HTTPError, OSError):
            ATTACKS[kind][1](address, rng)


def _post(address: str, body: dict[str, Any], seconds: float = 600.0, path: str = "/v1/completions") -> tuple[int, int]:
    """Send a request; return the status and the number of bytes in the answer."""
    with httpx.stream("POST", address + path, json=body, timeout=seconds, trust_env=False, verify=False) as answer:
        return answer.status_code, sum(map(len, answer.iter_raw()))


def _words(rng: random.Random, size: int) -> str:
    return "".join(rng.choices(["the ", "quick ", "brown ", "fox ", "jumps ", "over "], k=size // 5))[:size]


@functools.cache
def _text() -> str:
    """Return a long text. It is made once, so that attackers need little processor time."""
    return _words(random.Random(0), _LARGE)


def _prompts(address: str, _: random.Random) -> None:
    _post(address, {"prompt": _text(), "max_tokens": 1})


def _grammars(address: str, rng: random.Random) -> None:
    """Ask for a grammar, and leave."""
    _post(address, {"prompt": "a", "guided_regex": f"[a-z]{{{rng.randint(20_000, 30_000)}}}"}, 0.1)


def _headers(address: str, _: random.Random) -> None:
    where = urlsplit(address)
    connections = [socket.create_connection((where.hostname, where.port)) for _ in range(_HEADERS)]
    for connection in connections:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    time.sleep(40)
    for connection in connections:
        connection.close()


def _several(address: str, _: random.Random) -> None:
    own = {"truncate_prompt_tokens": 4, "echo": True, "n": 16, "max_tokens": 64, "stream": True}
    _post(address, {"prompt": _text(), **own})


# Attacks by name: the number of clients, and what each of them does again and again
ATTACKS: dict[str, tuple[int, Callable[[str, random.Random], None]]] = {
    "two clients send 4 MB prompts": (2, _prompts),
    "eight clients send grammars and leave": (8, _grammars),
    "sixteen connections hold open headers": (1, _headers),
    "one client asks for 4 MB x 16": (1, _several),
}


def _kinds(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Return a hostile request of each kind."""
    text, letters = _text(), "".join(rng.choices("abcdefghijklmnop ", k=1000))
    short = {"prompt": "a", "max_tokens": 4}
    return {
        "a prompt of 4 MB": {"prompt": text},
        "a truncated prompt of 4 MB, with echo": {"prompt": text, "truncate_prompt_tokens": 4, "echo": True, "n": 128},
        "a long request_id": {**short, "n": 16, "stream": True, "request_id": text},
        "many values": {**short, "metadata": {"a": [[]] * 250_000}},
        "many prompts": {**short, "prompt": ["a"] * 500_000},
        "log-probabilities": {**short, "n": 128, "max_tokens": 8, "logprobs": 20},
        "an echo with log-probabilities": {**short, "prompt": "a b " * 200, "n": 128, "logprobs": 20, "echo": True},
        "a grammar": {**short, "guided_regex": letters},
        "a grammar that is too large": {**short, "guided_regex": f"{letters[:9]}[a-z]{{40000}}"},
        "a large schema": {**short, "guided_json": {"enum": [f"{letters[:30]}{i}" for i in range(3000)]}},
    }


def _requests(address: str, process: int, args: argparse.Namespace) -> list[dict[str, str]]:
    """Send requests of each kind, and measure the memory and the answers."""
    rows = []
    for name in _kinds(random.Random(0)):
        answers: list[tuple[float, int]] = []
        _sent(address, name, answers, 0)
        first = _memory(process)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(functools.partial(_sent, address, name, answers), range(1, args.requests)))
        growth = (_memory(process) - first) / 1e6
        ratio, largest = max(answers, default=(0.0, 0))
        row = {"kind": name, "requests": str(args.requests), "memory above the first, MB": f"{growth:+.0f}"}
        rows.append(row | {"largest answer, bytes": f"{largest:,}", "of what was asked": f"{ratio:.2f}"})
        print(rows[-1], file=sys.stderr)
    return rows


def _sent(address: str, name: str, answers: list[tuple[float, int]], seed: int) -> None:
    """Send a request; append the size of its answer to `answers`, after its ratio to what the request asks for."""
    body = _kinds(random.Random(seed))[name]
    with contextlib.suppress(httpx.HTTPError):
        _, size = _post(address, body)
        kept = len(body["prompt"]) if isinstance(body["prompt"], str) else 1
        kept = min(kept, 8 * body.get("truncate_prompt_tokens", kept))
        tokens = body.get("max_tokens", 16) + (kept if body.get("echo") else 0)
        asked = 1000 + body.get("n", 1) * tokens * (_FIELDS + _ENTRY * (1 + body.get("logprobs", 0)))
        answers.append((size / asked, size))


def _memory(process: int) -> int:
    """Return the resident memory of a process, in bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def _table(title: str, rows: list[dict[str, str]]) -> list[str]:
    head = list(rows[0])
    lines = [f"## Attack: {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row.values())} |" for row in rows), ""]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks attack", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, default=serving.BUNDLED, help="a checkpoint (default: the one in the package)")
    add("--seconds", type=arguments.positive, default=20.0, help="of each measurement of the other client")
    add("--requests", type=arguments.count, default=500, help="requests of each kind")
    add("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    args = parser.parse_args()
    args.width, args.tokens, args.slots = _WIDTH, _TOKENS, _SLOTS
    return args


if __name__ == "__main__":
    main()
