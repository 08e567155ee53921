"""jaxgen compared with transformers' outputs, recorded in tests/goldens or the folder that JAXGEN_GOLDENS names."""

import json
from pathlib import Path

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.experts import Part, by_file_name
from jaxgen import CausalLM, GenerationConfig, KVCache, generate
from jaxgen.core.logits.history import History
from jaxgen.core.logits.pipeline import build_transform
from jaxgen.core.logits.row_options import RowOptions
from tests.support.goldens import GOLDENS, load, prepare
from tests.support.models import generated, left_pad, model_config, slow

CHECKPOINTS = [folder for source in ("441", "newer") for folder in sorted((GOLDENS / source / "checkpoints").iterdir())]

pytestmark = pytest.mark.filterwarnings("ignore:.*and the model was trained for")  # the checkpoints' max length is low


def logits_of(folder: Path):
    with np.load(folder.parents[1] / "logits" / f"{folder.name}.npz") as arrays:
        return dict(arrays)


def named(folder: Path) -> str:
    return f"{folder.parents[1].name}-{folder.name}"


def full_outputs() -> list[tuple[Path, dict]]:
    """Return the checkpoints with goldens for gradients, hidden states and attention weights, and options for these."""
    has_all = [folder for folder in CHECKPOINTS if "labels" in logits_of(folder)]
    configs = [json.loads((folder / "config.json").read_text()) for folder in has_all]
    experts = ["num_experts_per_tok" in config for config in configs]
    return [
        (folder, {"output_router_logits": True} if routed else {})
        for folder, routed in zip(has_all, experts, strict=True)
    ]


FULL = full_outputs()


def as_in_torch(params, model, wanted):
    """Return parameters by their names in torch's module, which contains `wanted`."""
    flat = flax.traverse_util.flatten_dict(params, sep=".")
    if not any(name.endswith("gate_up_proj") for name in wanted):
        parts = by_file_name(flat, model)
        return {name: part.array[part.expert] if isinstance(part, Part) else part for name, part in parts.items()}
    for name in [name for name in flat if ".experts." in name and "gate_proj" in name]:
        up = flat.pop(name.replace("gate_proj", "up_proj"))
        flat[name.replace("gate_proj.weight", "gate_up_proj")] = np.concatenate([flat.pop(name), up], axis=1)
    return {name.replace("experts.down_proj.weight", "experts.down_proj"): value for name, value in flat.items()}


def some(each: int, values):
    """Return the values, all marked as slow except every `each`-th."""
    return [param for i, value in enumerate(values) for param in ([value] if i % each == 0 else slow(value))]


@pytest.mark.parametrize("folder", some(7, CHECKPOINTS), ids=named)
def test_logits(folder):
    params, cfg = load(folder)
    golden = logits_of(folder)
    model = jax.jit(CausalLM(cfg.model).apply)
    largest = max(np.abs(golden[f"logits_{i}"]).max() for i in range(3))
    for i in range(3):
        ids = jnp.asarray(golden[f"ids_{i}"])[None]
        expected = golden[f"logits_{i}"]
        plain = model({"params": params}, ids).logits[0]
        np.testing.assert_allclose(plain, expected, rtol=0, atol=1e-4 * largest)
        if i == 0:
            cached = model({"params": params}, ids, cache=KVCache.create(cfg.model, 1, ids.shape[1])).logits[0]
            np.testing.assert_allclose(cached, expected, rtol=0, atol=1e-4 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("folder", some(5, CHECKPOINTS), ids=named)
def test_logits_of_a_left_padded_batch(folder):
    params, cfg = load(folder)
    golden = logits_of(folder)
    if "ids" not in golden:  # in 4.41.1, dynamic RoPE depends on the longest row; here, rows are independent
        ids, mask = left_pad([golden[f"ids_{i}"].tolist() for i in range(3)])
        expected = np.zeros((*ids.shape, cfg.model.vocab_size), np.float32)
        for i in range(3):
            expected[i, mask[i] == 1] = golden[f"logits_{i}"]
    else:
        ids, mask, expected = golden["ids"], golden["attention_mask"], golden["logits"]
    largest = np.abs(expected).max()
    out = CausalLM(cfg.model).apply({"params": params}, jnp.asarray(ids), attention_mask=jnp.asarray(mask))
    real = mask == 1
    np.testing.assert_allclose(np.asarray(out.logits)[real], expected[real], rtol=0, atol=1e-4 * largest)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "options"), FULL, ids=lambda value: getattr(value, "name", ""))
def test_gradients_of_the_loss(folder, options):
    params, cfg = load(folder)
    golden = logits_of(folder)
    ids, mask, labels = (jnp.asarray(golden[key]) for key in ("ids", "attention_mask", "labels"))
    labels = jnp.where(jnp.cumsum(mask, axis=-1) == 1, -100, labels)  # as in the script that makes the goldens

    def loss(params):
        return CausalLM(cfg.model).apply({"params": params}, ids, attention_mask=mask, labels=labels, **options).loss

    gradient = jax.grad(loss)(params)
    wanted = {key.removeprefix("gradient:"): value for key, value in golden.items() if key.startswith("gradient:")}
    found = as_in_torch(gradient, cfg.model, wanted)
    assert found.keys() == wanted.keys()
    # torch's Embedding computes no gradient for the row of the config's pad id. In jaxgen, that row is like any other.
    config = json.loads((folder / "config.json").read_text())
    if config.get("pad_token_id") is not None:
        for gradients in (found, wanted):
            table = np.array(gradients["model.embed_tokens.weight"])
            table[config["pad_token_id"]] = 0
            gradients["model.embed_tokens.weight"] = table
    for key, expected in wanted.items():
        np.testing.assert_allclose(found[key], expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "options"), FULL, ids=lambda value: getattr(value, "name", ""))
