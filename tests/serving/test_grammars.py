"""Grammars of requests are compiled once, in a fair and bounded queue, and cached by their size in bytes."""

import asyncio
import threading
import time

import jax
import pytest

from jaxgen.core.grammar.stopping import check_stop
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.engine.results import QueueFull
from jaxgen.errors import InputError
from jaxgen.serving import grammars as module
from jaxgen.serving.grammars import CompiledGrammar, Grammars, GrammarSource
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()


def grammar(pattern: str) -> CompiledGrammar:
    return CompiledGrammar(TokenAutomaton.from_regex(pattern, TOKENIZER), ())


def size(one: CompiledGrammar) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(one.automaton))


class Gate:
    """Builds that wait until the gate opens, or until they are stopped."""

    def __init__(self):
        self.opened, self.started, self.stopped = threading.Event(), threading.Event(), threading.Event()
        self.built = []

    def wanted(self, name: str) -> GrammarSource:
        def build():
            self.started.set()
            while not self.opened.is_set():
                try:
                    check_stop()
                except BaseException:
                    self.stopped.set()
                    raise
                time.sleep(0.001)
            self.built.append(name)
            return grammar("a|b")

        return GrammarSource(name, build)


def accepts(_):
    pass


async def settle():
    for _ in range(10):
        await asyncio.sleep(0.001)


def test_equal_grammars_are_compiled_once():
    async def ask():
        gate, grammars = Gate(), Grammars(accepts)
        tasks = [asyncio.ensure_future(grammars.get(gate.wanted("a"))) for _ in range(5)]
        await settle()
        assert grammars.jobs == 1
        gate.opened.set()
        found = await asyncio.gather(*tasks)
        assert len({id(one) for one in found}) == 1
        assert await grammars.get(gate.wanted("a")) is found[0]
        assert gate.built == ["a"]
        assert grammars.jobs == 0
        grammars.close()

    asyncio.run(ask())


def test_the_cache_counts_bytes():
    one = size(grammar("a"))

    async def ask():
        grammars = Grammars(accepts, most_bytes=2 * one)
        for pattern in "abcd":
            await grammars.get(GrammarSource(pattern, lambda pattern=pattern: grammar(pattern)))
            assert grammars.cached_bytes <= 2 * one
        assert grammars.cached_bytes == 2 * one
        for pattern in "ce":  # "c" is used again, so "d" is dropped for "e"
            await grammars.get(GrammarSource(pattern, lambda pattern=pattern: grammar(pattern)))
        await grammars.get(GrammarSource("c", lambda: pytest.fail("is compiled again")))
        grammars.close()

    asyncio.run(ask())


def test_oversized_grammar_is_refused_and_not_cached():
    def refuses(_):
        raise InputError("the grammar needs too many states")

    async def ask():
        grammars = Grammars(refuses)
        for _ in range(3):
            with pytest.raises(InputError, match="too many states"):
                await grammars.get(GrammarSource("a", lambda: grammar("a")))
        assert grammars.cached_bytes == 0
        grammars.close()

    asyncio.run(ask())


def test_jobs_whose_clients_left_are_dropped():
    async def ask():
        gate, grammars = Gate(), Grammars(accepts)
        tasks = [asyncio.ensure_future(grammars.get(gate.wanted(name))) for name in ("a", "a", "b", "c")]
        await asyncio.to_thread(gate.started.wait, 10)
        tasks[0].cancel()
        await settle()
        assert not gate.stopped.is_set()  # the second client still waits for the first grammar
        for task in tasks[1:3]:
            task.cancel()
        await asyncio.to_thread(gate.stopped.wait, 10)
        assert gate.stopped.is_set()
        assert grammars.jobs == 1
        gate.opened.set()
        await tasks[3]
        assert gate.built == ["c"]
        grammars.close()

    asyncio.run(ask())


