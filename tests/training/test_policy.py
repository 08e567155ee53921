"""`jaxgen.training.policy`, compared with the published formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import ConfigError, InputError
from jaxgen.training import policy

ROWS, STEPS = 6, 9


def arrays(seed: int):
    rng = np.random.default_rng(seed)
    logprobs, old = -rng.exponential(2, (2, ROWS, STEPS)).astype(np.float32)
    mask = policy.answer_mask(jnp.asarray(rng.integers(0, STEPS + 1, ROWS)), STEPS)
    return logprobs, old, rng.normal(size=ROWS).astype(np.float32), np.asarray(mask)


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_group_advantage(seed):
    rewards = np.random.default_rng(seed).normal(size=12).astype(np.float32)
    rewards[:3] = 0.5
    wanted, centered = [], []
    for group in rewards.reshape(4, 3):
        centered += list(group - group.mean())
        wanted += list((group - group.mean()) / (np.sqrt(((group - group.mean()) ** 2).sum() / 2) + 1e-4))
    np.testing.assert_allclose(policy.group_advantage(jnp.asarray(rewards), 3), wanted, atol=2e-5)
    np.testing.assert_allclose(policy.group_advantage(jnp.asarray(rewards), 3, divide=False), centered, atol=1e-6)
    assert np.all(np.asarray(policy.group_advantage(jnp.asarray(rewards), 3))[:3] == 0)


@given(st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_clipped_objective(seed):
    logprobs, old, advantage, _ = arrays(seed)
    for low, high in ((0.2, None), (0.2, 0.28)):
        wanted = np.zeros((ROWS, STEPS))
        for row in range(ROWS):
            for step in range(STEPS):
                difference = np.float64(logprobs[row, step] - old[row, step])
                ratio = np.exp(np.clip(difference, -20, 20))  # the bounds keep exp finite in float32
                clipped = min(max(ratio, 1 - low), 1 + (high or low))
                wanted[row, step] = min(ratio * advantage[row], clipped * advantage[row])
        found = policy.clipped_objective(*map(jnp.asarray, (logprobs, old, advantage)), low=low, high=high)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_gradient_is_zero_where_the_ratio_is_clipped():
    old = jnp.zeros((1, 4))
    logprobs = jnp.log(jnp.asarray([[1.0, 1.1, 1.5, 0.5]]))
    rises, falls = (
        jax.grad(lambda x, sign=sign: policy.clipped_objective(x, old, jnp.asarray([sign])).sum())(logprobs)
        for sign in (1.0, -1.0)
    )
    np.testing.assert_allclose(rises[0], [1, 1.1, 0, 0.5], rtol=1e-5)
    np.testing.assert_allclose(falls[0], [-1, -1.1, -1.5, 0], rtol=1e-5)


def test_importance_weight():
    trainer, sampler = jnp.asarray([[-1.0, -1.0, -1.0]]), jnp.asarray([[-1.0, -3.0, -0.5]])
    np.testing.assert_allclose(policy.importance_weight(trainer, sampler)[0], [1, 2, np.exp(-0.5)], rtol=1e-6)
    assert not np.any(jax.grad(lambda x: policy.importance_weight(x, sampler).sum())(trainer))
    far = policy.importance_weight(jnp.zeros((1, 1)), jnp.full((1, 1), -1e4), most=np.inf)
    assert np.isfinite(far).all()


def test_kl_estimates_the_divergence():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(20), 2)
    exact = float(np.sum(p * np.log(p / q)))
    drawn = rng.choice(20, 200_000, p=p)
    logprobs, other = (jnp.asarray(np.log(x)[drawn], jnp.float32) for x in (p, q))
    for estimator in ("k1", "k3"):
        assert float(policy.kl(logprobs, other, estimator).mean()) == pytest.approx(exact, rel=0.03)
    d = np.log(q)[drawn] - np.log(p)[drawn]
    np.testing.assert_allclose(policy.kl(logprobs, other, "k2"), d**2 / 2, rtol=1e-3, atol=1e-6)
    assert float(policy.kl(logprobs, other).min()) >= -1e-6
    with pytest.raises(ConfigError, match="estimator must be"):
        policy.kl(logprobs, other, "k4")


def test_means():
    values, _, _, mask = arrays(1)
    assert mask.any(axis=1).sum() < ROWS or mask.sum() > 0
    np.testing.assert_allclose(policy.token_mean(values, mask), values[mask].mean(), rtol=1e-5)
    rows = [row[m].mean() for row, m in zip(values, mask, strict=True) if m.any()]
    np.testing.assert_allclose(policy.sequence_mean(values, mask), np.mean(rows), rtol=1e-5)
    nothing = jnp.zeros_like(mask)
    infinite = jnp.full_like(values, jnp.nan)
    assert float(policy.token_mean(infinite, nothing)) == float(policy.sequence_mean(infinite, nothing)) == 0


def test_masks():
    mask = policy.answer_mask(jnp.asarray([0, 2, 3]), 3)
    assert mask.tolist() == [[False] * 3, [True, True, False], [True] * 3]
    assert policy.exclude_rows(mask, jnp.asarray([False, False, True]))[2].tolist() == [False] * 3


@pytest.mark.parametrize(
    ("rewards", "group", "error"), [((4,), 1, ConfigError), ((4,), 3, InputError), ((2, 2), 2, InputError)]
)
def test_mismatched_groups_are_refused(rewards, group, error):
    with pytest.raises(error):
        policy.group_advantage(jnp.zeros(rewards), group)
