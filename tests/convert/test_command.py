import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import __main__ as command
from convert.__main__ import compare
from convert.hf import TEMPLATE_FOLDER, TOKENIZER_FILES, load_hf, open_checkpoint
from tests.support.adapters import factors, merged, write
from tests.support.checkpoints import QWEN2, weights

ROOT = Path(__file__).resolve().parents[2]
FLOAT16 = np.dtype(np.float16)


def start(*arguments, program=("-m", "convert"), **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        **options,
    )


@pytest.mark.slow
def test_adapter_is_merged(qwen2, tmp_path):
    params, cfg = load_hf(qwen2, dtype="float32")
    updates = factors(cfg.model, 2, 0)
    adapter = write(tmp_path / "adapter", updates, lora_alpha=6)
    with start(qwen2, tmp_path / "out", "--dtype", "float32", "--merge-adapter", adapter, "--check") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    found, wanted = load_hf(tmp_path / "out")[0], merged(params, updates, scale=3.0)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, wanted)
    with start(qwen2, tmp_path / "8", "--quantize", "int8", "--merge-adapter", adapter) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    name = "model.layers.0.mlp.up_proj.weight"
    rounded = open_checkpoint(tmp_path / "8").quantize("none").read(name, np.dtype(np.float32))
    whole = np.asarray(wanted["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"])
    np.testing.assert_allclose(rounded, whole, atol=np.abs(whole).max() / 100)
    with start(tmp_path / "8", tmp_path / "no", "--merge-adapter", adapter) as process:
        _, err = process.communicate(timeout=60)
    assert (process.returncode, "is quantized" in err) == (2, True)


@pytest.mark.slow
def test_command_converts_and_checks_as_a_process(qwen2, tmp_path):
    (qwen2 / "tokenizer.json").write_text("{}")
    with start(qwen2, tmp_path / "out", "--dtype", "bfloat16", "--check") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.splitlines() == [
        f"{tmp_path / 'out'}: 26 tensors written",
        f"{tmp_path / 'out'}: 26 tensors read again, all equal",
    ]
    assert err == ""  # progress is reported only if it takes a while
    params, cfg = load_hf(tmp_path / "out")
    expected = weights(QWEN2)["model.norm.weight"].astype(jnp.bfloat16)
    assert np.asarray(params["model"]["norm"]["weight"]).tobytes() == expected.tobytes()
    assert cfg.model.dtype == "bfloat16"


def test_progress_is_reported_by_time(monkeypatch, capsys):
    clock = iter([0.0, 0.5, 2.0, 11.0, 11.5, 12.0, 22.0, 22.0])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    progress = command._Progress("writing", 5)
    for _ in range(5):
        progress.count()
    assert capsys.readouterr().err == "writing tensor 3 of 5\nwriting tensor 5 of 5\n"


@pytest.mark.slow
def test_bad_input_is_reported_by_the_process():
    with start("Qwen/Qwen2.5-0.5B-Instruct", "out") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "convert.hub.local_directory" in err


# A program that keeps reading a checkpoint while its stdin is open.
READING = """
import sys
import convert.__main__ as command

command.open_checkpoint = lambda source: print("reading", flush=True) or sys.stdin.read()
sys.exit(command.main())
"""


@pytest.mark.slow
def test_interrupted(qwen2, tmp_path):
    with start(qwen2, tmp_path / "out", program=("-c", READING)) as process:
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "python -m convert: interrupted\n")
    assert not (tmp_path / "out").exists()


def test_a_broken_pipe(qwen2):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "convert", "--list", str(qwen2)],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_list_prints_tensors_and_totals(call, qwen2, sharded):
    status, out, err = call("--list", qwen2)
    lines = out.splitlines()
    assert (status, err, len(lines)) == (0, "", 27)
    assert lines[0].split() == ["model.embed_tokens.weight", "F32", "[40,", "16]", "2,560"]
    size = sum(tensor.nbytes for tensor in weights(QWEN2).values())
    assert lines[-1] == f"26 tensors, {size:,} bytes, in 1 file"
    assert call("--list", sharded)[1].endswith("in 3 files\n")


def test_list_refuses_damaged_files(call, qwen2):
    (qwen2 / "model.safetensors").write_bytes(b"")
    status, out, err = call("--list", qwen2)
    assert (status, out) == (2, "")
    assert "truncated or damaged" in err


