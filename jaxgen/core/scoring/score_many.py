"""Log-probabilities of many texts of any length, and of several continuations of the same context."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgen.buckets import power_of_two, prompt_bucket
from jaxgen.core.config.availability import with_hints
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.context import Context
from jaxgen.core.model.sharding import mesh_of, place_rows
from jaxgen.core.request.checks import check_call
from jaxgen.core.request.inputs import row_ids
from jaxgen.core.scoring.compiled import continuation_logprobs
from jaxgen.core.scoring.score import LOGITS_AT_ONCE, chunk_size
from jaxgen.errors import ConfigError, InputError, check_whole
from jaxgen.programs import default_device
from jaxgen.progress import progress_bar

# A 7B model in bfloat16 needs 0.5 GB for the keys and values of 8,192 tokens. A batch of more than 1,024 tokens is
# no use on a CPU: matrix products do not get faster, and layer outputs no longer fit into the CPU's caches.
_BATCH_TOKENS, _BATCH_TOKENS_ON_CPU = 8192, 1024
_MOST_CONTINUATIONS = 32  # maximum number of continuations of one context in a group
_LEAST_WIDTH = 16  # minimum width for continuations of more than one token


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Scores of the tokens of one continuation.

    Attributes:
        logprobs: float32[n], the log-probability of each token given all tokens before it.
        is_greedy: bool[n], True for each token that greedy search would choose.
    """

    logprobs: np.ndarray
    is_greedy: np.ndarray

    @property
    def total(self) -> float:
        """The log-probability of the continuation."""
        return float(np.sum(self.logprobs, dtype=np.float64))


@dataclasses.dataclass(frozen=True)
class _Group:
    """Continuations of one context, by request number.

    Attributes:
        copies: the number of rows, which is the number of continuations rounded up to a power of two.
        widths: the numbers of columns for the context and for the longest continuation.
    """

    context: tuple[int, ...]
    continuations: dict[int, tuple[int, ...]]
    copies: int
    widths: tuple[int, int]

    @classmethod
    def of(cls, context: tuple[int, ...], continuations: dict[int, tuple[int, ...]]) -> _Group:
        width = _width(max(map(len, continuations.values())))
        columns = 1 if len(context) == 1 else prompt_bucket(len(context))  # text windows have 1 token of context
        return cls(context, continuations, power_of_two(len(continuations), 1), (columns, width))


def _width(size: int) -> int:
    """Return how many columns a continuation has: 1 for the last token, plus the rounded-up number of other tokens."""
    return 1 if size == 1 else 1 + _columns(size - 1)


