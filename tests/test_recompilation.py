"""The log reports which programs are compiled, and how each differs from the most similar existing program."""

import dataclasses
import functools
import itertools
import logging

import jax
import numpy as np
import pytest

from jaxgen import Engine, GenerationConfig, generate, prefill, programs, score
from jaxgen.programs import Program, Programs
from tests.support.models import model_config, random_params
from tests.support.streamers import Collector

MODEL = model_config(num_hidden_layers=1)
DEEPER = model_config(num_hidden_layers=2)
HALF = dataclasses.replace(MODEL, dtype="bfloat16")
PARAMS = random_params(MODEL)
CFG = GenerationConfig(model=MODEL, max_new_tokens=2, pad_token_id=0)
DRAWN = CFG.replace(do_sample=True)
PROMPT = np.full((1, 3), 7)


@pytest.fixture
def logged(monkeypatch, caplog):
    """Return a function that forgets all programs, runs calls in turn, and returns the messages that they log."""

    def messages(*calls, most=64):
        monkeypatch.setattr(programs, "PROGRAMS", Programs(most))
        caplog.clear()
        with caplog.at_level(logging.INFO, "jaxgen"):
            for call in calls:
                call()
        return [record.getMessage() for record in caplog.records if record.name == "jaxgen"]

    return messages


class LookedUpError(Exception):
    """Raised instead of compiling a program."""


@pytest.fixture
def looked_up(monkeypatch, logged):
    """Return a function like `logged` whose calls only look up their programs, so that nothing is compiled."""

    def stop(*_, **__):
        raise LookedUpError

    def until_lookup(call):
        with pytest.raises(LookedUpError):
            call()

    monkeypatch.setattr(programs._NewProgram, "__call__", stop)
    return lambda *calls: logged(*(functools.partial(until_lookup, call) for call in calls))


def call(ids=PROMPT, key=None, cfg=CFG, params=PARAMS, **named):
    return lambda: generate(params, ids, key, cfg, **named)


def first(history, scores):
    return scores


def second(history, scores):
    return scores


