"""Measure OpenAI-compatible servers under load, in turn, or compare jaxgen's server with `generate_many`.

    python -m benchmarks serving --model DIR --servers jaxgen transformers llama_cpp --environments DIR --gguf FILE
    python -m benchmarks serving --alone

Each server is started, warmed up, measured at each client count, and stopped before the next one starts. A
client sends its next request when the last one has been answered. All servers get the same prompts, which consist of
random words from the tokenizer, and no server gets a prompt twice. Answers are greedy and do not end early. This
process is the load generator.

`--alone` compares jaxgen's server, streaming and not streaming, to `generate_many` in a separate process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import httpx
import jax
import numpy as np

from benchmarks import measure
from benchmarks.clients import Answer, Load, measured
from benchmarks.program import ROOT, Failed
from convert import load_hf
from jaxgen import GenerationConfig, Tokenizer, arguments, generate_many

BUNDLED = ROOT / "jaxgen" / "demo"
ADDRESS = "address"
LIKE_SERVER = "generate_many with the server's options"
KINDS = ("jaxgen", "transformers", "llama_cpp")
PACKAGES = {"jaxgen": ("jax",), "transformers": ("transformers", "torch")}  # packages whose versions the table lists
_VERSIONS = "import sys; from importlib.metadata import version; print(*(f'{x} {version(x)}' for x in sys.argv[1:]))"
_STARTING, _STOPPING = 600, 10  # time limits in seconds
_BLOCK = 256  # tokens in a block of a cache


@dataclasses.dataclass(frozen=True)
class Server:
    """A server to measure.

    Attributes:
        kind: one of `KINDS`, or `ADDRESS` for a server that is already running.
        words: additional arguments of its command, or the address.
    """

    text: str
    kind: str
    words: list[str] = dataclasses.field(default_factory=list, compare=False)


Loads = dict[tuple[str, int], list[Load]]  # by name in the table and number of clients


def main() -> None:
    """Measure, print and write the table."""
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    measure.read_files(args.model)
    try:
        lines = table(args, alone(args) if args.alone else compared(args))
    except Failed as error:
        raise SystemExit(str(error)) from error
    print("\n".join(lines))
    device = jax.devices()[0]  # not earlier, because a server may have needed the whole device
    folder = measure.folder(args.results, None if device.platform == "cpu" else device.device_kind)
    kind = "-alone" if args.alone else "" if args.stream else "-unstreamed"
    file = f"serving{kind}-{args.model.resolve().name}{args.name and '-' + args.name}.md"
    (folder / file).write_text("\n".join([*lines, ""]), "utf-8")


def compared(args: argparse.Namespace) -> Loads:
    """Measure the servers in turn, at each client count. Each round begins with a different server."""
    tokenizer = Tokenizer.from_pretrained(args.model)
    found: Loads = {(server.text, clients): [] for clients in args.clients for server in args.servers}
    for turn in range(args.rounds):
        first = turn % len(args.servers)
        for server in [*args.servers[first:], *args.servers[:first]]:
            with running(server, args) as address:
                for clients in args.clients:
                    number = args.requests or 4 * clients
                    prompts = texts(tokenizer, clients + number, args.width, seed=(turn, clients))
                    body = _body(server, address, args, args.stream)
                    load = measured(server.text, address, body, prompts, clients, tokenizer)
                    found[server.text, clients].append(load)
    return found


def alone(args: argparse.Namespace) -> Loads:
    """Measure `generate_many` and the server (with and without streaming) in turn, on the same prompts."""
    tokenizer = Tokenizer.from_pretrained(args.model)
    [server], [clients] = args.servers, args.clients
    names = ("generate_many", LIKE_SERVER, server.text, f"{server.text}, streamed")
    found: Loads = {(name, clients): [] for name in names}
    for turn in range(args.rounds):
        prompts = texts(tokenizer, clients + (args.requests or 2000), args.width, seed=(turn, clients))
        for name, loads in found.items():
            if name[0] in ("generate_many", LIKE_SERVER):
                loads.append(_in_process(args, prompts, clients, name[0]))
                continue
            with running(server, args) as address:
                streamed = name[0] != server.text
                body = _body(server, address, args, streamed)
                loads.append(measured(server.text, address, body, prompts, clients, tokenizer))
    return found


def texts(tokenizer: Tokenizer, number: int, width: int, seed: tuple[int, ...]) -> list[str]:
    """Return texts of about `width` tokens, made of random words that are single tokens."""
    words = [word.decode() for word in tokenizer.token_bytes() if word and re.fullmatch(rb" [a-z]{2,}", word)]
    return ["".join(some) for some in np.random.default_rng(seed).choice(words, (number, width))]


def _body(server: Server, address: str, args: argparse.Namespace, stream: bool) -> dict[str, Any]:
    """Return a request without its prompt, for a greedy answer with the requested number of tokens."""
    body = {"max_tokens": args.tokens, "temperature": 0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if server.kind == "transformers":  # rejects unknown fields, and has no field that ignores eos
        options = {"max_new_tokens": args.tokens, "do_sample": False, "repetition_penalty": 1.0}
        options |= {"eos_token_id": -1, "pad_token_id": 0}
        return body | {"model": str(args.model.resolve()), "generation_config": json.dumps(options)}
    [model, *_] = httpx.get(f"{address}/v1/models", trust_env=False).raise_for_status().json()["data"]
    return body | {"model": model["id"], "ignore_eos": True, "repetition_penalty": 1.0}


@contextlib.contextmanager
def running(server: Server, args: argparse.Namespace) -> Iterator[str]:
    """Start a server, wait until it is ready, and yield its address; stop it and its children afterwards."""
    if server.kind == ADDRESS:
        yield server.words[0]
        return
    with started(server, args) as (address, _):
        yield address


@contextlib.contextmanager
def started(server: Server, args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Like `running`, but yield the address and the number of the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"OMP_NUM_THREADS": str(_cores()), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    settings |= {"PYTHONPATH": str(ROOT)} if server.kind == "jaxgen" else {}
    command = [str(word) for word in _command(server, args, port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | settings,
            start_new_session=True,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(process, address, shlex.join(command), log)
            yield address, process.pid
        finally:
            _stop(process)


def _command(server: Server, args: argparse.Namespace, port: int) -> list[Any]:
    """Return the command to start a server with memory for `args.slots` answers. `server.words` can override this."""
    where = ["--host", "127.0.0.1", "--port", port]
    if server.kind == "jaxgen":
        sizes = ["--slots", args.slots, "--prompt-width", _room(args), "--max-new-tokens", args.tokens]
        return [sys.executable, "-m", "jaxgen", "serve", args.model, *where, *sizes, *server.words]
    programs = args.environments.resolve() / server.kind / "bin"
    blocks = args.slots * -(-(_room(args) + args.tokens) // _BLOCK)
    if server.kind == "transformers":
        # Without a number of blocks, the cache takes 60 % of memory.
        batching = ["--continuous-batching", "--cb-num-blocks", blocks]
        return [programs / "transformers", "serve", args.model.resolve(), *where, *batching, *server.words]
    sizes = ["--parallel", args.slots, "--ctx-size", blocks * _BLOCK, "--threads", _cores()]
    return [programs / "llama-server", "--model", args.gguf, *where, *sizes, *server.words]


def _room(args: argparse.Namespace) -> int:
    """Return the maximum number of tokens in a prompt. When words are joined, some become more than one token."""
    return args.width + max(16, args.width // 4)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _wait(process: subprocess.Popen, address: str, command: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + _STARTING
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{address}/health", trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    log.seek(0)
    ending = "is not ready" if process.poll() is None else f"ended with status {process.returncode}"
    raise Failed(f"{log.read().decode(errors='replace')[-3000:]}\n{command} {ending}; its messages are above")


def _stop(process: subprocess.Popen) -> None:
    """Stop a process and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOPPING)


