"""Teach the bundled model to tell stories in which many words begin with "s", by GRPO, in minutes on two cores.

    python docs/examples/grpo.py --iterations 60 --plot rewards.svg

Each iteration draws a group of answers to each prompt, rewards each answer, and makes one step towards the better ones.
Nothing is compiled after the first iteration.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgen import Tokenizer, demo, generate, load_hf, score
from jaxgen.training import policy

GROUP, PROMPTS, TOKENS, WIDTH = 8, 8, 48, 24
ANIMALS = ("owl", "fox", "hen", "stork", "goat", "mouse", "wolf", "heron", "cat", "dog", "bear", "frog")
params, cfg = load_hf(demo.PATH, dtype="float32")
tok = Tokenizer.from_pretrained(demo.PATH)
cfg = cfg.replace(
    do_sample=True, temperature=1.0, top_k=0, top_p=0.95, max_new_tokens=TOKENS, num_return_sequences=GROUP,
    output_logprobs="scores",
)  # fmt: skip
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-4))


def reward(text: str) -> float:
    """Return the share of words that begin with "s"."""
    words = text.lower().split()
    return sum(word.startswith("s") for word in words) / max(len(words), 1)


def loss(params, out, mask, advantage):
    """Return what is minimised, and how far the trainer's log-probabilities are from the sampler's."""
    given = {"attention_mask": out.attention_mask, "prompt_width": out.prompt_width}
    logprobs = out.generated(score(params, out.sequences, cfg, of="scores", **given)).logprobs
    old = jax.lax.stop_gradient(logprobs)  # one step for each batch: the ratio is 1, and its gradient is not 0
    weight = policy.importance_weight(old, out.logprobs)
    objective = weight * policy.clipped_objective(logprobs, old, advantage, high=0.28)
    drift = policy.token_mean(policy.kl(out.logprobs, old), mask)
    return -policy.token_mean(objective, mask), drift


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params, state, out, advantage):
    """Return the parameters and the optimizer's state after one step."""
    mask = policy.answer_mask(out.lengths, TOKENS)
    (_, drift), gradients = jax.value_and_grad(loss, has_aux=True)(params, out, mask, advantage)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, drift


def prompts(rng: np.random.Generator):
    """Return a batch of prompts, always as wide, so that the step is compiled once."""
    names = rng.choice(ANIMALS, PROMPTS, replace=False)
    batch = tok.chat([[{"role": "user", "content": f"Tell me a story about a {name}"}] for name in names])
    padding = ((0, 0), (WIDTH - batch.ids.shape[1], 0))
    return np.pad(batch.ids, padding), np.pad(batch.attention_mask, padding)


def train(params, iterations: int) -> list[float]:
    """Return the mean reward of each iteration."""
    params, state = jax.tree.map(jnp.array, params), optimizer.init(params)
    rng, curve = np.random.default_rng(0), []
    for number in range(iterations):
        ids, mask = prompts(rng)
        key = jax.random.fold_in(jax.random.key(1), number)
        out = generate(params, ids, jax.random.split(key, PROMPTS), cfg, attention_mask=mask)
        rewards = np.array([reward(text) for text in tok.decode_batch(out)], np.float32)
        advantage = policy.group_advantage(jnp.asarray(rewards), GROUP)
        params, state, drift = step(params, state, out, advantage)
        curve.append(float(rewards.mean()))
        print(f"{number:4d}  reward {curve[-1]:.3f}  KL(sampler || trainer) {float(drift):.1e}")
    print(tok.decode_batch(out)[0])
    return curve


def plot(curve: list[float], file: Path) -> None:
    """Draw the rewards as SVG."""
    x = np.linspace(40, 590, len(curve))
    y = 180 - 160 * np.array(curve) / max(0.01, *curve)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 210" font-family="sans-serif" font-size="12">'
        f'<rect width="600" height="210" fill="white"/><polyline points="{points}" fill="none" stroke="#2757c4" '
        f'stroke-width="2"/><path d="M40 20V180H590" fill="none" stroke="#889"/><text x="40" y="14">mean reward, up to '
        f'{max(curve):.2f}</text><text x="590" y="200" text-anchor="end">{len(curve)} iterations</text></svg>\n'
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--plot", type=Path, help="an SVG file for the rewards")
    options = parser.parse_args()
    rewards = train(params, options.iterations)
    if options.plot:
        plot(rewards, options.plot)
