"""Several adapters in one batch: each row is computed as if its adapter had been merged into the weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_adapter
from jaxgen import Engine, GenerationConfig, InputError, generate, prefill, score, score_many
from jaxgen.core.model import workarounds
from jaxgen.core.model.lowrank import Adapters
from tests.support.adapters import factors, merged, write
from tests.support.compilations import compilations
from tests.support.models import model_config, random_params, slow

MODEL = model_config(vocab_size=61)
CFG = GenerationConfig(model=MODEL, max_new_tokens=10, pad_token_id=0)
PARAMS = random_params(MODEL, scale=0.3)
UPDATES = [factors(MODEL, rank, seed, scale=0.2) for seed, rank in enumerate((4, 2, 3))]
MERGED = [*(merged(PARAMS, own) for own in UPDATES), PARAMS]  # index -1, no adapter, is PARAMS
CHOSEN = [0, 2, 1, -1]
IDS = np.random.default_rng(0).integers(0, 61, (4, 7))
KEYS = jax.random.split(jax.random.key(3), 4)


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return load_adapter([write(folder / str(i), own) for i, own in enumerate(UPDATES)], PARAMS, CFG)


# The others are slow: other files test these modes without adapters, and test_forward.py tests chunks.
FAST = {"guidance_scale": 1.5}
LIKE_OTHERS = [
    {},
    {"num_beams": 3, "num_return_sequences": 2},
    {"do_sample": True, "num_return_sequences": 2},
    {"slots": 2},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"prompt_lookup_num_tokens": 3},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"prefill_chunk_size": 3},
    {"cache_dtype": "int8"},
    {"dola_layers": "low", "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("options", [FAST, *slow(*LIKE_OTHERS)], ids=lambda options: ",".join(options) or "greedy")
def test_each_row_uses_its_own_adapter(params, options):
    cfg = CFG.replace(**options)
    keys = KEYS if cfg.on("do_sample") else None
    out = generate(params, IDS, keys, cfg.replace(adapter=CHOSEN))
    copies = cfg.num_return_sequences
    for row, adapter in enumerate(CHOSEN):
        own = None if keys is None else keys[row : row + 1]
        alone = generate(MERGED[adapter], IDS[row : row + 1], own, cfg)
        np.testing.assert_array_equal(out.sequences[row * copies : (row + 1) * copies], alone.sequences)


@pytest.mark.slow
def test_dola_reads_the_head_of_the_adapter(tmp_path):
    updates = factors(MODEL, 2, 5, ("lm_head",), scale=1.0)
    params = load_adapter([write(tmp_path / "a", updates)], PARAMS, CFG)
    cfg = CFG.replace(dola_layers="high", repetition_penalty=1.2)
    out = generate(params, IDS, None, cfg.replace(adapter=[0, -1, 0, -1]))
    for row, own in enumerate((merged(PARAMS, updates), PARAMS) * 2):
        np.testing.assert_array_equal(out.sequences[row], generate(own, IDS[row : row + 1], None, cfg).sequences[0])


def test_no_adapter_is_applied_without_the_option(params):
    np.testing.assert_array_equal(
        generate(params, IDS, None, CFG).sequences, generate(PARAMS, IDS, None, CFG).sequences
    )


def test_other_adapters_compile_nothing(params, tmp_path):
    others = load_adapter([write(tmp_path / str(i), factors(MODEL, 4, 9 + i)) for i in range(3)], PARAMS, CFG)
    generate(params, IDS, None, CFG.replace(adapter=CHOSEN))
    with compilations() as count:
        generate(params, IDS, None, CFG.replace(adapter=[2, 2, 1, 0]))
        generate(others, IDS, None, CFG.replace(adapter=[-1, 2, 1, 0]))
    assert count[0] == 0


@pytest.mark.slow
def test_a_cache_is_continued_with_its_adapter(params):
    cfg = CFG.replace(adapter=CHOSEN)
    cache = prefill(params, IDS[:, :4], cfg)
    out = generate(params, IDS[:, 4:], None, cfg, cache=cache)
    np.testing.assert_array_equal(out.sequences[:, 3:], generate(params, IDS, None, cfg).sequences[:, 7:])


@pytest.mark.slow
@pytest.mark.parametrize("of", ["logits", "scores"])
def test_score_uses_the_adapter_of_each_row(params, of):
    more = {"prompt_width": 3} if of == "scores" else {}
    cfg = CFG.replace(temperature=0.7, do_sample=True)
    found = score(params, IDS, cfg.replace(adapter=CHOSEN), of=of, **more)
    for row, adapter in enumerate(CHOSEN):
        alone = score(MERGED[adapter], IDS[row : row + 1], cfg, of=of, **more)
        np.testing.assert_allclose(found.logprobs[row], alone.logprobs[0], atol=1e-4)
    asked = [(row[:3].tolist(), row[3:].tolist()) for row in IDS]
    for many, alone in zip(
        score_many(params, asked, CFG.replace(adapter=1)), score_many(MERGED[1], asked, CFG), strict=True
    ):
        np.testing.assert_allclose(many.logprobs, alone.logprobs, atol=1e-4)


@pytest.mark.slow
def test_an_engine_serves_all_adapters(params):
    prompts = [np.tile(IDS[0], 6).tolist() for _ in range(8)]  # long enough for the prefix store
    cfg = CFG.replace(max_new_tokens=6, prefill_chunk_size=8)
    with Engine(params, cfg, None, slots=2, prompt_width=48, prompt_options=["adapter"]) as engine:
        engine.warmup()
        with compilations() as count:
            handles = [engine.submit(ids, adapter=i % 4 - 1) for i, ids in enumerate(prompts)]
            found = [handle.result()[0].tokens for handle in handles]
        assert count[0] == 0
        assert engine.counts().tokens == 48
        with pytest.raises(InputError, match="adapter=3, but params have 3 adapters"):
            engine.submit(prompts[0], adapter=3)
    for number, tokens in enumerate(found):
        alone = generate(MERGED[number % 4 - 1], [prompts[0]], None, cfg)
        np.testing.assert_array_equal(tokens, alone.sequences[0, 42:])


@pytest.mark.parametrize("ends", [(6,), (2, 4, 9)])
def test_both_implementations_of_the_update_agree(ends):
    """The GPU's code for a few rows computes the same update as the general code."""
    rng = np.random.default_rng(0)
    count, rank, features = 3, 2, ends[-1]
    a, b = rng.normal(size=(count, len(ends), rank, 5)), rng.normal(size=(count, rank, features))
    weight = Adapters(jnp.zeros((features, 5)), jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), ends)
    out, rows = rng.normal(size=(4, features)), rng.normal(size=(4, 5))
    narrow, chosen = np.einsum("bd,nprd->bnpr", rows, a), np.array([2, -1, 0, 2])
    expected = out.copy()
    for row, adapter in enumerate(chosen):
        if adapter >= 0:
            for part, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
                expected[row, start:end] += narrow[row, adapter, part] @ b[adapter, :, start:end]
    given = [jnp.asarray(x, jnp.float32) for x in (out, narrow)] + [jnp.asarray(chosen, jnp.int32)]
    of_each = functools.partial(workarounds._add_of_each, b=weight.b, ends=weight.ends)
    for form in (weight._add_of_all, of_each):
        np.testing.assert_allclose(form(*given), expected, atol=1e-5)


@pytest.mark.slow
def test_gradients_reach_only_the_adapter_of_the_row(params):
    def loss(params):
        return jnp.sum(score(params, IDS[:1], CFG.replace(adapter=1)).logprobs)

    a = jax.grad(loss)(params)["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"].a
    assert float(jnp.max(jnp.abs(a[1]))) > 0
    assert float(jnp.max(jnp.abs(a[jnp.asarray([0, 2])]))) == 0


@pytest.mark.parametrize(
    ("given", "message"), [(3, "adapter=3, but params have 3 adapters"), ([0, 1, 5, 0], "adapter=5")]
)
def test_missing_adapters_are_refused(params, given, message):
    with pytest.raises(InputError, match=message):
        generate(params, IDS, None, CFG.replace(adapter=given))


def test_parameters_without_adapters_are_refused():
    with pytest.raises(InputError, match="have no adapters to choose from"):
        generate(PARAMS, IDS, None, CFG.replace(adapter=0))
    with (
        Engine(PARAMS, CFG, None, slots=2, prompt_width=8) as engine,
        pytest.raises(InputError, match="have no adapters to choose from"),
    ):
        engine.submit([1], adapter=0)
