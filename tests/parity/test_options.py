"""Greedy tokens and processed scores for sets of options, compared with transformers 4.41.1 (goldens/README.md)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import GenerationConfig, generate
from jaxgen.core.decoding.guidance import guide
from jaxgen.core.logits.history import History
from jaxgen.core.logits.pipeline import build_transform
from jaxgen.core.logits.row_options import RowOptions
from tests.support.goldens import GOLDENS, prepare
from tests.support.models import generated, left_pad, model_config

STEPS = (0, 2, 5)  # the steps with recorded scores
NEAR_TIE = 1e-4  # if the best two scores of a step are closer than this, rounding may swap them
GROUPS = json.loads((GOLDENS / "441" / "options.json").read_text())

pytestmark = [  # random options and lengths can cause these warnings
    pytest.mark.filterwarnings("ignore:.*cannot be reached"),
    pytest.mark.filterwarnings("ignore:.*and the model was trained for"),
]


def groups():
    for number, group in enumerate(GROUPS):
        names = "-".join(name for name in group["options"] if not name.startswith(("eos", "pad", "max")))
        marks = [pytest.mark.slow] if number >= 1 else []
        yield pytest.param(number, group, id=f"{number}-{names}{'-prefix' if group['prefix'] else ''}", marks=marks)


def allowed(prefix: list[int], row, last, vocab: int):
    """Return bool[..., V]: the tokens that the table `[a, b, m]` allows in `row` after the token `last`."""
    a, b, m = prefix
    return (np.arange(vocab) + a * last + b * row) % m == 0


def arguments_of(group: dict, vocab: int) -> dict:
    """Return the arguments of generate that are not fields of the config."""
    arguments = {}
    if group["prefix"]:
        arguments["prefix_allowed_tokens_fn"] = lambda row, ids: np.flatnonzero(
            allowed(group["prefix"], row, ids[-1], vocab)
        ).tolist()
    if group["negative_prompts"]:
        ids, mask = left_pad([case["negative_ids"] for case in group["cases"]])
        arguments |= {"negative_prompt_ids": ids, "negative_prompt_attention_mask": mask}
    return arguments


@pytest.mark.parametrize(("number", "group"), list(groups()))
def test_greedy_tokens(number, group):
    params, cfg, ids, mask = prepare("441", group)
    out = generate(params, ids, None, cfg, attention_mask=mask, **arguments_of(group, cfg.model.vocab_size))
    for row, case in enumerate(group["cases"]):
        if case["smallest_gap"] >= NEAR_TIE:
            assert case["ids"] + generated(out, row) == case["sequence"], f"case {row}"


def test_few_cases_are_near_ties():
    gaps = np.array([case["smallest_gap"] for group in GROUPS for case in group["cases"]])
    assert np.mean(gaps < NEAR_TIE) < 0.03


def fixed_table(prefix: list[int], vocab: int):
    """Return a function from the history to the tokens that `prefix` allows, bool[rows, V]."""

    def table(history):
        row = jnp.arange(history.length.shape[0])[:, None]
        return (jnp.arange(vocab)[None, :] + prefix[0] * history.last(1) + prefix[1] * row) % prefix[2] == 0

    return table


def sampling_config(group: dict, vocab: int) -> GenerationConfig:
    cfg = GenerationConfig(model=model_config(vocab_size=vocab), do_sample=True)
    cfg = cfg.replace(**group["options"], **group["sampling"]["warpers"])
    return cfg.replace(min_length=0) if cfg.on("min_new_tokens") else cfg  # as in generate


@pytest.mark.slow
@pytest.mark.parametrize(("number", "group"), list(groups()))
def test_processed_scores_when_sampling(number, group):
    with np.load(GOLDENS / "441" / "options.npz") as arrays:
        golden = {key.split("_", 1)[1]: arrays[key] for key in arrays if key.startswith(f"{number}_")}
    logits, tokens = golden["logits"].astype(np.float32), np.array(group["sampling"]["tokens"], np.int32)
    rows, _, vocab = logits.shape
    prompts = [case["ids"] for case in group["cases"][:rows]]
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    ids = np.zeros((rows, length.max() + max(STEPS)), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    cfg = sampling_config(group, vocab)
    budget = cfg.max_length - length if cfg.max_new_tokens is None else np.full(rows, cfg.max_new_tokens, np.int32)
    table = fixed_table(group["prefix"], vocab) if group["prefix"] else None

    @jax.jit
    def run(cfg, ids, length, budget, tokens, logits, uncond):
        options = RowOptions.of(cfg, rows)
        transform = build_transform(options, allowed=table)
        history = History.begin(cfg, ids, length, budget, table)
        scores = []
        for step in range(max(STEPS) + 1):
            if step in STEPS:
                at = STEPS.index(step)
                streams = logits[:, at] if uncond is None else jnp.concatenate([logits[:, at], uncond[:, at]])
                scores.append(transform(history, guide(options, streams) if cfg.on("guidance_scale") else streams))
            if step < max(STEPS):
                history = history.push(tokens[:, step], jnp.ones(rows, bool))
        return jnp.stack(scores, axis=1)

    ours = np.asarray(run(cfg, ids, length, budget, tokens, logits, golden.get("uncond")))
    expected = golden["scores"]
    # torch.sort orders equal scores arbitrarily, so only the number of kept tokens is compared.
    ours, expected = (np.where(golden["tie_is_chance"], np.sort(x), x) for x in (ours, expected))
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(expected))
    finite = np.isfinite(expected)
    scale = np.abs(expected[expected > -1e30]).max()  # excludes the scores that remove_invalid_values sets
    np.testing.assert_allclose(ours[finite], expected[finite], rtol=1e-5, atol=1e-5 * max(1.0, scale))


def test_the_recorded_scores_are_useful():
    """In most cases, the warpers remove some tokens and leave more than one."""
    with np.load(GOLDENS / "441" / "options.npz") as arrays:
        left = [np.sum(arrays[key] > -1e30, axis=-1) for key in arrays if key.endswith("_scores")]
        sizes = [arrays[key].shape[-1] for key in arrays if key.endswith("_scores")]
    several = np.mean([np.mean(count > 1) for count in left])
    fewer = np.mean([np.mean(count < size) for count, size in zip(left, sizes, strict=True)])
    assert several > 0.7
    assert fewer > 0.7
