"""Imports go one way: each room imports from its own floor and those below."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (
    {"errors", "buckets", "shapes", "programs", "shadowing"},
    {"model", "text"},
    {"config", "grammar"},
    {"logits", "convert"},
    {"decoding", "training"},
    {"request", "output"},
    {"generation", "scoring", "warming"},
    {"demo", "cli"},
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


def files():
    for package in ("jaxgen", "convert"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if module != "convert.__main__":  # a command, whose parser and statuses are those of jaxgen's
                yield pytest.param(path, room_of(module), id=module)


@pytest.mark.parametrize(("path", "room"), list(files()))
def test_imports_go_down(path, room):
    for module in imports(path):
        assert FLOOR[room_of(module)] <= FLOOR[room], f"{path.relative_to(ROOT)} imports {module}"


def test_every_room_has_a_floor():
    assert {room_of(".".join(p.values[0].relative_to(ROOT).with_suffix("").parts)) for p in files()} == set(FLOOR)
