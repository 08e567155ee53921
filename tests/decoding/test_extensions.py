"""The caller's functions, automata and stop strings, and how rows end."""

import json
import re

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import GenerationConfig, GenerationError, InputError, StopReason, TokenAutomaton, Tokenizer, demo, generate
from tests.support.compilations import compilations
from tests.support.counting import CFG, PARAMS
from tests.support.models import all_generated, generated, left_pad, slow
from tests.support.streamers import Collector
from tests.support.tokenizers import byte_level

IDS = [[3], [7]]


def shout(history, scores):
    """Ban the token whose id is one higher than that of the last token."""
    following = (history.last(1) + 1) % scores.shape[-1]
    return scores.at[jnp.arange(scores.shape[0]), following[:, 0]].set(-jnp.inf)


@flax.struct.dataclass
class Ban:
    tokens: jax.Array

    def __call__(self, history, scores):
        return scores.at[:, self.tokens].set(-jnp.inf)


def test_user_defined_processors():
    out = generate(PARAMS, IDS, None, CFG.replace(sequence_bias={(20,): 5.0}), logits_processor=[shout])
    assert all_generated(out) == [[20] * 6] * 2  # the other tokens have equal scores


def test_a_processor_sees_the_options_of_each_row():
    def favor(history, scores, options):
        token = (10 * options.number("temperature")).astype(jnp.int32)
        return scores + jnp.where(jnp.arange(scores.shape[-1])[None, :] == token, 100.0, 0.0)

    cfg = CFG.replace(do_sample=True, temperature=[0.5, 2.0])
    out = generate(PARAMS, IDS, jax.random.key(0), cfg, logits_processor=[favor])
    assert all_generated(out) == [[5] * 6, [20] * 6]


def test_optional_third_argument_keeps_its_default():
    def favor(history, scores, token=7):
        return scores.at[:, token].set(100.0)

    assert all_generated(generate(PARAMS, IDS, None, CFG, logits_processor=[favor])) == [[7] * 6] * 2


@pytest.mark.slow
def test_processor_that_indexes_history_gets_a_hint():
    with pytest.raises(TypeError, match=r"history\.last\(n\) returns the last n tokens of each row, and history\.ids"):
        generate(PARAMS, [[3]], None, CFG, logits_processor=[lambda history, scores: scores + history[:, -1:]])


def test_arrays_of_a_processor_are_traced():
    generate(PARAMS, IDS, None, CFG, logits_processor=[Ban(np.asarray([5]))])
    partial = jax.tree_util.Partial(lambda bias, history, scores: scores + bias[None, :])
    generate(PARAMS, IDS, None, CFG, logits_processor=[jax.tree_util.Partial(partial, np.zeros(50, np.float32))])
    with compilations() as count:
        out = generate(PARAMS, IDS, None, CFG, logits_processor=[Ban(np.asarray([9]))])
        again = generate(
            PARAMS,
            IDS,
            None,
            CFG,
            logits_processor=[jax.tree_util.Partial(partial, 100 * np.eye(50, dtype=np.float32)[4])],
        )
    assert count[0] == 0
    assert 9 not in generated(out, 1)
    assert generated(again, 0) == [4] * 6


def test_user_defined_criteria():
    def at_a_multiple_of_five(history, scores):
        return history.last(1)[:, 0] % 5 == 0

    out = generate(PARAMS, IDS, None, CFG.replace(eos_token_id=9), stopping_criteria=[at_a_multiple_of_five])
    assert all_generated(out) == [[4, 5], [8, 9]]
    assert out.stop_reasons.tolist() == [StopReason.CRITERION, StopReason.EOS]
    assert out.sequences[0].tolist() == [3, 4, 5, 0, 0, 0, 0]
    with pytest.raises(InputError, match=r"stopping_criteria must return bool\[2\]"):
        generate(PARAMS, IDS, None, CFG, stopping_criteria=[lambda history, scores: jnp.ones((), bool)])


