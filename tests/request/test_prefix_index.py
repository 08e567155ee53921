"""The prefix store: prompts read a shared beginning only once, and copies are bit-identical."""

import collections

import jax
import numpy as np
import pytest

from jaxgen import GenerationConfig, InputError
from jaxgen.core.decoding.hook import StepHook
from jaxgen.core.request.running.prefix_index import Prefixes
from jaxgen.engine.engine import Engine
from tests.engine.test_engine import assert_same
from tests.support.models import model_config, random_params

CHUNK, WIDTH, NEW = 16, 90, 5


def config(dtype: str = "bfloat16", **options) -> GenerationConfig:
    """Return a config. Most tests use the same dtype, so that their engines share programs."""
    model = model_config(torch_dtype=dtype, hidden_size=64)
    fields = {"do_sample": True, "output_logprobs": "scores", "top_logprobs": 2, "eos_token_id": 1, "pad_token_id": 0}
    return GenerationConfig(model=model, max_new_tokens=NEW, prefill_chunk_size=CHUNK, **fields | options)


def engine(cfg: GenerationConfig, **arguments) -> Engine:
    sizes = {"slots": 3, "prompt_width": WIDTH, "prompt_options": ()}
    return Engine(random_params(cfg.model), cfg, jax.random.key(0), **sizes | arguments)


