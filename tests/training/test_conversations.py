"""Conversations: the tokens that the model generates are learnt, after exactly the tokens that it reads."""

import itertools
import json

import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import InputError, Tokenizer
from jaxgen.training.conversations import chat_examples
from jaxgen.training.examples import IGNORED, Example
from tests.support.chat_templates import KINDS, LLAMA3, MISTRAL, QWEN3, QWEN25, R1, SMOLLM3, Kind, template_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": "Be kind."}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def said(content: str | None, thought: str = "", *arguments: dict, **fields) -> dict:
    """Return an answer with a text, a thought, and a call for each of the arguments."""
    calls = [{"type": "function", "function": {"name": "look_up", "arguments": given}} for given in arguments]
    message = {"role": "assistant", "content": content, **fields}
    return message | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


def result(content: str) -> dict:
    return {"role": "tool", "content": content}


def answers(examples: list[Example]) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each answer that is learnt, after the ids that are read before it."""
    found = []
    for ids, labels in examples:
        assert all(label in (token, IGNORED) for token, label in zip(ids, labels, strict=True))
        starts = [n for n, label in enumerate(labels) if label != IGNORED and (n == 0 or labels[n - 1] == IGNORED)]
        for start in starts:
            end = next((n for n in range(start, len(ids)) if labels[n] == IGNORED), len(ids))
            found.append((ids[:start], ids[start:end]))
    return found


def texts(tokenizer: Tokenizer, examples: list[Example]) -> list[list[str]]:
    """Return the texts of the examples, as read and generated parts in turn."""
    parts = []
    for example in examples:
        ends = [0]
        for before, learnt in answers([example]):
            ends += [len(before), len(before) + len(learnt)]
        pieces = [example.ids[start:end] for start, end in itertools.pairwise(ends)]
        parts.append([tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces])
    return parts


def expected(kind: Kind, messages: list[dict], **arguments) -> list[tuple[list[int], list[int]]]:
    """Return the same as `answers`, found without the code under test: each answer on its own, by character offsets."""
    tokenizer, found = kind.tokenizer, []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or not message.get("weight", 1):
            continue
        question = tokenizer.render_chat(messages[:number], **arguments)
        encoding = tokenizer.backend.encode(question + kind.generated(message), add_special_tokens=False)
        first = next(n for n, (start, _) in enumerate(encoding.offsets) if start >= len(question))
        assert first == 0 or encoding.offsets[first - 1][1] <= len(question)
        assert encoding.ids[:first] == tokenizer.encode(question, add_special_tokens=False)
        found.append((encoding.ids[:first], encoding.ids[first:]))
    return found


TEXT = st.lists(st.sampled_from([*"hel o\n.{'", "é", "🙂", "hell", "a text"]), max_size=6).map("".join)


@st.composite
def conversations(draw, kind: Kind) -> tuple[list[dict], list[dict] | None]:
    """Draw messages that the kind's template can write, and tools."""
    thinks, calls = kind in (QWEN3, R1, SMOLLM3), kind is not SMOLLM3
    messages = [SYSTEM] if draw(st.booleans()) else []
    used = False
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(TEXT) + "?"))
        for step in range(draw(st.integers(1, 3)) if calls else 1):
            thought = draw(TEXT).strip() if thinks else ""
            weight = {"weight": draw(st.integers(0, 1))} if draw(st.booleans()) else {}
            given = draw(st.lists(st.dictionaries(st.sampled_from("ab"), TEXT, min_size=1), max_size=step and 2))
            given = given if calls and step else []
            if kind is LLAMA3:
                given = given[:1]
            text = draw(TEXT) if not given or kind in (QWEN25, QWEN3) else None if kind is R1 else ""
            form = [json.dumps(arguments, ensure_ascii=False) for arguments in given] if kind is R1 else given
            messages.append(said(text, thought, *form, **weight))
            used |= bool(given)
            if not given:
                break
            messages += [result(draw(TEXT) + "!") for _ in given]
    return messages, TOOLS if calls and kind is not R1 and draw(st.booleans()) else None


