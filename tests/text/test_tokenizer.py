import json
import operator
import re
import threading
import time
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxgen import Continuation, GenerateOutput
from jaxgen.core.text.cleaning import clean_up
from jaxgen.core.text.tokenizer import ELSEWHERE, Tokenizer
from jaxgen.errors import ConfigError, InputError
from tests.support.bounded import bounded
from tests.support.tokenizers import CHATML, byte_level, byte_level_backend, llama, llama_backend, save

BYTE_LEVEL = byte_level()
USER = [{"role": "user", "content": "hi"}]
THINKING = (
    "{%- for message in messages %}{% set content = message.content %}"
    "{%- if '</think>' in content and not loop.last %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{%- endif %}"
)
INSTRUCTION = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def qwen(data) -> Tokenizer:
    return Tokenizer.from_pretrained(data / "tokenizers" / "qwen2.5-instruct")


class TestRealData:
    def test_tokenization_vectors(self, data, qwen):
        vectors = json.loads((data / "vectors" / "qwen2.5-tokenization.json").read_text(encoding="utf-8"))
        assert len(vectors) >= 33
        for vector in vectors:
            ids = qwen.encode(vector["text"], split_special_tokens=not vector["parse_special"])
            assert ids == vector["ids"], vector["text"]

    def test_decoding_restores_the_texts(self, data, qwen):
        vectors = json.loads((data / "vectors" / "qwen2.5-tokenization.json").read_text(encoding="utf-8"))
        for vector in vectors:
            assert qwen.decode(vector["ids"], skip_special_tokens=False) == vector["text"]

    def test_chat_prompts(self, data, qwen):
        cases = json.loads((data / "vectors" / "qwen2.5-chat-prompts.json").read_text(encoding="utf-8"))
        batch = qwen.chat([case["messages"] for case in cases])
        for case, ids, mask in zip(cases, batch.ids, batch.attention_mask, strict=True):
            assert ids[mask == 1].tolist() == case["prompt_ids"]

    def test_texts_of_greedy_runs_match(self, data):
        runs = json.loads((data / "vectors" / "greedy-runs.json").read_text(encoding="utf-8"))
        read: dict[str, Tokenizer] = {}
        for run in runs:
            name = run["checkpoint"]
            if name not in read:
                read[name] = Tokenizer.from_pretrained(data / "checkpoints" / name)
            assert read[name].encode(run["prompt"]) == run["prompt_ids"]
            assert read[name].decode(run["sequence"]) == run["text"]

    def test_attributes(self, qwen):
        assert (qwen.bos_token, qwen.bos_token_id) == (None, None)
        assert (qwen.eos_token, qwen.eos_token_id) == ("<|im_end|>", 151645)
        assert (qwen.pad_token, qwen.pad_token_id) == ("<|endoftext|>", 151643)
        assert (qwen.unk_token, qwen.unk_token_id) == (None, None)
        assert (qwen.vocab_size, len(qwen), qwen.model_max_length) == (151643, 151665, 131072)

    def test_tools_are_rendered_as_json(self, qwen):
        tool = {"type": "function", "function": {"name": "f", "description": "a <b> & 'é'"}}
        call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
        text = qwen.render_chat([*USER, call, {"role": "tool", "content": "42"}], tools=[tool])
        assert json.dumps(tool, ensure_ascii=False) in text
        assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in text
        assert text.endswith("user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


class TestEncode:
    def test_byte_level(self):
        tok = byte_level()
        assert tok.decode(tok.encode("hello wörld 👋")) == "hello wörld 👋"
        assert [tok.backend.id_to_token(i) for i in tok.encode("hell hello")] == ["hell", "Ġ", "hell", "o"]

    def test_special_tokens_in_the_text(self):
        tok = byte_level()
        assert tok.encode("<|im_end|>a") == [tok.eos_token_id, *tok.encode("a")]
        assert tok.eos_token_id not in tok.encode("<|im_end|>a", split_special_tokens=True)
        assert tok.encode("<|im_end|>a") == [tok.eos_token_id, *tok.encode("a")]
        assert byte_level(split_special_tokens=True).encode("<|end|>") == tok.encode(
            "<|end|>", split_special_tokens=True
        )

    def test_post_processor_adds_bos(self):
        tok = llama()
        assert [tok.backend.id_to_token(i) for i in tok.encode("hell a")] == ["<s>", "▁hell", "▁a"]
        assert tok.encode("a", add_special_tokens=False) == tok.encode("a")[1:]
        assert tok.encode("") == [1]
        assert [tok.backend.id_to_token(i) for i in tok.encode("é")] == ["<s>", "▁", "<0xC3>", "<0xA9>"]

    @pytest.mark.parametrize(
        ("flags", "before", "after"),
        [({}, [1], []), ({"add_bos_token": False, "add_eos_token": True}, [], [2])],
    )
    @pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast"])
    def test_some_classes_add_tokens_named_in_the_config(self, name, flags, before, after):
        inner = llama().encode("hell", add_special_tokens=False)
        assert llama(tokenizer_class=name, **flags).encode("hell") == before + inner + after

    def test_other_classes_follow_tokenizer_json(self):
        tok = llama(tokenizer_class="PreTrainedTokenizerFast", add_bos_token=False, add_eos_token=True)
        assert tok.encode("hell") == llama().encode("hell")

    @pytest.mark.parametrize("name", ["LlamaTokenizer", "GemmaTokenizer"])
    def test_some_classes_without_bos_are_refused(self, name):
        with pytest.raises(ConfigError, match="add_bos_token is true"):
            llama(tokenizer_class=name, bos_token=None)

    def test_truncation_counts_added_tokens(self):
        full = llama().encode("hello there")
        assert llama().encode("hello there", max_length=4) == full[:4]
        assert llama(truncation_side="left").encode("hello there", max_length=4) == [1, *full[-3:]]
        assert llama().encode("hello there", max_length=1) == [1]
        assert llama().encode("a", max_length=99) == llama().encode("a")

    @pytest.mark.parametrize("max_length", [0, -1])
    def test_bad_max_length_is_refused(self, max_length):
        with pytest.raises(InputError, match="max_length"):
            llama().encode("a", max_length=max_length)

    def test_truncation_and_padding_of_the_backend_are_ignored(self):
        backend = llama_backend()
        backend.enable_truncation(3, direction="left")
        backend.enable_padding(length=20, pad_id=2, pad_token="</s>")
        tok = Tokenizer(backend, {})
        full = llama().encode("hello there")
        assert tok.encode("hello there") == full
        assert (tok.truncation_side, tok.pad_token_id) == ("left", 2)
        assert tok.encode("hello there", max_length=3) == [1, *full[-2:]]

    def test_bad_text_is_refused(self):
        with pytest.raises(TypeError, match="batch"):
            llama().encode(["a"])  # type: ignore[arg-type]
        with pytest.raises(InputError, match="Unicode"):
            llama().encode("\ud800")

    @pytest.mark.parametrize("tokenizer", [byte_level(), llama()])
    @pytest.mark.parametrize("own", [{}, {"add_special_tokens": False}, {"max_length": 7}, {"max_length": 20_000}])
    def test_long_texts_are_encoded_like_short_ones(self, tokenizer, own, monkeypatch):
        text = "The <|end|> höchst </s> fox \u0301 " * 2000
        found = tokenizer.encode(text, **own)
        monkeypatch.setattr("jaxgen.core.text.tokenizer._LONG", len(text))
        assert tokenizer.encode(text, **own) == found

    def test_other_threads_run_while_a_long_text_is_encoded(self):
        text, done, longest = "the quick brown fox " * 50_000, threading.Event(), [0.0]

        def watch():
            last = time.perf_counter()
            while not done.is_set():
                time.sleep(0.001)
                longest[0], last = max(longest[0], time.perf_counter() - last), time.perf_counter()

        watcher = threading.Thread(target=watch)
        watcher.start()
        begin = time.perf_counter()
        BYTE_LEVEL.encode(text)
        seconds = time.perf_counter() - begin
        done.set()
        watcher.join()
        assert longest[0] < seconds / 2


class TestDecode:
    @pytest.mark.parametrize("kind", [list, tuple, np.array, jnp.array])
    def test_ids_may_be_lists_or_arrays(self, kind):
        tok = llama()
        assert tok.decode(kind(tok.encode("hell a"))) == "hell a"

    def test_single_id_and_empty_ids_are_decoded(self):
        tok = llama()
        assert tok.decode(tok.encode("a")[-1]) == "a"
        assert tok.decode([]) == ""
        assert tok.decode(np.zeros(0, np.int32)) == ""

    def test_special_tokens(self):
        tok = byte_level()
        ids = tok.encode("he<|im_end|>ll")
        assert tok.decode(ids) == "hell"
        assert tok.decode(ids, skip_special_tokens=False) == "he<|im_end|>ll"

    def test_ids_beyond_the_vocabulary_decode_to_nothing(self):
        tok = byte_level()
        assert tok.decode([*tok.encode("he"), len(tok), 2**31, *tok.encode("ll")]) == "hell"

    def test_bad_ids_are_refused(self):
        with pytest.raises(InputError, match="-7 is not a token id"):
            llama().decode([1, -7])
        with pytest.raises(TypeError, match="integer"):
            llama().decode([0.5])
        with pytest.raises(InputError, match=r"\(1, 2\)"):
            llama().decode([[1, 2]])

    def test_clean_up(self):
        spaced = "It is n't , he 's . I 'm we 've they 're a ' b ! so ? x .y"
        # the result of transformers 4.41.1's clean_up_tokenization
        clean = "It isn't, he's. I'm we've they're a'b! so? x.y"
        assert clean_up(spaced) == clean
        ids = byte_level().encode(spaced)
        assert byte_level().decode(ids) == spaced
        assert byte_level().decode(ids, clean_up_tokenization_spaces=True) == clean
        assert Tokenizer(byte_level_backend()).decode(ids) == clean
        by_class = Tokenizer(llama_backend(), {"tokenizer_class": "LlamaTokenizer"})
        assert by_class.decode(by_class.encode("a , b")) == "a , b"


def text_of(tok: Tokenizer, ids) -> bytes:
    table = tok.token_bytes()
    return b"".join(table[i] or b"" for i in ids)


class TestTokenBytes:
    def test_byte_level(self):
        tok = byte_level()
        table = tok.token_bytes()
        assert len(table) == len(tok) == 263
        assert table[260:] == [None, None, None]
        assert sorted(b for b in table[:256] if b) == [bytes([n]) for n in range(256)]
        assert table[256:260] == [b"he", b"ll", b"hell", b" he"]
        text = "he hell\n\0 wörld 👋"
        assert text_of(tok, tok.encode(text + "<|im_end|>")) == text.encode()

    def test_byte_fallback(self):
        tok = llama()
        table = tok.token_bytes()
        assert len(table) == len(tok)
        assert table[:3] == [None, None, None]
        assert table[3:259] == [bytes([n]) for n in range(256)]
        assert table[tok.backend.token_to_id("▁hell")] == b" hell"
        assert table[tok.backend.token_to_id("\ufffd")] == "\ufffd".encode()
        text = "hell  é\n👋"
        assert text_of(tok, tok.encode(text)) == b" " + text.encode()

    def test_real_qwen(self, data, qwen):
        table = qwen.token_bytes()
        assert len(table) == len(qwen)
        assert [i for i, b in enumerate(table) if b is None] == list(range(151643, 151657))
        assert table[151657] == b"<tool_call>"
        decoded = qwen.backend.decode_batch([[i] for i in range(len(qwen))])
        assert decoded == [(b or b"").decode(errors="replace") for b in table]
        for vector in json.loads((data / "vectors" / "qwen2.5-tokenization.json").read_text(encoding="utf-8")):
            if not vector["parse_special"]:
                assert text_of(qwen, vector["ids"]) == vector["text"].encode()

    @pytest.mark.parametrize("name", ["stories260K-hf", "babyllama105-hf"])
    def test_real_sentencepiece(self, data, name):
        tok = Tokenizer.from_pretrained(data / "checkpoints" / name)
        table = tok.token_bytes()
        assert len(table) == len(tok)
        a = tok.encode("a")[-1]
        decoded = tok.backend.decode_batch([[a, i] for i in range(len(table))])
        assert decoded == ["a" + (b or b"").decode(errors="replace") for b in table]
        assert text_of(tok, tok.encode("Once upon a time, there")) == b" Once upon a time, there"

    def test_metaspace_and_added_tokens(self):
        backend = tokenizers.Tokenizer(models.BPE({"▁a": 0, "<0x41>": 1}, []))
        backend.decoder = decoders.Metaspace()
        tok = Tokenizer(backend, {"added_tokens_decoder": {"2": {"content": "[x y]"}, "3": {"content": "é"}}})
        assert tok.token_bytes() == [b" a", b"<0x41>", b"[x y]", "é".encode()]
        tok.token_bytes().clear()
        assert len(tok.token_bytes()) == 4
        backend.decoder = decoders.ByteLevel()
        # é is also GPT-2's symbol for the byte E9, and the library decodes it as that byte
        assert Tokenizer(backend).token_bytes()[2:] == [b"[x y]", b"\xe9"]
        assert backend.decode([3]) == "\ufffd"

    @pytest.mark.parametrize(
        "decoder",
        [
            None,
            decoders.WordPiece(),
            decoders.Strip(" ", 1, 0),
            decoders.Replace(tokenizers.Regex("a"), "b"),
            decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        ],
    )
    def test_decoders_of_more_than_one_token(self, decoder):
        backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
        if decoder is not None:
            backend.decoder = decoder
        with pytest.raises(ConfigError, match="decoder"):
            Tokenizer(backend).token_bytes()


class TestBatch:
    def test_left_padding(self):
        tok = llama()
        batch = tok.batch(["a", "hell a"])
        assert batch.ids.dtype == batch.attention_mask.dtype == np.int32
        assert batch.ids.tolist() == [[2, *tok.encode("a")], tok.encode("hell a")]
        assert batch.attention_mask.tolist() == [[0, 1, 1], [1, 1, 1]]
        assert tok.batch(["hell a"], max_length=2).ids.tolist() == [tok.encode("hell a")[:2]]

    def test_texts_that_continue_others_have_no_bos(self):
        tok = llama()
        batch = tok.batch(["a", "hell a"], add_special_tokens=False)
        assert batch.ids.tolist() == [[2, *tok.encode("a")[1:]], tok.encode("hell a")[1:]]
        assert batch.attention_mask.tolist() == [[0, 1], [1, 1]]
        with pytest.raises(InputError, match="prompt 0 has no tokens"):
            tok.batch([""], add_special_tokens=False)

    @pytest.mark.parametrize("name", ["checkpoints/stories260K-hf", "tokenizers/qwen2.5-instruct"])
    def test_real_texts_that_continue_others(self, data, name):
        tok = Tokenizer.from_pretrained(data / name)
        (ids,), _ = tok.batch([" And then"], add_special_tokens=False)
        assert ids.tolist() == tok.encode(" And then", add_special_tokens=False)
        assert tok.bos_token_id is None or tok.bos_token_id not in ids
        assert tok.bos_token_id is None or tok.batch([" And then"]).ids[0, 0] == tok.bos_token_id

    @pytest.mark.parametrize(
        ("config", "pad"),
        [
            ({"pad_token": "<unk>", "eos_token": "</s>"}, 0),
            ({"eos_token": "</s>", "unk_token": "<s>"}, 2),
            ({"unk_token": "<s>"}, 1),
            ({}, 0),
        ],
    )
    def test_pad_id(self, config, pad):
        assert Tokenizer(llama_backend(), config).batch(["a", "a a"]).ids[0, 0] == pad

    def test_bad_batches_are_refused(self):
        with pytest.raises(TypeError, match=r"\[text\]"):
            llama().batch("hell")
        with pytest.raises(InputError, match="empty"):
            llama().batch([])
        with pytest.raises(InputError, match="prompt 1 has no tokens"):
            byte_level().batch(["a", ""])

    def test_decode_batch(self):
        @dataclass
        class Output:
            sequences: object
            lengths: object
            prompt_width: int

        tok = llama()
        prompts = tok.batch(["a", "hell a"])
        new = [tok.encode("he!", add_special_tokens=False), tok.encode("ll", add_special_tokens=False)]
        rows = np.full((2, prompts.ids.shape[1] + 6), 2, np.int32)
        rows[:, : prompts.ids.shape[1]] = prompts.ids
        for row, ids in zip(rows, new, strict=True):
            row[prompts.ids.shape[1] :][: len(ids)] = ids
        out = Output(jnp.array(rows), jnp.array([len(new[0]) + 1, len(new[1])]), prompts.ids.shape[1])
        assert tok.decode_batch(out) == ["he!", "ll"]
        assert tok.decode_batch(out, skip_special_tokens=False) == ["he!</s>", "ll"]
        width = prompts.ids.shape[1]
        for kind in (jnp.array, np.array, lambda array: np.asarray(array).tolist()):
            given = kind(rows), kind(out.lengths)
            assert tok.decode_batch(given[0], lengths=given[1], prompt_width=width) == ["he!", "ll"]
            assert tok.decode_batch(given[0]) == ["a he!", "hell a ll"]
            assert tok.decode_batch(given[0], prompt_width=width) == ["he!", "ll"]
        assert tok.decode_batch(rows[:, width:], lengths=out.lengths, prompt_width=0) == ["he!", "ll"]
        assert tok.decode_batch(out, lengths=[2, 0]) == ["he", ""]
        for bad, message in (
            ({"lengths": [3, 1]}, "prompt_width is needed as well"),
            ({"lengths": [3], "prompt_width": 0}, r"lengths has shape \(1,\): pass one number for each of the 2 rows"),
            ({"lengths": 3, "prompt_width": 0}, r"lengths has shape \(\)"),
            ({"prompt_width": -1}, "prompt_width must be at least 0, got -1"),
        ):
            with pytest.raises(InputError, match=message):
                tok.decode_batch(rows, **bad)

    def test_decode_batch_of_ragged_rows(self):
        tok = byte_level()
        rows = [tok.encode("hell"), tok.encode("he <|im_end|>"), []]
        assert tok.decode_batch(rows) == ["hell", "he ", ""]
        assert tok.decode_batch(rows, False, lengths=[1, 2, 0], prompt_width=0) == ["hell", "he ", ""]
        assert tok.decode_batch([]) == tok.decode_batch(np.zeros((0, 3), np.int32)) == []

    @pytest.mark.parametrize(
        ("lengths", "width", "message"),
        [
            ([-1], 1, "row 0 has 4 ids, got prompt_width=1 and the length -1"),
            ([4], 1, "prompt_width=1 and the length 4"),
            ([0], 5, "prompt_width=5"),
            ([1.0], 1, "lengths must be whole numbers, got float64"),
        ],
    )
    def test_impossible_lengths_are_refused(self, lengths, width, message):
        with pytest.raises(InputError, match=message):
            byte_level().decode_batch(np.ones((1, 4), np.int32), lengths=lengths, prompt_width=width)

    @pytest.mark.parametrize("rows", [[1, 2], np.array([1, 2]), np.array(1), 3, "hell", ["he"], {1: [2]}, None])
    def test_decode_batch_of_values_without_rows(self, rows):
        with pytest.raises(TypeError, match="decode_batch accepts an output of generate or rows of ids, got"):
            byte_level().decode_batch(rows)

    def test_an_output_of_generate(self):
        prompts, lengths = BYTE_LEVEL.batch(["hell", "a b"]), jnp.array([3, 2])
        new = [BYTE_LEVEL.encode("€"), BYTE_LEVEL.encode("hello<|end|>")]
        sequences = jnp.array(np.concatenate([prompts.ids, new], axis=1))
        out = GenerateOutput(sequences, sequences != 260, lengths, jnp.array([1, 1]), prompt_width=3)
        texts = BYTE_LEVEL.decode_batch(out)
        assert BYTE_LEVEL.decode_batch(sequences, lengths=lengths, prompt_width=3) == texts == ["€", "hello"]
        assert BYTE_LEVEL.decode_batch(sequences) == [a + b for a, b in zip(["hell", "a b"], texts, strict=True)]
        assert BYTE_LEVEL.decode_batch(out.to_hf().sequences, prompt_width=out.prompt_width) == texts
        with pytest.raises(TypeError, match=r"decode_batch accepts .*, got HFOutput"):
            BYTE_LEVEL.decode_batch(out.to_hf())
        with pytest.raises(TypeError, match="got GenerateOutput: decode_batch decodes an output of generate"):
            BYTE_LEVEL.decode(out)
        with pytest.raises(InputError, match=r"shape \(2, 6\): decode_batch decodes rows"):
            BYTE_LEVEL.decode(sequences)
        with pytest.raises(InputError, match="got several: decode_batch decodes rows"):
            BYTE_LEVEL.decode([[1, 2], [3]])


class TestChat:
    def test_batch_of_conversations(self):
        tok = byte_level()
        longer = [{"role": "system", "content": "be brief"}, *USER]
        batch = tok.chat([USER, longer])
        text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert tok.render_chat(USER) == text
        assert batch.ids[0][batch.attention_mask[0] == 1].tolist() == tok.encode(text)
        assert batch.ids[0, 0] == tok.pad_token_id
        assert batch.attention_mask[1].all()
        assert tok.chat(USER).ids.tolist() == [tok.encode(text)]
        assert tok.render_chat(USER, False) == "<|im_start|>user\nhi<|im_end|>\n"

    def test_only_the_template_adds_bos(self):
        tok = llama(chat_template="{{ bos_token }}{{ messages[0].content }}")
        assert tok.chat(USER).ids[0].tolist().count(1) == 1
        assert llama(chat_template="a").chat(USER).ids[0].tolist().count(1) == 0

    def test_truncation(self):
        tok = byte_level(truncation_side="left")
        assert tok.chat(USER, max_length=5).ids.tolist() == [tok.encode(tok.render_chat(USER))[-5:]]

    @pytest.mark.parametrize(
        ("template", "text"),
        [
            ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "|<|im_end|>|<|end|>"),
            ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi"}'),
            ("{{ {'b': '<é>', 'a': 1} | tojson(indent=1) }}", '{\n "b": "<é>",\n "a": 1\n}'),
            ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
            ("{% set x = 1 %}{% generation %}{{ x }}{% set x = 2 %}{% endgeneration %}{{ x }}", "11"),
            ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
            ("{{ strftime_now('%%') }}", "%"),
            ("{{ tools is none }} {{ documents is none }} {{ mood }}", "True True calm"),
            ("{{ additional_special_tokens[0] }}", "<|im_start|>"),
        ],
    )
    def test_what_templates_get(self, template, text):
        tok = byte_level(chat_template=template, additional_special_tokens=["<|im_start|>"])
        assert tok.render_chat(USER, mood="calm") == text

    def test_a_template_like_that_of_qwen3(self):
        """Thinking is removed from earlier answers, and can be turned off."""
        first = len(byte_level())
        added = {str(first): {"content": "<think>"}, str(first + 1): {"content": "</think>"}}
        tok = byte_level(chat_template=THINKING, added_tokens_decoder=added)
        answer = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
        text = "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert tok.render_chat([answer, *USER]) == text
        quiet = tok.render_chat([answer, *USER], enable_thinking=False)
        assert quiet == text + "<think>\n\n</think>\n\n"
        assert tok.chat(USER, enable_thinking=False).ids[0].tolist().count(first) == 1
        assert tok.decode(tok.encode(quiet)).endswith("<think>\n\n</think>\n\n")

    def test_a_template_like_that_of_mistral(self):
        tok = llama(chat_template=INSTRUCTION, tokenizer_class="LlamaTokenizer")
        conversation = [*USER, {"role": "assistant", "content": "he"}, *USER]
        assert tok.render_chat(conversation) == "<s>[INST] hi [/INST]he</s>[INST] hi [/INST]"
        ids = tok.chat(conversation).ids[0].tolist()
        assert (ids[0], ids.count(1), ids.count(2)) == (1, 1, 1)
        with pytest.raises(InputError, match="must alternate"):
            tok.render_chat([*USER, *USER])

    def test_keywords_win_over_special_tokens(self):
        assert byte_level(chat_template="{{ eos_token }}").render_chat(USER, eos_token="E") == "E"

    def test_tools_and_documents(self):
        tok = byte_level(chat_template="{{ tools[0].name }} {{ documents[0].title }}")
        assert tok.render_chat(USER, tools=[{"name": "f"}], documents=[{"title": "d"}]) == "f d"
        for wrong in ({"name": "f"}, "f", [3]):
            with pytest.raises(TypeError, match="tools must be a list of dicts"):
                tok.render_chat(USER, tools=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="documents must be a list of dicts"):
            tok.chat(USER, documents=["d"])  # type: ignore[list-item]

    def test_named_templates(self):
        tok = byte_level(chat_template=[{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}])
        assert tok.chat_template == "d"
        assert (tok.render_chat(USER), tok.render_chat(USER, tools=[{}])) == ("d", "t")
        only = byte_level(chat_template=[{"name": "rag", "template": "r"}])
        assert only.chat_template is None
        with pytest.raises(InputError, match=r"default .*rag"):
            only.render_chat(USER)
        with pytest.raises(ConfigError, match="chat_template"):
            byte_level(chat_template=[{"template": "x"}])

    def test_missing_template_is_refused(self):
        assert llama().chat_template is None
        with pytest.raises(InputError, match="no chat template"):
            llama().chat([USER])

    def test_failing_templates_are_errors(self):
        with pytest.raises(InputError, match="roles must alternate"):
            byte_level(chat_template="{{ raise_exception('roles must alternate') }}").chat([USER])
        with pytest.raises(InputError, match="undefined"):
            byte_level(chat_template="{{ nothing.at.all }}").chat([USER])
        with pytest.raises(ConfigError, match="compiled"):
            byte_level(chat_template="{% if %}").chat([USER])

    @pytest.mark.parametrize(
        "template", ["{{ messages.append(1) }}", "{{ messages.__class__.__mro__[1].__subclasses__() }}"]
    )
    def test_sandbox(self, template):
        conversation = [dict(USER[0])]
        with pytest.raises(InputError, match=r"unsafe|not safely callable|undefined"):
            byte_level(chat_template=template).render_chat(conversation)
        assert conversation == USER

    @pytest.mark.parametrize(
        ("conversation", "error", "words"),
        [
            ([], InputError, "empty"),
            ("hi", TypeError, "list of messages"),
            (["hi"], TypeError, "message 0"),
            ([{"content": "hi"}], InputError, '"role"'),
            ([*USER, {"role": 3, "content": "hi"}], InputError, "message 1"),
            ([{"role": "user"}], InputError, '"content"'),
            ([{"role": "user", "content": 3}], InputError, '"content"'),
        ],
    )
    def test_malformed_conversations_are_refused(self, conversation, error, words):
        with pytest.raises(error, match=words):
            byte_level().chat([conversation])

    @pytest.mark.parametrize(
        ("role", "message"),
        [
            ("usr", "'usr', .*: use system"),
            ("developer", "'developer', .*: use system, user, assistant, tool, or a role from the template"),
            ("", "'', .*: use system"),
            ("x" * 10**6, r"'x+\.\.\.x+', .*: use system"),
        ],
    )
    def test_unknown_roles_are_refused(self, role, message):
        with pytest.raises(InputError, match=f"message 1 has the role {message}"):
            byte_level().chat([[*USER, {"role": role, "content": "hi"}]])

    @pytest.mark.parametrize("quote", ["'", '"'])
    def test_roles_named_in_the_template_are_accepted(self, quote):
        named = CHATML + "{% if messages[0].role == 'ipython' %}!{% endif %}".replace("'", quote)
        observed = [{"role": "ipython", "content": "42"}]
        assert byte_level(chat_template=named).render_chat(observed, False).endswith("ipython\n42<|im_end|>\n!")
        with pytest.raises(InputError, match="role 'ipython'"):
            byte_level().render_chat(observed)
        with pytest.raises(InputError, match="role 'python'"):
            byte_level(chat_template=named).render_chat([{"role": "python", "content": "42"}])

    def test_roles_that_need_not_be_in_the_template(self):
        for role in ("system", "user", "assistant", "tool"):
            assert role in byte_level().render_chat([{"role": role, "content": "a"}])

    def test_malformed_lists_are_refused(self):
        with pytest.raises(TypeError, match="list of conversations"):
            byte_level().chat("hi")
        with pytest.raises(InputError, match="empty"):
            byte_level().chat([])
        with pytest.raises(InputError, match="prompt 0 has no tokens"):
            byte_level(chat_template="").chat([USER])


