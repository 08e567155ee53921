"""The command's other modes: conversations and files of prompts."""

import io
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from convert import load_hf
from jaxgen import generate, score
from jaxgen.cli import printing
from jaxgen.cli.chat import Chat
from jaxgen.cli.main import main
from jaxgen.core.text.tokenizer import Tokenizer
from tests.support.compilations import compilations

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ending(copy):
    """Make the saved model end its answers with Z."""
    eos = Tokenizer.from_pretrained(copy).encode("Z")[0]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    return copy


@pytest.fixture
def say(run, talking, monkeypatch):
    """Return a function that types a text into a chat and returns the status, the answers and stderr."""

    def say(text, *options):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return run("--model", talking, "--chat", "--max-new-tokens", 4, *options)

    return say


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["A"], '!"\n'),
        (["A", "--eos-token-id", 60], '!"$\n'),  # the end of turn is a special token, so it is not printed
        (["--raw", "!"], '"$%\n'),
    ],
)
def test_end_of_turn_token_ends_a_chat_answer(run, talking, options, text):
    """The checkpoint's generation config names another token, as those of models tuned from a base model often do."""
    (talking / "tokenizer_config.json").write_text(json.dumps({"eos_token": "#"}), encoding="utf-8")
    (talking / "generation_config.json").write_text(json.dumps({"eos_token_id": 60}), encoding="utf-8")
    assert run("--model", talking, "--max-new-tokens", 4, *options)[:2] == (0, text)


