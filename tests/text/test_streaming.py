import asyncio
import io
import queue
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import GenerationConfig, generate
from jaxgen.core.text.cleaning import clean_up
from jaxgen.core.text.streaming import (
    AsyncTextIteratorStreamer,
    TextIteratorStreamer,
    TextRowStreamer,
    TextStream,
    TextStreamer,
)
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError
from tests.support.models import model_config, random_params
from tests.support.tokenizers import byte_level, llama

BYTE_LEVEL, LLAMA = byte_level(), llama()
TOKENIZERS = pytest.mark.parametrize("tok", [BYTE_LEVEL, LLAMA], ids=["byte_level", "llama"])
# Some ids are drawn often, so that whole characters, byte runs and clean-up patterns occur by chance.
BYTES = [BYTE_LEVEL.encode(c)[0] for c in " '.,ntsrev"]
EURO = BYTE_LEVEL.encode("€")
ids_of = {
    BYTE_LEVEL: st.lists(st.integers(0, 262) | st.sampled_from(BYTES + EURO), max_size=30),
    LLAMA: st.lists(st.integers(0, 300) | st.integers(255, 290), max_size=30),
}


@pytest.fixture(scope="module")
def qwen(data) -> Tokenizer:
    return Tokenizer.from_pretrained(data / "tokenizers" / "qwen2.5-instruct")


def pieces(tok: Tokenizer, ids, **kwargs) -> list[str]:
    stream = TextStream(tok, **kwargs)
    return [*(stream.put(i) for i in ids), stream.end()]


@pytest.mark.slow
@TOKENIZERS
@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans(), st.booleans())
def test_pieces_join_to_the_whole_text(tok, draw, skip, clean):
    ids = draw.draw(ids_of[tok])
    joined = "".join(pieces(tok, ids, skip_special_tokens=skip, clean_up_tokenization_spaces=clean))
    assert joined == tok.decode(ids, skip, clean)


@TOKENIZERS
@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_valid_text_never_shows_half_a_character(tok, text):
    text = text.replace("\ufffd", "").replace("▁", " ")
    ids = tok.encode(text, split_special_tokens=True)
    out = pieces(tok, ids)
    assert "".join(out) == text
    assert not any("\ufffd" in piece for piece in out)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 151_935), max_size=20), st.booleans(), st.booleans())
def test_qwen_pieces_join_to_the_whole(qwen, ids, skip, clean):
    joined = "".join(pieces(qwen, ids, skip_special_tokens=skip, clean_up_tokenization_spaces=clean))
    assert joined == qwen.decode(ids, skip, clean)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_qwen_valid_text_never_shows_half_a_character(qwen, text):
    ids = qwen.encode(text.replace("\ufffd", ""), split_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces(qwen, ids))


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from([" ", " ", "'", ".", "n", "n't", "'m", "'s", "'ve", "'re", "x"]), max_size=16))
def test_clean_up_in_pieces(parts):
    text = "".join(parts)
    out = pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text), clean_up_tokenization_spaces=True)
    assert "".join(out) == clean_up(text)


def test_characters_are_returned_when_complete():
    assert pieces(BYTE_LEVEL, BYTE_LEVEL.encode("aé€👋b")) == [
        *"a",
        "",
        "é",
        "",
        "",
        "€",
        "",
        "",
        "",
        "👋",
        "b",
        "",
    ]


def test_byte_tokens_are_held_back_until_their_run_ends():
    ids = LLAMA.encode("é€ a", add_special_tokens=False)
    assert pieces(LLAMA, ids) == ["", "", "", "", "", "", "é€ a", ""]
    assert pieces(LLAMA, ids[:4]) == ["", "", "", "", "\ufffd" * 3]


def test_incomplete_character_is_returned_at_the_end():
    assert pieces(BYTE_LEVEL, BYTE_LEVEL.encode("a€")[:-1]) == ["a", "", "", "\ufffd"]