def test_grammar_dropped_too_late_is_counted_once():
    """A job ends although it was dropped, and another job for the same grammar follows."""
    grammars, gate, made = Grammars(accepts), Gate(), grammar("a|b")

    def build():
        gate.started.set()
        gate.opened.wait(30)
        return made

    async def main():
        first = asyncio.ensure_future(grammars.get(GrammarSource("a", build)))
        await asyncio.to_thread(gate.started.wait, 30)
        first.cancel()
        await settle()
        second = asyncio.ensure_future(grammars.get(GrammarSource("a", build)))
        await settle()
        gate.opened.set()
        return await second

    assert grammars.cached_bytes == 0
    assert size(asyncio.run(main())) == grammars.cached_bytes
    grammars.close()


def test_the_queue_is_bounded_and_groups_take_turns():
    async def ask():
        gate, grammars = Gate(), Grammars(accepts, most_jobs=5)
        names = ["a0", "a1", "a2", "a3", "b0"]
        tasks = [asyncio.ensure_future(grammars.get(gate.wanted(name), name[0])) for name in names]
        await settle()
        with pytest.raises(QueueFull):
            await grammars.get(gate.wanted("b1"), "b")
        gate.opened.set()
        await asyncio.gather(*tasks)
        assert gate.built.index("b0") <= 2
        grammars.close()

    asyncio.run(ask())


def test_compiling_has_a_time_limit():
    async def ask():
        gate, grammars = Gate(), Grammars(accepts, seconds=0.05)
        with pytest.raises(InputError, match=r"takes more than 0\.05 seconds to compile"):
            await grammars.get(gate.wanted("a"))
        gate.opened.set()
        await grammars.get(gate.wanted("a"))  # the machine may have been busy, so this error is not cached
        grammars.close()

    asyncio.run(ask())


def test_busy_engine_gets_a_pause_after_a_stopped_grammar(monkeypatch):
    pauses, sleep = [], time.sleep
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pauses.append(seconds) or sleep(0.001))

    async def ask():
        gate, grammars = Gate(), Grammars(accepts, is_busy=lambda: True)
        task = asyncio.ensure_future(grammars.get(gate.wanted("a")))
        while not gate.started.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        task.cancel()
        gate.opened.set()
        await grammars.get(gate.wanted("b"))  # after the pause
        grammars.close()

    asyncio.run(ask())
    assert max(pauses) >= 0.05


@pytest.mark.parametrize("is_busy", [True, False])
def test_compiling_takes_turns_with_a_busy_engine(is_busy, monkeypatch):
    pauses = []

    async def ask():
        grammars = Grammars(accepts, is_busy=lambda: is_busy)
        await grammars.get(GrammarSource("long", lambda: grammar("[a-z]{1500}")))
        grammars.close()

    monkeypatch.setattr(module.time, "sleep", pauses.append)
    asyncio.run(ask())
    assert bool(pauses) == is_busy


@pytest.mark.parametrize(
    "build",
    [
        lambda: TokenAutomaton.from_regex("[a-z]{29000}", TOKENIZER),
        lambda: TokenAutomaton.from_json_schema({"enum": [f"{i:06}" for i in range(30_000)]}, TOKENIZER),
        lambda: TokenAutomaton.from_json_schema(
            {"oneOf": [{"type": "object", "properties": {f"k{i}": {"const": i}}} for i in range(200)]}, TOKENIZER
        ),
        lambda: TokenAutomaton.from_json_schema(
            {"type": "object", "properties": {f"k{i}": {"type": "number"} for i in range(1000)}}, TOKENIZER
        ),
    ],
)
def test_large_grammars_can_be_stopped_soon(build):
    """Each of these takes a second or more."""

    async def ask():
        grammars = Grammars(accepts)
        begun = threading.Event()

        def slow():
            begun.set()
            return CompiledGrammar(build(), ())

        task = asyncio.ensure_future(grammars.get(GrammarSource("slow", slow)))
        await asyncio.to_thread(begun.wait, 10)
        await asyncio.sleep(0.1)
        assert not task.done()
        task.cancel()
        before = time.process_time()
        await asyncio.wait_for(grammars.get(GrammarSource("quick", lambda: grammar("a"))), 30)
        assert time.process_time() - before < 2
        assert grammars.jobs == 0
        grammars.close()

    asyncio.run(ask())
