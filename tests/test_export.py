"""Exported programs generate the same tokens, even without jaxgen. Unsupported options are rejected by name."""

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file

from convert.hf import load_shapes
from jaxgen import (
    ConfigError,
    GenerationConfig,
    InputError,
    StopReason,
    demo,
    export_generate,
    fuse_projections,
    generate,
    load_hf,
    save_hf,
    shard_params,
)
from jaxgen.core.model.int8 import Int8
from jaxgen.export.__main__ import main
from jaxgen.export.file import read_description
from jaxgen.training import lora
from tests.support.automata import of_matrix
from tests.support.models import left_pad, model_config, random_params, slow
from tests.test_platforms import OTHER_MODES

pytest.importorskip("flatbuffers", reason="jax.export stores programs with flatbuffers, which is not installed")

HOST = Path(__file__).parent / "support" / "foreign_host.py"
MODEL = model_config(num_hidden_layers=1)
PARAMS = random_params(MODEL)
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
GREEDY = GenerationConfig(model=MODEL, max_new_tokens=6, eos_token_id=1)
SAMPLED = GREEDY.replace(do_sample=True, temperature=0.7, top_k=20)
IDS, MASK = left_pad([[3, 4, 5], [9, 8, 7, 6, 5]], width=6)
MASK = MASK.astype(bool)
SEED = np.asarray([0, 3], np.uint32)  # the data of jax.random.key(3)


_RUNS = {}


def call(programs, params=PARAMS, **inputs):
    given = programs.inputs | {"ids": IDS, "attention_mask": MASK} | inputs
    _, run = _RUNS.setdefault(id(programs), (programs, jax.jit(programs.programs["generate"].call)))
    return run(programs.params(params), given)


def tokens(cfg, params=PARAMS, ids=IDS, mask=MASK):
    key = jax.random.key(3) if cfg.on("do_sample") else None
    return generate(params, ids, key, cfg, attention_mask=mask).sequences


@pytest.fixture(scope="module")
def greedy():
    return export_generate(PARAMS, GREEDY, batch=2, prompt_width=6)


@pytest.fixture(scope="module")
def sampled():
    return export_generate(SHAPES, SAMPLED, batch=None, prompt_width=6)