def test_only_the_first_space_is_stripped():
    ids = LLAMA.encode("a hell  a")
    assert "".join(pieces(LLAMA, ids)) == "a hell  a"
    space = LLAMA.encode(" ", add_special_tokens=False)
    for between in ([2], [2] * 9, space, space * 9, [2, *space] * 9):
        assert "".join(pieces(LLAMA, ids + between + ids)) == LLAMA.decode(ids + between + ids)


def test_stream_accepts_several_ids_and_can_be_reused():
    stream = TextStream(LLAMA)
    with pytest.raises(InputError, match="-1"):
        stream.put([-1])
    for _ in range(2):
        assert stream.put(jnp.array(LLAMA.encode("hell a"))) + stream.end() == "hell a"


@TOKENIZERS
@pytest.mark.parametrize("kind", ["text", "invalid"])
def test_the_work_for_a_token_does_not_grow(tok, kind, monkeypatch):
    invalid = [LLAMA.encode("\ufffd")[-1]] if tok is LLAMA else [BYTE_LEVEL.encode("é")[1]]
    ids = tok.encode("hell a ") * 50 if kind == "text" else invalid * 200
    decoded = []
    decode = tok.decode
    monkeypatch.setattr(tok, "decode", lambda ids, *args: decoded.append(len(ids)) or decode(ids, *args))
    assert "".join(pieces(tok, ids)) == decode(ids)
    assert len(decoded) <= 2 * len(ids) + 1
    assert max(decoded) <= 5


class TestTextStreamer:
    def test_prints_prompt_and_text(self):
        file = io.StringIO()
        streamer = TextStreamer(LLAMA, file=file)
        prompt, new = LLAMA.batch(["hell"]).ids, LLAMA.encode("hell a")[2:]
        streamer.put(prompt)
        for token in new:
            streamer.put(np.array([token]))
        assert file.getvalue() == "hell a"
        streamer.end()
        assert file.getvalue() == "hell a\n"

    def test_skips_each_prompt(self, capsys):
        streamer = TextStreamer(BYTE_LEVEL, skip_prompt=True)
        for word in ("he", "ll"):
            streamer.put(BYTE_LEVEL.batch(["prompt"]).ids)
            streamer.put(jnp.array(BYTE_LEVEL.encode(word)))
            streamer.end()
        assert capsys.readouterr().out == "he\nll\n"

    def test_decode_options(self):
        file = io.StringIO()
        streamer = TextStreamer(BYTE_LEVEL, file=file, skip_special_tokens=False, clean_up_tokenization_spaces=True)
        streamer.put(np.array(BYTE_LEVEL.encode("a .<|im_end|>")))
        streamer.end()
        assert file.getvalue() == "a.<|im_end|>\n"
        with pytest.raises(TypeError, match="skip_special"):
            TextStreamer(BYTE_LEVEL, skip_specials=True)

    def test_on_finalized_text_may_be_overridden(self):
        class Collect(TextStreamer):
            def on_finalized_text(self, text, stream_end=False):
                seen.append((text, stream_end))

        seen = []
        streamer = Collect(BYTE_LEVEL)
        streamer.put(np.array(BYTE_LEVEL.encode("he€")[:-1]))
        streamer.end()
        assert seen == [("he", False), ("\ufffd", True)]

    def test_several_rows_are_refused(self):
        with pytest.raises(InputError, match=r"\(2, 3\): generate one prompt, or pass a TextRowStreamer"):
            TextStreamer(BYTE_LEVEL).put(np.zeros((2, 3), np.int32))


