"""From texts and conversations to rows: which tokens are trained on, which examples are kept, and in what order."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import InputError, Tokenizer
from jaxgen.training.conversations import chat_examples
from jaxgen.training.dataset import pack, read_examples, shuffled
from jaxgen.training.examples import IGNORED, Example, text_example
from jaxgen.training.loop import TrainBatch
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

    def test_the_ids_are_the_chat_templates(self):
        tokenizer = byte_level()
        conversation = [SYSTEM, SAY_HELLO, HELLO, AGAIN, HE]
        whole = tokenizer.chat(conversation, add_generation_prompt=False).ids[0].tolist()
        example = chat_example(tokenizer, conversation)
        assert example.ids + tokenizer.encode("\n") == whole
        assert example.ids[-1] == example.labels[-1] == tokenizer.eos_token_id

    def test_what_follows_the_last_answer_is_left_out(self):
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

    def test_a_template_that_changes_what_it_said_before(self):
        last_only = "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %}{{ m.content }}\n{% endfor %}"
        with pytest.raises(InputError, match="changes the beginning of a conversation"):
            chat_example(byte_level(chat_template=last_only), [SAY_HELLO, HELLO])
        forgetful = "{% for m in messages[-2:] %}{{ m.role }} {{ m.content }}\n{% endfor %}"
        with pytest.raises(InputError, match="changes the beginning of a conversation"):
            chat_example(byte_level(chat_template=forgetful), [SAY_HELLO, HELLO, AGAIN, HE])

    @pytest.mark.parametrize(
        ("conversation", "message"),
        [
            ([SAY_HELLO], "has no answer"),
            ([], "has no answer"),
            ([HELLO, SAY_HELLO], "begins with an answer"),
            ([{"role": "user"}, HELLO], 'message 0 must have a "content"'),
        ],
    )
    def test_conversations_without_anything_to_learn(self, conversation, message):
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

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"{", "line 3: not valid JSON: .* at character 2"),
            (b'{"text": "\xff"}', "line 3: not UTF-8: .* at byte 11"),
            (b"[" * 100_000, "line 3: not valid JSON: nested too deeply"),
            (b'["hello"]', "line 3: each line must be"),
            (b'{"text": ""}', "line 3: each line must be"),
            (b'{"text": 5}', "line 3: each line must be"),
            (b'{"text": "a", "id": 1}', "line 3: each line must be .* got .*id"),
            (b'{"prompt": "a"}', "line 3: each line must be"),
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

    def test_nothing_to_train_on(self, tmp_path):
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
    def test_every_token_once_and_in_order(self, examples, width):
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

    def test_nothing_to_draw_from(self):
        with pytest.raises(InputError, match="at least one row"):
            shuffled(self.numbered(0), 4, 0)