# Texts whose first characters are tokenized in different ways together with the template's text before them
QUESTIONS = [
    *("Who are you?", "hi", " x", "  x", "\nx", "\n\n x", "\t", "\r\nx", "1 + 1?", ".", "...", "'s", "\u2019s"),
    *("é", "e\u0301", "你好", "\u3000x", "\u00a0x", "👋", "\u200bx", "<|im_end|>", "<x>", "-", "_", "{", "", " "),
    *("hell", "he", "\ufeffx"),
]
EXCHANGE = [{"role": "user", "content": "hell"}, {"role": "assistant", "content": "he ll"}]
BEGINNINGS = [
    [{"role": "system", "content": "be a fox"}],
    [{"role": "system", "content": "be a fox"}, *EXCHANGE],
    EXCHANGE,
    EXCHANGE[:1],
    [],
]


def conversations(beginning, texts) -> list[list[dict]]:
    """Return one conversation per text: `beginning` and the text. Every third one has two more messages."""
    role, other = ("assistant", "user") if beginning[-1:] == EXCHANGE[:1] else ("user", "assistant")
    tails = [[{"role": role, "content": text}] for text in texts]
    tails[::3] = [[*tail, {"role": other, "content": "a"}, {"role": role, "content": "b"}] for tail in tails[::3]]
    return [[*beginning, *tail] for tail in tails]