def related_prompts(count: int, seed: int) -> list[dict]:
    """Return prompts that each begin with part of an earlier prompt."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = [rng.integers(2, 97, WIDTH).tolist()]
    for _ in range(count - 1):
        begin = prompts[rng.integers(len(prompts))]
        ids = begin[: rng.integers(len(begin) + 1)] + rng.integers(2, 97, rng.integers(1, 60)).tolist()
        prompts.append(ids[:WIDTH])
    return [{"ids": ids, "index": index} for index, ids in enumerate(prompts)]


def answers(made: Engine, prompts: list[dict]) -> list:
    return [completion for handle in map(made.submit, prompts) for completion in handle.result(300)]


def check_copies(dtype: str, bytes_of_store: int | None, places: int) -> None:
    cfg, prompts = config(dtype), related_prompts(40, seed=1)
    with engine(cfg, prefix_cache_bytes=0) as made:
        without = answers(made, prompts)
    assert not any(completion.cached_tokens for completion in without)
    with engine(cfg, prefix_cache_bytes=bytes_of_store) as made:
        first, second = answers(made, prompts), answers(made, prompts)
    assert made._schedule.prefixes.capacity == places
    assert_same(first, without)
    assert_same(second, without)
    assert sum(completion.cached_tokens for completion in first) > 100


@pytest.mark.slow
def test_copied_block_equals_a_block_that_was_read():
    check_copies("bfloat16", None, 3 * (WIDTH // CHUNK))


@pytest.mark.slow
def test_copied_block_is_exact_when_the_store_is_too_small():
    model = config().model
    size = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * CHUNK * 4
    check_copies("float32", 4 * size + 100, 4)


@pytest.mark.slow
def test_stored_prefix_is_not_read_again():
    cfg = config()
    prompt, other = related_prompts(2, seed=2)
    other["ids"] = prompt["ids"][:50] + other["ids"][50:]
    with engine(cfg) as made:
        before = answers(made, [prompt, other])
        made.pause()
        state = made._runner._device._state
        store = jax.tree.map(lambda x: x + 1 if x.ndim == 4 else x, state.pool.store)
        made._runner._device._state = state.replace(pool=state.pool.replace(store=store))
        made.resume()
        after = answers(made, [prompt, {**other, "ids": other["ids"][:15]}])
    assert before[1].cached_tokens == 48
    assert after[0].cached_tokens == 80
    assert after[0].logprobs.logprobs.tolist() != before[0].logprobs.logprobs.tolist()
    assert after[1].cached_tokens == 0


@pytest.mark.slow
def test_a_system_prompt_of_1000_tokens_is_read_once_for_30_prompts():
    rng = np.random.default_rng(3)
    system = rng.integers(2, 97, 1000).tolist()
    prompts = [[*system, *rng.integers(2, 97, rng.integers(1, 80)).tolist()] for _ in range(30)]
    cfg = config().replace(prefill_chunk_size=None)
    cfg = cfg.replace(model=model_config(max_position_embeddings=2048))
    with engine(cfg, prompt_width=1100, slots=4) as made:
        cached = [completion.cached_tokens for completion in answers(made, [{"ids": ids} for ids in prompts])]
    assert cached == [0] + [1000 // 128 * 128] * 29


@pytest.mark.slow
def test_new_weights_empty_the_store():
    cfg, [prompt] = config(), related_prompts(1, seed=4)
    changed = jax.tree.map(lambda x: x * 1.25, random_params(cfg.model))
    with engine(cfg) as made:
        answers(made, [prompt])
        made.update_params(changed)
        new, again = answers(made, [prompt]), answers(made, [prompt])
    with engine(cfg) as made:
        made.update_params(changed)
        fresh = answers(made, [prompt])
    assert (new[0].cached_tokens, again[0].cached_tokens) == (0, 80)
    assert_same(new, fresh)
    assert_same(again, fresh)


@pytest.mark.slow
def test_a_prompt_cancelled_while_it_is_read_leaves_nothing_behind():
    cfg, prompts = config(), related_prompts(30, seed=5)
    rng = np.random.default_rng(6)
    with engine(cfg, prefix_cache_bytes=0) as made:
        alone = answers(made, prompts)
    with engine(cfg) as made:
        for _ in range(3):
            handles = [made.submit(prompt) for prompt in prompts]
            kept = [number for number in range(30) if rng.integers(2) or handles[number].cancel()]
            for number in kept:
                assert_same(handles[number].result(300), [alone[number]])
        made.pause()
        index = made._schedule.prefixes
        made._schedule.arrivals()  # processes the pending cancellations
        assert len(index._free) + len(index._stored) == index.capacity
        assert not index._coming


@pytest.mark.slow
def test_each_part_of_a_prompt_copies_the_stored_blocks():
    cfg, prompts = config(), [{**prompt, "n": 20} for prompt in related_prompts(4, seed=7)]
    with engine(cfg, prefix_cache_bytes=0) as made:
        without = answers(made, prompts)
    with engine(cfg) as made:
        first = answers(made, prompts[:1])
        rest, again = answers(made, prompts[1:]), answers(made, prompts[:1])
        index = made._schedule.prefixes
        assert len(index._free) + len(index._stored) == index.capacity
        assert not index._coming
    assert_same(first + rest, without)
    assert_same(again, first)
    assert {completion.cached_tokens for completion in first} == {0}
    assert {completion.cached_tokens for completion in again} == {80}


@pytest.mark.slow
def test_bad_store_sizes_and_hooks_are_refused():
    cfg = config()
    with pytest.raises(InputError, match=r"prefix_cache_bytes=10 is less than the \d+ bytes of 16 tokens"):
        engine(cfg, prefix_cache_bytes=10)
    with pytest.raises(InputError, match="prefix_cache_bytes must be at least 0"):
        engine(cfg, prefix_cache_bytes=-1)
    with pytest.raises(TypeError, match="prefix_cache_bytes must be a whole number"):
        engine(cfg, prefix_cache_bytes=1e6)
    with pytest.raises(InputError, match="prefix_cache_bytes must be 0 with a hook"):
        engine(cfg, prefix_cache_bytes=10**6, hook=StepHook())
    with engine(cfg, hook=StepHook()) as made:
        assert made._schedule.prefixes.capacity == 0


class Store:
    """A stand-in for the device: it loads prompts in order and reads them chunk by chunk, as the index plans."""

    def __init__(self, places: int):
        self.content: list[bytes | None] = [None] * places
        self.queue: collections.deque = collections.deque()
        self.pool: list[list] = []

    def load(self) -> None:
        names, claim = self.queue.popleft()
        assert [self.content[place] for place in claim.have] == names[: len(claim.have)]
        self.pool.append([names, claim, len(claim.have)])

    def read(self) -> None:
        for prompt in self.pool:
            names, claim, number = prompt
            for chunk, name, place in claim.keep:
                if chunk == number:
                    self.content[place] = name
            prompt[2] += number < len(names)


@pytest.mark.parametrize("seed", range(30))
def test_copied_blocks_never_belong_to_another_prompt(seed):
    rng = np.random.default_rng(seed)
    index, places = Prefixes(places := int(rng.integers(1, 9)), 1, 4), places
    store, epochs = Store(places), 0
    for _ in range(300):
        match rng.integers(5):
            case 0 | 1:
                names = index.names(rng.integers(0, 2, rng.integers(1, 7)))
                if not index.must_wait(names):
                    store.queue.append((names, index.enter(names)))
            case 2 if store.queue and len(store.pool) < 3:
                store.load()
            case 3:
                store.read()
                for prompt in [*store.pool]:
                    if prompt[2] == len(prompt[0]) and rng.integers(2):
                        store.pool.remove(prompt)
                        index.confirm(prompt[1])
            case 4 if rng.integers(3) == 0:
                flights = [*store.queue, *store.pool]
                if flights and rng.integers(3):
                    given_up = flights[rng.integers(len(flights))]
                    (store.pool if given_up in store.pool else store.queue).remove(given_up)
                    index.release(given_up[1])
                elif not store.queue:  # clearing would break the copies planned for queued prompts
                    index.clear()
                    epochs += 1
        taken = [place for _, claim, *_ in [*store.queue, *store.pool] for _, _, place in claim.keep]
        assert sorted([*index._free, *index._stored.values(), *taken]) == list(range(places))
