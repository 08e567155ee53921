"""An eager call rounds the number of prompts up, and nobody sees the additional prompts."""

import functools

import jax
import numpy as np
import pytest

from jaxgen import GenerationConfig, InputError, StepHook, TokenAutomaton, generate, memory, prefill, programs, warmup
from jaxgen.buckets import rows_bucket
from jaxgen.programs import Programs
from tests.support.compilations import compilations
from tests.support.models import model_config, random_params, slow
from tests.support.streamers import Collector, RowCollector
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
MODEL = model_config(num_hidden_layers=1, vocab_size=len(TOKENIZER))
PARAMS = random_params(MODEL)
CFG = GenerationConfig(model=MODEL, max_new_tokens=4, pad_token_id=0)
IDS = np.random.default_rng(0).integers(1, 90, (7, 5))
KEYS = jax.random.split(jax.random.key(0), 7)


def test_rows_bucket_sizes():
    assert [rows_bucket(prompts) for prompts in (1, 2, 3, 4, 5, 8, 9, 33)] == [1, 4, 4, 4, 8, 8, 16, 64]


class LookedUpError(Exception):
    """Raised instead of compiling a program."""


@pytest.fixture
def looked_up(monkeypatch):
    """Return the programs that calls look up, none of which is compiled."""

    def stop(*_, **__):
        raise LookedUpError

    monkeypatch.setattr(programs, "PROGRAMS", Programs(1000))
    monkeypatch.setattr(programs._NewProgram, "__call__", stop)
    return programs.PROGRAMS


def test_varied_calls_need_few_programs(looked_up):
    rng = np.random.default_rng(0)
    options = [{}, {"do_sample": True}, {"do_sample": True, "top_p": 0.9}, {"repetition_penalty": 1.1}]
    for number in range(300):
        prompts, width = int(rng.integers(1, 4)), int(rng.integers(3, 91))
        cfg = CFG.replace(max_new_tokens=int(rng.integers(1, 101)), **options[number % 4])
        with pytest.raises(LookedUpError):
            generate(PARAMS, rng.integers(1, 90, (prompts, width)), jax.random.key(number), cfg)
    assert len(looked_up) == 24  # one prompt or more, three widths, and four sets of options


@pytest.fixture
def exact(monkeypatch):
    """Return a function that makes a call without rounding its number of prompts up."""

    def exact(call):
        with monkeypatch.context() as patch:
            patch.setattr("jaxgen.core.request.prepare.rows_bucket", lambda prompts: prompts)
            return call()

    return exact


def automata():
    grammars = [TokenAutomaton.from_regex(text, TOKENIZER) for text in ("[ab]+", "[cd]+", "x|yy")]
    return TokenAutomaton.stack(grammars)


CASES = {
    "greedy": {},
    "values": {"do_sample": True, "temperature": [0.5, 1.0, 2.0], "top_k": [1, 5, 50], "max_new_tokens": [4, 1, 2]},
    "tables": {"eos_token_id": [[5, 6], [7], []], "bad_words_ids": [[1, 2], [3]], "suppress_tokens": [4]},
    "sequences": {"do_sample": True, "num_return_sequences": 2, "output_logprobs": "scores", "top_logprobs": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "output_scores": True, "max_new_tokens": [4, 1, 2]},
    "records": {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True},
    "guidance": {"guidance_scale": 1.5},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "stop strings": {"stop_strings": [["a"], ["b", "c"], None]},
    "grammars": {"do_sample": True},
}


QUICK = "values", "stop strings"


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in CASES if name not in QUICK))])
def test_output_equals_that_of_an_exact_call(name, exact):
    cfg = CFG.replace(**CASES[name])
    more = {"prefix_allowed_tokens_fn": automata()} if name == "grammars" else {}
    key = KEYS[:3] if cfg.on("do_sample") else None
    call = functools.partial(generate, PARAMS, IDS[:3], key, cfg, tokenizer=TOKENIZER, **more)
    out, wanted = call(), exact(call)
    assert out.cache.rows == wanted.cache.kv.rows < out.cache.kv.rows
    for one, other in zip(_arrays(out), _arrays(wanted), strict=True):
        assert type(one) is type(other)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def _arrays(out):
    return jax.tree.leaves((out.replace(cache=None), out.cache.tokens, out.cache.count, vars(out.to_hf())))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 2, "do_sample": True}])
def test_a_cache_is_continued_without_a_copy(options, exact):
    cfg = CFG.replace(**options)
    key = jax.random.key(1) if options else None
    cache = generate(PARAMS, IDS[:3], key, cfg).cache
    ids = IDS[: cache.rows]
    out = generate(PARAMS, ids, None, CFG, cache=cache)
    assert out.cache.kv.prefix is None
    assert out.cache.kv.rows == cache.kv.rows
    wanted = exact(lambda: generate(PARAMS, ids, None, CFG, cache=cache.without_padding()))
    np.testing.assert_array_equal(out.sequences, wanted.sequences)
    again = generate(PARAMS, ids[[1]], None, CFG, cache=cache.reorder([1]))
    np.testing.assert_array_equal(again.sequences[0], out.sequences[1])


