"""Startup of the command: the modules that it imports, and the user's files that it must not import."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxgen import programs
from jaxgen.cli import options
from jaxgen.core.decoding.rng import seed_key
from tests.support.compilations import compilations

ROOT = Path(__file__).resolve().parents[2]

QUICK = """
import sys
from jaxgen.cli.main import main

for words in (["--help"], ["--version"], ["train", "--help"], ["A", "--temp", "1"], ["A", "--top-k=x"], ["train"]):
    assert main(words) in (0, 2)
    assert not {"jax", "flax", "tokenizers", "importlib.metadata", "rich"} & set(sys.modules), words
"""


def test_help_and_errors_do_not_import_jax():
    done = subprocess.run([sys.executable, "-c", QUICK], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: jaxgen") == 2
    assert done.stderr.count("jaxgen: error: ") == 3


# The entry script as pip writes it.
SCRIPT = "import sys\nfrom jaxgen.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False])
def test_files_in_the_current_directory_are_not_imported(tmp_path, installed):
    work, scripts = tmp_path / "work", tmp_path / "bin"
    for name in ("convert", "jax", "numpy", "tokenizers", "queue", *(["jaxgen"] if installed else [])):
        work.mkdir(exist_ok=True)
        (work / f"{name}.py").write_text(f"raise ImportError('the file {name}.py')")
    scripts.mkdir()
    (scripts / "jaxgen").write_text(SCRIPT)
    command = [scripts / "jaxgen"] if installed else ["-m", "jaxgen"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *command, "--model", "no where", "A"],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jaxgen: error: 'no where' is neither a directory nor a hub id")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_first_answer_compiles_three_programs(run):
    jax.clear_caches()
    with compilations() as count:
        assert run("Tell me a story about an owl", "-n", 4)[0] == 0
    assert count == [3]  # one for prefill and the first token, one for the other steps, and one for the end


def test_seed_key_equals_jax_random_key():
    for seed in (0, 1, 2**31 - 1, 2**32 - 1):
        assert seed_key(seed).dtype == jax.random.key(seed).dtype
        assert np.array_equal(jax.random.key_data(seed_key(seed)), jax.random.key_data(jax.random.key(seed)))


def test_arguments_are_utf_8_in_any_locale():
    text = "Erzähl".encode().decode("ascii", "surrogateescape")  # as Python reads it in an ASCII locale
    assert options.parse([text]).prompt == "Erzähl"


@pytest.mark.slow
def test_missing_platform_is_a_one_line_error():
    environment = {**os.environ, "JAX_PLATFORMS": "foo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "jaxgen", "A"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "jax found no device: Unable to initialize backend 'foo'" in done.stderr


def test_debug_shows_tracebacks(run, checkpoint):
    status, _, err = run("--model", checkpoint, "A", "--debug", "--temperature", "-1")
    assert status == 2
    assert err.startswith("jaxgen: error: --temperature must be > 0")
    assert "Traceback" in err


def test_debug_shows_what_is_compiled(run, checkpoint, monkeypatch):
    monkeypatch.setattr(programs, "PROGRAMS", programs.Programs(8))
    status, _, err = run("--model", checkpoint, "A", "-n", 2, "--debug")
    assert status == 0
    assert [line for line in err.splitlines() if "(steps)" in line] == ["jaxgen: info: compiling generate (steps)"]
    assert "compiling" not in run("--model", checkpoint, "A", "-n", 2)[2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_unwritable_stdout_is_an_error():
    command = [sys.executable, "-m", "jaxgen", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "jaxgen: error: No space left on device\n")
    closed = subprocess.run(["sh", "-c", f"{sys.executable} -m jaxgen --version >&-"], cwd=ROOT, capture_output=True)
    assert (closed.returncode, closed.stderr) == (0, b"jaxgen 0.1.0\n")  # argparse then prints to stderr
    begin = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m jaxgen --help | head -c 1"], cwd=ROOT, capture_output=True
    )
    assert (begin.stdout, begin.stderr) == (b"u", b"")