class TestChat:
    # The model counts from the newline that ends every prompt, so all answers begin with "!".
    @pytest.mark.parametrize("turns", [2, pytest.param(3, marks=pytest.mark.slow)])
    @pytest.mark.slow
    def test_each_turn_is_answered(self, say, turns):
        assert say("\n\n".join("ABC"[:turns])) == (0, '!"#$\n' * turns, "")

    @pytest.mark.slow
    def test_cache_is_reused_without_changing_answers(self, say, talking, monkeypatch):
        asked = []
        generate = printing.generate

        def watching(params, ids, key, cfg, **options):
            out = generate(params, ids, key, cfg, **options)
            asked.append((len(ids[0]), options["cache"], out))
            return out

        monkeypatch.setattr("jaxgen.cli.printing.generate", watching)
        options = ("--do-sample", "--temperature", 9, "--repetition-penalty", 1.3)
        kept = say("Hello\nand more\nand more", *options)
        assert [cache is None for _, cache, _ in asked] == [True, False, False]
        assert asked[2][0] < asked[0][0] + len("and more")
        (talking / "generation_config.json").write_text('{"slots": 1}')
        assert say("Hello\nand more\nand more", *options) == kept  # with slots, no cache is kept
        (talking / "generation_config.json").unlink()
        assert asked[5][0] > asked[4][0] > asked[3][0] == asked[0][0]
        del asked[3:]

        def fresh(self):
            self._cache, self._text = None, ""

        # A chat that drops its cache before each turn gives the same answers.
        ask = Chat.ask
        monkeypatch.setattr(Chat, "ask", lambda self, *arguments: fresh(self) or ask(self, *arguments))
        assert say("Hello\nand more\nand more", *options) == kept
        assert [cache is None for _, cache, _ in asked] == [True, False, False, True, True, True]

    @pytest.mark.slow
    def test_options_that_require_a_new_cache(self, say):
        words = ["A", "/set cache_dtype int8", "B", "/set cache_dtype none", "C"]
        status, answers, notes = say("\n".join(words))
        assert (status, answers) == (0, '!"#$\n' * 3)
        assert notes.splitlines() == ["jaxgen: cache_dtype int8", "jaxgen: cache_dtype none"]

    @pytest.mark.slow
    def test_contrastive_search_can_be_enabled_mid_conversation(self, say):
        status, answers, notes = say("A\n/set top_k 2\n/set penalty_alpha 0.1\nB\nC")
        assert (status, answers) == (0, '!"#$\n' * 3)
        assert "contrastive" not in notes

    @pytest.mark.slow
    def test_contrastive_search_needs_no_cache(self, say):
        options = ("--penalty-alpha", 0.1, "--top-k", 2)
        assert say("A\nB", *options) == (0, '!"#$\n' * 2, "")

    def test_commands(self, say):
        status, out, err = say("/help\nA\n/reset\n/system S\nB\n/typo\n/exit\nC")
        assert (status, out) == (0, '!"#$\n' * 2)
        assert "/reset" in err
        assert "/typo is not a command" in err

    def notes(self, err):
        return [line.removeprefix("jaxgen: ") for line in err.splitlines()]

    def test_every_chat_command_reports_its_effect(self, say, tmp_path):
        file = tmp_path / "talk.json"
        commands = ["/retry", "A", f"/save {file}", f"/save {file}", "/reset", f"/load {file}", "/retry", "/system S"]
        commands += ["/system", "/save", f"/save {tmp_path}", "/load nowhere.json", "/rest"]
        status, out, err = say("\n".join(commands))
        assert (status, out) == (0, '!"#$\n' * 2)
        assert self.notes(err) == [
            "there is no message yet",
            f"2 messages were written to {file}.",
            f"2 messages were written to {file}, in place of its earlier turns.",
            "The conversation starts over.",
            f"2 messages were read from {file}.",
            "The conversation starts over, with this system message.",
            "The conversation starts over, without a system message.",
            "/save needs the name of a file",
            f"{tmp_path} exists: choose another name, or remove it",
            f"{Path.cwd() / 'nowhere.json'} cannot be read: No such file or directory",
            "/rest is not a command: did you mean /reset?",
        ]
        talk = {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": '!"#$'}]}
        assert json.loads(file.read_text()) == talk
        (tmp_path / "other").write_text("")
        assert "exists: choose another name, or remove it" in say(f"A\n/save {tmp_path / 'other'}")[2]

    @pytest.mark.slow
    @pytest.mark.parametrize("command", ["/reset", "/system S", "/load {other}"])
    def test_save_does_not_overwrite_another_conversation(self, say, tmp_path, command):
        file, other = tmp_path / "talk.json", tmp_path / "other.json"
        assert "2 messages were written" in say(f"A\n/save {other}")[2]
        notes = say("\n".join(["A", f"/save {file}", command.format(other=other), "B", f"/save {file}"]))[2]
        assert self.notes(notes)[-1] == f"{file} exists: choose another name, or remove it"
        assert json.loads(file.read_text())["messages"][0]["content"] == "A"
        notes = say("\n".join([f"/load {file}", "B", f"/save {file}"]))[2]
        assert self.notes(notes)[-1] == f"4 messages were written to {file}, in place of its earlier turns."

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"\xff", "is not a conversation: "),
            (b"[" * 100_000, "not valid JSON: nested too deeply"),
            (b'{"messages": []}', "must be a list of at least one"),
            (b'{"text": "A"}', "it must be"),
            (b'{"messages": [{"role": "user", "content": "A"}]}', "alternate between user and assistant"),
            (b'{"messages": [{"role": "user"}, {"role": "assistant", "content": 3}]}', "messages must be text"),
        ],
    )
    def test_load_refuses_files_without_a_conversation(self, say, tmp_path, content, words):
        (tmp_path / "file").write_bytes(content)
        status, out, err = say(f"/load {tmp_path / 'file'}")
        assert (status, out, err.count("\n")) == (0, "", 1)
        assert words in err

    def test_settings_are_changed_and_bad_ones_refused(self, say):
        settings = ["temperature 0.5", "--top-p 0.9", "do_sample true", "max_new_tokens 2", "temp 3", "temperature x"]
        settings += [
            "temperature 0",
            "do_sample maybe",
            "num_return_sequences 2",
            "max_length 9",
            "eos_token_id",
            "x 1",
        ]
        err = say("\n".join([*(f"/set {text}" for text in settings), "/set"]))[2]
        assert self.notes(err) == [
            "temperature 0.5, which greedy_search does not read: /set do_sample true",
            "top_p 0.9, which greedy_search does not read: /set do_sample true",
            "do_sample true",
            "max_new_tokens 2",
            "temp is not an option of a conversation: did you mean temperature?",
            "temperature: invalid float value: 'x'",
            "temperature 0: greedy search",
            "do_sample must be true or false",
            "a conversation has one answer per message",
            "max_length is not an option of a conversation",
            "/set eos_token_id needs a value",
            "x is not an option of a conversation",
            "do_sample false",
            "max_new_tokens 2",
            "top_p 0.9",
        ]

    def test_a_setting_with_which_no_answer_is_possible(self, say):
        before, refused, after = self.notes(say("/set\n/set suppress_tokens 9999999\n/set")[2])
        assert "suppress_tokens contains the token 9999999, but the vocabulary is 0 to" in refused
        assert before == after

    @pytest.mark.filterwarnings("default")
    def test_a_warning_in_a_conversation(self, say):
        assert self.notes(say("/set top_k 5\nA")[2])[1:] == ["warning: greedy_search does not read top_k 5"]

    @pytest.mark.slow
    def test_a_new_value_compiles_nothing(self, say, monkeypatch):
        counts, generate = [], printing.generate

        def counting(*arguments, **options):
            with compilations() as counted:
                out = generate(*arguments, **options)
            counts.append(counted[0])
            return out

        monkeypatch.setattr(printing, "generate", counting)
        turns = [f"/reset\n/set temperature {value}\n/set top_p {value / 2}\nA" for value in (0.5, 0.7, 1.5)]
        status, out, _ = say("\n".join(turns), "--do-sample", "--temperature", 1.1, "--top-p", 0.9)
        assert (status, len(out.splitlines())) == (0, 3)
        assert counts[1:] == [0, 0]

    @pytest.mark.slow
    def test_several_lines(self, say, monkeypatch):
        rendered = []
        render = Tokenizer.render_chat

        def remember(self, conversation, *args, **kwargs):
            rendered.append(conversation[-1]["content"])
            return render(self, conversation, *args, **kwargs)

        monkeypatch.setattr(Tokenizer, "render_chat", remember)
        assert say('one\\\ntwo\n"""\nthree\n\nfour\n"""\n')[0] == 0
        assert set(rendered) == {"one\ntwo", "three\n\nfour"}

    @pytest.mark.slow
    def test_oldest_messages_are_forgotten_when_the_context_is_full(self, say):
        status, out, err = say("A" * 300 + "\n" + "B" * 600 + "\n" + "C" * 300)
        assert (status, out) == (0, '!"#$\n' * 2)
        assert "The oldest 2 messages were forgotten: the model's context is 512 tokens" in err
        assert "this message is too long" in err

    def test_save_keeps_a_file_that_has_forgotten_messages(self, say, tmp_path):
        file = tmp_path / "talk.json"
        notes = say("\n".join(["A" * 300, f"/save {file}", "C" * 300, f"/save {file}"]))[2]
        assert "messages were forgotten" in notes
        assert f"{file} exists: choose another name" in notes
        assert json.loads(file.read_text())["messages"][0]["content"] == "A" * 300

    def test_chat_refuses_conflicting_options(self, refused, checkpoint, talking):
        assert "exclude each other" in refused("--model", talking, "--chat", "A")
        assert "disables the chat template" in refused("--model", talking, "--chat", "--raw")
        assert "use --max-new-tokens" in refused("--model", talking, "--chat", "--max-length", 9)
        assert "leave out --num-return-sequences" in refused("--model", talking, "--chat", "--num-return-sequences", 2)
        assert "needs a chat template" in refused("--model", checkpoint, "--chat")

    def test_chat_refuses_several_answers_from_the_checkpoint(self, refused, talking):
        fields = {"do_sample": True, "num_return_sequences": 2}
        (talking / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
        assert "asks for 2: add --num-return-sequences 1" in refused("--model", talking, "--chat")


class TestInput:
    def lines(self, out):
        return [json.loads(line) for line in out.splitlines()]

    @pytest.mark.slow
    def test_each_input_line_is_answered(self, run, ending, tmp_path):
        (tmp_path / "prompts.txt").write_text("A\n\nABC\nX\nUVW\n", encoding="utf-8")
        options = ("--model", ending, "--input", tmp_path / "prompts.txt", "--max-new-tokens", 3, "--slots", 2)
        status, out, err = run(*options)
        assert (status, err) == (0, "")
        assert self.lines(out) == [
            {"index": 0, "prompt": "A", "text": "BCD", "tokens": 3, "finish": "length"},
            {"index": 1, "prompt": "ABC", "text": "DEF", "tokens": 3, "finish": "length"},
            {"index": 2, "prompt": "X", "text": "YZ", "tokens": 2, "finish": "eos"},
            {"index": 3, "prompt": "UVW", "text": "XYZ", "tokens": 3, "finish": "eos"},
        ]
        target = tmp_path / "answers.jsonl"
        assert run(*options, "--output", target) == (0, "", "")
        assert target.read_text(encoding="utf-8") == out

    @pytest.mark.slow
    def test_max_length_counts_each_line_separately(self, run, checkpoint, tmp_path):
        (tmp_path / "prompts").write_text("A\nBCDEF\n", encoding="utf-8")
        out = run("--model", checkpoint, "--input", tmp_path / "prompts", "--max-length", 8)[1]
        assert [line["tokens"] for line in self.lines(out)] == [7, 3]

    def test_json_from_stdin(self, run, talking, ending, monkeypatch):
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "A"}]
        entries = [{"prompt": "A", "id": 7}, {"messages": messages}]
        data = "\n".join(map(json.dumps, entries)).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        status, out, _ = run("--model", talking, "--input", "-", "--max-new-tokens", 2, "--system", "T")
        assert status == 0
        answer = {"text": '!"', "tokens": 2, "finish": "length"}
        assert self.lines(out) == [{"index": index} | entry | answer for index, entry in enumerate(entries)]

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("", "has no prompt"),
            ('{"prompt": "A"}\nB', "line 2: not valid JSON: Expecting value at character 1"),
            ('{"prompt": "A"', "line 1: not valid JSON"),
            ('{"messages": []}', 'line 1: "messages" must be a list of at least one'),
            ('{"messages": null}', 'line 1: "messages" must be a list of at least one'),
            ('{"messages": [3]}', 'line 1: "messages" must be a list of at least one'),
            ('{"prompt": "A", "prompt": "B"}', "line 1: not valid JSON: duplicate keys: prompt"),
            ('{"prompt": "\\ud83d"}', "line 1: not valid JSON: a string has half of a surrogate pair"),
            ('{"prompt": "A"}\n\n3', "line 3: each line must be an object, a string or a list of ids in JSON"),
            ('{"prompt": 3}', 'line 1: "prompt" must be a string, got 3'),
            ('{"id": 3}', "line 1: a prompt must have exactly one of text, prompt, messages, ids: it has none of them"),
            ('{"prompt": "A", "text": "A"}', "exactly one of text, prompt, messages, ids: got text and prompt"),
            ('{"ids": [5, -1]}', "line 1: the prompt contains the token -1, but the vocabulary is 0 to 262"),
            ('{"ids": [1000]}', "line 1: the prompt contains the token 1000, but the vocabulary is 0 to 262"),
            (
                '{"prompt": "A", "error": "x"}',
                "error is a field of the answers: rename it, or put it in metadata",
            ),
            ('{"prompt": "A", "tokens": 3}', "line 1: tokens is a field of the answers"),
            ('{"prompt": "A", "finish": "eos"}', "line 1: finish is a field of the answers"),
            ('{"prompt": "A", "logprobs": []}', "line 1: logprobs is a field of the answers"),
            ('{"prompt": "A"}\n{"prompt": "A", "sequence": 0}', "line 2: sequence is a field of the answers"),
            ('{"prompt": "A", "temprature": 1}', "line 1: unknown option 'temprature': did you mean 'temperature'?"),
            ('{"prompt": "A", "max_tokens": 1}', "unknown option 'max_tokens': did you mean 'max_new_tokens'?"),
            ('{"prompt": "A", "stop": ["."]}', "unknown option 'stop': did you mean 'stop_strings'?"),
            ('{"prompt": "A", "key": 3}', "line 1: key is an object in Python, which a file cannot contain: use seed"),
            ('{"prompt": "A", "temperature": 0.5}', "greedy_search does not read temperature=0.5: set do_sample=True"),
            ('{"prompt": "A", "temperature": -1}', "line 1: temperature must be > 0"),
            ('{"prompt": "A", "top_k": [1, 2]}', "line 1: top_k"),
            ('{"prompt": "A", "max_new_tokens": 0}', "line 1: max_new_tokens must be at least 1, got 0"),
            ('{"prompt": "A", "max_new_tokens": 9999}', "set max_new_tokens to at most 511"),
            ('{"prompt": "A", "num_beams": 2}', "num_beams has one value for all lines: use --num-beams"),
            ('{"prompt": "A", "output_logprobs": "logits"}', "line 1: output_logprobs='logits' differs from"),
            ('{"prompt": "A", "adapter": 0}', "line 1: adapter=0, but params have no adapters"),
            ('{"prompt": "A", "output_scores": true}', "output_scores has one value for all lines: leave it out"),
            ('{"prompt": "A", "top_logprobs": 1}', "line 1: top_logprobs is not offered in lines"),
            ('{"prompt": "A", "n": "two"}', "line 1: n must be a whole number, got 'two'"),
            ('{"prompt": "A", "n": null}', "line 1: n must be a whole number, got None"),
            ('{"prompt": "A", "n": 1.5}', "line 1: n must be a whole number, got 1.5"),
            ('{"prompt": "A", "n": 0}', "line 1: n must be from 1 to 65536, got 0"),
            (
                '{"prompt": "A", "n": 1000000000, "do_sample": true}',
                "line 1: n must be from 1 to 65536, got 1000000000",
            ),
            ('{"prompt": "A", "num_return_sequences": "two"}', "line 1: num_return_sequences must be a whole number"),
            ('{"prompt": "A", "temperature": 0, "n": 2}', "greedy search, which gives one answer, but 2 are asked for"),
            ('{"prompt": "A", "n": 2}', "line 1: num_return_sequences=2: greedy_search has one result per prompt"),
            (
                '{"prompt": "A", "seed": 18446744073709551616}',
                "line 1: seed must be from -9223372036854775808 to 184467",
            ),
            ('{"prompt": "A", "regex": "["}', "line 1: regex: "),
            ('{"prompt": "A", "regex": "a{400}"}', "line 1: the constraint's shortest text has 400 tokens"),
            ('{"prompt": "A", "json_schema": 3}', "line 1: json_schema must be a JSON schema, got 3"),
            ('{"prompt": "A", "index": 1}\n{"prompt": "B"}', "line 2: index 1 is also the index of line 1"),
            ('{"messages": [{"role": "user", "content": "A"}]}', "need a chat template"),
            ('{"prompt": "A", "tools": []}', "unknown option 'tools': render the chat template yourself"),
            ('{"prompt": "A", "ignore_eos": true}', "set eos_token_id to null. Put data of your own in metadata"),
            ('"A"\nB', "line 2: not valid JSON"),
            ("[5, 6]\n3", "line 2: each line must be an object, a string or a list of ids in JSON"),
            ('"A"\n{"prompt": "B", "n": 0}', "line 2: n must be"),
            ('A\n{"messages": []}', "line 2: this line is JSON with the field messages, but the first line is text"),
        ],
    )
    def test_bad_lines(self, refused, checkpoint, tmp_path, content, words):
        (tmp_path / "prompts").write_text(content, encoding="utf-8")
        assert words in refused("--model", checkpoint, "--input", tmp_path / "prompts")

    @pytest.mark.slow
    def test_logprobs(self, run, refused, checkpoint, tmp_path):
        (tmp_path / "prompts").write_text("A\nBC", encoding="utf-8")
        arguments = ("--model", checkpoint, "--input", tmp_path / "prompts", "--max-new-tokens", 3, "--logprobs")
        status, out, _ = run(*arguments)
        assert status == 0
        first, second = self.lines(out)
        assert [token["token"] for token in first["logprobs"]] == ["B", "C", "D"]
        assert [token["token"] for token in second["logprobs"]] == ["D", "E", "F"]
        tokenizer = Tokenizer.from_pretrained(checkpoint)
        params, cfg = load_hf(checkpoint)
        ids = tokenizer.encode("ABCD")
        (expected,) = np.asarray(score(params, [ids], cfg).logprobs)
        assert [token["id"] for token in first["logprobs"]] == ids[1:]
        np.testing.assert_allclose([token["logprob"] for token in first["logprobs"]], expected[1:], atol=1e-4)
        assert "--logprobs adds to the JSON lines of --input" in refused("--model", checkpoint, "A", "--logprobs")

    @pytest.mark.slow
    def test_line_that_cannot_continue_is_an_error(self, run, checkpoint, tmp_path):
        # Prompt "ABCDEFGHIJ" contains every token that is still allowed, so banning its 1-grams bans everything.
        tokenizer = Tokenizer.from_pretrained(checkpoint)
        letters = [tokenizer.decode([id]) for id in tokenizer.encode("ABCDEFGHIJ")]
        banned = [id for id in range(load_hf(checkpoint)[1].model.vocab_size) if id not in tokenizer.encode("CDEFGHIJ")]
        (tmp_path / "prompts").write_text("\n".join(["A", "".join(letters), "B"]), encoding="utf-8")
        options = ("--model", checkpoint, "--input", tmp_path / "prompts", "--suppress-tokens", json.dumps(banned))
        options += ("--encoder-no-repeat-ngram-size", 1, "--max-new-tokens", 3, "--stats")
        status, out, err = run(*options)
        assert status == 1
        assert "jaxgen: error: 1 answer could not be completed: see the field error" in err
        assert "jaxgen: stats: " in err
        first, second, third = self.lines(out)
        reason = "cannot continue after 0 generated tokens: every token is banned: loosen the options that ban tokens"
        assert second.pop("error").startswith(reason)
        assert second == {"index": 1, "prompt": "ABCDEFGHIJ", "text": "", "tokens": 0, "finish": "no_token"}
        assert [line["tokens"] for line in (first, third)] == [3, 3]
        assert "error" not in first | third
        target = tmp_path / "answers"
        assert run(*options, "--output", target)[0] == 1
        assert target.read_text(encoding="utf-8") == out

    @pytest.mark.slow
    @pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
    def test_json_is_utf_8_or_ascii(self, checkpoint, tmp_path, monkeypatch, encoding):
        (tmp_path / "prompts").write_text("é", encoding="utf-8")
        stdout = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", stdout)
        options = ["--model", checkpoint, "--input", tmp_path / "prompts", "--max-new-tokens", 2]
        assert main([str(option) for option in options]) == 0
        data = stdout.buffer.getvalue()
        assert json.loads(data)["prompt"] == "é"
        assert data.isascii() == (encoding != "utf-8")

    def test_bad_input_options_are_refused(self, refused, checkpoint, tmp_path):
        (tmp_path / "prompts").write_bytes(b"A\xff\n")
        assert "line 1: not UTF-8" in refused("--model", checkpoint, "--input", tmp_path / "prompts")
        assert "No such file" in refused("--model", checkpoint, "--input", tmp_path / "nowhere")
        (tmp_path / "prompts").write_text("A", encoding="utf-8")
        arguments = ("--model", checkpoint, "--input", tmp_path / "prompts")
        assert "exists" in refused(*arguments, "--output", tmp_path / "prompts")
        for name in ("--batch-size", "--slots"):
            assert "at least 1" in refused(*arguments, name, 0)
            line = refused("--model", checkpoint, "A", name, 4)
            assert f"{name} is for the prompts of --input: use that too, or leave it out" in line
        assert "use that too" in refused("--model", checkpoint, "A", "--output", tmp_path / "answers")
        assert "exclude each other" in refused(*arguments, "A")


