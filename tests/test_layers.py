"""Imports go one way: each room imports from its own floor and those below."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (
    {"errors", "buckets", "shapes", "memory", "programs", "program_files", "recompilation", "shadowing"},
    {"model", "text"},
    {"config", "grammar"},
    {"logits", "convert"},
    {"decoding", "training"},
    {"request", "output"},
    {"generation", "scoring", "warming"},
    {"engine"},
    {"serving"},
    {"demo", "cli", "evaluate"},
    {"export"},
    {"__init__", "__main__"},
)
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[0] if parts[0] == "convert" else parts[1]


def imports(path: Path):
    """The modules of jaxgen and convert that a file imports, but for the eyes of a type checker alone."""
    tree = ast.parse(path.read_text())
    hidden = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in hidden or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"{module}.{name}" for name in names] if module == "jaxgen" else [module]
        yield from (name for name in names if name.split(".")[0] in ("jaxgen", "convert") and name != "jaxgen")


def sources():
    return [path for package in ("jaxgen", "convert") for path in sorted((ROOT / package).rglob("*.py"))]


def files():
    for path in sources():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module != "convert.__main__":  # a command, whose parser and statuses are those of jaxgen's
            yield pytest.param(path, room_of(module), id=module)


@pytest.mark.parametrize(("path", "room"), list(files()))
def test_imports_go_down(path, room):
    for module in imports(path):
        assert FLOOR[room_of(module)] <= FLOOR[room], f"{path.relative_to(ROOT)} imports {module}"


def test_8_bits_are_one_kind_of_several():
    """Other code asks a kind of weight or of cache, so that a new one needs no change there."""
    allowed = {
        "jaxgen/model/int8.py",  # the kind of weight
        "jaxgen/model/quantization.py",  # the table of kinds
        "jaxgen/model/slots.py",  # the kind of cache
        "jaxgen/config/options.py",  # cache_dtype
        "convert/hf.py",  # the documentation of load_hf and save_hf
    }
    found = {path for path in sources() if re.search("(?<!u)int8", path.read_text(), re.IGNORECASE)}
    assert {str(path.relative_to(ROOT)) for path in found} == allowed


def test_every_room_has_a_floor():
    assert {room_of(".".join(p.values[0].relative_to(ROOT).with_suffix("").parts)) for p in files()} == set(FLOOR)
