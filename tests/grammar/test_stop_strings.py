import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models

from jaxgen.core.grammar.stop_strings import StopStrings
from jaxgen.core.text.token_bytes import BYTE_OF
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import ConfigError, InputError
from tests.support.compilations import compilations
from tests.support.tokenizers import byte_level, llama

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "seed0" / "441" / "stop_strings.json").read_text("utf-8"))
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
DECODERS = {"byte_level": decoders.ByteLevel(), "sentencepiece": decoders.Sequence(SENTENCEPIECE)}


def tokenizer_of(tokens: list[str], special=(), decoder: str = "byte_level") -> Tokenizer:
    """Return a tokenizer with exactly these tokens, in this order."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = DECODERS[decoder]
    backend.add_special_tokens(list(special))
    return Tokenizer(backend)


def tokenizer_of_bytes(tokens: list[bytes]) -> Tokenizer:
    return tokenizer_of(["".join(CHARACTER_OF[byte] for byte in token) for token in tokens])


@jax.jit
def run(stop: StopStrings, ids, prompt_length):
    """Return bool[rows, W]: whether each row stops at each column. Within the prompt, this is False."""

    def step(state, inputs):
        column, tokens = inputs
        following, ends = stop.push(state, tokens)
        pushed = column >= prompt_length
        return jnp.where(pushed, following, state), ends & pushed

    columns = jnp.arange(ids.shape[1], dtype=jnp.int32)
    start = jnp.broadcast_to(stop.start, prompt_length.shape)
    return jax.lax.scan(step, stop.begin(start, ids, prompt_length), (columns, ids.T))[1].T


def stops(stop: StopStrings, rows: list[list[int]], prompts: list[int], width: int = 48) -> list[list[int]]:
    """Return the numbers of tokens after which each row stops. Padding has the id -1 and no text."""
    ids = np.full((len(rows), width), -1, np.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    ends = np.asarray(run(stop, jnp.asarray(ids), jnp.asarray(prompts, jnp.int32)))
    return [(np.flatnonzero(row) + 1).tolist() for row in ends]


def expected(strings: list[str], tokens: list[bytes], prompt: int = 0) -> list[int]:
    """Return every n for which a stop string ends within the n-th token, according to Python's `endswith`."""
    result = []
    for n in range(prompt + 1, len(tokens) + 1):
        before, text = len(b"".join(tokens[: n - 1])), b"".join(tokens[:n])
        ends = (before + 1 + i for i in range(len(text) - before))
        if any(text[:end].endswith(tuple(string.encode() for string in strings)) for end in ends):
            result.append(n)
    return result


@pytest.mark.parametrize(
    ("pieces", "stop"),
    [
        *[(text.split(), True) for text in ("st op", "stop", "st opera", "sto pper", "las topper", "s to pped")],
        *[(text.split(), False) for text in ("stop at", "st op at", "st opera tion")],
    ],
)
def test_examples_of_transformers(pieces, stop):
    names = ["st", "op", "stop", "opera", "sto", "pper", "las", "topper", "s", "to", "pped", "at", "tion"]
    table = StopStrings.build(["stop"], tokenizer_of(names))
    assert (len(pieces) in stops(table, [[names.index(piece) for piece in pieces]], [0])[0]) == stop


LETTERS = [b"a", b"b", *(bytes([byte]) for byte in "é".encode())]
TOKENS = [*LETTERS, *(x + y for x in LETTERS for y in LETTERS), *(x + y + x for x in LETTERS for y in LETTERS)]
TOKENS += [b"ab" * 150, b"aab\xc3" * 3]
MIXED = tokenizer_of_bytes(TOKENS)
ROW = st.lists(st.integers(0, len(TOKENS) - 1), max_size=12)
STRING = st.text("abé", min_size=1, max_size=7)


