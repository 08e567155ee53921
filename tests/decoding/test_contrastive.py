"""Contrastive search, checked against plain Python and by its properties."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import (
    CausalLM,
    ConfigError,
    GenerationConfig,
    GenerationError,
    KVCache,
    StepHook,
    StopReason,
    TokenAutomaton,
    generate,
    score,
)
from jaxgen.core.config.tables import eos_list
from jaxgen.core.model.causal_lm import hidden
from tests.support.compilations import compiled_by_other_values
from tests.support.model_of_61_tokens import MODEL, PARAMS, PROMPTS, TABLE
from tests.support.models import all_generated, generated, left_pad, model_config, padded, random_params
from tests.support.streamers import Collector
from tests.support.tokenizers import byte_level

NEW = 9
CFG = GenerationConfig(model=MODEL, max_new_tokens=NEW, pad_token_id=0, penalty_alpha=0.6, top_k=4)
EOS = CFG.replace(eos_token_id=[7, 20, 33, 48, 50])


@functools.partial(jax.jit, static_argnums=0)
def states(model, params, embeds):
    return hidden(model, params, None, inputs_embeds=embeds[None])[0][0]


def last_states(embeds) -> np.ndarray:
    """Return the last layer's hidden states [T, D] for embeddings [T, D]. One program serves any T."""
    return np.asarray(states(MODEL, PARAMS, padded(embeds)), np.float64)[: len(embeds)]


def last_logits(embeds) -> np.ndarray:
    return last_states(embeds)[-1] @ np.asarray(PARAMS["lm_head"]["weight"], np.float64).T


def softmax(scores):
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores))
    return weights / weights.sum()


def embed(ids):
    return TABLE[ids]


def plain_search(prompt, cfg, process=lambda tokens, scores: scores, embed=embed):
    """Contrastive search of one prompt. The model reads each candidate in full, without a cache."""
    tokens, eos, alpha = [], eos_list(cfg.eos_token_id), cfg.penalty_alpha or 0.0
    while len(tokens) < cfg.max_new_tokens and (not tokens or tokens[-1] not in eos):
        ids = prompt + tokens
        scores = np.asarray(process(tokens, last_logits(embed(ids))))
        probs, values = softmax(scores), {}
        for token in np.argsort(-scores, kind="stable")[: cfg.top_k].tolist():
            vectors = last_states(embed([*ids, token]))
            vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
            similarity = np.max(vectors[:-1] @ vectors[-1])
            if scores[token] > -np.inf:
                values[token] = (1 - alpha) * probs[token] - alpha * similarity
        tokens.append(max(values, key=lambda token: values[token]))
    return tokens


def run(cfg, prompts=PROMPTS, width=None, **more):
    ids, mask = left_pad(prompts, width)
    return generate(PARAMS, ids, None, cfg, attention_mask=mask, **more)


@pytest.mark.slow
def test_options_per_prompt_match_the_reference():
    knobs = {"penalty_alpha": [0.6, 0.0, 1.2], "top_k": [5, 3, 4], "max_new_tokens": [9, 6, 8]}
    out = run(EOS.replace(**knobs))
    cfgs = [EOS.replace(**{name: values[row] for name, values in knobs.items()}) for row in range(3)]
    assert all_generated(out) == [plain_search(prompt, cfg) for prompt, cfg in zip(PROMPTS, cfgs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["top_k", "penalty_alpha"])
def test_prompts_without_contrastive_search_use_greedy_search(name):
    values = {"top_k": [1, 4, 0], "penalty_alpha": [0.0, 0.6, 0.0]}[name]
    greedy = run(GenerationConfig(model=MODEL, max_new_tokens=NEW, pad_token_id=0))
    contrastive = run(CFG)
    out = run(CFG.replace(**{name: values}))
    assert all_generated(out) == [generated(greedy, 0), generated(contrastive, 1), generated(greedy, 2)]
    assert all_generated(contrastive) != all_generated(greedy)


@pytest.mark.slow
def test_row_does_not_depend_on_batch_bucket_or_jit():
    cfg = EOS.replace(repetition_penalty=1.2)
    together = all_generated(run(cfg, width=40))
    alone = [generated(run(cfg, [prompt]), 0) for prompt in PROMPTS]
    ids, mask = left_pad(PROMPTS)
    traced = jax.jit(lambda params, cfg: generate(params, ids, None, cfg, attention_mask=mask))(PARAMS, cfg)
    assert together == alone == all_generated(traced)
    assert len({len(tokens) for tokens in together}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"prefill_chunk_size": 2}, {"prefill_chunk_size": 3}, {"top_k": 1000}])
