"""The engine: prompts with different options come and go, and each is answered as if it were alone."""

import asyncio
import dataclasses
import inspect
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxgen import (
    ConfigError,
    GenerationConfig,
    GenerationError,
    InputError,
    StopReason,
    TokenAutomaton,
    generate,
    shard_params,
)
from jaxgen.core.decoding.continuous.queue import NOBODY
from jaxgen.core.grammar.token_automaton import Capacity
from jaxgen.core.model.sharding import divide, mesh_of
from jaxgen.core.request.running.automaton_tables import GrammarTable
from jaxgen.engine.engine import Engine
from jaxgen.engine.home import EngineClosed
from jaxgen.engine.many_prompts import generate_many
from jaxgen.engine.results import QueueFull
from tests.support import slot_loops
from tests.support.byte_model import MODEL, PARAMS
from tests.support.compilations import compilations
from tests.support.tokenizers import byte_level

TOK = byte_level()
KEY = jax.random.key(3)
CFG = GenerationConfig(
    model=MODEL,
    max_new_tokens=14,
    pad_token_id=0,
    eos_token_id=[1, 2],
    do_sample=True,
    top_k=0,
    temperature=0.9,
    output_logprobs="scores",
    top_logprobs=3,
)
GRAMMARS = [TokenAutomaton.from_regex(p, TOK, vocab_size=320) for p in ("[a-c]+", "(yes|no)", "[0-9]{2,4}", "z+x")]
WIDTH = 24
# One small program for the tests in which the generated tokens do not matter.
SIMPLE = CFG.replace(output_logprobs=None, top_logprobs=0)
SMALL = {"slots": 1, "prompt_width": 8, "prompt_options": ()}


WARPERS = {"temperature", "top_k", "top_p", "typical_p"}


def random_prompts(count: int, seed: int, plain: bool = False) -> list[dict]:
    """Return prompts with random options. Unless `plain`, some turn on options that are off in the config."""
    rng = np.random.default_rng(seed)
    prompts = []
    for index in rng.permutation(10 * count)[:count]:
        prompt = {"ids": rng.integers(40, 120, rng.integers(1, WIDTH + 1)).tolist(), "index": int(index)}
        own = {
            "temperature": float(rng.uniform(0.5, 1.5)),
            "do_sample": bool(rng.integers(2)),
            "max_new_tokens": int(rng.integers(1, 15)),
            "eos_token_id": rng.integers(0, 320, rng.integers(0, 6)).tolist(),
            "top_logprobs": int(rng.integers(4)),
        }
        if not plain:
            own |= {
                "top_k": int(rng.integers(1, 30)),
                "top_p": float(rng.uniform(0.5, 1)),
                "typical_p": float(rng.uniform(0.5, 1)),
                "repetition_penalty": float(rng.uniform(0.8, 1.4)),
                "presence_penalty": float(rng.uniform(-1, 1)),
                "min_length": int(rng.integers(30)),
                "suppress_tokens": rng.integers(0, 320, rng.integers(1, 9)).tolist(),
                "bad_words_ids": [rng.integers(0, 320, rng.integers(1, 3)).tolist() for _ in range(3)],
                "sequence_bias": {(int(rng.integers(320)),): float(rng.normal())},
                "stop_strings": [chr(c) for c in rng.integers(97, 120, 3)],
                "allowed": GRAMMARS[rng.integers(len(GRAMMARS))],
                "forced_eos_token_id": 2,
            }
        for name in rng.permutation(list(own))[: rng.integers(len(own))].tolist():
            prompt[name] = own[name]
        if not prompt.get("do_sample", True):  # options that greedy search does not read are refused
            prompt = {name: value for name, value in prompt.items() if name not in WARPERS}
        if "allowed" in prompt:
            prompt["max_new_tokens"] = max(prompt.get("max_new_tokens", 14), 4)
        if prompt.get("do_sample", True) and not rng.integers(3):
            prompt["n"] = int(rng.integers(2, 5))
        prompts.append(prompt)
    return prompts


@pytest.fixture(scope="module")
def engine():
    with Engine(PARAMS, CFG, KEY, slots=5, prompt_width=WIDTH, tokenizer=TOK) as made:
        made.warmup()
        with compilations() as compiled:
            made.submit([50, 60]).result(60)
        assert compiled == [0]
        yield made