def test_system_message_is_added(run, refused, talking, checkpoint, monkeypatch):
    conversations = []
    render = Tokenizer.render_chat
    monkeypatch.setattr(Tokenizer, "render_chat", lambda self, c: conversations.append(c) or render(self, c))
    assert run("--model", talking, "A", "--system", "S", "--max-new-tokens", 2) == (0, '!"\n', "")
    assert conversations[0][0] == {"role": "system", "content": "S"}
    assert "need a chat template" in refused("--model", checkpoint, "A", "--system", "Be brief.")


def test_request_larger_than_memory_is_refused(refused, checkpoint, monkeypatch):
    monkeypatch.setattr("jaxgen.memory.free_bytes", lambda device: 1000)
    assert "is free" in refused("--model", checkpoint, "A")


class TestMeshes:
    @pytest.mark.slow
    def test_rows_are_divided_over_the_mesh(self, run, checkpoint):
        status, out, _ = run("--model", checkpoint, "--max-new-tokens", 3, "--mesh", "8x1", "A")
        assert (status, out) == (0, "BCD\n")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--mesh", "2x2"], "--mesh 2x2 needs 4 devices, but there are 8"),
            (["--mesh", "8"], "'8' must be DATAxMODEL, such as 1x8"),
            (["--mesh", "0x8"], "'0x8' must be DATAxMODEL, such as 1x8"),
            (["--mesh", "1x8"], "axis 'model' has size 8, which does not divide the model's sizes"),
            (["--distributed"], "add --mesh DATAxMODEL"),
            (["--mesh", "8x1", "--process", "1"], "--processes and --process need --coordinator HOST:PORT"),
            (["--processes", "2", "--process", "2"], "--process 2 must be less than --processes 2"),
        ],
    )
    def test_bad_mesh_options_are_refused(self, refused, checkpoint, options, message):
        if "--processes" in options:
            options = ["--mesh", "8x1", "--coordinator", "localhost:1", *options]
        assert message in refused("--model", checkpoint, *options, "A")

    @pytest.mark.parametrize("source", [["--chat"], ["--input", "-"]])
    def test_several_processes_do_not_share_stdin(self, refused, checkpoint, source):
        line = refused("--model", checkpoint, "--mesh", "8x1", "--distributed", *source)
        assert "--chat and - read stdin" in line


