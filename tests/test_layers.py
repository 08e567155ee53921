"""Imports go down: a room (a package or top-level module) imports only from its own floor and the floors below."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

import jaxgen

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (
    {"model", "errors", "json_file", "utf8_text", "buckets", "shapes", "control", "cpu", "version", "gguf"},
    {"memory", "remote", "programs", "compile_cache", "progress", "recompilation", "text"},
    {"arguments"},
    {"config", "grammar"},
    {"logits", "convert"},
    {"decoding", "training"},
    {"request", "output"},
    {"generation", "scoring", "precompile"},
    {"engine"},
    {"serving"},
    {"demo", "cli", "evaluate"},
    {"export"},
    {"__init__", "__main__"},
)
SHELL = {"engine", "serving", "cli", "evaluate", "export"}  # built on the core: the rooms in jaxgen/core
MOST_NAMES = 28  # of the core, in the shell
DOORS = {"config", "output", "request", "text"}  # the rooms of the core that the shell takes these names from
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}


def sources():
    return [path for package in ("jaxgen", "convert") for path in sorted((ROOT / package).rglob("*.py"))]


MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sources()}


def room_of(module: str) -> str:
    parts = [*module.removeprefix("jaxgen.core.").removeprefix("jaxgen.").split("."), "__init__"]
    return "__init__" if parts[0] in ("jaxgen", "core") else parts[0]


def is_core(module: str) -> bool:
    return module.startswith("jaxgen.core.")


def imports(module: str) -> set[str]:
    """Return the modules of jaxgen and convert that a module imports, even inside functions or for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if names <= MODULES.keys() else {node.module, *names}
    return found & MODULES.keys()


IMPORTS = {module: imports(module) for module in MODULES}


@pytest.mark.parametrize("module", IMPORTS)
def test_imports_point_downward(module):
    for other in IMPORTS[module]:
        assert FLOOR[room_of(other)] <= FLOOR[room_of(module)], f"{module} imports {other}"


def test_imports_are_acyclic():
    """There are no circular imports between modules or between rooms, even counting imports inside functions."""
    rooms = {room_of(module): set() for module in MODULES}
    for module, others in IMPORTS.items():
        rooms[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    for graph in (IMPORTS, rooms):
        graphlib.TopologicalSorter(graph).prepare()  # raises an error that shows the circle


def test_the_shell_takes_few_names_from_the_core():
    """A name is a module and what is imported from it, wherever the import is; public names do not count.

    All names come from four rooms. Packages have no names of their own, and no module is imported as a whole.
    """
    found: dict[str, set[str]] = {}
    for module in (module for module in MODULES if room_of(module) in SHELL):
        for node in ast.walk(ast.parse(MODULES[module].read_text())):
            parent = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
            names = [f"{parent}{alias.name}" for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
            whole = [name for name in names if is_core(f"{name}.") and name in MODULES]
            assert not whole, f"{module} imports {whole}: import the names that it uses"
            if isinstance(node, ast.ImportFrom) and node.module and is_core(node.module):
                for alias in node.names:
                    if alias.name not in jaxgen.__all__:
                        assert room_of(node.module) in DOORS, f"{module} imports {alias.name} from {node.module}"
                        found.setdefault(f"{node.module}.{alias.name}", set()).add(module)
    assert len(found) <= MOST_NAMES, "\n".join(f"{name}: {', '.join(sorted(found[name]))}" for name in sorted(found))


def test_int8_is_not_hard_coded():
    """All other code uses only the interfaces of weights and caches, and needs no change for a new kind."""
    allowed = {
        "jaxgen/core/model/int8.py",  # the kind of weight
        "jaxgen/core/model/quantization.py",  # the table of kinds
        "jaxgen/core/model/cache_storage.py",  # the kind of cache
        "jaxgen/core/model/grouped.py",  # an array of signed bytes
        "jaxgen/core/model/fp8.py",  # the sign of a byte
        "jaxgen/core/config/generation_options.py",  # cache_dtype
        "convert/hf.py",  # the documentation of load_hf and save_hf
        "convert/packed/compressed_tensors.py",  # a format whose files have 8-bit integers
    }
    found = {path for path in sources() if re.search("(?<!u)int8", path.read_text(), re.IGNORECASE)}
    assert {str(path.relative_to(ROOT)) for path in found} == allowed


def test_only_three_files_depend_on_guidance():
    """All other code counts the rows of one stream. The cache converts their numbers: see `KVCache.streams`."""
    users = {module for module, others in IMPORTS.items() if "jaxgen.core.decoding.guidance" in others}
    assert users == {f"jaxgen.core.decoding.{name}" for name in ("forward", "dola", "loop")}


def test_every_package_has_a_level():
    assert {room_of(module) for module in MODULES} == set(FLOOR)
