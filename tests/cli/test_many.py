"""Answers to --input, in slots and in batches, including runs that are interrupted, killed or divided into shards."""

import json
import os
import re
import shutil
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import demo
from jaxgen.cli import many, terminal
from jaxgen.cli.answer_file import AnswerFile
from jaxgen.cli.input_file import Line
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.request.running.schedule import Counts
from jaxgen.core.text.tokenizer import Tokenizer
from tests.support.answers import kill_commands, summed
from tests.support.compilations import compilations
from tests.support.tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def interrupt(monkeypatch):
    """Return a function that makes the command raise KeyboardInterrupt once `answered` prompts have been answered."""

    def interrupt(answered: int):
        write, written = AnswerFile.write, []

        def interrupted(self, index, answers):
            if len(written) == answered:
                monkeypatch.setattr(AnswerFile, "write", write)
                raise KeyboardInterrupt
            written.append(index)
            write(self, index, answers)

        monkeypatch.setattr(AnswerFile, "write", interrupted)

    return interrupt


@pytest.fixture
def drawn(checkpoint, tmp_path):
    """Return options with which the command samples two answers of different lengths to each of ten prompts."""
    prompts = "\n\n".join(letter * length for letter, length in zip("ABCDEFGHIJ", [1, 2, 3, 4, 5] * 2, strict=True))
    (tmp_path / "prompts").write_text(prompts, encoding="utf-8")
    own = Tokenizer.from_pretrained(checkpoint).encode("KLMNOP")
    options = ["--model", checkpoint, "--input", tmp_path / "prompts", "--do-sample", "--temperature", 9]
    return [*options, "--eos-token-id", json.dumps(own), "--max-new-tokens", 12, "--num-return-sequences", 2]


def entries(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "prompts")


