"""`jaxgen train` learns, writes its results, rejects bad input, and resumes after being killed."""

import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_hf, save_hf
from convert.hf import TOKENIZER_FILES
from jaxgen import GenerationConfig, InputError, Tokenizer, generate, load_adapter, score
from jaxgen.cli import main as cli, train as finetune, train_options
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.training import lora
from jaxgen.training.checkpoint import alone_in, write_state
from jaxgen.training.dataset import pack, read_examples, shuffled
from jaxgen.training.examples import text_example
from jaxgen.training.loop import TrainBatch, TrainConfig, TrainState, can_resume, evaluate, train, train_step
from tests.support.chat_templates import QWEN3
from tests.support.models import model_config, random_params
from tests.support.tokenizers import CHATML, byte_level, byte_level_backend, save

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = len(byte_level())
LOW_RANK = {"steps": 80, "learning_rate": 2e-2, "lora": 4, "lora_alpha": 8}
CHATS = [("Who are you?", "A fox."), ("Where is the hen?", "Over the hill."), ("Why?", "I do not know.")]
SMALL = {"vocab_size": VOCABULARY, "intermediate_size": 48, "num_hidden_layers": 1, "tie_word_embeddings": True}


def write_checkpoint(folder: Path, dtype: str = "float32", **changes) -> Path:
    model = model_config(**{**SMALL, "torch_dtype": dtype, **changes})
    eos = byte_level().eos_token_id
    save_hf(random_params(model, scale=0.1), GenerationConfig(model=model, eos_token_id=eos, pad_token_id=0), folder)
    config = {"eos_token": "<|im_end|>", "pad_token": "<|end|>", "chat_template": CHATML}
    return save(folder, byte_level_backend(), tokenizer_config=config, special_tokens_map={})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def data(tmp_path) -> Path:
    lines = [{"prompt": prompt, "completion": completion} for prompt, completion in CHATS]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return file


@pytest.fixture
def run(checkpoint, data, tmp_path, capsys):
    """Return a function that fine-tunes, by default `checkpoint` on `data`, and returns the status and stderr."""
    default = {"data": data, "model": checkpoint, "out": tmp_path / "out", "batch": 2, "width": 64, "steps": 8}

    def run(*words, **options) -> tuple[int, str]:
        given = (default | options).items()
        pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given if value is not None]
        status = cli.main(["train", *(word for pair in pairs for word in pair), *words])
        out, err = capsys.readouterr()
        assert out == ""
        return status, err

    return run


def answers(path: Path) -> list[str]:
    """Return the checkpoint's answers to the prompts that it was trained on."""
    params, cfg = load_hf(path)
    tokenizer = Tokenizer.from_pretrained(path)
    batch = tokenizer.chat([[{"role": "user", "content": prompt}] for prompt, _ in CHATS])
    out = generate(params, batch.ids, None, cfg.replace(max_new_tokens=20), attention_mask=batch.attention_mask)
    return tokenizer.decode_batch(out)


def weights(path: Path) -> dict:
    return flax.traverse_util.flatten_dict(load_hf(path)[0], sep=".")


def held_out(err: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"held-out loss \w+: ([\d.]+)", err)]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def comparable(folder: Path) -> dict[str, object]:
    """Return the contents of a result's files, but the record without its speeds."""
    entries = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    record = [{name: value for name, value in entry.items() if name != "tokens_per_second"} for entry in entries]
    return files(folder) | {"training.jsonl": record}


def saved(work: Path) -> list[int]:
    return sorted(int(path.name) for path in (work / "states").iterdir())