class TestKinds:
    @pytest.mark.parametrize("name", KINDS)
    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_each_answer_is_learnt_after_what_the_model_reads(self, name, data):
        messages, tools = data.draw(conversations(KINDS[name]))
        wanted = expected(KINDS[name], messages, tools=tools)
        if wanted:
            assert answers(chat_examples(KINDS[name].tokenizer, messages, tools=tools)) == wanted
        else:
            with pytest.raises(InputError, match="no answer"):
                chat_examples(KINDS[name].tokenizer, messages, tools=tools)

    @pytest.mark.parametrize("name", ["qwen3", "r1"])
    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def test_thoughts_in_the_text_are_those_in_a_field(self, name, data):
        messages, tools = data.draw(conversations(KINDS[name]))
        inline = [dict(message) for message in messages]
        for message in inline:
            if message.get("content") is not None and (thought := message.pop("reasoning_content", "")):
                message["content"] = f"<think>\n{thought}\n</think>\n\n" + message["content"].lstrip("\n")
        wanted = expected(KINDS[name], inline, tools=tools)
        for number, (message, original) in enumerate(zip(inline, messages, strict=True)):
            inline[number] = message if message["role"] == "assistant" else original
        if wanted:
            learnt = answers(chat_examples(KINDS[name].tokenizer, inline, tools=tools))
            given = [m for m in messages if m["role"] == "assistant" and m.get("weight", 1)]
            assert [before for before, _ in learnt] == [before for before, _ in wanted]
            decode = KINDS[name].tokenizer.decode
            generated = [KINDS[name].generated({**m, "content": (m["content"] or "").lstrip("\n")}) for m in given]
            assert [decode(ids, skip_special_tokens=False) for _, ids in learnt] == generated

    @pytest.mark.parametrize("name", KINDS)
    def test_real_tokens(self, name, data):
        """With the vocabulary of Qwen2.5, whose tokens merge newlines."""
        real = Tokenizer.from_pretrained(data / "tokenizers" / "qwen2.5-instruct").backend
        tokenizer = template_tokenizer(KINDS[name].template, real)
        messages = [user("Hi\n"), said("\n\nÇa va? 你好 \n"), user("?"), said("So."), user(" "), said("\nWell.\n")]
        for before, learnt in answers(chat_examples(tokenizer, messages)):
            number = next(n for n in (1, 3, 5) if tokenizer.encode(tokenizer.render_chat(messages[:n])) == before)
            assert tokenizer.decode(learnt, skip_special_tokens=False) == KINDS[name].generated(messages[number])


