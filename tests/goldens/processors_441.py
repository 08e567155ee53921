"""Random rows for each logits processor and warper of transformers 4.41.1, and the results of its class.

Each row is passed to the class separately. This avoids a bug of 4.41.1, in which the encoder repetition penalty changes
only the first of several rows. Comments mark where two other bugs are avoided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from transformers.generation import logits_process as hf
from transformers.modeling_outputs import CausalLMOutput

VOCABULARIES = (17, 64)
WIDTH = 24  # maximum number of tokens in a row
MARGIN = 1e-5  # rows closer to a warper's boundary are redrawn, because rounding could change which tokens it keeps


@dataclasses.dataclass
class Row:
    """A row's scores float32[V] and its tokens, the first `length` of `ids`. The other ids have no meaning."""

    scores: np.ndarray
    ids: list[int]
    length: int
    prompt_length: int

    @property
    def vocab(self) -> int:
        return len(self.scores)

    @property
    def tokens(self) -> list[int]:
        return self.ids[: self.length]

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.prompt_length]

    def context(self, *names: str) -> dict:
        """Return the fields to record about the tokens: `ids`, `length`, and those in `names`."""
        return {name: getattr(self, name) for name in ("ids", "length", *names)}


def draw_row(rng: np.random.Generator) -> Row:
    """Draw a row with scores of any kind, and with many repeated tokens."""
    vocab = int(rng.choice(VOCABULARIES))
    letters = rng.choice(vocab, size=int(rng.choice([1, 2, 3, 5, vocab])), replace=False)
    length = int(rng.integers(1, 1 + (4 if rng.random() < 0.3 else WIDTH)))
    ids = [int(i) for i in rng.choice(letters, size=WIDTH)]
    return Row(draw_scores(vocab, rng), ids, length, prompt_length=int(rng.integers(1, length + 1)))