class TestTextRowStreamer:
    @TOKENIZERS
    @settings(max_examples=50, deadline=None)
    @given(st.data())
    def test_the_pieces_of_each_row_join_to_its_text(self, tok, draw):
        rows = draw.draw(st.lists(ids_of[tok], min_size=1, max_size=4))
        texts, over = [""] * len(rows), []

        def add(row, text, ended):
            assert row not in over
            texts[row] += text
            over.extend([row] * ended)

        streamer = TextRowStreamer(tok, add)
        for _ in range(2):  # a streamer can be reused
            texts, over, left = [""] * len(rows), [], dict(enumerate(rows))
            while left:
                row = draw.draw(st.sampled_from(sorted(left)))
                count = draw.draw(st.integers(1, 4))
                streamer.put_row(row, np.array(left[row][:count], np.int32), ended=count >= len(left[row]))
                left[row] = left[row][count:]
                if not left[row]:
                    del left[row]
            streamer.end()
            assert texts == [tok.decode(ids) for ids in rows]
            assert sorted(over) == [*range(len(rows))]

    def test_characters_of_several_tokens(self):
        seen = []
        streamer = TextRowStreamer(BYTE_LEVEL, lambda *piece: seen.append(piece))
        for left, right in zip(EURO, BYTE_LEVEL.encode("aé"), strict=True):
            streamer.put_row(0, [left], ended=False)
            streamer.put_row(1, [right], ended=False)
        assert seen == [(1, "a", False), (0, "€", False), (1, "é", False)]
        streamer.put_row(1, EURO[:2], ended=True)
        streamer.put_row(0, EURO[:1], ended=False)
        streamer.end()
        assert seen[3:] == [(1, "\ufffd", True), (0, "\ufffd", True)]

    def test_whole_lines_are_printed(self):
        file = io.StringIO()
        streamer = TextRowStreamer(BYTE_LEVEL, file=file)
        for row, text in ((0, "he"), (1, "a\nb"), (0, "ll"), (2, "\n"), (1, " \n")):
            streamer.put_row(row, BYTE_LEVEL.encode(text), ended=False)
        assert file.getvalue() == "1: a\n2: \n1: b \n"
        streamer.put_row(2, [], ended=True)
        streamer.put_row(1, BYTE_LEVEL.encode("c"), ended=True)
        streamer.end()
        assert file.getvalue()[15:] == "1: c\n0: hell\n"

    def test_standard_output(self, capsys):
        streamer = TextRowStreamer(BYTE_LEVEL)
        streamer.put_row(0, BYTE_LEVEL.encode("a .<|im_end|>"), ended=True)
        assert capsys.readouterr().out == "0: a .\n"

    def test_decode_options(self):
        seen = []
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": True}
        streamer = TextRowStreamer(BYTE_LEVEL, lambda *piece: seen.append(piece), **options)
        streamer.put_row(3, BYTE_LEVEL.encode("a .<|im_end|>"), ended=True)
        assert seen == [(3, "a.<|im_end|>", True)]
        with pytest.raises(TypeError, match="skip_specials"):
            TextRowStreamer(BYTE_LEVEL, skip_specials=True)

    @pytest.mark.slow
    def test_with_generate(self):
        """The pad token is also an ordinary token here, and rows end at an eos token or at their budget."""
        model = model_config(num_hidden_layers=1, vocab_size=len(BYTE_LEVEL))
        params, prompts = random_params(model), BYTE_LEVEL.batch(["hell", "a", "o €"])
        cfg = GenerationConfig(model=model, max_new_tokens=[3, 17, 40], do_sample=True, num_return_sequences=2)
        cfg = cfg.replace(pad_token_id=BYTES[3], eos_token_id=[*range(40, 45)], temperature=3.0, top_k=0)
        texts = [""] * 6

        def add(row, text, ended):
            texts[row] += text

        streamer, arguments = TextRowStreamer(BYTE_LEVEL, add), (params, prompts.ids, jax.random.key(0), cfg)
        out = generate(*arguments, attention_mask=prompts.attention_mask, streamer=streamer)
        assert texts == BYTE_LEVEL.decode_batch(out)
        assert len(set(out.lengths.tolist())) > 2