def _in_process(args: argparse.Namespace, prompts: list[str], clients: int, name: str) -> Load:
    """Measure `generate_many` in a new process, which answers the first `clients` prompts to warm up."""
    request = {"model": str(args.model), "prompts": prompts, "warm": clients, "like_server": name == LIKE_SERVER}
    request |= {"tokens": args.tokens, "engine": {"slots": args.slots, "prompt_width": _room(args)}}
    command = [sys.executable, "-c", "from benchmarks import serving; serving.many()"]
    settings = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, input=json.dumps(request), stdout=subprocess.PIPE, text=True, env=os.environ | settings
    )
    if done.returncode:
        raise Failed(f"{name} ended with status {done.returncode}; its messages are above")
    found = json.loads(done.stdout)
    print(f"{name}: {len(found['answers'])} answers in {found['seconds']:.1f} s", file=sys.stderr)
    return Load([Answer(**answer) for answer in found["answers"]], found["seconds"])


def many() -> None:
    """Read a request from stdin, answer its prompts with `generate_many`, and print tokens, errors and seconds."""
    request = json.load(sys.stdin)
    params, loaded = load_hf(request["model"])
    cfg, key = GenerationConfig(model=loaded.model, max_new_tokens=request["tokens"], pad_token_id=0), None
    if request["like_server"]:  # the server's program always includes sampling and log-probabilities
        cfg = loaded.replace(do_sample=True, max_new_tokens=request["tokens"], eos_token_id=None)
        cfg, key = cfg.replace(output_logprobs="logits", top_logprobs=20), jax.random.key(0)
    tokenizer = Tokenizer.from_pretrained(request["model"])

    def answers(prompts: list[str]) -> list[dict[str, Any]]:
        inputs = ({"text": prompt, "do_sample": False} for prompt in prompts)
        done = generate_many(params, inputs, key, cfg, tokenizer=tokenizer, **request["engine"])
        return [{"error": str(one.error)} if one.error else {"tokens": len(one.tokens), "first": None} for one in done]

    answers(request["prompts"][: request["warm"]])
    begin = time.perf_counter()
    found = answers(request["prompts"][request["warm"] :])
    print(json.dumps({"answers": found, "seconds": time.perf_counter() - begin}))


