"""Compare the log-probabilities that a sampler records with those that a trainer computes for the same tokens.

    python -m benchmarks replay
    python -m benchmarks replay --model random-0.5b --rows 8 --seeds 1

`generate` draws answers with several sets of options. The log-probabilities of the answers are then recomputed in
several ways ("forms"). The cost of a form is the time for loss and gradient, relative to the first form of that dtype.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import measure
from convert import load_hf
from jaxgen import GenerateOutput, GenerationConfig, TokenAutomaton, Tokenizer, arguments, demo, generate, score
from jaxgen.core.decoding.logprobs import logprobs_of
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.causal_lm import forward

OPTIONS = {
    "temperature 1": {},
    "top-p 0.9": {"top_p": 0.9},
    "Qwen's (temperature 0.7, top-k 20, top-p 0.8, penalty 1.05)": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
    },
    "temperature 1.5, top-k 3": {"temperature": 1.5, "top_k": 3},
    "a grammar": {},
}
SUBJECTS = ("owl", "fox", "hen", "stork", "goat", "mouse", "wolf", "heron")
Form = Callable[[Any, GenerateOutput], jax.Array]
"""The log-probabilities float32[B, N] of an output's answers, as a function of the parameters."""


def main() -> None:
    """Measure, print and write the table."""
    args = _arguments()
    tok = Tokenizer.from_pretrained(args.model)
    prompts = [f"Tell me a story about a {SUBJECTS[row % len(SUBJECTS)]}" for row in range(args.rows)]
    batch = tok.chat([[{"role": "user", "content": prompt}] for prompt in prompts])
    grammar = TokenAutomaton.from_regex(r"[A-Z][a-z]+( [a-z]+)*\.", tok)
    lines = [
        f"## Sampler and trainer: {args.model.resolve().name}",
        "",
        f"{measure.machine()['cpu']}, {measure.machine()['cores']} cores, jax {jax.__version__}; {args.rows} "
        f"answers of {args.tokens} tokens, {args.seeds} times. The ratio is exp(trainer - sampler).",
        "",
        "| dtype | options | trainer | mean ratio | outside [0.9, 1.1] | KL (k3) | largest difference | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dtype in ("float32", "bfloat16"):
        params, loaded = load_hf(args.model, dtype=dtype)
        for name, options in OPTIONS.items():
            cfg = loaded.replace(do_sample=True, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
            cfg = cfg.replace(max_new_tokens=args.tokens, output_logprobs="scores", **options)
            rules = {"prefix_allowed_tokens_fn": grammar} if name == "a grammar" else {}
            draw = functools.partial(generate, params, batch.ids, cfg=cfg, attention_mask=batch.attention_mask, **rules)
            outputs = [dataclasses.replace(draw(key=jax.random.key(seed)), cache=None) for seed in range(args.seeds)]
            rows = compare(params, cfg, outputs, rules, args.group, not (options or rules))
            lines += [f"| {dtype} | {name} | {form} | {' | '.join(figures)} |" for form, figures in rows.items()]
            print("\n".join(lines[-len(rows) :]), flush=True)
    file = f"replay-{args.model.resolve().name}.md"
    (measure.folder(args.results) / file).write_text("\n".join([*lines, ""]), "utf-8")


def compare(
    params: Any,
    cfg: GenerationConfig,
    outputs: list[GenerateOutput],
    rules: dict[str, Any],
    group: int,
    is_plain: bool,
) -> dict[str, list[str]]:
    """Return each form's figures as text."""
    figures, first = {}, 0.0
    for name, (form, trainer) in forms(params, cfg, rules, group, is_plain).items():
        differences, seconds = [], []
        for out in outputs:
            live = np.arange(out.logprobs.shape[1]) < np.asarray(out.lengths)[:, None]
            differences.append((np.asarray(form(trainer, out)) - np.asarray(out.logprobs))[live])
        step = jax.jit(jax.grad(lambda params, out, form=form: jnp.sum(form(params, out))))
        for _ in range(4):  # the first one compiles
            start = time.perf_counter()
            jax.block_until_ready(step(trainer, outputs[0]))
            seconds.append(time.perf_counter() - start)
        price = statistics.median(seconds[1:])
        first = first or price
        difference = np.concatenate(differences)
        ratio = np.exp(difference)
        outside = np.mean((ratio < 0.9) | (ratio > 1.1))
        kl = np.mean(np.expm1(difference) - difference)
        largest = np.abs(difference).max()
        figures[name] = [f"{ratio.mean():.6f}", f"{outside:.3%}", f"{kl:.1e}", f"{largest:.1e}", f"{price / first:.2f}"]
    return figures


def forms(
    params: Any, cfg: GenerationConfig, rules: dict[str, Any], group: int, is_plain: bool
) -> dict[str, tuple[Form, Any]]:
    """Return the forms in which a trainer can compute log-probabilities, each with its parameters.

    `is_plain` means that the tokens were drawn from the model's own distribution.
    """

    def whole(params: Any, out: GenerateOutput, cfg: GenerationConfig = cfg) -> jax.Array:
        given = {"attention_mask": out.attention_mask, "prompt_width": out.prompt_width}
        return out.generated(score(params, out.sequences, cfg, of="scores", **given, **rules)).logprobs

    def in_groups(params: Any, out: GenerateOutput) -> jax.Array:
        parts = jax.tree.map(lambda x: x.reshape(-1, group, *x.shape[1:]), out)
        return lax.map(functools.partial(whole, params), parts).reshape(out.logprobs.shape)

    found: dict[str, tuple[Form, Any]] = {"`score`": (whole, params)}
    if cfg.model.dtype == "float32":
        return found
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    wide_cfg = cfg.replace(model=dataclasses.replace(cfg.model, dtype="float32"))
    found[f"`score`, {group} rows at a time"] = (in_groups, params)
    found["`score` in float32"] = (functools.partial(whole, cfg=wide_cfg), wide)
    if is_plain:
        found["token by token, through a cache"] = (functools.partial(by_token, cfg), params)
    return found


def by_token(cfg: GenerationConfig, params: Any, out: GenerateOutput) -> jax.Array:
    """Compute log-probabilities as decoding does: the prompt in one pass, then one token at a time through a cache."""
    ids, mask, width = out.sequences, out.attention_mask, out.prompt_width
    prompt = forward(
        cfg.model,
        params,
        ids[:, :width],
        attention_mask=mask[:, :width],
        cache=KVCache.create(cfg.model, ids.shape[0], width),
        cache_position=0,
        logits_to_keep=1,
    )

    def step(carry: tuple[KVCache, jax.Array], column: tuple[jax.Array, jax.Array]):
        (cache, logits), (token, live) = carry, column
        own = logprobs_of(logits, token, live, 0).logprobs
        out = forward(cfg.model, params, token[:, None], attention_mask=live[:, None], cache=cache)
        return (out.cache, out.logits[:, 0]), own

    cache = prompt.cache.fork(1, ids.shape[1] - width)
    columns = jax.tree.map(lambda x: x[:, width:].T, (ids, mask))
    return lax.scan(step, (cache, prompt.logits[:, 0]), columns)[1].T


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks replay", usage="%(prog)s [options]", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--model", type=Path, default=Path(demo.PATH), help="a checkpoint with a tokenizer (default: the bundled one)")
    add("--rows", type=arguments.count, default=64, help="answers in a batch")
    add("--tokens", type=arguments.count, default=64, help="the maximum number of tokens in each answer")
    add("--seeds", type=arguments.count, default=4, help="batches for each set of options")
    add("--group", type=arguments.count, default=16, help="rows at a time, in the form that scores rows in groups")
    add("--results", type=Path, default=measure.RESULTS, help="for results, one folder per machine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