class TestPrompts:
    """Prompts that are not passed as an argument."""

    @pytest.mark.parametrize("arguments", [[], ["-"]])
    @pytest.mark.parametrize("text", ["AB", "AB\n", "AB\r\n", "\ufeffAB"])
    def test_stdin(self, run, checkpoint, monkeypatch, arguments, text):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert run("--model", checkpoint, "-n", 3, *arguments) == (0, "CDE\n", "")

    def test_all_of_stdin_is_one_prompt(self, run, talking, monkeypatch):
        rendered = []
        render = Tokenizer.render_chat
        monkeypatch.setattr(Tokenizer, "render_chat", lambda self, c: rendered.append(c) or render(self, c))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"A\n\nB \n\n")))
        assert run("--model", talking, "-n", 2)[0] == 0
        assert rendered == [[{"role": "user", "content": "A\n\nB \n"}]]

    def test_prompt_is_read_from_a_file(self, run, refused, checkpoint, tmp_path):
        (tmp_path / "prompt").write_text("AB\n")
        arguments = ("--model", checkpoint, "-f", tmp_path / "prompt")
        assert run(*arguments, "-n", 3) == (0, "CDE\n", "")
        assert "a prompt and --prompt-file exclude each other" in refused(*arguments, "A")
        (tmp_path / "prompt").write_bytes(b"A\xff")
        assert f"--prompt-file {tmp_path / 'prompt'}: not UTF-8: invalid start byte at byte 2" in refused(*arguments)
        (tmp_path / "prompt").write_bytes(b"\n")
        assert "is empty: write a prompt" in refused(*arguments)

    def test_unreadable_stdin_is_refused(self, refused, checkpoint, monkeypatch):
        for data, words in ((b"", "stdin is empty"), (b"\xff", "stdin: not UTF-8: invalid start byte at byte 1")):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            assert words in refused("--model", checkpoint)
        monkeypatch.setattr(sys, "stdin", None)
        assert "no prompt: write it at the end, in quotes" in refused("--model", checkpoint)
        for source in (["-"], ["--input", "-"]):
            assert "- reads stdin, which is closed" in refused("--model", checkpoint, *source)


