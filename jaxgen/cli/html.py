"""`--html`: an HTML page with the answers to a prompt and the log-probability of each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxgen.cli.session import Session
from jaxgen.core.decoding.logprobs import LogProbs
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.output import GenerateOutput
from jaxgen.errors import InputError
from jaxgen.serving.page import MARK, page
from jaxgen.serving.scored import Scored, TokenTexts, entries

ALTERNATIVES = 5  # number of most likely tokens to show at each position


def check_target(path: Path) -> None:
    """Raise an error if a page cannot be written to `path`; an existing file is replaced only if `--html` wrote it."""
    if not path.parent.is_dir():
        raise InputError(f"--html {path}: the directory {path.parent} does not exist")
    if path.is_dir():
        raise InputError(f"--html {path} is a directory: add a file name")
    if path.exists() and not path.is_file():
        raise InputError(f"--html {path} is not a regular file: choose another name")
    if path.exists() and MARK.encode() not in path.read_bytes()[:1000]:
        raise InputError(f"--html {path}: the file was not written by this command: choose another name")


def write_page(path: Path, session: Session, model: str, prompt: str, out: GenerateOutput) -> None:
    """Write a page with the answers to one prompt; `out` must have `logprobs`, `top_logprobs` and `top_tokens`."""
    all_logged = [np.asarray(values) for values in (out.logprobs, out.top_logprobs, out.top_tokens)]
    texts, answers = TokenTexts(session.tokenizer), []
    for row, text in enumerate(session.tokenizer.decode_batch(out)):
        count, reason = int(np.asarray(out.lengths)[row]), StopReason(int(np.asarray(out.stop_reasons)[row]))
        ids = np.asarray(out.sequences)[row, out.prompt_width :][:count].tolist()
        logged: list[Any] = [values[row, :count] for values in all_logged]
        note = f"{count} tokens · {reason.name.lower()}"
        answers.append(
            {"text": text, "tokens": entries(Scored(ids, LogProbs(*logged), ALTERNATIVES), texts), "note": note}
        )
    settings = {"kind": "recorded", "model": model, "prompt": prompt, "answers": answers}
    path.write_text(page(settings), "utf-8")