class TestExamples:
    def test_earlier_thoughts_are_neither_read_nor_learnt_again(self):
        messages = [user("1?"), said("One.", "Hm."), user("2?"), said("Two."), user("3?"), said("Three.", "So.")]
        start, end = "<|im_start|>", "<|im_end|>"
        first = f"{start}user\n1?{end}\n{start}assistant\n"
        second = f"{first}One.{end}\n{start}user\n2?{end}\n{start}assistant\n"
        third = f"{second}Two.{end}\n{start}user\n3?{end}\n{start}assistant\n"
        assert texts(QWEN3.tokenizer, chat_examples(QWEN3.tokenizer, messages)) == [
            [first, f"<think>\nHm.\n</think>\n\nOne.{end}"],
            [second, f"<think>\n\n</think>\n\nTwo.{end}"],
            [third, f"<think>\nSo.\n</think>\n\nThree.{end}"],
        ]

    def test_answers_share_an_example_while_their_thoughts_are_kept(self):
        steps = [user("?"), said("", "I look.", {"of": "it"}), result("7"), said("It is 7.", "I see.")]
        (example,) = texts(QWEN3.tokenizer, chat_examples(QWEN3.tokenizer, steps, tools=TOOLS))
        assert example[1::2] == [QWEN3.generated(steps[1]), QWEN3.generated(steps[3])]
        assert example[2] == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
        more = chat_examples(QWEN3.tokenizer, [*steps, user("And?"), said("No.", "None.")], tools=TOOLS)
        assert [len(parts) for parts in texts(QWEN3.tokenizer, more)] == [4, 2]

    def test_a_template_that_never_changes_its_text_makes_one_example(self):
        messages = [user("1?"), said("One."), user("2?"), said("Two."), user("3?")]
        (example,) = texts(QWEN25.tokenizer, chat_examples(QWEN25.tokenizer, messages))
        assert example[1::2] == ["One.<|im_end|>", "Two.<|im_end|>"]

    def test_a_thought_that_the_generation_prompt_begins(self):
        messages = [user("1?"), said("One.", "Hm."), user("2?"), said("Two.")]
        assert texts(R1.tokenizer, chat_examples(R1.tokenizer, messages)) == [
            ["<s><User>1?<Bot><think>\n", "Hm.\n</think>\n\nOne.</s>"],
            ["<s><User>1?<Bot>One.</s><User>2?<Bot><think>\n", "\n</think>\n\nTwo.</s>"],
        ]

    def test_a_system_message_that_moves_to_the_last_question(self):
        messages = [SYSTEM, user("1?"), said("One."), user("2?"), said("Two.")]
        assert texts(MISTRAL.tokenizer, chat_examples(MISTRAL.tokenizer, messages)) == [
            ["<s>[INST]Be kind.\n\n1?[/INST]", " One.</s>"],
            ["<s>[INST]1?[/INST] One.</s>[INST]Be kind.\n\n2?[/INST]", " Two.</s>"],
        ]

    def test_a_result_that_ends_differently_when_an_answer_follows(self):
        """As in Hermes' template, which writes a newline after a result only if another message follows."""
        tokenizer = template_tokenizer(
            QWEN25.template.replace(
                "{% else %}", "{% else %}{% set newline = '' if loop.last else '\\n' %}", 1
            ).replace("{{ message.content }}", "{{ message.content + (newline if message.role == 'tool' else '') }}")
        )
        messages = [user("?"), said("", "", {"of": "it"}), result("7"), said("It is 7.")]
        first, second = texts(tokenizer, chat_examples(tokenizer, messages))[-1][-2:]
        assert first.endswith("<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")
        assert second == "It is 7.<|im_end|>"

    @pytest.mark.parametrize("kind", [QWEN3, SMOLLM3])
    def test_without_thinking_the_empty_thought_is_read(self, kind):
        tokenizer = kind.tokenizer
        ((read, learnt),) = texts(tokenizer, chat_examples(tokenizer, [user("?"), said("Yes.")], enable_thinking=False))
        assert read.endswith("</think>\n\n" if kind is QWEN3 else "</think>\n")
        assert learnt == "Yes.<|im_end|>"
        with pytest.raises(InputError, match="message 1 has a thought, but the generation prompt ends with an empty"):
            chat_examples(tokenizer, [user("?"), said("Yes.", "Hm.")], enable_thinking=False)

    def test_a_prompt_with_an_empty_thought_that_answers_do_not_have(self):
        template = R1.template.replace("<Bot><think>\\n", "<Bot><think>\\n\\n</think>\\n\\n")
        tokenizer = template_tokenizer(template)
        assert texts(tokenizer, chat_examples(tokenizer, [user("?"), said("Yes.")])) == [
            ["<s><User>?<Bot><think>\n\n</think>\n\n", "Yes.</s>"]
        ]

    def test_a_thought_that_answers_write_with_other_whitespace(self):
        template = R1.template.replace("message.content.split('</think>')[-1]", "message.content")
        tokenizer = template_tokenizer(template)
        messages = [user("?"), said("<think>Hm. </think>Yes.")]
        assert texts(tokenizer, chat_examples(tokenizer, messages)) == [
            ["<s><User>?<Bot><think>\n", "Hm. </think>Yes.</s>"]
        ]

    def test_the_end_of_the_turn_is_the_end(self):
        """Some templates write another token at the end of the whole conversation."""
        last = "{% if not add_generation_prompt %}{{ '\\n' + eos_token }}{% endif %}"
        messages = [user("1?"), said("One."), user("2?"), said("Two.")]
        examples = chat_examples(template_tokenizer(LLAMA3.template + last), messages)
        assert examples == chat_examples(LLAMA3.tokenizer, messages)

    def test_whitespace_before_the_end_of_the_turn(self):
        ((_, learnt),) = texts(QWEN25.tokenizer, chat_examples(QWEN25.tokenizer, [user("?"), said("Yes. \n")]))
        assert learnt == "Yes. \n<|im_end|>"

    def test_answers_that_are_only_read(self):
        messages = [
            user("1?"),
            said("One.", weight=0),
            user("2?"),
            said("Two.", weight=1),
            user("3?"),
            said("3", weight=0),
        ]
        (example,) = texts(QWEN25.tokenizer, chat_examples(QWEN25.tokenizer, messages))
        assert example[1:] == ["Two.<|im_end|>"]
        assert "One.<|im_end|>" in example[0]
        with pytest.raises(InputError, match=r"the weight of a message must be 0 or 1, got 0\.5"):
            chat_examples(QWEN25.tokenizer, [user("1?"), said("One.", weight=0.5)])

    def test_turns_before_learnt_from_are_only_read(self):
        messages = [user("1?"), said("One."), user("2?"), said("Two.")]
        (example,) = texts(QWEN25.tokenizer, chat_examples(QWEN25.tokenizer, messages, learnt_from=2))
        assert example[1:] == ["Two.<|im_end|>"]


