"""Invalid option values: each ends with status 2 and a one-line error, before any weights are read."""

import contextlib
import io

import pytest

from jaxgen.cli import answer, main as cli, train_options
from jaxgen.cli.options import OFFERED
from jaxgen.core.config.kinds import Flag, Layers, OneOf, Seconds, StaticInteger, Text
from jaxgen.errors import LONGEST, InputError
from tests.support.bounded import bounded

HUGE = "1" * 5000
NUMBERS = ["", "\0", "\udcff", "x", "nan", "-1e999", "0x10", "[1]", "null", "true", "1,5", "--1"]
WHOLE = [*NUMBERS, "2.5", "1e3", str(2**31), str(-(2**31) - 1), HUGE, "-7"]
JSON = ["", "\0", "\udcff", "{}}", "NaN", "[" * 100_000, '"x"', "1.5", '["x"]', "[null]", HUGE, "[true]", '{"a": 1}']
WORDS = ["", "\0", "\udcff", "x", "[1]", "null", "1.5", "True"]
# Some options accept these values, and others reject them.
SOME = ["[]", "{}", "[[]]", "[1]", "[-1]", "[100000]", "[[1, 2], [3]]", "[[[1], 0.5]]", '[[[1], "x"]]', "[[1, 99999]]"]
SOME += ["[2147483648]", '{"bias": "x"}', "[[1, 2.5]]", "[[1, 1], [1, 1]]", "-1e-5", "0", "1", "0.5", "1e30", "[[[1]]]"]
PATHS = ["", "\0", "x" * 5000, "nowhere", "."]
GROUPS = {
    "--seed": [*NUMBERS, "2.5", "1e3", HUGE, str(2**64)],
    "--slots --batch-size --processes --process": WHOLE,
    "--shard": [*WORDS, "0/0", "1/1", "-1/2", "0/2/2", "0.5/2", f"{HUGE}/2", f"0/{HUGE}", "1"],
    "--json-schema --prompt-file --input": PATHS,
    "--model --assistant": ["", "\0", "x" * 5000, "/dev/null", "a b", "\udcff"],
    "--prompt --regex --negative-prompt --system": ["\udcff"],
    "--mesh": [*WORDS, "0x1", "1x", "x1", "1x1x1", "9x9", f"{HUGE}x1"],
    "--device": [*WORDS, "cpu:", "cpu:x", "cpu:-1", "cpu:99", f"cpu:{HUGE}"],
    "--dtype": [*WORDS, "int8", "float64"],
}


def refused_by(option) -> list[str]:
    """Return values that are invalid for this option, whatever the other options are."""
    match option.kind:
        case Flag():
            return []  # a flag has no value
        case Text():
            return ["", "\udcff"]
        case OneOf() | Layers():
            return WORDS
        case Seconds():
            return [*NUMBERS, "-1"]
        case StaticInteger():
            return WHOLE
    return {"int": WHOLE, "float": NUMBERS}.get(option.kind.type_name, JSON)


VALUES = {"--" + option.name.replace("_", "-"): refused_by(option) for option in OFFERED}
VALUES |= {flag: values for flags, values in GROUPS.items() for flag in flags.split()}


class WeightsAreRead(Exception):
    pass


@pytest.fixture(autouse=True)
def stubbed(monkeypatch):
    def load_hf(*_, **__):
        raise WeightsAreRead

    monkeypatch.setattr(answer, "load_hf", load_hf)


def line_of(flag: str, value: str) -> str:
    """Run the command with this value of an option, and return the one-line error."""
    out, err = io.StringIO(), io.StringIO()
    prompt = ["A"] if flag not in ("--prompt", "--prompt-file", "--input") else []
    words = ["--", value] if flag == "--prompt" else [f"{flag}={value}"]
    with bounded(words), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main([*prompt, *words])
    line = err.getvalue()
    assert (status, out.getvalue(), line.count("\n")) == (2, "", 1), (flag, value[:50], line)
    assert line.startswith("jaxgen: error: ")
    assert len(line) <= len("jaxgen: error: \n") + LONGEST
    return line


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_bad_values_are_refused_with_the_option_name(part):
    pairs = [(flag, value) for flag, values in VALUES.items() for value in values][part::4]
    assert len(pairs) > 100
    named = sum(flag.removeprefix("--") in line_of(flag, value) for flag, value in pairs)
    assert named > 0.9 * len(pairs)


@pytest.mark.slow
def test_unusual_values_are_refused_or_accepted():
    outcomes = {"refused": 0, "accepted": 0}
    for option in OFFERED:
        for value in SOME if not isinstance(option.kind, Flag) else []:
            try:
                line_of("--" + option.name.replace("_", "-"), value)
                outcomes["refused"] += 1
            except WeightsAreRead:
                outcomes["accepted"] += 1
    assert min(outcomes.values()) > 100


def test_training_options_refuse_bad_values(tmp_path):
    (tmp_path / "data").write_text("")
    needed = {"--data": tmp_path / "data", "--model": "m", "--out": "o"}
    actions = [action for action in train_options.parser()._actions if action.type is not None or action.choices]
    assert len(actions) > 15
    for flag in (word for action in actions for word in action.option_strings):
        for value in ("", "\0") if flag in ("--data", "--eval-data", "--out") else ("", "\0", HUGE, "nan"):
            words = [f"{name}={path}" for name, path in needed.items() if name != flag]
            with pytest.raises(InputError, match=flag):
                train_options.parse([*words, f"{flag}={value}"])