def assert_same(completions, others) -> None:
    assert len(completions) == len(others)
    for one, other in zip(completions, others, strict=True):
        for name in ("index", "sequence", "ids", "tokens", "text", "stop_reason", "error"):
            assert getattr(one, name) == getattr(other, name), (name, one, other)
        for name in ("logprobs", "top_logprobs", "top_tokens"):
            np.testing.assert_array_equal(getattr(one.logprobs, name), getattr(other.logprobs, name))


def test_prompt_is_answered_as_if_it_were_alone(engine):
    prompts = random_prompts(40, seed=0)
    together = [handle.result(60) for handle in [engine.submit(prompt) for prompt in prompts]]
    assert len({c.stop_reason for completions in together for c in completions}) > 3
    order = np.random.default_rng(1).permutation(len(prompts))
    for place in order[:20]:
        assert_same(engine.submit(prompts[place]).result(60), together[place])


def test_neighbor_with_more_options_changes_no_bits(engine):
    prompts = random_prompts(12, seed=2, plain=True)
    alone = [handle.result(60) for handle in [engine.submit(prompt) for prompt in prompts]]
    other = engine.submit({"ids": [50], "top_k": 5, "allowed": GRAMMARS[0], "max_new_tokens": 14, "n": 4, "index": 7})
    beside = [handle.result(60) for handle in [engine.submit(prompt) for prompt in prompts]]
    other.result(60)
    for one, two in zip(alone, beside, strict=True):
        assert_same(one, two)


def test_generate_many_has_the_arguments_of_engine():
    own, engine = (inspect.signature(function).parameters for function in (generate_many, Engine))
    more = set(engine) - set(own) - {"own_sizes"}
    assert [name for name in more if f"`{name}`" not in generate_many.__doc__.partition("**engine")[2]] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* does not read|.* cannot be reached")
def test_generate_gives_the_same_completions():
    prompts = random_prompts(30, seed=3)
    completions = list(
        generate_many(PARAMS, prompts, KEY, CFG, slots=4, prompt_width=WIDTH, tokenizer=TOK, ordered=True)
    )
    place = 0
    for prompt in prompts:
        own = {name: value for name, value in prompt.items() if name not in ("ids", "index", "n", "allowed")}
        cfg = CFG.replace(**own | {"num_return_sequences": prompt.get("n", 1), "top_logprobs": 3})
        key = jax.random.fold_in(KEY, prompt["index"])[None] if cfg.do_sample else None
        more = {"tokenizer": TOK, "prefix_allowed_tokens_fn": prompt.get("allowed")}
        try:
            out = generate(PARAMS, [prompt["ids"]], key, cfg, attention_mask=np.ones((1, len(prompt["ids"]))), **more)
        except GenerationError as error:  # all tokens are banned
            out = error.output
        for row in range(prompt.get("n", 1)):
            completion = completions[place]
            length = int(out.lengths[row])
            assert (completion.index, completion.sequence) == (prompt["index"], row)
            assert completion.tokens == out.sequences[row, len(prompt["ids"]) :][:length].tolist()
            assert completion.stop_reason == out.stop_reasons[row]
            np.testing.assert_allclose(completion.logprobs.logprobs, out.logprobs[row, :length], atol=5e-5)
            place += 1
    assert place == len(completions)


@pytest.mark.slow
def test_engine_with_fewer_options_gives_the_same_completions(engine):
    prompts = [{"ids": [50, 60, 70 + number], "index": number, "n": 1 + number % 2} for number in range(12)]
    prompts += [{"ids": [50, 51], "index": 30, "allowed": GRAMMARS[0], "stop_strings": ["a"], "temperature": 0.3}]
    expected = [engine.submit(prompt).result(60) for prompt in prompts]
    with Engine(PARAMS, CFG, KEY, slots=5, prompt_width=WIDTH, tokenizer=TOK, prompt_options=()) as small:
        for handle, completions in zip([small.submit(prompt) for prompt in prompts], expected, strict=True):
            assert [done.tokens for done in handle.result(60)] == [done.tokens for done in completions]


def test_only_some_prompts_request_log_probabilities(engine):
    prompts = [{"ids": [50, 60 + n], "index": n, "n": 1 + n % 2} for n in range(12)]
    expected = [engine.submit(prompt).result(60) for prompt in prompts]
    without = {"output_logprobs": None}
    handles = [engine.submit(prompt | (without if n % 3 else {})) for n, prompt in enumerate(prompts)]
    for number, (handle, completions) in enumerate(zip(handles, expected, strict=True)):
        if number % 3:
            assert [done.tokens for done in handle.result(60)] == [done.tokens for done in completions]
            assert all(done.logprobs is None for done in handle.result())
            assert all(event.logprobs is None for event in handle)
        else:
            assert_same(handle.result(60), completions)
            for sequence, done in enumerate(completions):
                parts = [event.logprobs for event in handle if event.sequence == sequence and event.tokens]
                for name in ("logprobs", "top_logprobs", "top_tokens"):
                    joined = np.concatenate([getattr(part, name) for part in parts])
                    np.testing.assert_array_equal(joined, getattr(done.logprobs, name))