def draw_scores(vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Draw scores, float32[V]. Most have few digits, some have ties or many -inf, and in a few all scores are equal."""
    scores = rng.standard_normal(vocab) * rng.choice([0.3, 1.0, 3.0, 10.0]) + rng.choice([0.0, 0.0, -5.0, 20.0])
    if rng.random() < 0.25:
        scores = np.round(scores * 2) / 2
    if rng.random() < 0.8:
        scores = scores.astype(np.float16)
    if rng.random() < 0.03:
        scores = np.full(vocab, 1.25)
    if rng.random() < 0.3:
        finite = rng.choice(vocab, size=2, replace=False)  # at least these stay finite
        gone = rng.random(vocab) < rng.choice([0.1, 0.5, 0.9])
        scores[gone & ~np.isin(np.arange(vocab), finite)] = -np.inf
    return scores.astype(np.float32)


def number(value: float) -> float:
    """Round to float32, so that both libraries use the same number."""
    return float(np.float32(value))


def fill(rows: list, entries: int, width: int | None = None) -> np.ndarray:
    """Return a table of ids, [entries] or [entries, width], padded with -1."""
    if width is None:
        return np.array([*rows, *[-1] * (entries - len(rows))])
    return np.array([fill(row, width) for row in [*rows, *[()] * (entries - len(rows))]])


def some_ids(row: Row, rng: np.random.Generator, most: int) -> list[int]:
    """Draw 1 to `most` distinct ids."""
    return rng.choice(row.vocab, size=int(rng.integers(1, most + 1)), replace=False).tolist()


def draw_sequences(row: Row, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Draw 1 to 8 sequences of up to 4 ids. Many begin with the row's last tokens.

    None has exactly one more id than the row has tokens, because 4.41.1, unlike later releases, ignores such sequences.
    """
    sequences = []
    for _ in range(int(rng.integers(1, 9))):
        size = int(rng.choice([n for n in (1, 1, 2, 3, 4) if n != row.length + 1]))
        start = [int(i) for i in rng.choice(row.ids, size=size - 1)]
        if size <= row.length and rng.random() < 0.6:
            start = row.tokens[row.length - size + 1 :]
        sequences.append((*start, int(rng.integers(row.vocab))))
    return list(dict.fromkeys(sequences))


Drawn = tuple[dict, Callable]  # the fields to record in addition to scores and result; the processor


def guidance(row: Row, rng: np.random.Generator) -> Drawn:
    row.scores = np.where(np.isfinite(row.scores), row.scores, np.float32(-3.5))  # a model's logits are finite
    uncond = row.scores + rng.standard_normal(row.vocab).astype(np.float16).astype(np.float32)
    scale = number(rng.choice([0.0, 1.0, 1.5, *rng.uniform(-2, 8, size=5)]))

    def model(*args, **kwargs) -> CausalLMOutput:
        return CausalLMOutput(logits=torch.from_numpy(uncond)[None, None])

    processor = hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(scale, model)
    return {"uncond": wide(uncond), "scale": scale}, processor


def sequence_bias(row: Row, rng: np.random.Generator) -> Drawn:
    sequences = draw_sequences(row, rng)
    bias = [-np.inf if rng.random() < 0.1 else number(rng.normal() * 5) for _ in sequences]
    record = {"sequences": fill(sequences, 8, 4), "bias": np.array([*bias, *[0.0] * (8 - len(bias))])}
    return row.context() | record, hf.SequenceBiasLogitsProcessor(dict(zip(sequences, bias, strict=True)))


def bad_words(row: Row, rng: np.random.Generator) -> Drawn:
    sequences = draw_sequences(row, rng)
    eos = some_ids(row, rng, 3) if rng.random() < 0.8 else []
    if eos and len(sequences) < 8 and rng.random() < 0.5:
        sequences.append((eos[0],))
    record = {"sequences": fill(sequences, 8, 4), "eos": fill(eos, 4)}
    return row.context() | record, hf.NoBadWordsLogitsProcessor([list(s) for s in sequences], eos or None)


def encoder_repetition(row: Row, rng: np.random.Generator) -> Drawn:
    penalty = number(np.exp(rng.uniform(-1.5, 1.5)))
    processor = hf.EncoderRepetitionPenaltyLogitsProcessor(penalty, torch.tensor([row.prompt]))
    return row.context("prompt_length") | {"penalty": penalty}, processor


def repetition(row: Row, rng: np.random.Generator) -> Drawn:
    penalty = number(np.exp(rng.uniform(-1.5, 1.5)))
    return row.context() | {"penalty": penalty}, hf.RepetitionPenaltyLogitsProcessor(penalty)


def no_repeat_ngram(row: Row, rng: np.random.Generator) -> Drawn:
    n = int(rng.integers(1, 5))
    return row.context() | {"n": n}, hf.NoRepeatNGramLogitsProcessor(n)


def encoder_no_repeat_ngram(row: Row, rng: np.random.Generator) -> Drawn:
    n = int(rng.integers(1, 5))
    processor = hf.EncoderNoRepeatNGramLogitsProcessor(n, torch.tensor([row.prompt]))
    return row.context("prompt_length") | {"n": n}, processor


def min_length(row: Row, rng: np.random.Generator) -> Drawn:
    eos, least = some_ids(row, rng, 4), max(0, row.length + int(rng.integers(-2, 4)))
    return row.context() | {"eos": fill(eos, 4), "min_length": least}, hf.MinLengthLogitsProcessor(least, eos)


def min_new_tokens(row: Row, rng: np.random.Generator) -> Drawn:
    eos, least = some_ids(row, rng, 4), max(0, row.length - row.prompt_length + int(rng.integers(-2, 4)))
    record = row.context("prompt_length") | {"eos": fill(eos, 4), "min_new_tokens": least}
    return record, hf.MinNewTokensLengthLogitsProcessor(row.prompt_length, least, eos)


def prefix_constrained(row: Row, rng: np.random.Generator) -> Drawn:
    ids = some_ids(row, rng, row.vocab)
    allowed = np.isin(np.arange(max(VOCABULARIES)), ids)
    return {"allowed": allowed}, hf.PrefixConstrainedLogitsProcessor(lambda batch_id, tokens: ids, 1)


def forced_bos(row: Row, rng: np.random.Generator) -> Drawn:
    row.length = int(rng.integers(1, 3))
    token = int(rng.integers(row.vocab))
    return row.context() | {"token": token}, hf.ForcedBOSTokenLogitsProcessor(token)


def forced_eos(row: Row, rng: np.random.Generator) -> Drawn:
    eos, most = some_ids(row, rng, 3), row.length + int(rng.choice([1, 1, 2, 5]))
    return row.context() | {"eos": fill(eos, 4), "max_length": most}, hf.ForcedEOSTokenLogitsProcessor(most, eos)


def remove_invalid(row: Row, rng: np.random.Generator) -> Drawn:
    kind = rng.integers(0, 12, size=row.vocab)
    for i, value in enumerate((np.nan, np.inf, -np.inf)):
        row.scores[kind == i] = value
    return {}, hf.InfNanRemoveLogitsProcessor()


def exponential_decay(row: Row, rng: np.random.Generator) -> Drawn:
    eos, factor = some_ids(row, rng, 3), number(rng.uniform(0.5, 1.6))
    row.scores[eos] = np.where(np.isfinite(row.scores[eos]), row.scores[eos], 1.25)  # -inf would become NaN in 4.41.1
    start = max(0, row.length - row.prompt_length - int(rng.integers(-2, 12)))
    record = row.context("prompt_length") | {"eos": fill(eos, 4), "start": start, "factor": factor}
    return record, hf.ExponentialDecayLengthPenalty((start, factor), eos, row.prompt_length)


def suppress(row: Row, rng: np.random.Generator) -> Drawn:
    ids = some_ids(row, rng, 8)
    return {"tokens": fill(ids, 8)}, hf.SuppressTokensLogitsProcessor(ids)


def suppress_at_begin(row: Row, rng: np.random.Generator) -> Drawn:
    ids, begin = some_ids(row, rng, 8), row.length + int(rng.choice([0, 0, 1, -1]))
    return row.context() | {"tokens": fill(ids, 8), "begin": begin}, hf.SuppressTokensAtBeginLogitsProcessor(ids, begin)


def force_tokens(row: Row, rng: np.random.Generator) -> Drawn:
    places = rng.choice(6, size=int(rng.integers(1, 5)), replace=False) + row.length - 2
    forced = [[int(place), int(rng.integers(row.vocab))] for place in places if place >= 0]
    return row.context() | {"forced": fill(forced, 4, 2)}, hf.ForceTokensLogitsProcessor(forced, _has_warned=True)


def normalization(row: Row, rng: np.random.Generator) -> Drawn:
    return {}, hf.LogitNormalization()


def temperature(row: Row, rng: np.random.Generator) -> Drawn:
    value = number(np.exp(rng.uniform(-3, 3)))
    return {"value": value}, hf.TemperatureLogitsWarper(value)


def warper(kind: type, values: Callable[[np.random.Generator, int], list]) -> Callable[..., Drawn]:
    """Return a function that draws a case of a warper with `min_tokens_to_keep`."""

    def draw(row: Row, rng: np.random.Generator) -> Drawn:
        options = values(rng, row.vocab)
        value = options[int(rng.integers(len(options)))]
        keep = int(rng.choice([1, 2, 3], p=[0.6, 0.2, 0.2]))
        value = value if isinstance(value, int) else number(value)
        return {"value": value, "min_tokens_to_keep": keep}, kind(value, min_tokens_to_keep=keep)

    return draw


def small(rng: np.random.Generator) -> float:
    """Draw a probability, usually a small one."""
    return float(np.exp(rng.uniform(-7, -0.1)))


DRAWS: dict[str, Callable[..., Drawn]] = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": guidance,
    "SequenceBiasLogitsProcessor": sequence_bias,
    "EncoderRepetitionPenaltyLogitsProcessor": encoder_repetition,
    "RepetitionPenaltyLogitsProcessor": repetition,
    "NoRepeatNGramLogitsProcessor": no_repeat_ngram,
    "EncoderNoRepeatNGramLogitsProcessor": encoder_no_repeat_ngram,
    "NoBadWordsLogitsProcessor": bad_words,
    "MinLengthLogitsProcessor": min_length,
    "MinNewTokensLengthLogitsProcessor": min_new_tokens,
    "PrefixConstrainedLogitsProcessor": prefix_constrained,
    "ForcedBOSTokenLogitsProcessor": forced_bos,
    "ForcedEOSTokenLogitsProcessor": forced_eos,
    "InfNanRemoveLogitsProcessor": remove_invalid,
    "ExponentialDecayLengthPenalty": exponential_decay,
    "SuppressTokensLogitsProcessor": suppress,
    "SuppressTokensAtBeginLogitsProcessor": suppress_at_begin,
    "ForceTokensLogitsProcessor": force_tokens,
    "LogitNormalization": normalization,
    "TemperatureLogitsWarper": temperature,
    "TopKLogitsWarper": warper(hf.TopKLogitsWarper, lambda rng, vocab: [1, 3, int(rng.integers(2, vocab + 6))]),
    "TopPLogitsWarper": warper(hf.TopPLogitsWarper, lambda rng, vocab: [0.0, 1e-6, *rng.uniform(0.05, 0.995, 8)]),
    "MinPLogitsWarper": warper(hf.MinPLogitsWarper, lambda rng, vocab: [0.0, 1.0, *[small(rng)] * 8]),
    "TypicalLogitsWarper": warper(hf.TypicalLogitsWarper, lambda rng, vocab: [float(rng.uniform(0.01, 0.99))]),
    "EpsilonLogitsWarper": warper(hf.EpsilonLogitsWarper, lambda rng, vocab: [small(rng)]),
    "EtaLogitsWarper": warper(hf.EtaLogitsWarper, lambda rng, vocab: [small(rng)]),
}


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Return the softmax in float64."""
    p = np.exp(scores.astype(np.float64) - np.max(scores))
    return p / p.sum()


def boundary_distance(processor: Callable, scores: np.ndarray) -> float:
    """Return the margin of a warper's closest keep-or-drop decision, or inf if rounding cannot change a decision."""
    if not isinstance(processor, hf.LogitsWarper):
        return np.inf
    if isinstance(processor, hf.TypicalLogitsWarper):
        return typical_distance(scores, processor.mass, processor.min_tokens_to_keep)
    p = probabilities(scores)
    if isinstance(processor, hf.TopPLogitsWarper):
        return float(np.min(np.abs(np.cumsum(np.sort(p))[:-1] - (1 - processor.top_p))))
    if isinstance(processor, hf.MinPLogitsWarper) and processor.min_p > 0:
        others = p[scores < scores.max()]  # the best tokens are always kept
        return float(np.min(np.abs(others / (processor.min_p * p.max()) - 1), initial=np.inf))
    if isinstance(processor, hf.EpsilonLogitsWarper):
        return float(np.min(np.abs(p / processor.epsilon - 1)))
    if isinstance(processor, hf.EtaLogitsWarper):
        cutoff, entropy = float(processor.epsilon), -np.sum(p[p > 0] * np.log(p[p > 0]))
        return float(np.min(np.abs(p / min(cutoff, cutoff**0.5 * np.exp(-entropy)) - 1)))
    return np.inf


