"""A user's module that is named `convert`, like the package: an error names it, and it is never executed."""

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import convert
import jaxgen
from jaxgen.shadowing import check_convert

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
from jaxgen import GenerationConfig, Tokenizer, generate, score
assert "convert" not in __import__("sys").modules
from jaxgen import load_hf
"""


def test_the_functions_are_those_of_the_package():
    assert (jaxgen.load_hf, jaxgen.save_hf) == (convert.load_hf, convert.save_hf)
    check_convert()


@pytest.mark.parametrize("name", ["convert.py", "convert/__init__.py"])
def test_a_file_that_comes_first_is_named(tmp_path, monkeypatch, name):
    (tmp_path / "convert").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "convert")
    check_convert()  # a folder without modules does not shadow the package
    (tmp_path / name).write_text("raise SystemExit")
    with pytest.raises(ImportError, match=rf"{name} has the name of jaxgen's package convert .*: rename it$"):
        check_convert()


def test_a_module_that_was_imported_before_is_named(tmp_path, monkeypatch):
    (tmp_path / "convert.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "convert")
    monkeypatch.delitem(vars(jaxgen), "load_hf", raising=False)
    __import__("convert")
    with pytest.raises(ImportError, match="rename it"):
        jaxgen.load_hf  # noqa: B018
    sys.modules.pop("convert")


def test_a_module_that_was_made_by_hand(monkeypatch):
    monkeypatch.setitem(sys.modules, "convert", types.ModuleType("convert"))
    with pytest.raises(ImportError, match=r"sys\.modules has a module convert that is not jaxgen's"):
        check_convert()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="package convert is not installed"):
        check_convert()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["script.py", "convert.py"])
def test_a_script_beside_such_a_file_or_of_its_name(tmp_path, name):
    (tmp_path / "convert.py").write_text("raise SystemExit('the user\\'s file was executed')")
    (tmp_path / name).write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, tmp_path / name], env=environment, capture_output=True, text=True)
    error = f"ShadowedError: {tmp_path / 'convert.py'} has the name of jaxgen's package convert"
    assert error in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [["A"], ["train", "--data", "README.md", "--model", "A", "--out", "B"]])
def test_the_command(tmp_path, words):
    (tmp_path / "convert.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-m", "jaxgen", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"jaxgen: error: {tmp_path / 'convert.py'} has the name of jaxgen's package convert")
