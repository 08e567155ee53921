"""Each processor and warper against its class in transformers 4.41.1, on random rows: see goldens/README.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.logits import processors, warpers
from jaxgen.logits.processors import token_set
from tests.support.goldens import GOLDENS

OF_THE_ROW = ("ids", "length", "prompt_length", "uncond", "allowed")  # the other fields are options
STATIC = ("n", "min_tokens_to_keep")


def seen(length, ids, vocab):
    """The tokens among the first `length` ones of each row, bool[rows, V]."""
    return token_set(jnp.where(jnp.arange(ids.shape[1])[None, :] < length[:, None], ids, -1), vocab)


def column(length):
    """Lengths as int32[rows, 1], for a comparison with an option."""
    return length[:, None]


def min_length(scores, r, o):
    return processors.ban(scores, token_set(o["eos"], scores.shape[1]), (column(r["length"]) < o["min_length"])[:, 0])


def min_new_tokens(scores, r, o):
    short = column(r["length"] - r["prompt_length"]) < o["min_new_tokens"]
    return processors.ban(scores, token_set(o["eos"], scores.shape[1]), short[:, 0])


def forced_bos(scores, r, o):
    token = token_set(o["token"].reshape(-1, 1), scores.shape[1])
    return processors.force(scores, token, r["length"] == 1)


def forced_eos(scores, r, o):
    at_the_end = (column(r["length"]) == o["max_length"] - 1)[:, 0]
    return processors.force(scores, token_set(o["eos"], scores.shape[1]), at_the_end)


def exponential_decay(scores, r, o):
    over = (column(r["length"] - r["prompt_length"]) - o["start"])[:, 0]
    return processors.exponential_decay(scores, token_set(o["eos"], scores.shape[1]), over, o["factor"])


def suppress(scores, r, o):
    return processors.ban(scores, token_set(o["tokens"], scores.shape[1]), jnp.ones(scores.shape[0], bool))


def suppress_at_begin(scores, r, o):
    return processors.ban(scores, token_set(o["tokens"], scores.shape[1]), (column(r["length"]) == o["begin"])[:, 0])


def force_tokens(scores, r, o):
    forced = o["forced"].reshape(-1, *o["forced"].shape[-2:])  # [rows or 1, 4, 2], of (length, token)
    here = forced[..., 0] == column(r["length"])
    tokens = token_set(jnp.where(here, forced[..., 1], -1), scores.shape[1])
    return processors.force(scores, tokens, jnp.any(here, axis=-1))


def warp(function):
    return lambda scores, r, o: function(scores, o["value"], o["min_tokens_to_keep"])


# Of scores float32[rows, V], what is known of the rows and the options to scores.
CALLS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda s, r, o: processors.guidance(s, r["uncond"], o["scale"]),
    "SequenceBiasLogitsProcessor": lambda s, r, o: processors.sequence_bias(
        s, r["ids"], r["length"], o["sequences"], o["bias"]
    ),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda s, r, o: processors.encoder_repetition_penalty(
        s, seen(r["prompt_length"], r["ids"], s.shape[1]), o["penalty"]
    ),
    "RepetitionPenaltyLogitsProcessor": lambda s, r, o: processors.repetition_penalty(
        s, seen(r["length"], r["ids"], s.shape[1]), o["penalty"]
    ),
    "NoRepeatNGramLogitsProcessor": lambda s, r, o: processors.no_repeat_ngram(s, r["ids"], r["length"], o["n"]),
    "EncoderNoRepeatNGramLogitsProcessor": lambda s, r, o: processors.encoder_no_repeat_ngram(
        s, r["ids"], r["length"], r["prompt_length"], o["n"]
    ),
    "NoBadWordsLogitsProcessor": lambda s, r, o: processors.bad_words(
        s, r["ids"], r["length"], o["sequences"], o["eos"]
    ),
    "MinLengthLogitsProcessor": min_length,
    "MinNewTokensLengthLogitsProcessor": min_new_tokens,
    "PrefixConstrainedLogitsProcessor": lambda s, r, o: processors.allow_only(s, r["allowed"][:, : s.shape[1]]),
    "ForcedBOSTokenLogitsProcessor": forced_bos,
    "ForcedEOSTokenLogitsProcessor": forced_eos,
    "InfNanRemoveLogitsProcessor": lambda s, r, o: processors.remove_invalid_values(s),
    "ExponentialDecayLengthPenalty": exponential_decay,
    "SuppressTokensLogitsProcessor": suppress,
    "SuppressTokensAtBeginLogitsProcessor": suppress_at_begin,
    "ForceTokensLogitsProcessor": force_tokens,
    "LogitNormalization": lambda s, r, o: processors.renormalize(s),
    "TemperatureLogitsWarper": lambda s, r, o: warpers.temperature(s, o["value"]),
    "TopKLogitsWarper": warp(warpers.top_k),
    "TopPLogitsWarper": warp(warpers.top_p),
    "MinPLogitsWarper": warp(warpers.min_p),
    "TypicalLogitsWarper": warp(warpers.typical),
    "EpsilonLogitsWarper": warp(warpers.epsilon),
    "EtaLogitsWarper": warp(warpers.eta),
}


@functools.cache
def goldens():
    """The fields of each class, `[cases, ...]`."""
    fields = {}
    with np.load(GOLDENS / "441" / "processors.npz") as arrays:
        for key, value in arrays.items():
            name, field = key.split(".")
            fields.setdefault(name, {})[field] = value.astype(np.int32) if value.dtype == np.int16 else value
    return fields


def batches(name):
    """Yield the cases of one vocabulary and one set of static options: options, scores, results and the rest."""
    fields = goldens()[name]
    kinds = np.stack([fields[field] for field in ("vocab", *STATIC) if field in fields], axis=-1)
    for kind in np.unique(kinds, axis=0):
        chosen = {field: value[np.all(kinds == kind, axis=-1)] for field, value in fields.items()}
        vocab = int(kind[0])
        chosen |= {field: chosen[field][:, :vocab] for field in ("scores", "result", "uncond") if field in chosen}
        static = {field: int(chosen.pop(field)[0]) for field in STATIC if field in chosen}
        row = {field: chosen.pop(field) for field in OF_THE_ROW if field in chosen}
        scores, result, chance = chosen.pop("scores"), chosen.pop("result"), chosen.pop("tie_is_chance")
        del chosen["vocab"]
        expected = np.where(np.isnan(result), scores, result)  # NaN: as it was
        yield scores, row, chosen, static, expected, chance


def compare(ours, expected, chance):
    ours = np.asarray(ours)
    # torch.sort chose which of several equal scores were kept: it is their number that counts.
    ours, expected = (np.where(chance[:, None], np.sort(x), x) for x in (ours, expected))
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(expected))
    finite = np.isfinite(expected) & (np.abs(expected) < 1e30)
    np.testing.assert_array_equal(ours[~finite], expected[~finite])
    np.testing.assert_allclose(ours[finite], expected[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_rows_with_options_of_their_own(name):
    for scores, row, options, static, expected, chance in batches(name):
        run = jax.jit(lambda scores, row, options, static=static: CALLS[name](scores, row, options | static))
        options = {key: value[:, None] if value.ndim == 1 else value for key, value in options.items()}
        compare(run(scores, row, options), expected, chance)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_row_with_options_for_all(name):
    """Each row alone, options without an axis for rows."""
    for scores, row, options, static, expected, chance in batches(name):

        def alone(scores, row, options, static=static):
            row = {key: value[None] for key, value in row.items()}
            return CALLS[name](scores[None], row, options | static)[0]

        compare(jax.jit(jax.vmap(alone))(scores, row, options), expected, chance)


def test_every_class_has_cases():
    assert goldens().keys() == CALLS.keys()
    for name, fields in goldens().items():
        assert not np.all(np.isnan(fields["result"])), f"{name} changes no score of any case"
