"""Decode modes compared with transformers 4.41.1, and DoLa with 4.45.2: see goldens/README.md."""

import json

import jax
import numpy as np
import pytest

from jaxgen import ConfigError, GenerationConfig, generate
from jaxgen.core.decoding.dola import candidate_layers
from tests.support.goldens import GOLDENS, load, prepare
from tests.support.models import generated, left_pad, model_config


def read(*names):
    return {name: json.loads((GOLDENS / "441" / f"{name}.json").read_text()) for name in names}


BEAMS = read("beams", "group_beams", "constrained", "expert_beams", "expert_group_beams", "expert_constrained")
OTHERS = read("assisted", "prompt_lookup", "contrastive")
OTHERS |= read("expert_assisted", "expert_prompt_lookup", "expert_contrastive")
SAMPLING = read("expert_sampling")
SEED = json.loads((GOLDENS / "441" / "manifest.json").read_text())["seed"]

pytestmark = [  # random options and lengths can cause these warnings
    pytest.mark.filterwarnings("ignore:.*exceeds the budget"),
    pytest.mark.filterwarnings("ignore:.*cannot be reached"),
    pytest.mark.filterwarnings("ignore:.*and the model was trained for"),
]


def sets(files, in_default_run):
    """Yield a third of the sets, chosen by the seed, because each set compiles its own program."""
    for name, all_sets in files.items():
        for number, group in enumerate(all_sets):
            if (number + SEED) % 3:
                continue
            marks = [pytest.mark.slow] * ((name, number) not in in_default_run)
            yield pytest.param(name, group, id=f"{name}-{number}", marks=marks)


@pytest.mark.parametrize(("name", "group"), list(sets(BEAMS, [])))
def test_beam_search_matches_transformers(name, group):
    params, cfg, ids, mask = prepare("441", group)
    out = generate(params, ids, None, cfg, attention_mask=mask)
    eos = np.ravel([] if cfg.eos_token_id is None else cfg.eos_token_id).tolist()
    for number, case in enumerate(group["cases"]):
        if case["near_tie"]:
            continue
        for place, (sequence, score) in enumerate(zip(case["sequences"], case["scores"], strict=True)):
            row = number * cfg.num_return_sequences + place
            tokens = generated(out, row)
            assert tokens[: len(sequence["tokens"])] == sequence["tokens"], f"case {number}, sequence {place}"
            assert [token in eos for token in tokens[len(sequence["tokens"]) :]] == [True] * sequence["ended"]
            np.testing.assert_allclose(out.sequences_scores[row], score, rtol=1e-4, atol=1e-4)
            if "group_beams" not in name:  # 4.41.1 mixes up the beam indices of groups
                indices = np.asarray(out.beam_indices)[row, : len(tokens)] - number * cfg.num_beams
                assert indices.tolist() == case["beam_indices"][place]


IN_DEFAULT_RUN = [("prompt_lookup", 3)]


@pytest.mark.parametrize(("name", "group"), list(sets(OTHERS, IN_DEFAULT_RUN)))
def test_tokens_match_transformers(name, group):
    params, cfg, ids, mask = prepare("441", group)
    more = {}
    if group.get("assistant") is not None:
        more = {"assistant": load(GOLDENS / "441" / "checkpoints" / group["assistant"])}
    out = generate(params, ids, None, cfg, attention_mask=mask, **more)
    for number, case in enumerate(group["cases"]):
        if not case["near_tie"]:
            assert generated(out, number) == case["tokens"], f"case {number}"


@pytest.mark.parametrize(("name", "group"), list(sets(SAMPLING, [])))
def test_processed_scores_match_transformers(name, group):
    params, cfg, ids, mask = prepare("441", group)
    cfg = cfg.replace(max_new_tokens=1, output_scores=True)
    out = generate(params, ids, jax.random.key(0), cfg, attention_mask=mask)
    for row, case in enumerate(group["cases"]):
        first = [-np.inf if score is None else score for score in case["first_scores"]]
        if not case["near_tie"]:
            np.testing.assert_allclose(out.scores[0, row], first, rtol=1e-4, atol=1e-4)


def test_few_cases_are_near_ties():
    for name, groups in (BEAMS | OTHERS | SAMPLING).items():
        clear = [not case["near_tie"] for group in groups for case in group["cases"]]
        assert sum(clear) >= max(0.75 * len(clear), 10 if "expert" in name else 30), name


DOLA = json.loads((GOLDENS / "445" / "dola.json").read_text())


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=pytest.mark.slow, id=str(n)) for n, group in enumerate(DOLA)]
)
def test_dola_matches_transformers(group):
    params, cfg, ids, mask = prepare("445", group)
    cfg = cfg.replace(output_scores=True)
    more = {}
    if cfg.on("guidance_scale"):
        negative, negative_mask = left_pad([case["negative_ids"] for case in group["cases"]])
        more = {"negative_prompt_ids": negative, "negative_prompt_attention_mask": negative_mask}
    key = jax.random.key(0) if cfg.do_sample else None
    out = generate(params, ids, key, cfg, attention_mask=mask, **more)
    for row, case in enumerate(group["cases"]):
        if not case["near_tie"]:
            first = [-np.inf if score is None else score for score in case["first_scores"]]
            np.testing.assert_allclose(out.scores[0, row], first, rtol=1e-4, atol=1e-4)
            assert cfg.do_sample or generated(out, row) == case["tokens"]


def test_few_cases_of_dola_are_near_ties():
    assert sum(not case["near_tie"] for group in DOLA for case in group["cases"]) >= 40


def test_layers_of_dola_match_transformers():
    for case in json.loads((GOLDENS / "445" / "dola_layers.json").read_text()):
        model = model_config(num_hidden_layers=case["depth"], tie_word_embeddings=case["tied"])
        cfg = GenerationConfig(model=model, dola_layers=case["name"])
        if case["layers"] is None:
            with pytest.raises(ConfigError, match=f"selects no layer in a model of {case['depth']} layers"):
                candidate_layers(cfg)
        else:
            assert list(candidate_layers(cfg)) == case["layers"]