def test_prompts_compile_nothing(engine):
    prompts = [*random_prompts(30, seed=4), *random_prompts(30, seed=5, plain=True)]
    with compilations() as compiled:
        for handle in [engine.submit(prompt) for prompt in prompts]:
            handle.result(60)
    assert compiled == [0]


@pytest.mark.slow
def test_no_loop_copies_a_cache():
    assert not any(slot_loops.copied_by_an_engine(jax.devices()[0], "bfloat16").values())


def test_events_agree_with_the_result(engine):
    for prompt in random_prompts(6, seed=6):
        heard = []
        handle = engine.submit(prompt, on_event=heard.append)
        events, completions = list(handle), handle.result()
        assert events == heard == list(handle)
        for completion in completions:
            own = [event for event in events if event.sequence == completion.sequence]
            assert [token for event in own for token in event.tokens] == completion.tokens
            assert "".join(event.text for event in own) == completion.text
            assert [event.stop_reason for event in own][-1] == completion.stop_reason
            assert all(event.stop_reason == StopReason.NONE for event in own[:-1])


def test_events_are_read_by_a_coroutine(engine):
    prompts = random_prompts(5, seed=7)

    async def read(prompt):
        handle = engine.submit(prompt)
        return [event async for event in handle], handle

    async def read_all():
        return await asyncio.gather(*[read(prompt) for prompt in prompts])

    for events, handle in asyncio.run(read_all()):
        assert events == list(handle)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ({"ids": [50, 320]}, InputError, "the prompt contains the token 320, but the vocabulary is 0 to 319"),
        ({"ids": []}, InputError, "the prompt has no token"),
        ([50] * 25, InputError, "the prompt has 25 tokens, but at most 24"),
        ({"ids": [5.0]}, TypeError, "the prompt must be a list of token ids"),
        (b"text", TypeError, "the prompt must be a list of token ids"),
        ({"text": 5}, TypeError, '"text" must be a string'),
        ({"ids": [50], "text": "a"}, InputError, "exactly one of text, prompt, messages, ids: got text and ids"),
        ({"temperature": 0.5}, InputError, "exactly one of text, prompt, messages, ids: it has none of them"),
        ({"messages": []}, InputError, '"messages" must be a list of at least one'),
        ({"ids": [50], "temprature": 1.0}, ConfigError, "did you mean 'temperature'"),
        ({"ids": [50], "id": 7}, ConfigError, "unknown option 'id': put data of your own in metadata"),
        (
            {"ids": [50], "do_sample": False, "top_p": 0.5},
            ConfigError,
            "greedy_search does not read top_p=0.5",
        ),
        ({"ids": [50], "do_sample": True, "temperature": 0}, ConfigError, "temperature=0 means greedy search, but"),
        ({"ids": [50], "temperature": 0, "typical_p": 0.5}, ConfigError, "greedy_search does not read typical_p=0.5"),
        ({"ids": [50], "temperature": 0, "length_penalty": 2.0}, ConfigError, "length_penalty is part of the program"),
        ({"ids": [50], "temperature": 0, "n": 2}, ConfigError, "greedy search, which gives one answer, but 2"),
        ({"ids": [50], "seed": 3, "key": KEY}, InputError, "seed and key exclude each other"),
        ({"ids": [50], "seed": 2**64}, InputError, "seed must be from -9223372036854775808 to 18446744073709551615"),
        ({"ids": [50], "regex": "a", "json_schema": {}}, InputError, "json_schema and regex exclude each other"),
        ({"ids": [50], "regex": "("}, InputError, "regex: "),
        ({"ids": [50], "regex": 3}, TypeError, "regex must be a string, got 3"),
        ({"ids": [50], "temperature": -1.0}, ConfigError, "temperature must be > 0"),
        ({"ids": [50], "temperature": [1.0, 2.0]}, InputError, "temperature has 2 values for 1 prompts"),
        ({"ids": [50], "num_beams": 2}, ConfigError, "num_beams is part of the program"),
        ({"ids": [50], "no_repeat_ngram_size": 2}, ConfigError, "no_repeat_ngram_size is part of the program"),
        ({"ids": [50], "max_new_tokens": 15}, ConfigError, "=15 is more than 14, for which memory is reserved"),
        ({"ids": [50], "top_logprobs": 4}, ConfigError, "top_logprobs=4 is more than the engine's top_logprobs=3"),
        ({"ids": [50], "do_sample": False, "n": 2}, ConfigError, "has one result per prompt"),
        ({"ids": [50], "n": 2, "num_return_sequences": 2}, InputError, "n and num_return_sequences"),
        ({"ids": [50], "index": -1}, InputError, "index must be from 0"),
        ({"ids": [50], "index": "a"}, TypeError, "index must be a whole number"),
        ({"ids": [50], "allowed": "[a-z]"}, TypeError, "allowed must be a TokenAutomaton"),
        ({"ids": [50], "suppress_tokens": list(range(33))}, ConfigError, "has 33 entries, .* for 32: pass fewer"),
        ({"ids": [50], "suppress_tokens": [320]}, ConfigError, "suppress_tokens contains the token 320"),
        ({"ids": [50], "stop_strings": ["a" * 2000]}, InputError, "stop_strings needs 2,002 states"),
        ({"ids": [50], "key": 5}, TypeError, "key must be a jax.random.key"),
        (
            {"ids": [50], "key": jax.random.key(1, impl="rbg")},
            InputError,
            "implementation rbg, but the engine's keys",
        ),
        ({"ids": [50], "max_new_tokens": None}, ConfigError, "max_new_tokens must be a number"),
        ({"ids": [50], "output_logprobs": "logits"}, ConfigError, "differs from the engine's"),
    ],
)
def test_bad_prompts_are_refused(engine, prompt, error, words):
    with pytest.raises(error, match=words):
        engine.submit(prompt)


