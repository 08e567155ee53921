import json
import re
import string

import jax
import jax.numpy as jnp
import numpy as np
import outlines_core
import pytest
import tokenizers
from tokenizers import decoders, models

from jaxgen import Grammar, Tokenizer, demo
from jaxgen.core.grammar import row_parts, token_table
from jaxgen.core.grammar.expression import NOTHING
from jaxgen.core.grammar.token_automaton import Capacity, TokenAutomaton
from jaxgen.core.grammar.within import within
from jaxgen.errors import InputError
from tests.support.automata import matrix, of_matrix
from tests.support.bounded import bounded
from tests.support.compilations import compilations
from tests.support.models import slow
from tests.support.tokenizers import byte_level, llama

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "mood": {"enum": ["calm", "très gai"]},
        "tags": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["name", "age", "mood", "tags"],
}
PATTERNS = [
    r"(yes|no), because [^.\n]{1,30}\.",
    r"a|ab|abc",
    r"[0-9]+(\.[0-9]+)?",
    r"(the |a )?[a-z]{3,9}( [a-z]+)*[.!?]",
    r"(é|[😀-😎]|ß){2,5}",
    r"\w+@\w+",
    r"",
]
allowed = jax.jit(lambda automaton, state, eos: automaton.allowed(state, eos))
push = jax.jit(lambda automaton, state, tokens, eos: automaton.push(state, tokens, eos))
exhausted = jax.jit(lambda automaton, state: automaton.exhausted(state))


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return Tokenizer.from_pretrained(demo.PATH)


def marks(size: int, *ids: int) -> jax.Array:
    return jnp.asarray(np.isin(np.arange(size), ids))


def automaton_of(grammar, tokenizer, **options) -> TokenAutomaton:
    build = TokenAutomaton.from_regex if isinstance(grammar, str) else TokenAutomaton.from_json_schema
    return build(grammar, tokenizer, **options)


def test_repr_shows_shapes(tok):
    automaton = automaton_of("yes|no", tok)
    assert repr(automaton).startswith(f"TokenAutomaton(classes=uint16[1, {len(tok)}], base=int32[1], part=int32[256], ")
    assert repr(automaton).endswith("start=int32[], width=64, kinds=256)")


