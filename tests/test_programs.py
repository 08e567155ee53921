"""Programs of eager calls: how many are kept, when they are freed, and the compiler's options."""

import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import GenerationConfig, cpu, generate, prefill, programs, score
from jaxgen.programs import Program, Programs
from tests.support.compilations import compilations
from tests.support.models import model_config, random_params, slow

MODEL = model_config(num_hidden_layers=1)
PARAMS = random_params(MODEL)
CFG = GenerationConfig(model=MODEL, max_new_tokens=2)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's memory maps")


@pytest.fixture
def bounded(monkeypatch):
    """Return a function that limits the number of programs that are kept."""

    def bound(most):
        monkeypatch.setattr(programs, "PROGRAMS", Programs(most))
        return programs.PROGRAMS

    return bound


def maps():
    with open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)


def double(x, *, times=1):
    for _ in range(times):
        x = jnp.sin(x) + x
    return x


def run_generate(number):
    options = [{}, {"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}, {"min_length": 3, "eos_token_id": 5}]
    rows, which = divmod(number, len(options))
    generate(PARAMS, np.full((1 + rows, 3), 7), None, CFG.replace(**options[which]))


def run_prefill(number):
    prefill(PARAMS, np.full((1, 3), 7), CFG.replace(prefill_chunk_size=1 + number))


@pytest.mark.slow
@linux
@pytest.mark.parametrize(("run", "count"), [(run_prefill, 20), *slow((run_prefill, 300), (run_generate, 20))])
def test_programs_beyond_the_limit_are_freed(run, count, bounded):
    held = bounded(4)
    used = []
    for number in range(count):
        run(number)
        used.append(maps())
        assert len(held) <= 4
    each = (used[3] - used[0]) / 3
    assert each > 20  # programs do use memory maps
    assert max(used[4:]) < used[3] + 3 * each


def test_least_recently_used_program_is_freed_first(bounded):
    bounded(2)
    run = Program(double)
    one, two, three = (np.ones(size, np.float32) for size in (1, 2, 3))
    for x in (one, two, one, three):
        run(x)
    with compilations() as count:
        run(one)
        run(three)
    assert count[0] == 0
    with compilations() as count:
        run(two)
    assert count[0] == 1


def test_scarce_maps_also_limit_the_number_of_programs(bounded, tmp_path, monkeypatch):
    held = bounded(100)
    monkeypatch.setattr(programs, "_PROC", tmp_path)
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "sys/vm/max_map_count").write_text("100\n")
    run = Program(double)
    for size in range(1, 12):
        (tmp_path / "self/maps").write_text("a map\n" * (50 if size < 11 else 51))
        run(np.ones(size, np.float32))
    assert len(held) == programs._FEW  # maps were scarce in the last call, so the others were freed
    (tmp_path / "self/maps").unlink()  # on some systems this file does not exist
    for size in range(12, 16):
        run(np.ones(size, np.float32))
    assert len(held) == programs._FEW + 4


def test_running_program_outlives_its_entry(bounded):
    held = bounded(1)
    inside, dropped = threading.Event(), threading.Event()

    def wait(x):
        inside.set()
        assert dropped.wait(60)
        return x

    def waiting(x):
        x = jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return double(x, times=3)

    run, found = Program(waiting), []
    thread = threading.Thread(target=lambda: found.append(np.asarray(run(np.ones(3, np.float32)))))
    thread.start()
    assert inside.wait(60)
    Program(double)(np.ones(5, np.float32))  # takes the only space
    (key,) = held._programs
    assert key[0]._function is double
    dropped.set()
    thread.join(60)
    np.testing.assert_allclose(found[0], double(np.ones(3, np.float32), times=3), rtol=1e-6)


def test_another_value_or_spelling_compiles_nothing(bounded):
    held = bounded(9)
    run = Program(double, static_argnames=["times"])
    run(np.ones(3, np.float32), times=2)
    with compilations() as count:
        run(np.zeros(3, np.float32), times=2)
    assert (count[0], len(held)) == (0, 1)
    for x in (np.ones(4, np.float32), np.ones(3, np.float16)):
        run(x.astype(x.dtype), times=2)
    run(np.ones(3, np.float32), times=3)
    assert len(held) == 4


def test_program_works_inside_transformations(bounded):
    held = bounded(9)
    run, x = Program(double), np.ones(3, np.float32)
    wanted = double(x)
    np.testing.assert_allclose(jax.jit(run)(x), wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda: run(x))(), wanted, rtol=1e-6)
    assert len(held) == 0  # the operations are part of the caller's program
    np.testing.assert_allclose(jax.vmap(run)(x[None])[0], wanted, rtol=1e-6)
    gradient = jax.grad(lambda x: run(x).sum())(x)
    np.testing.assert_allclose(gradient, np.cos(x) + 1, rtol=1e-6)


@linux
@pytest.mark.slow
def test_programs_of_score_gradients_are_freed(bounded):
    bounded(2)

    def loss(params, width):
        return score(params, np.full((1, width), 7), CFG).logprobs.sum()

    used = []
    for width in (30, 40, 70, 150):  # each in its own bucket
        jax.block_until_ready(jax.grad(loss)(PARAMS, width))
        used.append(maps())
    assert used[-1] < used[1] + (used[1] - used[0])


def device(platform):
    return types.SimpleNamespace(platform=platform)


def array(platform, committed):
    return types.SimpleNamespace(committed=committed, sharding=types.SimpleNamespace(device_set=[device(platform)]))


@pytest.mark.parametrize("default", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("committed", ["cpu", "gpu", "tpu", None])
def test_compiler_options_are_only_for_cpus(default, committed, monkeypatch):
    monkeypatch.setattr(programs, "default_device", lambda: device(default))
    leaves = [np.ones(3), array("cpu", False), array("gpu", False)]
    leaves += [] if committed is None else [array(committed, True)]
    assert programs._runs_on_cpu(leaves) is ((committed or default) == "cpu")


@pytest.mark.parametrize(("flags", "expected"), [("fma avx512f", {"xla_cpu_prefer_vector_width": "512"}), ("fma", {})])
def test_compiler_options_follow_the_cpu_flags(flags, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(programs, "cpu_flags", cpu.cpu_flags.__wrapped__)
    assert programs.cpu_compiler_options() == expected
    (tmp_path / "cpuinfo").unlink()
    assert programs.cpu_compiler_options() == {}


def test_the_default_device_may_be_named_by_its_platform():
    with jax.default_device("cpu"):
        assert programs.default_device() == jax.devices("cpu")[0]
