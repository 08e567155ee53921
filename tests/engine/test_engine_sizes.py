"""The record of an engine's sizes: its checks, and what is derived from it."""

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from jaxgen import Engine, EngineSizes, InputError, generate_many
from jaxgen.cli import options as command_options, run_batch_options, serve_options
from jaxgen.cli.size_options import sizes_of
from tests.engine.test_engine import KEY, PARAMS, SIMPLE

ROOT = Path(__file__).resolve().parents[2]
NAMES = [field.name for field in dataclasses.fields(EngineSizes)]


@pytest.mark.parametrize("name", NAMES)
def test_each_size_is_checked(name):
    least = 0 if name == "prefix_cache_bytes" else 1
    with pytest.raises(InputError, match=f"{name} must be at least {least}, got {least - 1}"):
        EngineSizes(**{name: least - 1})
    for wrong in (2.0, "2", True):
        with pytest.raises(TypeError, match=f"{name} must be a whole number"):
            EngineSizes(**{name: wrong})
    assert getattr(EngineSizes(**{name: least}), name) == least


def test_only_the_prefix_store_size_has_an_automatic_default():
    assert EngineSizes(prefix_cache_bytes=None).prefix_cache_bytes is None
    with pytest.raises(TypeError, match="slots must be a whole number, got None"):
        EngineSizes(slots=None)


@pytest.mark.parametrize("name", NAMES)
def test_each_size_is_described(name):
    default = getattr(EngineSizes, name)
    text = next(line for line in EngineSizes.__doc__.splitlines() if line.startswith(f"        {name}: "))
    assert "(default: 256 MB, or less" in text if default is None else text.endswith(f"(default: {default}).")
    [row] = re.findall(rf"^\| `{name}` \| ([^|]+) \|", (ROOT / "docs/engine.md").read_text("utf-8"), re.MULTILINE)
    assert row == "256 MB or less" if default is None else row.replace(",", "") == str(default)


def test_engine_accepts_sizes_as_a_record_or_as_keywords():
    sizes = EngineSizes(slots=1, prompt_width=8, most_waiting=3)
    with Engine(PARAMS, SIMPLE, KEY, sizes=sizes, prompt_options=(), most_waiting=2) as engine:
        assert engine.sizes == EngineSizes(slots=1, prompt_width=8, most_waiting=2)
        assert (engine.slots, engine.prompt_width, engine.most_waiting, engine.id_entries) == (1, 8, 2, 32)
        assert engine.free_places == 2
    arguments = {"prompt_options": (), "most_waiting": 1, "ordered": True}
    prompts = [[50 + n] for n in range(9)]
    one = list(generate_many(PARAMS, prompts, KEY, SIMPLE, sizes=sizes, **arguments))
    other = list(generate_many(PARAMS, prompts, KEY, SIMPLE, slots=1, prompt_width=8, **arguments))
    assert [done.tokens for done in one] == [done.tokens for done in other]
    assert [done.index for done in one] == list(range(9))


@pytest.mark.parametrize("module", [serve_options, run_batch_options])
def test_service_uses_the_sizes_of_its_options(module):
    words = [] if module is serve_options else ["README.md", "out"]
    assert sizes_of(module.parse(words), serve_options.SERVED) == serve_options.SERVED
    flags = {"slots": 3, "prompt_width": 5, "queue": 7, "prefix_cache_bytes": 0, "grammar_states": 11}
    flags |= {"grammar_transitions": 13, "grammar_classes": 17, "grammars": 19}
    words += [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    expected = dataclasses.replace(serve_options.SERVED, most_waiting=flags.pop("queue"), **flags)
    assert sizes_of(module.parse(words), serve_options.SERVED) == expected
    with pytest.raises(InputError, match="--slots: 0 must be at least 1"):
        module.parse([*words, "--slots", "0"])


def test_an_option_without_a_value_leaves_the_choice_to_the_command():
    assert command_options.parse(["A"]).slots is None
    namespace = argparse.Namespace(slots=5, other=3)
    assert sizes_of(namespace, EngineSizes(grammars=2)) == EngineSizes(slots=5, grammars=2)
