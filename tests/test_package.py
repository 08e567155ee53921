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


def test_options_and_the_command_line_are_read_without_jax():
    code = (
        "import sys, jaxgen, jaxgen.__main__, jaxgen.config.reference\n"
        "from jaxgen.cli import main, options\n"
        "options.parse(['--temperature', '0.5', '--eos-token-id', '[1, 2]', 'A'])\n"
        "jaxgen.config.reference.reference()\n"
        "assert not {'jax', 'flax'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_function_is_not_hidden_by_the_module_of_its_name():
    code = "import jaxgen.generate, jaxgen; assert callable(jaxgen.generate), jaxgen.generate"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
