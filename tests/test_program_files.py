"""Compiled programs in files: a new process loads the programs that this one compiled, and only those."""

import contextlib
import dataclasses
import enum
import functools
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import Engine, GenerationConfig, JaxgenWarning, generate, program_files, programs
from jaxgen.decoding.sample import Sample
from jaxgen.decoding.stop_reasons import StopReason
from jaxgen.programs import Program, Programs
from tests.support.compilations import compilations
from tests.support.models import model_config, random_params

MODEL = model_config(num_hidden_layers=1)
PARAMS = random_params(MODEL)
CFG = GenerationConfig(model=MODEL, max_new_tokens=4, do_sample=True, top_k=5)
IDS = np.full((2, 3), 7)


@pytest.fixture
def new_process(monkeypatch, tmp_path):
    """Return a function that forgets all programs, like a new process that uses the same directory."""

    def start():
        monkeypatch.setattr(programs, "PROGRAMS", Programs(64))
        programs.PROGRAMS.directory = tmp_path

    start()
    return start


def double(x, y=0, *, times=1):
    return {"sum": jnp.sin(x) + jnp.sin(x) * times, "rest": (x, y)}


double.__module__ = "jaxgen.double"  # functions of other packages are not stored


def files(directory):
    return {file.name: file.stat().st_mtime_ns for file in directory.glob("*.program")}


def test_generate_compiles_nothing_in_the_next_process(new_process, tmp_path):
    key = jax.random.key(1)
    before = generate(PARAMS, IDS, key, CFG)
    stored = files(tmp_path)
    assert len(stored) == 1
    new_process()
    with compilations() as count:
        after = generate(PARAMS, IDS, key, CFG)
        other = generate(PARAMS, IDS, jax.random.key(2), CFG.replace(top_k=3))
    assert count[0] == 0
    assert files(tmp_path) == stored
    np.testing.assert_array_equal(before.sequences, after.sequences)
    assert np.any(np.asarray(other.sequences) != np.asarray(after.sequences))


@pytest.mark.slow
def test_an_engine_too(new_process, tmp_path):
    def answers():
        with Engine(PARAMS, CFG, jax.random.key(0), slots=2, prompt_width=8, prompt_options=()) as engine:
            engine.warmup()
            handles = [engine.submit([number, 3, 4]) for number in range(1, 6)]
            return [completion.tokens for handle in handles for completion in handle.result()]

    before = answers()
    stored = files(tmp_path)
    new_process()
    with compilations() as count:
        assert answers() == before
    assert count[0] == 0
    assert files(tmp_path) == stored


def test_a_donated_argument_is_freed(new_process):
    run = Program(double, static_argnames=["times"], donate_argnames=["x"])
    for _ in range(2):
        x = jnp.arange(3.0)
        run(x)
        assert x.is_deleted()
        new_process()


def test_each_has_a_file_of_its_own(new_process, tmp_path, monkeypatch):
    run = Program(double, static_argnames=["times"])
    x = jnp.ones(3)
    calls = [
        lambda: run(x),
        lambda: run(x, times=2),
        lambda: run(x, 1),  # weakly typed
        lambda: run(x, np.int32(1)),
        lambda: run(x.astype(jnp.bfloat16)),
        lambda: run(jnp.ones(4)),
        lambda: run({"a": x}["a"], {"b": x}),
        lambda: Program(double, donate_argnames=["x"])(jnp.ones(3)),
    ]
    for number, call in enumerate(calls, 1):
        call()
        assert len(files(tmp_path)) == number
    surroundings = [
        lambda: jax.default_matmul_precision("highest"),
        lambda: monkeypatch.setattr(program_files, "_source", lambda: "edited"),
        lambda: monkeypatch.setattr(program_files.metadata, "version", lambda name: "other"),
    ]
    for number, change in enumerate(surroundings, len(calls) + 1):
        new_process()
        with change() or contextlib.nullcontext():
            run(x)
        assert len(files(tmp_path)) == number


def test_of_the_callers_functions_nothing_is_stored(new_process, tmp_path):
    def higher(history, scores):
        return scores + 1

    out = generate(PARAMS, IDS, jax.random.key(1), CFG, logits_processor=[higher])
    assert out.sequences.shape == (2, 7)
    assert not files(tmp_path)