def walk(automaton, size, eos_id, seed, rows=4, steps=60) -> list[list[int]]:
    """Choose allowed tokens at random until eos. After a quarter of the steps, take the shortest way to the end."""
    rng, eos = np.random.default_rng(seed), marks(size, eos_id)
    (classes, table), before = matrix(automaton), None
    distance = np.where(automaton.accepting, 0, 10**6)[: len(table)]
    while before is None or not np.array_equal(before, distance):
        before, distance = distance, np.minimum(distance, np.where(table >= 0, distance[table], 10**6).min(axis=1) + 1)
    state, texts, done = automaton.begin(rows), [[] for _ in range(rows)], np.zeros(rows, bool)
    for step in range(steps):
        may, here, tokens = np.asarray(allowed(automaton, state, eos)), np.asarray(state), np.zeros(rows, np.int32)
        for row in np.flatnonzero(~done):
            assert may[row].any()
            assert bool(automaton.accepting[here[row]]) == may[row, eos_id]
            choices = np.flatnonzero(may[row])
            if step > steps // 4 and not may[row, eos_id]:
                behind = distance[table[here[row], classes[choices]]]
                choices = choices[behind < distance[here[row]]]
            ends = may[row, eos_id] and (step > steps // 4 or rng.random() < 0.3)
            tokens[row] = eos_id if ends else rng.choice(choices)
            if tokens[row] == eos_id:
                done[row] = True
            else:
                texts[row].append(int(tokens[row]))
        after = push(automaton, state, jnp.asarray(tokens), eos)
        state = jnp.where(jnp.asarray(done), state, after)
        if done.all():
            return texts
    raise AssertionError("a row did not end")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_random_walks_match_the_pattern(tok, pattern):
    automaton = automaton_of(pattern, tok)
    for row in walk(automaton, len(tok), tok.eos_token_id, seed=1):
        assert re.fullmatch(pattern, tok.decode(row))


def test_random_walks_are_json(tok):
    automaton = automaton_of(SCHEMA, tok)
    for row in walk(automaton, len(tok), tok.eos_token_id, seed=2, rows=8):
        value = json.loads(tok.decode(row))
        assert list(value) == ["name", "age", "mood", "tags"]
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 12
        assert type(value["age"]) is int
        assert value["mood"] in ("calm", "très gai")
        assert all(type(tag) is bool for tag in value["tags"])


def test_grammars_may_have_schemas_and_fixed_text(tok):
    grammar = ("<" + Grammar.json_schema(SCHEMA) + ">").repeat(2, 2, separator="\n")
    automaton = TokenAutomaton.from_expression(grammar, tok, vocab_size=len(tok) + 3)
    assert automaton.vocab_size == len(tok) + 3
    for row in walk(automaton, len(tok) + 3, tok.eos_token_id, seed=2, steps=200):
        lines = tok.decode(row).split("\n")
        assert [line[0] + line[-1] for line in lines] == ["<>", "<>"]
        assert all(list(json.loads(line[1:-1])) == ["name", "age", "mood", "tags"] for line in lines)


def test_messages_name_the_expression(tok):
    for name, expected in (("the calls", "the calls matches no text"), (None, "the grammar matches no text")):
        with pytest.raises(InputError, match=expected):
            TokenAutomaton.from_expression(NOTHING, tok, **({} if name is None else {"name": name}))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_decision_matches_outlines_core(tok, pattern):
    """The reference is outlines-core's index, anchored because otherwise it stops at the shortest match."""
    texts: dict[bytes, list[int]] = {b"\0\0": [len(tok)]}
    for index, text in enumerate(tok.token_bytes()):
        if text:
            texts.setdefault(text, []).append(index)
    eos = tok.eos_token_id
    ours = pattern.replace(r"\w", "[0-9A-Za-z_]")  # as in ECMAScript
    library = outlines_core.Index(rf"\x00\x00(?:{ours})\z|", outlines_core.Vocabulary(eos, texts))
    automaton, rng = automaton_of(pattern, tok), np.random.default_rng(3)
    for _ in range(6):
        theirs = library.get_next_state(library.get_initial_state(), len(tok))
        state = automaton.begin(1)
        for _ in range(8):
            may = np.flatnonzero(np.asarray(allowed(automaton, state, marks(len(tok), eos)))[0])
            expected = library.get_transitions()[theirs]
            assert may.tolist() == sorted(token for token in expected if token < len(tok))
            choices = may[may != eos]
            assert bool(exhausted(automaton, state)[0]) == (choices.size == 0)
            if not choices.size:
                break
            token = rng.choice(choices)
            theirs = library.get_next_state(theirs, int(token))
            state = push(automaton, state, jnp.asarray([token], jnp.int32), None)


def test_tokens_may_be_parts_of_a_character(tok):
    automaton = automaton_of("é👋?", tok)
    state = automaton.begin(1)
    for token in [tok.token_bytes().index(bytes([byte])) for byte in "é👋".encode()]:
        assert bool(allowed(automaton, state, None)[0, token])
        state = push(automaton, state, jnp.asarray([token], jnp.int32), None)
    assert automaton.accepting[state].tolist() == [True]
    assert automaton.exhausted(state).tolist() == [True]
    half = automaton.push(automaton.begin(1), jnp.asarray([tok.token_bytes().index(b"\xc3")], jnp.int32), None)
    assert automaton.accepting[half].tolist() == [False]


def test_eos_is_allowed_only_in_accepting_states(tok):
    automaton, size = automaton_of("ab?", tok), len(tok)
    a, b = (tok.encode(text)[0] for text in "ab")
    eos = marks(size, 2, 7)
    start = automaton.begin(3)
    assert np.flatnonzero(np.asarray(allowed(automaton, start, eos))[0]).tolist() == sorted(
        i for i, text in enumerate(tok.token_bytes()) if text in (b"a", b"ab")
    )
    state = push(automaton, start, jnp.asarray([a, b, 2], jnp.int32), eos)
    assert state.tolist()[1:] == [-1, int(start[0])]
    may = np.asarray(allowed(automaton, state, eos))
    assert may[0, [2, 7, b]].tolist() == [True, True, True]
    assert not may[1].any()
    assert not np.asarray(allowed(automaton, state, None))[0, 2]
    after = push(automaton, state, jnp.asarray([7, a, a], jnp.int32), eos)
    assert after.tolist() == [int(state[0]), -1, int(state[0])]
    end = push(automaton, state, jnp.asarray([b, 2, a], jnp.int32), eos)
    assert exhausted(automaton, end).tolist() == [True, True, False]
    per_row = jnp.stack([marks(size), marks(size, b), marks(size, 2)])
    may = np.asarray(allowed(automaton, jnp.full(3, state[0]), per_row))
    assert may[:, [2, b]].tolist() == [[False, True], [False, True], [True, True]]
    after = push(automaton, jnp.full(3, state[0]), jnp.full(3, b, jnp.int32), per_row)
    assert after.tolist() == [int(end[0]), int(state[0]), int(end[0])]


def test_eos_token_is_not_matched_as_text(tok):
    automaton = automaton_of("ab?", tok)
    a = tok.encode("a")[0]
    assert not np.asarray(allowed(automaton, automaton.begin(1), marks(len(tok), a)))[0, a]


@pytest.mark.slow
@pytest.mark.parametrize("eos_of_rows", [False, True])
def test_stacked_automata_equal_single_ones(tok, eos_of_rows):
    single = [automaton_of(grammar, tok) for grammar in ("(yes|no)!", SCHEMA, "[0-9]{1,3}")]
    order = [2, 0, 1, 0]
    stacked = TokenAutomaton.stack([single[i] for i in order])
    assert stacked.start.shape == (4,)
    assert stacked.start[1] == stacked.start[3]
    eos = marks(len(tok), tok.eos_token_id)
    eos = jnp.broadcast_to(eos, (8, len(tok))) if eos_of_rows else eos
    one = eos[0] if eos_of_rows else eos
    rng = np.random.default_rng(0)
    state, states = stacked.begin(8), [single[i].begin(1) for i in order for _ in range(2)]
    for _ in range(8):
        may = np.asarray(allowed(stacked, state, eos))
        tokens = np.zeros(8, np.int32)
        for row in range(8):
            automaton = single[order[row // 2]]
            np.testing.assert_array_equal(may[row], np.asarray(allowed(automaton, states[row], one))[0])
            assert bool(exhausted(stacked, state)[row]) == bool(exhausted(automaton, states[row])[0])
            tokens[row] = rng.choice(np.flatnonzero(may[row]))
            states[row] = push(automaton, states[row], jnp.asarray(tokens[row : row + 1]), one)
        state = push(stacked, state, jnp.asarray(tokens), eos)
    again = TokenAutomaton.stack([stacked, single[0]])
    assert again.start.shape == (5,)


def test_bad_stacks_are_refused(tok):
    with pytest.raises(InputError, match="no automata"):
        TokenAutomaton.stack([])
    automaton = automaton_of("a", tok)
    with pytest.raises(InputError, match=r"\[1024, 1030\]"):
        TokenAutomaton.stack([automaton, automaton_of("a", tok, vocab_size=1030)])
    with pytest.raises(InputError, match="3 rows are not a multiple of the 2 prompts"):
        TokenAutomaton.stack([automaton, automaton]).begin(3)
    assert automaton.begin(3).shape == (3,)


WALK = ("(yes|no)!", SCHEMA, "[0-9]{1,3}", "[a-d]{2,6}")


def test_adding_rows_does_not_change_how_a_row_continues(tok):
    first, second, third, fourth = (automaton_of(grammar, tok) for grammar in WALK)
    eos, rng = marks(len(tok), tok.eos_token_id), np.random.default_rng(1)
    remaining = jnp.asarray([60], jnp.int32)
    table = TokenAutomaton.stack([second], capacity=(2048, 8192, 256, 8))
    state, alone = table.begin(1), second.begin(1)
    step = jax.jit(lambda table, state: table.allowed(state, eos, remaining))
    for number in range(30):
        if number in (7, 11):
            others = {7: TokenAutomaton.stack([first, third]), 11: fourth}[number]
            before, shapes = table, jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), table)
            table, start = table.add(others)
            assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), table) == shapes
            assert start.shape == others.start.shape
            np.testing.assert_array_equal(table.start, before.start)
            for at, own in zip(np.atleast_1d(start), [first, third] if number == 7 else [fourth], strict=True):
                np.testing.assert_array_equal(step(table, jnp.asarray([at])), step(own, own.begin(1)))
        may = np.asarray(step(table, state))
        np.testing.assert_array_equal(may, np.asarray(step(second, alone)))
        np.testing.assert_array_equal(exhausted(table, state), exhausted(second, alone))
        tokens = jnp.asarray([rng.choice(np.flatnonzero(may[0] & ~np.asarray(eos)))], jnp.int32)
        state, alone = push(table, state, tokens, eos), push(second, alone, tokens, eos)
        np.testing.assert_array_equal(state, alone)
    assert state[0] >= 0