class TestChatPrefix:
    @pytest.mark.parametrize("beginning", BEGINNINGS)
    @pytest.mark.parametrize("tok", [byte_level(), llama(chat_template=CHATML)], ids=["byte_level", "sentencepiece"])
    def test_prefix_begins_every_conversation(self, tok, beginning):
        self.check(tok, beginning, QUESTIONS)

    @pytest.mark.parametrize("beginning", BEGINNINGS)
    def test_qwen(self, qwen, beginning):
        assert len(QUESTIONS) >= 30
        prefix = self.check(qwen, beginning, QUESTIONS)
        text = qwen.decode(prefix, skip_special_tokens=False)
        assert text.count("<|im_start|>system") == 1
        assert ("You are Qwen" in text) == (beginning[:1] != BEGINNINGS[0])
        assert text.endswith("<|im_start|>user") or beginning == EXCHANGE[:1]

    @settings(max_examples=10, deadline=None)
    @given(st.lists(st.text(max_size=8), min_size=20, max_size=20))
    def test_prefix_begins_any_conversation(self, qwen, texts):
        self.check(qwen, BEGINNINGS[0], texts)

    def check(self, tok, beginning, texts) -> list[int]:
        prefix = tok.chat_prefix(beginning)
        assert "fox" in tok.decode(prefix) or beginning[:1] != BEGINNINGS[0]
        chats = conversations(beginning, texts)
        whole, rest = tok.chat(chats), tok.chat(chats, after=np.array(prefix, np.int32))
        assert rest.ids.shape[1] == whole.ids.shape[1] - len(prefix)
        for row in range(len(texts)):
            ids, mask = whole.ids[row], whole.attention_mask[row]
            assert [*prefix, *rest.ids[row][rest.attention_mask[row] == 1]] == ids[mask == 1].tolist()
            assert rest.attention_mask[row, -1] == 1
        return prefix

    def test_prefix_includes_tools_and_variables(self, qwen):
        tools = [{"type": "function", "function": {"name": "f"}}]
        prefix = qwen.chat_prefix([], tools=tools)
        assert '"name": "f"' in qwen.decode(prefix)
        assert qwen.chat([USER], tools=tools, after=prefix).ids.shape[1] < 10
        with pytest.raises(InputError, match="conversation 0 does not begin with"):
            qwen.chat([USER], after=prefix)
        tok = byte_level(chat_template="{{ voice }}" + CHATML)
        assert tok.decode(tok.chat_prefix([], voice="hell")).startswith("hell")

    def test_a_template_that_moves_the_system_message(self):
        last = (
            "{% for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' }}"
            "{% if loop.last %}{{ messages[0].content }}{% endif %}{{ m.content }}{% endif %}{% endfor %}"
        )
        tok = byte_level(chat_template=last)
        assert tok.chat_prefix(BEGINNINGS[0]) == tok.encode("<|im_start|>")

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_max_length_truncates_what_follows(self, side):
        tok = byte_level(truncation_side=side)
        prefix = tok.chat_prefix(BEGINNINGS[0])
        chat = conversations(BEGINNINGS[0], "a")
        whole = tok.chat(chat, after=prefix).ids[0].tolist()
        cut = tok.chat(chat, after=prefix, max_length=len(prefix) + 2).ids[0].tolist()
        assert cut == (whole[-2:] if side == "left" else whole[:2])
        with pytest.raises(InputError, match=f"max_length must be greater than the {len(prefix)} tokens of after, got"):
            tok.chat(chat, after=prefix, max_length=len(prefix))

    def test_chat_after_a_cache(self):
        tok = byte_level()
        turns = [USER, conversations([], "hello")[0]]
        rows = [row[mask == 1].tolist() for row, mask in zip(*tok.chat(turns), strict=True)]
        answers = [tok.encode("hello<|im_end|>"), [tok.backend.token_to_id(c) for c in "hell"]]  # not merged
        counts = [len(row) + len(answer) for row, answer in zip(rows, answers, strict=True)]
        ids = np.zeros((2, max(counts) + 3), np.int32)  # caches are wider than their rows
        for row, beginning, answer in zip(ids, rows, answers, strict=True):
            row[: len(beginning) + len(answer)] = beginning + answer
        cache = Continuation(None, jnp.asarray(ids), jnp.asarray(counts))
        chats = [
            [*turn, {"role": "assistant", "content": text}, *USER]
            for turn, text in zip(turns, ("hello", "hell"), strict=True)
        ]
        rest = tok.chat(chats, after=cache)
        for number, chat in enumerate(chats):
            told = [*ids[number, : counts[number]], *rest.ids[number][rest.attention_mask[number] == 1]]
            assert tok.decode(told, skip_special_tokens=False) == tok.render_chat(chat)
        one = tok.chat(chats[:1] * 2, after=Continuation(None, cache.tokens[:1], cache.count[:1]))
        assert one.ids.tolist() == tok.chat(chats[:1] * 2, after=ids[0, : counts[0]]).ids.tolist()
        with pytest.raises(InputError, match="after has 2 rows, but there are 1 conversations"):
            tok.chat(chats[:1], after=cache)
        with pytest.raises(InputError, match="the ids of this cache's tokens are unknown"):
            tok.chat(chats, after=Continuation(None, None, cache.count))
        with pytest.raises(InputError, match="conversation 1 does not begin with"):
            tok.chat([chats[0], chats[0]], after=cache)

    @pytest.mark.parametrize("rest", ["[INST]a", " hell", " a hell", "\nhe"])
    def test_no_space_comes_between_a_cache_and_the_rest(self, rest):
        tok = llama(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " hell"}]
        cached = [*tok.encode("a", add_special_tokens=False), *map(tok.backend.token_to_id, ["▁", "he", "ll"])]
        assert cached != tok.encode(tok.render_chat(chat), add_special_tokens=False)
        chat.append({"role": "user", "content": rest})
        (row,) = tok.chat([chat], after=cached).ids
        assert tok.decode([*cached, *row]) == f"a hell{rest}"
        whole = tok.encode(tok.render_chat(chat), add_special_tokens=False)
        assert row.tolist() == whole[-len(row) :]

    def test_rest_that_would_be_encoded_differently_is_refused(self):
        tok = llama(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
        tok.backend.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Prepend("▁")])
        cached = [tok.backend.token_to_id(piece) for piece in ("▁", "he", "ll")]
        with pytest.raises(InputError, match="conversation 0 does not begin with"):
            tok.chat([[{"role": "user", "content": "hella"}]], after=cached)

    def test_conversations_with_another_beginning_are_refused(self):
        tok = byte_level()
        prefix = tok.chat_prefix(BEGINNINGS[0])
        with pytest.raises(InputError, match=r"conversation 1 does not begin with .*: begin with the same messages"):
            tok.chat([conversations(BEGINNINGS[0], "a")[0], USER], after=prefix)
        assert tok.chat([USER], after=[]).ids.tolist() == tok.chat([USER]).ids.tolist()
        whole = tok.chat([USER]).ids[0]
        with pytest.raises(InputError, match="conversation 0 has no tokens after the"):
            tok.chat([USER], after=whole)
        with pytest.raises(InputError, match="conversation 0 does not begin with"):
            tok.chat([USER], after=[*whole, 1])
        with pytest.raises(InputError, match="no first token in common"):
            byte_level(chat_template="{{ messages[-1].content }}").chat_prefix(BEGINNINGS[0])
        with pytest.raises(TypeError, match="must be a list of messages, got str"):
            tok.chat_prefix("be a fox")  # type: ignore[arg-type]


