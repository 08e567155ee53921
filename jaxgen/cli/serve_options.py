"""The options of `jaxgen serve`. This module does not import jax."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from jaxgen import arguments
from jaxgen.cli.size_options import SIZES, add_size
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.serving.api_keys import check_key
from jaxgen.serving.limits import Limits

# The default sizes of a service's engine. A prompt cannot be longer than the model's context, either.
SERVED = EngineSizes(slots=16, prompt_width=4096, most_waiting=256, id_entries=320)  # OpenAI's logit_bias has up to 300


def parser() -> arguments.Parser:
    """Return the command-line parser."""
    result = arguments.Parser(
        prog="jaxgen serve",
        usage="jaxgen serve [MODEL] [options]",
        description="Answer requests in the protocol of OpenAI's API; without MODEL, with the bundled model.",
        epilog="Each request sets its own generation options; the checkpoint's generation_config.json has defaults.",
    )
    add = result.add_argument
    add("model", metavar="MODEL", nargs="?", help="a checkpoint: its directory, its URL, or its id on the hub")
    add("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1, this machine alone)")
    port = "the port to listen on (default: 8000); 0 chooses a free one"
    add("--port", type=arguments.natural, default=8000, metavar="N", help=port)
    key = "answer only clients with this key; can be repeated (default: JAXGEN_API_KEY in the environment, or none)"
    add("--api-key", action="append", metavar="KEY", help=key)
    origin = "let pages from this origin, such as http://localhost:3000, use the service; can be repeated; * for all"
    add("--cors-origin", type=arguments.origin, action="append", metavar="URL", help=origin)
    named = "accept this name in the Host header, as a proxy on this machine may send it; can be repeated; * for all"
    add("--allowed-host", type=arguments.host_name, action="append", metavar="NAME", help=named)
    add("--ssl-certfile", type=arguments.file, metavar="FILE", help="serve HTTPS with this certificate chain (PEM)")
    private = "the certificate's private key (default: it is in --ssl-certfile)"
    add("--ssl-keyfile", type=arguments.file, metavar="FILE", help=private)
    add("--ssl-keyfile-password", metavar="TEXT", help="decrypts the private key")
    trusted = "answer only clients with a certificate that one of these has signed (PEM)"
    add("--ssl-ca-certs", type=arguments.file, metavar="FILE", help=trusted)
    stored = "size of the store for responses, which later requests can continue (default: 64 MiB); 0 turns it off"
    add("--response-store-bytes", type=arguments.natural, default=Limits.stored, metavar="N", help=stored)
    waiting = "maximum number of waiting prompts; more are rejected with status 429 (default: 256)"
    add_size(add, "most_waiting", SERVED.most_waiting, waiting, "--queue")
    limit = "seconds until a request fails (default: 600)"
    add("--timeout", type=arguments.positive, default=Limits.seconds, metavar="S", help=limit)
    largest = "maximum bytes of a request (default: 4 MiB)"
    add("--max-body", type=arguments.count, default=Limits.body, metavar="N", help=largest)
    answer = "maximum bytes of an answer; requests that ask for more are refused (default: 64 MiB)"
    add("--max-answer", type=arguments.count, default=Limits.answer, metavar="N", help=answer)
    flight = "maximum bytes of all requests and answers at a time; more are refused with status 429 (default: 1 GiB)"
    add("--max-in-flight", type=arguments.count, default=Limits.in_flight, metavar="N", help=flight)
    add_model_options(result)
    return result


def add_model_options(parser: arguments.Parser) -> None:
    """Add the options that `jaxgen run-batch` has too: the model's name, the sizes of the engine, and the device."""
    add = parser.add_argument
    add("--name", metavar="NAME", help="the model's name in requests (default: the name of its directory)")
    tuned = "also serve the model with this LoRA adapter, under this name; can be repeated"
    add("--adapter", type=arguments.named_path, action="append", metavar="NAME=DIR", help=tuned)
    add_size(add, "slots", SERVED.slots)
    width = f"{SIZES['prompt_width'].metadata['text']} (default: the model's context, at most {SERVED.prompt_width})"
    add_size(add, "prompt_width", SERVED.prompt_width, width)
    most = "maximum tokens in an answer, for which memory is reserved (default: the model's context, at most 2048)"
    add("--max-new-tokens", type=arguments.count, metavar="N", help=most)
    likely = "maximum top_logprobs of a request (default: 20)"
    add("--max-logprobs", type=arguments.natural, default=20, metavar="N", help=likely)
    for name in ("prefix_cache_bytes", *(name for name in SIZES if name.startswith("grammar"))):
        add_size(add, name, getattr(SERVED, name))
    apart = "leave a model's thoughts in the content of its answers, with their tags"
    add("--thoughts-in-content", action="store_true", help=apart)
    bits = "round the weights to 8 or 4 bits, or with none convert such weights back"
    arguments.add_weights(add, "convert the weights (default: as in the checkpoint)", bits)
    device = "cpu, gpu or tpu, or one of several: gpu:1 (default: jax's)"
    add("--device", type=arguments.device, metavar="NAME", help=device)
    add("--mesh", type=arguments.mesh, metavar="DATAxMODEL", help="split rows and weights across devices, such as 1x8")
    keep = "keep compiled programs in the user's cache directory, so that the next start is fast"
    add("--compile-cache", action=argparse.BooleanOptionalAction, default=True, help=keep)
    add("--debug", action="store_true", help="show tracebacks, and which programs are compiled and why")


def read(command: arguments.Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse arguments; raise an `InputError` if one is unknown, missing or invalid."""
    options, rest = command.read(words)
    if rest:
        command.error(f"{rest[0]!r} does not belong to an option")
    names = [name for name, _ in options.adapter or []]
    if len(set(names)) < len(names):
        command.error("--adapter has the same name twice: choose another NAME")
    return options


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after "serve" into options; raise an `InputError` if one is unknown or invalid."""
    command = parser()
    options = read(command, words)
    if options.port > 65535:
        command.error(f"--port {options.port} must be at most 65535")
    least = Limits(body=options.max_body, answer=options.max_answer).least_in_flight
    if options.max_in_flight < least:
        sizes = f"--max-body {options.max_body} and --max-answer {options.max_answer}"
        text = f"--max-in-flight {options.max_in_flight} must be at least {least} with {sizes}: change one of them"
        command.error(text)
    _check_tls(command, options)
    options.api_key = _keys(options.api_key)
    return options


def _check_tls(command: arguments.Parser, options: argparse.Namespace) -> None:
    for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
        if getattr(options, name) is not None and options.ssl_certfile is None:
            command.error(f"--{name.replace('_', '-')} needs --ssl-certfile: set that too")


def _keys(given: list[str] | None) -> list[str]:
    """Return the API keys in the options, or else the one in the environment."""
    named = [("--api-key", key) for key in given or []]
    if not named and "JAXGEN_API_KEY" in os.environ:
        named = [("JAXGEN_API_KEY", os.environ["JAXGEN_API_KEY"])]
    for name, key in named:
        check_key(name, key)
    return [key for _, key in named]
