"""`jaxgen run-batch`: answer a batch file with the service's application and a compiled engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from convert.checkpoint import Checkpoint
from convert.hf import float_dtype
from jaxgen.cli import terminal
from jaxgen.cli.answer import open_model
from jaxgen.cli.answer_file import AnswerFile
from jaxgen.cli.fingerprint import fingerprint
from jaxgen.cli.input_file import source_bytes
from jaxgen.cli.remote_output import output_file
from jaxgen.cli.serve import extra_installed, open_service, served_name
from jaxgen.errors import GenerationError

if TYPE_CHECKING:
    from jaxgen.serving.app import Service
    from jaxgen.serving.batch import BatchRequest

_ANY = 2**62  # lines of the file and their answers may have any length
# Options that do not affect the answers, or that `_run` records in a different form.
_NOT_IN_FINGERPRINT = set(
    "input output model name adapter dtype device mesh most_waiting prefix_cache_bytes compile_cache debug".split()
)


def run_batch(options: argparse.Namespace) -> int:
    """Write the answers to `options.output`, and return the number of requests that failed.

    All lines are checked before the weights are read.
    """
    with extra_installed():
        from jaxgen.serving.batch import read_batch
        from jaxgen.serving.limits import Limits
    data = source_bytes(options.input)
    requests = read_batch(options.input, data)
    source = open_model(options, list(dict(options.adapter or []).values()))
    failed = 0
    with output_file(options.output, _run(options, data, source), prompts=len(requests)) as file:
        left = [index for index in range(len(requests)) if not file.done[index]]
        if len(left) < len(requests):
            terminal.say("note", f"{len(requests) - len(left):,} of {len(requests):,} requests were answered before")
        if left:
            limits = Limits(
                body=_ANY,
                answer=_ANY,
                in_flight=4 * _ANY,
                stored=0,
                seconds=math.inf,
                grammar_seconds=math.inf,
                share=1.0,
            )
            at_once = min(2 * options.slots, options.most_waiting)
            with open_service(source, options, limits=limits) as service:
                failed = asyncio.run(_answer(service, requests, left, file, at_once))
    return failed


async def _answer(
    service: Service, requests: Sequence[BatchRequest], left: Sequence[int], file: AnswerFile, at_once: int
) -> int:
    """Answer the requests in `left`, and return the number that failed."""
    from jaxgen.serving.batch import answer_batch

    app, answered, failed = service.app(), 0, 0
    terminal.show(lambda: f"{answered + len(requests) - len(left):,} of {len(requests):,} requests")
    async with contextlib.aclosing(answer_batch(app, requests, left, at_once)) as answers:
        async for index, entry in answers:
            status = entry["response"]["status_code"]
            if status >= 500 and not service.is_open:
                raise GenerationError(f"the engine stopped: {entry['response']['body']['error']['message']}")
            file.write(index, [entry])
            answered += 1
            failed += status != 200
    terminal.erase()
    terminal.report(f"answered {answered:,} {'request' if answered == 1 else 'requests'}")
    return failed


def _run(options: argparse.Namespace, data: bytes, source: Checkpoint) -> dict[str, Any]:
    """Return everything that the answers depend on, keyed by the names used in error messages."""
    adapters = dict(options.adapter or [])
    model = f"{source.cfg!r} {source.cfg.model!r} {fingerprint(source, adapters.values())} {list(adapters)}"
    flags = {
        f"--{name.replace('_', '-')}": value for name, value in vars(options).items() if name not in _NOT_IN_FINGERPRINT
    }
    return {
        "INPUT": hashlib.sha256(data).hexdigest(),
        "--model": hashlib.sha256(model.encode()).hexdigest(),
        "--name": served_name(options),
        **flags,
        "--dtype": source.dtype(float_dtype(options.dtype)).name,
    }