@pytest.mark.slow
def test_programs_run_where_jaxgen_cannot_be_imported(sampled, tmp_path):
    sampled.save(tmp_path / "generate.zip")
    np.savez(tmp_path / "arrays.npz", **sampled.params(PARAMS), ids=IDS, attention_mask=MASK, key=SEED)
    done = subprocess.run([sys.executable, HOST, tmp_path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["0.7"] != results["1.5"]
    for temperature in (0.7, 1.5):
        assert results[str(temperature)] == tokens(SAMPLED.replace(temperature=temperature)).tolist()


def test_greedy_search(greedy):
    np.testing.assert_array_equal(call(greedy)["sequences"], tokens(GREEDY))
    assert set(call(greedy)) == {"sequences", "attention_mask", "lengths", "stop_reasons"}


@pytest.mark.slow
def test_a_symbolic_batch_serves_any_number_of_prompts(sampled):
    rows = [0, 1, 1]  # other tests use two rows
    given = {"ids": IDS[rows], "attention_mask": MASK[rows]}
    expected = tokens(SAMPLED, ids=IDS[rows], mask=MASK[rows])
    np.testing.assert_array_equal(call(sampled, key=SEED, **given)["sequences"], expected)


@pytest.mark.slow
def test_symbolic_batch_accepts_one_prompt(sampled):
    given = {"ids": IDS[:1], "attention_mask": MASK[:1]}
    expected = tokens(SAMPLED, ids=IDS[:1], mask=MASK[:1])
    np.testing.assert_array_equal(call(sampled, key=SEED, **given)["sequences"], expected)


def test_inputs_may_change_without_another_export(greedy):
    shorter = call(greedy, max_new_tokens=np.int32(2))
    assert shorter["lengths"].tolist() == [2, 2]
    assert shorter["stop_reasons"].tolist() == [StopReason.LENGTH] * 2
    assert call(greedy, max_new_tokens=np.int32(100))["lengths"].tolist() == [6, 6]
    second = int(tokens(GREEDY)[0, 7])
    ended = call(greedy, eos_token_id=np.asarray([second, -1, -1, -1], np.int32))
    assert ended["lengths"][0] <= 2


def test_a_length_that_is_the_default_of_max_length():
    cfg = GREEDY.replace(max_new_tokens=14)
    assert IDS.shape[1] + 14 == GenerationConfig.max_length
    programs = export_generate(PARAMS, cfg, batch=2, prompt_width=6, platforms=["cpu"])
    np.testing.assert_array_equal(call(programs)["sequences"], tokens(cfg))


@pytest.mark.slow
def test_values_per_prompt():
    cfg = SAMPLED.replace(temperature=[0.5, 1.5], max_new_tokens=[3, 6])
    programs = export_generate(PARAMS, cfg, batch=2, prompt_width=6, platforms=["cpu"])
    assert programs.inputs["temperature"].tolist() == [0.5, 1.5]
    np.testing.assert_array_equal(call(programs, key=SEED)["sequences"], tokens(cfg))


@pytest.mark.slow
def test_random_bits_are_those_of_the_setting_at_the_export():
    with jax.threefry_partitionable(False):
        programs = export_generate(PARAMS, SAMPLED, batch=2, prompt_width=6, platforms=["cpu"])
        expected = tokens(SAMPLED)
    assert programs.description["random"] == "threefry2x32, jax_threefry_partitionable=False"
    np.testing.assert_array_equal(call(programs, key=SEED)["sequences"], expected)


@pytest.mark.slow
def test_weights_have_the_names_of_a_checkpoint(tmp_path):
    quantized = jax.tree.map(lambda x: Int8.from_matrix(np.asarray(x), "float32") if x.ndim == 2 else x, PARAMS)
    save_hf(quantized, GREEDY, tmp_path / "int8")
    shapes, cfg = load_shapes(tmp_path / "int8")
    programs = export_generate(shapes, cfg, batch=2, prompt_width=6, platforms=["cpu"])
    stored = load_file(tmp_path / "int8" / "model.int8.safetensors")
    run = jax.jit(programs.programs["generate"].call)
    out = run(stored, programs.inputs | {"ids": IDS, "attention_mask": MASK})
    np.testing.assert_array_equal(out["sequences"], tokens(cfg, jax.tree.map(jnp.asarray, quantized)))


@pytest.mark.slow
def test_fused_projections():
    fused = fuse_projections(PARAMS)
    programs = export_generate(fused, GREEDY, batch=2, prompt_width=6, platforms=["cpu"])
    np.testing.assert_array_equal(call(programs, fused)["sequences"], tokens(GREEDY, fused))
    with pytest.raises(InputError, match=r"gate_up_proj.* is missing, but the programs need float32\[96, 32\]"):
        programs.params(PARAMS)


@pytest.mark.slow
def test_a_grammar_and_processors_are_part_of_the_program():
    extensions = {
        "prefix_allowed_tokens_fn": of_matrix(np.zeros(97, int), np.zeros((1, 1), int), np.ones(1, bool), 0),
        "logits_processor": [lambda history, scores: scores.at[:, 50].set(1e9)],
    }
    programs = export_generate(PARAMS, GREEDY, batch=2, prompt_width=6, platforms=["cpu"], **extensions)
    assert np.all(call(programs)["sequences"][:, 6:] == 50)


@pytest.mark.parametrize("mode", slow(*OTHER_MODES))
@pytest.mark.parametrize("batch", [2, None])
def test_modes(mode, batch):
    model = model_config(num_hidden_layers=2)  # drafts and DoLa read an earlier layer
    params = random_params(model)
    cfg = GREEDY.replace(model=model, **OTHER_MODES[mode])
    programs = export_generate(params, cfg, batch=batch, prompt_width=6)
    for program in programs.programs.values():
        assert program.serialize()
    given = {"key": SEED} if cfg.on("do_sample") else {}
    np.testing.assert_array_equal(call(programs, params, **given)["sequences"], tokens(cfg, params))


@pytest.mark.slow
def test_slots():
    cfg = GREEDY.replace(slots=1)
    programs = export_generate(SHAPES, cfg, batch=2, prompt_width=6)
    np.testing.assert_array_equal(call(programs)["sequences"], tokens(cfg))


@pytest.mark.slow
def test_description(sampled, tmp_path):
    sampled.save(tmp_path / "generate.zip")
    description = read_description(tmp_path / "generate.zip")
    assert description == sampled.description
    assert description["platforms"] == ["cpu", "cuda", "tpu"]
    assert description["versions"]["jax"] == jax.__version__
    assert description["inputs"]["ids"] == {"dtype": "int32", "shape": ["b", 6]}
    assert description["inputs"]["temperature"] == {"dtype": "float32", "shape": []}
    assert description["outputs"]["sequences"] == {"dtype": "int32", "shape": ["b", 12]}
    assert description["params"]["model.norm.weight"] == {"dtype": "float32", "shape": [32]}
    assert description["options"] == {"do_sample": "True"}
    assert description["stop_reasons"]["EOS"] == StopReason.EOS
    assert "6 months" in description["loads_with"]
    with zipfile.ZipFile(tmp_path / "generate.zip") as file:
        assert set(file.namelist()) == {"description.json", "inputs.npz", "generate.bin"}
        assert str(Path(__file__).parents[1]).encode() not in file.read("generate.bin")


def ask_host(history, scores):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(scores.shape, scores.dtype), scores)


def unknown_kernel(history, scores):
    return jax.ffi.ffi_call("unknown", jax.ShapeDtypeStruct(scores.shape, scores.dtype))(scores)


@pytest.mark.parametrize(
    ("error", "text", "options", "arguments"),
    [
        (ConfigError, "max_time needs the host", {"max_time": 1.0}, {}),
        (ConfigError, "token_healing needs the host", {"token_healing": True}, {}),
        (ConfigError, "max_new_tokens is not set", {"max_new_tokens": None}, {}),
        (ConfigError, "batch=None is not offered with slots=1", {"slots": 1}, {"batch": None}),
        (InputError, "temperature has 2 values", {"do_sample": True, "temperature": [1.5, 2.0]}, {"batch": None}),
        (InputError, "batch must be at least 1, got 0", {}, {"batch": 0}),
        (TypeError, "prompt_width must be a whole number", {}, {"prompt_width": 8.0}),
        (InputError, "platforms must be a list of some of cpu, cuda, tpu, rocm", {}, {"platforms": "cpu"}),
        (TypeError, "no streamer: it is called on the host", {}, {"streamer": print}),
        (TypeError, "no assistant: a program has one model", {}, {"assistant": (PARAMS, GREEDY)}),
        (TypeError, "use cfg.replace", {}, {"temperature": 0.5}),
        (TypeError, "no argument 'streamers'", {}, {"streamers": 0}),
        (TypeError, "must be a TokenAutomaton", {}, {"prefix_allowed_tokens_fn": lambda row, ids: [1]}),
        (ConfigError, "calls the host through pure_callback", {}, {"logits_processor": [ask_host]}),
        (ConfigError, "unknown", {}, {"logits_processor": [unknown_kernel], "platforms": ["cpu"]}),
    ],
)
def test_unsupported_options_are_refused_by_name(error, text, options, arguments):
    with pytest.raises(error, match=text):
        export_generate(SHAPES, GREEDY.replace(**options), **{"batch": 2, "prompt_width": 6, **arguments})


def test_parameters_that_cannot_be_arguments_are_refused():
    sizes = {"batch": 2, "prompt_width": 6}
    with pytest.raises(InputError, match=r"merge low-rank updates with lora\.merge"):
        export_generate(lora.attach(PARAMS, lora.init(PARAMS, 2, jax.random.key(0)), 1.0), GREEDY, **sizes)
    mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(2, 1), ("data", "model"))
    with pytest.raises(InputError, match="an exported program is for one device"):
        export_generate(shard_params(PARAMS, MODEL, mesh), GREEDY, **sizes)
    with pytest.raises(InputError, match=r"model\.norm\.weight is missing"):
        export_generate(SHAPES | {"model": {**SHAPES["model"], "norm": {}}}, GREEDY, **sizes)


