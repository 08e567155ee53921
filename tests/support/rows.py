"""Options applied to rows of scores, as in the pipeline."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen import GenerationConfig, History
from jaxgen.core.logits.pipeline import build_transform
from jaxgen.core.logits.row_options import RowOptions
from jaxgen.core.logits.warpers import WARPERS, top_k_top_p
from jaxgen.shapes import token_set
from tests.support.models import model_config


@dataclasses.dataclass(frozen=True)
class _Kept(RowOptions):
    """Options with a number of tokens to keep that does not depend on beams."""

    least: int = 1

    def min_tokens_to_keep(self, rows: int) -> int:
        return self.least


def warp(name: str, scores, *values, keep: int = 1, mesh=None, beams: int = 1) -> jax.Array:
    """Apply the warper `name` with a value for all rows, or `[rows, 1]`; "top_k_top_p" takes two values."""
    names = ("top_k", "top_p") if name == "top_k_top_p" else (name,)
    rows, vocab = scores.shape
    of_rows = {own: jnp.broadcast_to(value, (rows, 1))[:, 0] for own, value in zip(names, values, strict=True)}
    history = history_of(np.zeros((rows, 1), np.int32), np.ones(rows, np.int32), vocab=vocab)
    warper = top_k_top_p if len(names) == 2 else WARPERS[name]
    return warper(history, scores, _Kept(config_of(vocab, num_beams=beams), of_rows, mesh, keep))


@functools.partial(jax.jit, static_argnames="vocab")
def history_of(ids, length, prompt_length=None, *, vocab, budget=None) -> History:
    """Return the history of rows with `length` tokens. The first `prompt_length` (default: all) are the prompt."""
    ids, length = jnp.asarray(ids), jnp.asarray(length)
    prompt_length = length if prompt_length is None else jnp.asarray(prompt_length)

    def tokens_before(end):
        return token_set(jnp.where(jnp.arange(ids.shape[1])[None, :] < end[:, None], ids, -1), vocab)

    return History(
        ids=ids,
        length=length,
        prompt_length=prompt_length,
        budget=length - prompt_length + 100 if budget is None else budget,
        done=jnp.zeros(length.shape, bool),
        unknown=jnp.zeros_like(length),
        seen=tokens_before(length),
        prompt_seen=tokens_before(prompt_length),
    )


@jax.jit
def _transform(cfg, history, scores):
    return build_transform(RowOptions.of(cfg, scores.shape[0]))(history, scores)


def config_of(vocab: int, **fields) -> GenerationConfig:
    """Return a config with only these options turned on."""
    return GenerationConfig(model=model_config(vocab_size=vocab), top_k=0).replace(**fields)


def process(scores, history: History | None = None, **fields) -> np.ndarray:
    """Return the scores float32[rows, V] after the processors and warpers of a config with these fields."""
    rows, vocab = scores.shape
    if history is None:
        history = history_of(np.zeros((rows, 1), np.int32), np.ones(rows, np.int32), vocab=vocab)
    return np.asarray(_transform(config_of(vocab, **fields), history, scores))