class TestDevices:
    @pytest.mark.slow
    def test_computation_runs_on_the_chosen_device(self, run, checkpoint, monkeypatch):
        used = set()

        def watching(params, *arguments, **options):
            used.update(device for leaf in jax.tree.leaves(params) for device in leaf.devices())
            return generate(params, *arguments, **options)

        monkeypatch.setattr(printing, "generate", watching)
        assert run("--model", checkpoint, "A", "-n", 3, "--device", "cpu:2") == (0, "BCD\n", "")
        assert used == {jax.devices()[2]}

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("tpu", "--device tpu found no device"),
            ("gpu:1", "--device gpu found no device"),
            ("cpu:8", "--device cpu:8: the last device is cpu:7"),
            ("npu", "'npu' must be cpu, gpu or tpu, optionally with a number, such as gpu:1"),
            ("cpu:-1", "must be cpu, gpu or tpu"),
        ],
    )
    def test_bad_devices_are_refused(self, refused, checkpoint, name, words):
        assert words in refused("--model", checkpoint, "A", "--device", name)

    def test_device_number_is_refused_with_a_mesh(self, refused, checkpoint):
        assert "leave out the number" in refused("--model", checkpoint, "A", "--mesh", "8x1", "--device", "cpu:1")


def test_only_given_options_cause_warnings(run, copy):
    fields = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "max_new_tokens": 3, "num_assistant_tokens": 4}
    (copy / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert run("--model", copy, "A", "--no-do-sample") == (0, "BCD\n", "")
    status, out, err = run("--model", copy, "A", "--no-do-sample", "--top-k", 3)
    assert (status, out) == (0, "BCD\n")
    assert err == "jaxgen: warning: greedy_search does not read --top-k 3\n"


@pytest.mark.slow
def test_a_warning_is_printed_once(run, checkpoint, tmp_path):
    (tmp_path / "prompts").write_text("A\nB\nC\n")
    options = ("--input", tmp_path / "prompts", "--batch-size", 1, "--num-beams", 2, "--max-new-tokens", 2)
    warning = "jaxgen: warning: beam_search does not read --top-k 3\n"
    assert run("--model", checkpoint, *options, "--top-k", 3)[2] == warning
