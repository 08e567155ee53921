"""Log-probabilities of given tokens, compared with log_softmax over all of the model's logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import CausalLM, GenerationConfig, compute_transition_scores, generate, score, score_choices
from jaxgen.errors import ConfigError, InputError, JaxgenWarning
from tests.support.compilations import compilations
from tests.support.models import left_pad, model_config, random_params, slow
from tests.support.small import MODEL, PARAMS
from tests.support.tokenizers import byte_level

CFG = GenerationConfig(model=MODEL)
ROWS = [[5, 3, 8, 1, 90, 7, 7], [2, 96], [11], [4, 4, 4, 61, 0, 12]]


def plain(params, row, model=MODEL):
    """Return the log-probabilities of all tokens at each position of a row, float32[L, V]; those at the first are 0."""
    ids, mask = np.zeros((1, 8), np.int32), np.zeros((1, 8), np.int32)  # a fixed width, so that one program serves all
    ids[0, : len(row)], mask[0, : len(row)] = row, 1
    logits = model_logits(params, ids, mask, model)[0, : len(row)]
    return jnp.pad(jax.nn.log_softmax(logits, axis=-1)[:-1], ((1, 0), (0, 0)))


@functools.partial(jax.jit, static_argnums=3)
def model_logits(params, ids, mask, model):
    return CausalLM(model).apply({"params": params}, ids, attention_mask=mask).logits


def expected(params, row, model=MODEL):
    return plain(params, row, model)[jnp.arange(len(row)), jnp.asarray(row)]


def check_close(out, wanted, **tolerance):
    np.testing.assert_allclose(out, wanted, **{"rtol": 1e-4, "atol": 1e-5, **tolerance})


@pytest.mark.parametrize(("tied", "side"), slow((False, "left"), (True, "left"), (True, "right"), (False, "right")))
def test_rows_of_different_lengths(tied, side):
    model = model_config(tie_word_embeddings=tied)
    params = random_params(model)
    ids, mask = left_pad(ROWS, pad=9)
    if side == "right":
        ids, mask = (np.stack([np.roll(x, len(row)) for x, row in zip(a, ROWS, strict=True)]) for a in (ids, mask))
    out = score(params, ids, CFG.replace(model=model), attention_mask=mask)
    assert (out.logprobs.shape, out.logprobs.dtype) == (ids.shape, "float32")
    assert out.top_logprobs is None
    for row, tokens in enumerate(ROWS):
        check_close(out.logprobs[row][mask[row] == 1], expected(params, tokens, model))
        assert not np.any(np.asarray(out.logprobs)[row][mask[row] == 0])


def test_repr_of_a_score_shows_shapes():
    out = score(PARAMS, [[5, 3, 8]], CFG, top_logprobs=2)
    assert repr(out) == (
        "LogProbs(logprobs=float32[1, 3], top_logprobs=float32[1, 3, 2], top_tokens=int32[1, 3, 2], "
        "is_greedy=bool[1, 3])"
    )
    assert repr(jax.eval_shape(lambda: score(PARAMS, [[5, 3, 8]], CFG))) == (
        "LogProbs(logprobs=float32[1, 3], is_greedy=bool[1, 3])"
    )


@pytest.mark.slow
def test_padding_within_a_row_is_ignored():
    row = ROWS[0]
    mask = np.asarray([[0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0]])
    ids = np.full(mask.shape, 33)
    ids[mask == 1] = row
    check_close(score(PARAMS, ids, CFG, attention_mask=mask).logprobs[mask == 1], expected(PARAMS, row))


@pytest.mark.slow
def test_the_mask_is_inferred_as_in_generate():
    ids, mask = left_pad(ROWS, pad=96)
    cfg = CFG.replace(pad_token_id=96)
    rows = np.asarray([0, 3])  # the rows without token 96
    out = score(PARAMS, ids[rows], cfg)
    np.testing.assert_array_equal(out.logprobs, score(PARAMS, ids[rows], cfg, attention_mask=mask[rows]).logprobs)
    np.testing.assert_allclose(out.logprobs, jax.jit(lambda x: score(PARAMS, x, cfg))(ids[rows]).logprobs, atol=1e-5)
    with pytest.warns(JaxgenWarning, match="also an eos id"):
        score(PARAMS, ids, cfg.replace(eos_token_id=96))


@pytest.mark.parametrize("chunk", [3, 100, *slow(1, 7, 32)])
def test_chunks_do_not_change_scores(chunk):
    ids, mask = left_pad(ROWS)
    whole = score(PARAMS, ids, CFG, attention_mask=mask, top_logprobs=3)
    parts = score(PARAMS, ids, CFG, attention_mask=mask, top_logprobs=3, chunk=chunk)
    check_close(parts.logprobs, whole.logprobs)
    check_close(parts.top_logprobs, whole.top_logprobs)
    np.testing.assert_array_equal(parts.top_tokens, whole.top_tokens)


@pytest.mark.parametrize("top", [5, *slow(1, 97)])
def test_most_likely_tokens_are_returned(top):
    ids, mask = left_pad(ROWS)
    out = score(PARAMS, ids, CFG, attention_mask=mask, top_logprobs=top)
    assert (out.top_tokens.shape, out.top_tokens.dtype) == ((*ids.shape, top), "int32")
    for row, tokens in enumerate(ROWS):
        wanted = np.asarray(plain(PARAMS, tokens))[1:]
        held = mask[row] == 1
        check_close(np.asarray(out.top_logprobs)[row][held][1:], -np.sort(-wanted, axis=-1)[:, :top])
        tokens = np.asarray(out.top_tokens)[row][held][1:]
        check_close(np.take_along_axis(wanted, tokens, axis=-1), np.asarray(out.top_logprobs)[row][held][1:])
        first = np.argmax(held) + 1
        assert not np.any(np.asarray(out.top_logprobs)[row, :first])
        assert not np.any(np.asarray(out.top_tokens)[row, :first])


@pytest.mark.slow
def test_score_equals_log_probabilities_of_generate():
    prompts, mask = left_pad([[5, 3, 8], [2], [4, 1]])
    eos = [int(token) for token in range(0, 97, 9)]
    cfg = CFG.replace(max_new_tokens=9, eos_token_id=eos, pad_token_id=1)
    cfg = cfg.replace(output_logprobs="logits", top_logprobs=2, output_scores=True)
    for ids, given in ((prompts, mask), (prompts[:, ::-1], mask[:, ::-1])):
        out = generate(PARAMS, ids, None, cfg, attention_mask=given)
        assert len(set(np.asarray(out.lengths).tolist())) > 1
        again = score(PARAMS, out.sequences, cfg, attention_mask=out.attention_mask, top_logprobs=2)
        check_close(again.logprobs[:, out.prompt_width :], out.logprobs)
        check_close(again.top_logprobs[:, out.prompt_width :], out.top_logprobs)
        np.testing.assert_array_equal(again.top_tokens[:, out.prompt_width :], out.top_tokens)
        held = np.arange(9) < np.asarray(out.lengths)[:, None]
        transitions = compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        check_close(np.where(held, transitions, 0), out.logprobs)
        hf = out.to_hf()
        steps = len(hf.scores)
        check_close(compute_transition_scores(hf.sequences, hf.scores, normalize_logits=True), transitions[:, :steps])


def test_under_jit_and_with_a_traced_mask():
    ids, mask = left_pad(ROWS)
    eager = score(PARAMS, ids, CFG, attention_mask=mask, top_logprobs=2)
    jitted = jax.jit(lambda params, ids, mask: score(params, ids, CFG, attention_mask=mask, top_logprobs=2))
    for outside in (33, -1, 10**6):  # ids at the padding
        out = jitted(PARAMS, np.where(mask == 1, ids, outside), mask)
        check_close(out.logprobs, eager.logprobs)
        check_close(out.top_logprobs, eager.top_logprobs)
    wrong = jitted(PARAMS, np.where(ids == 61, 97, ids), mask).logprobs
    assert np.isnan(wrong[3, 4:]).all()
    assert not np.isnan(wrong[:3]).any()


@pytest.mark.slow
def test_bfloat16_scores_are_close():
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    params = random_params(model)
    ids, mask = left_pad(ROWS)
    out = score(params, ids, CFG.replace(model=model), attention_mask=mask)
    assert out.logprobs.dtype == "float32"
    for row, tokens in enumerate(ROWS):
        check_close(out.logprobs[row][mask[row] == 1], expected(params, tokens, model), atol=0.1, rtol=0.02)


# --- Gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.slow
def test_gradient_matches_the_plain_formula(tied):
    model = model_config(tie_word_embeddings=tied, num_hidden_layers=1)
    params = random_params(model)
    cfg = CFG.replace(model=model)
    ids, mask = left_pad(ROWS)
    rewards = np.asarray([0.5, -1.0, 2.0, 0.25], np.float32)

    def chunked(params):
        return jnp.sum(score(params, ids, cfg, attention_mask=mask, chunk=3).logprobs * rewards[:, None])

    def formula(params):
        terms = [reward * jnp.sum(expected(params, row, model)) for row, reward in zip(ROWS, rewards, strict=True)]
        return sum(terms[1:], terms[0])

    value, gradient = jax.jit(jax.value_and_grad(chunked))(params)
    wanted_value, wanted = jax.jit(jax.value_and_grad(formula))(params)
    check_close(value, wanted_value)
    jax.tree.map(lambda x, y: check_close(x, y, rtol=1e-3, atol=1e-4), gradient, wanted)
    assert np.abs(gradient["model"]["embed_tokens"]["weight"]).max() > 0.1


def sizes_with(program, dimension):
    """Search a program for arrays whose shape contains `dimension`, and yield their sizes."""
    for equation in program.eqns:
        for variable in equation.outvars:
            if dimension in variable.aval.shape:
                yield variable.aval.size
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes_with(inner, dimension)


def test_logits_of_all_positions_are_never_stored():
    vocab, rows, width, chunk = 5003, 3, 64, 4
    model = model_config(vocab_size=vocab, num_hidden_layers=1)
    params, ids = random_params(model), np.ones((rows, width), np.int32)

    def total(params, chunk):
        return jnp.sum(score(params, ids, CFG.replace(model=model), top_logprobs=2, chunk=chunk).logprobs)

    for function, weights in ((total, 0), (jax.grad(total), MODEL.hidden_size)):
        program = jax.make_jaxpr(function, static_argnums=1)
        assert max(sizes_with(program(params, chunk).jaxpr, vocab)) == max(rows * chunk, weights) * vocab
        assert max(sizes_with(program(params, width).jaxpr, vocab)) == rows * width * vocab


# --- Requests ---------------------------------------------------------------------------------------------------------


def test_one_program_serves_all_lengths_in_a_bucket():
    rng = np.random.default_rng(0)
    model = model_config(num_hidden_layers=1)
    params = random_params(model)
    cfg = CFG.replace(model=model)
    score(params, [[1, 2], [3, 4]], cfg)
    with compilations() as count:
        for width in range(1, 33):
            ids = rng.integers(1, 97, (2, width))
            assert score(params, ids, cfg).logprobs.shape == (2, width)
            score(params, ids, cfg.replace(temperature=0.5, do_sample=True), attention_mask=np.ones((2, width)))
    assert count[0] == 0
    with compilations() as count:
        for width in range(33, 60):
            score(params, rng.integers(1, 97, (2, width)), cfg)
    assert 0 < count[0] <= 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": [[1, 97]]}, InputError, "token 97"),
        ({"ids": [1, 2]}, InputError, r"\[B, P\]"),
        ({"ids": [[1.0]]}, TypeError, "integers"),
        ({"attention_mask": [[1]]}, InputError, "attention_mask"),
        ({"attention_mask": [[0, 0, 0]]}, InputError, "empty"),
        ({"params": {}}, InputError, "missing"),
        ({"cfg": MODEL}, TypeError, "GenerationConfig"),
        ({"cfg": GenerationConfig()}, ConfigError, "model"),
        ({"top_logprobs": 98}, ConfigError, "top_logprobs must be from 0 to 97"),
        ({"top_logprobs": -1}, ConfigError, "top_logprobs"),
        ({"top_logprobs": 1.0}, TypeError, "top_logprobs"),
        ({"chunk": 0}, ConfigError, "chunk must be at least 1"),
        ({"chunk": True}, TypeError, "chunk"),
    ],
)
def test_bad_arguments_are_refused(change, error, message):
    arguments = {"params": PARAMS, "ids": [[1, 2, 3]], "cfg": CFG, **change}
    with pytest.raises(error, match=message):
        score(**arguments)


# --- Transition scores ------------------------------------------------------------------------------------------------


def transition(seed, rows=4, sources=6, prompt=3, steps=5, vocab=11):
    rng = np.random.default_rng(seed)
    sequences = rng.integers(0, vocab, (rows, prompt + steps)).astype(np.int32)
    scores = rng.normal(size=(steps, sources, vocab)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    beams = rng.integers(0, sources, (rows, steps)).astype(np.int32)
    beams[np.arange(steps) >= rng.integers(1, steps + 1, (rows, 1))] = -1
    return sequences, scores, beams


def by_loop(sequences, scores, beams, normalize):
    out = np.zeros((len(sequences), len(scores)))
    for row, tokens in enumerate(sequences):
        for step, token in enumerate(tokens[-len(scores) :]):
            if beams is None or beams[row, step] >= 0:
                source = scores[step, row if beams is None else beams[row, step]].astype(np.float64)
                out[row, step] = source[token] - (np.log(np.sum(np.exp(source))) if normalize else 0)
    return out


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_transition_scores_match_the_reference(normalize, seed):
    sequences, scores, beams = transition(seed)
    jitted = jax.jit(compute_transition_scores, static_argnums=3)
    for given in (beams, None):
        used = scores if given is not None else scores[:, : len(sequences)]
        wanted = by_loop(sequences, used, given, normalize)
        for form in (used, tuple(used), list(map(jnp.asarray, used))):
            out = compute_transition_scores(sequences, form, given, normalize)
            assert out.dtype == "float32"
            check_close(out, wanted)
            check_close(jitted(sequences, form, given, normalize), wanted)


def test_transition_scores_of_a_beam_sum_to_its_score():
    """A beam's score is the sum of its log-probabilities / length ** penalty."""
    sequences, scores, beams = transition(0)
    scores = np.where(np.isinf(scores), np.float32(-9), scores)
    lengths, penalty = (beams >= 0).sum(axis=1), 0.7
    wanted = np.zeros(len(sequences))
    for row in range(len(sequences)):
        for step in range(lengths[row]):
            wanted[row] += scores[step, beams[row, step], sequences[row, 3 + step]]
    out = compute_transition_scores(sequences, scores, beams)
    check_close(np.sum(out, axis=1) / lengths**penalty, wanted / lengths**penalty)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": np.zeros((5, 11), np.float32)}, "scores must have shape"),
        ({"scores": []}, "arrays of one shape"),
        ({"scores": [np.zeros((4, 11)), np.zeros((4, 12))]}, "arrays of one shape"),
        ({"sequences": np.zeros((4, 4), np.int32)}, "sequences must have shape"),
        ({"beam_indices": None}, "beam_indices"),
        ({"beam_indices": np.zeros((4, 6), np.int32)}, "beam_indices must have shape"),
    ],
)
def test_mismatched_transition_scores_are_refused(change, message):
    sequences, scores, beams = transition(0)
    with pytest.raises(InputError, match=message):
        compute_transition_scores(**{"sequences": sequences, "scores": scores, "beam_indices": beams, **change})