class TestGenerationBlocks:
    def test_header_and_newline_are_not_learnt(self):
        messages = [SYSTEM, user("1?"), said("One."), user("2?"), said("Two.")]
        (example,) = texts(SMOLLM3.tokenizer, chat_examples(SMOLLM3.tokenizer, messages))
        assert example[1::2] == ["One.<|im_end|>", "Two.<|im_end|>"]

    def test_a_part_outside_is_not_learnt_but_the_end_is(self):
        tokenizer = template_tokenizer(
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{{ '(é)' }}"
            "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
        (example,) = texts(
            tokenizer, chat_examples(tokenizer, [user("1?"), said("hello 🙂"), user("2?"), said("hell")])
        )
        assert [part.rpartition("\n")[2] for part in example[::2]] == ["(é)", "(é)"]
        assert example[1::2] == ["hello 🙂<|im_end|>", "hell<|im_end|>"]

    def test_a_part_of_a_text_that_is_encoded_separately(self):
        """No token spans the question and the answer, although "hell" is one token."""
        tokenizer = template_tokenizer(
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ 'e' }}"
            "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
        )
        (example,) = chat_examples(tokenizer, [user("h"), said("llo")])
        assert example.ids == [tokenizer.encode(piece)[0] for piece in ("h", "e", "ll", "o")]
        assert example.labels == [IGNORED, IGNORED, *example.ids[2:]]

    def test_an_answer_without_a_block_is_only_read(self):
        tokenizer = template_tokenizer(
            "{% for m in messages %}{% if m.marked %}{{ '<Bot>' }}{% generation %}{{ m.content + '</s>' }}"
            "{% endgeneration %}{% else %}{{ '<User>' if m.role == 'user' else '<Bot>' }}{{ m.content + '</s>' }}"
            "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<Bot>' }}{% endif %}"
        )
        messages = [user("1?"), said("One."), user("2?"), said("Two.", marked=True)]
        (example,) = texts(tokenizer, chat_examples(tokenizer, messages))
        assert example == ["<User>1?</s><Bot>One.</s><User>2?</s><Bot>", "Two.</s>"]
        with pytest.raises(InputError, match="no generation block that contains an answer"):
            chat_examples(tokenizer, messages[:2])

    def test_generation_blocks_of_the_tool_template(self):
        head = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ '<|im_start|>' }}"
        tail = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
        plain = f"{head}{{{{ m.content + '<|im_end|>' }}}}{tail}"
        body = "{% if m.role == 'user' %}{{ m.content }}{% else %}{{ '(é)' }}{% generation %}{{ m.content }}"
        marked = f"{head}{body}{{% endgeneration %}}{{% endif %}}{{{{ '<|im_end|>' }}}}{tail}"
        templates = {"default": plain, "tool_use": marked}
        tokenizer = template_tokenizer([{"name": name, "template": text} for name, text in templates.items()])
        messages = [user("1?"), said("One.")]
        for tools in (None, TOOLS):
            (example,) = texts(tokenizer, chat_examples(tokenizer, messages, tools=tools))
            assert example[1] == "One.<|im_end|>"

    def test_texts_with_marker_characters_are_refused(self):
        with pytest.raises(InputError, match="generation blocks of the chat template cannot be found"):
            chat_examples(SMOLLM3.tokenizer, [user("\ufdd0?"), said("One.")])


