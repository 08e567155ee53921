"""OpenAI's embeddings: vectors of texts, computed next to the engine, a few texts at a time."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import jax
import msgspec
import numpy as np

from jaxgen.buckets import prompt_bucket
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.request.inputs import row_ids
from jaxgen.core.scoring.embedding import embed
from jaxgen.core.scoring.pooling import Pooling
from jaxgen.programs import default_device
from jaxgen.serving.encoding import Encoder, texts_of
from jaxgen.serving.http_errors import ApiError, about

_MOST_TEXTS, _MOST_TOKENS = 2048, 300_000  # OpenAI's limits for a request
_FLOAT, _BASE64 = 24, 6  # bytes of a number in an answer
_ROWS = 8  # maximum number of texts in a pass
_PASS_TOKENS, _PASS_TOKENS_ON_CPU = 8192, 1024  # approximate maximum number of tokens in a pass


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/embeddings."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    add_special_tokens: bool = True
    user: str | None = None  # has no effect


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of one text: numbers, or the base64 of their bytes as little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    """Numbers of tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The answer to a request for embeddings, in the order of its texts."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Embedder:
    """Reads requests for embeddings, and computes vectors.

    Args:
        params: the parameters.
        cfg: the engine's config.
        tokenizer: the model's tokenizer.
        pooling: how the model pools.
        width: the maximum number of tokens in a text.
    """

    def __init__(self, params: Any, cfg: GenerationConfig, encoder: Encoder, pooling: Pooling, width: int):
        self._params, self._cfg, self._encoder, self._pooling = params, cfg, encoder, pooling
        self._width = width

    def read(self, request: EmbeddingRequest) -> list[list[int]]:
        """Return the ids of the texts, or raise an `ApiError`."""
        self._check_dimensions(request.dimensions)
        texts = texts_of(request.input, "input")
        if len(texts) > _MOST_TEXTS:
            raise ApiError(400, f"input must have 1 to {_MOST_TEXTS} texts, got {len(texts)}", "input")
        rows = [self._ids(text, f"input[{i}]", request.add_special_tokens) for i, text in enumerate(texts)]
        if (total := sum(map(len, rows))) > _MOST_TOKENS:
            raise ApiError(400, f"input has {total} tokens, but at most {_MOST_TOKENS} are accepted", "input")
        return rows

    def _ids(self, text: str | list[int], where: str, adds_special: bool) -> list[int]:
        if isinstance(text, str):
            text = self._encoder.encode(text, where, adds_special)
        with about("input"):
            ids = row_ids(text, self._cfg.model, where)
        if len(ids) > self._width:
            raise ApiError(400, f"{where} has {len(ids)} tokens, but must have 1 to {self._width}", "input")
        return ids.tolist()

    def _check_dimensions(self, size: int | None) -> None:
        """Raise an error if vectors cannot be shortened to `size` entries, by vLLM's rules."""
        full, pooling = self._cfg.model.hidden_size, self._pooling
        if size is None or size == full:
            return
        if not pooling.shortens:
            text = f"dimensions must be {full}: the model was not trained for shorter vectors (is_matryoshka)"
            raise ApiError(400, text, "dimensions")
        if pooling.dimensions and size not in pooling.dimensions:
            text = f"dimensions must be one of {', '.join(map(str, pooling.dimensions))}, got {size}"
            raise ApiError(400, text, "dimensions")
        if size > full:
            raise ApiError(400, f"dimensions must be from 1 to {full}, got {size}", "dimensions")

    def answer_bytes(self, request: EmbeddingRequest, texts: int, limit: int) -> int:
        """Return the size of an answer in bytes, or raise an `ApiError` if it is larger than `limit`."""
        size = texts * (request.dimensions or self._cfg.model.hidden_size)
        size *= _BASE64 if request.encoding_format == "base64" else _FLOAT
        if size > limit:
            text = f"the answer could have {size:,} bytes, but at most {limit:,} are accepted: send fewer texts"
            raise ApiError(400, f'{text}, or set encoding_format to "base64"', "input")
        return 2 * size

    def passes(self, rows: Sequence[list[int]]) -> Iterator[list[int]]:
        """Yield the indices of the texts of each pass: texts of the same rounded width, shortest first."""
        of_width: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            of_width.setdefault(prompt_bucket(len(row)), []).append(index)
        for width, indices in sorted(of_width.items()):
            size = _rows(width)
            yield from (indices[start : start + size] for start in range(0, len(indices), size))

    def vectors(self, rows: Sequence[list[int]], adapter: int) -> np.ndarray:
        """Return the vectors of the texts of one pass, float32[B, D]."""
        width = prompt_bucket(max(map(len, rows)))
        count = 1 if len(rows) == 1 else _rows(width)  # so there are two programs for each width
        ids, mask = np.zeros((count, width), np.int32), np.zeros((count, width), bool)
        mask[:, 0] = True  # no row may be empty, not even rows that only fill the pass
        for index, row in enumerate(rows):
            ids[index, : len(row)], mask[index, : len(row)] = row, True
        cfg = self._cfg.replace(adapter=adapter)
        found = embed(self._params, ids, cfg, attention_mask=mask, pooling=self._pooling)
        return np.asarray(jax.device_get(found))[: len(rows)]

    def answer(self, request: EmbeddingRequest, vectors: np.ndarray, tokens: int, model: str) -> EmbeddingList:
        """Return the answer to a request; `vectors` are in the order of its texts."""
        if request.dimensions is not None and request.dimensions != vectors.shape[1]:
            vectors = vectors[:, : request.dimensions]
            if self._pooling.normalized:
                vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        is_encoded = request.encoding_format == "base64"
        data = [
            Embedding(
                index=index,
                embedding=base64.b64encode(row.astype("<f4").tobytes()).decode() if is_encoded else row.tolist(),
            )
            for index, row in enumerate(vectors)
        ]
        return EmbeddingList(data=data, model=model, usage=EmbeddingUsage(tokens, tokens))


def _rows(width: int) -> int:
    """Return the maximum number of texts of this width in a pass."""
    limit = _PASS_TOKENS_ON_CPU if default_device().platform == "cpu" else _PASS_TOKENS
    return max(1, min(_ROWS, limit // width))
