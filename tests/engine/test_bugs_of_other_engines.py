"""Bugs that other engines have had, tested with a counting model, whose correct answers are known."""

import threading
import time

import jax
import pytest

from jaxgen import StopReason
from jaxgen.engine.engine import Engine
from jaxgen.engine.many_prompts import generate_many
from tests.support.models import counting_config, counting_params

PAD = 7
CFG = counting_config(max_new_tokens=12, pad_token_id=PAD, eos_token_id=0, no_repeat_ngram_size=3, do_sample=True)
FLAT = counting_params(CFG, peak=1.0)  # many tokens are likely
SHARP = counting_params(CFG)
PENALTY = {"repetition_penalty": 1e6, "sequence_bias": {(30,): 5.0}}  # token 30 replaces penalized tokens


@pytest.fixture(scope="module")
def counting():
    options = [*PENALTY, "presence_penalty", "frequency_penalty", "min_new_tokens", "bad_words_ids"]
    sizes = {"slots": 2, "prompt_width": 16, "prompt_options": options}
    with Engine(SHARP, CFG.replace(do_sample=False), jax.random.key(0), **sizes) as made:
        yield made


@pytest.mark.slow
def test_each_row_draws_from_its_own_key():
    """tpu-inference, pull request 3401: all rows were reseeded from the last row."""
    with Engine(FLAT, CFG, jax.random.key(1), slots=4, prompt_width=16, prompt_options=()) as made:
        alone = [made.submit([3, 4], index=index).result(300)[0].tokens for index in range(9)]
        assert len(set(map(tuple, alone))) == 9
        for order in (range(9), reversed(range(9)), [4, 4, 4, 4, 8, 4]):
            handles = [made.submit([3, 4], index=index) for index in order]
            assert [handle.result(300)[0].tokens for handle in handles] == [alone[handle.index] for handle in handles]


@pytest.mark.slow
def test_padding_is_not_counted_by_penalties(counting):
    """Also pull request 3401: padding tokens were counted. If penalties did so here, counting would skip the pad id."""
    options = {**PENALTY, "presence_penalty": 50.0, "frequency_penalty": 50.0, "min_length": 3}
    done = counting.submit([4], **options, max_new_tokens=5).result(300)[0]
    assert done.tokens == [5, 6, 7, 8, 9]
    assert done.ids == [4]
    short = counting.submit([47], max_new_tokens=12).result(300)[0]
    assert (short.tokens, short.stop_reason) == ([48, 49, 0], StopReason.EOS)


@pytest.mark.slow
def test_second_call_returns_all_results(counting):
    """transformers, issue 45943: request numbers started over, and results of the second call were lost."""
    prompts = [[number] for number in range(1, 20)]
    for _ in range(2):
        done = list(generate_many(SHARP, prompts, None, CFG.replace(do_sample=False), slots=2, prompt_width=16))
        assert sorted(completion.index for completion in done) == list(range(19))
        assert all(completion.tokens[0] == completion.ids[0] + 1 for completion in done)
    first = [counting.submit(prompt, index=5) for prompt in prompts]
    second = [counting.submit(prompt, index=5) for prompt in prompts]
    for one, two, prompt in zip(first, second, prompts, strict=True):
        assert one.result(300)[0].tokens == two.result(300)[0].tokens == list(range(prompt[0] + 1, prompt[0] + 13))


@pytest.mark.slow
def test_concurrent_readers_get_all_tokens(counting):
    """transformers, issue 40479: tokens arriving during an iteration were lost. Here, every reader gets all tokens."""
    handle = counting.submit([20])
    slow, seen = [], {}
    for event in handle:
        slow += event.tokens
        time.sleep(0.02)

    def read(name: str) -> None:
        seen[name] = [token for event in handle for token in event.tokens]

    threads = [threading.Thread(target=read, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slow == seen["a"] == seen["b"] == handle.result()[0].tokens == list(range(21, 33))


@pytest.mark.slow
def test_waiting_for_one_result_does_not_consume_others(counting):
    """transformers: a thread that waited for one id took the results of others, and put them back at the end."""
    handles = [counting.submit([number], max_new_tokens=1 + number % 5) for number in range(1, 17)]
    found: dict[int, list[int]] = {}

    def wait(number: int) -> None:
        found[number] = handles[number - 1].result(300)[0].tokens

    threads = [threading.Thread(target=wait, args=(number,)) for number in reversed(range(1, 17))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: list(range(number + 1, number + 2 + number % 5)) for number in range(1, 17)}


@pytest.mark.slow
def test_processors_see_the_whole_row(counting):
    """transformers, issues 43457 and 48468: processors that read the history saw only one token of it."""
    banned = counting.submit([3, 4, 5, 9, 3, 4], max_new_tokens=1).result(300)[0]
    assert banned.tokens != [5]  # no_repeat_ngram_size=3: the prompt contains 3, 4, 5
    free = counting.submit([3, 4, 6, 9, 3, 4], max_new_tokens=1).result(300)[0]
    assert free.tokens == [5]
    penalised = counting.submit([6, 5, 9, 4], max_new_tokens=1, **PENALTY).result(300)[0]
    assert penalised.tokens == [30]
    words = counting.submit([9], bad_words_ids=[[10, 11, 12]], max_new_tokens=3).result(300)[0]
    assert words.tokens[:2] == [10, 11]
    assert words.tokens[2] != 12