class TestCalls:
    def test_arguments_as_text_or_as_an_object(self):
        for arguments in ({"of": "é"}, '{"of":  "é"}'):
            for kind in (QWEN25, R1):
                messages = [user("?"), said(None, "", arguments)]
                ((_, learnt),) = texts(kind.tokenizer, chat_examples(kind.tokenizer, messages))
                assert learnt == kind.generated(said("", "", {"of": "é"}))

    def test_calls_without_arguments(self):
        for arguments in ("", None, {}):
            messages = [user("?"), said("", "", arguments)]
            ((_, learnt),) = texts(QWEN25.tokenizer, chat_examples(QWEN25.tokenizer, messages))
            assert learnt == QWEN25.generated(said("", "", {}))

    def test_empty_tool_calls_count_as_none(self):
        """Llama's template counts the calls of every message that has the key."""
        for calls in (None, []):
            messages = [{**user("?"), "tool_calls": calls}, {**said("Yes."), "tool_calls": calls}]
            ((_, learnt),) = texts(LLAMA3.tokenizer, chat_examples(LLAMA3.tokenizer, messages))
            assert learnt == "Yes.<|eot|>"

    @pytest.mark.parametrize(
        ("kind", "message", "error"),
        [
            (SMOLLM3, said("", "", {"of": "it"}), "does not write calls, or does not write arguments as JSON"),
            (
                LLAMA3,
                said("I look.", "", {"of": "it"}),
                "message 1: the chat template does not write the text 'I look.'",
            ),
            (LLAMA3, said("", "", {}, {}), "one call"),
            (QWEN25, said("", "", "{"), "message 1: the arguments of look_up are not valid JSON"),
            (QWEN25, said("", "", "[1]"), "message 1: the arguments of look_up must be an object"),
            (QWEN25, {"role": "assistant", "content": "", "tool_calls": ["f"]}, "message 1: each call must be"),
            (QWEN25, {"role": "assistant", "content": "", "tool_calls": "f"}, "message 1: tool_calls must be a list"),
            (QWEN25, said("Yes.", "Hm."), "message 1: the chat template does not write the thought: write it as"),
        ],
    )
    def test_content_that_the_template_omits_is_an_error(self, kind, message, error):
        with pytest.raises(InputError, match=error):
            chat_examples(kind.tokenizer, [user("?"), message])

    def test_arguments_as_python_writes_them(self):
        tokenizer = template_tokenizer(
            QWEN25.template.replace("call.function.arguments | tojson", "call.function.arguments")
        )
        messages = [user("?"), said("", "", {"of": "it"})]
        ((_, learnt),) = texts(tokenizer, chat_examples(tokenizer, messages))
        assert learnt == QWEN25.generated(messages[1])

    def test_tools_that_the_template_omits_are_refused(self):
        with pytest.raises(InputError, match="does not write the tool 'look_up': remove it"):
            chat_examples(R1.tokenizer, [user("?"), said("Yes.")], tools=TOOLS)

    def test_an_answer_without_a_header_of_its_own(self):
        """The last header is that of the answer before the tool's result."""
        tokenizer = template_tokenizer(
            "{% for m in messages %}{% if m.role == 'user' %}{{ '<User>' + m.content }}{% elif m.role == 'tool' %}"
            "{{ '[' + m.content + (']' if loop.last else '] ') }}{% else %}"
            "{{ '<Bot>' if messages[loop.index0 - 1].role == 'user' }}{{ m.content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<Bot>' }}{% endif %}"
        )
        with pytest.raises(InputError, match=r"message 3: .* without the generation prompt before it"):
            chat_examples(tokenizer, [user("?"), said("f()"), result("7"), said("It is 7.")])

    def test_answer_that_cannot_be_located_is_an_error(self):
        tokenizer = template_tokenizer(
            "{% for m in messages %}{{ m.role }} {{ m.content | upper if loop.last else m.content }}\n{% endfor %}"
        )
        with pytest.raises(InputError, match=r"message 1: .* without the generation prompt before it"):
            chat_examples(tokenizer, [user("one?"), said("1")])


class TestMessages:
    def test_text_parts_and_the_developer(self):
        parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        developer = {"role": "developer", "content": "Be kind."}
        example = chat_examples(QWEN25.tokenizer, [developer, {"role": "user", "content": parts}, said("Yes.")])
        assert example == chat_examples(QWEN25.tokenizer, [SYSTEM, user("Hello"), said("Yes.")])
        image = [{"type": "image_url", "image_url": {"url": "x"}}]
        with pytest.raises(InputError, match="message 0: each part of the content must be"):
            chat_examples(QWEN25.tokenizer, [{"role": "user", "content": image}, said("Yes.")])

    @pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
    def test_thoughts_may_have_either_name(self, name):
        wanted = chat_examples(QWEN3.tokenizer, [user("?"), said("Yes.", "Hm.")])
        assert chat_examples(QWEN3.tokenizer, [user("?"), said("Yes.", **{name: "Hm."})]) == wanted

    def test_keys_without_a_value_count_as_absent(self):
        tokenizer = template_tokenizer(
            "{% for m in messages %}{{ m.name + ': ' if 'name' in m }}{{ m.content + '</s>' }}{% endfor %}"
        )
        nothing = dict.fromkeys(("name", "weight", "tool_calls", "reasoning_content"))
        messages = [{**user("?"), **nothing}, {**said("Yes."), **nothing}]
        assert texts(tokenizer, chat_examples(tokenizer, messages)) == [["?</s>", "Yes.</s>"]]