def test_adding_compiles_nothing(tok):
    traces = []

    @jax.jit
    def step(table, start, tokens, eos):
        traces.append(None)
        state = table.push(start, tokens, eos)
        return table.allowed(state, eos), table.exhausted(state)

    tokens, eos = np.asarray([5], np.int32), np.zeros(len(tok), bool)
    table = TokenAutomaton.stack([TokenAutomaton.from_prefixes([""], tok)], capacity=(2048, 8192, 256, 8))
    assert np.asarray(step(table, table.start, tokens, eos)[0]).all()  # this prefix allows everything
    with compilations() as count:
        for grammar in WALK:
            table, start = table.add(automaton_of(grammar, tok))
            step(table, np.asarray(start)[None], tokens, eos)
    assert (count[0], len(traces)) == (0, 1)


def test_a_start_state_without_predecessors_is_not_overwritten(tok):
    """In an automaton built from prefixes, the start state can have the highest index."""
    parts = [TokenAutomaton.from_prefixes(["a"], tok), automaton_of("b", tok), automaton_of("", tok)]
    table, starts = TokenAutomaton.stack(parts[:1], capacity=(64, 256, 256, 8)), []
    for part in [*parts, *parts[::-1]]:
        table, start = table.add(part)
        starts.append(int(np.ravel(start)[0]))
    assert len(set(starts)) == 6
    for part, start in zip([*parts, *parts[::-1]], starts, strict=True):
        np.testing.assert_array_equal(allowed(table, jnp.asarray([start]), None), allowed(part, part.begin(1), None))


