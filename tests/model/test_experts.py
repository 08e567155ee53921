"""Models with experts: their configs, the layer, and what it promises about rows. Goldens: tests/parity."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import (
    CausalLM,
    ConfigError,
    GenerationConfig,
    InputError,
    ModelConfig,
    fuse_projections,
    generate,
    score,
)
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.training import lora
from jaxgen.training.loop import TrainBatch, TrainConfig, TrainState, batch_loss, train_step
from tests.support.models import CONFIG, model_config, random_params, slow

SIZES = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
QWEN2 = {"model_type": "qwen2_moe", "vocab_size": 96, "shared_expert_intermediate_size": 24, **SIZES}
QWEN3 = {"model_type": "qwen3_moe", "vocab_size": 96, "norm_topk_prob": True, "head_dim": 12, **SIZES}
MIXTRAL = {"model_type": "mixtral", "vocab_size": 96, "num_local_experts": 5, "num_experts_per_tok": 2}
CONFIGS = {config["model_type"]: config for config in (QWEN2, QWEN3, MIXTRAL)}
MODEL = model_config(**QWEN2, num_hidden_layers=3, mlp_only_layers=[1])
PARAMS = random_params(MODEL)
IDS = np.random.default_rng(0).integers(0, 96, (4, 7), np.int32)
CFG = GenerationConfig(model=MODEL, max_new_tokens=8, pad_token_id=0)


def run(ids, params=PARAMS, **inputs):
    return CausalLM(MODEL).apply({"params": params}, jnp.asarray(ids), **inputs)


def test_layers_with_experts():
    def sparse(**changes):
        return [layer.experts for layer in model_config(**QWEN3, num_hidden_layers=4, **changes).layers]

    assert sparse() == sparse(mlp_only_layers=None) == [True] * 4
    assert sparse(decoder_sparse_step=2) == [False, True, False, True]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[3]) == [False, True, False, False]
    assert [layer.experts for layer in model_config(**MIXTRAL).layers] == [True, True]


@pytest.mark.parametrize("name", CONFIGS)
def test_both_names_of_the_number_of_experts_are_read(name):
    config = {**CONFIG, **CONFIGS[name]}
    count = config.pop("num_experts", None) or config.pop("num_local_experts")
    first, second = (ModelConfig.from_hf(config | {key: count}) for key in ("num_experts", "num_local_experts"))
    assert first == second == ModelConfig.from_hf(config | {"num_experts": count, "num_local_experts": count})
    with pytest.raises(ConfigError, match="num_experts and num_local_experts differ"):
        ModelConfig.from_hf(config | {"num_experts": count, "num_local_experts": count + 1})
    with pytest.raises(ConfigError, match="missing: num_"):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (QWEN2, {"num_experts_per_tok": 7}, "num_experts_per_tok must be at most num_experts 6, got 7"),
        (MIXTRAL, {"num_experts_per_tok": 6}, "num_experts_per_tok must be at most num_local_experts 5, got 6"),
        (QWEN2, {"num_experts": 0}, "num_experts must be a whole number >= 1"),
        (QWEN2, {"mlp_only_layers": [2]}, "mlp_only_layers must be numbers from 0 to 1, got 2"),
        (QWEN2, {"mlp_only_layers": [-1]}, "mlp_only_layers must be numbers from 0 to 1, got -1"),
        (QWEN2, {"mlp_only_layers": 1}, "mlp_only_layers must be a list of whole numbers"),
        (QWEN2, {"decoder_sparse_step": 0}, "decoder_sparse_step must be"),
        (QWEN2, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be"),
        (QWEN2, {"moe_intermediate_size": None}, "missing: moe_intermediate_size"),
        (QWEN2, {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        (QWEN2, {"qkv_bias": False}, "qkv_bias must be true"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window must be false"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window must be false"),
        (MIXTRAL, {"mlp_only_layers": [0]}, "mlp_only_layers=.* is not implemented"),
        (CONFIG, {"num_experts": 4}, "num_experts=4 is not implemented"),
    ],
)
def test_refused_configs(config, change, message):
    with pytest.raises(ConfigError, match=message):
        model_config(**config | change)


@pytest.mark.parametrize("name", CONFIGS)
def test_matrix_parameters_counts_experts(name):
    model = model_config(**CONFIGS[name], num_hidden_layers=3)
    matrices = [shape for shape in param_shapes(model).values() if len(shape) > 1]
    assert model.matrix_parameters == sum(int(np.prod(shape)) for shape in matrices)


def published(model_type, vocab, hidden, mlp, layers, heads, kv_heads, **rest):
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    heads = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"model_type": model_type, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, **sizes, **heads, **rest}


def sizes(experts, chosen, width):
    return {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": width}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            published("qwen2_moe", 151936, 2048, 5632, 24, 16, 16, rope_theta=1e6, **sizes(60, 4, 1408))
            | {"shared_expert_intermediate_size": 5632, "use_sliding_window": False, "sliding_window": 32768}
            | {"decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001},
            14_315_784_192,  # Qwen1.5-MoE-A2.7B
        ),
        (
            published("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, rope_theta=1e6, head_dim=128, **sizes(128, 8, 768))
            | {"mlp_only_layers": [], "norm_topk_prob": True, "use_sliding_window": False, "sliding_window": None},
            30_532_122_624,  # Qwen3-30B-A3B
        ),
        (
            published("mixtral", 32000, 4096, 14336, 32, 32, 8, rope_theta=1e6, sliding_window=None)
            | {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02},
            46_702_792_704,  # Mixtral-8x7B-v0.1
        ),
    ],
)
def test_parameters_of_published_models(config, parameters):
    shapes = param_shapes(ModelConfig.from_hf(config))
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def test_a_row_has_the_same_bits_whatever_its_neighbors_and_its_place():
    logits = jax.jit(lambda ids: run(ids).logits)
    own = logits(IDS)
    others = np.random.default_rng(1).integers(0, 96, IDS.shape, np.int32)
    for place in range(4):
        rows = others.copy()
        rows[place] = IDS[0]
        np.testing.assert_array_equal(logits(rows)[place], own[0])


def test_no_token_is_dropped_if_all_use_the_same_experts():
    same = run(np.full((4, 7), 5)).logits
    np.testing.assert_allclose(same[3], run(np.full((1, 7), 5)).logits[0], rtol=1e-5, atol=1e-5)


def test_replayed_experts_replace_the_choice_of_the_routers():
    out = run(IDS, output_router_logits=True)
    assert [experts.shape for experts in out.routed_experts] == [(4, 7, 3)] * 2
    assert [logits.shape for logits in out.router_logits] == [(4, 7, 6)] * 2
    best = np.argsort(-np.asarray(out.router_logits[0]), axis=-1)[..., :3]
    np.testing.assert_array_equal(out.routed_experts[0], best)
    np.testing.assert_array_equal(run(IDS, routed_experts=out.routed_experts).logits, out.logits)
    others = (jnp.stack(out.routed_experts) + 1) % 6
    assert np.abs(run(IDS, routed_experts=others).logits - out.logits).max() > 0.1
    with pytest.raises(InputError, match=r"routed_experts must be integers of shape \[2, 4, 7, 3\], got int32\[1, 4"):
        run(IDS, routed_experts=out.routed_experts[:1])
    dense = model_config()
    with pytest.raises(InputError, match="need a model with experts"):
        CausalLM(dense).apply({"params": random_params(dense)}, jnp.asarray(IDS), output_router_logits=True)


SAMPLING = {"do_sample": True, "num_return_sequences": 2, "top_k": 30}


BEAMS = {"num_beams": 4, "num_return_sequences": 2, "eos_token_id": [1, 2, 3, 4, 5, 6, 7, 8]}
OTHERS = [
    BEAMS | {"num_beam_groups": 2, "diversity_penalty": 0.5},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"dola_layers": [1], "repetition_penalty": 1.2},
    {"assistant_early_exit": 1},
    SAMPLING | {"guidance_scale": 1.5},
]


@pytest.mark.parametrize("options", [SAMPLING, *slow(BEAMS, {"prompt_lookup_num_tokens": 3}, *OTHERS)], ids=str)
def test_score_replays_the_experts_of_a_generated_text(options):
    logprobs = None if {"num_beams", "dola_layers", "guidance_scale"} & set(options) else "logits"
    cfg = CFG.replace(output_routed_experts=True, output_logprobs=logprobs, **options)
    mask = np.arange(7)[None, :] >= np.array([0, 2, 3, 0])[:, None]
    out = generate(PARAMS, IDS, jax.random.key(0) if cfg.do_sample else None, cfg, attention_mask=mask)
    rows, width = out.sequences.shape
    experts = np.asarray(out.routed_experts)
    assert experts.shape == (2, rows, width, 3)
    real = np.asarray(out.attention_mask)
    unread = real & (np.cumsum(real, axis=1) == real.sum(axis=1, keepdims=True))
    np.testing.assert_array_equal((experts == -1).all(axis=(0, 3)), ~real | unread)
    assert ((experts >= 0).all(axis=(0, 3)) == (real & ~unread)).all()
    given = {"attention_mask": out.attention_mask}
    plain = run(out.sequences, attention_mask=out.attention_mask, output_router_logits=True).routed_experts
    np.testing.assert_array_equal(experts[:, real & ~unread], np.asarray(plain)[:, real & ~unread])
    replayed = score(PARAMS, out.sequences, cfg, routed_experts=out.routed_experts, **given).logprobs
    np.testing.assert_allclose(replayed, score(PARAMS, out.sequences, cfg, **given).logprobs, rtol=1e-4, atol=1e-4)
    if out.logprobs is not None:
        np.testing.assert_allclose(out.generated(replayed), out.logprobs, rtol=1e-4, atol=1e-4)
    others = np.where(experts < 0, -1, (experts + 1) % 6)
    assert np.abs(score(PARAMS, out.sequences, cfg, routed_experts=others, **given).logprobs - replayed).max() > 0.1


def test_routed_experts_that_do_not_fit_are_refused():
    experts = np.zeros((2, 4, 7, 3), np.int32)
    with pytest.raises(
        InputError, match=r"routed_experts must be integers of shape \[2, 4, 7, 3\], got int32\[2, 4, 7, 2\]"
    ):
        score(PARAMS, IDS, CFG, routed_experts=experts[..., :2])
    with pytest.raises(InputError, match="routed_experts has expert 6, but the model's are 0 to 5"):
        score(PARAMS, IDS, CFG, routed_experts=experts + 6)
    dense = GenerationConfig(model=model_config(), max_new_tokens=2)
    params = random_params(dense.model)
    with pytest.raises(InputError, match="routed_experts needs a model with experts, got model_type qwen2"):
        score(params, IDS, dense, routed_experts=experts)
    with pytest.raises(ConfigError, match="output_routed_experts is for models with experts, got model_type qwen2"):
        generate(params, IDS, None, dense.replace(output_routed_experts=True))


def test_padding_does_not_count_in_the_loss_of_the_routers():
    mask = np.arange(7)[None, :] >= np.array([0, 2, 3, 0])[:, None]
    padded = run(IDS, attention_mask=jnp.asarray(mask), output_router_logits=True).aux_loss
    other = np.where(mask, IDS, 1)
    np.testing.assert_allclose(
        run(other, attention_mask=jnp.asarray(mask), output_router_logits=True).aux_loss, padded, rtol=1e-6
    )
    assert abs(run(IDS, output_router_logits=True).aux_loss - padded) > 1e-4


def test_training_includes_the_loss_of_the_routers_only_on_request():
    batch = TrainBatch(IDS, IDS, np.ones_like(IDS))
    (plain, count), (total, _) = (batch_loss(PARAMS, batch, MODEL, router_loss=on) for on in (False, True))
    out = run(IDS, labels=jnp.asarray(IDS), output_router_logits=True)
    np.testing.assert_allclose(total / count, out.loss, rtol=1e-5)
    np.testing.assert_allclose((total - plain) / count, 0.001 * out.aux_loss, rtol=1e-2)
    cfg = TrainConfig(steps=5, router_loss=True)
    dense = model_config()
    state = TrainState.create(random_params(dense), cfg)
    with pytest.raises(ConfigError, match="router_loss is for models with experts"):
        train_step(state, batch, model=dense, cfg=cfg)


@pytest.mark.slow
def test_training_lowers_the_loss():
    cfg = TrainConfig(steps=20, learning_rate=3e-3, router_loss=True, accumulate=2, remat=True)
    state, losses = TrainState.create(PARAMS, cfg), []
    step = jax.jit(lambda state: train_step(state, TrainBatch(IDS, IDS, np.ones_like(IDS)), model=MODEL, cfg=cfg))
    for _ in range(20):
        state, metrics = step(state)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.5 * losses[0]


def test_low_rank_updates_of_experts_are_refused():
    with pytest.raises(ConfigError, match="down_proj: experts cannot have updates: choose from q_proj"):
        lora.init(PARAMS, 2, jax.random.key(0))
    updates = lora.init(PARAMS, 2, jax.random.key(0), ("q_proj", "v_proj"))
    assert set(updates["model"]["layers"]["0"]) == {"self_attn"}


def test_fused_projections_give_the_same_logits():
    fused = fuse_projections(PARAMS)
    assert fused["model"]["layers"]["0"]["mlp"]["experts"]["gate_up_proj"]["weight"].shape == (6, 40, 32)
    np.testing.assert_allclose(run(IDS, fused).logits, run(IDS).logits, rtol=1e-4, atol=1e-4)


MODES = {
    "sampling in slots": {"slots": 2, "do_sample": True, "num_return_sequences": 2},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "dola": {"dola_layers": [1], "repetition_penalty": 1.2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODES))
def test_each_row_alone_gives_the_tokens_of_the_batch(name):
    cfg = CFG.replace(**MODES[name])
    keys = jax.random.split(jax.random.key(0), 4) if cfg.do_sample else None
    out = generate(PARAMS, IDS, keys, cfg)
    each = out.sequences.shape[0] // 4
    for row in range(4):
        alone = generate(PARAMS, IDS[row : row + 1], None if keys is None else keys[row : row + 1], cfg)
        np.testing.assert_array_equal(out.sequences[row * each : (row + 1) * each], alone.sequences)


@pytest.mark.parametrize("name", ["assisted", "early exit"])
def test_drafts_do_not_change_the_tokens(name):
    out = generate(PARAMS, IDS, None, CFG.replace(**MODES[name]))
    np.testing.assert_array_equal(out.sequences, generate(PARAMS, IDS, None, CFG).sequences)
