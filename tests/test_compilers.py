"""Programs for machines that are not available here, built by those machines' compilers: see benchmarks/README.md."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import hlo
from benchmarks.targets import compile_generate, device_for, lower_for, mesh_for
from jaxgen import GenerationConfig, ModelConfig
from jaxgen.core.grammar import row_parts
from jaxgen.core.model import cache_storage, workarounds
from jaxgen.core.model.weights import _contract
from jaxgen.core.request.running.automaton_tables import GrammarTable, grammar_capacity
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.programs import Program
from tests.support.communication import EXPERTS, MODEL, check_communication
from tests.support.models import CONFIG
from tests.support.slot_loops import COPY, ON_CHIP, copied_by_an_engine, copied_caches

pytestmark = pytest.mark.compilers
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _nothing_stored():
    """Store no program in jax's cache: without a device, a stored program cannot be read again."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


@pytest.mark.parametrize("name", ["greedy", "sampling", "slots", "beams"])
def test_communication_of_a_step_on_a_tpu(name):
    check_communication(mesh_for(MODEL, "v5e:2x4", 2, 4), name)


def test_communication_of_a_step_with_experts_on_a_tpu():
    program = check_communication(mesh_for(EXPERTS, "v5e:2x4", 2, 4), "greedy", EXPERTS)
    assert "[4,72,1024]" in program
    assert "[16,72,1024]" not in program


def test_no_loop_copies_the_cache_of_slots_on_a_tpu():
    assert copied_caches(device_for("v5e:2x2"), "bfloat16") == {"slots": [], "pool": []}


def test_no_loop_of_an_engine_copies_a_cache_on_a_tpu():
    assert not any(copied_by_an_engine(device_for("v5e:2x2"), "bfloat16").values())


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


@pytest.fixture
def _compiler_for_an_h100():
    pytest.importorskip("jax_cuda13_plugin", reason="benchmarks/README.md says how to install the compiler for an H100")


