import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import convert
import jaxgen

ROOT = Path(__file__).resolve().parents[1]

IMPORT = """
import sys

import convert, jaxgen
from jaxgen.cli import main
from jaxgen.text import streaming, tokenizer

assert not {"torch", "transformers"} & set(sys.modules)

from jax._src import xla_bridge

assert not xla_bridge._backends, xla_bridge._backends
import jax

jax.devices()
assert xla_bridge._backends, "the check above looks at nothing"
"""


def test_import_takes_no_device_and_neither_torch_nor_transformers():
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", [jaxgen, convert])
def test_public_names(package):
    assert list(package.__all__) == sorted(set(package.__all__))
    for name in package.__all__:
        assert (getattr(package, name).__doc__ or "").strip(), name


def test_typed():
    assert (Path(jaxgen.__file__).parent / "py.typed").is_file()


def test_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == jaxgen.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", jaxgen.__version__)


def test_version_of_what_is_installed():
    try:
        installed = importlib.metadata.version("jaxgen")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxgen is not installed, only on the path")
    assert installed == jaxgen.__version__