def test_pieces_of_the_prompt_and_more_candidates_than_tokens(more):
    whole = CFG.replace(top_k=61) if "top_k" in more else CFG
    assert all_generated(run(CFG.replace(**more))) == all_generated(run(whole))


@pytest.mark.slow
def test_embeddings_in_place_of_ids():
    ids, mask = left_pad(PROMPTS)
    out = generate(PARAMS, None, None, EOS, inputs_embeds=TABLE[ids], attention_mask=mask)
    assert all_generated(out) == all_generated(run(EOS))


class Nudge(StepHook):
    """A hook that makes a different token more likely at each call, and scales the embeddings of generated tokens."""

    def init(self, history):
        return jnp.zeros(history.length.shape[0], jnp.int32)

    def before(self, calls, history, inputs):
        grown = 1 + 0.1 * (history.last(1) % 5).astype(jnp.float32)
        scale = jnp.where(history.step[:, None] > 0, grown, 1.0)[..., None]
        return dataclasses.replace(inputs, inputs_embeds=inputs.inputs_embeds * scale), calls

    def after(self, calls, history, output):
        logits = output.logits.at[jnp.arange(calls.shape[0]), 10 + calls % 26].add(2.5)
        return dataclasses.replace(output, logits=logits), calls + 1


NUDGE = Nudge()


@pytest.mark.slow
def test_the_hook_of_a_row_sees_its_own_tokens():
    for number, prompt in enumerate(PROMPTS):

        def grown(ids, prompt=prompt):
            scale = [1.0 if place < len(prompt) else 1 + 0.1 * (token % 5) for place, token in enumerate(ids)]
            return embed(ids) * np.asarray(scale, np.float32)[:, None]

        def nudged(tokens, scores):
            return scores + 2.5 * np.eye(61)[10 + len(tokens) % 26]

        assert generated(run(EOS, hook=NUDGE), number) == plain_search(prompt, EOS, nudged, grown)


@pytest.mark.slow
def test_guidance_chooses_the_candidates():
    cfg = EOS.replace(guidance_scale=1.6)
    out = run(cfg)
    for number, prompt in enumerate(PROMPTS):

        def guided(tokens, scores, prompt=prompt):
            other = jax.nn.log_softmax(last_logits(embed([prompt[-1], *tokens])))
            return 1.6 * (jax.nn.log_softmax(scores) - other) + other

        assert generated(out, number) == plain_search(prompt, cfg, guided)
    assert all_generated(out) != all_generated(run(EOS))