def test_stop_reasons():
    out = generate(PARAMS, IDS, None, CFG.replace(eos_token_id=5, max_new_tokens=[4, 2]))
    assert out.stop_reasons.tolist() == [StopReason.EOS, StopReason.LENGTH]
    assert out.attention_mask.tolist() == [[True, True, True, False, False], [True, True, True, False, False]]


# --- prefix_allowed_tokens_fn as a function ---------------------------------------------------------------------


def test_prefix_function_is_called_for_each_unfinished_row():
    asked = []

    def allowed(row, ids):
        asked.append((row, ids.tolist()))
        return [20 + row, int(ids[-1]) + 2]  # equally likely, so the lower one is generated

    out = generate(PARAMS, [[0, 3], [6, 7]], None, CFG.replace(max_new_tokens=[2, 1]),
                   attention_mask=[[0, 1], [1, 1]], prefix_allowed_tokens_fn=allowed)  # fmt: skip
    assert all_generated(out) == [[5, 7], [9]]
    assert asked == [(0, [3]), (1, [6, 7]), (0, [3, 5])]


def test_a_new_prefix_function_compiles_nothing():
    generate(PARAMS, IDS, None, CFG, prefix_allowed_tokens_fn=lambda row, ids: [1])
    with compilations() as count:
        out = generate(PARAMS, IDS, None, CFG, prefix_allowed_tokens_fn=lambda row, ids: [2])
    assert count[0] == 0
    assert generated(out, 0) == [2] * 6


