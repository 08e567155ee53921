"""The decode modes for each further family, compared with transformers 5.23.0: see goldens/README.md."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import generate
from jaxgen.core.model.causal_lm import forward, hidden
from tests.support.goldens import GOLDENS, load, prepare
from tests.support.models import generated

RUNS = [
    run for file in ("modes", "expert_modes") for run in json.loads((GOLDENS / "newer" / f"{file}.json").read_text())
]
FAMILIES = sorted({run["checkpoint"] for run in RUNS})
ASSISTANT = "llama-llama3"  # the first checkpoint of make_newer.py; models with experts name their own

pytestmark = pytest.mark.filterwarnings("ignore:.*exceeds the budget")


def runs(mode, *in_default_run):
    for run in RUNS:
        if run["mode"] == mode:
            marks = [pytest.mark.slow] * (run["checkpoint"] not in in_default_run)
            yield pytest.param(run, id=run["checkpoint"], marks=marks)


@pytest.mark.parametrize("run", list(runs("beams")))
def test_beam_search(run):
    params, cfg, ids, mask = prepare("newer", run)
    out = generate(params, ids, None, cfg, attention_mask=mask)
    for number, case in enumerate(run["cases"]):
        if case["near_tie"]:
            continue
        for place, (sequence, score) in enumerate(zip(case["sequences"], case["scores"], strict=True)):
            row = number * cfg.num_return_sequences + place
            tokens = generated(out, row)
            assert tokens[: len(sequence["tokens"])] == sequence["tokens"]
            assert len(tokens) == len(sequence["tokens"]) + sequence["ended"]
            np.testing.assert_allclose(out.sequences_scores[row], score, rtol=1e-4, atol=1e-4)
            indices = np.asarray(out.beam_indices)[row, : len(tokens)] - number * cfg.num_beams
            assert indices.tolist() == case["beam_indices"][place]


@pytest.mark.parametrize("run", [*runs("prompt_lookup"), *runs("assisted")])
def test_drafts(run):
    params, cfg, ids, mask = prepare("newer", run)
    more = {}
    if run["mode"] == "assisted":
        more["assistant"] = load(GOLDENS / "newer" / "checkpoints" / run.get("assistant", ASSISTANT))
    out = generate(params, ids, None, cfg, attention_mask=mask, **more)
    for row, case in enumerate(run["cases"]):
        assert case["near_tie"] or generated(out, row) == case["tokens"]


@pytest.mark.parametrize("run", list(runs("sampling")))
def test_processed_scores(run):
    params, cfg, ids, mask = prepare("newer", run)
    cfg = cfg.replace(max_new_tokens=1, output_scores=True)
    out = generate(params, ids, jax.random.key(0), cfg, attention_mask=mask)
    for row, case in enumerate(run["cases"]):
        expected = np.asarray([-np.inf if score is None else score for score in case["first_scores"]])
        if not case["near_tie"]:
            np.testing.assert_allclose(out.scores[0, row], expected, rtol=1e-4, atol=1e-4)


def test_few_cases_are_near_ties():
    clear = [not case["near_tie"] for run in RUNS for case in run["cases"]]
    assert sum(clear) >= 0.75 * len(clear) >= 75


def plain_contrastive_search(model, params, ids, alpha, top_k, steps):
    """Contrastive search as transformers computed it up to 4.x, without a cache. Release 5 has it no more."""
    read = jax.jit(lambda ids: hidden(model, params, ids)[0])
    logits = jax.jit(lambda ids: forward(model, params, ids).logits)

    def padded(rows):  # one program for all lengths: later tokens do not change earlier ones
        return jnp.asarray(np.pad(rows, ((0, 0), (0, 64 - np.shape(rows)[1]))))

    ids = list(ids)
    for _ in range(steps):
        scores = np.asarray(logits(padded([ids])))[0, len(ids) - 1].astype(np.float64)
        probabilities = np.exp(scores - scores.max())
        probabilities /= probabilities.sum()
        best = np.argsort(-scores)[:top_k]
        states = np.asarray(read(padded([[*ids, int(token)] for token in best])), np.float64)[:, : len(ids) + 1]
        states /= np.linalg.norm(states, axis=-1, keepdims=True)
        similar = np.einsum("ctd,cd->ct", states[:, :-1], states[:, -1]).max(axis=1)
        ids.append(int(best[np.argmax((1 - alpha) * probabilities[best] - alpha * similar)]))
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_contrastive_search(name):
    group = {"checkpoint": name, "options": {"penalty_alpha": 0.4, "top_k": 4, "max_new_tokens": 8}}
    cases = next(run["cases"] for run in RUNS if run["checkpoint"] == name)
    params, cfg, ids, mask = prepare("newer", group | {"cases": cases})
    out = generate(params, ids, None, cfg.replace(eos_token_id=None), attention_mask=mask)
    for row, case in enumerate(cases):
        expected = plain_contrastive_search(cfg.model, params, case["ids"], 0.4, 4, 8)
        assert case["ids"] + generated(out, row) == expected
