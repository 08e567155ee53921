"""embed() against numpy over transformers' hidden states, and over the model's own; the files that say how to pool."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import CausalLM, ConfigError, GenerationConfig, InputError, Pooling, embed
from jaxgen.core.scoring.pooling import KINDS
from tests.support.compilations import compilations
from tests.support.goldens import GOLDENS, load
from tests.support.models import left_pad, model_config, random_params, slow
from tests.support.small import CFG, MODEL, PARAMS, PROMPTS

ROUNDING = 3e-5


def pooled(states, kind, normalized):
    """Return the vector of the hidden states of one text, `[T, D]`."""
    states = np.asarray(states, np.float64)
    vector = {"last": states[-1], "cls": states[0], "mean": states.mean(axis=0)}[kind]
    return vector / np.linalg.norm(vector) if normalized else vector


def golden_names():
    with np.load(GOLDENS / "441" / "outputs.npz") as arrays:
        return sorted({name.split(".")[0] for name in arrays})


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [golden_names()[0], *slow(*golden_names()[1:])])
def test_hidden_states_match_transformers(name, kind, normalized):
    with np.load(GOLDENS / "441" / "outputs.npz") as arrays:
        golden = {key.split(".")[1]: arrays[key] for key in arrays if key.startswith(f"{name}.")}
    params, cfg = load(GOLDENS / "441" / "checkpoints" / name)
    mask, states = golden["attention_mask"], golden["prompt_hidden_states"][-1]
    found = embed(params, golden["ids"], cfg, attention_mask=mask, pooling=Pooling(kind, normalized))
    wanted = [pooled(row[real == 1], kind, normalized) for row, real in zip(states, mask, strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", KINDS)
def test_row_does_not_depend_on_its_batch(kind):
    """Padding on the left, on the right and in between is invisible, and so are the other rows."""
    pooling = Pooling(kind)
    alone = np.concatenate([embed(PARAMS, [row], CFG, pooling=pooling) for row in PROMPTS])
    width = 9
    for side in ("left", "right", "holes"):
        ids, mask = np.full((len(PROMPTS), width), 7), np.zeros((len(PROMPTS), width), int)
        for number, row in enumerate(PROMPTS):
            start = {"left": width - len(row), "right": 0, "holes": 0}[side]
            places = np.arange(len(row)) * (2 if side == "holes" else 1) + start
            ids[number, places], mask[number, places] = row, 1
        found = embed(PARAMS, ids, CFG, attention_mask=mask, pooling=pooling)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, alone, atol=ROUNDING)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=ROUNDING)


def test_the_default_is_the_last_token_normalized():
    ids, mask = left_pad(PROMPTS)
    found = embed(PARAMS, ids, CFG, attention_mask=mask)
    out = CausalLM(MODEL).apply(
        {"params": PARAMS}, jnp.asarray(ids), attention_mask=jnp.asarray(mask), output_hidden_states=True
    )
    wanted = [pooled(row, "last", True) for row in out.hidden_states[-1]]
    np.testing.assert_allclose(found, wanted, atol=ROUNDING)


def test_widths_share_a_program():
    embed(PARAMS, np.ones((2, 30), int), CFG)
    with compilations() as compiled:
        for width in (1, 9, 32):
            embed(PARAMS, np.ones((2, width), int), CFG)
    assert compiled == [0]


def test_a_nan_in_the_padding_does_not_spread():
    table = PARAMS["model"]["embed_tokens"]["weight"]
    params = {**PARAMS, "model": {**PARAMS["model"], "embed_tokens": {"weight": table.at[9].set(jnp.nan)}}}
    found = embed(params, [[5, 9, 9]], CFG, attention_mask=[[1, 0, 0]], pooling=Pooling("mean"))
    np.testing.assert_allclose(found, embed(PARAMS, [[5]], CFG, pooling=Pooling("mean")), atol=ROUNDING)


def test_bfloat16_is_pooled_in_float32():
    model = model_config(torch_dtype="bfloat16")
    found = embed(random_params(model), [[5, 6]], GenerationConfig(model=model), pooling=Pooling("mean"))
    assert found.dtype == jnp.float32
    assert not np.array_equal(found, found.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.slow
def test_embed_works_under_jit_and_grad():
    ids, mask = left_pad(PROMPTS)

    def loss(params):
        return jnp.sum(
            embed(params, ids, CFG, attention_mask=mask)[0] * jnp.arange(MODEL.hidden_size, dtype=jnp.float32)
        )

    value, gradient = jax.jit(jax.value_and_grad(loss))(PARAMS)
    np.testing.assert_allclose(value, loss(PARAMS), rtol=1e-3)
    assert float(jnp.abs(gradient["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"]).sum()) > 0


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="pooling must be a Pooling, got str"):
        embed(PARAMS, [[1]], CFG, pooling="mean")
    with pytest.raises(ConfigError, match="kind must be one of last, mean, cls, got 'max'"):
        Pooling("max")
    with pytest.raises(InputError, match="vocabulary"):
        embed(PARAMS, [[MODEL.vocab_size]], CFG)
    with pytest.raises(InputError, match="prompt 0 is empty"):
        embed(PARAMS, [[1]], CFG, attention_mask=[[0]])


def folder(path, pooling, modules=("Transformer", "Pooling", "Normalize"), **config):
    """Write the files of sentence-transformers, as it saves them."""
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    (path / "1_Pooling").mkdir()
    listed = [
        {"idx": idx, "name": str(idx), "path": paths.get(name, name), "type": f"sentence_transformers.models.{name}"}
        for idx, name in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (path / "config.json").write_text(json.dumps(config))
    return path


QWEN3 = {  # of Qwen3-Embedding
    "word_embedding_dimension": 1024,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}
MEAN = QWEN3 | {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}


class TestFiles:
    def test_published_pooling_configs_are_read(self, tmp_path):
        cases = {
            "a": ((QWEN3,), {}, Pooling("last", True)),
            "b": ((MEAN, ("Transformer", "Pooling")), {}, Pooling("mean", False)),
            "c": (({"pooling_mode": "cls"},), {}, Pooling("cls", True)),
            "d": ((QWEN3,), {"is_matryoshka": True}, Pooling("last", True, True)),
            "e": ((QWEN3,), {"matryoshka_dimensions": [64, 32]}, Pooling("last", True, True, (64, 32))),
        }
        for name, (files, config, wanted) in cases.items():
            (tmp_path / name).mkdir()
            assert Pooling.from_pretrained(folder(tmp_path / name, *files, **config)) == wanted

    def test_default_pooling_without_files(self, tmp_path):
        assert Pooling.from_pretrained(tmp_path) == Pooling() == Pooling("last", True, False, ())

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ((QWEN3 | {"pooling_mode_mean_tokens": True},), "mean_tokens and lasttoken"),
            ((QWEN3 | {"pooling_mode_lasttoken": False},), "no mode"),
            ((QWEN3 | {"pooling_mode_lasttoken": False, "pooling_mode_max_tokens": True},), "max_tokens"),
            ((QWEN3 | {"include_prompt": False},), "include_prompt"),
            ((QWEN3, ("Transformer", "Pooling", "Dense")), "Dense"),
            ((QWEN3, ("Transformer",)), "the modules Transformer are not supported"),
            ((QWEN3, ("Transformer", "Pooling", "../x")), "must be a list of modules"),
        ],
    )
    def test_unsupported_pooling_is_named(self, tmp_path, files, message):
        with pytest.raises(ConfigError, match=message):
            Pooling.from_pretrained(folder(tmp_path, *files))

    @pytest.mark.parametrize("text", ["{}", "[", "[1]", "null"])
    def test_damaged_files_are_refused(self, tmp_path, text):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(ConfigError, match=r"modules\.json"):
            Pooling.from_pretrained(tmp_path)

    def test_dimensions_must_be_sizes(self, tmp_path):
        with pytest.raises(ConfigError, match="matryoshka_dimensions"):
            Pooling.from_pretrained(folder(tmp_path, QWEN3, matryoshka_dimensions=["8"]))