def table(args: argparse.Namespace, found: Loads) -> list[str]:
    """Return a Markdown table of speeds, times to the first token, and errors."""
    [reference, _], *_ = found
    title = "Server beside generate_many" if args.alone else "Servers"
    streamed = ", streamed" if args.stream and not args.alone else ""
    lines = [
        f"## {title}: {args.model.resolve().name}",
        "",
        f"{measure.machine()['cpu']}, {_cores()} cores; {'; '.join(_versions(args))}. Prompts of about {args.width} "
        f"tokens, greedy answers of {args.tokens}{streamed}; {args.slots} slots. Medians (smallest to largest) of "
        f"{args.rounds} rounds; the times to the first token are those of all requests.",
        "",
        f"| server | clients | tokens/s | {reference} against it | first token, ms | 95th percentile, ms "
        "| tokens per answer | cores of the load generator | requests | errors |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, clients), loads in found.items():
        answers = [answer for load in loads for answer in load.answers]
        good = [answer for answer in answers if answer.error is None]
        first = [1e3 * answer.first for answer in good if answer.first is not None]
        against = [(own.speed, other.speed) for own, other in zip(found[reference, clients], loads, strict=True)]
        cells = [
            name,
            str(clients),
            _spread([load.speed for load in loads], 1),
            _spread([own / other for own, other in against if other], 2) if name != reference else "",
            f"{statistics.median(first):,.0f}" if first else "",
            f"{np.percentile(first, 95):,.0f}" if first else "",
            f"{statistics.mean(answer.tokens for answer in good):.4g}" if good else "",
            _spread([load.cores for load in loads if load.cores is not None], 2),
            f"{len(answers):,}",
            f"{len(answers) - len(good):,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(values: list[float], digits: int) -> str:
    if not values:
        return ""
    shown = (f"{x:,.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    return "{} ({} to {})".format(*shown)


def _versions(args: argparse.Namespace) -> list[str]:
    found = []
    for kind in dict.fromkeys(server.kind for server in args.servers if server.kind != ADDRESS):
        if kind == "llama_cpp":
            command = [args.environments / kind / "bin" / "llama-server", "--version"]
        else:
            python = sys.executable if kind == "jaxgen" else args.environments / kind / "bin" / "python"
            command = [python, "-c", _VERSIONS, *PACKAGES[kind]]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found.append(f"{kind} with {done.stdout.partition(chr(10))[0].replace('version: ', 'version ')}")
    return found


def server(text: str) -> Server:
    """Parse a server such as `llama_cpp`, `jaxgen --slots 16`, or the address of a server on this machine."""
    kind, *words = shlex.split(text) or [""]
    if kind in KINDS:
        return Server(text, kind, words)
    with contextlib.suppress(ValueError):
        address = urlsplit(text)
        if address.scheme == "http" and address.hostname in ("127.0.0.1", "localhost") and address.port:
            return Server(text, ADDRESS, [text.rstrip("/")])
    raise argparse.ArgumentTypeError(f"{text!r} is neither one of {', '.join(KINDS)} nor http://127.0.0.1:PORT")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks serving", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--alone", action="store_true", help="compare jaxgen's server only with generate_many")
    add("--model", type=Path, default=BUNDLED, help="a checkpoint (default: the one in the package)")
    add("--servers", type=server, nargs="+", default=[Server("jaxgen", "jaxgen")], metavar="'NAME [WORD ...]'",
        help=f"{', '.join(KINDS)}, each with optional extra arguments, or http://127.0.0.1:PORT")  # fmt: skip
    add("--environments", type=Path, metavar="DIR", help="the directory made by `python -m benchmarks environments`")
    add("--gguf", type=Path, metavar="FILE", help="the model for llama.cpp, with its tokenizer")
    add("--clients", type=arguments.count, nargs="+", help="concurrent requests (default: 1 8 16; --alone: 64)")
    add("--requests", type=arguments.count, help="requests per measurement (default: 4 per client; --alone: 2000)")
    add("--width", type=arguments.count, default=64, help="tokens in a prompt")
    add("--tokens", type=arguments.count, default=64, help="tokens in an answer")
    add("--stream", action=argparse.BooleanOptionalAction, default=True, help="stream the answers")
    add(
        "--slots",
        type=arguments.count,
        help="answers that a server generates at a time (default: one per client, at most 32)",
    )
    add("--rounds", type=arguments.count, default=3)
    add("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    add("--name", default="", help="a suffix for the file name")
    args = parser.parse_args()
    args.clients = args.clients or ([64] if args.alone else [1, 8, 16])
    args.slots = args.slots or min(32, max(args.clients))
    kinds = {one.kind for one in args.servers}
    if args.alone and ([one.kind for one in args.servers] != ["jaxgen"] or len(args.clients) > 1):
        parser.error("--alone measures jaxgen with one number of clients")
    if kinds & {"transformers", "llama_cpp"} and args.environments is None:
        parser.error("give --environments DIR")
    if "llama_cpp" in kinds and args.gguf is None:
        parser.error("give --gguf FILE: see benchmarks/README.md")
    return args


if __name__ == "__main__":
    main()
