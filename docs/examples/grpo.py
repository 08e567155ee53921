"""Teach the bundled model to tell stories in which many words begin with "s", by GRPO, in minutes on two cores.

    python docs/examples/grpo.py --plot rewards.svg
    python docs/examples/grpo.py --lora 8          # trains low-rank updates instead of all weights
    python docs/examples/grpo.py --one-program     # answers, rewards and the step in one compiled function

Each iteration samples a group of answers to each prompt, in slots, rewards each answer, and takes one step toward the
better ones. Nothing is compiled after the first iteration.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgen import Tokenizer, demo, generate, load_hf, score
from jaxgen.training import lora, policy

GROUP, PROMPTS, TOKENS, WIDTH = 8, 8, 48, 24
ANIMALS = ("owl", "fox", "hen", "stork", "goat", "mouse", "wolf", "heron", "cat", "dog", "bear", "frog")
base, cfg = load_hf(demo.PATH, dtype="float32")
tok = Tokenizer.from_pretrained(demo.PATH)
sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.95, "output_logprobs": "scores"}
cfg = cfg.replace(**sampling, max_new_tokens=TOKENS, num_return_sequences=GROUP, slots=32)
pieces = [tok.decode([token], skip_special_tokens=False) for token in range(cfg.model.vocab_size)]
begins_word = jnp.array([piece.startswith(" ") and piece[1:2].isalpha() for piece in pieces])
begins_with_s = jnp.array([piece.lower().startswith(" s") for piece in pieces])


def reward(tokens, mask):
    """Return the share of words that begin with "s", float32[B]."""
    words, with_s = (jnp.sum(table[tokens] & mask, axis=1) for table in (begins_word, begins_with_s))
    return with_s / jnp.maximum(words, 1)


def trainer(rank=None, one_program=False):
    """Return the weights, the optimizer's state, and a function that takes one step; `rank` is that of the updates."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-4 if rank is None else 2e-3))
    weights = jax.tree.map(jnp.array, base) if rank is None else lora.init(base, rank, jax.random.key(0))

    def params_of(weights):
        return weights if rank is None else lora.attach(base, weights, scale=2.0)

    def answers(weights, ids, mask, keys):
        return generate(params_of(weights), ids, keys, cfg, attention_mask=mask)

    def update(weights, state, out):
        mask = policy.answer_mask(out.lengths, TOKENS)
        rewards = reward(out.generated(out.sequences), mask)
        advantage = policy.group_advantage(rewards, GROUP)

        def loss(weights):
            given = {"attention_mask": out.attention_mask, "prompt_width": out.prompt_width}
            scores = score(params_of(weights), out.sequences, cfg, of="scores", **given)
            logprobs = out.generated(scores).logprobs
            old = jax.lax.stop_gradient(logprobs)  # one step per batch: the ratio is 1, but its gradient is not 0
            weight = policy.importance_weight(old, out.logprobs)
            objective = weight * policy.clipped_objective(logprobs, old, advantage, high=0.28)
            return -policy.token_mean(objective, mask), policy.token_mean(policy.kl(out.logprobs, old), mask)

        (_, drift), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            updates, state = optimizer.update(gradients, state, weights)
            return optax.apply_updates(weights, updates), state, jnp.mean(rewards), drift

    def whole(weights, state, *prompts):
        return update(weights, state, answers(weights, *prompts))

    step, iteration = (jax.jit(function, donate_argnums=(0, 1)) for function in (update, whole))

    def in_two(weights, state, *prompts):
        return step(weights, state, answers(weights, *prompts))

    return weights, optimizer.init(weights), iteration if one_program else in_two


def prompts(number):
    """Return a batch of prompts, always with the same width so that everything compiles only once, and their keys."""
    names = np.random.default_rng(number).choice(ANIMALS, PROMPTS, replace=False)
    batch = tok.chat([[{"role": "user", "content": f"Tell me a story about a {name}"}] for name in names])
    padding = ((0, 0), (WIDTH - batch.ids.shape[1], 0))
    keys = jax.random.split(jax.random.fold_in(jax.random.key(1), number), PROMPTS)
    return np.pad(batch.ids, padding), np.pad(batch.attention_mask, padding), keys


def train(weights, state, step, iterations):
    """Return the trained weights, the optimizer's state, and the mean reward of each iteration."""
    curve = []
    for number in range(iterations):
        weights, state, mean, drift = step(weights, state, *prompts(number))
        curve.append(float(mean))
        print(f"{number:4d}  reward {curve[-1]:.3f}  KL(sampler || trainer) {float(drift):.1e}", flush=True)
    return weights, state, curve


def plot(curve, file):
    """Plot the rewards as SVG."""
    step = 550 / (len(curve) - 1)
    points = " ".join(f"{40 + step * i:.1f},{180 - 160 * y / max(curve):.1f}" for i, y in enumerate(curve))
    file.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 210" font-family="sans-serif" font-size="12">'
        f'<rect width="600" height="210" fill="white"/><polyline points="{points}" fill="none" stroke="#2757c4"/>'
        f'<path d="M40 20V180H590" fill="none" stroke="#889"/><text x="40" y="14">mean reward, up to {max(curve):.2f}'
        f'</text><text x="590" y="200" text-anchor="end">{len(curve)} iterations</text></svg>\n'
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--lora", type=int, metavar="RANK", help="train low-rank updates")
    parser.add_argument("--one-program", action="store_true", help="compile a whole iteration as one function")
    parser.add_argument("--plot", type=Path, help="write a plot of the rewards to this SVG file")
    options = parser.parse_args()
    *_, curve = train(*trainer(options.lora, options.one_program), options.iterations)
    if options.plot:
        plot(curve, options.plot)