def test_hidden_states_attentions_and_loss(folder, options):
    params, cfg = load(folder)
    golden = logits_of(folder)
    real = golden["attention_mask"] == 1
    out = CausalLM(cfg.model).apply(
        {"params": params},
        jnp.asarray(golden["ids"]),
        attention_mask=jnp.asarray(golden["attention_mask"]),
        labels=jnp.asarray(golden["labels"]),
        output_hidden_states=True,
        output_attentions=True,
        **options,
    )
    np.testing.assert_allclose(out.loss, golden["loss"], rtol=1e-5)
    states = np.stack([np.asarray(x) for x in out.hidden_states])
    np.testing.assert_allclose(
        states[:, real], golden["hidden_states"][:, real], rtol=0, atol=1e-4 * np.abs(golden["hidden_states"]).max()
    )
    if options:
        found = np.stack([np.asarray(x) for x in out.router_logits])
        expected = golden["router_logits"]
        tolerance = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(found[:, real], expected[:, real], rtol=0, atol=tolerance)
    weights = np.stack([np.asarray(x) for x in out.attentions])
    for row in range(3):
        np.testing.assert_allclose(
            weights[:, row][:, :, real[row]], golden["attentions"][:, row][:, :, real[row]], rtol=0, atol=1e-4
        )


def greedy_groups():
    for source, file in [(source, file) for source in ("441", "newer") for file in ("greedy", "expert_greedy")]:
        groups = json.loads((GOLDENS / source / f"{file}.json").read_text())
        for number, group in enumerate(groups):
            name = f"{source}-{file}-{number}-{group['checkpoint']}"
            yield pytest.param(source, number, group, id=name, marks=[pytest.mark.slow] * (number % 16 != 0))


@pytest.mark.filterwarnings("ignore:.*cannot be reached")  # random options can cause this warning
@pytest.mark.parametrize(("source", "number", "group"), list(greedy_groups()))
def test_greedy_tokens(source, number, group):
    params, cfg, ids, mask = prepare(source, group)
    out = generate(params, ids, None, cfg, attention_mask=mask)
    for row, case in enumerate(group["cases"]):
        assert case["ids"] + generated(out, row) == case["sequence"], f"case {row}"
    tail = np.asarray(out.sequences)[:, out.prompt_width :]
    if cfg.pad_token_id is not None:
        for row, length in enumerate(np.asarray(out.lengths)):
            assert np.all(tail[row, length:] == cfg.pad_token_id)


@pytest.mark.filterwarnings("ignore:.*cannot be reached")
@pytest.mark.slow
def test_greedy_scores_and_logits_of_each_step():
    compared = 0
    with np.load(GOLDENS / "441" / "greedy_steps.npz") as steps:
        groups = json.loads((GOLDENS / "441" / "greedy.json").read_text())
        for number, group in enumerate(groups):
            if f"{number}_scores" not in steps or number % 4:
                continue
            params, cfg, ids, mask = prepare("441", group)
            out = generate(params, ids, None, cfg.replace(output_scores=True, output_logits=True), attention_mask=mask)
            for name, values in (("scores", out.scores), ("logits", out.logits)):
                expected = steps[f"{number}_{name}"]
                ours = np.asarray(values)[: len(expected), 0]
                np.testing.assert_array_equal(np.isinf(ours), np.isinf(expected))
                finite = np.isfinite(expected)
                tolerance = 1e-4 * np.abs(expected[finite]).max()
                np.testing.assert_allclose(ours[finite], expected[finite], rtol=0, atol=tolerance)
            compared += 1
    assert compared >= 4


def sampling_cases():
    cases = json.loads((GOLDENS / "441" / "sampling.json").read_text())
    for number, case in enumerate(cases):
        yield pytest.param(number, case, id=str(number), marks=[pytest.mark.slow] * (number % 16 != 0))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "case"), list(sampling_cases()))
def test_processed_scores_when_sampling(number, case):
    with np.load(GOLDENS / "441" / "sampling.npz") as arrays:
        logits, expected = arrays[f"{number}_logits"], arrays[f"{number}_scores"]
    cfg = GenerationConfig(model=model_config(vocab_size=case["vocab"]), do_sample=True)
    cfg = cfg.replace(**{name: value for name, value in case["options"].items() if name != "do_sample"})
    ids = np.asarray(case["ids"])[None]
    length = jnp.asarray([ids.shape[1]])
    history = History.begin(cfg, jnp.asarray(ids), length, budget=jnp.asarray([100]))
    # `begin` treats all ids as the prompt, but those after `prompt_length` count as generated.
    prompt = case["prompt_length"]
    history = history.replace(prompt_length=jnp.asarray([prompt]))
    cfg = jax.tree.map(jnp.asarray, cfg)  # as arrays, which is how a program receives it
    ours = np.asarray(build_transform(RowOptions.of(cfg, 1))(history, jnp.asarray(logits)[None])[0])
    assert not case["near_boundary"], "the script for the goldens redraws such cases"
    if case.get("top_p_splits_tie") and not case["highest_ids_kept"]:
        ours, expected = np.sort(ours), np.sort(expected)
    np.testing.assert_array_equal(np.isinf(ours), np.isinf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(ours[finite], expected[finite], rtol=1e-5, atol=1e-5)