def test_insufficient_capacity_is_refused(tok):
    first, second = automaton_of("[0-9]{3}x", tok), automaton_of("[a-z]{5}", tok)
    table = TokenAutomaton.stack([first], capacity=(8, 64, 64, 2))
    assert table.capacity == (8, 64, 64, 2)
    with pytest.raises(
        InputError, match=r"need 1\d states, \d+ transitions, .* 2 automata .* but .* is 8, 64, 64, 2 and 64: stack"
    ):
        table.add(second)
    for capacity in ((3, 64, 64, 2), (8, 1, 64, 2), (8, 64, 1, 2), (8, 64, 64, 0)):
        with pytest.raises(InputError, match=f"{', '.join(map(str, capacity))} and 64: stack with a larger capacity"):
            TokenAutomaton.stack([first], capacity=capacity)
    with pytest.raises(TypeError, match=r"capacity must be \(states, transitions, .* got \(1024, 256\)"):
        TokenAutomaton.stack([first], capacity=(1024, 256))
    with pytest.raises(InputError, match=r"\[1024, 1030\]"):
        table.add(automaton_of("a", tok, vocab_size=1030))


def test_rows_have_space_for_an_eighth_of_the_classes(tok):
    """Each letter leads to its own state, so the first state has a transition for each letter."""
    letters = string.ascii_letters + string.digits + string.punctuation
    automaton = automaton_of("|".join(f"{re.escape(letter)}{i:03}" for i, letter in enumerate(letters)), tok)
    capacity = Capacity(512, 1024, 256, 2)
    assert automaton.longest_row > capacity.width == 64
    with pytest.raises(InputError, match=r"and 9\d transitions in a state, but .* and 64: stack with a larger"):
        TokenAutomaton.stack([automaton], capacity=capacity)
    TokenAutomaton.stack([automaton], capacity=capacity._replace(classes=1024))


