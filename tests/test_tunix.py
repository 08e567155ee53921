"""The rollout engine for tunix, with tunix's own interface, model and log-probabilities."""

import contextlib
import functools
import importlib.util
import sys
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxgen import Tokenizer, demo, generate, load_hf

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["Tell me a story about a fox", "Who are you?"]
WIDTH, NEW = 16, 8

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def lenient():
    """In the block, tunix's own code runs with jax's usual settings, and its warnings are not errors."""
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def tunix():
    """The modules of tunix, without `tunix/__init__.py`, which imports a hundred packages that these do not need."""
    found = importlib.util.find_spec("tunix")
    if found is None:
        pytest.skip("google-tunix is not installed: pip install --no-deps google-tunix jaxtyping wadler-lindig")
    package = types.ModuleType("tunix")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["tunix"] = package
    with lenient():
        from tunix.models.qwen2 import model, params
        from tunix.rl import common
        from tunix.rl.rollout import base_rollout
    yield types.SimpleNamespace(model=model, params=params, common=common, base=base_rollout)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tunix"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def example(tunix):
    spec = importlib.util.spec_from_file_location("tunix_rollout", ROOT / "docs" / "examples" / "tunix_rollout.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trainer(tunix):
    """tunix's model with the bundled model's weights, as tunix reads them."""
    model = load_hf(demo.PATH)[1].model
    config = tunix.model.ModelConfig(
        num_layers=model.num_hidden_layers,
        vocab_size=model.vocab_size,
        embed_dim=model.hidden_size,
        hidden_dim=model.intermediate_size,
        num_heads=model.num_attention_heads,
        head_dim=model.hidden_size // model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        rope_theta=10_000,
        norm_eps=model.rms_norm_eps,
        use_tied_embedding=True,
    )
    mesh = jax.make_mesh(
        (1, 1), ("fsdp", "tp"), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    with lenient():
        return tunix.params.create_model_from_safe_tensors(str(demo.PATH), config, mesh, dtype=jnp.float32)


@pytest.fixture
def rollout(tunix, example, trainer):
    tensors = tunix.params._get_key_and_transform_mapping(trainer.config)
    engine = functools.partial(example.JaxgenRollout, model=demo.PATH, tensors=tensors)
    config = tunix.base.RolloutConfig(data_type=jnp.float32)
    return engine(rollout_actor=trainer, tokenizer=None, mesh=None, rollout_config=config)


def test_sampler_generates(tunix, rollout):
    config = tunix.base.RolloutConfig(NEW, temperature=0.7, top_p=0.9, top_k=-1, max_prompt_length=WIDTH)
    config.seed, config.return_logprobs = jax.random.PRNGKey(3), True
    out = rollout.generate(PROMPTS, config)
    assert isinstance(rollout, tunix.base.BaseRollout)
    params, cfg = load_hf(demo.PATH, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, rollout.params, params)
    tok = Tokenizer.from_pretrained(demo.PATH)
    batch = tok.batch(PROMPTS)
    cfg = cfg.replace(do_sample=True, temperature=0.7, top_p=0.9, top_k=0, max_new_tokens=NEW)
    expected = generate(params, batch.ids, jax.random.key(3), cfg, attention_mask=batch.attention_mask)
    rows = np.asarray(expected.generated(expected.sequences))
    for row, length, tokens in zip(rows, np.asarray(expected.lengths), out.tokens, strict=True):
        assert tokens.tolist() == row[:length].tolist()
    assert out.text == tok.decode_batch(expected)
    assert out.left_padded_prompt_tokens.shape == (2, WIDTH)
    for row, prompt in zip(out.left_padded_prompt_tokens, PROMPTS, strict=True):
        ids = tok.encode(prompt)
        assert row.tolist() == [0] * (WIDTH - len(ids)) + ids
    # Those of the model at this temperature; top-p is left out.
    padded = jnp.asarray([[*tokens, *[0] * (NEW - len(tokens))] for tokens in out.tokens])
    at_one = rollout.get_per_token_logps(jnp.asarray(out.left_padded_prompt_tokens), padded)
    config.temperature, config.top_p = 1.0, 1.0
    assert [len(row) for row in out.logprobs] == [len(row) for row in out.tokens]
    assert at_one.shape == (2, NEW)
    again = rollout.generate(PROMPTS, config)  # at temperature 1, both functions agree
    padded = jnp.asarray([[*tokens, *[0] * (NEW - len(tokens))] for tokens in again.tokens])
    at_one = rollout.get_per_token_logps(jnp.asarray(again.left_padded_prompt_tokens), padded)
    for row, logprobs in zip(at_one, again.logprobs, strict=True):
        np.testing.assert_allclose(row[: len(logprobs)], logprobs, atol=1e-4)


def test_greedy_search_and_keys(tunix, rollout):
    config = tunix.base.RolloutConfig(NEW, temperature=0.0, max_prompt_length=WIDTH, eos_tokens=[5, 2])
    first, second = (rollout.generate(PROMPTS, config).text for _ in range(2))
    assert first == second
    config.temperature = 1.5
    first, second = (rollout.generate(PROMPTS, config).text for _ in range(2))
    assert first != second
    config.max_prompt_length = 2
    with pytest.raises(ValueError, match="more than max_prompt_length: filter the prompts"):
        rollout.generate(PROMPTS, config)


def test_weights_of_the_trainer_are_used(tunix, rollout, trainer):
    """After an update, the log-probabilities are those that tunix computes with its own model."""
    graph, state = nnx.split(trainer)
    state = jax.tree.map(lambda x: x * 1.1, state)
    tokens = np.random.default_rng(0).integers(3, 1000, (2, WIDTH + NEW))
    tokens[0, :5] = tokens[1, -3:] = 0
    prompts, completions = jnp.asarray(tokens[:, :WIDTH]), jnp.asarray(tokens[:, WIDTH:])
    with lenient():
        theirs = tunix.common.compute_per_token_logps(
            graph, state, prompts, completions, pad_id=rollout.pad_id(), eos_id=rollout.eos_id()
        )
    kept = np.asarray(completions != 0)
    before = rollout.get_per_token_logps(prompts, completions)
    assert np.abs(before - theirs)[kept].max() > 0.1
    # tunix synchronizes weights under these guards on a CPU.
    with jax.transfer_guard_device_to_host("disallow_explicit"), jax.transfer_guard_host_to_device("disallow_explicit"):
        rollout.update_params(state, (nnx.Param,))
    after = rollout.get_per_token_logps(prompts, completions)
    np.testing.assert_allclose(np.asarray(after)[kept], np.asarray(theirs)[kept], atol=2e-4)
    assert rollout.model() is None  # so that tunix synchronizes weights
    with pytest.raises(ValueError, match="low-rank updates are not supported"):
        rollout.update_params(nnx.state(trainer), (nnx.LoRAParam,))