@pytest.mark.slow
def test_processors_criteria_and_a_prefix_function():
    def discourage(history, scores):
        return scores - 3.0 * jax.nn.one_hot(20 + history.length % 20, 61)

    def criterion(history, scores):
        return (history.last(1)[:, 0] % 7 == 3) & (history.step > 1)

    asked = []

    def allowed(row, ids):
        asked.append(row)
        return [token for token in range(61) if (token + row + len(ids)) % 3]

    cfg = CFG.replace(repetition_penalty=1.3)
    more = {"logits_processor": [discourage], "stopping_criteria": [criterion], "prefix_allowed_tokens_fn": allowed}
    out = run(cfg, **more)
    assert len(asked) == int(out.lengths.sum())  # called for chosen tokens, not for all candidates
    for row, prompt in enumerate(PROMPTS):

        def process(tokens, scores, row=row, prompt=prompt):
            ids, scores = prompt + tokens, np.array(scores)
            for token in set(ids):
                scores[token] = scores[token] * 1.3 if scores[token] < 0 else scores[token] / 1.3
            scores[[token for token in range(61) if not (token + row + len(ids)) % 3]] = -np.inf
            scores[20 + len(ids) % 20] -= 3.0
            return scores

        tokens = plain_search(prompt, cfg, process)
        ends = [step for step, token in enumerate(tokens) if step > 0 and token % 7 == 3]
        assert generated(out, row) == tokens[: ends[0] + 1 if ends else NEW]
        assert out.stop_reasons[row] == (StopReason.CRITERION if ends else StopReason.LENGTH)
    assert StopReason.CRITERION in out.stop_reasons.tolist()


@pytest.mark.slow
def test_text_follows_the_grammar_and_ends_with_a_stop_string():
    tokenizer = byte_level()
    vocab = len(tokenizer)
    model = model_config(vocab_size=vocab)
    params = random_params(model)
    automaton = TokenAutomaton.from_regex("(ab|ba|cd|dc){1,6}", tokenizer, vocab_size=vocab)
    cfg = GenerationConfig(model=model, max_new_tokens=12, pad_token_id=0, penalty_alpha=0.9, top_k=5)
    cfg = cfg.replace(eos_token_id=tokenizer.eos_token_id, min_new_tokens=4)
    ids = tokenizer.batch(["x"]).ids
    free = generate(params, ids, None, cfg, prefix_allowed_tokens_fn=automaton)
    text = tokenizer.decode(generated(free, 0))
    assert {text[place : place + 2] for place in range(0, len(text), 2)} <= {"ab", "ba", "cd", "dc"}
    stop = text[1:4]
    out = generate(
        params, ids, None, cfg.replace(stop_strings=stop), prefix_allowed_tokens_fn=automaton, tokenizer=tokenizer
    )
    assert tokenizer.decode(generated(out, 0)) == text[: text.index(stop) + 3]
    assert out.stop_reasons.tolist() == [StopReason.STOP_STRING]


@pytest.mark.slow
def test_banned_token_is_never_chosen():
    allowed = [[10], [20, 21], [30, 31, 32]]
    banned = [[token for token in range(61) if token not in some] for some in allowed]
    out = run(CFG.replace(suppress_tokens=banned, penalty_alpha=5.0, top_k=8))
    assert [set(tokens) <= set(some) for tokens, some in zip(all_generated(out), allowed, strict=True)] == [True] * 3
    assert len(set(generated(out, 2))) > 1


@pytest.mark.slow
def test_rows_without_a_possible_token_or_with_nan_end():
    cfg = EOS.replace(suppress_tokens=[list(range(61)), [1], [2]])
    ids, mask = left_pad(PROMPTS)

    def broken(history, scores):
        return jnp.where((history.prompt_length == 1)[:, None] & (history.step[:, None] == 2), jnp.nan, scores)

    more = {"attention_mask": mask, "logits_processor": [broken]}
    out = jax.jit(lambda params: generate(params, ids, None, cfg, **more))(PARAMS)
    assert out.stop_reasons.tolist()[::2] == [StopReason.NO_TOKEN, StopReason.NOT_A_NUMBER]
    assert out.lengths.tolist()[::2] == [0, 2]
    assert generated(out, 1) == generated(run(EOS.replace(suppress_tokens=[1])), 1)
    assert (out.cache.kv.total_length == out.cache.count - jnp.asarray([0, 1, 1])).all()
    with pytest.raises(GenerationError, match="row 0 cannot continue after 0 generated tokens: every token is banned"):
        run(cfg)


