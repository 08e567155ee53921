import ast
import importlib.metadata
import importlib.util
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

import jaxgen
from jaxgen import demo

assert not {"jax", "flax", "numpy", "tokenizers"} & set(sys.modules)
assert "generate" in dir(jaxgen)

import convert
from jaxgen.cli import main

for name in jaxgen.__all__:
    getattr(jaxgen, name)
assert not {"torch", "transformers"} & set(sys.modules)

from jax._src import xla_bridge

assert not xla_bridge._backends, xla_bridge._backends
import jax

jax.devices()
assert xla_bridge._backends, "the check above looks at nothing"
"""


def test_options_are_read_without_jax():
    code = (
        "import sys, jaxgen, jaxgen.__main__, jaxgen.core.config.reference\n"
        "from jaxgen.cli import main, options, train_options\n"
        "options.parse(['--temperature', '0.5', '--eos-token-id', '[1, 2]', 'A'])\n"
        "train_options.parse(['--data', 'README.md', '--model', 'A', '--out', 'B'])\n"
        "jaxgen.core.config.reference.reference()\n"
        "assert not {'jax', 'flax'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_is_lazy_and_initializes_no_device():
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_lazy_names_are_those_that_type_checkers_see():
    block = next(node for node in ast.parse(Path(jaxgen.__file__).read_text("utf-8")).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names if alias.asname == alias.name}
    assert seen == jaxgen._HOMES


def test_no_module_has_a_public_name():
    # Importing such a module would replace the public object of the same name.
    for name in jaxgen.__all__:
        assert importlib.util.find_spec(f"jaxgen.{name}") is None, name


def test_only_public_names_are_listed():
    named = [name for name in dir(jaxgen) if name not in jaxgen.__all__]
    assert set(named) <= {"__version__", "demo", "evaluate", "training"}  # these modules are listed once imported
    assert set(jaxgen.__all__) < set(dir(jaxgen))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jaxgen' has no attribute 'genrate'"):
        jaxgen.genrate  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'genrate'"):
        from jaxgen import genrate  # noqa: F401


@pytest.mark.parametrize("package", [jaxgen, convert])
def test_public_names(package):
    assert list(package.__all__) == sorted(set(package.__all__))
    for name in package.__all__:
        assert (getattr(package, name).__doc__ or "").strip(), name


INSTALLED = """
import importlib.util

spec = importlib.util.find_spec("jaxgen")
print(spec and spec.origin)
print(*(name for name in ("jaxgen", "convert", "demo", "tests", "benchmarks") if importlib.util.find_spec(name)))
"""


def test_an_editable_install_has_the_packages_of_the_wheel(tmp_path):
    command = [sys.executable, "-I", "-c", INSTALLED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    origin, names = done.stdout.splitlines()
    if origin != str(ROOT / "jaxgen" / "__init__.py"):
        pytest.skip("jaxgen is not installed from this folder")
    assert names == "jaxgen convert"


def test_package_is_typed():
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
