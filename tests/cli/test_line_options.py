"""Options of single lines of --input: each is applied or refused, in slots and in batches, also when a run resumes."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest

from jaxgen import GenerationConfig, InputError
from jaxgen.cli import many
from jaxgen.cli.input_file import read_lines
from jaxgen.cli.line_options import check_lines, in_batches
from jaxgen.cli.session import Session
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.config.kinds import Flag, Flags
from jaxgen.core.decoding.logprobs import LogProbs
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.request.known_prompts import KnownPrompts
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.engine.results import Completion
from tests.cli.test_many import ROOT, entries, interrupt  # noqa: F401  a fixture
from tests.support.answers import kill_commands
from tests.support.models import model_config
from tests.support.tokenizers import byte_level

TOK = byte_level()
MODEL = model_config(vocab_size=len(TOK))
SAMPLING = GenerationConfig(
    model=MODEL, max_new_tokens=9, do_sample=True, eos_token_id=2, output_logprobs="logits", top_logprobs=3
)
BEAMS = GenerationConfig(model=MODEL, max_new_tokens=9, num_beams=4, eos_token_id=2)
# Values for options without examples, or with examples that JSON cannot contain.
VALUES = {
    "max_new_tokens": 5,
    "stop_strings": ["x"],
    "num_return_sequences": 3,
    "output_logprobs": None,
    "top_logprobs": 1,
    "min_length": 4,
    "do_sample": False,
    "sequence_bias": [[[11, 12], 0.5]],
    "eos_token_id": [5, 6],
    "adapter": 0,
    "constraints": 2,
}
# The options that a line may set in slots.
MAY_BE_SET = set(
    "eos_token_id do_sample temperature top_h top_k top_p min_p typical_p epsilon_cutoff eta_cutoff sequence_bias "
    "repetition_penalty frequency_penalty presence_penalty bad_words_ids min_new_tokens min_length "
    "encoder_repetition_penalty forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens forced_decoder_ids max_new_tokens stop_strings num_return_sequences "
    "output_logprobs".split()
)
RECORDS = ("output_logprobs", "top_logprobs")
IN_BATCHES = {"do_sample": True, "output_logprobs": "logits"}  # other values, for beam search
WARPERS = set("temperature top_h top_k top_p min_p typical_p epsilon_cutoff eta_cutoff".split())
MAY_BE_SET_IN_BATCHES = MAY_BE_SET - WARPERS | {"length_penalty", "guidance_scale"}


def value_of(name: str):
    option = OPTIONS[name]
    if name in VALUES:
        return VALUES[name]
    if option.examples:
        return json.loads(json.dumps(option.examples[0]))
    return not option.default if isinstance(option.kind, Flag | Flags) else 2


def lines_of(tmp_path, *lines):
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return read_lines(str(tmp_path / "lines"), None, TOK, True, SAMPLING.model, lambda ids, own: own or 9)


def applied_in_slots(line) -> bool:
    """Return True if the option changes the prompt in the form that the device gets."""
    form = KnownPrompts([line], SAMPLING, TOK, in_engine=True).reader
    with_option = form.read({"ids": line.ids, **line.fields})
    without = form.read({"ids": line.ids, "index": 0})
    same = jax.tree.map(np.array_equal, with_option.options, without.options)
    changed = [key for key, value in same.items() if not all(jax.tree.leaves(value))]
    attributes = ("budget", "sequences", "stop_strings", "logged")
    return bool(changed) or any(getattr(with_option, each) != getattr(without, each) for each in attributes)


def applied_in_batches(line, name, monkeypatch) -> bool:
    """Return True if the option changes the config of the program or, if it is about records, the answer."""
    monkeypatch.setattr(many, "generate", lambda params, ids, keys, cfg, **_: cfg)

    def reached(line):
        prompts = KnownPrompts([line], BEAMS, TOK, in_engine=False)
        session = many._of_batch(prompts, line, Session(None, BEAMS, None, TOK, None, {}))  # pyright: ignore
        top = np.zeros([1, 1]), np.zeros([1, 1], np.int32)
        done = Completion(0, 0, [1], [5], "", StopReason.EOS, LogProbs(np.zeros(1), *top))  # pyright: ignore
        answer = many._entry(line, done, session)
        return many._generate([line], session, None), {key: answer[key] for key in answer if key not in line.asked}

    bare = line._replace(fields={"index": 0}, asked={}, budget=9)
    (cfg, answer), (other_cfg, other_answer) = reached(line), reached(bare)
    return answer != other_answer if name in RECORDS else cfg != other_cfg


@pytest.mark.parametrize("cfg", [SAMPLING, BEAMS], ids=["slots", "batches"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_applied_or_refused(tmp_path, monkeypatch, name, cfg):
    slots = cfg is SAMPLING
    value = value_of(name) if slots else IN_BATCHES.get(name, value_of(name))
    beside = {"output_logprobs": "logits"} if name == "top_logprobs" else {}
    (line,) = lines = lines_of(tmp_path, {"prompt": "A", name: value} | beside)
    prompts = KnownPrompts(lines, cfg, TOK, in_engine=slots)
    may_be_set = name in MAY_BE_SET if slots else name in MAY_BE_SET_IN_BATCHES
    if not may_be_set:
        with pytest.raises(InputError, match=f"--input lines, line 1: .*{name}"):
            check_lines(lines, prompts, "lines")
        return
    check_lines(lines, prompts, "lines")
    assert line.asked[name] == value
    if slots:
        assert applied_in_slots(line)
    else:
        assert applied_in_batches(line, name, monkeypatch)
        assert name not in [option.name for option in prompts.call(line).cfg.unread()]


def test_fields_that_are_not_options_are_passed_through(tmp_path):
    first, second, third, fourth = lines_of(
        tmp_path,
        {"text": "A", "metadata": {"a": [1]}, "id": 7, "temperature": 0},
        "B",
        [5, 6],
        {"ids": [7], "index": 9},
    )
    assert list(first.asked.items()) == [
        ("index", 0),
        ("prompt", "A"),
        ("metadata", {"a": [1]}),
        ("id", 7),
        ("temperature", 0),
    ]
    assert first.fields == {"temperature": 0, "index": 0}
    assert (second.asked, second.ids) == ({"index": 1, "prompt": "B"}, TOK.encode("B"))
    assert (third.asked, third.ids) == ({"index": 2, "ids": [5, 6]}, [5, 6])
    assert (fourth.asked, fourth.fields) == ({"index": 9, "ids": [7]}, {"index": 9})


def test_batches_have_lines_with_the_same_options(tmp_path):
    own = [{}, {"top_k": 3}, {"seed": 4}, {"top_k": 3, "max_new_tokens": 2}, {"regex": "a"}, {}, {}, {"top_k": 4}]
    lines = lines_of(tmp_path, *[{"prompt": "A"} | fields for fields in own])
    assert in_batches(lines, range(8), 3) == [[0, 2, 5], [1, 3], [4], [6], [7]]
    assert in_batches(lines, range(1, 8, 2), 3) == [[1, 3], [5], [7]]


def test_tables_are_sized_for_all_lines(tmp_path):
    words = [{"regex": f"[a-z]{{{count}}}"} for count in (3, 2000, 3)] + [{"stop_strings": ["a" * 1500]}]
    lines = lines_of(tmp_path, *[{"prompt": "A"} | fields for fields in words])
    expected = EngineSizes(slots=3, prompt_width=32, stop_states=2048)
    assert KnownPrompts(lines, SAMPLING, TOK, True).sizes(None, EngineSizes(slots=3)) == expected
    small = EngineSizes(grammar_states=100, grammar_transitions=1, grammar_classes=1)
    sizes = KnownPrompts(lines, SAMPLING, TOK, True).sizes(None, small)
    assert sizes.grammar_states == 2 * 2001
    assert sizes.grammar_transitions > 1
    assert sizes.grammar_classes > 1
    lines = lines_of(tmp_path, {"prompt": "A"})
    sizes = EngineSizes()
    assert KnownPrompts(lines, SAMPLING, TOK, True).sizes(None, sizes) == dataclasses.replace(sizes, prompt_width=32)


MIXED = [
    {"prompt": "A", "max_new_tokens": 2},
    {"text": "B", "metadata": {"id": "p7"}, "temperature": 0},
    {"prompt": "C", "stop_strings": ["F"]},
    {"prompt": "D", "regex": "[0-9]{1,3}"},
    {"prompt": "E", "json_schema": {"enum": [12, 13]}, "index": 40},
    {"prompt": "F", "suppress_tokens": [38]},
    {"prompt": "G", "do_sample": True, "temperature": 9.0, "n": 2, "seed": 5},
    {"prompt": "H", "do_sample": True, "temperature": 9.0, "top_k": 2, "min_new_tokens": 3},
    "I",
]


@pytest.fixture
def mixed(checkpoint, tmp_path):
    (tmp_path / "mixed").write_text("\n".join(map(json.dumps, MIXED)), encoding="utf-8")
    return ["--model", checkpoint, "--input", tmp_path / "mixed", "--max-new-tokens", 5]


def test_answers_follow_the_options_of_their_lines(run, mixed):
    status, out, err = run(*mixed, "--slots", 4)
    assert (status, err) == (0, "")
    answers = entries(out)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3, 40, 5, 6, 6, 7, 8]
    assert [answer["text"] for answer in answers[:3]] == ["BC", "CDEFG", "DEF"]
    assert answers[1]["metadata"] == {"id": "p7"}
    assert answers[2]["finish"] == "stop_string"
    assert answers[3]["text"].isdigit()
    assert answers[4]["text"] in ("12", "13")
    assert [answer.get("sequence") for answer in answers[5:9]] == [None, 0, 1, None]
    assert answers[6]["text"] != answers[7]["text"]
    assert answers[9]["text"] == "JKLMN"


@pytest.mark.slow
@pytest.mark.parametrize("form", [["--slots", 3], ["--max-time", 1000, "--batch-size", 2]])
def test_slots_batches_and_resumed_runs_agree(run, mixed, tmp_path, interrupt, form):  # noqa: F811
    whole = run(*mixed)[1]
    assert run(*mixed, *form) == (0, whole, "")
    interrupt(4)
    options = (*mixed, *form, "--output", tmp_path / "answers")
    assert run(*options)[0] == 130
    assert run(*options, "--shard", "0/2")[0] == 0
    assert run(*options, "--shard", "1/2")[0] == 0
    assert (tmp_path / "answers").read_text(encoding="utf-8") == whole


@pytest.mark.slow
def test_beam_search_applies_line_options(run, checkpoint, tmp_path):
    lines = [{"prompt": "A", "length_penalty": -2.0}, {"prompt": "A"}, {"prompt": "B", "stop_strings": "D"}]
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    options = ("--model", checkpoint, "--input", tmp_path / "lines", "--num-beams", 2, "--max-new-tokens", 4)
    status, out, err = run(*options)
    assert (status, err) == (0, "")
    assert [answer["text"] for answer in entries(out)] == ["BCDE", "BCDE", "CD"]


@pytest.mark.slow
def test_only_some_lines_request_log_probabilities(run, checkpoint, tmp_path):
    lines = [{"prompt": "A", "output_logprobs": None}, {"prompt": "B"}]
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    options = ("--model", checkpoint, "--input", tmp_path / "lines", "--logprobs", "--max-new-tokens", 2)
    for form in ([], ["--max-time", 1000]):
        without, having = entries(run(*options, *form)[1])
        assert "logprobs" not in without
        assert len(having["logprobs"]) == 2


@pytest.mark.slow
def test_killed_processes_are_resumed(run, mixed, tmp_path, programs):
    options = [*map(str, mixed), "--slots", "3"]
    assert run(*options, "--output", tmp_path / "whole")[0] == 0
    environment = {**os.environ, **programs, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    seen = kill_commands(options, tmp_path / "answers", tmp_path / "whole", environment, kills=3)
    assert seen["killed"] >= 3
    assert seen["wrong"] == 0