class TestFiles:
    def test_config_and_template_file(self, tmp_path):
        save(tmp_path, byte_level_backend(), tokenizer_config={"chat_template": "no", "eos_token": "<|end|>"})
        assert Tokenizer.from_pretrained(str(tmp_path)).chat_template == "no"
        (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
        tok = Tokenizer.from_pretrained(tmp_path)
        assert (tok.chat_template, tok.eos_token_id) == (CHATML, 260)

    def test_templates_in_a_folder(self, tmp_path):
        folder = tmp_path / "additional_chat_templates"
        folder.mkdir()
        (folder / "tool_use.jinja").write_text("T{{ tools | length }}", encoding="utf-8")
        (folder / "README.md").write_text("no template", encoding="utf-8")
        conversation, tools = [{"role": "user", "content": "Hi"}], [{"type": "function"}]

        def rendered():
            tok = Tokenizer.from_pretrained(tmp_path)
            return tok.render_chat(conversation), tok.render_chat(conversation, tools=tools)

        save(tmp_path, byte_level_backend(), tokenizer_config={"chat_template": "old"})
        assert rendered() == ("old", "T1")
        (tmp_path / "chat_template.jinja").write_text("D", encoding="utf-8")
        assert rendered() == ("D", "T1")
        named = [{"name": "default", "template": "N"}, {"name": "rag", "template": "R"}]
        save(tmp_path, byte_level_backend(), tokenizer_config={"chat_template": named})
        assert rendered() == ("D", "T1")
        assert Tokenizer.from_pretrained(tmp_path).chat_template_for(None) == "D"
        Tokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "copy")
        again = Tokenizer.from_pretrained(tmp_path / "copy")
        assert again.render_chat(conversation, tools=tools) == "T1"
        (tmp_path / "other" / "additional_chat_templates").mkdir(parents=True)
        with pytest.raises(InputError, match="already has additional_chat_templates"):
            again.save_pretrained(tmp_path / "other")

    def test_tokenizer_json_alone(self, tmp_path):
        tok = Tokenizer.from_pretrained(save(tmp_path, llama_backend()))
        assert (tok.bos_token, tok.eos_token_id, tok.model_max_length) == (None, None, None)
        assert tok.encode("hell") == llama().encode("hell")

    @pytest.mark.parametrize("model_type", ["llama", "mistral"])
    def test_llama_class_from_config_json(self, tmp_path, model_type):
        backend = llama_backend()
        backend.post_processor = processors.ByteLevel()
        tok = Tokenizer.from_pretrained(save(tmp_path, backend, config={"model_type": model_type}))
        assert (tok.bos_token, tok.eos_token, tok.clean_up_tokenization_spaces) == ("<s>", "</s>", False)
        assert tok.encode("hell") == llama().encode("hell")

    @pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
    def test_qwen_class_from_config_json(self, tmp_path, model_type):
        backend = byte_level_backend()
        backend.add_special_tokens(["<|endoftext|>"])
        tok = Tokenizer.from_pretrained(save(tmp_path, backend, config={"model_type": model_type}))
        assert (tok.bos_token, tok.eos_token, tok.pad_token_id) == (None, "<|endoftext|>", len(tok) - 1)
        assert tok.encode("hell") == byte_level().encode("hell")

    @pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text", "gemma3"])
    def test_gemma_class_from_config_json(self, tmp_path, model_type):
        backend = llama_backend()
        backend.add_special_tokens(["<bos>", "<eos>", "<pad>"])
        tok = Tokenizer.from_pretrained(save(tmp_path, backend, config={"model_type": model_type}))
        assert (tok.bos_token, tok.eos_token, tok.pad_token, tok.unk_token) == ("<bos>", "<eos>", "<pad>", "<unk>")
        assert tok.encode("hell") == [tok.bos_token_id, *llama().encode("hell")[1:]]
        assert tok.clean_up_tokenization_spaces is False

    @pytest.mark.parametrize("model_type", ["granite", "olmo2", "olmo3"])
    def test_gpt2_class_from_config_json(self, tmp_path, model_type):
        backend = byte_level_backend()
        backend.add_special_tokens(["<|endoftext|>"])
        tok = Tokenizer.from_pretrained(save(tmp_path, backend, config={"model_type": model_type}))
        assert (tok.bos_token, tok.eos_token, tok.pad_token) == ("<|endoftext|>", "<|endoftext|>", None)
        assert tok.encode("hell") == byte_level().encode("hell")

    def test_unknown_model_types_have_no_default_class(self, tmp_path):
        tok = Tokenizer.from_pretrained(save(tmp_path, llama_backend(), config={"model_type": "other"}))
        assert (tok.bos_token, tok.eos_token) == (None, None)

    @pytest.mark.parametrize(
        "tok",
        [
            byte_level(),
            llama(add_eos_token=True, tokenizer_class="LlamaTokenizer", model_max_length=99),
            byte_level(tokenizer_class="Qwen2TokenizerFast", eos_token="<|end|>", chat_template=None),
            byte_level(chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]),
            byte_level(
                additional_special_tokens=["<|new|>"],
                added_tokens_decoder={"263": {"content": "<think>", "special": False, "normalized": False}},
            ),
        ],
    )
    @pytest.mark.parametrize("model_type", ["qwen2", "llama"])
    def test_a_saved_tokenizer(self, tmp_path, tok, model_type):
        folder = tmp_path / "new" / "folder"
        tok.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))  # names another class
        read = Tokenizer.from_pretrained(folder)
        for text in ("hello", " hell <|im_end|><|new|> <think>x", "é"):
            assert read.encode(text) == tok.encode(text)
            assert read.decode(tok.encode(text), skip_special_tokens=False) == tok.decode(
                tok.encode(text), skip_special_tokens=False
            )
        names = ["special_tokens", "pad_token_id", "model_max_length", "clean_up_tokenization_spaces", "_templates"]
        assert [getattr(read, name) for name in names] == [getattr(tok, name) for name in names]
        assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
        with pytest.raises(InputError, match=r"folder already has tokenizer\.json: choose another directory"):
            tok.save_pretrained(folder)

    def test_save_refuses_files_of_another_tokenizer(self, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("another")
        with pytest.raises(InputError, match=r"already has chat_template\.jinja"):
            byte_level().save_pretrained(tmp_path)

    def test_null_is_not_replaced_by_the_class_default(self):
        config = {"tokenizer_class": "Qwen2Tokenizer"}
        assert Tokenizer(byte_level_backend(), config).pad_token == "<|endoftext|>"
        assert Tokenizer(byte_level_backend(), {**config, "pad_token": None}).pad_token is None

    def test_added_tokens_of_the_config(self):
        size = len(llama())
        added = {
            str(size + 1): {"content": "[Y]", "special": True, "normalized": False},
            str(size): {"content": "[X]", "lstrip": True, "special": False, "normalized": False},
        }
        tok = llama(added_tokens_decoder=added, pad_token="[PAD]", cls_token={"content": "[Y]"})
        assert tok.encode("a [X][Y]", add_special_tokens=False)[-2:] == [size, size + 1]
        assert len(tok.encode("a [X]")) == len(tok.encode("a[X]"))
        assert tok.pad_token_id == size + 2 == len(tok) - 1
        assert tok.decode([size, size + 1, size + 2]) == "[X]"

    def test_flags_of_tokenizer_json_are_preserved(self):
        backend = llama_backend()
        backend.add_special_tokens([tokenizers.AddedToken("[E]", lstrip=True)])
        tok = Tokenizer(backend, {"eos_token": "[E]"})
        assert tok.encode("a  [E]") == [*tok.encode("a"), tok.eos_token_id]

    def test_a_named_token_is_special(self):
        size = len(llama())
        tok = llama(added_tokens_decoder={str(size): {"content": "[E]", "special": False}}, eos_token="[E]")
        assert (tok.eos_token_id, tok.decode([size])) == (size, "")

    def test_added_tokens_with_another_id_are_refused(self):
        with pytest.raises(ConfigError, match=r"\[X\].* 999"):
            llama(added_tokens_decoder={"999": {"content": "[X]"}})
        with pytest.raises(ConfigError, match="map ids to tokens"):
            llama(added_tokens_decoder={"999": "[X]"})

    def test_files_of_older_checkpoints(self, tmp_path):
        size = len(llama())
        files = {
            "special_tokens_map": {
                "eos_token": {"content": "</s>", "lstrip": False},
                "pad_token": "[P]",
                "additional_special_tokens": ["[S]", "[T]"],
            },
            "added_tokens": {"[P]": size, "[X]": size + 1},
        }
        config = {"eos_token": "<unk>", "additional_special_tokens": ["[S]"]}
        save(tmp_path, llama_backend(), tokenizer_config=config, **files)
        tok = Tokenizer.from_pretrained(tmp_path)
        assert (tok.eos_token, tok.pad_token_id) == ("</s>", size)
        assert tok.encode("[X]") == [1, size + 1]
        assert tok.special_tokens["additional_special_tokens"] == ["[S]", "[T]"]
        assert tok.decode(tok.encode("a[S][T]")) == "a"
        save(tmp_path, llama_backend(), tokenizer_config={"eos_token": "<unk>", "added_tokens_decoder": {}})
        assert Tokenizer.from_pretrained(tmp_path).eos_token == "<unk>"

    def test_huge_model_max_length_means_no_limit(self):
        assert llama(model_max_length=int(1e30)).model_max_length is None
        assert llama(model_max_length=77).model_max_length == 77

    def test_missing_files_are_reported(self, tmp_path):
        with pytest.raises(InputError, match="not a directory"):
            Tokenizer.from_pretrained(tmp_path / "nowhere")
        (tmp_path / "tokenizer.model").write_bytes(b"")
        with pytest.raises(InputError, match=r"it has: tokenizer\.model"):
            Tokenizer.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("tokenizer.json", b'{"version": '),
            ("tokenizer_config.json", b"{"),
            ("tokenizer_config.json", b"[]"),
            ("tokenizer_config.json", b'{"eos_token": "\xff"}'),
            ("special_tokens_map.json", b"nope"),
            ("chat_template.jinja", b"\xff"),
        ],
    )
    def test_damaged_files_are_refused(self, tmp_path, name, content):
        save(tmp_path, llama_backend())
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            Tokenizer.from_pretrained(tmp_path)

    def test_panic_of_the_library_is_an_error(self, tmp_path):
        save(tmp_path, byte_level_backend())
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        content["model"]["continuing_subword_prefix"] = "##"
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=r"tokenizer\.json: the tokenizer fails: .*slice"):
            Tokenizer.from_pretrained(tmp_path)
        content["model"]["continuing_subword_prefix"] = ""
        content["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match="chunk size must be non-zero"):
            Tokenizer.from_pretrained(tmp_path)

    @pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$"])
    def test_a_regular_expression_with_exponential_time_is_an_error(self, tmp_path, pattern):
        backend = byte_level_backend()
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        tok = Tokenizer.from_pretrained(save(tmp_path, backend))
        with bounded(), pytest.raises(ConfigError, match=r"the tokenizer fails: .*retry-limit"):
            tok.encode("a" * 2000 + "b")

    @pytest.mark.parametrize(
        "config",
        [
            {"truncation_side": "middle"},
            {"model_max_length": True},
            {"model_max_length": float("nan")},
            {"model_max_length": 0},
            {"eos_token": 3},
            {"additional_special_tokens": [{"a": 1}]},
            {"additional_special_tokens": 3},
            {"added_tokens_decoder": ["[X]"]},
            {"model_max_length": "long"},
            {"tokenizer_class": 3},
            {"add_bos_token": "yes"},
            {"chat_template": 3},
            {"chat_template": [{"name": "default", "template": None}]},
        ],
    )
    def test_bad_values_are_refused(self, config):
        with pytest.raises(ConfigError, match=next(iter(config))):
            llama(**config)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda tok: tok(["text"], return_tensors="np"), TypeError, r"is not callable: use batch\(texts\)"),
        (lambda tok: tok.batch_decode([[1]]), AttributeError, r"no batch_decode: use decode_batch\(out\)"),
        (lambda tok: tok.apply_chat_template([]), AttributeError, r"use chat\(conversations\) for ids, or render_chat"),
        (lambda tok: tok.nothing, AttributeError, "Tokenizer has no nothing$"),
    ],
)
def test_method_names_of_transformers_get_a_hint(use, error, message):
    with pytest.raises(error, match=message):
        use(byte_level())


def test_repr_shows_special_tokens():
    parts = f"{BYTE_LEVEL.backend.get_vocab_size()} tokens, eos_token='<|im_end|>', pad_token='<|end|>'"
    assert repr(BYTE_LEVEL) == f"Tokenizer(tokenizer, {parts}, with a chat template)"
    assert repr(Tokenizer(byte_level_backend())).endswith(" tokens, without a chat template)")


def test_methods_named_in_hints_exist():
    for hint in ELSEWHERE.values():
        for name in re.findall(r"([\w.]+)\(", hint):
            assert operator.attrgetter(name)(byte_level())
