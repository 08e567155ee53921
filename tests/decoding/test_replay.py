"""Scores of given tokens, compared with the scores that `generate` recorded and with the scores of single steps."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_hf
from jaxgen import CausalLM, ConfigError, GenerationConfig, InputError, demo, generate, score
from jaxgen.core.logits.history import History
from jaxgen.core.logits.pipeline import build_transform
from jaxgen.core.logits.row_options import RowOptions
from jaxgen.errors import JaxgenWarning
from tests.scoring.test_text import check_close, sizes_with
from tests.support.automata import of_matrix
from tests.support.compilations import compilations
from tests.support.models import generated, left_pad, model_config, random_params

MODEL = model_config(num_hidden_layers=1)
PARAMS = random_params(MODEL)
EOS = list(range(0, 97, 9))
CFG = GenerationConfig(
    model=MODEL, do_sample=True, max_new_tokens=8, eos_token_id=EOS, pad_token_id=1, output_logprobs="scores"
)
IDS, MASK = left_pad([[5, 3, 8, 1, 90, 7, 7], [2, 96], [11]])
SETTINGS = {
    "penalties": {
        **{"top_k": 0, "temperature": 0.7, "repetition_penalty": 1.8, "encoder_repetition_penalty": 0.7},
        **{"encoder_no_repeat_ngram_size": 2, "min_new_tokens": 3, "watermarking_config": {"bias": 3.0}},
    },
    "bans": {
        **{"no_repeat_ngram_size": 1, "bad_words_ids": [[4], [2, 7]], "sequence_bias": {(3,): -4.0, (7, 9): 5.0}},
        **{"min_length": 8, "suppress_tokens": [10, 11], "begin_suppress_tokens": [12, 13], "top_k": 30},
        **{"num_return_sequences": 3, "remove_invalid_values": True},
    },
    "warpers": {
        **{"top_k": 60, "top_p": 0.95, "min_p": 0.002, "typical_p": 0.97, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
        **{"top_h": 0.95, "renormalize_logits": True, "max_new_tokens": None, "max_length": 13},
        "forced_eos_token_id": 18,
    },
    "per-prompt": {
        **{"temperature": [0.5, 1.0, 1.5], "top_k": [5, 0, 20], "top_p": [0.9, 1.0, 0.5], "num_return_sequences": 2},
        **{"max_new_tokens": [3, 8, 8], "min_new_tokens": [0, 3, 5], "forced_eos_token_id": 9},
        "eos_token_id": [[0, 9], [18, 27], [36, 45]],
    },
    "greedy": {
        **{"do_sample": False, "repetition_penalty": 1.3, "exponential_decay_length_penalty": (2, 1.3)},
        **{"forced_bos_token_id": 33, "forced_decoder_ids": [[9, 44]], "renormalize_logits": True},
    },
}


def run(cfg, **arguments):
    key = jax.random.key(3) if cfg.do_sample else None
    return generate(PARAMS, IDS, key, cfg, attention_mask=MASK, **arguments)


def scored(params, out, cfg, **arguments):
    given = {"attention_mask": out.attention_mask, "prompt_width": out.prompt_width, **arguments}
    return score(params, out.sequences, cfg, of="scores", **given)


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.slow
def test_score_equals_the_recorded_log_probabilities(name):
    cfg = CFG.replace(**SETTINGS[name], top_logprobs=3)
    out = run(cfg)
    assert len(set(np.asarray(out.lengths).tolist())) > 1
    again = scored(PARAMS, out, cfg, top_logprobs=3, chunk=3)
    assert (again.logprobs.shape, again.logprobs.dtype) == (out.sequences.shape, "float32")
    assert not np.any(np.asarray(again.logprobs)[:, : out.prompt_width])
    check_close(again.logprobs[:, out.prompt_width :], out.logprobs)
    check_close(again.top_logprobs[:, out.prompt_width :], out.top_logprobs)
    own = score(PARAMS, out.sequences, cfg, attention_mask=out.attention_mask, prompt_width=out.prompt_width)
    assert np.abs(np.asarray(own.logprobs)[:, out.prompt_width :] - out.logprobs).max() > 0.1


# --- Extensions ---------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class Discourage:
    tokens: jax.Array
    penalty: jax.Array

    def __call__(self, history, scores):
        return scores.at[:, self.tokens].add(-self.penalty)


def not_the_last_token(history, scores):
    return scores.at[jnp.arange(scores.shape[0])[:, None], history.last(1)].add(-5.0)


def in_turns(start):
    """Return an automaton that allows ids of remainder 0, 1 and 2 (mod 3) in turn. A text may end after remainder 2."""
    following = np.full((3, 3), -1)
    following[np.arange(3), np.arange(3)] = [1, 2, 0]
    return of_matrix(np.arange(97) % 3, following, np.asarray([True, False, False]), start)


@pytest.mark.slow
@pytest.mark.parametrize("eos", [EOS, None], ids=["eos", "no-eos"])
def test_user_defined_processors_and_an_automaton(eos):
    cfg = CFG.replace(num_return_sequences=2, eos_token_id=eos, max_new_tokens=[9, 8, 7])  # each ends a round
    extensions = {"logits_processor": [Discourage(np.arange(30, 50), np.float32(7)), not_the_last_token]}
    extensions["prefix_allowed_tokens_fn"] = in_turns([0, 1, 2])
    out = run(cfg, **extensions)
    if eos is None:
        assert [generated(out, row)[0] % 3 for row in range(6)] == [0, 0, 1, 1, 2, 2]
    check_close(scored(PARAMS, out, cfg, **extensions).logprobs[:, out.prompt_width :], out.logprobs)


# --- Rounding -----------------------------------------------------------------------------------------------------

CUTS = {
    "top_k": {"top_k": 3, "temperature": 1.5},
    "top_p": {"top_p": 0.9},
    "top_k and top_p": {"top_k": 20, "top_p": 0.8, "renormalize_logits": True},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.2},
    "top_h": {"top_h": 0.4},
}


def drawn_in_16_bits(options, rows, new_tokens, keys):
    """Yield params, sampled outputs and config in bfloat16, where one pass rounds scores differently than steps do."""
    params, cfg = load_hf(demo.PATH, dtype="bfloat16")
    cfg = cfg.replace(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens).replace(**options)
    cfg = cfg.replace(output_logprobs="scores", eos_token_id=None)
    ids = np.random.default_rng(0).integers(10, cfg.model.vocab_size, (rows, 6))
    for key in range(keys):
        out = generate(params, ids, jax.random.key(key), cfg)
        again = np.asarray(scored(params, out, cfg).logprobs)[:, out.prompt_width :]
        assert np.mean(again != np.asarray(out.logprobs)) > 0.1, "the scores do not differ"
        assert np.all(np.isfinite(again))
        yield params, out, cfg


@pytest.mark.slow
def test_a_drawn_token_has_a_finite_score_in_16_bits():
    assert len(list(drawn_in_16_bits(CUTS["top_k"], rows=64, new_tokens=16, keys=1))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CUTS))
def test_100_000_drawn_tokens_have_finite_scores_in_16_bits(name):
    *_, (params, out, cfg) = drawn_in_16_bits(CUTS[name], rows=400, new_tokens=64, keys=4)
    gradient = jax.jit(jax.grad(lambda params: jnp.mean(scored(params, out, cfg).logprobs)))(params)
    assert all(np.all(np.isfinite(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradient))


# --- Gradients ----------------------------------------------------------------------------------------------------

TUNED = CFG.replace(
    temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, typical_p=0.95, repetition_penalty=1.4, min_new_tokens=2
)


def of_one_token(params, ids, prompt_length, length):
    """Return the log-probability of `ids[length]` given the tokens before it, computed with a new history."""
    cfg = jax.tree.map(jnp.asarray, TUNED)
    logits = CausalLM(MODEL).apply({"params": params}, ids[None]).logits[:, length - 1]
    history = History.begin(cfg, ids[None], length[None], jnp.asarray([8], jnp.int32))
    history = dataclasses.replace(history, prompt_length=prompt_length[None])
    return jax.nn.log_softmax(build_transform(RowOptions.of(cfg, 1))(history, logits), axis=-1)[0, ids[length]]


@pytest.mark.slow
def test_gradient_equals_that_of_single_steps():
    out = run(TUNED)
    weights = jnp.asarray([0.5, -1.0, 2.0])
    mask, lengths = np.asarray(out.attention_mask), np.asarray(out.lengths)
    rows = [np.resize(ids[held], 15) for ids, held in zip(np.asarray(out.sequences), mask, strict=True)]
    held = MASK.sum(axis=1)
    tokens = [(row, held[row] + step) for row in range(3) for step in range(lengths[row])]
    row, length = (jnp.asarray(x) for x in zip(*tokens, strict=True))

    def replayed(params):
        return jnp.sum(scored(params, out, TUNED, chunk=3).logprobs * weights[:, None])

    def formula(params):
        each = jax.vmap(of_one_token, (None, 0, 0, 0))(params, jnp.stack(rows)[row], jnp.asarray(held)[row], length)
        return jnp.sum(each * weights[row])

    value, gradient = jax.jit(jax.value_and_grad(replayed))(PARAMS)
    wanted_value, wanted = jax.jit(jax.value_and_grad(formula))(PARAMS)
    check_close(value, wanted_value)
    jax.tree.map(lambda x, y: check_close(x, y, rtol=1e-3, atol=1e-4), gradient, wanted)
    assert np.abs(gradient["model"]["embed_tokens"]["weight"]).max() > 0.1


@pytest.mark.slow
def test_logits_of_all_positions_are_never_stored():
    vocab, rows, width, start, chunk = 5003, 3, 64, 8, 4
    model = model_config(vocab_size=vocab, num_hidden_layers=1)
    params, ids = random_params(model), np.full((rows, width), 3, np.int32)
    cfg = TUNED.replace(model=model, repetition_penalty=1.0)

    def total(params, chunk):
        return jnp.sum(score(params, ids, cfg, of="scores", prompt_width=start, top_logprobs=2, chunk=chunk).logprobs)

    for function, weights in ((total, 0), (jax.grad(total), MODEL.hidden_size)):
        program = jax.make_jaxpr(function, static_argnums=1)
        assert max(sizes_with(program(params, chunk).jaxpr, vocab)) == max(rows * chunk, weights) * vocab
        assert max(sizes_with(program(params, width).jaxpr, vocab)) >= rows * (width - start) * vocab


# --- Requests -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_score_under_jit_equals_the_eager_result():
    out = run(TUNED)
    eager = scored(PARAMS, out, TUNED, top_logprobs=2)

    @jax.jit
    def jitted(params, cfg, ids, mask):
        return score(params, ids, cfg, attention_mask=mask, of="scores", prompt_width=out.prompt_width, top_logprobs=2)

    traced = jitted(PARAMS, TUNED, out.sequences, out.attention_mask)
    jax.tree.map(check_close, traced, eager)


@pytest.mark.slow
def test_score_does_not_depend_on_bucket_or_batch():
    out = run(TUNED)
    together = scored(PARAMS, out, TUNED)
    more = ((0, 0), (40, 50))
    given = {"attention_mask": np.pad(out.attention_mask, more), "prompt_width": out.prompt_width + 40}
    wide = score(PARAMS, np.pad(out.sequences, more), TUNED, of="scores", **given)
    check_close(wide.logprobs[:, 40:-50], together.logprobs)
    for row in range(3):
        given = {"attention_mask": out.attention_mask[row : row + 1], "prompt_width": out.prompt_width}
        alone = score(PARAMS, out.sequences[row : row + 1], TUNED, of="scores", **given)
        check_close(alone.logprobs[0], together.logprobs[row])


def test_other_values_and_widths_share_a_program():
    rng = np.random.default_rng(0)
    mask = np.ones((2, 40), bool)
    cfg = TUNED.replace(eos_token_id=None)
    score(PARAMS, rng.integers(2, 97, (2, 40)), cfg, attention_mask=mask, of="scores", prompt_width=9)
    with compilations() as count:
        for width, start in ((5, 1), (17, 12), (33, 32), (64, 32)):
            ids, knobs = rng.integers(2, 97, (2, width)), {"temperature": 0.3 + width / 100, "top_k": start}
            cfg = cfg.replace(**knobs, max_new_tokens=width)
            out = score(PARAMS, ids, cfg, of="scores", prompt_width=start)
            assert np.asarray(out.logprobs).any()
    assert count[0] == 0


def test_the_prompt_can_be_left_out_for_the_models_own_distribution():
    ids, mask = left_pad([[5, 3, 8, 1, 90, 7, 7], [2, 96, 4, 4, 1], [11, 12, 13, 14, 15]])
    whole = score(PARAMS, ids, CFG, attention_mask=mask, top_logprobs=2)
    behind = score(PARAMS, ids, CFG, attention_mask=mask, top_logprobs=2, prompt_width=4)
    kept = np.arange(7) >= 4
    check_close(behind.logprobs, np.where(kept, whole.logprobs, 0))
    check_close(behind.top_logprobs, np.where(kept[:, None], whole.top_logprobs, 0))
    np.testing.assert_array_equal(behind.top_tokens, np.where(kept[:, None], whole.top_tokens, 0))


def test_the_budget_without_any_length_is_the_number_of_columns():
    cfg = CFG.replace(max_new_tokens=None, forced_eos_token_id=9)
    logprobs = np.asarray(score(PARAMS, [[3, 4, 5, 6, 7, 9]], cfg, of="scores", prompt_width=2).logprobs)
    assert np.all(logprobs[0, 2:5] < 0)
    assert logprobs[0, 5] == 0


@pytest.mark.slow
def test_the_budget_of_the_default_length():
    cfg = CFG.replace(max_new_tokens=None, forced_eos_token_id=9, eos_token_id=None)
    with pytest.warns(JaxgenWarning, match="neither max_new_tokens nor max_length"):
        out = run(cfg)
    assert out.lengths.tolist() == [13, 18, 19]
    check_close(scored(PARAMS, out, cfg).logprobs[:, out.prompt_width :], out.logprobs)


@pytest.mark.parametrize("top_k", [0, 1])
def test_impossible_token_scores_minus_infinity(top_k):
    """A banned token stays banned, and a warper never removes the given token."""
    cfg = CFG.replace(suppress_tokens=[4], top_k=top_k)
    out = score(PARAMS, [[3, 4, 5]], cfg, of="scores", prompt_width=1)
    assert out.logprobs[0, 1] == -np.inf
    assert np.isfinite(out.logprobs[0, 2])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"of": "beams"}, ConfigError, "of must be 'logits'"),
        ({"prompt_width": None}, ConfigError, "needs prompt_width"),
        ({"prompt_width": 3}, ConfigError, "prompt_width must be from 1 to 2"),
        ({"prompt_width": True}, TypeError, "prompt_width"),
        ({"of": "logits", "logits_processor": [not_the_last_token]}, ConfigError, "logits_processor"),
        ({"of": "logits", "prefix_allowed_tokens_fn": in_turns(0)}, ConfigError, "prefix_allowed_tokens_fn"),
        ({"logits_processor": not_the_last_token}, TypeError, "list of functions"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [1]}, TypeError, "TokenAutomaton"),
        ({"cfg": CFG.replace(guidance_scale=2.0)}, ConfigError, "guidance_scale"),
        ({"cfg": CFG.replace(num_beams=2)}, ConfigError, "beam_sample"),
        ({"cfg": CFG.replace(dola_layers="low")}, ConfigError, "the mode of cfg, dola_generation"),
        ({"cfg": CFG.replace(token_healing=True)}, ConfigError, "token_healing, which changes the prompts"),
        ({"cfg": CFG.replace(top_k=[3, 4])}, InputError, "top_k has 2 values for 1 prompts"),
        ({"cfg": CFG.replace(suppress_tokens=[97])}, ConfigError, "suppress_tokens contains the token 97"),
        ({"attention_mask": [[0, 1, 1]]}, InputError, "row 0 has no token before prompt_width"),
        ({"ids": [[2, 9, 3]]}, InputError, "row 0 has tokens after its end"),
        ({"ids": [[2, 3, 4, 5]], "attention_mask": [[1, 1, 0, 1]]}, InputError, "row 0 has tokens after its end"),
        ({"hook": None}, TypeError, "hook"),
    ],
)
def test_unsupported_options_are_refused(change, error, message):
    arguments = {"params": PARAMS, "ids": [[1, 2, 3]], "cfg": CFG, "of": "scores", "prompt_width": 1, **change}
    with pytest.raises(error, match=message):
        score(**arguments)
