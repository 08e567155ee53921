"""The model's interface, and the kinds of weights that it computes with."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import CausalLM, GenerationConfig, InputError, KVCache, generate
from jaxgen.core.model import causal_lm
from jaxgen.core.model.context import Context
from jaxgen.core.model.lowrank import LowRank
from jaxgen.core.model.weights import Weight, linear, look_up, product
from jaxgen.training import lora
from tests.support.models import counting_config, counting_params, model_config, random_params

CFG = model_config()
PARAMS = random_params(CFG)
IDS = jnp.asarray([[3, 1, 4], [1, 5, 9]], jnp.int32)


@flax.struct.dataclass
class Halves:
    """A kind of weight that only this file defines: the upper and lower rows of a matrix, stored separately."""

    upper: jax.Array
    lower: jax.Array

    @classmethod
    def of(cls, weight):
        return cls(weight[: len(weight) // 2], weight[len(weight) // 2 :])

    @property
    def shape(self):
        return (len(self.upper) + len(self.lower), self.upper.shape[1])

    @property
    def dtype(self):
        return self.upper.dtype

    def specs(self, spec):
        return Halves(spec, spec)

    def product(self, rows, context):
        return jnp.concatenate([product(rows, part, context) for part in (self.upper, self.lower)], axis=1)

    def look_up(self, ids):
        return jnp.concatenate([self.upper, self.lower])[ids]


def low_rank(out: int, width: int, dtype: str = "float32") -> tuple[LowRank, np.ndarray]:
    """Return a low-rank weight and the matrix that it represents."""
    rng = np.random.default_rng(2)
    weight, a, b = (jnp.asarray(rng.normal(size=s), dtype) for s in ((out, width), (2, width), (out, 2)))
    wide = [np.asarray(value, np.float64) for value in (weight, a, b)]
    return LowRank(weight, a, b), wide[0] + wide[2] @ wide[1]


class TestFace:
    @pytest.mark.slow
    @pytest.mark.parametrize("tied", [False, True])
    def test_head_of_hidden_is_the_forward_pass(self, tied):
        cfg = model_config(tie_word_embeddings=tied)
        params = random_params(cfg)
        whole = causal_lm.forward(cfg, params, IDS, output_hidden_states=True)
        hidden, cache = causal_lm.hidden(cfg, params, IDS)
        assert cache is None
        np.testing.assert_array_equal(hidden, whole.hidden_states[-1])
        np.testing.assert_array_equal(causal_lm.head(cfg, params, hidden), whole.logits)
        embeds = CausalLM(cfg).apply({"params": params}, IDS, method="embed")
        np.testing.assert_array_equal(embeds, whole.hidden_states[0])

    def test_head_gives_float32_for_any_leading_axes(self):
        cfg = model_config(torch_dtype="bfloat16")
        logits = causal_lm.head(cfg, random_params(cfg), jnp.ones((cfg.hidden_size,), jnp.bfloat16))
        assert (logits.dtype, logits.shape) == (jnp.float32, (cfg.vocab_size,))

    def test_embed_gives_nan_for_an_unknown_id(self):
        embeds = causal_lm.embed(CFG, PARAMS, jnp.asarray([[2, 97, -1]]))
        np.testing.assert_array_equal(embeds[0, 0], PARAMS["model"]["embed_tokens"]["weight"][2])
        assert bool(jnp.all(jnp.isnan(embeds[0, 1:])))
        with pytest.raises(InputError, match=r"ids must be integers of shape \[B, T\], got int32\[3\]"):
            causal_lm.embed(CFG, PARAMS, IDS[0])

    def test_hidden_is_nan_where_the_cache_is_full(self):
        cache = KVCache.create(CFG, 2, 4)
        run = jax.jit(lambda position: causal_lm.hidden(CFG, PARAMS, IDS, cache=cache, cache_position=position))
        states, _ = run(jnp.asarray([0, 2]))
        assert bool(jnp.all(jnp.isfinite(states[0])))
        assert bool(jnp.all(jnp.isnan(states[1])))


class TestKinds:
    @pytest.mark.parametrize("divided", [False, True])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("rows", [1, 5])
    def test_low_rank_product(self, rows, dtype, divided):
        weight, matrix = low_rank(40, 24, dtype)
        assert (weight.shape, weight.dtype) == ((40, 24), dtype)
        x = jnp.asarray(np.random.default_rng(3).normal(size=(rows, 24)), dtype)
        out = jax.jit(lambda x, weight: linear(x, weight, None, Context(divided)))(x, weight)
        assert out.dtype == dtype
        expected = np.asarray(x, np.float64) @ matrix.T
        rounding = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2 * rounding, atol=16 * rounding)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_low_rank_look_up(self, dtype):
        weight, matrix = low_rank(40, 24, dtype)
        out = jax.jit(look_up)(jnp.asarray([[0, 39], [-1, 40]]), weight)
        assert out.dtype == dtype
        tolerance = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
        np.testing.assert_allclose(np.asarray(out[0], np.float64), matrix[[0, 39]], atol=tolerance)
        assert bool(jnp.all(jnp.isnan(out[1])))

    @pytest.mark.slow
    def test_a_model_with_low_rank_updates_equals_the_merged_one(self):
        updates = lora.init(PARAMS, 2, jax.random.key(0))
        updates = jax.tree.map(lambda x: x + 0.1, updates)
        apart = causal_lm.forward(CFG, lora.attach(PARAMS, updates, 0.5), IDS).logits
        merged = causal_lm.forward(CFG, lora.merge(PARAMS, updates, 0.5), IDS).logits
        np.testing.assert_allclose(apart, merged, atol=1e-4)
        assert float(jnp.max(jnp.abs(merged - causal_lm.forward(CFG, PARAMS, IDS).logits))) > 0.1

    @pytest.mark.slow
    def test_generate_with_low_rank_updates(self):
        cfg = counting_config(max_new_tokens=4)
        params = counting_params(cfg)
        head = params["lm_head"]["weight"]
        # The update cancels the head and replaces it with one that counts down.
        down = jnp.roll(head, -2, axis=0)
        update = LowRank(head, jnp.eye(head.shape[1]), down - head)
        out = generate({**params, "lm_head": {"weight": update}}, [[9]], None, cfg)
        assert out.sequences.tolist() == [[9, 8, 7, 6, 5]]

    @pytest.mark.slow
    def test_new_kind_of_weight_needs_one_class(self):
        def halved(params):
            return jax.tree.map(lambda x: Halves.of(x) if x.ndim == 2 else x, params)

        assert isinstance(Halves.of(jnp.eye(4)), Weight)
        expected = causal_lm.forward(CFG, PARAMS, IDS).logits
        np.testing.assert_allclose(causal_lm.forward(CFG, halved(PARAMS), IDS).logits, expected, atol=1e-5)
        cfg = counting_config(max_new_tokens=3)
        out = generate(halved(counting_params(cfg)), [[3]], None, cfg)
        assert out.sequences.tolist() == [[3, 4, 5, 6]]


class TestMismatch:
    NAME = r"model\.layers\.1\.self_attn\.q_proj\.weight"

    @pytest.mark.parametrize(
        ("weight", "reason"),
        [
            (jnp.ones((32, 31)), r"has shape \[32, 31\], wanted \[32, 32\]"),
            # flax would only check the first stored array.
            (LowRank(jnp.ones((31, 32)), jnp.ones((2, 32)), jnp.ones((31, 2))), r"has shape \[31, 32\]"),
            (jnp.ones((32, 32), jnp.int8), "is int8, wanted an array of floats"),
            ([[1.0] * 32] * 32, "is of type list, wanted an array of floats"),
        ],
    )
    @pytest.mark.parametrize(
        "run",
        [
            lambda params: causal_lm.forward(CFG, params, IDS),
            lambda params: generate(params, IDS, None, GenerationConfig(model=CFG, max_new_tokens=2)),
        ],
        ids=["the model", "generate"],
    )
    def test_a_parameter_that_does_not_fit_is_named(self, run, weight, reason):
        params = jax.tree.map(lambda x: x, PARAMS)
        params["model"]["layers"]["1"]["self_attn"]["q_proj"]["weight"] = weight
        with pytest.raises(InputError, match=f"{self.NAME} {reason}"):
            run(params)

    def test_a_missing_parameter_is_named(self):
        params = jax.tree.map(lambda x: x, PARAMS)
        del params["model"]["layers"]["1"]["self_attn"]["q_proj"]["weight"]
        with pytest.raises(InputError, match=f"{self.NAME} is missing"):
            causal_lm.forward(CFG, params, IDS)

    def test_vectors_cannot_be_quantized(self):
        params = jax.tree.map(lambda x: x, PARAMS)
        params["model"]["norm"]["weight"] = low_rank(32, 32)[0]
        with pytest.raises(InputError, match=r"model\.norm\.weight has shape \[32, 32\], wanted \[32\]"):
            causal_lm.forward(CFG, params, IDS)
