"""DoLa, checked against NumPy and by its properties."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import (
    CausalLM,
    ConfigError,
    GenerationConfig,
    JaxgenWarning,
    StepHook,
    StopReason,
    TokenAutomaton,
    generate,
    prefill,
)
from jaxgen.core.decoding.dola import contrasted
from tests.support.compilations import compiled_by_other_values
from tests.support.model_of_61_tokens import PROMPTS
from tests.support.models import all_generated, generated, left_pad, model_config, random_params
from tests.support.tokenizers import byte_level

MODEL = model_config(vocab_size=61, num_hidden_layers=7)
PARAMS = random_params(MODEL)
NEW = 6
CFG = GenerationConfig(
    model=MODEL, max_new_tokens=NEW, pad_token_id=0, dola_layers=[0, 2, 4, 5], repetition_penalty=1.2
)
CONTRASTED = jax.jit(contrasted)
APPLY = jax.jit(lambda ids: CausalLM(MODEL).apply({"params": PARAMS}, ids, output_hidden_states=True))


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.sum(np.exp(x - x.max(axis=-1, keepdims=True)), axis=-1, keepdims=True)) - x.max(-1)[..., None]


def read(tokens):
    """Return the last layer's logits for the next token, and those of all earlier layers without the final norm."""
    ids = np.zeros((1, 32), np.int32)
    ids[0, : len(tokens)] = tokens
    out = APPLY(ids)
    states = np.stack([np.asarray(x)[0, len(tokens) - 1] for x in out.hidden_states[:-1]])
    return np.asarray(out.logits)[0, len(tokens) - 1], states @ np.asarray(PARAMS["lm_head"]["weight"]).T


def contrast(mature, premature, layers):
    """Return the scores and the chosen layer."""
    mature = log_softmax(mature)
    divergences = []
    for layer in layers:
        base = log_softmax(premature[layer])
        average = (np.exp(mature) + np.exp(base)) / 2
        divergences.append(np.mean(average * (2 * np.log(average) - mature - base)) / 2)
    layer = layers[int(np.argmax(divergences))]
    scores = mature - log_softmax(premature[layer])
    return np.where(mature < mature.max() + np.log(0.1), -np.inf, scores), layer


def penalized(scores, tokens, penalty):
    seen = [*set(tokens)]
    scores = scores.copy()
    scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    return scores


def plain(prompt, cfg, guide=None, change=lambda logits: logits):
    """Run greedy search with DoLa, and return the tokens, the scores of each step, and the chosen layers."""
    tokens, steps, chosen = list(prompt), [], []
    for _ in range(cfg.max_new_tokens):
        mature, premature = read(tokens)
        scores, layer = contrast(change(mature), premature, cfg.dola_layers)
        if guide is not None:
            other = log_softmax(read([prompt[-1], *tokens[len(prompt) :]])[0])
            scores = log_softmax(scores)
            scores = np.where(np.isneginf(scores), scores, guide * (scores - other) + other)
        scores = penalized(scores, tokens, cfg.repetition_penalty)
        steps.append(scores)
        chosen.append(layer)
        tokens.append(int(np.argmax(scores)))
    return tokens[len(prompt) :], steps, chosen


def run(cfg, prompts=PROMPTS, width=None, key=None, **more):
    ids, mask = left_pad(prompts, width)
    return generate(PARAMS, ids, key, cfg, attention_mask=mask, **more)