def test_programs_for_several_or_other_devices_are_not_stored(new_process, tmp_path):
    run = Program(double)
    run(jax.device_put(jnp.ones(8), jax.devices()[1]))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run(jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P("data"))))
    assert not files(tmp_path)
    jax.grad(lambda x: jnp.sum(run(x)["sum"]))(jnp.ones(8))
    assert not files(tmp_path)
    run(jnp.ones(8))
    assert len(files(tmp_path)) == 1
    assert run(jax.device_put(jnp.ones(8), jax.devices()[1]))["sum"].devices() == {jax.devices()[1]}


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-9], lambda data: data[:99] + b"x" + data[100:]]
)
def test_a_damaged_file_is_written_again(new_process, tmp_path, damage):
    run = Program(double)
    expected = run(jnp.ones(3))["sum"]
    (file,) = tmp_path.glob("*.program")
    good = file.read_bytes()
    file.write_bytes(damage(good))
    new_process()
    np.testing.assert_array_equal(run(jnp.ones(3))["sum"], expected)
    assert len(file.read_bytes()) == pytest.approx(len(good), rel=0.1)
    assert list(tmp_path.iterdir()) == [file]


def test_a_program_that_cannot_be_loaded_is_compiled_with_a_warning(new_process, monkeypatch):
    run = Program(double)
    run(jnp.ones(3))
    new_process()

    def refuse(*_):
        raise jax.errors.JaxRuntimeError("another format")

    monkeypatch.setattr(program_files.serialize_executable, "deserialize_and_load", refuse)
    with pytest.warns(JaxgenWarning, match="cannot be loaded and is compiled again: another format"):
        assert run(jnp.ones(3))["sum"].shape == (3,)


def test_a_directory_that_cannot_be_written(new_process, tmp_path):
    programs.PROGRAMS.directory = tmp_path / "absent"
    assert Program(double)(jnp.ones(3))["sum"].shape == (3,)


def test_other_programs_run_while_one_is_compiled(new_process):
    ready, compiling = threading.Event(), threading.Event()

    def slow(x):
        compiling.set()
        assert ready.wait(60)
        return x

    slow.__module__ = "jaxgen.slow"
    slow.__qualname__ = "slow"
    fast = Program(double)
    fast(jnp.ones(3))
    thread = threading.Thread(target=Program(slow), args=(jnp.ones(3),))
    thread.start()
    assert compiling.wait(60)
    fast(jnp.ones(3))
    fast(jnp.ones(4))
    ready.set()
    thread.join()


def test_programs_are_written_once_even_if_jax_has_a_cache(new_process, tmp_path, programs):
    """XLA cannot serialize a program loaded from jax's cache, so the program must not be stored there."""
    directory = jax.config.jax_compilation_cache_dir
    assert directory is not None  # set by the fixture `programs`
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0

    def unique(x):
        return jnp.sin(x) * 0.734512

    unique.__module__, unique.__qualname__ = "jaxgen.unique", "unique"
    unique.__name__ = "unique_of_this_test"
    for _ in range(2):
        Program(unique)(jnp.ones(3))
        for file in tmp_path.glob("*.program"):
            file.unlink()
        new_process()
    assert not [name for name in os.listdir(directory) if "unique_of_this_test" in name]
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


class Colour(enum.Enum):
    RED = 1


class TestDescription:
    def test_equal_values_have_equal_texts(self):
        def values():
            cfg = GenerationConfig(model=model_config(), top_k=3, suppress_tokens=[1, 2])
            return [Sample(), jax.tree.structure(cfg), {"b": {3, 1}, "a": frozenset("xyz")}, np.dtype("int8")]

        assert program_files._described(values()) == program_files._described(values())

    def test_other_values_have_other_texts(self):
        values = [1, 1.0, True, "1", b"1", None, (1,), [1], {1}, {1: 1}, np.int32(1), np.float32(1), StopReason.EOS]
        values += [
            np.dtype("int8"),
            int,
            len,
            generate,
            np.arange(2),
            np.arange(3),
            Sample(),
            (1, (2,)),
            GenerationConfig,
        ]
        values += [jax.tree.structure(tree) for tree in (1, (1,), [1], {"a": 1}, {"b": 1}, (1, None), ((1,), None))]
        values += [jax.tree.structure(CFG.replace(top_k=top_k)) for top_k in (0, 1)]
        assert len(set(map(program_files._described, values))) == len(values)

    @pytest.mark.parametrize(
        "value", [lambda x: x, functools.partial(len), Colour.RED, Colour, test_an_engine_too, dataclasses.replace]
    )
    def test_values_of_other_packages_have_none(self, value):
        with pytest.raises(program_files._UnknownError):
            program_files._described((1, value))


def test_two_threads_that_compile_do_not_change_jaxs_setting():
    first, second = program_files._compiling_anew(), program_files._compiling_anew()
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == float("inf")
    second.__exit__(None, None, None)
    assert before == jax.config.jax_persistent_cache_min_compile_time_secs