def flip_a_bit(work: Path, step: int) -> None:
    file = max((work / "states" / str(step)).rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


class TestResult:
    @pytest.mark.slow
    def test_training_changes_all_weights(self, run, checkpoint, data, tmp_path):
        status, err = run(steps=80, learning_rate=1e-2, eval_data=data, save_every=30)
        assert status == 0, err
        assert answers(tmp_path / "out") == [answer for _, answer in CHATS]
        before, after = held_out(err)
        assert after < 0.2 < 2 < before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "out", "out.training"]
        for name in TOKENIZER_FILES:
            assert (checkpoint / name).exists() == (tmp_path / "out" / name).exists()
        kept = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
        old, new = files(checkpoint), files(tmp_path / "out")
        assert all(json.loads(old[name]) == json.loads(new[name]) for name in kept)
        assert new.keys() - old.keys() == {"training.jsonl", "training.svg"}
        assert old.keys() <= new.keys()

    @pytest.mark.slow
    def test_low_rank_updates_change_only_their_targets(self, run, checkpoint, data, tmp_path):
        status, err = run(**LOW_RANK, eval_data=data)
        assert status == 0, err
        before, after = held_out(err)
        assert after < 0.7 * before
        old, new = weights(checkpoint), weights(tmp_path / "out")
        changed = {name for name in old if (old[name] != new[name]).any()}
        assert changed == {f"{name}.weight" for name in (n.removesuffix(".weight") for n in old) if _is_target(name)}
        for name in changed:
            assert np.linalg.matrix_rank(np.asarray(new[name] - old[name]), tol=1e-4) <= 4

    @pytest.mark.parametrize("rank", [0, 2])
    @pytest.mark.slow
    def test_weights_keep_their_dtypes(self, run, data, tmp_path, rank):
        base = write_checkpoint(tmp_path / "half", "bfloat16")
        status, err = run(model=base, steps=40, lora=rank, learning_rate=1e-2, eval_data=data)
        assert status == 0, err
        assert "in bfloat16" in err
        assert held_out(err)[1] < held_out(err)[0]
        assert {leaf.dtype for leaf in weights(tmp_path / "out").values()} == {jnp.dtype(jnp.bfloat16)}

    @pytest.mark.slow
    def test_save_adapter_writes_an_adapter(self, run, checkpoint, data, tmp_path, monkeypatch):
        assert run(**LOW_RANK, eval_data=data)[0] == 0
        monkeypatch.chdir(checkpoint.parent)
        adapter = LOW_RANK | {"model": checkpoint.name, "out": tmp_path / "adapter", "eval_data": data}
        status, err = run("--save-adapter", **adapter)
        assert status == 0, err
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(checkpoint.resolve())
        assert held_out(err)[1] < held_out(err)[0]
        params, cfg = load_hf(checkpoint)
        attached = load_adapter(tmp_path / "adapter", params, cfg)
        ids = np.arange(12)[None] % 60
        expected = score(load_hf(tmp_path / "out")[0], ids, cfg).logprobs
        np.testing.assert_allclose(score(attached, ids, cfg).logprobs, expected, atol=1e-4)

    @pytest.mark.slow
    def test_epochs_determine_the_number_of_steps(self, run, tmp_path):
        assert "in 3 rows of 64 tokens" in (err := run(steps=None, epochs=5, report_every=100)[1])
        assert "8 steps of 2 rows" in err
        assert "step 8/8" in err

    @pytest.mark.slow
    def test_data_smaller_than_a_batch_is_accepted(self, run):
        status, err = run(width=200, batch=8, accumulate=4)
        assert (status, "1 rows of 200 tokens" in err) == (0, True)

    @pytest.mark.slow
    def test_overlong_examples_are_truncated_with_a_warning(self, run, data):
        data.write_text(data.read_text() + '\n{"prompt": "Who?", "completion": "%s"}' % ("A fox. " * 9))
        assert sum(len(example.ids) > 64 for example in read_examples(data, byte_level())) == 1
        status, err = run()
        assert status == 0
        (line,) = [line for line in err.splitlines() if line.startswith("jaxgen: warning:")]
        assert "1 of 4 examples are longer than 64 tokens and were truncated" in line

    @pytest.mark.slow
    def test_a_conversation_with_several_examples(self, run, checkpoint, data, tmp_path):
        base = Path(shutil.copytree(checkpoint, tmp_path / "base"))
        (base / "chat_template.jinja").write_text(QWEN3.template)
        turns = [(role, text) for pair in CHATS for role, text in zip(("human", "gpt"), pair, strict=True)]
        line = {"conversations": [{"from": role, "value": text} for role, text in turns], "id": 7}
        data.write_text(json.dumps(line))
        held_out = tmp_path / "held-out.jsonl"
        held_out.write_text(json.dumps({**line, "id": None, "tools": [{"name": "look_up"}]}))
        status, err = run(model=base, width=512, batch=1, steps=1, eval_data=held_out)
        assert status == 0, err
        assert "3 examples in 1 rows of 512 tokens" in err
        assert err.count("data.jsonl: keys that are not used for training: id") == err.count("warning") == 1

    @pytest.mark.slow
    def test_end_token_is_added_to_the_generation_config(self, run, checkpoint, tmp_path):
        base = Path(shutil.copytree(checkpoint, tmp_path / "base"))
        (base / "generation_config.json").write_text('{"eos_token_id": 3}')
        status, err = run(model=base)
        assert (status, "end with <|im_end|>" in err) == (0, True)
        eos = byte_level().eos_token_id
        assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [3, eos]}
        (base / "generation_config.json").unlink()
        assert run("--overwrite", model=base)[0] == 0
        assert not (tmp_path / "out" / "generation_config.json").exists()
        assert load_hf(tmp_path / "out")[1].eos_token_id == eos

    def test_hub_id_is_kept_as_the_base_model(self):
        assert finetune._findable("owner/name@main") == "owner/name@main"

    @pytest.mark.slow
    def test_ignored_keys_are_named_once(self, run, checkpoint, data, tmp_path):
        base = Path(shutil.copytree(checkpoint, tmp_path / "base"))
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"a_new_key": 1}))
        status, err = run(model=base, eval_data=data)
        assert (status, err.count("a_new_key"), len(held_out(err))) == (0, 1, 2)

    @pytest.mark.slow
    def test_texts_without_an_end_token_draw_a_warning(self, run, checkpoint, data, tmp_path):
        base = Path(shutil.copytree(checkpoint, tmp_path / "base"))
        (base / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        data.write_text('{"text": "Over the hill"}')
        assert "jaxgen: warning: not all examples end with a special token" in run(model=base)[1]


def _is_target(name: str) -> bool:
    return name.split(".")[-1] in lora.TARGETS


class TestRecord:
    @pytest.mark.slow
    def test_record_and_plot_are_written_next_to_the_weights(self, run, data, tmp_path):
        options = {"eval_data": data, "eval_every": 2, "report_every": 4, "steps": 6}
        status, err = run(**options)
        assert status == 0, err
        entries = [json.loads(line) for line in (tmp_path / "out" / "training.jsonl").read_text().splitlines()]
        assert [(entry["step"], *sorted({"loss", "eval_loss"} & entry.keys())) for entry in entries] == [
            (0, "eval_loss"),
            (2, "eval_loss"),
            (4, "loss"),
            (4, "eval_loss"),
            (6, "loss"),
            (6, "eval_loss"),
        ]
        assert entries[0]["eval_loss"] == pytest.approx(held_out(err)[0], abs=1e-4)
        assert entries[-1]["eval_loss"] == pytest.approx(held_out(err)[1], abs=1e-4)
        assert (tmp_path / "out" / "training.svg").read_text().startswith("<svg")
        assert f"{tmp_path / 'out.training'} (" in err.splitlines()[-1]

    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [0, 4])
    def test_early_stopping_writes_the_best_weights(self, run, data, tmp_path, rank):
        """Training on one text makes another one less likely after a while."""
        other = tmp_path / "other.jsonl"
        other.write_text('{"prompt": "Who are you?", "completion": "A hen."}')
        options = {"eval_data": other, "eval_every": 2, "steps": 200, "learning_rate": 1e-2, "lora": rank}
        status, err = run("--keep-best", **options, patience=3)
        assert status == 0, err
        record = comparable(tmp_path / "out")["training.jsonl"]
        losses = {entry["step"]: entry["eval_loss"] for entry in record if "eval_loss" in entry}
        best = min(losses, key=losses.get)
        assert f"stopping after step {best + 6}: the held-out loss has not been lower since step {best}" in err
        assert max(losses) == best + 6 < 200
        assert held_out(err)[1] == pytest.approx(losses[best], abs=1e-3)
        assert best in saved(tmp_path / "out.training")

    @pytest.mark.slow
    def test_lora_targets_are_applied(self, run, checkpoint, tmp_path):
        assert run(lora=2, targets="q_proj, down_proj")[0] == 0
        old, new = weights(checkpoint), weights(tmp_path / "out")
        changed = {name.split(".")[-2] for name in old if (old[name] != new[name]).any()}
        assert changed == {"q_proj", "down_proj"}