def in_thread(function, *args, **kwargs) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    return thread


def speak(streamer, texts, prompt="prompt", ending=True):
    streamer.put(BYTE_LEVEL.batch([prompt]).ids)
    for text in texts:
        streamer.put(np.array(BYTE_LEVEL.encode(text)))
    if ending:
        streamer.end()


class TestTextIteratorStreamer:
    def test_text_arrives_while_a_thread_generates(self):
        streamer = TextIteratorStreamer(BYTE_LEVEL, skip_prompt=True, timeout=20)
        read = threading.Event()

        def run():
            speak(streamer, ["he", "ll"], ending=False)
            assert read.wait(20)
            streamer.put(np.array(BYTE_LEVEL.encode("€")[:2]))
            streamer.end()

        thread = in_thread(run)
        assert next(streamer) + next(streamer) == "hell"
        read.set()
        assert list(streamer) == ["\ufffd"]
        thread.join(20)

    def test_prompt_and_decode_options(self):
        for skip, text in ((False, "prompta.<|im_end|>"), (True, "a.<|im_end|>")):
            options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": True}
            streamer = TextIteratorStreamer(BYTE_LEVEL, skip, 20, **options)
            speak(streamer, ["a .<|im_end|>"])
            assert "".join(streamer) == text
        for wrong in ({"file": io.StringIO()}, {"skip_specials": True}):
            with pytest.raises(TypeError, match=next(iter(wrong))):
                TextIteratorStreamer(BYTE_LEVEL, **wrong)

    def test_no_piece_is_empty(self):
        streamer = TextIteratorStreamer(BYTE_LEVEL, timeout=20)
        speak(streamer, ["<|im_end|>", "a", *["<|end|>"] * 3], prompt="<|im_start|>")
        assert list(streamer) == ["a"]

    def test_iterator_ends_and_streamer_can_be_reused(self):
        streamer = TextIteratorStreamer(BYTE_LEVEL, skip_prompt=True)
        for word in ("he", "ll"):
            speak(streamer, [word])
            iterator = iter(streamer)
            assert list(iterator) == [word]
            assert next(iterator, "ended") == "ended"

    def test_an_error_is_raised_where_the_text_is_read(self):
        streamer = TextIteratorStreamer(BYTE_LEVEL, skip_prompt=True)

        def run():
            try:
                speak(streamer, ["he", "", "€"], ending=False)
                streamer.put(np.array(BYTE_LEVEL.encode("€")[:2]))
                raise MemoryError("no room")
            except BaseException as error:
                streamer.error(error)

        thread, pieces = in_thread(run), []
        with pytest.raises(MemoryError, match="no room"):
            pieces.extend(streamer)
        thread.join(20)
        assert pieces == ["he", "€", "\ufffd"]
        assert next(streamer, "ended") == "ended"
        speak(streamer, ["ll"])
        assert list(streamer) == ["ll"]

    def test_the_text_before_an_error_comes_first(self):
        streamer = TextIteratorStreamer(BYTE_LEVEL)
        streamer.put(np.array(BYTE_LEVEL.encode("he€")[:-1]))
        streamer.error(ValueError("late"))
        assert [next(streamer), next(streamer)] == ["he", "\ufffd"]
        with pytest.raises(ValueError, match="late"):
            next(streamer)

    def test_an_error_is_passed_on_even_if_decoding_also_fails(self, monkeypatch):
        streamer = TextIteratorStreamer(BYTE_LEVEL)
        monkeypatch.setattr(streamer._stream, "end", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            streamer.error(ValueError("first"))
        with pytest.raises(ValueError, match="first"):
            next(streamer)

    def test_error_takes_exceptions_only(self):
        with pytest.raises(TypeError, match="error must be called with an exception, got 'late'"):
            TextIteratorStreamer(BYTE_LEVEL).error("late")

    def test_timeout(self):
        streamer = TextIteratorStreamer(BYTE_LEVEL, timeout=0.05)
        speak(streamer, ["he"], prompt="<|end|>", ending=False)
        assert next(streamer) == "he"
        begin = time.monotonic()
        with pytest.raises(queue.Empty, match=r"no token arrived for 0\.05 seconds"):
            next(streamer)
        assert 0.04 <= time.monotonic() - begin < 5
        speak(streamer, [], prompt="ll")
        assert list(streamer) == ["ll"]

    @pytest.mark.parametrize(
        ("timeout", "error"), [(-1, InputError), (float("nan"), InputError), (1e30, InputError), ("3", TypeError)]
    )
    def test_wrong_timeouts(self, timeout, error):
        with pytest.raises(error, match=f"timeout must be .* got '?{timeout}".replace("+", r"\+")):
            TextIteratorStreamer(BYTE_LEVEL, timeout=timeout)

    def test_several_sequences(self):
        cfg = GenerationConfig(model=model_config(), do_sample=True, num_return_sequences=3, max_new_tokens=2)
        with pytest.raises(InputError, match="prints one sequence, got num_return_sequences=3: set it to 1, or pass"):
            generate(random_params(cfg.model), [[1]], None, cfg, streamer=TextStreamer(BYTE_LEVEL))

    @pytest.mark.slow
    def test_with_generate(self):
        model = model_config(num_hidden_layers=1, vocab_size=len(BYTE_LEVEL))
        cfg, params = GenerationConfig(model=model, max_new_tokens=9), random_params(model)
        ids = BYTE_LEVEL.batch(["hell"]).ids

        def run(cfg):
            try:
                generate(params, ids, None, cfg, streamer=streamer)
            except BaseException as error:
                streamer.error(error)

        streamer = TextIteratorStreamer(BYTE_LEVEL, skip_prompt=True, timeout=300)
        in_thread(run, cfg)
        assert "".join(streamer) == BYTE_LEVEL.decode_batch(generate(params, ids, None, cfg))[0] != ""
        in_thread(run, cfg.replace(model=None))
        with pytest.raises(ValueError, match="model is None"):
            list(streamer)


class TestAsyncTextIteratorStreamer:
    def read(self, run, **options) -> list[str]:
        """Return the pieces that arrive while `run(streamer)` runs in a thread."""

        async def main():
            streamer = AsyncTextIteratorStreamer(BYTE_LEVEL, skip_prompt=True, **options)
            task = asyncio.create_task(asyncio.to_thread(run, streamer))
            pieces = [text async for text in streamer]
            await task
            return pieces

        return asyncio.run(main())

    def test_text_is_returned_until_the_end(self):
        assert self.read(lambda streamer: speak(streamer, ["he", "ll", "", "o €"])) == ["he", "ll", "o €"]

    def test_text_is_returned_during_the_run(self):
        async def main():
            streamer, goes_on = AsyncTextIteratorStreamer(BYTE_LEVEL, skip_prompt=True), threading.Event()

            def run():
                speak(streamer, ["he"], ending=False)
                goes_on.wait(20)
                streamer.end()

            task = asyncio.create_task(asyncio.to_thread(run))
            first = await anext(aiter(streamer))
            goes_on.set()
            await task
            return first, [text async for text in streamer]

        assert asyncio.run(main()) == ("he", [])

    def test_an_error_is_raised_where_the_text_is_read(self):
        with pytest.raises(MemoryError, match="no room"):
            self.read(lambda streamer: streamer.error(MemoryError("no room")))

    def test_timeout(self):
        with pytest.raises(TimeoutError, match=r"no token arrived for 0\.01 seconds: set a longer timeout"):
            self.read(lambda streamer: None, timeout=0.01)

    def test_wrong_timeouts(self):
        with pytest.raises(InputError, match="timeout must be 0 to"):
            self.read(lambda streamer: None, timeout=-1)
