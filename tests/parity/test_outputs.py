"""Outputs other than tokens: scores, log-probabilities, hidden states, attentions. Also in transformers' format."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import CausalLM, ConfigError, GenerationConfig, compute_transition_scores, generate, score
from tests.support.goldens import GOLDENS, load
from tests.support.models import generated, slow
from tests.support.small import CFG, IDS, MASK, MODEL, PARAMS, PROMPTS

EVERYTHING = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}


def check_close(found, expected):
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=1e-4 * max(1e-3, np.abs(expected[np.isfinite(expected)]).max())
    )


def golden_names():
    with np.load(GOLDENS / "441" / "outputs.npz") as arrays:
        return sorted({name.split(".")[0] for name in arrays})


@pytest.mark.parametrize("name", [golden_names()[0], *slow(*golden_names()[1:])])
def test_to_hf_is_what_transformers_returns(name):
    with np.load(GOLDENS / "441" / "outputs.npz") as arrays:
        golden = {key.split(".")[1]: arrays[key] for key in arrays if key.startswith(f"{name}.")}
    params, cfg = load(GOLDENS / "441" / "checkpoints" / name)
    new = golden["sequences"].shape[1] - golden["ids"].shape[1]
    cfg = GenerationConfig(model=cfg.model, max_new_tokens=new, min_new_tokens=2, pad_token_id=0, **EVERYTHING)
    cfg = cfg.replace(eos_token_id=golden["eos_token_id"].tolist(), suppress_tokens=golden["suppress_tokens"].tolist())
    out = generate(params, golden["ids"], None, cfg, attention_mask=golden["attention_mask"])
    mine = out.to_hf()
    np.testing.assert_array_equal(mine.sequences, golden["sequences"])
    live = np.asarray(out.attention_mask)[:, golden["ids"].shape[1] :].T  # [steps, rows]
    read = live[1:]  # steps that read a real token; after a row's end, the values differ
    assert len(mine.scores) == new
    for key in ("scores", "logits"):
        found, expected = np.stack(getattr(mine, key)), golden[key]
        assert found.shape == expected.shape
        np.testing.assert_array_equal(np.isinf(found[live]), np.isinf(expected[live]))
        assert (found[~live] == 0).all()  # after a row's end, where transformers continues with padding
        check_close(np.where(np.isinf(found), 0, found)[live], np.where(np.isinf(expected), 0, expected)[live])
    real = golden["attention_mask"] == 1
    states = np.stack(mine.hidden_states[0])
    assert states.shape == golden["prompt_hidden_states"].shape
    check_close(states[:, real], golden["prompt_hidden_states"][:, real])
    check_close(np.stack([np.stack(layers)[:, :, 0] for layers in mine.hidden_states[1:]])[:, :, :][
        np.broadcast_to(read[:, None], golden["hidden_states"].shape[:3])
    ], golden["hidden_states"][np.broadcast_to(read[:, None], golden["hidden_states"].shape[:3])])  # fmt: skip
    weights = np.stack(mine.attentions[0])
    assert weights.shape == golden["prompt_attentions"].shape
    check_close(np.swapaxes(weights, 2, 3)[:, real], np.swapaxes(golden["prompt_attentions"], 2, 3)[:, real])
    for step, layers in enumerate(mine.attentions[1:], start=1):
        assert layers[0].shape[-2:] == (1, golden["ids"].shape[1] + step)
        found = np.stack(layers)[..., 0, :]
        check_close(found[:, read[step - 1]], golden["attentions"][step - 1][:, read[step - 1], :, : found.shape[-1]])
    past = np.stack([np.stack(layer) for layer in mine.past_key_values])
    assert past.shape == golden["past_key_values"].shape
    held = np.asarray(out.attention_mask)[:, : past.shape[4]].copy()
    for row, length in enumerate(out.lengths.tolist()):
        held[row, golden["ids"].shape[1] + length - 1 :] = False  # the model has not read a row's last token
    held = held[None, None, :, None, :, None]
    check_close(past * held, golden["past_key_values"] * held)
    for normalize in (False, True):
        expected = golden["transition_scores_normalized" if normalize else "transition_scores"]
        found = compute_transition_scores(mine.sequences, mine.scores, normalize_logits=normalize)
        check_close(np.asarray(found)[live.T], expected[live.T])


@pytest.mark.slow
def test_layers_equal_those_of_one_pass():
    out = generate(PARAMS, IDS, None, CFG.replace(**EVERYTHING), attention_mask=MASK)
    width, heads = out.sequences.shape[1] - 1, MODEL.num_attention_heads
    whole = CausalLM(MODEL).apply(
        {"params": PARAMS},
        out.sequences[:, :-1],
        attention_mask=out.attention_mask[:, :-1],
        output_hidden_states=True,
        output_attentions=True,
    )
    assert [x.shape for x in out.hidden_states.decode] == [(5, 3, 32)] * 3
    assert [x.shape for x in out.attentions.decode] == [(5, 3, heads, width + 1)] * 2
    for layer, (prompt, later) in enumerate(zip(out.hidden_states.prefill, out.hidden_states.decode, strict=True)):
        together = np.concatenate([prompt, np.swapaxes(later, 0, 1)], axis=1)
        real = np.asarray(out.attention_mask[:, :-1])
        check_close(together[real], np.asarray(whole.hidden_states[layer])[real])
        assert (together[~real] == 0).all()


@pytest.mark.parametrize(
    "fields", [{"do_sample": True, "num_return_sequences": 2, "top_k": 0}, {"guidance_scale": 1.5}]
)
@pytest.mark.slow
def test_layers_with_several_rows_per_prompt(fields):
    cfg = CFG.replace(**EVERYTHING, **fields)
    out = generate(PARAMS, IDS, jax.random.key(0), cfg, attention_mask=MASK)
    rows = out.lengths.shape[0]
    assert out.hidden_states.prefill[0].shape == (3, 5, 32)
    assert out.attentions.decode[0].shape == (5, rows, 4, 11)
    np.testing.assert_allclose(np.asarray(out.attentions.decode[0]).sum(-1), 1.0, rtol=1e-5)
    assert len(out.to_hf().attentions) == 6
    assert out.to_hf().attentions[0][0].shape == (rows, 4, 5, 5)
    jitted = jax.jit(lambda params: generate(params, IDS, jax.random.key(0), cfg, attention_mask=MASK))(PARAMS)
    for mine, other in zip(jax.tree.leaves(out.attentions), jax.tree.leaves(jitted.attentions), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@pytest.mark.slow
def test_attentions_with_a_cache_are_refused():
    first = generate(PARAMS, IDS, None, CFG, attention_mask=MASK)
    with pytest.raises(ConfigError, match="output_attentions is not offered with cache="):
        generate(PARAMS, IDS, None, CFG.replace(output_attentions=True), attention_mask=MASK, cache=first.cache)
    on = generate(PARAMS, [[3]] * 3, None, CFG.replace(output_hidden_states=True), cache=first.cache)
    rows = [prompt + generated(first, row) + [3] for row, prompt in enumerate(PROMPTS)]
    for row, ids in enumerate(rows):
        states = CausalLM(MODEL).apply({"params": PARAMS}, jnp.asarray([ids]), output_hidden_states=True).hidden_states
        check_close(np.asarray(on.hidden_states.prefill[-1])[row, 0], np.asarray(states[-1])[0, -1])


@pytest.mark.parametrize("source", ["logits", "scores"])
@pytest.mark.slow
def test_log_probabilities(source):
    cfg = CFG.replace(do_sample=True, temperature=1.7, top_k=30, repetition_penalty=1.2, eos_token_id=list(range(30)))
    cfg = cfg.replace(output_logprobs=source, top_logprobs=3, output_scores=True, output_logits=True)
    out = generate(PARAMS, IDS, jax.random.key(2), cfg, attention_mask=MASK)
    lengths = out.lengths.tolist()
    assert len(set(lengths)) > 1
    values = jax.nn.log_softmax(getattr(out, source), axis=-1)
    for row, length in enumerate(lengths):
        for step, token in enumerate(generated(out, row)):
            np.testing.assert_allclose(out.logprobs[row, step], values[step, row, token], rtol=1e-5, atol=1e-6)
            best = jax.lax.top_k(values[step, row], 3)
            np.testing.assert_allclose(out.top_logprobs[row, step], best[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(out.top_tokens[row, step], best[1])
        assert (out.logprobs[row, length:] == 0).all()
        assert (out.top_logprobs[row, length:] == 0).all()
    if source == "logits":
        scores = score(PARAMS, out.sequences, cfg, attention_mask=out.attention_mask)
        np.testing.assert_allclose(scores.logprobs[:, out.prompt_width :], out.logprobs, atol=1e-4)


def test_records_that_are_not_requested_are_none():
    out = generate(PARAMS, IDS, None, CFG, attention_mask=MASK)
    for name in ("scores", "logits", "logprobs", "top_logprobs", "top_tokens", "hidden_states", "attentions"):
        assert getattr(out, name) is None
        if not name.startswith(("logprobs", "top")):
            assert getattr(out.to_hf(), name) is None