def test_construction_is_bounded(tok, monkeypatch):
    monkeypatch.setattr(token_table, "LARGEST_TABLE", 1000)
    with pytest.raises(InputError, match="has 201 states, with too many kinds of tokens: at most 1000 transitions and"):
        automaton_of("[a-z]{200}", tok)
    monkeypatch.setattr(token_table, "MOST_WORK", 10)
    with pytest.raises(InputError, match="too many kinds of tokens"):
        automaton_of("[a-z]{3}", tok)
    monkeypatch.undo()
    monkeypatch.setattr(token_table, "MOST_CLASSES", 10)
    with pytest.raises(InputError, match="and 10 kinds are supported"):
        automaton_of("(a1|b2|c3|d4|e5|f6)", tok)


def test_states_of_a_bounded_repetition_share_their_rows(tok):
    short, long = (automaton_of(f"a[^x]{{1,{most}}}b", tok).needs for most in (300, 900))
    assert long.states - short.states > 5 * 600
    assert long.transitions - short.transitions < 600


@pytest.mark.parametrize("seed", [0, 1, *slow(*range(2, 8))])
def test_transitions_are_those_of_a_matrix(seed):
    """Random transitions, some with large steps, are stored and read back."""
    rng = np.random.default_rng(seed)
    states, kinds, size = int(rng.integers(1, 3000 if seed < 2 else 40)), int(rng.integers(1, 80)), 300
    table = rng.integers(-1, states, (states, kinds)) if seed % 2 else rng.choice([-1, 0, states - 1], (states, kinds))
    table[:, 0] = np.minimum(np.arange(states) + 1, states - 1)  # every state is reachable and leads to the last
    classes, accepting = rng.integers(0, kinds, size), np.arange(states) == states - 1
    automaton = of_matrix(classes, table, accepting, 0)
    after_classes, after = matrix(automaton)
    np.testing.assert_array_equal(after[:, after_classes], table[:, classes])
    rows = jnp.asarray(rng.integers(-1, states, 16), jnp.int32)
    state, here = np.asarray(rows), np.maximum(rows, 0)
    following = np.where(state[:, None] >= 0, table[here][:, classes], -1)
    np.testing.assert_array_equal(allowed(automaton, rows, None), following >= 0)
    tokens = jnp.asarray(rng.integers(0, size, 16), jnp.int32)
    np.testing.assert_array_equal(push(automaton, rows, tokens, None), following[np.arange(16), tokens])
    shortest = np.asarray(automaton.shortest)
    for most in (1, 2, 3):
        may = np.asarray(automaton.allowed(rows, None, jnp.full(16, most, jnp.int32)))
        in_time = (shortest[following] < most) | (shortest[here] > most)[:, None]
        np.testing.assert_array_equal(may, (following >= 0) & in_time)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("most", [0, 1, 8, 9, 30])