def test_the_same_dtype_gives_identical_files(call, qwen2, tmp_path):
    for name in TOKENIZER_FILES:
        (qwen2 / name).write_text(name)
    (qwen2 / TEMPLATE_FOLDER).mkdir()
    (qwen2 / TEMPLATE_FOLDER / "tool_use.jinja").write_text("T")
    (qwen2 / "README.md").write_text("")
    status, _, _ = call(qwen2, tmp_path / "out")
    assert status == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        {path.name for path in qwen2.iterdir()} - {"README.md"}
    )
    for name in ("model.safetensors", f"{TEMPLATE_FOLDER}/tool_use.jinja", *TOKENIZER_FILES):
        assert (tmp_path / "out" / name).read_bytes() == (qwen2 / name).read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((qwen2 / name).read_text())


def test_both_spellings_of_the_dtype(call, qwen2, tmp_path):
    config = QWEN2 | {"dtype": "float32"}
    del config["torch_dtype"]
    (qwen2 / "config.json").write_text(json.dumps(config))
    assert call(qwen2, tmp_path / "out", "--dtype", "float16")[0] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"dtype": "float16"}


def test_overwriting(call, qwen2, sharded):
    (sharded / "tokenizer.json").write_text("that of the old model")
    status, out, err = call(qwen2, sharded)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "--overwrite" in err
    assert call(qwen2, sharded, "--overwrite", "--check")[0] == 0
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in sharded.iterdir()) == names


def test_overlapping_source_and_destination_are_refused(call, qwen2, tmp_path):
    for target in (qwen2, qwen2 / "out", tmp_path, qwen2 / ".." / "qwen2"):
        status, _, err = call(qwen2, target, "--overwrite")
        assert status == 2
        assert "choose another DST" in err
    assert load_hf(qwen2)


def test_all_problems_are_reported_in_one_line(call, qwen2, tmp_path):
    (qwen2 / "config.json").unlink()
    (qwen2 / "model.safetensors").unlink()
    status, out, err = call(qwen2, tmp_path / "out")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "no *.safetensors" in err
    assert "config.json is missing" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required: SRC"),
        (["a"], "destination is missing"),
        (["a", "b", "--list"], "--list needs a source and nothing else"),
        (["a", "b", "c"], "'c' comes after SRC and DST"),
        (["a", "--list", "--check"], "--list needs a source and nothing else"),
        (["a", "b", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["a", "b", "--quick"], "unknown option --quick"),
    ],
)
def test_bad_arguments_are_refused(call, arguments, expected):
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert expected in err


def test_compare_finds_a_flipped_bit_and_missing_tensors(call, qwen2, tmp_path):
    assert call(qwen2, tmp_path / "out", "--dtype", "float16")[0] == 0
    file = tmp_path / "out" / "model.safetensors"
    source, target = open_checkpoint(qwen2), open_checkpoint(tmp_path / "out")
    assert compare(source, target, FLOAT16) == []
    assert compare(source, target, None) == [*source.tensors]
    content = bytearray(file.read_bytes())
    name = "model.layers.1.mlp.up_proj.weight"
    content[target.tensors[name].offset + 5] ^= 1
    file.write_bytes(content)
    assert compare(source, target, FLOAT16) == [name]
    del target.tensors["model.norm.weight"]
    assert compare(source, target, FLOAT16) == [name, "model.norm.weight"]


def test_check_fails_on_a_damaged_destination(call, qwen2, tmp_path, monkeypatch):
    def open_damaged(path):
        checkpoint = open_checkpoint(path)
        if path == tmp_path / "out":
            file = path / "model.safetensors"
            content = bytearray(file.read_bytes())
            content[checkpoint.tensors["model.norm.weight"].offset] ^= 1
            file.write_bytes(content)
        return checkpoint

    monkeypatch.setattr("convert.__main__.open_checkpoint", open_damaged)
    status, out, err = call(qwen2, tmp_path / "out", "--check")
    assert status == 1
    assert "all equal" not in out
    assert err.splitlines()[-1] == f"{tmp_path / 'out'}: 1 of 26 tensors differ: model.norm.weight"


def test_ignored_keys_are_named_in_one_warning(qwen2, tmp_path, call):
    config = json.loads((qwen2 / "config.json").read_text()) | {"unsloth_fixed": True}
    (qwen2 / "config.json").write_text(json.dumps(config))
    status, _, err = call(qwen2, tmp_path / "out")
    assert status == 0
    warning, *_ = err.splitlines()
    assert warning == (
        f"python -m convert: warning: {qwen2}: config.json: unknown keys are ignored, as in transformers: unsloth_fixed"
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["unsloth_fixed"]
