"""Each decode mode with each feature: the combination works or is refused. docs/modes.md has the same table."""

import json
import re
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import (
    ConfigError,
    GenerationConfig,
    InputError,
    StepHook,
    StopReason,
    TokenAutomaton,
    compute_transition_scores,
    generate as generate_,
    prefill,
)
from jaxgen.core.decoding import modes
from tests.support.goldens import GOLDENS
from tests.support.models import all_generated, left_pad, model_config, random_params
from tests.support.streamers import Collector
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
MODEL = model_config(vocab_size=280, num_hidden_layers=1)
PARAMS = random_params(MODEL, scale=0.2)
PROMPTS = [[70, 71, 72, 70, 71], [80, 66]]
IDS, MASK = left_pad(PROMPTS)
NEW = 6
CFG = GenerationConfig(model=MODEL, max_new_tokens=NEW, pad_token_id=0)
KEYS = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(2), jnp.arange(2))
WORD = TOKENIZER.encode("ab")
SMALL = model_config(vocab_size=280, num_hidden_layers=1, hidden_size=16)
MODES = {
    "greedy search": {},
    "sampling": {"do_sample": True, "top_k": 30, "num_return_sequences": 2},
    "beam search": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "top_k": 0},
    "diverse beam search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "num_return_sequences": 2},
    "constrained beam search": {"num_beams": 3, "num_return_sequences": 2, "force_words_ids": [WORD]},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 3},
    "DoLa": {"dola_layers": [0], "repetition_penalty": 1.2},
    "assisted generation": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}
BEAMS = [name for name in MODES if "beam" in name]
ASSISTANT = (random_params(SMALL, seed=1), GenerationConfig(model=SMALL, num_assistant_tokens=2))
# Combinations of a feature and a mode that are not supported, each with its error.
REFUSED = {
    ("cache=", "contrastive search"): ConfigError,
    **{("streamer", name): InputError for name in BEAMS},
    **{("slots", name): ConfigError for name in MODES if name not in ("greedy search", "sampling", "DoLa")},
}


def generate(mode, rows=(0, 1), **given):
    """Run some of the prompts; `given` contains options and keyword arguments of generate()."""
    options = MODES[mode] | {
        name: value for name, value in given.items() if name in GenerationConfig.__dataclass_fields__
    }
    more = {name: value for name, value in given.items() if name not in options}
    if mode == "assisted generation":
        more["assistant"] = ASSISTANT
    rows = list(rows)
    ids, mask = more.pop("ids", IDS[rows]), more.pop("attention_mask", MASK[rows])
    key = KEYS[jnp.asarray(rows)] if options.get("do_sample") else None
    return generate_(PARAMS, ids, key, CFG.replace(**options), attention_mask=mask, **more)


def said(out):
    return {token for tokens in all_generated(out) for token in tokens}


def usual(mode):
    """Return a token that the mode generates by default."""
    return all_generated(generate(mode))[0][1]


def processors(mode):
    token = usual(mode)

    def ban(history, scores):
        return scores.at[:, token].set(-jnp.inf)

    assert token not in said(generate(mode, logits_processor=[ban]))
    assert token not in said(generate(mode, suppress_tokens=[token]))


def values_per_prompt(mode):
    penalties, lengths = [1.3, 2.0], [6, 4]
    together = all_generated(generate(mode, repetition_penalty=penalties, max_new_tokens=lengths))
    alone = [
        text
        for row in range(2)
        for text in all_generated(generate(mode, [row], repetition_penalty=penalties[row], max_new_tokens=lengths[row]))
    ]
    assert together == alone


def stopping(mode):
    def third(history, scores):
        return history.step >= 3

    out = generate(mode, stopping_criteria=[third])
    assert int(out.lengths.max()) == 3
    assert set(out.stop_reasons.tolist()) == {StopReason.CRITERION}
    text = TOKENIZER.decode([usual(mode)])
    if len(text) == 1 and text != "\ufffd":
        out = generate(mode, stop_strings=text, tokenizer=TOKENIZER)
        assert StopReason.STOP_STRING in out.stop_reasons.tolist()