class TestForms:
    @pytest.mark.slow
    def test_slots_and_batches_give_the_same_answers(self, run, drawn, tmp_path):
        whole = run(*drawn)
        assert whole[0] == 0
        lines = entries(whole[1])
        assert [line["sequence"] for line in lines] == [0, 1] * 10
        assert len({line["text"] for line in lines}) > 15
        assert len({line["finish"] for line in lines}) == 2
        for more in (["--slots", 1], ["--slots", 5], ["--max-time", 1000], ["--max-time", 1000, "--batch-size", 3]):
            assert run(*drawn, *more) == whole
        for more in (["--slots", 3], ["--max-time", 1000]):
            assert run(*drawn, *more, "--output", tmp_path / "answers") == (0, "", "")
            assert (tmp_path / "answers").read_text(encoding="utf-8") == whole[1]
            (tmp_path / "answers").unlink()

    @pytest.mark.slow
    def test_mesh_gives_the_same_answers(self, run, drawn):
        assert run(*drawn, "--mesh", "8x1", "--slots", 5) == run(*drawn)

    @pytest.mark.slow
    def test_constraints_stop_strings_and_log_probabilities(self, run, drawn, checkpoint):
        options = ["--regex", "[A-Za-z]{3,9}", "--stop-strings", "q", "--stop-strings", "abc" * 400, "--logprobs"]
        options += ["--suppress-tokens", json.dumps(list(range(100, 200))), "--min-new-tokens", 4, "--temperature", 2]
        slots, batches = run(*drawn, *options), run(*drawn, *options, "--max-time", 1000)
        assert slots[0] == batches[0] == 0
        for line, expected in zip(entries(slots[1]), entries(batches[1]), strict=True):
            values, others = ([token.pop("logprob") for token in each["logprobs"]] for each in (line, expected))
            assert line == expected
            assert values == pytest.approx(others, abs=1e-4)

    def test_options_of_the_other_scheduling_are_refused(self, refused, drawn, monkeypatch):
        monkeypatch.delattr("jaxgen.cli.answer.load_hf")
        line = refused(*drawn, "--batch-size", 4)
        assert "--batch-size is for runs in batches, but sample runs in slots, each of which takes the next" in line
        for option in (["--num-beams", 2], ["--penalty-alpha", 0.5, "--top-k", 4, "--no-do-sample"]):
            line = refused(*drawn[:4], *option, "--slots", 4)
            assert "--slots works with greedy search, sampling and DoLa, not with" in line
        for option, name in (
            (["--max-time", 5], "--max-time"),
            (["--guidance-scale", 2], "--guidance-scale"),
            (["--token-healing"], "--token-healing"),
            (["--assistant", drawn[1]], "--assistant"),
        ):
            assert f"DoLa, not with {name}: use --batch-size" in refused(*drawn, *option, "--slots", 4)

    def test_unreachable_minimum_length_draws_a_warning(self, run, drawn, monkeypatch):
        monkeypatch.setattr("jaxgen.cli.answer.write_answers", lambda *_, **__: None)
        warning = "jaxgen: warning: --min-new-tokens 20 cannot be reached with 12 new tokens\n"
        assert run(*drawn, "--min-new-tokens", 20) == (0, "", warning)

    def test_memory_check_counts_all_answers_to_a_line(self, run, refused, checkpoint, tmp_path, monkeypatch):
        monkeypatch.setattr("jaxgen.cli.answer.write_answers", lambda *_, **__: None)
        monkeypatch.setattr("jaxgen.memory.free_bytes", lambda device: 50_000_000)
        words = ("--model", checkpoint, "--input", tmp_path / "lines", "--max-new-tokens", 2, "--max-time", 1000)
        for count in (2, 60_000):
            lines = [{"prompt": "A", "do_sample": True, "n": count}, {"prompt": "B"}]
            (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
            if count == 2:
                assert run(*words) == (0, "", "")
        assert "is free: try fewer prompts, sequences or slots at a time" in refused(*words)

    @pytest.mark.slow
    @pytest.mark.parametrize("form", [[], ["--max-time", 1000]])
    def test_warning_about_a_line_names_the_line(self, run, checkpoint, tmp_path, form):
        lines = [{"prompt": "A", "max_new_tokens": 1}, {"prompt": "B", "min_new_tokens": 20}]
        (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        words = ("--model", checkpoint, "--input", tmp_path / "lines", "--max-new-tokens", 2, *form)
        where = f"jaxgen: warning: --input {tmp_path / 'lines'}, line 2"
        assert run(*words)[2] == f"{where}: min_new_tokens=20 cannot be reached with 2 new tokens\n"

    @pytest.mark.parametrize("words", [["--regex", "[A-Z]{20}"], ["--regex", "[A-Z]{20}", "--max-time", 5]])
    def test_oversized_constraint_is_refused_before_weights_are_read(self, refused, drawn, monkeypatch, words):
        monkeypatch.delattr("jaxgen.cli.answer.load_hf")
        assert "shortest text has 20 tokens, which exceeds the budget of 12" in refused(*drawn, *words)

    @pytest.mark.slow
    @pytest.mark.parametrize("fields", [{"slots": 3}, {"output_scores": True}])
    def test_slots_and_records_of_a_checkpoint_are_ignored(self, run, copy, drawn, fields):
        (copy / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
        status, out, err = run("--model", copy, "--input", drawn[3], "--max-new-tokens", 2)
        assert (status, err) == (0, "")
        assert [line["text"] for line in entries(out)[:3]] == ["BC", "CD", "DE"]

    @pytest.mark.slow
    def test_progress(self, run, drawn, monkeypatch, tmp_path):
        shown = []
        monkeypatch.setattr(terminal, "show", lambda text: shown.append(text if isinstance(text, str) else text()))
        options = drawn[:4]
        assert run(*options, "--max-new-tokens", 3, "--slots", 4, "--output", tmp_path / "answers")[0] == 0
        lines = [text for text in shown if " of 10 prompts" in text]
        assert len(lines) == 10
        pattern = r"{} of 10 prompts, [\d,]+ tokens/s, (\d+)% of 4 slots in use, 0:00:\d\d left"
        used = [int(re.fullmatch(pattern.format(number), text)[1]) for number, text in enumerate(lines, 1)]
        assert 60 <= used[-1] <= 100
        shown.clear()
        assert run(*options, "--num-beams", 2, "--max-new-tokens", 3, "--output", tmp_path / "beams")[0] == 0
        assert re.fullmatch(r"10 of 10 prompts, [\d,]+ tokens/s, 0:00:00 left", shown[-2])


def test_printing_rows_of_any_length_compiles_nothing():
    out: Any = types.SimpleNamespace(
        lengths=np.asarray([3, 5]),
        stop_reasons=np.full(2, StopReason.LENGTH),
        sequences=np.zeros((2, 9), np.int32),
        prompt_width=4,
        logprobs=jnp.full((2, 5), -0.1),
    )
    cfg = types.SimpleNamespace(num_return_sequences=1, output_logprobs="logits")
    session: Any = types.SimpleNamespace(cfg=cfg, tokenizer=byte_level())
    with compilations() as count:
        rows = [many._of_row(Line({}, [1], 5), out, row, "", session) for row in range(2)]
    values = [[token["logprob"] for token in row["logprobs"]] for row in rows]
    assert values == [[-0.1] * 3, [-0.1] * 5]  # and not -0.10000000149011612
    assert count[0] == 0


def test_progress_line_format(monkeypatch):
    shown, now = [], [100.0]
    monkeypatch.setattr(terminal, "show", lambda line: shown.append(line()))
    monkeypatch.setattr(many.time, "monotonic", lambda: now[0])
    stats = types.SimpleNamespace(compile=7.0)
    engine = types.SimpleNamespace(counts=lambda: Counts(tokens=60_000, steps=2000, occupancy=28.0))
    slots = many._Progress(5000, 1000, stats, engine, 32)
    batches = many._Progress(5000, 1000, stats, None, None)
    stats.compile = 17.0  # 10 of the following seconds are spent compiling
    for second in (20, 30):
        now[0] = 100 + second
        slots.add([{"tokens": 3}, {"tokens": 4}], is_shown=True)
    batches.add([{"tokens": 100}], is_shown=True)
    batches.add([{"tokens": 100}], is_shown=False)
    assert shown == [
        "1,001 of 5,000 prompts, 6,000 tokens/s, 88% of 32 slots in use, 11:06:30 left",
        "1,002 of 5,000 prompts, 3,000 tokens/s, 88% of 32 slots in use, 11:06:20 left",
        "1,001 of 5,000 prompts, 5 tokens/s, 33:19:30 left",  # later batches may also be compiled
    ]
    text = "answered 2 prompts: 200 tokens in 0:00:20, 10 tokens/s, not counting compilation"
    assert batches.summary() == text


class TestInterruptions:
    @pytest.mark.slow
    @pytest.mark.parametrize("form", [["--slots", 3], ["--max-time", 1000, "--batch-size", 4]])
    def test_interrupted_run_continues(self, run, drawn, tmp_path, monkeypatch, interrupt, form):
        target, partial = tmp_path / "answers", tmp_path / "answers.partial"
        options = (*drawn, *form, "--output", target)
        assert run(*options) == (0, "", "")
        whole = target.read_bytes()
        target.unlink()

        interrupt(6)
        assert run(*options) == (130, "", "")
        lines = partial.read_bytes().splitlines(keepends=True)
        assert len(lines) == 7
        for line in lines[1:]:
            answered = json.loads(line)
            expected = whole.splitlines()[2 * answered["index"] :][:2]
            assert answered["answers"] == [json.loads(text) for text in expected]
        for kept, before in ((lines, 6), ([*lines[:6], lines[6][:-1]], 5), (lines[:2], 1), ([lines[0][:9]], 0)):
            partial.write_bytes(b"".join(kept))
            count = "1 prompt was" if before == 1 else f"{before} prompts were"
            note = f"jaxgen: note: {count} answered before\n" if before else ""
            assert run(*options) == (0, "", note)
            assert target.read_bytes() == whole
            assert files(tmp_path) == ["answers"]
            target.unlink()

        answered = [{"index": index, "answers": entries(whole.decode())[2 * index :][:2]} for index in range(10)]
        partial.write_bytes(lines[0] + summed(*answered))  # every prompt is answered, so the weights are not read
        monkeypatch.delattr("jaxgen.cli.answer.load_hf")
        assert run(*options)[0] == 0
        assert target.read_bytes() == whole

    @pytest.mark.slow
    def test_interrupted_run_continues_with_other_slots(self, run, drawn, tmp_path, interrupt):
        options = (*drawn[:4], "--max-new-tokens", 2, "--output", tmp_path / "answers")
        interrupt(3)
        assert run(*options, "--slots", 4)[0] == 130
        assert run(*options)[0] == 0
        assert len((tmp_path / "answers").read_text().splitlines()) == 10

    @pytest.mark.parametrize(
        ("more", "name"),
        [
            (["--temperature", "0.5"], "--temperature"),
            (["--seed", "1"], "--seed"),
            (["--stop-strings", "x"], "--stop-strings"),
            (["--dtype", "bfloat16"], "--dtype"),
            (["--model", demo.PATH], "--input, --model, --dtype"),
            (["--model", "changed"], "--model"),
            (["--input", "other"], "--input"),
        ],
    )
    def test_output_of_another_run_is_refused(self, run, refused, checkpoint, tmp_path, monkeypatch, more, name):
        def interrupted(lines, indices, done, session, file, **_):
            file.write(0, [])
            raise KeyboardInterrupt

        monkeypatch.setattr("jaxgen.cli.answer.write_answers", interrupted)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "prompts").write_text("A\nB\n", encoding="utf-8")
        (tmp_path / "other").write_text("A\nC\n", encoding="utf-8")
        config = Path(shutil.copytree(checkpoint, "changed")) / "config.json"  # the tensors are the same
        config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"rms_norm_eps": 0.5}), "utf-8")
        options = ["--model", checkpoint, "--input", "prompts", "--do-sample", "--max-new-tokens", 2]
        options += ["--output", "answers"]
        assert run(*options)[0] == 130
        line = refused(*options, *more)
        assert f"answers.partial is from a run with different values of {name}: repeat that command" in line

    @pytest.mark.slow
    def test_continued_run_keeps_its_random_seed(self, run, refused, drawn, tmp_path, interrupt):
        options = (*drawn, "--output", tmp_path / "answers", "--seed", "random")
        interrupt(2)
        status, _, seed = run(*options)
        assert status == 130
        assert re.fullmatch(r"jaxgen: seed: \d+\n", seed)
        assert run(*options) == (0, "", f"{seed}jaxgen: note: 2 prompts were answered before\n")
        answers = (tmp_path / "answers").read_text()
        (tmp_path / "answers").unlink()
        assert run(*options[:-1], seed.split()[-1]) == (0, "", "")
        assert (tmp_path / "answers").read_text() == answers