KEY = jax.random.key(0)
DIFFERENCES = {
    "width": (call(), call(np.full((1, 40), 7)), "ids int32[1,64], was int32[1,32]; mask bool[1,64], was bool[1,32]"),
    "batch": (
        call(),
        call(np.full((4, 3), 7)),
        "ids int32[4,32], was int32[1,32]; mask bool[4,32], was bool[1,32]; budget int32[4], was int32[1]; "
        "prompts 4, was 1",
    ),
    "length": (call(), call(cfg=CFG.replace(max_new_tokens=200)), "capacity 256, was 128"),
    "option on": (
        call(),
        call(cfg=CFG.replace(repetition_penalty=1.2)),
        "option repetition_penalty is on, was off",
    ),
    "option off": (
        call(key=KEY, cfg=DRAWN.replace(top_p=0.5)),
        call(key=KEY, cfg=DRAWN),
        "option top_p is off, was on",
    ),
    "static option": (
        call(cfg=CFG.replace(no_repeat_ngram_size=2)),
        call(cfg=CFG.replace(no_repeat_ngram_size=3)),
        "no_repeat_ngram_size 3, was 2",
    ),
    "one value or one per prompt": (
        call(key=KEY, cfg=DRAWN.replace(temperature=0.5)),
        call(key=jax.random.split(KEY, 1), cfg=DRAWN.replace(temperature=[0.5])),
        "temperature float32[1], was float32[]; key key<fry>[1], was key<fry>[]",
    ),
    "dtype": (
        call(),
        call(cfg=CFG.replace(model=HALF), params=jax.tree.map(lambda x: x.astype("bfloat16"), PARAMS)),
        "model.dtype bfloat16, was float32; params.lm_head.weight bfloat16[97,32], was float32[97,32]; "
        "params.model.embed_tokens.weight bfloat16[97,32], was float32[97,32]; "
        "params.model.layers.0.input_layernorm.weight bfloat16[32], was float32[32]; and 12 more",
    ),
    "model": (
        call(),
        call(cfg=CFG.replace(model=DEEPER), params=random_params(DEEPER)),
        "model.num_hidden_layers 2, was 1; model.layers.1 LayerSpec, was None; params.model.layers.1 dict, was None",
    ),
    "mode": (
        call(),
        call(cfg=CFG.replace(num_beams=3)),
        "num_beams 3, was 1; needs.sequences 3, was 1; mode BeamSearch, was Sample",
    ),
    "function": (
        call(logits_processor=[first]),
        call(logits_processor=[second]),
        "processors.0 second, was first",
    ),
    "function of the same name": (
        call(logits_processor=[lambda history, scores: scores]),
        call(logits_processor=[lambda history, scores: scores]),
        "processors.0 is a different <lambda>",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_are_named(name, looked_up):
    before, after, difference = DIFFERENCES[name]
    assert looked_up(before, before, after, after) == ["compiling generate", f"compiling generate: {difference}"]


def test_a_cache(logged):
    cache = prefill(PARAMS, PROMPT, CFG)
    expected = "compiling generate: cache Continuation, was None; cached_slots 32, was 0"
    assert logged(call(), call(cache=cache))[1] == expected


def test_comparison_uses_the_call_with_the_fewest_differences(looked_up):
    both = CFG.replace(repetition_penalty=1.2, no_repeat_ngram_size=2)
    messages = looked_up(call(), call(cfg=both), call(np.full((2, 3), 7)), call(cfg=both.replace(min_length=4)))
    assert messages[-1] == "compiling generate: option min_length is on, was off"


def test_each_function_is_compared_with_itself(logged):
    wide = np.full((1, 40), 7)
    messages = logged(call(), lambda: score(PARAMS, PROMPT, CFG), lambda: score(PARAMS, wide, CFG))
    assert messages[:2] == ["compiling generate", "compiling score"]
    assert messages[2].startswith("compiling score: ids int32[1,64], was int32[1,32]; ")


def test_a_stream(logged):
    messages = logged(call(streamer=Collector()), call(np.full((2, 3), 7), streamer=Collector()))
    names = ["generate (prefill)", "generate (steps)", "generate (end)"]
    assert messages[:3] == [f"compiling {name}" for name in names]
    assert messages[4].startswith("compiling generate (steps): prompts 4, was 1; state.rows.")


@pytest.mark.slow
def test_an_engine(logged):
    def run(slots):
        with Engine(PARAMS, CFG, slots=slots, prompt_width=32, prompt_options=()) as engine:
            engine.submit([1, 2, 3]).result()

    messages = logged(lambda: run(1), lambda: run(1), lambda: run(2))
    # The programs for grammars are compiled first, unless an earlier test has compiled them.
    messages = list(itertools.dropwhile(lambda message: "(grammar)" in message, messages))
    assert messages[:2] == ["compiling Engine (state)", "compiling Engine (chunk)"]
    assert [message.partition(";")[0] for message in messages[2:]] == [
        "compiling Engine (state): prompts 2, was 1",
        "compiling Engine (chunk): prompts 2, was 1",
    ]


def test_numpy_and_jax_arrays_share_a_program(logged):
    run = Program(lambda x: x + 1, "plus")
    weak = jax.numpy.asarray(1.0)
    messages = logged(*(functools.partial(run, x) for x in (np.ones(2, np.float32), jax.numpy.ones(2), 1.0, weak)))
    assert messages == [
        "compiling plus",
        "compiling plus: x float[], was float32[2]",
        "compiling plus: x weak float32[], was float[]",
    ]


def test_freed_programs(logged):
    run = Program(lambda x: x + 1, "plus")
    calls = [lambda size=size: run(np.ones(size, np.float32)) for size in (1, 2, 3, 1)]
    assert logged(*calls, most=2) == [
        "compiling plus",
        "compiling plus: x float32[2], was float32[1]",
        "freed a program of plus, the least recently used of 2",
        "compiling plus: x float32[3], was float32[2]",
        "freed a program of plus, the least recently used of 2",
        "compiling plus: x float32[1], was float32[3]",
    ]


def test_nothing_is_logged_by_default(monkeypatch, capfd):
    monkeypatch.setattr(programs, "PROGRAMS", Programs(4))
    generate(PARAMS, PROMPT, None, CFG)
    assert capfd.readouterr() == ("", "")