def test_ranges_of_classes_are_expanded(most, shared):
    rng = np.random.default_rng(most)
    classes = rng.integers(0, 100, (1 if shared else 3, 500)).astype(np.uint16)
    low = rng.integers(0, 100, (3, 30)).astype(np.int32)
    high = low + rng.integers(-1, 5, low.shape).astype(np.int32)
    count = np.asarray([most, min(most, 2), 0], np.int32)
    found = np.asarray(within(*map(jnp.asarray, (classes, low, high, count))))
    for row in range(3):
        own = classes[0 if shared else row]
        expected = [any(low[row, i] <= one <= high[row, i] for i in range(count[row])) for one in own]
        np.testing.assert_array_equal(found[row], expected)


def test_automaton_without_rows(tok):
    automaton, none, size = automaton_of("yes|no", tok), jnp.zeros(0, jnp.int32), len(tok)
    for eos in (None, marks(size, 2), jnp.zeros((0, size), bool)):
        for remaining in (None, none):
            assert automaton.allowed(none, eos, remaining).shape == (0, size)
            assert automaton.exhausted(none, remaining).shape == (0,)
        assert automaton.push(none, none, eos).shape == (0,)


@pytest.mark.parametrize(("size", "width"), [(1024, 64), (1000, 64), (2048, 128), (2048, 129), (700, 1)])
def test_parts_are_the_same_in_blocks_and_slices(size, width):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.integers(0, 9999, size).astype(dtype)) for dtype in (np.uint16, np.int16, np.int32)]
    first = np.append([0, size - width], rng.integers(0, size - width + 1, 20)).astype(np.int32)
    for form in (row_parts._as_blocks, row_parts._as_slices):
        for x, parts in zip(arrays, form(width, first, *arrays), strict=True):
            assert parts.dtype == jnp.int32
            np.testing.assert_array_equal(parts, [x[at : at + width] for at in first])


def test_adjacent_ranges_are_joined(tok):
    """Inside a string, most tokens are allowed, but they lead to different states."""
    automaton = automaton_of('"[a-z]{0,60}"', tok)
    assert 2 * np.asarray(automaton.spans).max() < np.asarray(automaton.count).max()


def test_final_rows_have_no_ranges(tok):
    automaton = automaton_of("[a-z]+", tok)
    state = automaton.push(automaton.begin(1), jnp.asarray(tok.encode("a")), None)
    rows, remaining = jnp.asarray([state[0], state[0], -1]), jnp.asarray([9, 0, 9])
    assert (np.asarray(automaton._allowed(rows, remaining)[2]) > 0).tolist() == [True, False, False]


@pytest.mark.slow
def test_padding_does_not_change_decisions(tok):
    automaton = automaton_of(PATTERNS[0], tok)
    assert automaton.capacity[:2] == (256, 512) != automaton.needs[:2]
    larger = TokenAutomaton.stack([automaton], capacity=Capacity(1000, 3000, 1000, 3))
    eos, every = marks(len(tok), 2), jnp.arange(automaton.states, dtype=jnp.int32)
    np.testing.assert_array_equal(automaton.allowed(every, eos), larger.allowed(every, eos))
    np.testing.assert_array_equal(automaton.exhausted(every), larger.exhausted(every))
    assert TokenAutomaton.stack([automaton]).capacity == automaton.capacity


def test_a_new_grammar_of_the_same_size_compiles_nothing(tok):
    @jax.jit
    def step(automaton, tokens, eos):
        state = automaton.push(automaton.begin(2), tokens, eos)
        return automaton.allowed(state, eos), automaton.exhausted(state)

    tokens, eos = np.asarray([5, 6], np.int32), np.zeros(len(tok), bool)
    jax.block_until_ready(step(automaton_of("[a-z]{3}", tok), tokens, eos))
    with compilations() as count:
        for pattern in ("(yes|no)!", "[0-9]+", "é*"):
            jax.block_until_ready(step(automaton_of(pattern, tok), tokens, eos))
    assert count[0] == 0