def test_missing_flatbuffers_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[export\]"'):
        export_generate(SHAPES, GREEDY, batch=2, prompt_width=6)


@pytest.mark.slow
def test_command_exports_a_program(tmp_path, capsys):
    file, weights = tmp_path / "demo.zip", tmp_path / "demo.safetensors"
    options = "--batch-size any --prompt-width 8 --max-new-tokens 4 --no-do-sample --platforms cpu --dtype float32"
    assert main([str(demo.PATH), str(file), "--weights", str(weights), *options.split(), "--describe"]) == 0
    assert "ids: int32[b, 8]" in capsys.readouterr().out
    stored = load_file(weights)
    params, cfg = load_hf(demo.PATH, dtype="float32")
    assert read_description(file)["params"].keys() == stored.keys()
    cfg = cfg.replace(do_sample=False, max_new_tokens=4)
    programs = export_generate(params, cfg, batch=None, prompt_width=8, platforms=["cpu"])
    assert read_description(file) == programs.description


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["MODEL"], "OUT is missing"),
        (["MODEL", "OUT", "--engine"], "--engine"),
        (["MODEL", "OUT", "x"], "comes after MODEL and OUT"),
        ([__file__, "--describe"], "is not a file of exported programs"),
        ([str(demo.PATH), "OUT", "--max-length", "20"], "max_new_tokens is not set"),
    ],
)
def test_command_reports_errors_in_one_line(words, text, capsys):
    assert main(words) == 2
    assert text.replace("max_new_tokens", "--max-new-tokens") in capsys.readouterr().err
