"""Files of answers at URLs: written in the cache directory, where runs are resumed, and copied when they are complete.

This module does not import jax.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxgen import remote
from jaxgen.cli import terminal
from jaxgen.cli.answer_file import WHOLE, AnswerFile, Shard, answer_file
from jaxgen.errors import InputError


def local_target(target: Path | str) -> Path:
    """Return the local file to write: `target` itself, or the file that is copied to the URL `target`."""
    if not remote.is_url(target):
        return Path(target)
    url = str(target)
    folder = remote.cache_directory() / "outputs" / hashlib.sha256(url.encode()).hexdigest()[:16]
    return folder / (url.rpartition("/")[2] or "answers")


@contextlib.contextmanager
def output_file(
    target: Path | str, run: Mapping[str, Any], *, prompts: int, shard: Shard = WHOLE
) -> Iterator[AnswerFile]:
    """Open `target` as `answer_file` does; if it is a URL, copy the complete file there when the block exits."""
    local = local_target(target)
    if not remote.is_url(target):
        with answer_file(local, run, prompts=prompts, shard=shard) as file:
            yield file
        return
    url = str(target)
    if remote.exists(url):
        raise InputError(f"{url} exists: choose another name, or remove it")
    local.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with answer_file(local, run, prompts=prompts) as file:
        yield file
    terminal.show(f"copying the answers to {url}")
    try:
        remote.write(url, local)
    except InputError as error:
        raise InputError(f"{error}: the answers are in {local}: copy that file, and remove it") from error
    local.unlink()