def typical_distance(scores: np.ndarray, mass: float, keep: int) -> float:
    """Return the typical warper's margin, in the cumulative mass or in the tokens' distances to the entropy."""
    p = probabilities(scores)
    scores, p = scores[p > 0], p[p > 0]
    distance = np.abs(-np.log(p) + np.sum(p * np.log(p)))
    order = np.argsort(distance, kind="stable")
    scores, distance, cumulative = scores[order], distance[order], np.cumsum(p[order])
    last = min(int(np.sum(cumulative < mass)), len(order) - 1)
    near = [np.min(np.abs(cumulative[:-1] - mass), initial=np.inf)]
    for boundary in {last, min(max(last, keep - 1), len(order) - 1)}:
        others = scores != scores[boundary]
        near.append(np.min(np.abs(distance - distance[boundary])[others], initial=np.inf))
    return float(np.min(near))


def tie_is_chance(processor: Callable, scores: np.ndarray, result: np.ndarray) -> bool:
    """Return whether chance decided which of several equal scores were kept, because torch.sort is not stable.

    For top-p, return False if the equal scores with the highest ids were kept.
    """
    kept = np.isfinite(result)
    if not np.intersect1d(scores[kept], scores[~kept & np.isfinite(scores)]).size:
        return False
    members = np.flatnonzero(scores == scores[kept].min())
    survivors = members[kept[members]]
    return not (isinstance(processor, hf.TopPLogitsWarper) and np.array_equal(survivors, members[-len(survivors) :]))


