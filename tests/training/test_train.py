"""Training: gradients, single steps, and runs that are interrupted and resumed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import CausalLM, ConfigError, InputError
from jaxgen.core.model.int8 import Int8
from jaxgen.training import lora
from jaxgen.training.dataset import pack, shuffled
from jaxgen.training.examples import Example
from jaxgen.training.loop import TrainBatch, TrainConfig, TrainState, batch_loss, train, train_step
from tests.support.models import model_config, random_params

MODEL = model_config(tie_word_embeddings=True)
PARAMS = random_params(MODEL)
CFG = TrainConfig(steps=10, learning_rate=0.1, weight_decay=0.5, clip=1e-3)
LEARNING = TrainConfig(steps=12, learning_rate=1e-2, warmup=2)
DROPOUT = dataclasses.replace(MODEL, attention_dropout=0.3)
RNG = np.random.default_rng(0)
EXAMPLES = [Example(*[RNG.integers(0, 97, size).tolist()] * 2) for size in RNG.integers(3, 20, size=24)]


def rows(examples=EXAMPLES, width=32) -> TrainBatch:
    return pack(examples, width)[0]


def take(data: TrainBatch, count: int) -> TrainBatch:
    return jax.tree.map(lambda leaf: leaf[:count], data)


def step_of(cfg: TrainConfig, model=MODEL):
    return jax.jit(functools.partial(train_step, model=model, cfg=cfg), donate_argnums=0)  # as in `train`


@functools.partial(jax.jit, static_argnames="remat")
def gradient_of(params, batch: TrainBatch, remat=False):
    return jax.value_and_grad(lambda p: batch_loss(p, batch, MODEL, remat=remat), has_aux=True)(params)


def filled(data: TrainBatch) -> TrainBatch:
    """Add empty rows, so that all data has the same shape and uses the same program."""
    lacking = ((0, len(EXAMPLES) - len(data.ids)), (0, 0))
    labels = np.pad(data.labels, lacking, constant_values=-100)
    return TrainBatch(np.pad(data.ids, lacking), labels, np.pad(data.segments, lacking))


def loss(params, data: TrainBatch) -> float:
    return float(gradient_of(params, filled(data))[0][0])


def check_close(left, right, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-6, float(jnp.abs(b).max())))


def test_packed_row_equals_its_texts_alone():
    (total, count), packed = gradient_of(PARAMS, filled(rows()))
    one_each = TrainBatch(
        *(
            np.concatenate(leaves)
            for leaves in zip(*(dataclasses.astuple(rows([example])) for example in EXAMPLES), strict=True)
        )
    )
    (alone, alone_count), separate = gradient_of(PARAMS, one_each)
    assert rows().ids.shape[0] < len(EXAMPLES)
    assert int(count) == int(alone_count) == sum(len(example.ids) - 1 for example in EXAMPLES)
    np.testing.assert_allclose(total, alone, rtol=1e-6)
    check_close(packed, separate)


def test_padding_does_not_affect_the_loss():
    data = rows()
    junk = TrainBatch(np.where(data.segments == 0, 55, data.ids), data.labels, data.segments)
    assert (junk.ids != data.ids).any()
    assert loss(PARAMS, data) == loss(PARAMS, junk)


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_accumulated_gradients_equal_those_of_the_whole_batch(parts):
    data = take(rows(), 4)
    data.labels[0, 4:] = -100  # the micro-batches differ in their number of labels
    whole, wanted = step_of(CFG)(TrainState.create(PARAMS, CFG), data)
    state, metrics = step_of(dataclasses.replace(CFG, accumulate=parts))(TrainState.create(PARAMS, CFG), data)
    check_close(metrics, wanted)
    check_close(state.optimizer, whole.optimizer)


def test_indivisible_rows_are_refused():
    with pytest.raises(InputError, match="4 rows cannot be divided into accumulate=3"):
        step_of(dataclasses.replace(CFG, accumulate=3))(TrainState.create(PARAMS, CFG), take(rows(), 4))


def test_rematerialized_layers_have_the_same_gradient_and_store_less():
    data = filled(rows())
    kept, remade = (gradient_of.lower(PARAMS, data, remat).compile() for remat in (False, True))
    check_close(remade(PARAMS, data)[1], kept(PARAMS, data)[1])
    assert remade.as_text().count(" dot(") > kept.as_text().count(" dot(")


@pytest.mark.slow
def test_computation_is_bfloat16_and_params_stay_float32():
    data = take(rows(), 4)
    cfg = TrainConfig(steps=10, learning_rate=1e-3, dtype="bfloat16")
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    state, metrics = step_of(cfg)(TrainState.create(half, cfg), data)
    exact, wanted = step_of(dataclasses.replace(cfg, dtype="float32"))(TrainState.create(half, cfg), data)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    assert metrics.loss != wanted.loss
    np.testing.assert_allclose(metrics.loss, wanted.loss, rtol=2e-2)
    # AdamW's first step depends only on the gradients' signs, so most weights move the same way in both dtypes.
    moved, expected = (
        np.concatenate(
            [
                np.sign(np.ravel(a - b.astype(jnp.float32)))
                for a, b in zip(jax.tree.leaves(s.params), jax.tree.leaves(half), strict=True)
            ]
        )
        for s in (state, exact)
    )
    assert np.mean(moved == expected) > 0.9


def test_the_rate_rises_and_falls():
    cfg = TrainConfig(steps=100, learning_rate=2.0, warmup=10, final_rate=0.25)
    rates = [float(cfg.rate(step)) for step in (0, 5, 10, 55, 100)]
    np.testing.assert_allclose(rates, [0.0, 1.0, 2.0, 1.25, 0.5], rtol=1e-6)
    assert float(dataclasses.replace(cfg, warmup=0).rate(0)) == 2.0


@pytest.mark.slow
def test_only_matrices_decay():
    empty = take(rows(), 4)
    empty.labels[:] = -100
    state, metrics = step_of(CFG)(TrainState.create(PARAMS, CFG), empty)
    assert float(metrics.gradient_norm) == 0.0
    check_close(state.params["model"]["norm"], PARAMS["model"]["norm"], 0)
    table = PARAMS["model"]["embed_tokens"]["weight"]
    np.testing.assert_allclose(state.params["model"]["embed_tokens"]["weight"], table * 0.95, rtol=1e-5)


@pytest.mark.slow
def test_gradients_are_clipped():
    state, metrics = step_of(CFG)(TrainState.create(PARAMS, CFG), take(rows(), 4))
    assert float(metrics.gradient_norm) > 1e-3
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    first = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in moments[: len(moments) // 2]))
    np.testing.assert_allclose(first, 1e-3 * (1 - CFG.b1), rtol=1e-3)


@pytest.mark.slow
def test_dropout_depends_only_on_the_step():
    step, data = step_of(LEARNING, DROPOUT), take(rows(), 4)

    def loss_at(number):
        state = TrainState.create(PARAMS, LEARNING)
        return step(dataclasses.replace(state, step=jnp.int32(number)), data)[1].loss

    assert loss_at(0) == loss_at(0) != loss_at(1)


def test_training_learns_and_resumes_after_an_interruption(tmp_path):
    cfg, lines = LEARNING, []
    batches = shuffled(rows(), 4, seed=3)
    options = {"model": DROPOUT, "cfg": cfg, "report_every": 4}
    whole = train(PARAMS, batches, report=lines.append, **options)
    assert loss(whole, rows()) < 0.8 * loss(PARAMS, rows())
    assert [line.split()[1] for line in lines] == ["4/12", "8/12", "12/12"]

    def stops(step):
        if step == 7:
            raise KeyboardInterrupt
        return batches(step)

    with pytest.raises(KeyboardInterrupt):
        train(PARAMS, stops, directory=tmp_path / "state", save_every=2, **options)
    seen = []
    resumed = train(
        PARAMS, lambda step: seen.append(step) or batches(step), directory=tmp_path / "state", save_every=2, **options
    )
    assert seen == list(range(6, 12))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    with pytest.raises(InputError, match="other settings"):
        train(PARAMS, batches, directory=tmp_path / "state", model=DROPOUT, cfg=dataclasses.replace(cfg, clip=2.0))


def test_low_rank_updates():
    updates = lora.init(PARAMS, 2, jax.random.key(0), ("q_proj", "down_proj"))
    flat = jax.tree_util.tree_flatten_with_path(updates)[0]
    assert len(flat) == 2 * 2 * MODEL.num_hidden_layers
    check_close(lora.merge(PARAMS, updates, 2.0), PARAMS, 0)

    cfg = TrainConfig(steps=5, learning_rate=1e-2, lora_scale=2.0)
    trained = train(updates, shuffled(rows(), 4, 0), model=MODEL, cfg=cfg, frozen=PARAMS)
    merged = lora.merge(PARAMS, trained, cfg.lora_scale)
    changed = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b))), merged, PARAMS)
    layer = changed["model"]["layers"]["1"]
    assert layer["self_attn"]["q_proj"] == {"weight": True, "bias": False}
    assert layer["mlp"]["down_proj"]["weight"]
    assert sum(jax.tree.leaves(changed)) == 2 * MODEL.num_hidden_layers
    q = PARAMS["model"]["layers"]["1"]["self_attn"]["q_proj"]["weight"]
    ab = trained["model"]["layers"]["1"]["self_attn"]["q_proj"]
    np.testing.assert_allclose(
        merged["model"]["layers"]["1"]["self_attn"]["q_proj"]["weight"], q + 2.0 * ab["b"] @ ab["a"], atol=1e-6
    )
    assert loss(merged, rows()) < loss(PARAMS, rows())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        ({"warmup": 10}, "warmup must be less than steps, got 10 of 10"),
        ({"dtype": "int8"}, "dtype must be float32, bfloat16 or float16"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{"steps": 10, **fields})


def test_segments_have_their_own_positions_and_windows():
    model = CausalLM(dataclasses.replace(MODEL, windows=(None, 4)))
    ids = jnp.asarray(RNG.integers(0, 97, (1, 20)), jnp.int32)
    segments = jnp.asarray([[1] * 7 + [2] * 13])

    @jax.jit
    def apply(ids, segments=None):
        return model.apply({"params": PARAMS}, ids, segment_ids=segments).logits

    def alone(ids):  # padding on the right has no effect, and lets one program serve all lengths
        return apply(jnp.pad(ids, ((0, 0), (0, 20 - ids.shape[1]))))[:, : ids.shape[1]]

    packed = apply(ids, segments)
    np.testing.assert_allclose(packed[:, :7], alone(ids[:, :7]), atol=1e-4)
    np.testing.assert_allclose(packed[:, 7:], alone(ids[:, 7:]), atol=1e-4)
    with pytest.raises(InputError, match="segment_ids must be integers of the ids' shape"):
        model.apply({"params": PARAMS}, ids, segment_ids=segments[:, 1:])


def test_quantized_weights_are_refused():
    params = random_params(MODEL)
    params["model"]["embed_tokens"]["weight"] = Int8(jnp.ones((97, 32), jnp.int8), jnp.ones(97), np.dtype("float32"))
    with pytest.raises(InputError, match="params are quantized and cannot be trained"):
        TrainState.create(params, CFG)
    updates = lora.init(params, 2, jax.random.key(0))
    with pytest.raises(InputError, match="frozen has quantized weights"):
        train(updates, lambda step: take(rows(), 4), model=MODEL, cfg=CFG, frozen=params)