@pytest.mark.slow
def test_dola_matches_the_reference():
    out = run(CFG.replace(output_scores=True, output_logits=True))
    layers = set()
    for row, prompt in enumerate(PROMPTS):
        tokens, steps, chosen = plain(prompt, CFG)
        assert generated(out, row) == tokens
        np.testing.assert_allclose(out.scores[:, row], steps, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(out.logits[0, row], read(prompt)[0], rtol=1e-3, atol=1e-3)
        layers.add(tuple(chosen))
    assert len(layers) > 1  # rows of a batch choose different layers


def test_the_layer_is_chosen_per_row():
    rng = np.random.default_rng(0)
    mature, premature = rng.normal(size=(5, 40)) * 2, rng.normal(size=(3, 5, 40)) * 2
    result = CONTRASTED(jnp.asarray(mature, jnp.float32), jnp.asarray(premature, jnp.float32))
    expected = [contrast(mature[row], premature[:, row], [0, 1, 2]) for row in range(5)]
    np.testing.assert_allclose(result, np.stack([scores for scores, _ in expected]), rtol=1e-4, atol=1e-4)
    assert len({layer for _, layer in expected}) > 1


def test_banned_logits_do_not_choose_the_layer():
    rng = np.random.default_rng(1)
    mature, premature = rng.normal(size=(1, 40)), rng.normal(size=(3, 1, 40))
    banned = jnp.asarray(np.where(np.arange(40) % 2, mature, -np.inf), jnp.float32)
    result = CONTRASTED(banned, jnp.asarray(premature, jnp.float32))[0]
    kept = np.flatnonzero(result > -np.inf)
    base = np.asarray(jax.nn.log_softmax(banned))[0, kept] - np.asarray(result)[kept]
    odd = np.arange(40)[1::2]
    p = np.exp(log_softmax(mature[0, odd]))
    bases = [log_softmax(layer[0]) for layer in premature]
    divergences = []
    for candidate in bases:
        average = (p + np.exp(candidate[odd])) / 2
        divergences.append(np.sum(average * (2 * np.log(average) - np.log(p) - candidate[odd])))
    np.testing.assert_allclose(base, bases[int(np.argmax(divergences))][kept], rtol=1e-4)


@pytest.mark.slow
def test_guidance_moves_the_contrasted_scores_away_from_the_plain_ones():
    out = run(CFG.replace(guidance_scale=1.5, output_scores=True))
    for row, prompt in enumerate(PROMPTS):
        tokens, steps, _ = plain(prompt, CFG, guide=1.5)
        assert generated(out, row) == tokens
        np.testing.assert_allclose(out.scores[:, row], steps, rtol=1e-3, atol=1e-3)


class Bias(StepHook):
    def after(self, state, history, output):
        return output.replace(logits=output.logits.at[:, 11].add(3.0)), state


@pytest.mark.slow
def test_a_hook_changes_what_is_contrasted():
    out = run(CFG, hook=Bias())
    biased = [plain(prompt, CFG, change=lambda logits: logits + 3.0 * (np.arange(61) == 11))[0] for prompt in PROMPTS]
    assert all_generated(out) == biased
    assert biased != [plain(prompt, CFG)[0] for prompt in PROMPTS]


@pytest.mark.slow
def test_row_does_not_depend_on_batch_bucket_chunks_or_jit():
    expected = all_generated(run(CFG))
    assert all_generated(run(CFG, width=40)) == expected
    assert [row for prompt in PROMPTS for row in all_generated(run(CFG, [prompt]))] == expected
    assert all_generated(run(CFG.replace(prefill_chunk_size=2))) == expected
    ids, mask = left_pad(PROMPTS)
    traced = jax.jit(lambda params: generate(params, ids, None, CFG, attention_mask=mask))(PARAMS)
    assert all_generated(traced) == expected


@pytest.mark.slow
def test_values_per_prompt():
    values = {"repetition_penalty": [1.2, 1.7, 2.5], "max_new_tokens": [6, 3, 5]}
    together = all_generated(run(CFG.replace(**values)))
    for row, prompt in enumerate(PROMPTS):
        own = {name: per_prompt[row] for name, per_prompt in values.items()}
        assert all_generated(run(CFG.replace(**own), [prompt])) == [together[row]]


@pytest.mark.slow
def test_dola_continues_from_a_cache():
    whole = all_generated(run(CFG))
    out = run(CFG.replace(max_new_tokens=2))
    more = CFG.replace(max_new_tokens=3)
    following = [[tokens[2]] for tokens in whole]
    on = generate(PARAMS, following, None, more, cache=out.cache)
    assert [first + rest for first, rest in zip(following, all_generated(on), strict=True)] == [t[2:6] for t in whole]
    shared = prefill(PARAMS, [PROMPTS[0][:4]], CFG)
    assert all_generated(generate(PARAMS, [PROMPTS[0][4:]], None, CFG, cache=shared)) == [whole[0]]


@pytest.mark.slow
def test_sampling_draws_from_the_contrasted_scores():
    cfg = CFG.replace(do_sample=True, temperature=0.7, top_k=4, num_return_sequences=2, output_scores=True)
    keys = jax.random.split(jax.random.key(1), 3)
    out = run(cfg, key=keys)
    for row, prompt in enumerate(PROMPTS):
        expected = plain(prompt, CFG)[1][0] / 0.7
        expected = np.where(expected < np.sort(expected)[-4], -np.inf, expected)
        np.testing.assert_allclose(out.scores[0, 2 * row], expected, rtol=1e-3, atol=1e-3)
        alone = run(cfg, [prompt], key=keys[row : row + 1])
        assert all_generated(alone) == all_generated(out)[2 * row : 2 * row + 2]


@pytest.mark.slow
def test_records_and_stop_reasons():
    def criterion(history, scores):
        return history.last(1)[:, 0] % 3 == 0

    records = {"output_hidden_states": True, "output_attentions": True, "output_logprobs": "scores", "top_logprobs": 2}
    free = all_generated(run(CFG))
    out = run(CFG.replace(eos_token_id=free[0][3], **records), stopping_criteria=[criterion])
    for row, tokens in enumerate(all_generated(out)):
        assert tokens == free[row][: len(tokens)]
        ends = [token == free[0][3] or token % 3 == 0 for token in tokens]
        assert not any(ends[:-1])
        assert ends[-1] == (out.stop_reasons[row] != StopReason.LENGTH)
    assert len(out.hidden_states.decode) == 8
    assert out.attentions.prefill[0].shape == (3, 4, 7, 7)
    assert np.asarray(out.top_tokens)[0, 0, 0] == free[0][0]


@pytest.mark.slow
def test_grammar_and_stop_strings():
    tokenizer = byte_level()
    model = model_config(vocab_size=len(tokenizer), num_hidden_layers=4)
    params = random_params(model)
    cfg = CFG.replace(model=model, dola_layers="high", eos_token_id=tokenizer.eos_token_id, max_new_tokens=9)
    automaton = TokenAutomaton.from_regex("(ab|ba){2,3}c", tokenizer, vocab_size=len(tokenizer))
    ids = tokenizer.batch(["x"]).ids
    out = generate(params, ids, None, cfg, prefix_allowed_tokens_fn=automaton)
    text = tokenizer.decode_batch(out)[0]
    assert len(text) in (5, 7)
    assert text.endswith("c")
    stop = text[2:4]
    out = generate(
        params, ids, None, cfg.replace(stop_strings=stop), prefix_allowed_tokens_fn=automaton, tokenizer=tokenizer
    )
    assert tokenizer.decode_batch(out)[0] == text[: text.index(stop) + 2]


@pytest.mark.slow
def test_last_layer_chooses_if_all_likely_tokens_are_banned():
    logits, premature = read(PROMPTS[0])
    scores, _ = contrast(logits, premature, [0])
    likely = np.flatnonzero(scores > -np.inf).tolist()
    cfg = CFG.replace(dola_layers=[0], suppress_tokens=likely, max_new_tokens=1)
    rest = penalized(logits.astype(np.float64), PROMPTS[0], 1.2)
    rest[likely] = -np.inf
    assert all_generated(run(cfg, PROMPTS[:1])) == [[int(np.argmax(rest))]]


@pytest.mark.slow
def test_new_values_compile_nothing():
    assert compiled_by_other_values(run, CFG) == 0


@pytest.mark.parametrize(
    ("layers", "error", "text"),
    [
        ("middle", TypeError, "dola_layers must be 'low', 'high' or a list of layers, got 'middle'"),
        (3, TypeError, "dola_layers must be 'low', 'high' or a list"),
        ([1.5], TypeError, "dola_layers must be 'low', 'high' or a list"),
        ([], ConfigError, "at least one layer"),
        (np.array([]), ConfigError, "at least one layer"),
        ([2, -1], ConfigError, "no negative numbers"),
    ],
)
def test_invalid_layers_are_refused(layers, error, text):
    with pytest.raises(error, match=text):
        CFG.replace(dola_layers=layers)


def test_layers_may_be_an_array():
    assert CFG.replace(dola_layers=np.array([4, 0, 4])).dola_layers == (4, 0)


def test_a_layer_that_the_model_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"dola_layers=\[1, 7\] has the layer 7, .* 0 .the embeddings. to 6"):
        run(CFG.replace(dola_layers=[1, 7]))


def test_beams_are_refused():
    with pytest.raises(ConfigError, match="dola_layers works with greedy search and sampling, not with beam_search"):
        run(CFG.replace(num_beams=2))


@pytest.mark.slow
def test_a_small_repetition_penalty_draws_a_warning():
    with pytest.warns(JaxgenWarning, match=r"dola_layers with repetition_penalty=1.0 may repeat"):
        run(CFG.replace(repetition_penalty=1.0, max_new_tokens=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(CFG.replace(repetition_penalty=[1.2, 1.3, 1.4], max_new_tokens=1))
