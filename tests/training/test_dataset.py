"""From texts and conversations to rows: which tokens are trained on, which examples are kept, and in what order."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import InputError, Tokenizer
from jaxgen.errors import JaxgenWarning
from jaxgen.training.conversations import chat_examples
from jaxgen.training.dataset import pack, read_examples, shuffled
from jaxgen.training.examples import IGNORED, Example, text_example
from jaxgen.training.loop import TrainBatch
from tests.support.chat_templates import QWEN3, QWEN25, template_tokenizer
from tests.support.tokenizers import byte_level, llama

INST = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "Be kind."}
SAY_HELLO, HELLO = {"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "hello"}
AGAIN, HE = {"role": "user", "content": "Again?"}, {"role": "assistant", "content": "hell no\n\nhe"}


def parts(tokenizer: Tokenizer, *pieces: tuple[str, bool]) -> Example:
    """Encode pieces of text one by one; the boolean says whether a piece is trained on."""
    ids, labels = [], []
    for text, learnt in pieces:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        labels += piece if learnt else [IGNORED] * len(piece)
    return Example(ids, labels)


def chat_example(tokenizer: Tokenizer, conversation: list) -> Example:
    """Return the only example of a conversation."""
    (example,) = chat_examples(tokenizer, conversation)
    return example


class TestConversations:
    @pytest.mark.parametrize("system", [[], [SYSTEM]])
    def test_only_answers_and_their_ends_are_learnt(self, system):
        head = "<|im_start|>system\nBe kind.<|im_end|>\n" if system else ""
        example = chat_example(byte_level(), [*system, SAY_HELLO, HELLO, AGAIN, HE])
        assert example == parts(
            byte_level(),
            (head + "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n", False),
            ("hello<|im_end|>", True),
            ("\n<|im_start|>user\nAgain?<|im_end|>\n<|im_start|>assistant\n", False),
            ("hell no\n\nhe<|im_end|>", True),
        )

    def test_ids_match_the_chat_template(self):
        tokenizer = byte_level()
        conversation = [SYSTEM, SAY_HELLO, HELLO, AGAIN, HE]
        whole = tokenizer.chat(conversation, add_generation_prompt=False).ids[0].tolist()
        example = chat_example(tokenizer, conversation)
        assert example.ids + tokenizer.encode("\n") == whole
        assert example.ids[-1] == example.labels[-1] == tokenizer.eos_token_id

    def test_text_after_the_last_answer_is_left_out(self):
        assert chat_example(byte_level(), [SAY_HELLO, HELLO, AGAIN]) == chat_example(byte_level(), [SAY_HELLO, HELLO])

    def test_two_answers_in_a_row(self):
        example = chat_example(byte_level(), [SAY_HELLO, HELLO, HE])
        learnt = [label for label in example.labels if label != IGNORED]
        assert byte_level().decode(learnt, skip_special_tokens=False) == "hello<|im_end|>hell no\n\nhe<|im_end|>"

    def test_a_tokenizer_that_puts_a_space_before_every_text(self):
        tokenizer = llama(chat_template=INST)
        conversation = [SAY_HELLO, HELLO, AGAIN, HE]
        example = chat_example(tokenizer, conversation)
        assert example.ids == tokenizer.chat(conversation, add_generation_prompt=False).ids[0].tolist()
        start = len(tokenizer.chat([SAY_HELLO]).ids[0])
        assert example.labels[:start] == [IGNORED] * start
        answer = [tokenizer.backend.id_to_token(label) for label in example.labels[start : start + 4]]
        assert answer == ["▁hell", "o", "▁", "</s>"]

    def test_no_token_spans_question_and_answer(self):
        tokenizer = byte_level(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
        conversation = [{"role": "user", "content": "h"}, {"role": "assistant", "content": "ello"}]
        example = chat_example(tokenizer, conversation)
        assert tokenizer.encode("hello") == tokenizer.encode("hell") + tokenizer.encode("o")
        assert example == parts(tokenizer, ("h", False), ("ello", True))

    @pytest.mark.parametrize(
        ("conversation", "message"),
        [
            ([SAY_HELLO], "has no answer"),
            ([], "has no answer"),
            ([HELLO, SAY_HELLO], "begins with an answer"),
            ([{"role": "user"}, HELLO], 'message 0 must have a "content"'),
        ],
    )
    def test_conversations_without_answers_are_refused(self, conversation, message):
        with pytest.raises(InputError, match=message):
            chat_example(byte_level(), conversation)

    def test_qwens_own_template(self, data):
        tokenizer = Tokenizer.from_pretrained(data / "tokenizers" / "qwen2.5-instruct")
        conversation = [SAY_HELLO, HELLO, AGAIN, {"role": "assistant", "content": " Ça va? 你好 \n"}]
        example = chat_example(tokenizer, conversation)
        whole = tokenizer.chat(conversation, add_generation_prompt=False).ids[0].tolist()
        assert example.ids + tokenizer.encode("\n") == whole
        learnt = [label for label in example.labels if label != IGNORED]
        assert tokenizer.decode(learnt, skip_special_tokens=False) == "hello<|im_end|> Ça va? 你好 \n<|im_end|>"


class TestTexts:
    def test_a_text_ends_with_one_eos(self):
        tokenizer = byte_level()
        ids = tokenizer.encode("hello<|im_end|>")
        assert text_example(tokenizer, "hello") == text_example(tokenizer, "hello<|im_end|>") == Example(ids, ids)
        assert text_example(byte_level(eos_token=None), "hello").ids == tokenizer.encode("hello")

    def test_completions(self, tmp_path):
        line = {"prompt": "Say hell", "completion": " hello"}
        (tmp_path / "data").write_text(json.dumps(line))
        plain, chat = byte_level(chat_template=None), byte_level()
        assert read_examples(tmp_path / "data", plain) == [
            parts(plain, ("Say hell", False), (" hello<|im_end|>", True))
        ]
        user, assistant = ({"role": r, "content": c} for r, c in zip(("user", "assistant"), line.values(), strict=True))
        assert read_examples(tmp_path / "data", chat) == [chat_example(chat, [user, assistant])]

    def test_completions_keep_the_bos_and_the_spaces_of_the_whole_text(self, tmp_path):
        (tmp_path / "data").write_text('{"prompt": "a hell", "completion": " no"}')
        tokenizer = llama()
        (example,) = read_examples(tmp_path / "data", tokenizer)
        assert example.ids == [*tokenizer.encode("a hell no"), tokenizer.eos_token_id]
        assert example.labels[: len(tokenizer.encode("a hell"))] == [IGNORED] * len(tokenizer.encode("a hell"))
        assert example.ids[-2:] == example.labels[-2:]

    def test_all_forms_in_one_file(self, tmp_path):
        lines = [{"text": "hello"}, {"prompt": "a", "completion": "b"}, {"messages": [SAY_HELLO, HELLO]}]
        content = "\r\n\r\n".join(json.dumps(line) for line in lines)
        (tmp_path / "data").write_bytes(b"\xef\xbb\xbf" + content.encode())
        examples = read_examples(tmp_path / "data", byte_level())
        assert len(examples) == 3
        assert examples[2] == chat_example(byte_level(), [SAY_HELLO, HELLO])

    @staticmethod
    def read(tmp_path, entry: dict, tokenizer: Tokenizer | None = None) -> list[Example]:
        (tmp_path / "data").write_text(json.dumps(entry), encoding="utf-8")
        return read_examples(tmp_path / "data", tokenizer or byte_level())

    def test_sharegpt(self, tmp_path):
        turns = [("system", "Be kind."), ("human", "Say hello."), ("gpt", "hello"), ("user", "Again?"), ("gpt", "hell")]
        messages = [SYSTEM, SAY_HELLO, HELLO, AGAIN, {"role": "assistant", "content": "hell"}]
        wanted = chat_examples(byte_level(), messages)
        entry = {"conversations": [{"from": name, "value": text} for name, text in turns]}
        assert self.read(tmp_path, entry) == self.read(tmp_path, {"conversations": messages}) == wanted
        del entry["conversations"][0]
        assert self.read(tmp_path, {**entry, "system": "Be kind."}) == wanted
        assert self.read(tmp_path, {**entry, "system": ""}) == chat_examples(byte_level(), messages[1:])

    def test_sharegpts_calls(self, tmp_path):
        call = {"name": "look_up", "arguments": {"of": "it"}}
        messages = [SAY_HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}]
        messages += [{"role": "tool", "content": "7"}, HELLO]
        tool = {"name": "look_up"}
        wanted = chat_examples(QWEN25.tokenizer, messages, tools=[tool])
        for name in ("observation", "tool", "function_response"):
            for value in (call, [call], json.dumps(call), json.dumps([call])):
                turns = [("human", "Say hello."), ("function_call", value), (name, "7"), ("gpt", "hello")]
                entry = {"conversations": [{"from": who, "value": said} for who, said in turns]}
                for tools in ([tool], json.dumps([tool])):
                    assert self.read(tmp_path, {**entry, "tools": tools}, QWEN25.tokenizer) == wanted
        for value, error in (
            ("look_up()", "message 1: the value of a function_call is not valid JSON"),
            (5, "each call"),
        ):
            entry["conversations"][1]["value"] = value
            with pytest.raises(InputError, match=error):
                self.read(tmp_path, entry, QWEN25.tokenizer)

    def test_only_the_answers_of_a_completion_are_learnt(self, tmp_path):
        entry = {"prompt": [SAY_HELLO, HELLO, AGAIN], "completion": [HE]}
        wanted = chat_examples(byte_level(), [SAY_HELLO, HELLO, AGAIN, HE], learnt_from=3)
        assert self.read(tmp_path, entry) == wanted
        with_system = chat_examples(byte_level(), [SYSTEM, SAY_HELLO, HELLO, AGAIN, HE], learnt_from=4)
        assert self.read(tmp_path, {**entry, "system": "Be kind."}) == with_system
        continued = {"prompt": [SAY_HELLO, HELLO], "completion": [HE], "system": "Be kind."}
        wanted_here = chat_examples(byte_level(), [SYSTEM, SAY_HELLO, HELLO, HE], learnt_from=3)
        assert self.read(tmp_path, continued) == wanted_here
        assert sum(label != IGNORED for label in wanted[0].labels) == len(
            byte_level().encode("hell no\n\nhe<|im_end|>")
        )
        with pytest.raises(InputError, match="the conversation has no answer"):
            self.read(tmp_path, {"prompt": [SAY_HELLO, HELLO], "completion": [AGAIN]})

    def test_tools_and_variables_reach_the_template(self, tmp_path):
        messages, tools = [SAY_HELLO, HELLO], [{"type": "function", "function": {"name": "look_up"}}]
        entry = {"messages": messages, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
        wanted = chat_examples(QWEN3.tokenizer, messages, tools=tools, enable_thinking=False)
        assert self.read(tmp_path, entry, QWEN3.tokenizer) == wanted
        assert self.read(tmp_path, entry | {"tools": json.dumps(tools)}, QWEN3.tokenizer) == wanted
        strings = {"prompt": "Say hello.", "completion": "hello"}
        assert self.read(tmp_path, {**entry, **strings, "messages": None}, QWEN3.tokenizer) == wanted
        strict = template_tokenizer("{{ 'tools' if tools is not none }}" + QWEN3.template)
        without = chat_examples(QWEN3.tokenizer, messages)
        for tools in ([], None, "", "[]"):
            assert self.read(tmp_path, {"messages": messages, "tools": tools}, strict) == without

    def test_a_conversation_with_several_examples(self, tmp_path):
        messages = [SAY_HELLO, HELLO, AGAIN, HE]
        examples = self.read(tmp_path, {"messages": messages}, QWEN3.tokenizer)
        assert len(examples) == 2
        assert examples == chat_examples(QWEN3.tokenizer, messages)

    def test_keys_that_are_not_used_are_named_once(self, tmp_path):
        chat = {"messages": [SAY_HELLO, HELLO]}
        lines = [
            {**chat, "id": 1, "source": "a"},
            {**chat, "prompt": "Say", "prompt_id": "x", "id": 2},
            {**chat, "text": None},
        ]
        (tmp_path / "data").write_text("\n".join(json.dumps(line) for line in lines))
        with pytest.warns(
            JaxgenWarning, match="data: keys that are not used for training: id, source, prompt_id, prompt$"
        ):
            assert read_examples(tmp_path / "data", byte_level()) == 3 * chat_examples(byte_level(), [SAY_HELLO, HELLO])
        with pytest.warns(JaxgenWarning, match=r"k09 and 5 more$"):
            self.read(tmp_path, {**chat, **{f"k{number:02}": 0 for number in range(15)}})

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            *(
                ("tool", "tools"),
                ("Tools", "tools"),
                ("functions", "tools"),
                ("sytem", "system"),
                ("message", "messages"),
            ),
            *(("chat_template_kwarg", "chat_template_kwargs"), ("conversation", "conversations")),
        ],
    )
    def test_misspelled_key_gets_a_hint(self, tmp_path, name, meant):
        with pytest.raises(InputError, match=f"line 1: unknown key '{name}': did you mean '{meant}'"):
            self.read(tmp_path, {"messages": [SAY_HELLO, HELLO], name: []})

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"{", "line 3: not valid JSON: .* at character 2"),
            (b'{"text": "\xff"}', "line 3: not UTF-8: .* at byte 11"),
            (b"[" * 100_000, "line 3: not valid JSON: nested too deeply"),
            (b'["hello"]', "line 3: each line must be"),
            (b'{"text": ""}', 'line 3: "text" must be a string that is not empty'),
            (b'{"text": 5}', 'line 3: "text" must be a string that is not empty'),
            (b'{"prompt": "a", "text": null}', "line 3: each line must be"),
            (b'{"text": "a", "messages": []}', "line 3: the line has messages and text: keep only one"),
            (b'{"text": "a", "tools": [{}]}', 'line 3: "tools" needs a conversation'),
            (b'{"prompt": "a", "completion": []}', "line 3: .* two strings or two lists of messages"),
            (b'{"messages": [], "tools": "f"}', 'line 3: "tools" is not valid JSON'),
            (b'{"messages": [], "tools": {"a": 1}}', 'line 3: "tools" must be a list of objects'),
            (b'{"messages": [], "system": 5}', 'line 3: "system" must be a string'),
            (b'{"messages": 5, "system": "a"}', "line 3: a conversation must be a list"),
            (
                b'{"messages": [{"role": "system"}], "system": "a"}',
                'line 3: the line has "system" and a system message',
            ),
            (b'{"messages": [], "chat_template_kwargs": []}', 'line 3: "chat_template_kwargs" must be an object'),
            (b'{"messages": [], "chat_template_kwargs": {"tools": 1}}', "line 3: .* must not have the key tools"),
            (b'{"conversations": [{"from": "bard", "value": "a"}]}', 'line 3: message 0: "from" must be one of human'),
            (b'{"messages": "hello"}', "line 3: a conversation must be a list of messages"),
            (b'{"messages": 5}', "line 3: a conversation must be a list of messages"),
            (b'{"messages": [{"role": "user", "content": "a"}, "b"]}', "line 3: a conversation must be a list"),
            (b'{"messages": [{"role": "user", "content": "a"}]}', "line 3: the conversation has no answer"),
            (b'{"messages": [{"role": 1, "content": "a"}, {"role": "assistant"}]}', 'must have a "role"'),
            (b'{"text": "\\ud800"}', "line 3: not valid JSON: a string has half of a surrogate pair"),
        ],
    )
    def test_bad_lines_are_named(self, tmp_path, line, message):
        (tmp_path / "data").write_bytes(b'{"text": "hello"}\n\n' + line + b"\n")
        with pytest.raises(InputError, match=message):
            read_examples(tmp_path / "data", byte_level())

    def test_empty_data_is_refused(self, tmp_path):
        (tmp_path / "data").write_text("\n \n")
        with pytest.raises(InputError, match="no line to train on"):
            read_examples(tmp_path / "data", byte_level())
        (tmp_path / "data").write_text('{"text": "a"}')
        with pytest.raises(InputError, match="line 1: fewer than two tokens"):
            read_examples(tmp_path / "data", byte_level(eos_token=None))


@st.composite
def examples_of_their_own_ids(draw) -> list[Example]:
    """Draw examples in which no id occurs twice. Some of their tokens are trained on."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=200))
    learnt = draw(st.integers(0, 2**32 - 1))
    examples, start = [], 1
    for size in sizes:
        ids = list(range(start, start + size))
        examples.append(Example(ids, [i if (learnt >> i % 32) & 1 else IGNORED for i in ids]))
        start += size
    return examples


