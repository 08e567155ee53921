"""Programs for machines that are not here, compiled by their own compilers, see benchmarks/README.md."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.targets import device_for, mesh_for
from jaxgen.programs import Program
from tests.support.communication import MODEL, check_communication
from tests.support.models import CONFIG

pytestmark = pytest.mark.compilers
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["greedy", "sampling", "beams"])
def test_communication_of_a_step_on_a_tpu(name):
    check_communication(mesh_for(MODEL, "v5e:2x4", 2, 4), name)


def test_what_a_step_does_on_a_tpu_is_reported(tmp_path):
    config = tmp_path / "tiny"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "benchmarks", "compile", "--target", "v5e:2x2", "--config", str(config)]
    done = subprocess.run([*command, "--results", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", done.stdout, re.MULTILINE))
    assert figures["collectives"] == "0"
    assert float(figures["bytes written"].removesuffix(" MB")) < 1
    operations = int(figures["operations of a decode step, inner loops times their passes, the shortest branches"])
    assert 10 * CONFIG["num_hidden_layers"] < operations < 1000
    (report,) = (tmp_path / "v5e-2x2").glob("compile-tiny-greedy-1-plain.md")
    assert report.read_text() == done.stdout


@pytest.mark.parametrize(("shape", "most"), [("qwen2.5-0.5b", 9), ("qwen2.5-7b", 10)])
def test_a_layer_of_a_step_on_an_h100_is_few_operations(shape, most, tmp_path):
    """Of the whole step, divided by the number of layers."""
    pytest.importorskip("jax_cuda13_plugin", reason="benchmarks/README.md says how to install the compiler for an H100")
    command = [sys.executable, "-m", "benchmarks", "compile", "--target", "h100", "--form", "fused"]
    command += ["--config", str(ROOT / "benchmarks" / "shapes" / shape), "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    figures = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", done.stdout, re.MULTILINE))
    assert float(figures["per layer"]) <= most
    assert figures["copies of more than 1 MB"] == "0.0 MB"


def test_a_program_for_a_tpu_has_no_options_of_cpus(monkeypatch):
    jit, options = Program.jit, []
    monkeypatch.setattr(Program, "jit", lambda self, on_cpu: options.append(on_cpu) or jit(self, on_cpu))
    square = Program(lambda x: x @ x)
    for device in (device_for("v5e:2x2"), jax.devices("cpu")[0]):
        x = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
        assert square.trace(x).lower(lowering_platforms=(device.platform,)).compile().cost_analysis()
    assert options == [False, True]