def small_tokenizer(*pieces: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {"eos_token": "<end>"})


def test_no_token_leads_to_a_dead_end():
    tok = small_tokenizer("a", "b", "ab", "", "cd")
    automaton = TokenAutomaton.from_regex("abc|ba?|abab", tok)
    first = np.asarray(automaton.allowed(automaton.begin(1), None))[0]
    assert first.tolist() == [True, True, True, False, False, False]
    then = automaton.push(automaton.begin(1), jnp.asarray([2], jnp.int32), None)
    assert np.asarray(automaton.allowed(then, None))[0].tolist() == [True, False, True, False, False, False]
    automaton = TokenAutomaton.from_regex("abc|b", tok)
    assert np.asarray(automaton.allowed(automaton.begin(1), None))[0].tolist() == [False, True, *[False] * 4]
    with pytest.raises(InputError, match="tokens cannot form any text of the grammar"):
        TokenAutomaton.from_regex("abc|x", tok)


def test_ids_beyond_the_tokenizer(tok):
    automaton = automaton_of("[^x]*", tok, vocab_size=1100)
    may = np.asarray(automaton.allowed(automaton.begin(1), marks(1100, 1050)))[0]
    assert may.shape == (1100,)
    assert np.flatnonzero(may[1024:]).tolist() == [26]
    assert not may[:3].any()
    few = automaton_of("[^x]*", tok, vocab_size=1000)
    np.testing.assert_array_equal(few.allowed(few.begin(1), None)[0], may[:1000])
    for method in (automaton.allowed, lambda state, eos: automaton.push(state, state, eos)):
        with pytest.raises(InputError, match="vocab_size=1024"):
            method(automaton.begin(1), marks(1024))


def test_special_tokens_are_not_text():
    tok = byte_level()
    automaton = automaton_of(r"(<\|end\|>|h)", tok)
    may = np.flatnonzero(np.asarray(automaton.allowed(automaton.begin(1), None))[0])
    assert [tok.token_bytes()[i] for i in may] == [b"<", b"h"]


def test_leading_sentencepiece_space_must_match():
    tok = llama()
    first = {}
    for pattern in ("hell a", " ?hell a"):
        automaton = automaton_of(pattern, tok)
        may = np.flatnonzero(np.asarray(automaton.allowed(automaton.begin(1), None))[0])
        first[pattern] = {tok.backend.id_to_token(int(i)) for i in may}
    assert first["hell a"] == {"h", "he", "hell", "<0x68>"}
    assert first[" ?hell a"] == first["hell a"] | {"▁", "▁hell", "<0x20>"}
    for row in walk(automaton_of(" ?(hell|é)( a)?", tok), len(tok), 2, seed=0):
        assert re.fullmatch("(hell|é)( a)?", tok.decode(row))


def test_wrong_types_are_refused(tok):
    with pytest.raises(TypeError, match=r"jaxgen\.Tokenizer"):
        TokenAutomaton.from_regex("a", tok.backend)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a pattern must be a str"):
        TokenAutomaton.from_regex(3, tok)  # type: ignore[arg-type]


def test_patterns_with_the_qwen_tokenizer(data):
    tok = Tokenizer.from_pretrained(data / "tokenizers" / "qwen2.5-instruct")
    automaton = TokenAutomaton.from_json_schema(SCHEMA, tok, vocab_size=151936)
    assert automaton.vocab_size == 151936
    assert automaton.needs.transitions < 2**11
    for row in walk(automaton, 151936, tok.eos_token_id, seed=4, rows=2, steps=40):
        value = json.loads(tok.decode(row))
        assert len(value["name"]) <= 12
        assert value["mood"] in ("calm", "très gai")
    prompt = tok.encode('{"name": "Zoë 👋", "age": -3, "mood": "très gai", "tags": [true, false]}')
    state = automaton.begin(1)
    for token in prompt:
        assert bool(allowed(automaton, state, None)[0, token])
        state = push(automaton, state, jnp.asarray([token], jnp.int32), None)
    assert exhausted(automaton, state).tolist() == [True]
    assert automaton.accepting[state].tolist() == [True]