class TestPacking:
    @settings(max_examples=50, deadline=None)
    @given(examples_of_their_own_ids(), st.integers(2, 15))
    def test_each_token_is_packed_once_in_order(self, examples, width):
        rows, cut = pack(examples, width)
        assert cut == sum(len(example.ids) > width for example in examples)
        found = []
        for ids, labels, segments in zip(rows.ids, rows.labels, rows.segments, strict=True):
            filled = int(np.count_nonzero(segments))
            assert (segments[filled:] == 0).all()
            assert (labels[filled:] == IGNORED).all()
            texts = segments[:filled].max()
            assert segments[:filled].tolist() == sorted(segments[:filled].tolist())
            assert set(segments[:filled].tolist()) == set(range(1, texts + 1))
            for number in range(1, texts + 1):
                found.append((ids[segments == number].tolist(), labels[segments == number].tolist()))
        wanted = [(e.ids[:width], [IGNORED, *e.labels[1:width]]) for e in examples]
        assert sorted(found) == sorted(wanted)

    def test_texts_share_a_row_while_there_is_room(self):
        examples = [Example([i + 1] * size, [i + 1] * size) for i, size in enumerate((3, 5, 2, 4))]
        rows, _ = pack(examples, 8)
        assert rows.ids.tolist() == [[1, 1, 1, 2, 2, 2, 2, 2], [3, 3, 4, 4, 4, 4, 0, 0]]
        assert rows.segments.tolist() == [[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 0, 0]]

    def test_a_row_of_one_token(self):
        with pytest.raises(InputError, match="at least 2 tokens"):
            pack([Example([1], [1])], 1)