def test_choices_are_scored_after_the_question():
    tok = byte_level()
    model = model_config(vocab_size=len(tok))
    params, choices = random_params(model), [" hello", "!", " a much longer answer €"]
    found = score_choices(params, "say: hell", choices, GenerationConfig(model=model), tok)
    for number, choice in enumerate(choices):
        whole = tok.encode("say: hell" + choice)
        answer = len(whole) - len(tok.encode("say: hell"))
        total = np.asarray(score(params, [whole], CFG.replace(model=model)).logprobs)[0, -answer:].sum()
        check_close(found.logprobs[number], total)
        check_close(found.per_token[number], total / answer)
        check_close(found.per_byte[number], total / len(choice.encode()))


def test_token_spanning_question_and_answer_counts_as_answer():
    tok = byte_level()
    model = model_config(vocab_size=len(tok))
    params, whole = random_params(model), tok.encode("hello")
    assert len(whole) < len(tok.encode("hel")) + len(tok.encode("lo"))
    shared = len([1 for a, b in zip(tok.encode("hel"), whole, strict=False) if a == b])
    found = score_choices(params, "hel", ["lo"], GenerationConfig(model=model), tok)
    expected_sum = np.asarray(score(params, [whole], CFG.replace(model=model)).logprobs)[0, max(shared, 1) :].sum()
    check_close(found.logprobs[0], expected_sum)


@pytest.mark.parametrize(
    ("question", "choices", "error", "message"),
    [
        ("q", "yes", TypeError, "choices must be a list of texts"),
        ("q", [], InputError, "at least one text"),
        ("q", ["yes", ""], InputError, "none of them may be empty"),
        ("", ["y"], InputError, "'y' adds no token"),
    ],
)
def test_bad_choices_are_refused(question, choices, error, message):
    with pytest.raises(error, match=message):
        score_choices(PARAMS, question, choices, CFG, byte_level())