def cut(draw, text: bytes) -> list[int]:
    """Return the ids of a text that is randomly cut into tokens of one or two bytes."""
    ids = []
    while text:
        size = draw(st.integers(1, min(2, len(text))))
        ids.append(TOKENS.index(text[:size]))
        text = text[size:]
    return ids


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(STRING, min_size=1, max_size=5), st.tuples(ROW, ROW, ROW), st.data())
def test_any_strings_and_any_tokens(strings, rows, data):
    rows = [row + cut(data.draw, data.draw(st.sampled_from(strings)).encode()) for row in rows]
    prompts = [data.draw(st.integers(0, len(row))) for row in rows]
    wanted = [expected(strings, [TOKENS[i] for i in row], n) for row, n in zip(rows, prompts, strict=True)]
    assert stops(StopStrings.build(strings, MIXED), rows, prompts) == wanted


@pytest.mark.parametrize("kind", sorted(GOLDEN))
def test_results_match_transformers(kind):
    golden = GOLDEN[kind]
    tokenizer = tokenizer_of(golden["tokens"], golden["special"], kind)
    for number, case in enumerate(golden["cases"]):
        table = StopStrings.build(case["stop_strings"], tokenizer)
        prompts = [0, number % len(case["ids"])]
        wanted = [[n for n in case["stops"] if n > prompt] for prompt in prompts]
        assert stops(table, [case["ids"]] * 2, prompts) == wanted, f"case {number}"


class TestText:
    def test_characters_split_over_tokens(self):
        tok = byte_level()
        ids = tok.encode("h€é")
        assert len(ids) == 6
        assert stops(StopStrings.build(["€"], tok), [ids], [0]) == [[4]]
        assert stops(StopStrings.build(["é"], tok), [ids], [3]) == [[6]]
        # "é" is C3 A9; "Ã" begins with C3 and "©" ends with A9, but these bytes are not adjacent
        assert stops(StopStrings.build(["é"], tok), [tok.encode("Ã©")], [0]) == [[]]

    def test_text_of_a_special_token_is_its_name(self):
        tok = byte_level()
        ids = tok.encode("he<|im_end|>he") + tok.encode("<|im_end|>", split_special_tokens=True)
        assert tok.token_bytes()[ids[1]] is None
        assert stops(StopStrings.build("<|im_end|>", tok), [ids], [0]) == [[2, len(ids)]]
        assert stops(StopStrings.build(["e<|im_"], tok), [ids], [0]) == [[2, len(ids) - 5]]

    def test_first_sentencepiece_token_keeps_its_space(self):
        tok = llama()
        ids = tok.encode("hell a", add_special_tokens=False)
        assert stops(StopStrings.build([" hell"], tok), [ids], [0]) == [[1]]
        assert stops(StopStrings.build(["ll a"], tok), [ids], [1]) == [[2]]

    def test_byte_fallback(self):
        tok = llama()
        ids = tok.encode("h€", add_special_tokens=False)
        assert stops(StopStrings.build(["€"], tok), [ids], [0]) == [[len(ids)]]

    def test_ids_without_a_token_have_no_text(self):
        tok = byte_level()
        h, e = tok.encode("h")[0], tok.encode("e")[0]
        rows = [[h, 300, e], [h, -1, e], [h, 10**9, e], [300, h, e]]
        for vocab_size in (None, 301, 1000):
            table = StopStrings.build(["he"], tok, vocab_size)
            assert stops(table, rows, [0, 0, 2, 1]) == [[3]] * 4

    def test_tokens_outside_the_models_vocabulary_are_ignored(self):
        tok = byte_level()
        hell = tok.encode("hell")
        assert len(hell) == 1
        assert stops(StopStrings.build(["hell"], tok), [hell], [0]) == [[1]]
        assert stops(StopStrings.build(["hell"], tok, 256), [hell, tok.encode("h")], [0, 0]) == [[], []]