class TestOrder:
    @staticmethod
    def numbered(count: int) -> TrainBatch:
        number = np.arange(count, dtype=np.int32)[:, None]
        return TrainBatch(number, number + 100, number + 200)

    @pytest.mark.parametrize(("count", "rows"), [(10, 4), (3, 8), (7, 7), (1, 2)])
    def test_each_epoch_has_each_row_once(self, count, rows):
        batches = shuffled(self.numbered(count), rows, seed=5)
        steps = [batches(step) for step in range(4 * count)]
        assert all(batch.ids.shape == (rows, 1) for batch in steps)
        assert all((b.labels == b.ids + 100).all() and (b.segments == b.ids + 200).all() for b in steps)
        drawn = np.concatenate([batch.ids[:, 0] for batch in steps])
        epochs = [drawn[start : start + count].tolist() for start in range(0, len(drawn) - count + 1, count)]
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
        assert count < 7 or len({tuple(epoch) for epoch in epochs}) > 1

    def test_a_batch_depends_on_its_step_alone(self):
        data = self.numbered(11)
        forwards = [shuffled(data, 4, 1)(step).ids.tolist() for step in range(20)]
        late = shuffled(data, 4, 1)
        assert [late(step).ids.tolist() for step in reversed(range(20))] == forwards[::-1]
        assert forwards != [shuffled(data, 4, 2)(step).ids.tolist() for step in range(20)]

    def test_shuffling_no_rows_is_refused(self):
        with pytest.raises(InputError, match="at least one row"):
            shuffled(self.numbered(0), 4, 0)