class TestGoingOn:
    @pytest.mark.slow
    def test_stopped_run_is_resumed(self, run, tmp_path, monkeypatch):
        options = LOW_RANK | {"save_every": 20}
        assert run(**options, out=tmp_path / "whole")[0] == 0

        def stops_at_50(*arguments):
            batches = shuffled(*arguments)
            return lambda step: batches(step) if step < 50 else _interrupt()

        with monkeypatch.context() as patch:
            patch.setattr(finetune, "shuffled", stops_at_50)
            assert run(**options)[0] == 130
        assert not (tmp_path / "out").exists()
        for other in ({"batch": 4}, {"width": 50}, {"lora": 3}, {"seed": 1}, {"warmup": 0.5}, {"targets": "q_proj"}):
            status, err = run("--overwrite", **{**options, **other})
            assert (status, "of a run with other settings or data" in err) == (2, True), other
        assert "has the state after 40 steps, but steps is 10: use more" in run(**{**options, "steps": 10})[1]
        status, err = run(**options)
        assert (status, "resuming after step 40 from the state in" in err) == (0, True)
        assert comparable(tmp_path / "out") == comparable(tmp_path / "whole")

    @pytest.mark.slow
    def test_resuming_with_other_data_or_weights_is_refused(self, run, checkpoint, data, tmp_path, monkeypatch):
        monkeypatch.setattr(finetune, "_write", _interrupt)
        assert run()[0] == 130
        base = Path(shutil.copytree(checkpoint, tmp_path / "base"))
        params, cfg = load_hf(base)
        params["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"] *= 2
        save_hf(params, cfg, base, overwrite=True)
        assert "of a run with other settings or data" in run(model=base)[1]
        data.write_text(data.read_text().replace("fox", "cow"))
        assert "of a run with other settings or data" in run()[1]

    def test_two_runs_in_one_directory_are_refused(self, run, tmp_path):
        with alone_in(tmp_path / "out.training"):
            assert "another process is training in" in run()[1]
        assert not (tmp_path / "out.training").exists()

    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [0, 2])
    def test_a_finished_run_continues_from_an_undamaged_state(self, run, tmp_path, rank):
        work, words = tmp_path / "out.training", ["--save-adapter"] * (rank > 0)
        assert run(*words, lora=rank, steps=6, save_every=4)[0] == 0
        assert saved(work) == [4, 6]
        assert "exists: choose another name" in run(*words, lora=rank, steps=8)[1]
        flip_a_bit(work, 6)
        status, err = run(*words, "--overwrite", lora=rank, steps=8, report_every=2)
        assert status == 0, err
        (warning,) = [line for line in err.splitlines() if "warning" in line]
        assert f"the state of step 6 in {work} is damaged and will not be used: " in warning
        assert warning.endswith("differs from its checksum")
        assert f"resuming after step 4 from the state in {work}" in err
        entries = comparable(tmp_path / "out")["training.jsonl"]
        assert [entry["step"] for entry in entries] == [6, 8]
        for step in saved(work):
            flip_a_bit(work, step)
        out = files(tmp_path / "out")
        status, err = run(*words, "--overwrite", lora=rank, steps=9)
        assert (status, err.count("jaxgen: ")) == (2, 1)
        assert err.endswith("differs from its checksum); remove it to start again\n")
        assert files(tmp_path / "out") == out

    def test_damaged_only_state_is_an_error(self, run, tmp_path):
        work = tmp_path / "out.training"
        write_state(work, {"a": jnp.zeros(9)}, 1, {"finished": False})
        (notes,) = work.rglob("notes.json")
        notes.write_text("{")
        status, err = run()
        assert (status, err.count("jaxgen: ")) == (2, 1), err
        assert "the only saved state is damaged (step 1: notes.json differs from its checksum)" in err
        assert err.endswith("remove it to start again\n")

    @pytest.mark.slow
    def test_runs_killed_at_random_moments_are_resumed(self, checkpoint, data, tmp_path):
        """A command killed at random moments, even while it writes, resumes and writes bit-identical files."""

        def start(out: Path) -> subprocess.Popen:
            words = f"--model {checkpoint} --data {data} --out {out} --steps 150 --batch 2 --width 64 --save-every 1"
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            command = [sys.executable, "-m", "jaxgen", "train", *words.split()]
            return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)

        def finish(process: subprocess.Popen) -> str:
            err = process.communicate(timeout=200)[1]
            assert process.returncode in (0, -signal.SIGKILL), err
            return err

        finish(start(tmp_path / "whole"))
        whole, out = comparable(tmp_path / "whole"), tmp_path / "out"
        draw, kills = random.Random(0), int(os.environ.get("JAXGEN_KILLS", "4"))
        killed = resumed = 0
        while killed < kills or not out.exists():
            process = start(out)
            if killed < kills:
                if killed % 2:  # after the first state has been saved
                    states = tmp_path / "out.training" / "states"
                    while process.poll() is None and not any(path.name.isdigit() for path in states.glob("*")):
                        time.sleep(0.05)
                time.sleep(draw.uniform(0, 4))
                process.kill()
            resumed += "resuming" in finish(process)
            killed += process.returncode != 0
            if out.exists():
                assert comparable(out) == whole
                if killed < kills:
                    shutil.rmtree(out)
                    shutil.rmtree(tmp_path / "out.training", ignore_errors=True)
        assert resumed >= kills / 4
        assert comparable(out) == whole