def test_oversized_grammar_is_refused_and_others_wait_without_work(engine, monkeypatch):
    table = engine._schedule.tables["allowed"]
    with monkeypatch.context() as patched:
        patched.setitem(engine._schedule.tables, "allowed", GrammarTable(320, Capacity(40, 1000, 64, 4)))
        too_large = TokenAutomaton.from_regex("a{0,40}", TOK, vocab_size=320)
        with pytest.raises(InputError, match="the grammar needs 41 states"):
            engine.submit([50], allowed=too_large)
    one = TokenAutomaton.from_regex("[a-c]{1,30000}", TOK, vocab_size=320)
    large = [dataclasses.replace(one, start=one.start + count) for count in range(3)]  # three grammars
    entered, enter, write = [], table.enter, table.write
    monkeypatch.setattr(table, "enter", lambda key, automaton: entered.append(key) or enter(key, automaton))
    written = []
    monkeypatch.setattr(table, "write", lambda first, automaton: written.append(first) or write(first, automaton))
    handles = [engine.submit([50, 60], allowed=grammar, eos_token_id=None) for grammar in large]
    plain = engine.submit([50, 61])
    plain.result(60)
    for handle in handles:
        [done] = handle.result(60)
        assert done.stop_reason == StopReason.COMPLETE
    assert len(written) == 3
    steps = engine.counts().steps
    assert len(entered) < 3 * steps + 20


@pytest.mark.slow
def test_the_error_of_a_prompt_is_its_result():
    cfg = SIMPLE.replace(do_sample=False)
    ends = TokenAutomaton.from_regex("[a-c]", TOK, vocab_size=320)
    banned = {"ids": [51], "allowed": ends, "suppress_tokens": [TOK.encode(c)[0] for c in "abc"]}
    prompts = [{"ids": [50, 999]}, {"ids": [50, 60]}, banned, [], [70] * 30, [[1, 2], [3]]]
    sizes = {"slots": 2, "prompt_width": WIDTH, "prompt_options": ["suppress_tokens"]}
    done = list(generate_many(PARAMS, prompts, None, cfg, **sizes, ordered=True))
    assert [completion.index for completion in done] == [0, 1, 2, 3, 4, 5]
    assert "the prompt must be a list of token ids" in done[5].error
    assert "the prompt contains the token 999" in done[0].error
    assert done[1].error is None
    assert len(done[1].tokens) > 1
    assert "every token is banned" in done[2].error
    assert "no token" in done[3].error
    assert "but at most 24 are" in done[4].error