class TestPrefixes:
    def test_allowed_tokens_spell_the_prefix(self):
        tokenizer = byte_level()
        table = tokenizer.token_bytes()
        prefixes = [b"hello", b" he", b"", b"hell"]
        automaton = TokenAutomaton.from_prefixes(prefixes, tokenizer, vocab_size=len(table) + 2)
        for prefix, start in zip(prefixes, automaton.start, strict=True):
            may_follow = np.asarray(allowed(automaton, start[None], None))[0]
            for token, text in enumerate([*table, None, None]):
                fits = bool(text) and (text.startswith(prefix) or prefix.startswith(text))
                assert may_follow[token] == (fits or not prefix), (prefix, text)

    def test_tokens_spell_the_prefix_together(self):
        tokenizer = byte_level()
        automaton = TokenAutomaton.from_prefixes(["hello"], tokenizer)
        state = automaton.start
        for text, complete in (("hell", False), ("o", True), ("z", True)):
            state = push(automaton, state, jnp.asarray(tokenizer.encode(text)), None)
            assert bool(automaton.accepting[state[0]]) == complete
            assert int(automaton.shortest[state[0]]) == (0 if complete else 1)
        assert int(push(automaton, automaton.start, jnp.asarray(tokenizer.encode("z")), None)[0]) == -1

    def test_no_token_leads_to_a_prefix_that_cannot_be_finished(self):
        model = models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "abc": 3}, merges=[("a", "b")])
        tokenizer = Tokenizer(tokenizers.Tokenizer(model))
        tokenizer.backend.decoder = decoders.ByteLevel()
        automaton = TokenAutomaton.from_prefixes(["abc"], tokenizer)
        assert np.flatnonzero(allowed(automaton, automaton.start, None)[0]).tolist() == [3]
        with pytest.raises(InputError, match="b'cab' cannot be written"):
            TokenAutomaton.from_prefixes(["cab"], tokenizer)

    def test_ids_outside_the_models_vocabulary_are_left_out(self):
        tokenizer = byte_level()
        automaton = TokenAutomaton.from_prefixes(["hell"], tokenizer, vocab_size=256)
        assert automaton.vocab_size == 256
        assert np.flatnonzero(allowed(automaton, automaton.start, None)[0]).tolist() == tokenizer.encode("h")

    @pytest.mark.parametrize("prefixes", ["hello", b"hello", [3], None, {"hello"}, [["hello"]]])
    def test_prefixes_must_be_a_list_of_texts(self, prefixes):
        with pytest.raises(TypeError, match="a list of texts, one per prompt, got"):
            TokenAutomaton.from_prefixes(prefixes, byte_level())

    @pytest.mark.parametrize(
        ("prefixes", "words"),
        [
            (["\ud800"], "a prefix is not valid Unicode"),
            (["ab" * 10**6], "the prefixes have 2,000,000 bytes, more than 30,000"),
            ([f"prompt {i} " * 100 for i in range(2000)], "more than 30,000"),
        ],
    )
    def test_impossible_prefixes_are_refused(self, prefixes, words):
        with bounded(), pytest.raises(InputError, match=words):
            TokenAutomaton.from_prefixes(prefixes, byte_level())

    def test_a_long_prefix(self):
        automaton = TokenAutomaton.from_prefixes(["hello " * 1000], byte_level())
        assert int(automaton.shortest[automaton.start[0]]) > 1000