class TestShards:
    @pytest.mark.slow
    @pytest.mark.parametrize("form", [["--slots", 3], ["--max-time", 1000, "--batch-size", 2]])
    def test_shards_together_give_the_answers_of_one_run(self, run, drawn, tmp_path, interrupt, form):
        target = tmp_path / "answers"
        whole = run(*drawn, *form)[1]
        options = (*drawn, *form, "--output", target)
        interrupt(2)
        assert run(*options, "--shard", "1/3")[0] == 130
        assert files(tmp_path) == ["answers.1-of-3.partial"]
        status, out, err = run(*options, "--shard", "0/2")  # two of prompts 1, 4 and 7 have been answered
        assert (status, out) == (0, "")
        assert err.endswith("in --shard 1/2: " + f"{target} is written when all are answered\n")
        status, _, err = run(*options, "--shard", "1/2")
        assert status == 0
        assert re.fullmatch(r"jaxgen: note: [12] prompts? (were|was) answered before\n", err)
        assert files(tmp_path) == ["answers"]
        assert target.read_text(encoding="utf-8") == whole

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--shard", "4/4"], "4/4: the first of 4 shards is 0, and the last is 3"),
            (["--shard", "0/0"], "0/0: there must be at least one shard"),
            (["--shard", "1"], "'1' must be r/R, such as 0/8 for the first of 8 shards"),
            (["--shard=-1/4"], "must be r/R"),
            (["--shard", "0/4"], "--shard records the answers of several processes in files: add --output"),
            (["--shard", "0/4", "--output", "x", "--seed", "random"], "--seed random draws a different seed in each"),
        ],
    )
    def test_bad_shard_options_are_refused(self, refused, drawn, words, message):
        assert message in refused(*drawn, *words)

    def test_shard_is_refused_for_a_single_prompt(self, refused, checkpoint):
        assert "--output is for the answers to --input" in refused("A", "--shard", "0/2", "--output", "x")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_killed_shards_are_resumed(run, drawn, tmp_path, programs, dtype):
    """For more kills, or with other options, run `python -m tests.support.answers`."""
    options = [*map(str, drawn), "--dtype", dtype, "--max-new-tokens", "100", "--slots", "4"]
    assert run(*options, "--output", tmp_path / "whole")[0] == 0
    environment = {**os.environ, **programs, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    seen = kill_commands(options, tmp_path / "answers", tmp_path / "whole", environment, kills=6)
    assert seen["killed"] >= 6
    assert seen["wrong"] == 0