def test_cancelled_prompts_leave_their_slots(engine):
    handles = [engine.submit(prompt) for prompt in random_prompts(30, seed=8)]
    for handle in handles[::2]:
        handle.cancel()
        handle.cancel()
    for place, handle in enumerate(handles):
        reasons = {completion.stop_reason for completion in handle.result(60)}
        assert place % 2 == 0 or StopReason.CANCELLED not in reasons
    assert any(c.stop_reason == StopReason.CANCELLED for handle in handles for c in handle.result())
    again = engine.submit(random_prompts(30, seed=8)[1]).result(60)
    assert_same(again, handles[1].result())


def test_exception_in_a_callback_ends_only_its_prompt(engine):
    def fail(event):
        raise ZeroDivisionError("mine")

    bad, good = engine.submit([50, 60], on_event=fail), engine.submit([50, 60], index=3)
    with pytest.raises(ZeroDivisionError, match="mine"):
        bad.result(60)
    assert good.result(60)[0].tokens


def test_groups_take_turns(engine):
    engine.pause()
    many = [engine.submit([50, 60], n=30, group="many", eos_token_id=None) for _ in range(12)]
    more = [engine.submit([50, 61], group="more", eos_token_id=None) for _ in range(3)]
    assert engine.free_places == 1024 - 15
    engine.resume()
    assert all(handle.result(60) for handle in more)
    assert sum(handle.done for handle in many) <= 2
    engine.submit([50, 61], group="late", eos_token_id=None).result(60)
    assert sum(handle.done for handle in many) <= 5
    for handle in many:
        handle.cancel()
    with pytest.raises(TypeError, match="unhashable"):
        engine.submit([50], group=[])
    assert engine.submit([50]).result(60)
    assert engine.free_places == 1024


def first_sequences(engine, monkeypatch) -> list[int]:
    """Return a list to which the index of the first sequence of each part that is sent is added."""
    firsts, arrivals = [], engine._schedule.arrivals

    def record():
        news = arrivals()
        if news is not None:
            firsts.extend(news.first_sequence[news.number != NOBODY].tolist())
        return news

    monkeypatch.setattr(engine._schedule, "arrivals", record)
    return firsts