@pytest.mark.slow
def test_a_prefix_function_streams():
    streamer = Collector()
    out = generate(PARAMS, [[3]], None, CFG, prefix_allowed_tokens_fn=lambda row, ids: [len(ids)], streamer=streamer)
    assert generated(out, 0) == [1, 2, 3, 4, 5, 6]
    assert [value.tolist() for value in streamer.values] == [[[3]], [1], [2], [3], [4], [5], [6]]
    assert streamer.ended == 1


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda row, ids: [], InputError, "returned no token for row 0"),
        (lambda row, ids: [50], InputError, "outside the vocabulary"),
        (lambda row, ids: ["x"], InputError, "must return a list of token ids"),
        (lambda row, ids: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_errors_in_a_prefix_function_are_raised(function, error, message):
    with pytest.raises(error, match=message):
        generate(PARAMS, IDS, None, CFG, prefix_allowed_tokens_fn=function)


@pytest.mark.slow
def test_a_prefix_function_under_jit():
    def run(params, function):
        return generate(params, IDS, None, CFG, prefix_allowed_tokens_fn=function).sequences

    assert jax.jit(run, static_argnums=1)(PARAMS, lambda row, ids: [row + 5])[:, 1:].tolist() == [[5] * 6, [6] * 6]
    with pytest.raises(jax.errors.JaxRuntimeError, match="returned no token for row 0"):
        jax.block_until_ready(jax.jit(run, static_argnums=1)(PARAMS, lambda row, ids: []))


# --- Rows that cannot continue ----------------------------------------------------------------------------------

EVERYTHING = list(range(50))
KEPT_BY = {"min_p": 0.1, "epsilon_cutoff": 0.1, "top_p": 0.5}  # warpers that would remove a NaN
FAILURES = {
    "banned": (StopReason.NO_TOKEN, {"suppress_tokens": [EVERYTHING, [1]]}, None, "every token is banned"),
    "nan": (StopReason.NOT_A_NUMBER, {}, lambda h, s: jnp.where(h.ids[:, :1] == 3, jnp.nan, s), "are not numbers"),
}


@pytest.mark.parametrize(("failure", "do_sample"), [("nan", True), ("banned", True), ("banned", False), ("nan", False)])
@pytest.mark.slow
def test_row_that_cannot_continue_is_an_error(failure, do_sample):
    reason, fields, processor, message = FAILURES[failure]
    cfg = CFG.replace(do_sample=do_sample, top_k=0 if do_sample else 50, **fields, **(KEPT_BY if do_sample else {}))
    more = {} if processor is None else {"logits_processor": [processor]}
    with pytest.raises(GenerationError, match=f"row 0 cannot continue after 0 generated tokens.*{message}") as raised:
        generate(PARAMS, IDS, jax.random.key(0), cfg, **more)
    assert raised.value.output.stop_reasons.tolist() == [reason, StopReason.LENGTH]
    assert generated(raised.value.output, 1) == [8, 9, 10, 11, 12, 13]
    out = jax.jit(lambda params: generate(params, IDS, jax.random.key(0), cfg, **more))(PARAMS)
    assert out.stop_reasons.tolist() == [reason, StopReason.LENGTH]
    assert out.lengths.tolist() == [0, 6]
    assert generated(out, 1) == [8, 9, 10, 11, 12, 13]
    assert out.sequences[0].tolist() == [3, 0, 0, 0, 0, 0, 0]


@pytest.mark.slow
def test_a_temperature_of_zero_under_jit():
    cfg = CFG.replace(do_sample=True, temperature=[1.0, 0.5], top_k=5, min_p=0.1)
    run = jax.jit(lambda cfg: generate(PARAMS, IDS, jax.random.key(0), cfg.replace(max_new_tokens=6)))
    traced = jax.tree.map(jnp.asarray, cfg)
    assert run(traced).stop_reasons.tolist() == [StopReason.LENGTH] * 2
    out = run(jax.tree.map(lambda x: jnp.where(x == 0.5, 0.0, x) if x.dtype == "float32" else x, traced))
    assert out.stop_reasons.tolist() == [StopReason.LENGTH, StopReason.NOT_A_NUMBER]


def test_ids_outside_the_vocabulary_under_jit():
    mask = jnp.asarray([[1], [1], [1], [0]])
    run = jax.jit(lambda ids, mask: generate(PARAMS, ids, None, CFG, attention_mask=mask))
    out = run(jnp.asarray([[3], [50], [-4], [3]]), mask)
    assert out.stop_reasons.tolist() == [StopReason.LENGTH, *[StopReason.BAD_ID] * 3]
    assert out.lengths.tolist() == [6, 0, 0, 0]


@pytest.mark.slow
def test_max_time_ends_unfinished_rows():
    cfg = CFG.replace(max_new_tokens=40, max_time=0.0)
    out = generate(PARAMS, IDS, None, cfg.replace(eos_token_id=[4]))
    assert out.stop_reasons.tolist() == [StopReason.EOS, StopReason.TIME]
    assert out.lengths.tolist() == [1, 1]
    assert generate(PARAMS, IDS, None, cfg.replace(max_time=1000)).stop_reasons.tolist() == [StopReason.LENGTH] * 2
    with pytest.raises(InputError, match="max_time needs the host"):
        jax.jit(lambda params: generate(params, IDS, None, cfg))(PARAMS)


# --- Text: automata and stop strings, with the bundled model ------------------------------------------------------

TOKENIZER = Tokenizer.from_pretrained(demo.PATH)


@pytest.fixture(scope="module")
def storyteller():
    from convert import load_hf

    return load_hf(demo.PATH, dtype="float32")


def chat(text):
    batch = TOKENIZER.chat([[{"role": "user", "content": text}]])
    return batch.ids


@pytest.mark.slow
def test_texts_match_the_pattern(storyteller):
    params, cfg = storyteller
    automaton = TokenAutomaton.from_regex("(yes|no), because [a-z ]{5,20}!", TOKENIZER)
    ids = np.repeat(chat("What is the opposite of hot?"), 8, axis=0)
    out = generate(params, ids, jax.random.key(0), cfg.replace(max_new_tokens=40, temperature=2.0, top_p=1.0),
                   prefix_allowed_tokens_fn=automaton)  # fmt: skip
    texts = TOKENIZER.decode_batch(out)
    assert len(set(texts)) > 4
    for text, reason in zip(texts, out.stop_reasons.tolist(), strict=True):
        assert reason == StopReason.EOS
        assert re.fullmatch("(yes|no), because [a-z ]{5,20}!", text), text


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "kind": {"enum": ["fox", "owl"]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "friends"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_texts_match_the_json_schema(storyteller):
    (params, cfg), seeds = storyteller, 200
    automaton = TokenAutomaton.from_json_schema(SCHEMA, TOKENIZER)
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    ids = np.repeat(chat("Tell me a story about a fox"), seeds, axis=0)
    out = generate(params, ids, keys, cfg.replace(max_new_tokens=128), prefix_allowed_tokens_fn=automaton)
    for text, reason in zip(TOKENIZER.decode_batch(out), out.stop_reasons.tolist(), strict=True):
        assert reason in (StopReason.EOS, StopReason.COMPLETE)  # the grammar completes the JSON within the budget
        value = json.loads(text)
        assert value.keys() == {"name", "age", "kind", "friends"}
        assert len(value["name"]) <= 12
        assert value["kind"] in ("fox", "owl")


@pytest.mark.parametrize("room", [30, 45])
@pytest.mark.slow
def test_text_is_complete_when_the_budget_is_used_up(storyteller, room):
    params, cfg = storyteller
    automaton = TokenAutomaton.from_json_schema({"type": "array", "items": {"type": "string"}}, TOKENIZER)
    ids = np.repeat(chat("Tell me a story about a fox"), 8, axis=0)
    hot = cfg.replace(max_new_tokens=room, temperature=3.0, top_p=1.0)
    out = generate(params, ids, jax.random.key(0), hot, prefix_allowed_tokens_fn=automaton)
    assert {StopReason.COMPLETE} <= set(out.stop_reasons.tolist()) <= {StopReason.COMPLETE, StopReason.EOS}
    for text in TOKENIZER.decode_batch(out):
        assert isinstance(json.loads(text), list)


@pytest.mark.slow
def test_longest_possible_text_is_complete_without_eos(storyteller):
    params, cfg = storyteller
    automaton = TokenAutomaton.from_regex("(zq[)]){1,99}", TOKENIZER)
    for room in (7, 8, 9):
        limited = cfg.replace(max_new_tokens=room, eos_token_id=None)
        out = generate(params, chat("A"), jax.random.key(0), limited, prefix_allowed_tokens_fn=automaton)
        assert out.stop_reasons.tolist() == [StopReason.COMPLETE]
        assert set(TOKENIZER.decode_batch(out)[0].split(")")) == {"zq", ""}


@pytest.mark.parametrize(
    "options", [{}, *slow({"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"slots": 2})], ids=str
)
def test_only_a_complete_text_has_the_reason_complete_at_the_end_of_the_budget(options):
    """A row that follows a prefix is never complete, because any token may follow."""
    cfg = CFG.replace(max_new_tokens=4, min_new_tokens=4, eos_token_id=2, pad_token_id=0, **options)
    letters = TokenAutomaton.from_regex("[A-F]+", byte_level(), vocab_size=50)
    prefix = TokenAutomaton.from_prefixes(["AB"], byte_level(), vocab_size=50)
    for automaton, reason in ((letters, StopReason.COMPLETE), (prefix, StopReason.LENGTH)):
        out = generate(PARAMS, IDS, None, cfg, prefix_allowed_tokens_fn=automaton)
        assert out.stop_reasons.tolist() == [reason] * len(IDS)


@pytest.mark.slow
def test_rows_with_and_without_eos_ids(storyteller):
    params, cfg = storyteller
    automaton = TokenAutomaton.from_regex("[0-9]{3}", TOKENIZER)
    ids = np.repeat(chat("A number"), 2, axis=0)
    cfg = cfg.replace(max_new_tokens=9, eos_token_id=[[cfg.eos_token_id], []])
    out = generate(params, ids, jax.random.key(0), cfg, prefix_allowed_tokens_fn=automaton)
    assert out.stop_reasons.tolist() == [StopReason.EOS, StopReason.COMPLETE]
    assert [text.isdigit() for text in TOKENIZER.decode_batch(out)] == [True, True]


def test_an_automaton_that_does_not_fit_is_refused(storyteller):
    params, cfg = storyteller
    cfg = GenerationConfig(model=cfg.model, max_new_tokens=9)
    digits = TokenAutomaton.from_regex("[0-9]{3}", TOKENIZER)
    two, ids = TokenAutomaton.stack([digits, digits]), np.ones((4, 3), int)
    for call in (lambda function: function(params), lambda function: jax.jit(function)(params)):
        with pytest.raises(InputError, match="stacked for 2 prompts, but there are 4"):
            call(lambda params: generate(params, ids, None, cfg, prefix_allowed_tokens_fn=two))
    with pytest.raises(InputError, match="automaton has a vocabulary of 50, but the model's is"):
        generate(params, [[1]], None, cfg, prefix_allowed_tokens_fn=digits.replace(classes=digits.classes[:, :50]))


def test_budget_too_small_for_a_grammar_is_refused(storyteller):
    params, cfg = storyteller
    automaton = TokenAutomaton.from_regex("[0-9]{30}", TOKENIZER)
    with pytest.raises(
        InputError, match=r"shortest text has \d+ tokens, which exceeds the budget of 4: raise max_new_tokens"
    ):
        generate(params, chat("A number"), jax.random.key(0), cfg.replace(max_new_tokens=4),
                 prefix_allowed_tokens_fn=automaton)  # fmt: skip


@pytest.mark.slow
def test_a_grammar_per_prompt(storyteller):
    params, cfg = storyteller
    both = TokenAutomaton.stack([TokenAutomaton.from_regex(text, TOKENIZER) for text in ("[0-9]{4}", "one|two")])
    ids = np.repeat(chat("Tell me a number"), 2, axis=0)
    out = generate(params, ids, jax.random.key(0), cfg.replace(max_new_tokens=16, num_return_sequences=3),
                   prefix_allowed_tokens_fn=both)  # fmt: skip
    texts = TOKENIZER.decode_batch(out)
    assert all(text.isdigit() and len(text) == 4 for text in texts[:3])
    assert set(texts[3:]) <= {"one", "two"}


@pytest.mark.slow
def test_stop_strings_end_their_row(storyteller):
    params, cfg = storyteller
    cfg = cfg.replace(do_sample=False, max_new_tokens=60, temperature=1.0, top_p=1.0, top_k=50)
    ids = chat("Tell me a story about a brave fox who lost a key")
    unstopped = generate(params, ids, None, cfg.replace(stop_strings="never said"), tokenizer=TOKENIZER)
    whole = TOKENIZER.decode_batch(unstopped)[0]
    stop = whole[20:27]  # most likely not at token boundaries
    out = generate(params, ids, None, cfg.replace(stop_strings=[stop, "nor this"]), tokenizer=TOKENIZER)
    text = TOKENIZER.decode_batch(out)[0]
    assert out.stop_reasons.tolist() == [StopReason.STOP_STRING]
    assert whole.startswith(text)
    assert stop in text
    assert stop not in TOKENIZER.decode(generated(out, 0)[:-1])
    with compilations() as count:
        generate(params, ids, None, cfg.replace(stop_strings="the"), tokenizer=TOKENIZER)
    assert count[0] == 0


@pytest.mark.slow
def test_left_padding_does_not_affect_extensions(storyteller):
    params, cfg = storyteller
    cfg = cfg.replace(do_sample=False, max_new_tokens=24, temperature=1.0, top_p=1.0, top_k=50, stop_strings=["a", "."])
    rows = [chat(text)[0].tolist() for text in ("Tell me a story", "What is the opposite of hot?", "Who are you?")]
    ids, mask = left_pad(rows)
    automaton = TokenAutomaton.from_regex("[ A-Z]{2,9}[a-z .]*", TOKENIZER)
    together = generate(params, ids, None, cfg, attention_mask=mask, tokenizer=TOKENIZER,
                        prefix_allowed_tokens_fn=automaton)  # fmt: skip
    for row, prompt in enumerate(rows):
        alone = generate(params, [prompt], None, cfg, tokenizer=TOKENIZER, prefix_allowed_tokens_fn=automaton)
        assert generated(together, row) == generated(alone, 0)
        assert together.stop_reasons[row] == alone.stop_reasons[0]


def test_the_config_is_checked_before_anything_is_compiled():
    with compilations() as count, pytest.raises(InputError, match="stop_strings"):
        generate(PARAMS, IDS, None, CFG.replace(stop_strings="x"))
    assert count[0] == 0
