"""Tests and files with tests are divided into parts: each is in exactly one part."""

import pytest

from tests.support.choice import Choice

TESTS = [f"tests/test_{number // 9}.py::test_it[{number}]" for number in range(500)]


@pytest.mark.parametrize("parts", [1, 4, 12])
@pytest.mark.parametrize("seed", [0, 876543210])
def test_each_test_is_in_exactly_one_part(parts, seed):
    chosen = [[test for test in TESTS if Choice(part + 1, parts, seed).has(test)] for part in range(parts)]
    assert sorted(test for part in chosen for test in part) == sorted(TESTS)
    assert min(map(len, chosen)) > len(TESTS) / parts / 2


def test_another_seed_chooses_other_tests():
    first, second = ({test for test in TESTS if Choice(1, 4, seed).has(test)} for seed in (0, 1))
    assert first - second
    assert second - first


def test_a_choice_is_written_as_part_of_parts_and_seed(monkeypatch):
    monkeypatch.delenv("JAXGEN_SLOW_TESTS", raising=False)
    assert all(map(Choice.of_environment().has, TESTS))
    monkeypatch.setenv("JAXGEN_SLOW_TESTS", "3/12:77")
    monkeypatch.setenv("JAXGEN_FILES", "1/4:5")
    assert Choice.of_environment() == Choice(3, 12, 77)
    assert Choice.of_environment("JAXGEN_FILES") == Choice(1, 4, 5)


@pytest.mark.parametrize("text", ["", "12:0", "0/4:0", "5/4:0", "1/0:0", "1/4", "1/4:x"])
def test_empty_selections_are_errors(text):
    with pytest.raises(ValueError, match="must be PART/PARTS:SEED"):
        Choice.parse(text)
