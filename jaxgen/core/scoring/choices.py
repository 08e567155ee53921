"""Scoring of multiple-choice answers."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence

import numpy as np

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.scoring.score_many import score_many
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError


@dataclasses.dataclass(frozen=True)
class ChoiceScores:
    """Scores of several answers to the same question.

    Attributes:
        logprobs: float32[n], the log-probability of each answer.
        per_token: float32[n], `logprobs` divided by each answer's number of tokens.
        per_byte: float32[n], `logprobs` divided by each answer's number of UTF-8 bytes; comparable across tokenizers.
    """

    logprobs: np.ndarray
    per_token: np.ndarray
    per_byte: np.ndarray


def score_choices(
    params, question: str, choices: Sequence[str], cfg: GenerationConfig, tokenizer: Tokenizer
) -> ChoiceScores:
    """Score the answers of a multiple-choice question, as evaluation suites do.

    >>> scores = score_choices(params, "The sky is", [" blue", " made of cheese"], cfg, tok)
    >>> scores.per_token.argmax()

    Each answer directly follows the question, without a space or a chat template in between. The question is encoded
    once by itself, and once together with each answer. An answer's tokens start where the two encodings first differ.
    The answer's first token may therefore contain the end of the question.

    Args:
        params: the parameters.
        question: the text before every answer. For a chat model, render the question with `tokenizer.render_chat`.
        choices: the answers, none of which may be empty.
        cfg: as in `score`.
        tokenizer: the model's tokenizer.

    Raises:
        InputError: there are no answers, or an answer is empty or adds no token.
        TypeError: `choices` is not a list of strings.
    """
    if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
        raise TypeError("choices must be a list of texts")
    if not choices or not all(choices):
        raise InputError("choices must have at least one text, and none of them may be empty")
    alone = tokenizer.encode(question) if question else []
    rows = [tokenizer.encode(question + choice) for choice in choices]
    shared = [sum(1 for _ in itertools.takewhile(bool, map(operator.eq, alone, row))) for row in rows]
    counts = np.array([len(row) - max(start, 1) for row, start in zip(rows, shared, strict=True)])
    if counts.min() < 1:
        raise InputError(f"{choices[int(counts.argmin())]!r} adds no token to the question, so it has no score")
    requests = [(row[: len(row) - count], row[len(row) - count :]) for row, count in zip(rows, counts, strict=True)]
    logprobs = np.array([answer.total for answer in score_many(params, requests, cfg)], np.float32)
    sizes = np.array([len(choice.encode()) for choice in choices])
    return ChoiceScores(logprobs, (logprobs / counts).astype(np.float32), (logprobs / sizes).astype(np.float32))