def check_own_stop_strings(mode):
    """Each prompt in a batch stops where it would stop alone."""
    rows = (0, 1, 1, 0)
    plain = all_generated(generate(mode, rows))
    copies = len(plain) // 4
    texts = [[TOKENIZER.decode([token]) for token in plain[row * copies][1:]] for row in range(2)]
    own = [[text for text in texts[row] if text.isascii() and text] or ["a"] for row in range(2)]
    sets = [own[0], [*own[1], "END"], None, own[1]]
    together = generate(mode, rows, stop_strings=sets, tokenizer=TOKENIZER)
    assert all_generated(together) != plain
    for number, (row, strings) in enumerate(zip(rows, sets, strict=True)):
        alone = generate(mode, [row], stop_strings=strings, tokenizer=TOKENIZER)
        part = slice(number * copies, (number + 1) * copies)
        assert all_generated(together)[part] == all_generated(alone)
        assert together.stop_reasons[part].tolist() == alone.stop_reasons.tolist()


def automaton(mode):
    pattern = "[a-h]{2,6}"
    allowed = TokenAutomaton.from_regex(pattern, TOKENIZER, vocab_size=MODEL.vocab_size)
    for tokens in all_generated(generate(mode, prefix_allowed_tokens_fn=allowed)):
        assert re.fullmatch(pattern, TOKENIZER.decode(tokens))


def prefix_function(mode):
    def same_parity(row, ids):
        return range(int(ids[-1]) % 2, 200, 2)

    prompts = np.repeat([71, 66], 2 if MODES[mode].get("num_return_sequences") else 1)
    out = generate(mode, prefix_allowed_tokens_fn=same_parity)
    # Forced words contain even and odd tokens, so a beam may contain a banned token. Its score is then -inf.
    allowed = [True] * len(prompts) if out.sequences_scores is None else np.isfinite(out.sequences_scores)
    assert sum(allowed) >= 1
    for row, tokens in enumerate(all_generated(out)):
        assert {token % 2 for token in tokens} == {prompts[row] % 2} or not allowed[row]


@flax.struct.dataclass
class Ban(StepHook):
    """A hook that bans a token in the model's logits."""

    token: jax.Array

    def after(self, state, history, output):
        return output.replace(logits=output.logits.at[:, self.token].set(-jnp.inf)), state


def hook(mode):
    token = usual(mode)
    assert token not in said(generate(mode, hook=Ban(jnp.int32(token))))


def guidance(mode):
    guided = generate(mode, guidance_scale=3.0, negative_prompt_ids=[[90, 91]] * 2)
    assert all_generated(guided) != all_generated(generate(mode))
    if mode != "DoLa":  # DoLa does not contrast the negative prompt's scores
        same = {"negative_prompt_ids": IDS, "negative_prompt_attention_mask": MASK}
        assert all_generated(generate(mode, guidance_scale=3.0, **same)) == all_generated(generate(mode))


def from_a_cache(mode):
    heads, tails = (left_pad([part(prompt) for prompt in PROMPTS]) for part in (lambda p: p[:1], lambda p: p[1:]))
    cache = prefill(PARAMS, heads[0], CFG)
    assert all_generated(generate(mode, ids=tails[0], attention_mask=tails[1], cache=cache)) == all_generated(
        generate(mode)
    )