def _interrupt(*_):
    raise KeyboardInterrupt


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "options", "message"),
        [
            ([], {"data": None}, "--data is missing: name the JSONL file"),
            ([], {"model": None}, "--model is missing"),
            ([], {"out": None}, "--out is missing"),
            (["--learning_rate", "1"], {}, "unknown option --learning_rate: did you mean --learning-rate?"),
            (["more"], {}, "'more' does not belong to an option"),
            ([], {"data": "nowhere.jsonl"}, "argument --data: nowhere.jsonl: No such file or directory"),
            ([], {"eval_data": "nowhere.jsonl"}, "argument --eval-data: nowhere.jsonl: No such file or directory"),
            ([], {"model": "no where"}, "'no where' is neither a directory nor a hub id"),
            ([], {"out": "nowhere/out"}, "nowhere is not a directory: create it first"),
            ([], {"epochs": 1}, "not allowed with argument"),
            ([], {"steps": 0}, "--steps: 0 must be at least 1"),
            ([], {"learning_rate": "inf"}, "--learning-rate: inf must be above 0 and finite"),
            ([], {"warmup": 1}, "--warmup: 1 must be at least 0 and below 1"),
            ([], {"clip": "much"}, "--clip: 'much' is not a number"),
            ([], {"batch": 8, "accumulate": 3}, "--batch 8 cannot be divided into --accumulate 3 parts"),
            ([], {"width": 513}, "--width 513 exceeds the model's context of 512 tokens"),
            ([], {"width": 1}, "at least 2 tokens"),
            ([], {"width": 10}, "no line has tokens to learn from among its first 10: raise --width"),
            ([], {"lora": -1}, "--lora: -1 must be at least 0"),
            ([], {"targets": "q_proj"}, "--targets chooses where low-rank updates are: set --lora RANK too"),
            ([], {"lora": 2, "targets": "q_proj,q"}, "targets: unknown projections 'q': choose from q_proj, k_proj,"),
            ([], {"lora": 2, "targets": ""}, "targets: unknown projections '': choose from q_proj"),
            ([], {"eval_every": 2}, "--eval-every evaluates held-out data: set --eval-data FILE too"),
            (["--keep-best"], {}, "--keep-best compares evaluations: set --eval-every N too"),
            ([], {"patience": 2}, "--patience counts evaluations: set --eval-every N too"),
            ([], {"patience": 0}, "--patience: 0 must be at least 1"),
            ([], {"lora_alpha": 8}, "--lora-alpha scales low-rank updates: set --lora RANK too"),
            ([], {"dtype": "int8"}, "--dtype"),
        ],
    )
    def test_bad_options_are_refused_before_weights_are_read(self, run, tmp_path, monkeypatch, words, options, message):
        monkeypatch.setattr(finetune, "load_hf", lambda path: pytest.fail("the weights were loaded"))
        status, err = run(*words, **options)
        assert (status, err.count("\n")) == (2, 1), err
        assert err.startswith("jaxgen: error: ")
        assert message in err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl"]

    def test_bad_data_lines_are_named(self, run, data):
        data.write_text('{"text": "hello"}\n{"txt": "hello"}')
        assert "data.jsonl, line 2: each line must be" in run()[1]

    def test_existing_output_is_refused(self, run, checkpoint, data, tmp_path):
        assert "--model and --out are both" in run(out=checkpoint)[1]
        (tmp_path / "out").mkdir()
        assert run()[0] == 0
        assert "exists: choose another name, or overwrite=True (--overwrite)" in run()[1]
        old = files(tmp_path / "out")
        data.write_text(data.read_text().replace("fox", "cow"))
        assert run("--overwrite")[0] == 0
        assert files(tmp_path / "out") != old

    def test_tokens_outside_the_vocabulary_are_refused(self, run, checkpoint, data, tmp_path):
        base = Path(shutil.copytree(checkpoint, tmp_path / "base"))
        backend = byte_level_backend()
        backend.add_tokens(["[NEW]"])
        save(base, backend)
        data.write_text('{"text": "[NEW] words"}')
        assert f"contains the token {VOCABULARY}, but the vocabulary is 0 to {VOCABULARY - 1}" in run(model=base)[1]

    def test_insufficient_memory_is_refused(self, run, monkeypatch):
        monkeypatch.setattr("jaxgen.memory.free_bytes", lambda device: 1000)
        err = run()[1]
        assert "0.0 MB is free: try --lora 16, a larger --accumulate or a smaller --width" in err

    def test_diverging_loss_stops_the_run(self, run, tmp_path):
        status, err = run(steps=50, learning_rate=1e30, warmup=0, report_every=5)
        assert status == 2
        assert "training diverged: the loss is nan at step 5; lower the learning rate" in err
        assert not (tmp_path / "out").exists()

    def test_help(self, capsys):
        with pytest.raises(SystemExit) as exit_:
            train_options.parse(["--help"])
        assert exit_.value.code == 0
        assert "--lora-alpha" in capsys.readouterr().out

    def test_compile_cache_is_on_unless_disabled(self, data):
        words = ["--data", str(data), "--model", "model", "--out", "out"]
        assert train_options.parse(words).compile_cache is True
        assert train_options.parse([*words, "--no-compile-cache"]).compile_cache is False