def compiled(target: str, config: Path, results: Path, *words: str) -> dict[str, str]:
    """Compile `generate()` with `python -m benchmarks compile`, and return its table."""
    command = [sys.executable, "-m", "benchmarks", "compile", "--target", target, "--form", "fused"]
    command += ["--config", str(config), "--results", str(results), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", done.stdout, re.MULTILINE))


@pytest.mark.usefixtures("_compiler_for_an_h100")
@pytest.mark.parametrize(
    ("shape", "prompt", "new_tokens", "operations", "megabytes"),
    [
        ("qwen2.5-0.5b", 128, 128, 9, 2),
        ("qwen2.5-7b", 128, 128, 10, 6),
        ("qwen2.5-7b", 128, 3000, 13, 30),
        ("qwen2.5-7b", 32, 3000, 13, 30),
        ("qwen2.5-7b", 16384, 128, 13, 20),
    ],
)
def test_a_step_on_an_h100_has_few_operations_and_copies_no_cache(
    shape, prompt, new_tokens, operations, megabytes, tmp_path
):
    """Check a step's operations per layer. For the 7B model and 3,200 cache slots, a layer's keys take 3.3 MB."""
    words = ("--prompt", str(prompt), "--new-tokens", str(new_tokens))
    figures = compiled("h100", ROOT / "benchmarks" / "shapes" / shape, tmp_path, *words)
    assert float(figures["per layer"]) <= operations
    assert float(figures["bytes written"].removesuffix(" MB")) <= megabytes
    assert figures["of these results of more than 1 MB"] == "0.0 MB"


@pytest.mark.usefixtures("_compiler_for_an_h100")
@pytest.mark.parametrize(("rows", "prompt", "megabytes"), [(64, 2048, 4000), (1, 16384, 1500)])
def test_prompts_are_read_in_bounded_memory_on_an_h100(rows, prompt, megabytes, tmp_path):
    config = ROOT / "benchmarks" / "shapes" / "qwen2.5-7b"
    program = tmp_path / "program.txt"
    words = ("--rows", str(rows), "--prompt", str(prompt), "--new-tokens", "128", "--hlo", str(program))
    figures = compiled("h100", config, tmp_path, *words)
    assert float(figures["memory: arguments, temporaries"].split()[1]) <= megabytes
    assert "custom-call 28" in figures["kinds"]  # in each layer, a step calls cuDNN's attention once
    assert "__cudnn$fmha" in program.read_text()


def test_a_batch_of_long_prompts_is_compiled_for_a_tpu(tmp_path):
    """The compiler failed when rows of indices were reshaped to blocks of queries."""
    shape = json.loads((ROOT / "benchmarks" / "shapes" / "qwen2.5-7b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 4, "max_window_layers": 4}))
    program = tmp_path / "program.txt"
    words = ("--rows", "8", "--prompt", "2048", "--new-tokens", "128", "--hlo", str(program))
    figures = compiled("v5e:2x2", tmp_path, tmp_path, *words)
    assert float(figures["memory: arguments, temporaries"].split()[1]) <= 700
    assert "splash_mqa_fwd" in program.read_text()


@pytest.mark.usefixtures("_compiler_for_an_h100")
def test_no_loop_copies_a_cache_of_slots_on_an_h100():
    assert copied_caches(device_for("h100"), "bfloat16") == {"slots": [], "pool": []}


@pytest.mark.usefixtures("_compiler_for_an_h100")
def test_no_loop_of_an_engine_copies_a_cache_on_an_h100():
    assert not any(copied_by_an_engine(device_for("h100"), "bfloat16").values())


ROWS, VOCAB = 16, 151_936


def grammar_step(target: str) -> str:
    """Compile what a step does with an engine's default table of grammars: 16 rows, 151,936 tokens."""
    jax.clear_caches()
    device = device_for(target)

    def step(table, state, remaining, token):
        following = table.push(state, token, None)
        return table.allowed(following, None, remaining), table.exhausted(following, remaining), following

    table, rows = GrammarTable(VOCAB, grammar_capacity(EngineSizes())).joint, np.zeros(ROWS, np.int32)
    on_device = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device), (table, rows, rows, rows)
    )
    return lower_for(device, jax.jit(step).trace(*arguments)).compile().as_text()


def check_grammar_step(program: str) -> None:
    """Check that a step neither copies a table nor stores a comparison for each row, token and range."""
    sizes = {dims: math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", program)}
    assert 8 * ROWS * VOCAB > max(sizes.values()) >= (EngineSizes.grammars + 1) * VOCAB
    copies = [match for line in program.splitlines() if (match := COPY.match(line)) and ON_CHIP not in match[2]]
    large = [match for match in copies if sizes.get(match[1], 0) > EngineSizes.grammar_states]
    assert [match[0] for match in large if not match[1].startswith(f"{ROWS},")] == []
    assert program.count(" while(") == 1  # the passes after the first


def test_a_step_with_grammars_on_a_tpu(monkeypatch):
    check_grammar_step(grammar_step("v5e:2x2"))
    monkeypatch.setattr(row_parts, "_as_blocks", row_parts._as_slices)
    # If the compiler no longer makes a loop of each slice, `_as_blocks` can be removed.
    assert grammar_step("v5e:2x2").count(" while(") == 1 + 8


@pytest.mark.usefixtures("_compiler_for_an_h100")
def test_a_step_with_grammars_on_an_h100():
    program = grammar_step("h100")
    check_grammar_step(program)
    assert hlo.count(hlo.outside_of_decode(program)) <= 16


# Workarounds for the GPU's compiler: a module, a name in it, and the value that turns the workaround off.
FOR_GPUS = {
    "rows as sums": (workarounds, "row_sums", lambda row, weight, in_parts: _contract(row, weight)),
    "scores and values as sums": (workarounds, "_CACHED_BYTES", -1),
    "values as sums": (workarounds, "_ONE_KERNEL_SLOTS", 0),
    "norms of two rows": (workarounds, "_norm_of_two", lambda plain, row, weight: plain(row, weight)),
    "signed 16-bit caches": (cache_storage, "stored_dtype", lambda dtype: np.dtype(np.uint16)),
    "sums in equal parts": (workarounds, "_LONGEST_SUM", 1 << 30),
}


def compiled_for_an_h100(shape):
    """Compile a call with three layers, one row and fused projections."""
    jax.clear_caches()
    config = json.loads((ROOT / "benchmarks" / "shapes" / shape / "config.json").read_text("utf-8"))
    model = dataclasses.replace(ModelConfig.from_hf(config | {"num_hidden_layers": 3}), dtype="bfloat16")
    cfg = GenerationConfig(model=model, max_new_tokens=128, eos_token_id=1, pad_token_id=0)
    return compile_generate(cfg, device_for("h100"), rows=1, width=128, form="fused").as_text()


@pytest.mark.usefixtures("_compiler_for_an_h100")
def test_workarounds_for_a_gpus_compiler_save_operations(monkeypatch):
    """Each workaround must save an operation in every layer, except perhaps the last; otherwise, it can be removed."""

    def operations() -> int:
        return hlo.count(hlo.decode_step(compiled_for_an_h100("qwen2.5-7b"), hlo.shortest_branch))

    saved, least = {}, operations()
    for name, change in FOR_GPUS.items():
        with monkeypatch.context() as without:
            without.setattr(*change)
            saved[name] = operations() - least
    if jax.__version_info__ >= (0, 11, 2):
        assert saved.pop("signed 16-bit caches") == 0
    assert {name: count for name, count in saved.items() if count < 2} == {}


@pytest.mark.usefixtures("_compiler_for_an_h100")
def test_the_head_of_a_small_model_is_not_fused_with_the_norm_on_an_h100(monkeypatch):
    """With the norm, the kernel is one of Triton's, which are "custom"; if not, the barrier can be removed."""

    def kinds() -> set[str]:
        lines = compiled_for_an_h100("qwen2.5-0.5b").splitlines()
        return {kind for line in lines if "/lm_head/" in line for kind in re.findall(r" fusion\(.* kind=(\w+)", line)}

    assert kinds() == {"kInput"}
    monkeypatch.setattr(workarounds, "for_head", lambda x: x)
    assert "kCustom" in kinds()


def test_a_program_for_a_tpu_has_no_options_of_cpus(monkeypatch):
    jit, options = Program.jit, []
    monkeypatch.setattr(
        Program, "jit", lambda self, on_cpu, *static: options.append(on_cpu) or jit(self, on_cpu, *static)
    )
    square = Program(lambda x: x @ x)
    for device in (device_for("v5e:2x2"), jax.devices("cpu")[0]):
        x = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
        assert square.trace(x).lower(lowering_platforms=(device.platform,)).compile().cost_analysis()
    assert options == [False, True]


@pytest.mark.usefixtures("_compiler_for_an_h100")
def test_a_step_with_packed_weights_on_an_h100_reads_only_packed_weights():
    """Nothing that is as large as an unpacked matrix is stored, and a layer takes few operations more than unpacked."""
    model, programs = compiled_forms("h100", ("fused", "int4"))
    steps = {form: hlo.decode_step(program.as_text(), hlo.shortest_branch) for form, program in programs.items()}
    assert hlo.count(steps["int4"]) - hlo.count(steps["fused"]) <= 3 * model.num_hidden_layers
    assert max(operation.nbytes for operation in steps["int4"]) < 1e6  # the logits take 0.6 MB
    sizes = {form: program.memory_analysis().argument_size_in_bytes for form, program in programs.items()}
    others = 2 * model.vocab_size * model.hidden_size * 2  # bytes of the embedding and the head, which are not packed
    assert sizes["int4"] - others < 0.27 * (sizes["fused"] - others)


def test_a_tpu_copies_packed_weights_at_most_once():
    """XLA copies packed numbers to another layout before the loop. Unpacked, they would take four times the memory."""
    model, programs = compiled_forms("v5e:2x2", ("int4",))
    analysis = programs["int4"].memory_analysis()
    packed = analysis.argument_size_in_bytes - 2 * model.vocab_size * model.hidden_size * 2  # of the layers
    assert analysis.temp_size_in_bytes < packed


def compiled_forms(target, forms):
    """Return a model with three layers of 7B's sizes, and its calls with one row for each form of the weights."""
    config = json.loads((ROOT / "benchmarks" / "shapes" / "qwen2.5-7b" / "config.json").read_text("utf-8"))
    model = dataclasses.replace(ModelConfig.from_hf(config | {"num_hidden_layers": 3}), dtype="bfloat16")
    cfg = GenerationConfig(model=model, max_new_tokens=128, eos_token_id=1, pad_token_id=0)
    jax.clear_caches()
    return model, {form: compile_generate(cfg, device_for(target), rows=1, width=128, form=form) for form in forms}
