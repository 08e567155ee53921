"""`jaxgen serve`: load a checkpoint, compile the engine's program, and answer requests until a signal arrives."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import hashlib
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from convert.checkpoint import Checkpoint
from jaxgen.cli import terminal
from jaxgen.cli.answer import load_model, open_model
from jaxgen.cli.device import mesh_of_devices
from jaxgen.cli.fingerprint import fingerprint
from jaxgen.cli.serve_options import SERVED
from jaxgen.cli.size_options import sizes_of
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.scoring.pooling import Pooling
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.engine.engine import Engine
from jaxgen.errors import InputError
from jaxgen.serving.limits import Limits
from jaxgen.version import __version__

if TYPE_CHECKING:
    from jaxgen.serving.app import Service

_MOST_ANSWER = 2048  # default limit
# How long a thread that parses a large request, say, may keep the interpreter lock while the engine's thread waits for
# it. A step of a small model takes less time than Python's default, 5 ms.
_SWITCH_SECONDS = 0.0001


def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT, then finish the submitted requests."""
    with extra_installed():
        from jaxgen.serving.doors import is_loopback
        from jaxgen.serving.server import server
    tls = tls_files(options)
    with _listening(options.host, options.port) as listener:
        source = open_model(options, list(dict(options.adapter or []).values()))
        host, port = listener.getsockname()[:2]
        names = [*options.allowed_host, options.host, host] if options.allowed_host else []
        limits = {"body": options.max_body, "answer": options.max_answer, "in_flight": options.max_in_flight}
        own = {
            "limits": Limits(**limits, stored=options.response_store_bytes, seconds=options.timeout),
            "keys": options.api_key,
            "cors_origins": options.cors_origin or [],
            "allowed_hosts": names or ([host] if is_loopback(host) else []),
        }
        with open_service(source, options, **own) as service:
            sys.setswitchinterval(_SWITCH_SECONDS)
            gc.freeze()  # exempts the model and the programs from garbage collection, which large requests cause
            listener.listen()  # clients that connect before uvicorn takes over will wait
            terminal.erase()
            where = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}/v1"
            terminal.say("ready", f"{served_name(options)} at {where}")
            # After its shutdown, uvicorn raises SIGTERM again; ignoring it keeps the exit from looking like a failure.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            server(service.app(), **tls).run(sockets=[listener])


def tls_files(options: argparse.Namespace) -> dict[str, Any]:
    """Return uvicorn's options for TLS; empty without --ssl-certfile. Raise an `InputError` if a file is not usable."""
    if options.ssl_certfile is None:
        return {}
    keyfile, password = options.ssl_keyfile or options.ssl_certfile, options.ssl_keyfile_password or ""
    context, asked = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), []

    def secret() -> str:
        asked.append(True)
        return password

    try:
        context.load_cert_chain(options.ssl_certfile, keyfile, secret)
    except (OSError, ValueError) as error:
        if asked and _reason(error) != "KEY_VALUES_MISMATCH":
            raise InputError(f"{keyfile} is encrypted: set --ssl-keyfile-password to its password") from error
        files = f"--ssl-certfile {options.ssl_certfile}, with the private key in {keyfile}"
        raise InputError(f"{files}: {_reason(error)}; both must be PEM files that belong together") from error
    tls = {"ssl_certfile": options.ssl_certfile, "ssl_keyfile": keyfile, "ssl_keyfile_password": password or None}
    if options.ssl_ca_certs is None:
        return tls
    try:
        context.load_verify_locations(options.ssl_ca_certs)
    except OSError as error:
        raise InputError(f"--ssl-ca-certs {options.ssl_ca_certs}: {_reason(error)}; it must be a PEM file") from error
    return tls | {"ssl_ca_certs": options.ssl_ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED}


def _reason(error: Exception) -> str:
    """Return OpenSSL's name for an error, or what the operating system says."""
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


@contextlib.contextmanager
def open_service(source: Checkpoint, options: argparse.Namespace, **more: Any) -> Iterator[Service]:
    """Load a checkpoint, compile the engine's programs, and yield a service; close its engine when the block exits.

    `more` are further arguments of `Service`, which concern requests over HTTP.
    """
    with extra_installed():
        from jaxgen.serving.app import Service
    adapters = dict(options.adapter or [])
    paths = list(adapters.values())
    tokenizer, pooling = Tokenizer.from_pretrained(source.path), Pooling.from_pretrained(source.path)
    params, loaded = load_model(source, paths, options, mesh_of_devices(options.mesh))
    context = loaded.model.context_length
    cfg = configured(loaded, options, context)
    sizes = sizes_of(options, SERVED)
    sizes = dataclasses.replace(sizes, prompt_width=min(sizes.prompt_width, context))
    terminal.show("compiling")
    key = jax.random.key(0)  # not used, because each request has its own key
    engine = Engine(params, cfg, key, sizes=sizes, tokenizer=tokenizer, stop_in_prompt=False)
    weights = f"{fingerprint(source, paths)} {options.dtype} {options.quantize} {__version__}"
    with engine:
        engine.warmup()
        yield Service(
            engine,
            params,
            served_name(options),
            adapters=list(adapters),
            fingerprint=f"fp_{hashlib.sha256(weights.encode()).hexdigest()[:12]}",
            pooling=pooling,
            thoughts=not options.thoughts_in_content,
            **more,
        )


def served_name(options: argparse.Namespace) -> str:
    """Return the model's name in requests."""
    return options.name or Path(options.model or "jaxgen-demo").name or options.model


@contextlib.contextmanager
def extra_installed() -> Iterator[None]:
    """In the block, packages of the extra `serve` are imported; if one is missing, say how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(f'{error.name} is missing: in the clone of jaxgen, run pip install -e ".[serve]"') from error


def configured(loaded: GenerationConfig, options: argparse.Namespace, context: int) -> GenerationConfig:
    """Return the engine's config: the checkpoint's config with sampling and log-probabilities enabled.

    A request without a temperature uses the checkpoint's temperature, or 1 if the checkpoint does not sample.
    """
    budget = options.max_new_tokens or min(context, _MOST_ANSWER)
    fields: dict[str, Any] = {"max_new_tokens": min(budget, context), "do_sample": True}
    if not loaded.on("do_sample"):
        fields |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return loaded.replace(**fields, output_logprobs="logits", top_logprobs=options.max_logprobs)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that is already bound, so that an address in use is reported before the weights are read."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(f"--host {host}: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise InputError(f"--port {port} of {host}: {error.strerror}") from error
        yield listener