def to_a_cache(mode):
    out = generate(mode)
    copies = out.lengths.shape[0] // 2
    more = generate_(PARAMS, [[5]] * (2 * copies), None, CFG, cache=out.cache)
    whole, mask = left_pad([PROMPTS[row // copies] + tokens + [5] for row, tokens in enumerate(all_generated(out))])
    assert all_generated(more) == all_generated(generate_(PARAMS, whole, None, CFG, attention_mask=mask))


def embeddings(mode):
    embeds = PARAMS["model"]["embed_tokens"]["weight"][IDS]
    assert all_generated(generate(mode, inputs_embeds=embeds)) == all_generated(generate(mode))


def chunks(mode):
    assert all_generated(generate(mode, prefill_chunk_size=2)) == all_generated(generate(mode))


def in_slots(mode):
    assert all_generated(generate(mode, slots=1)) == all_generated(generate(mode))


def records(mode):
    options = {"output_scores": True, "output_logits": True, "output_logprobs": "scores", "output_hidden_states": True}
    out = generate(mode, **options, output_attentions=True)
    assert out.scores.shape == out.logits.shape
    assert len(out.hidden_states.decode) == 2
    assert len(out.attentions.decode) == 1
    scores = compute_transition_scores(out.sequences, out.scores, out.beam_indices, normalize_logits=True)
    if mode != "constrained beam search":  # its scores include the beam's score, as in transformers
        np.testing.assert_allclose(scores, out.logprobs, atol=1e-4)


def streamer(mode):
    collector = Collector()
    out = generate(mode, streamer=collector)
    assert collector.ended == 1
    np.testing.assert_array_equal(collector.tokens, np.asarray(out.sequences)[:, out.prompt_width :])


def time_limit(mode):
    out = generate(mode, max_time=0.0)
    assert set(out.stop_reasons.tolist()) <= {StopReason.TIME, StopReason.LENGTH}
    assert StopReason.TIME in out.stop_reasons.tolist()


def under_jit(mode):
    cfg = CFG.replace(**MODES[mode])
    assistant = {"assistant": ASSISTANT} if mode == "assisted generation" else {}
    key = KEYS if "do_sample" in MODES[mode] else None
    traced = jax.jit(lambda params, key: generate_(params, IDS, key, cfg, attention_mask=MASK, **assistant))
    assert all_generated(traced(PARAMS, key)) == all_generated(generate(mode))


def healing(mode):
    out = generate(mode, token_healing=True, tokenizer=TOKENIZER)
    copies = out.lengths.shape[0] // 2
    for row, tokens in enumerate(all_generated(out)):
        removed = TOKENIZER.decode(PROMPTS[row // copies][-1:])
        assert TOKENIZER.decode(tokens).startswith(removed)


FEATURES = {
    "processors, your own too": processors,
    "values per prompt": values_per_prompt,
    "stop strings, criteria": stopping,
    "stop strings per prompt": check_own_stop_strings,
    "token automaton": automaton,
    "prefix function": prefix_function,
    "token healing": healing,
    "hook": hook,
    "guidance": guidance,
    "cache=": from_a_cache,
    "out.cache": to_a_cache,
    "inputs_embeds": embeddings,
    "prefill_chunk_size": chunks,
    "slots": in_slots,
    "scores, logits, states, attentions": records,
    "streamer": streamer,
    "max_time": time_limit,
    "your own jit": under_jit,
}
SEED = json.loads((GOLDENS / "441" / "manifest.json").read_text())["seed"]
# Only a seventh of the table is tested, chosen by the seed, because most cells compile programs of their own.
CELLS = [(feature, mode) for feature in FEATURES for mode in MODES][SEED % 7 :: 7]


def test_all_modes_are_listed():
    chosen = {CFG.replace(**options).mode for options in MODES.values()}
    assert chosen | {"assisted_generation"} == modes.MODES.keys()  # an assistant is not part of the config


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "mode"), CELLS)
def test_feature_works_or_is_refused_in_each_mode(feature, mode):
    error = REFUSED.get((feature, mode))
    if error is None:
        FEATURES[feature](mode)
    else:
        with pytest.raises(error):
            FEATURES[feature](mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sampling", "greedy search", "beam search", "prompt lookup"])
def test_stop_strings_per_prompt(mode):
    check_own_stop_strings(mode)


def test_modes_page_contains_the_feature_table():
    page = (Path(__file__).resolve().parents[2] / "docs" / "modes.md").read_text("utf-8")
    for feature in FEATURES:
        cells = ["refused" if (feature, mode) in REFUSED else "yes" for mode in MODES]
        assert f"\n| {feature} | {' | '.join(cells)} |\n" in page, feature
