"""Each processor and warper compared with its class in transformers 4.41.1, on random rows: see goldens/README.md.

The recorded options become fields of a config, which the pipeline applies.
"""

import functools

import jax
import numpy as np
import pytest

from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.config.option import WARP
from jaxgen.core.logits import processors
from jaxgen.core.logits.pipeline import build_transform
from jaxgen.core.logits.row_options import RowOptions
from tests.support.goldens import GOLDENS
from tests.support.rows import config_of, history_of, warp

OF_THE_ROW = ("ids", "length", "prompt_length", "uncond", "allowed")  # the other fields are options
STATIC = ("n", "min_tokens_to_keep")
# Recorded fields. Those that a class has form its option's value, in this order.
VALUES = "sequences bias start factor penalty n min_length min_new_tokens token tokens forced value".split()
PREFIX, GUIDANCE = "PrefixConstrainedLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"
CLASSES = {option.hf: option for option in OPTIONS.values() if option.stage and option.since == ""}
# Not compared: transformers draws green lists with torch's generator, jaxgen with a hash.
CLASSES.pop("WatermarkLogitsProcessor")
# Compared in whole searches, because the scores depend on the choices of other groups of beams.
CLASSES.pop("HammingDiversityLogitsProcessor")


def fields_of(option, recorded: dict) -> dict:
    """Return the config's fields for the recorded options of a class."""
    fields = {}
    if "eos" in recorded:
        fields["forced_eos_token_id" if option.name == "forced_eos_token_id" else "eos_token_id"] = recorded["eos"]
    values = tuple(recorded[name] for name in VALUES if name in recorded)
    if values:
        fields[option.name] = values[0] if len(values) == 1 else values
    return fields or {option.name: True}


def apply(name, scores, row, recorded):
    """Apply a class's option in the pipeline. The values in `row` have a row axis; those in `recorded` need not."""
    rows, vocab = scores.shape
    ids, length = row.get("ids", np.zeros((rows, 1), np.int32)), row.get("length", np.ones(rows, np.int32))
    prompt_length = recorded.get("begin", row.get("prompt_length"))  # `begin` is the prompt's length
    if prompt_length is not None:
        prompt_length = prompt_length.reshape(-1)
    budget = None
    if "max_length" in recorded:
        prompt_length, budget = 0 * length, recorded["max_length"].reshape(-1)
    history = history_of(ids, length, prompt_length, budget=budget, vocab=vocab)
    if name == PREFIX:
        transform = build_transform(RowOptions(config_of(vocab), {}), allowed=lambda history: row["allowed"][:, :vocab])
        return transform(history, scores)
    if name == GUIDANCE:
        return processors.guidance(scores, row["uncond"], recorded["scale"].reshape(-1, 1))
    option = CLASSES[name]
    if option.stage == WARP and recorded.get("min_tokens_to_keep", 1) > 1:  # the pipeline passes 1, except for beams
        return warp(option.name, scores, recorded["value"].reshape(-1, 1), keep=recorded["min_tokens_to_keep"])
    cfg = config_of(vocab, do_sample=option.stage == WARP, **fields_of(option, recorded))
    return build_transform(RowOptions.of(cfg, rows))(history, scores)


@functools.cache
def goldens():
    """Return the recorded fields of each class, arrays `[cases, ...]`."""
    fields = {}
    with np.load(GOLDENS / "441" / "processors.npz") as arrays:
        for key, value in arrays.items():
            name, field = key.split(".")
            fields.setdefault(name, {})[field] = value.astype(np.int32) if value.dtype == np.int16 else value
    return fields


def batches(name):
    """Group the cases by vocabulary size and static options, and yield the arrays of each group."""
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
        expected = np.where(np.isnan(result), scores, result)  # NaN means unchanged
        yield scores, row, chosen, static, expected, chance


def check_scores(ours, expected, chance):
    ours = np.asarray(ours)
    # torch.sort orders equal scores arbitrarily, so only the number of kept tokens is compared.
    ours, expected = (np.where(chance[:, None], np.sort(x), x) for x in (ours, expected))
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(expected))
    finite = np.isfinite(expected) & (np.abs(expected) < 1e30)
    np.testing.assert_array_equal(ours[~finite], expected[~finite])
    np.testing.assert_allclose(ours[finite], expected[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CLASSES, PREFIX])
def test_options_per_row_match_transformers(name):
    for scores, row, options, static, expected, chance in batches(name):
        run = jax.jit(lambda scores, row, options, static=static: apply(name, scores, row, options | static))
        check_scores(run(scores, row, options), expected, chance)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CLASSES, PREFIX])
def test_shared_options_match_transformers(name):
    """Each row runs alone, with options that have no row axis."""
    for scores, row, options, static, expected, chance in batches(name):

        def alone(scores, row, options, static=static):
            row = {key: value[None] for key, value in row.items()}
            return apply(name, scores[None], row, options | static)[0]

        check_scores(jax.jit(jax.vmap(alone))(scores, row, options), expected, chance)


def test_every_class_has_cases():
    assert goldens().keys() == CLASSES.keys() | {PREFIX}
    for name, fields in goldens().items():
        assert not np.all(np.isnan(fields["result"])), f"{name} changes no score of any case"