@pytest.mark.slow
def test_continuing_a_cache_with_another_number_of_rows(exact):
    cache = prefill(PARAMS, IDS[:3], CFG)
    assert (cache.rows, cache.kv.rows) == (3, 4)
    for shared, prompts in ((cache, 6), (cache.reorder([2, 0]), 2), (prefill(PARAMS, IDS[:1], CFG), 3)):
        call = functools.partial(generate, PARAMS, IDS[:prompts], None, CFG, cache=shared)
        np.testing.assert_array_equal(call().sequences, exact(call).sequences)


@pytest.mark.slow
def test_another_number_of_prompts_compiles_nothing():
    cfg, keys = CFG.replace(do_sample=True, temperature=[0.5] * 4), {number: KEYS[:number] for number in (2, 3)}
    generate(PARAMS, IDS[:4], KEYS[:4], cfg)
    cache = generate(PARAMS, IDS[:4], None, CFG).cache
    generate(PARAMS, IDS[:4], None, CFG, cache=cache)
    with compilations() as count:
        for prompts in (2, 3):
            generate(PARAMS, IDS[:prompts], keys[prompts], cfg.replace(temperature=[0.7] * prompts))
            cache = generate(PARAMS, IDS[:prompts], None, CFG).cache
            generate(PARAMS, IDS[:prompts], None, CFG, cache=cache)
        assert warmup(PARAMS, CFG, widths=[5], lengths=[4], prompts=3) == 1
    assert count[0] == 0


@pytest.mark.slow
def test_streamers_get_no_added_rows():
    cfg = CFG.replace(num_return_sequences=2, do_sample=True)
    by_step, by_row = Collector(), RowCollector()
    out = generate(PARAMS, IDS[:3], KEYS[:3], cfg, streamer=by_step)
    generate(PARAMS, IDS[:3], KEYS[:3], cfg, streamer=by_row)
    np.testing.assert_array_equal(by_step.prompts, IDS[:3])
    np.testing.assert_array_equal(by_step.tokens, out.sequences[:, 5:])
    assert by_row.rows == dict(enumerate(out.sequences[:, 5:].tolist()))


def test_prompts_are_streamed_before_anything_is_compiled(looked_up):
    streamer = Collector()
    with pytest.raises(LookedUpError):
        generate(PARAMS, IDS[:3], None, CFG, streamer=streamer)
    np.testing.assert_array_equal(streamer.prompts, IDS[:3])


@pytest.mark.slow
def test_prompts_are_streamed_once_if_the_rounded_call_does_not_fit(monkeypatch):
    expected = generate(PARAMS, IDS[:5], None, CFG).sequences
    monkeypatch.setattr(programs, "PROGRAMS", Programs(9))
    sizes = iter([100, 10, 10, 10])  # the rounded program for the prompts, and the exact programs
    monkeypatch.setattr(programs, "bytes_taken", lambda compiled: next(sizes))
    monkeypatch.setattr(programs, "SMALL", 0)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 50)
    streamer = Collector()
    generate(PARAMS, IDS[:5], None, CFG, streamer=streamer)
    np.testing.assert_array_equal(np.concatenate([streamer.prompts, streamer.tokens], axis=1), expected)


class Hook(StepHook):
    def after(self, state, history, output):
        assert history.ids.shape[0] == 3
        return output, state


def three(history, scores):
    assert scores.shape[0] == 3
    return scores


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        {"logits_processor": [three]},
        {"stopping_criteria": [lambda history, scores: three(history, scores)[:, 0] > 1e9]},
        {"hook": Hook()},
        {"prefix_allowed_tokens_fn": lambda row, ids: [row + 1] if row < 3 else []},
    ],
)
def test_user_functions_get_no_added_rows(own):
    assert generate(PARAMS, IDS[:3], None, CFG, **own).cache.kv.rows == 3


@pytest.mark.slow
def test_slots_are_not_rounded():
    out = generate(PARAMS, IDS[:3], None, CFG.replace(slots=2))
    np.testing.assert_array_equal(out.sequences, generate(PARAMS, IDS[:3], None, CFG).sequences)


@pytest.mark.parametrize("stage", ["cache", "program"])
def test_prompts_are_not_added_if_they_do_not_fit(monkeypatch, stage):
    """Five prompts fit into the memory; the eight prompts of the rounded call do not."""
    call = functools.partial(generate, PARAMS, IDS[:5], None, CFG)
    expected = call().sequences
    monkeypatch.setattr(programs, "PROGRAMS", Programs(9))
    if stage == "cache":
        size = memory_of_caches(5)
        monkeypatch.setattr("jaxgen.core.request.cache_memory.SMALL", 0)
    else:
        sizes = iter([100, 10])  # of the rounded program and of the exact one
        monkeypatch.setattr(programs, "bytes_taken", lambda compiled: next(sizes))
        monkeypatch.setattr(programs, "SMALL", 0)
        size = 50
    monkeypatch.setattr(memory, "free_bytes", lambda device: size)
    out = call()
    assert out.cache.kv.rows == 5
    np.testing.assert_array_equal(out.sequences, expected)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 5)
    monkeypatch.setattr("jaxgen.core.request.cache_memory.SMALL", 0)
    with pytest.raises(InputError, match="this call needs"):
        call()


def memory_of_caches(prompts):
    from jaxgen.core.request.cache_memory import caches_bytes

    return caches_bytes((MODEL,), CFG, prompts, sequences=1, width=32, capacity=128)