class TestPrompt:
    def test_stop_strings_that_end_in_the_prompt_do_not_count(self):
        tok = tokenizer_of_bytes([b"a", b"b", b"ab", b"ba"])
        table = StopStrings.build(["ab"], tok)
        assert stops(table, [[0, 1, 1], [0, 1, 1], [2, 0, 1]], [0, 2, 1]) == [[2], [], [3]]

    def test_prompt_is_read_up_to_its_length(self):
        tok = byte_level()
        table = StopStrings.build(["hell ", "€", "a" * 70], tok)
        rng = np.random.default_rng(0)
        ids = rng.integers(0, 260, (5, 12)).astype(np.int32)
        ids[0, :2], ids[1, :1], ids[2, :2] = tok.encode("hehe"), tok.encode("hell"), tok.encode("€")[:2]
        length = np.array([2, 1, 2, 0, 12], np.int32)
        begin = jax.jit(StopStrings.begin)
        start = jnp.zeros(5, jnp.int32)
        narrow = begin(table, start, ids, length)
        other = np.where(np.arange(12)[None] < length[:, None], ids, rng.integers(0, 260, ids.shape)).astype(np.int32)
        wide = np.pad(other, ((0, 0), (0, 500)), constant_values=3)
        np.testing.assert_array_equal(begin(table, start, wide, length), narrow)
        assert np.all(np.asarray(narrow)[:3] > 0)
        assert np.asarray(narrow)[3] == 0

    def test_prompts_with_long_and_with_many_tokens(self):
        tok = tokenizer_of_bytes([b"a", b"b" * 1000, b"a" * 99 + b"c", b"c"])
        string = "b" * 30 + "a" * 99 + "c"
        table = StopStrings.build([string], tok)
        row = [0] * 5 + [1] + [0] * 99 + [3]
        assert stops(table, [row, row, row[1:]], [0, 105, 50], width=120) == [[106], [106], [105]]
        assert stops(table, [[1, 2], [1, 0, 2]], [1, 2], width=120) == [[2], []]


def test_strings_that_contain_each_other():
    tok = tokenizer_of_bytes([b"a", b"b", b"c", b"bc"])
    strings = ["abc", "bc", "ab", "b", "abc", "cab"]
    ids = [2, 0, 3, 0, 0, 2, 1]
    for some in (strings, strings[::-1], strings[:2], strings[4:]):
        wanted = expected(some, [[b"a", b"b", b"c", b"bc"][i] for i in ids])
        assert stops(StopStrings.build(some, tok), [ids], [0]) == [wanted]
    assert wanted == [3]


def test_rows_are_independent():
    rng = np.random.default_rng(1)
    rows = rng.integers(0, len(TOKENS), (16, 20)).tolist()
    prompts = rng.integers(0, 20, 16).tolist()
    table = StopStrings.build(["ab", "éa", "bb"], MIXED)
    together = stops(table, rows, prompts)
    assert together == [stops(table, [row], [prompt])[0] for row, prompt in zip(rows, prompts, strict=True)]
    assert sum(map(len, together)) > 30


SETS = [["ab"], None, ["éa", "b"], ["ab"], ["ba", "aé", "é"], None]