def test_the_bits_of_a_prompt_do_not_depend_on_its_parts(engine, monkeypatch):
    own = {"allowed": GRAMMARS[0], "stop_strings": ["cab", "bb"], "temperature": 1.3, "top_p": 0.9}
    prompts = [{"ids": [50, 60], "n": 50, "index": 3}, {"ids": [70, 80, 90], "n": 40, "index": 4, **own}]
    firsts = first_sequences(engine, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(engine._schedule, "_space", lambda: 10**9)
        whole = [engine.submit(prompt).result(60) for prompt in prompts]
    assert firsts == [0, 0]
    engine.pause()
    others = [engine.submit(prompt, group="others") for prompt in random_prompts(20, seed=12)]
    handles = [engine.submit(prompt, group=prompt["index"]) for prompt in prompts]
    engine.resume()
    for handle, expected in zip(handles, whole, strict=True):
        assert_same(handle.result(60), expected)
    assert sum(first > 0 for first in firsts) > 4
    assert all(handle.result(60) for handle in others)
    table = engine._schedule.tables["allowed"]._entries
    assert not any(part.users for key, part in table.items() if key is not None)


def test_prompt_is_answered_before_other_groups_sequences_begin(engine):
    engine.pause()
    many = [engine.submit([50, 60], n=64, group=number, eos_token_id=None) for number in range(9)]
    single = engine.submit([50, 61], group="single")
    engine.resume()
    assert single.result(60)
    begun = [sum(len(completion.tokens) > 0 for completion in handle.completions()) for handle in many]
    assert max(begun) < 64
    many[0].cancel()
    assert sum(c.stop_reason == StopReason.CANCELLED for c in many[0].completions()) >= 64 - begun[0] - 5
    assert all(c.stop_reason == StopReason.LENGTH for c in many[1].result(60))
    for handle in many[2:]:
        handle.cancel()
    assert engine.free_places == 1024
    assert engine.submit([50, 61]).result(60)


def test_new_weights_between_the_parts_of_a_prompt(engine):
    version = engine.update_params(PARAMS)
    handle = engine.submit([50, 60], n=60, eos_token_id=None)
    next(iter(handle))
    engine.update_params(PARAMS)
    versions = [completion.versions for completion in handle.result(60)]
    assert versions[0][0] == version
    assert versions[-1] == (version + 1,)


def test_a_pause_after_a_prompt_of_which_a_part_is_in_flight(engine):
    version = engine.update_params(PARAMS)
    handle = engine.submit([50, 60], n=60, group="a", eos_token_id=None)
    next(iter(handle))
    other = engine.submit([50, 61], group="b")
    engine.pause(finish=True)
    assert handle.done
    engine.update_params(PARAMS)
    engine.resume()
    assert {completion.versions for completion in handle.result(60)} == {(version,)}
    assert other.result(60)


def test_an_engine_that_is_closed_between_the_parts_of_a_prompt():
    with Engine(PARAMS, SIMPLE, KEY, **SMALL) as made:
        handle = made.submit([50, 60], n=60, eos_token_id=None)
        next(iter(handle))
        made.close(drain=False)
    with pytest.raises(EngineClosed):
        handle.result(60)
    assert made._schedule.idle


def test_weights_are_replaced_during_a_pause(engine):
    prompt = {"ids": [50, 60, 70], "index": 3}
    before = engine.submit(prompt).result(60)
    engine.pause()
    handle = engine.submit(prompt)
    with pytest.raises(TimeoutError, match=r"prompt 3 was not answered in 0\.05 seconds"):
        handle.result(0.05)
    other = jax.tree.map(lambda x: np.asarray(x * 1.5), PARAMS)
    with compilations() as compiled:
        version = engine.update_params(other)
        engine.resume()
        changed = handle.result(60)
    assert compiled == [0]
    assert changed[0].versions == (version,)
    assert changed[0].tokens != before[0].tokens
    with pytest.raises(InputError, match="params do not fit"):
        engine.update_params({"model": {}})
    engine.update_params(PARAMS)
    after = engine.submit(prompt).result(60)
    assert_same(after, before)
    assert after[0].versions == (version + 1,)
    long = engine.submit([50, 60], n=4, max_new_tokens=14, eos_token_id=None)
    next(iter(long))
    engine.update_params(PARAMS)
    # Sequences that start later read the prompt's keys and values, which were computed with the old weights.
    assert {done.versions[0] for done in long.result(60)} == {version + 1}


def test_a_pause_after_the_prompts_in_flight(engine):
    version = engine.update_params(PARAMS)
    handles = [engine.submit([50, 60 + n], n=2, eos_token_id=None) for n in range(30)]
    next(iter(handles[0]))
    engine.pause(finish=True)
    assert engine.update_params(PARAMS) == version + 1
    engine.resume()
    versions = [done.versions for handle in handles for done in handle.result(60)]
    assert set(versions) == {(version,), (version + 1,)}
    assert versions == sorted(versions)


@pytest.mark.parametrize("own", [True, False])
def test_callback_may_cancel_prompts(engine, own):
    """Tokens of the same chunk have already been generated, so the cancellation may come too late."""
    engine.pause()
    handles = []
    handles.append(
        engine.submit([50], n=3, on_event=lambda event: handles[0 if own else 1].cancel(), eos_token_id=None)
    )
    handles.append(engine.submit([51], n=2, eos_token_id=None))
    engine.resume()
    cancelled = handles[0 if own else 1]
    assert {done.stop_reason for done in cancelled.result(60)} <= {StopReason.CANCELLED, StopReason.LENGTH}
    assert [event.stop_reason for event in cancelled].count(StopReason.NONE) <= len(list(cancelled))
    assert handles[1 if own else 0].result(60)


def test_the_last_event_comes_before_the_result(engine):
    seen = []

    def listen(event) -> None:
        if event.stop_reason:
            time.sleep(0.05)
            seen.append(event)

    engine.submit([50, 60], on_event=listen).result(60)
    assert len(seen) == 1

    def fail_at_the_end(event) -> None:
        if event.stop_reason:
            raise SystemExit("mine")

    with pytest.raises(SystemExit, match="mine"):
        engine.submit([50, 60], on_event=fail_at_the_end).result(60)


def waiting_calls(handle) -> dict:
    """Return the calls that wait for a handle, by the name in the error."""

    async def read() -> list:
        return [event async for event in handle]

    return {
        "result": handle.result,
        "the iterator of a handle": lambda: list(handle),
        "the iterator": lambda: asyncio.run(read()),
    }


def test_waiting_calls_are_refused_in_callbacks(engine):
    handles, refused = [], []

    def wait(event) -> None:
        calls = {"pause": engine.pause, "warmup": engine.warmup, "close": engine.close}
        for name, call in [*calls.items(), *(each for h in handles[:2] for each in waiting_calls(h).items())]:
            with pytest.raises(InputError, match=f"{name}.* waits for the engine, so on_event must not call it"):
                call()
            refused.append(name)

    engine.pause()
    handles.extend([engine.submit([50], on_event=wait, max_new_tokens=1), engine.submit([51], eos_token_id=None)])
    engine.resume()
    assert handles[0].result(60)
    assert len(refused) == 9
    assert engine.is_open
    assert handles[1].result(60)


@pytest.mark.parametrize("timeout", [None, 60])
def test_callback_cannot_wait_for_a_full_queue(engine, monkeypatch, timeout):
    raised, more = [], []

    def submit(event) -> None:
        more.append(engine.submit([51], max_new_tokens=1, timeout=timeout))  # there is space
        monkeypatch.setattr(engine, "most_waiting", 1)
        with pytest.raises(QueueFull):
            engine.submit([51])
        with pytest.raises(InputError, match="submit with a timeout waits for the engine, so on_event must") as error:
            engine.submit([51], timeout=timeout)
        raised.append(error)

    assert engine.submit([50], on_event=submit, max_new_tokens=1).result(60)
    assert len(raised) == 1
    assert more[0].result(60)


def test_a_listener_in_the_thread_that_cancels_does_not_wait_for_its_own_prompt(engine):
    handles, refused = [], []

    def wait(event) -> None:
        if event.stop_reason == StopReason.CANCELLED:
            for name, call in waiting_calls(handles[0]).items():
                with pytest.raises(InputError, match=f"{name}.* waits for the engine"):
                    call()
                refused.append(name)
            engine.resume()
            assert handles[1].result(60)  # the engine's thread is not busy

    engine.pause()
    handles.extend([engine.submit([50], on_event=wait), engine.submit([51])])
    handles[0].cancel()
    assert len(refused) == 3
    assert handles[0].result(60)[0].stop_reason == StopReason.CANCELLED


def test_a_listener_of_a_closed_engine_may_wait_for_other_prompts():
    heard, handles = [], []

    def wait(event) -> None:
        for handle in handles:
            with pytest.raises(EngineClosed):
                handle.result()
        heard.append(event)

    with Engine(PARAMS, SIMPLE, KEY, **SMALL) as small:
        small.pause()
        handles.extend(small.submit([50 + n], on_event=wait) for n in range(3))
        small.close(drain=False)
    assert len(heard) == 3


def test_event_loop_may_be_closed_while_waiting(engine):
    async def first(handle):
        async for event in handle:
            return event

    engine.pause()
    handle = engine.submit([50], n=4, eos_token_id=None)
    loop = asyncio.new_event_loop()
    task = loop.create_task(first(handle))
    loop.run_until_complete(asyncio.sleep(0.01))
    waiters = set(handle._results.waiters)
    task.cancel()
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    handle._results.waiters |= waiters
    engine.resume()
    assert len(handle.result(60)) == 4


def test_prompts_without_an_index_get_distinct_ones(engine):
    handles = []

    def submit() -> None:
        handles.extend(engine.submit([50], max_new_tokens=1, timeout=None) for _ in range(20))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({handle.result(60)[0].index for handle in handles}) == 80
    engine.submit([50], index=2**32 - 1, max_new_tokens=1).result(60)
    assert engine.submit([50], max_new_tokens=1).index == 0


@pytest.mark.slow
def test_warmup_compiles_all_programs_on_a_mesh_too():
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "model"))
    with Engine(shard_params(PARAMS, MODEL, mesh), SIMPLE, KEY, **SMALL) as small:
        small.warmup()
        with compilations() as compiled:
            small.submit([50]).result(60)
    assert compiled == [0]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), [(2, 1), (1, 2)])