def _columns(size: int) -> int:
    """Round `size` up to a power of two, p. If `size` is above 256, round it up only to a multiple of p / 8."""
    # Above 256, the finer rounding adds few programs, because long texts are often cut into windows of equal length.
    step = power_of_two(size, _LEAST_WIDTH) // 8
    return -(-size // step) * step if size > 256 else 8 * step


@with_hints
def score_many(
    params,
    requests: Iterable[tuple[Sequence[int], Sequence[int]]],
    cfg: GenerationConfig,
    *,
    batch_tokens: int | None = None,
    progress: bool = False,
) -> list[TokenScores]:
    """Score continuations, each given its context, in batches of requests of similar length.

    >>> scores = score_many(params, [(question, yes), (question, no)], cfg)
    >>> scores[0].total > scores[1].total
    >>> texts = score_many(params, [(ids[:1], ids[1:]) for ids in corpus], cfg)

    A context shared by several requests is read only once. Sizes are rounded up to buckets, so that only a few programs
    are compiled. In float32, the results match those of `score` to within about 1e-5.

    Args:
        params: the parameters, a tree with Hugging Face's names.
        requests: pairs `(context, continuation)` of lists of ids. Each list has at least one id.
        cfg: as in `score`. Only `cfg.model` and `cfg.adapter` are used, with the same adapter for all requests.
        batch_tokens: the approximate number of tokens in memory at a time, including padding; by default 8,192, or
            1,024 on a CPU. A longer request forms a batch by itself.
        progress: if True, show a progress bar of tqdm on stderr, which counts requests.

    Returns:
        The scores, in the order of the requests.

    Raises:
        InputError: a context or continuation is empty, an id is not in the vocabulary, a request exceeds the length of
            longrope's short factors, or `progress` is True and tqdm is not installed.
        ConfigError: `cfg` has no model, or the model uses dynamic RoPE, which depends on the whole length of a row.
        TypeError: a request is not a pair of lists of ids.
    """
    check_call(params, cfg)
    if batch_tokens is None:
        batch_tokens = _BATCH_TOKENS_ON_CPU if default_device().platform == "cpu" else _BATCH_TOKENS
    check_whole("batch_tokens", batch_tokens, error=ConfigError)
    model = cfg.model
    if model.has_dynamic_rope:
        raise ConfigError("score_many reads each context once, which dynamic RoPE does not allow: use score")
    if np.ndim(cfg.adapter):
        raise ConfigError("adapter has one value per prompt, but score_many has no fixed prompts: set one value")
    mesh = mesh_of(params)
    found: dict[int, TokenScores] = {}
    most_rows = max(1, LOGITS_AT_ONCE // model.vocab_size)
    groups = list(_groups(requests, model, batch_tokens))
    total = sum(len(group.continuations) for group in groups)
    with progress_bar(progress, "scoring", total, "requests") as add:
        for batch in _batches(groups, batch_tokens, most_rows):
            scores = _score(params, batch, cfg, mesh)
            found |= scores
            add(len(scores))
    return [found[number] for number in range(len(found))]


def _groups(
    requests: Iterable[tuple[Sequence[int], Sequence[int]]], model: ModelConfig, batch_tokens: int
) -> Iterator[_Group]:
    """Group requests with equal contexts and similar lengths; `batch_tokens` limits a group's continuation tokens."""
    of_context: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}
    for number, request in enumerate(requests):
        if not isinstance(request, tuple | list) or len(request) != 2:
            raise TypeError(f"request {number} must be a pair of lists of ids: (context, continuation)")
        names = f"the context of request {number}", f"the continuation of request {number}"
        context, continuation = (
            tuple(row_ids(part, model, name).tolist()) for part, name in zip(request, names, strict=True)
        )
        length = len(context) + len(continuation)
        if model.short_length is not None and length > model.short_length:
            raise InputError(
                f"request {number} has {length} tokens. longrope has other factors beyond {model.short_length} tokens, "
                "but the context is read without its continuation: use score"
            )
        of_context.setdefault(context, {})[number] = continuation
    for context, own in of_context.items():
        rest = sorted(own.items(), key=lambda item: len(item[1]), reverse=True)
        while rest:
            fitting = max(1, batch_tokens // _width(len(rest[0][1])))
            size = min(1 << (fitting.bit_length() - 1), _MOST_CONTINUATIONS)  # groups have 2**n rows
            yield _Group.of(context, dict(rest[:size]))
            rest = rest[size:]


def _batches(groups: Iterable[_Group], batch_tokens: int, most_rows: int) -> Iterator[list[_Group]]:
    """Yield batches of groups, largest first. A batch of several groups has at most `most_rows` continuations."""
    batch, width = [], 0
    for group in sorted(groups, key=lambda group: (group.copies, group.widths), reverse=True):
        width = max(width, group.widths[1])
        if batch:
            first = batch[0]
            rows = power_of_two(len(batch) + 1, 1)
            size = rows * (first.widths[0] + first.copies * width)
            if group.copies != first.copies or size > batch_tokens or rows * first.copies > most_rows:
                yield batch
                batch, width = [], group.widths[1]
        batch.append(group)
    if batch:
        yield batch


def _score(params, batch: list[_Group], cfg: GenerationConfig, mesh: Mesh | None) -> dict[int, TokenScores]:
    """Return the scores of the continuations in a batch, by request number."""
    copies, rows = batch[0].copies, power_of_two(len(batch), 1)
    columns, width = (max(sizes) for sizes in zip(*(group.widths for group in batch), strict=True))
    contexts, ids = np.zeros((rows, columns), np.int32), np.zeros((rows * copies, width), np.int32)
    context_mask, mask = np.zeros(contexts.shape, bool), np.zeros(ids.shape, bool)
    context_mask[:, -1] = True  # no row may be empty, not even rows that only pad the batch
    rows_and_sizes = {}
    for row, group in enumerate(batch):
        contexts[row, columns - len(group.context) :] = group.context
        context_mask[row, columns - len(group.context) :] = True
        for index, (number, continuation) in enumerate(group.continuations.items(), row * copies):
            ids[index, : len(continuation)] = continuation
            mask[index, : len(continuation)] = True
            rows_and_sizes[number] = index, len(continuation)
    chunk = chunk_size(None, width, len(ids) * cfg.model.vocab_size)
    inputs = place_rows((contexts, context_mask, ids, mask), mesh)
    adapter: Any = np.full(1, cfg.adapter, np.int32) if cfg.on("adapter") else None
    context = Context(mesh is not None, adapter)
    scores = continuation_logprobs(params, *inputs, context=context, model=cfg.model, chunk=chunk)
    logprobs, is_greedy = (np.asarray(x) for x in jax.device_get((scores.logprobs, scores.is_greedy)))
    return {number: TokenScores(logprobs[row, :n], is_greedy[row, :n]) for number, (row, n) in rows_and_sizes.items()}