@pytest.mark.slow
def test_records_are_those_of_one_pass_over_the_chosen_tokens():
    cfg = EOS.replace(
        output_scores=True, output_logits=True, output_hidden_states=True, output_attentions=True,
        output_logprobs="scores", top_logprobs=3, repetition_penalty=1.2, max_new_tokens=[9, 4, 9],
    )  # fmt: skip
    out = run(cfg)
    for row, prompt in enumerate(PROMPTS):
        tokens, first = generated(out, row), out.prompt_width - len(prompt)
        whole = CausalLM(MODEL).apply(
            {"params": PARAMS}, jnp.asarray([prompt + tokens]), output_hidden_states=True, output_attentions=True
        )
        later, count = slice(len(prompt), len(prompt) + len(tokens) - 1), len(tokens)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
        close(out.logits[:count, row], whole.logits[0, len(prompt) - 1 : -1])
        assert not np.any(out.scores[count:, row])
        for layer, states in enumerate(whole.hidden_states):
            close(out.hidden_states.prefill[layer][row, first:], states[0, : len(prompt)])
            close(out.hidden_states.decode[layer][: count - 1, row], states[0, later])
            assert not np.any(out.hidden_states.decode[layer][count - 1 :, row])
        for layer, weights in enumerate(whole.attentions):
            columns = len(prompt) + count
            recorded = out.attentions.decode[layer][: count - 1, row][..., first : first + columns]
            close(recorded, weights[0, :, later].swapaxes(0, 1))
    scored = score(PARAMS, out.sequences, cfg.replace(max_new_tokens=9), attention_mask=out.attention_mask,
                   of="scores", prompt_width=out.prompt_width)  # fmt: skip
    np.testing.assert_allclose(scored.logprobs[0, 7:], out.logprobs[0], rtol=1e-4, atol=1e-4)
    assert out.top_tokens.shape == (3, 9, 3)


@pytest.mark.slow
def test_the_cache_of_a_result_continues_it():
    first = run(EOS.replace(guidance_scale=1.4))
    greedy = GenerationConfig(model=MODEL, max_new_tokens=4, pad_token_id=0)
    ids = [[40], [41], [42]]
    on = generate(PARAMS, ids, None, greedy, cache=first.cache)
    whole = [prompt + tokens + new for prompt, tokens, new in zip(PROMPTS, all_generated(first), ids, strict=True)]
    assert all_generated(on) == all_generated(run(greedy, whole))
    cropped = generate(PARAMS, ids, None, greedy, cache=first.cache.crop(-2))
    assert all_generated(cropped) == all_generated(run(greedy, [[*text[:-3], text[-1]] for text in whole]))


@pytest.mark.slow
def test_a_streamer_gets_each_token():
    collector = Collector()
    out = run(EOS, streamer=collector)
    assert collector.prompts.shape == (3, 7)
    assert collector.ended == 1
    steps = int(out.lengths.max())
    np.testing.assert_array_equal(collector.tokens, np.asarray(out.sequences)[:, 7 : 7 + steps])


@pytest.mark.slow
def test_time_limit_of_zero_ends_all_rows():
    out = run(CFG.replace(max_time=0.0))
    assert out.stop_reasons.tolist() == [StopReason.TIME] * 3


@pytest.mark.slow
def test_new_values_compile_nothing():
    assert compiled_by_other_values(run, CFG, penalty_alpha=lambda rng: float(rng.uniform(0.1, 1.5))) == 0


def test_unsupported_options_are_refused():
    with pytest.raises(ConfigError, match="num_return_sequences=2: contrastive_search has one result per prompt"):
        CFG.replace(num_return_sequences=2)
    cache = KVCache.create(MODEL, 1, 4)
    with pytest.raises(ConfigError, match=r"contrastive search \(penalty_alpha\) is not offered with cache="):
        generate(PARAMS, [[3]], None, CFG, cache=cache)
    with pytest.raises(ConfigError, match="top_k is traced under jit, and contrastive search"):
        jax.jit(lambda k: generate(PARAMS, [[3]], None, CFG.replace(top_k=k)))(4)