def form(tree):
    """Return the arrays' shapes and types. If they change, a jitted function is traced again."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


class TestPerPrompt:
    def test_each_row_follows_its_own_strings(self):
        rng = np.random.default_rng(2)
        rows = rng.integers(0, len(TOKENS), (6, 20)).tolist()
        prompts = rng.integers(0, 12, 6).tolist()
        together = stops(StopStrings.build(SETS, MIXED), rows, prompts)
        for found, strings, row, prompt in zip(together, SETS, rows, prompts, strict=True):
            assert found == (expected(strings, [TOKENS[i] for i in row], prompt) if strings else [])
        assert sum(map(len, together)) > 10

    def test_prompts_with_the_same_strings_share_states(self):
        table = StopStrings.build(SETS, MIXED)
        start = table.start.tolist()
        assert start[0] == start[3] != start[2]
        assert start[1] == start[5]
        assert StopStrings.build([["a", "b"], ["b", "a", "b"]], MIXED).start.tolist() == [0, 0]

    def test_state_without_strings_is_never_left(self):
        table = StopStrings.build(SETS, MIXED)
        state = int(table.start[1])
        assert (np.asarray(table.goto)[state] == state).all()
        assert not table.found[state]

    def test_strings_for_all_prompts_share_one_start(self):
        assert StopStrings.build(["a", "b"], MIXED).start.shape == ()
        assert StopStrings.build([["a", "b"]], MIXED).start.shape == (1,)


def test_other_strings_compile_nothing():
    tok = byte_level()
    ids = [tok.encode("hell <|im_end|>")]
    stops(StopStrings.build(["hell"], tok), ids, [0])
    with compilations() as count:
        for strings in (["€"], ["h", "e", " "], ["a" * 63], "<|im_end|>", ["\n\nQuestion:", "</s>", "User:"]):
            stops(StopStrings.build(strings, tok), ids, [0])
    assert count[0] == 0
    larger = StopStrings.build(["a" * 64], tok)
    with compilations() as count:
        stops(larger, ids, [0])
    assert count[0] > 0


def test_tables_are_built_inside_and_outside_jit():
    tok = byte_level()
    ids = jnp.asarray([tok.encode("hell ")])

    @jax.jit
    def inside(ids):
        stop = StopStrings.build(["ell"], tok)
        zero = jnp.zeros(1, jnp.int32)
        return stop.push(stop.begin(zero, ids, zero), ids[:, 0])[1]

    assert inside(ids)[0]
    assert stops(StopStrings.build(["ell"], tok), [ids[0].tolist()], [0]) == [[1]]
    assert inside(ids[:, 1:]).tolist() == [False]


@pytest.mark.slow
def test_stop_strings_with_the_qwen_tokenizer(data):
    tok = Tokenizer.from_pretrained(data / "tokenizers" / "qwen2.5-instruct")
    strings = ["<|im_end|>", "\n\nQuestion:", "。", "stop", "👋"]
    table = StopStrings.build(strings, tok, 151_936)
    texts = [
        "Nonstop Question:\n\nQuestion: a\n\nQuestion",
        "<|im_start|>你好。👋。<|im_end|>",
        "unstoppable👋🏽 st op",
    ]
    rows = [tok.encode(text) for text in texts]
    rows.append(np.random.default_rng(0).integers(0, 151_936, 40).tolist())
    added = {i: token.content.encode() for i, token in tok.backend.get_added_tokens_decoder().items()}
    names = tok.token_bytes()
    known = [[added.get(i) or (names[i] if i < len(names) else b"") for i in row] for row in rows]
    wanted = [expected(strings, row) for row in known]
    assert [len(found) for found in wanted[:3]] == [2, 4, 2]
    assert stops(table, rows, [0] * 4) == wanted


class TestErrors:
    @pytest.mark.parametrize(
        ("strings", "error", "message"),
        [
            ([], ConfigError, "stop_strings must not be empty, .*: leave it out for no stop strings"),
            ("", ConfigError, "stop_strings must not be empty"),
            (["a", ""], ConfigError, "stop_strings must not be empty"),
            ([["a"], []], ConfigError, "stop_strings must not be empty, .*: use None for a prompt without any"),
            ([["a", ""], None], ConfigError, "stop_strings must not be empty"),
            (["a", 3], TypeError, "stop_strings must be a string, a list of strings, or a list .* got .*3"),
            (["a", ["b"]], TypeError, "stop_strings must be a string, a list of strings, or a list .* per prompt"),
            (["a", None], TypeError, "stop_strings must be a string"),
            ([["a"], [["b"]]], TypeError, "stop_strings must be a string"),
            ([["a"], [None]], TypeError, "stop_strings must be a string"),
            (b"a", TypeError, "stop_strings must be a string"),
            (None, TypeError, "stop_strings must be a string"),
            ({"a"}, TypeError, "stop_strings must be a string"),
            (["\ud800"], InputError, "a string of stop_strings is not valid Unicode"),
        ],
    )
    def test_bad_strings_are_refused(self, strings, error, message):
        with pytest.raises(error, match=message):
            StopStrings.build(strings, byte_level())

    def test_impossible_string_is_refused(self):
        with pytest.raises(InputError, match="stop_strings has 'ax'"):
            StopStrings.build(["a", "ax"], tokenizer_of_bytes([b"a", b"b"]))

    def test_wrong_type_of_tokenizer_is_refused(self):
        with pytest.raises(TypeError, match="got str"):
            StopStrings.build(["a"], "qwen")