def wide(scores: np.ndarray) -> np.ndarray:
    """Pad scores [V] with NaN to the size of the largest vocabulary."""
    return np.pad(scores, (0, max(VOCABULARIES) - len(scores)), constant_values=np.nan)


def case(draw: Callable[..., Drawn], rng: np.random.Generator) -> dict:
    """Draw one row with its options, and record the processor's result."""
    while True:
        row = draw_row(rng)
        record, processor = draw(row, rng)
        if boundary_distance(processor, row.scores) >= MARGIN:
            break
    scores = row.scores.astype(np.float32)
    result = processor(torch.tensor([row.tokens]), torch.from_numpy(scores.copy())[None])[0].numpy()
    if np.isnan(result).any():
        raise ValueError(f"{type(processor).__name__} gave NaN")
    chance = "min_tokens_to_keep" in record and tie_is_chance(processor, scores, result)
    unchanged = result.view(np.int32) == scores.view(np.int32)
    values = {"scores": wide(scores), "result": wide(np.where(unchanged, np.nan, result)), "tie_is_chance": chance}
    return {"vocab": row.vocab} | record | values


def compact(values: list) -> np.ndarray:
    """Stack values as float32, int16 or bool."""
    stacked = np.stack(values)
    return stacked.astype({"f": np.float32, "i": np.int16, "b": bool}[stacked.dtype.kind])


def processor_goldens(cases: int, seed: list[int]) -> dict[str, np.ndarray]:
    """Return an array `[cases, ...]`, named `CLASS.FIELD`, for each field of each class."""
    arrays = {}
    for i, (name, draw) in enumerate(DRAWS.items()):
        rng = np.random.default_rng([*seed, i])
        records = [case(draw, rng) for _ in range(cases)]
        arrays |= {f"{name}.{field}": compact([record[field] for record in records]) for field in records[0]}
    return arrays