class TestParts:
    MODEL = model_config(**SMALL)
    CFG = TrainConfig(steps=8, learning_rate=finetune.FULL_RATE, weight_decay=0.0)  # the command's defaults

    def rows(self, count: int = 3) -> TrainBatch:
        rows = pack([text_example(byte_level(), text) for pair in CHATS * 2 for text in pair], 64)[0]
        return jax.tree.map(lambda leaf: leaf[:count], rows)

    @pytest.mark.slow
    def test_held_out_loss_does_not_depend_on_the_batch(self):
        params = random_params(self.MODEL)
        assert len(self.rows().ids) == 3
        losses = [evaluate(params, self.rows(), model=self.MODEL, dtype="float32", rows=n) for n in (1, 2, 3, 16)]
        np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
        assert np.isfinite(losses[0])

    @pytest.mark.slow
    def test_low_rank_training_does_not_copy_frozen_weights(self):
        def taken(layers: int) -> int:
            model = model_config(**{**SMALL, "hidden_size": 256, "num_hidden_layers": layers})
            cfg = TrainConfig(steps=2, dtype="bfloat16")
            params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in param_shapes(model).items()}
            params = flax.traverse_util.unflatten_dict(params, sep=".")
            begin = jax.eval_shape(lambda p: TrainState.create(lora.init(p, 2, jax.random.key(0)), cfg), params)
            step = jax.jit(functools.partial(train_step, model=model, cfg=cfg), donate_argnums=0)
            batch = jax.tree.map(lambda leaf: leaf[:1, :8], self.rows())
            return step.lower(begin, batch, params).compile().memory_analysis().temp_size_in_bytes

        layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * SMALL["intermediate_size"]  # weights that get updates
        assert taken(5) - taken(1) < 4 * layer  # copies of 4 layers would take 8 * layer bytes

    def test_initial_parameters_are_released(self):
        alive = []

        def begin():
            params = random_params(self.MODEL)
            alive.append(weakref.ref(params["model"]["norm"]["weight"]))
            return params

        def batches(step):
            assert alive[0]() is None
            return self.rows(2)

        train(begin(), batches, model=self.MODEL, cfg=self.CFG)

    def test_can_resume_compares_only_the_settings(self, tmp_path):
        settings = {"model": self.MODEL, "cfg": self.CFG}
        assert not can_resume(tmp_path, **settings)
        train(random_params(self.MODEL), lambda step: self.rows(2), **settings, directory=tmp_path)
        assert can_resume(tmp_path, **settings)
        with pytest.raises(InputError, match="other settings"):
            can_resume(tmp_path, **settings, run="another")

    def test_frozen_dict_params_are_accepted(self):
        params = random_params(self.MODEL)
        plain, frozen = (lora.init(p, 2, jax.random.key(0)) for p in (params, flax.core.freeze(params)))
        assert jax.tree.structure(plain) == jax.tree.structure(frozen)
        assert len(jax.tree.leaves(frozen)) == 14