def test_an_engine_on_a_mesh_never_has_a_whole_cache_on_a_device(data, model):
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(data, model), ("data", "model"))
    rows, heads = 2, MODEL.num_key_value_heads

    def caches() -> list[jax.Array]:
        arrays = [x for x in jax.live_arrays() if mesh_of(x) == divide(MODEL, mesh)]  # none of an earlier engine
        return [x for x in arrays if x.ndim == 4 and x.shape[:2] == (rows, heads)]

    with Engine(shard_params(PARAMS, MODEL, mesh), SIMPLE, KEY, **{**SMALL, "slots": rows}) as small:
        before = caches()
        small.submit([50], max_new_tokens=1).result(60)
        after = caches()
    assert after
    assert {x.sharding.shard_shape(x.shape)[:2] for x in before + after} == {(rows // data, heads // model)}


def test_warmup_raises_the_error_of_its_first_chunk(monkeypatch):
    def fail(*arguments):
        raise MemoryError("no memory for this chunk")

    small = Engine(PARAMS, SIMPLE, KEY, **SMALL)
    monkeypatch.setattr(small._runner._device, "step", fail)
    with pytest.raises(MemoryError, match="no memory for this chunk"):
        small.warmup()


@pytest.mark.slow
def test_closing_an_engine_does_not_wait():
    small = Engine(PARAMS, SIMPLE, KEY, **SMALL)
    handles = [small.submit([50 + n]) for n in range(5)]
    closing = threading.Thread(target=small.close)
    closing.start()
    while small.is_open:
        time.sleep(0.001)
    for call in (small.pause, small.warmup):
        with pytest.raises(EngineClosed):
            call()
    closing.join(60)
    assert all(handle.done for handle in handles)


@pytest.mark.slow
def test_submit_to_a_full_queue_or_closed_engine_is_an_error():
    with Engine(PARAMS, SIMPLE, KEY, **SMALL, most_waiting=2) as small:
        small.pause()
        handles = [small.submit([50 + n]) for n in range(2)]
        with pytest.raises(QueueFull, match="2 prompts are waiting"):
            small.submit([60])
        with pytest.raises(QueueFull):
            small.submit([60], timeout=0.05)
        threading.Timer(0.1, small.resume).start()
        handles.append(small.submit([60], timeout=None))
    assert all(handle.done for handle in handles)
    with pytest.raises(EngineClosed, match="the engine is closed"):
        small.submit([50])

    dropped = Engine(PARAMS, SIMPLE, KEY, **SMALL)
    dropped.pause()
    handle = dropped.submit([50])
    dropped.close(drain=False)
    with pytest.raises(EngineClosed, match="before this prompt was answered"):
        handle.result()
    with pytest.raises(EngineClosed):
        list(handle)


@pytest.mark.slow
def test_concurrent_threads_get_each_result_once(engine):
    wanted = {n: engine.submit([40 + n, 50], index=n).result(60) for n in range(8)}
    problems = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            number = int(rng.integers(8))
            handle = engine.submit([40 + number, 50], index=number, timeout=None)
            if rng.integers(4) == 0:
                handle.cancel()
                continue
            try:
                assert_same(handle.result(60), wanted[number])
            except BaseException as error:
                problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    deadline = time.monotonic() + 10
    while not engine._schedule.idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine._schedule.idle


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"slots": 0}, InputError, "slots must be at least 1, got 0"),
        ({"prompt_width": 2.0}, TypeError, "prompt_width must be a whole number"),
        ({"stop_states": 0}, InputError, "stop_states must be at least 1"),
        ({"sizes": {"slots": 2}}, TypeError, "sizes must be an EngineSizes, got {'slots': 2}"),
        ({"slot": 2}, TypeError, "Engine.. has no argument 'slot': did you mean 'slots'"),
        ({"tokeniser": TOK}, TypeError, "Engine.. has no argument 'tokeniser': did you mean 'tokenizer'"),
        ({"top_k": 5}, TypeError, r"Engine.. has no top_k, .* use cfg.replace\(top_k=...\)"),
        ({"prompt_width": 10**9}, InputError, "this call needs .* shorter prompts"),
        ({"key": None}, InputError, "sampling needs a key"),
        ({"cfg": CFG.replace(output_scores=True)}, ConfigError, "output_scores is not offered"),
    ],
)
def test_bad_engine_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        Engine(PARAMS, **{"cfg": CFG, "key": KEY} | arguments)


@pytest.mark.parametrize("prompts", ["text", None, {"ids": [5]}])
def test_prompts_must_be_an_iterable(prompts):
    with pytest.raises(TypeError, match="prompts must be an iterable of prompts"):
        list(generate_many(PARAMS, prompts, KEY, CFG))


@pytest.mark.slow
def test_unbounded_iterator_is_read_lazily():
    read = []

    def prompts():
        for number in range(10**9):
            read.append(number)
            yield {"ids": [40 + number % 50, 60], "max_new_tokens": 3}

    answers = generate_many(PARAMS, prompts(), KEY, SIMPLE, **SMALL)
    first = [next(answers) for _ in range(20)]
    assert len({completion.index for completion in first}) == 20
    assert len(read) < 20 + 4 * SMALL["slots"] + 2
    answers.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxgen engine" and thread.is_alive()][1:]
