"""A user's module that is named `convert`, like the package: an error names it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import convert
import jaxgen

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


def test_functions_are_those_of_the_package():
    assert (jaxgen.load_hf, jaxgen.save_hf) == (convert.load_hf, convert.save_hf)


@pytest.mark.parametrize("name", ["script.py", "convert.py"])
def test_error_names_the_shadowing_script(tmp_path, name):
    (tmp_path / "convert.py").write_text("")
    (tmp_path / name).write_text("from jaxgen import generate\nfrom jaxgen import load_hf")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / name], env=environment, capture_output=True, text=True)
    error = f"ImportError: {tmp_path / 'convert.py'} has the name of jaxgen's package convert"
    assert error in done.stderr.splitlines()[-1]


def test_the_command_does_not_import_from_the_current_directory(tmp_path):
    (tmp_path / "convert.py").write_text("raise SystemExit('the file was executed')")
    words = [sys.executable, "-m", "jaxgen", "--model", "absent", "A"]
    done = subprocess.run(
        words, cwd=tmp_path, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "absent" in done.stderr
    assert "executed" not in done.stderr
