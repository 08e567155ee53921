import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from convert import load_adapter, load_hf, save_hf
from jaxgen import demo, generate
from jaxgen.cli import answer as cli, options, printing, serve_options, train_options
from jaxgen.cli.main import main
from jaxgen.core.text.tokenizer import Tokenizer
from tests.support.adapters import factors, write
from tests.support.tokenizers import CHATML, byte_level_backend, save

ROOT = Path(__file__).resolve().parents[2]


# Options for sampling. All calls with them share one program, whose arguments include temperature, seed and length.
DRAWN = ("--dtype", "bfloat16", "--do-sample", "--temperature", 9, "--max-new-tokens", 20)


def process(*arguments, **options) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **options}
    command = [sys.executable, "-m", "jaxgen", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


class TestText:
    @pytest.mark.slow
    def test_adapter_is_applied(self, run, checkpoint, tmp_path):
        params, cfg = load_hf(checkpoint)
        adapter = write(tmp_path / "adapter", factors(cfg.model, 2, 0, ("lm_head",), scale=9.0))
        plain = run("--model", checkpoint, "A", "-n", 4)
        status, out, err = run("--model", checkpoint, "--adapter", adapter, "A", "-n", 4)
        assert (status, err) == (0, "")
        assert out != plain[1]
        tok = Tokenizer.from_pretrained(checkpoint)
        cfg = cfg.replace(max_new_tokens=4)
        wanted = generate(load_adapter(adapter, params, cfg), [tok.encode("A")], None, cfg)
        assert out == tok.decode_batch(wanted)[0] + "\n"

    def test_greedy(self, run, checkpoint):
        assert run("--model", checkpoint, "A", "--max-new-tokens", 5) == (0, "BCDEF\n", "")

    def test_text_before_a_failure_is_printed(self, run, checkpoint):
        own = Tokenizer.from_pretrained(checkpoint).encode("BC")
        banned = [token for token in range(load_hf(checkpoint)[1].model.vocab_size) if token not in own]
        options = ("--suppress-tokens", json.dumps(banned), "--no-repeat-ngram-size", 1)
        status, out, err = run("--model", checkpoint, "A", *options)
        assert (status, out) == (1, "BC\n")
        assert err.startswith("jaxgen: error: row 0 cannot continue after 2 generated tokens")

    @pytest.mark.slow
    def test_assistant_drafts_tokens(self, run, checkpoint, refused):
        arguments = ("--model", checkpoint, "A", "--max-new-tokens", 5)
        assert run(*arguments, "--assistant", checkpoint) == (0, "BCDEF\n", "")
        assert run(*arguments, "--assistant", checkpoint, "--num-assistant-tokens", 2) == (0, "BCDEF\n", "")
        assert run(*arguments, "--prompt-lookup-num-tokens", 3) == (0, "BCDEF\n", "")

    def test_assistant_is_checked_before_weights_are_read(self, checkpoint, refused, monkeypatch):
        monkeypatch.delattr("jaxgen.cli.answer.load_hf")
        arguments = ("--model", checkpoint, "A", "--max-new-tokens", 5)
        line = refused(*arguments, "--assistant", checkpoint, "--num-beams", 2)
        assert "assistant works with greedy search and sampling" in line
        assert "the assistant has a vocabulary of" in refused(*arguments, "--assistant", demo.PATH)

    def test_raw_skips_the_chat_template(self, run, copy):
        (copy / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
        arguments = ("--model", copy, "A", "--max-new-tokens", 5)
        assert run(*arguments) == (0, '!"#$%\n', "")
        assert run(*arguments, "--raw") == (0, "BCDEF\n", "")
        assert run("--model", copy, "") == (2, "", "jaxgen: error: the prompt is empty: write a prompt\n")

    @pytest.mark.slow
    def test_seed(self, run, checkpoint):
        arguments = ("--model", checkpoint, "A", *DRAWN)
        first = run(*arguments)
        assert first == run(*arguments, "--seed", 0) == run(*arguments, "--seed=0")
        assert first[0] == 0
        assert first != run(*arguments, "--seed", 1)

    @pytest.mark.slow
    def test_several_answers_are_printed_and_one_is_streamed(self, run, checkpoint):
        tokenizer = Tokenizer.from_pretrained(checkpoint)
        params, cfg = load_hf(checkpoint, dtype="bfloat16")
        cfg = cfg.replace(do_sample=True, temperature=9.0, max_new_tokens=20, num_return_sequences=3)
        batch = tokenizer.batch(["A"])
        out = generate(params, batch.ids, jax.random.key(3), cfg, attention_mask=batch.attention_mask)
        texts = tokenizer.decode_batch(out)
        assert len(set(texts)) == 3
        arguments = ("--model", checkpoint, "A", *DRAWN, "--seed", 3)
        assert run(*arguments, "--num-return-sequences", 3) == (0, "\n\n".join(texts) + "\n", "")
        assert run(*arguments) == (0, texts[0] + "\n", "")

    @pytest.mark.slow
    def test_penalties_of_generated_tokens(self, run, checkpoint):
        arguments = ("--model", checkpoint, "A", "--max-new-tokens", 4)
        assert run(*arguments, "--presence-penalty", -30) == (0, "BBBB\n", "")
        assert run(*arguments, "--frequency-penalty", "-30.0") == (0, "BBBB\n", "")

    @pytest.mark.slow
    def test_dtype(self, run, checkpoint, monkeypatch):
        dtypes = set()

        def watching(params, *arguments, **options):
            dtypes.update(leaf.dtype.name for leaf in jax.tree.leaves(params))
            return generate(params, *arguments, **options)

        monkeypatch.setattr(printing, "generate", watching)
        assert run("--model", checkpoint, "A", *DRAWN, "--temperature", 0.01, "--max-new-tokens", 4)[1] == "BCDE\n"
        assert dtypes == {"bfloat16"}

    @pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
    def test_quantized(self, run, checkpoint, monkeypatch, platform):
        """On a GPU, projections are also fused."""
        monkeypatch.setattr(cli, "default_device", lambda: types.SimpleNamespace(platform=platform))
        names = set()

        def watching(params, *arguments, **options):
            names.update(params["model"]["layers"]["0"]["mlp"])
            assert {leaf.dtype.name for leaf in jax.tree.leaves(params) if leaf.ndim == 2} == {"int8"}
            return generate(params, *arguments, **options)

        monkeypatch.setattr(printing, "generate", watching)
        assert run("--model", checkpoint, "A", "--quantize", "int8", "--max-new-tokens", 4) == (0, "BCDE\n", "")
        assert ("gate_up_proj" in names) == (platform == "gpu")

    def test_quantize_none_dequantizes_weights(self, run, checkpoint, tmp_path, monkeypatch):
        save_hf(*load_hf(checkpoint, quantize="int8"), tmp_path / "int8")
        shutil.copy(checkpoint / "tokenizer.json", tmp_path / "int8")
        seen = []

        def watching(params, *arguments, **options):
            seen.append({leaf.dtype.name for leaf in jax.tree.leaves(params)})
            return generate(params, *arguments, **options)

        monkeypatch.setattr(printing, "generate", watching)
        for words in ([], ["--quantize", "none"], ["--quantize", "none", "--dtype", "bfloat16"]):
            assert run("--model", tmp_path / "int8", "A", *words, "--max-new-tokens", 4)[:2] == (0, "BCDE\n")
        assert seen == [{"int8", "float32"}, {"float32"}, {"bfloat16"}]

    def test_prompt_may_look_like_an_option(self, run, checkpoint):
        assert run("--model", checkpoint, "--max-new-tokens", 2, "--", "--A")[:2] == (0, "BC\n")

    def test_warnings_are_one_line_each(self, run, checkpoint):
        status, out, err = run("--model", checkpoint, "A", "--max-new-tokens", 3, "--top-p", 0.5)
        assert (status, out) == (0, "BCD\n")
        assert err.startswith("jaxgen: warning: greedy_search does not read --top-p 0.5")
        assert err.count("\n") == 1

    @pytest.mark.parametrize(("drawn", "tokens"), [((), 5), ((*DRAWN, "--num-return-sequences", 3), 15)])
    @pytest.mark.slow
    def test_stats(self, run, checkpoint, drawn, tokens):
        status, _, err = run("--model", checkpoint, "A", "--stats", *drawn, "--max-new-tokens", 5)
        lines = err.splitlines()
        assert status == 0
        assert all(line.startswith("jaxgen: stats: ") for line in lines)
        assert lines[0].startswith("jaxgen: stats: load ")
        assert lines[-1].startswith(f"jaxgen: stats: {tokens} tokens, ")

    @pytest.mark.slow
    @pytest.mark.parametrize("prompt", ["", "Once upon a time"])
    def test_greedy_output_of_real_checkpoints(self, run, data, prompt):
        runs = json.loads((data / "vectors" / "greedy-runs.json").read_text(encoding="utf-8"))
        name = "stories260K-hf"
        (real,) = [each for each in runs if (each["checkpoint"], each["prompt"]) == (name, prompt)]
        options = ("--max-length", len(real["sequence"]), "--no-do-sample")
        status, out, err = run("--model", data / "checkpoints" / name, prompt, *options)
        assert (status, prompt + out, err) == (0, real["text"] + "\n", "")


class TestLength:
    def test_max_length_counts_the_prompt(self, run, checkpoint):
        assert run("--model", checkpoint, "--max-length", 5, "ABC") == (0, "DE\n", "")
        assert run("--model", checkpoint, "--max-length", 20, "ABC") == (0, "DEFGHIJKLMNOPQRST\n", "")

    def test_default_number_of_new_tokens(self, run, checkpoint, monkeypatch):
        status, out, err = run("--model", checkpoint, "A")
        assert (status, len(out) - 1, err) == (0, cli.DEFAULT_NEW_TOKENS, "")
        asked = []
        monkeypatch.setattr(
            printing, "generate", lambda params, ids, key, cfg, **options: asked.append(cfg.max_new_tokens)
        )
        assert run("--model", checkpoint, "A" * 500)[0] == 0
        assert np.max(asked) == 12

    @pytest.mark.slow
    def test_default_length_is_limited_by_the_context(self, run, checkpoint):
        assert len(run("--model", checkpoint, "A" * 500)[1]) - 1 == 12

    @pytest.mark.parametrize(("field", "value", "length"), [("max_new_tokens", 7, 7), ("max_length", 9, 6)])
    def test_length_of_the_checkpoint_is_used(self, run, copy, field, value, length):
        (copy / "generation_config.json").write_text(json.dumps({field: value}), encoding="utf-8")
        assert run("--model", copy, "ABC") == (0, "DEFGHIJKL"[:length] + "\n", "")
        assert run("--model", copy, "ABC", "--max-length", 5) == (0, "DE\n", "")

    @pytest.mark.slow
    def test_a_checkpoint_that_prevents_streaming(self, run, copy):
        config = {"num_return_sequences": 2, "num_beams": 2, "max_new_tokens": 3}
        (copy / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
        note = (
            "jaxgen: note: the checkpoint sets {}, so the text appears only at the end; to stream one answer, add {}\n"
        )
        both = note.format("num_return_sequences=2 and num_beams=2", "--num-return-sequences 1 --num-beams 1")
        assert run("--model", copy, "A")[2] == both
        assert run("--model", copy, "A", "--num-beams", 2)[2] == note.format(
            "num_return_sequences=2", "--num-return-sequences 1"
        )
        assert run("--model", copy, "A", "--num-beams", 2, "--num-return-sequences", 2)[2] == ""
        assert run("--model", copy, "A", "--num-beams", 1, "--num-return-sequences", 1) == (0, "BCD\n", "")

    @pytest.mark.parametrize(
        ("option", "length"), [("--min-new-tokens", 8), pytest.param("--min-length", 6, marks=pytest.mark.slow)]
    )
    def test_min_length_option_overrides_the_checkpoint(self, run, copy, option, length):
        eos = Tokenizer.from_pretrained(copy).encode("C")[0]
        config = {"eos_token_id": eos, "min_new_tokens": 1, "max_new_tokens": 12}
        (copy / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
        assert run("--model", copy, "A")[1] == "BC\n"
        assert "C" not in run("--model", copy, "A@", option, 8)[1][:length]

    def test_lengths_beyond_the_context_are_refused(self, refused, checkpoint):
        assert "at most 507" in refused("--model", checkpoint, "ABCDE", "--max-new-tokens", 508)
        assert "at most 507" in refused("--model", checkpoint, "ABCDE", "--max-length", 513)
        assert "shorten the prompt" in refused("--model", checkpoint, "A" * 512)
        assert "includes the prompt" in refused("--model", checkpoint, "ABCDE", "--max-length", 5)


class TestTokenHealing:
    def test_healed_answer_begins_with_the_last_token(self, run, checkpoint):
        result = run("--model", checkpoint, "ABC", "--token-healing", "--max-new-tokens", 4)
        assert result == (0, "CDEF\n", "")

    def test_token_healing_is_refused_with_a_chat_template(self, refused):
        assert "--token-healing continues the prompt's own text" in refused("A fox", "--token-healing")
        assert "--token-healing" in refused("--chat", "--token-healing")


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["A", "--temperatur", "0.5"], "did you mean --temperature?"),
            (["A", "--top_k", "5"], "did you mean --top-k?"),
            (["A", "-x"], "unknown option -x"),
            (["A", "--temp", "0.5"], "did you mean --temperature?"),
            (["A", "--stop", "x"], "did you mean --stop-strings?"),
            (["A", "--use-cache", "false"], "--use-cache: use_cache is not offered: generation always uses the cache;"),
            (["A", "--no-use-cache"], "unknown option --no-use-cache: use_cache is not offered: generation always"),
            (["A", "--low-memory"], "low_memory is not offered: rows already share the prompt's cache"),
            (["A", "--output-scores"], "output_scores is set in Python, with cfg.replace"),
            (["A", "--lora", "8"], "unknown option --lora: it is an option of jaxgen train"),
            (["A", "--lore", "8"], "unknown option --lore; see jaxgen --help"),
            (["A", "--max", "x"], "did you mean --max-new-tokens?"),
            (["A", "-temperature", "0.5"], "did you mean --temperature?"),
            (["A", "B"], "in quotes"),
            (["--", "A", "-n", "3"], "'-n' follows the prompt 'A': put the whole prompt in quotes"),
            ([""], "prompt is empty"),
            (["\udcff"], "not valid Unicode"),
            (["A", "--temperature", "hot"], "--temperature"),
            (["A", "--temperature"], "--temperature"),
            (["A", "--temperature", "-0.1"], "--temperature must be > 0"),
            (
                ["A", "--temperature", "0", "--do-sample"],
                "--temperature 0 means greedy search, which excludes --do-sample",
            ),
            (["A", "--temperature", "nan"], "--temperature must be > 0"),
            (["A", "--top-k", "-1"], "--top-k must be >= 0"),
            (["A", "--top-k", "2.5"], "'2.5' is not a whole number"),
            (["A", "--top-k", "99999999999"], "below 2**31"),
            (["A", "--top-p", "1.5"], "--top-p must be between 0 and 1"),
            (["A", "--min-p", "-0.1"], "--min-p must be between 0 and 1"),
            (["A", "--repetition-penalty", "0"], "--repetition-penalty must be > 0"),
            (["A", "--max-new-tokens", "0"], "--max-new-tokens must be > 0"),
            (["A", "--min-new-tokens", "-2"], "--min-new-tokens must be >= 0"),
            (["A", "--num-return-sequences", "0"], "--num-return-sequences must be >= 1"),
            (
                ["A", "--num-return-sequences", "2"],
                "--num-return-sequences 2: greedy_search has one result per prompt; set --do-sample, or --num-beams",
            ),
            (["A", "--max-length", "9", "--max-new-tokens", "5"], "not allowed with"),
            (["A", "--min-length", "9", "--min-new-tokens", "5"], "not allowed with"),
            (["A", "--seed", "-9223372036854775809"], "at least -9223372036854775808"),
            (["A", "--seed", "one"], "--seed"),
            (["A", "--dtype", "int8"], "--dtype"),
            (["A", "--dola-layers", "2,x"], "'2,x' is neither low, high nor layers"),
            (["A", "--early-stopping", "maybe"], "--early-stopping: 'maybe' must be one of false, true, never"),
            (["A", "--json-schema", "nowhere.json"], "argument --json-schema: nowhere.json: No such file or directory"),
        ],
    )
    def test_bad_arguments_are_refused(self, refused, checkpoint, arguments, words):
        assert words in refused("--model", checkpoint, *arguments)

    def test_bad_model_paths_are_refused(self, refused, tmp_path):
        assert "did you mean --model?" in refused("A", "--modle", tmp_path)
        assert "neither a directory nor a hub id" in refused("A", "--model", tmp_path / "nowhere")
        assert "config.json is missing" in refused("A", "--model", tmp_path)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_missing_files(self, refused, copy, name):
        (copy / name).unlink()
        assert name.removeprefix("model") in refused("--model", copy, "A")

    @pytest.mark.parametrize(
        "name",
        [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ],
    )
    def test_damaged_files(self, refused, copy, name):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[: len(content) // 2])
        assert name in refused("--model", copy, "A")
        (copy / name).write_bytes(b"[\xff\n")
        assert name in refused("--model", copy, "A")

    def test_long_lists_of_problems_are_shortened(self, refused, copy):
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        config["hidden_size"] *= 2
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert "more" in refused("--model", copy, "A")

    def test_multiline_template_error_becomes_one_line(self, refused, copy):
        template = "{{ raise_exception('no\\n  such role') }}"
        (copy / "chat_template.jinja").write_text(template, encoding="utf-8")
        assert "no such role" in refused("--model", copy, "A")

    def test_tokenizer_of_another_model_is_refused(self, refused, copy):
        backend = byte_level_backend()
        backend.add_tokens(["[NEW]"])
        save(copy, backend)
        assert "263" in refused("--model", copy, "[NEW]")

    @pytest.mark.parametrize(
        ("error", "status", "line"),
        [
            (KeyboardInterrupt(), 130, ""),
            (MemoryError(), 1, "jaxgen: error: out of memory\n"),
            (
                jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED:\n 9 GB"),
                1,
                "jaxgen: error: RESOURCE_EXHAUSTED: 9 GB\n",
            ),
            (
                PermissionError(13, "Permission denied", "f"),
                2,
                "jaxgen: error: f: Permission denied\n",
            ),
        ],
    )
    def test_runtime_errors_are_reported_in_one_line(self, run, checkpoint, monkeypatch, error, status, line):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(cli, "load_hf", fail)
        assert run("--model", checkpoint, "A") == (status, "", line)

    def test_every_available_option_is_a_flag(self):
        flags = {flag for action in options.parser()._actions for flag in action.option_strings}
        assert {"--" + option.name.replace("_", "-") for option in options.OFFERED} <= flags
        assert {"--no-do-sample", "--frequency-penalty", "--watermarking-config"} <= flags
        assert f"or {cli.DEFAULT_NEW_TOKENS})" in options.parser().format_help()

    @pytest.mark.parametrize(
        ("words", "fields"),
        [
            ("--temperature 0.5 --top-k 3", {"temperature": 0.5, "top_k": 3}),
            ("--no-do-sample", {"do_sample": False}),
            ("--max-new-tokens 5", {"max_new_tokens": 5, "max_length": 20}),
            ("--max-length 5", {"max_new_tokens": None, "max_length": 5}),
            ("--min-length 5", {"min_new_tokens": None, "min_length": 5}),
            ("--min-new-tokens 5", {"min_new_tokens": 5, "min_length": 0}),
            ("--stop-strings a --stop-strings b", {"stop_strings": ["a", "b"]}),
            ("--eos-token-id [1,2]", {"eos_token_id": [1, 2]}),
            ("--frequency-penalty -1.5", {"frequency_penalty": -1.5}),
            ("--early-stopping never --num-beams 2", {"early_stopping": "never", "num_beams": 2}),
            ("--early-stopping true", {"early_stopping": True}),
            ("--penalty-alpha 0.6 --top-k 4", {"penalty_alpha": 0.6, "top_k": 4}),
            ("--dola-layers low", {"dola_layers": "low"}),
            ("--dola-layers 2,4", {"dola_layers": [2, 4]}),
            ("--token-healing --raw", {"token_healing": True}),
            ("--temperature 0", {"do_sample": False}),
            ("--temperature 0.0 --top-p 0.5", {"do_sample": False, "top_p": 0.5}),
        ],
    )
    def test_flags_set_config_fields(self, words, fields):
        assert options.generation_fields(options.parse([*words.split(), "A"])) == fields

    def test_help(self, capsys):
        assert main(["--help"]) == 0
        out = capsys.readouterr().out
        for option in ("--max-new-tokens", "--no-do-sample", "--repetition-penalty", "--raw", "--seed"):
            assert option in out


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals and pipes")
class TestProcess:
    @pytest.mark.slow
    def test_closed_pipe(self, checkpoint, programs):
        with process("--model", checkpoint, "A", **programs) as command:
            assert command.stdout.read(1) == "B"
            command.stdout.close()
            assert command.stderr.read() == ""
        assert command.returncode in (0, 141)  # 0 if everything was written before the pipe was closed

    def test_interrupted_while_compiling(self, checkpoint):
        with process("--model", checkpoint, "A", JAX_LOG_COMPILES="1") as command:
            for line in command.stderr:
                if "Compiling" in line and "_start" in line:
                    break
            command.send_signal(signal.SIGINT)
            out, err = command.communicate(timeout=60)
        assert (command.returncode, out) == (-signal.SIGINT, "")
        assert "Traceback" not in err

    def test_interrupted_while_importing(self, checkpoint):
        with process("--model", checkpoint, "A", PYTHONPROFILEIMPORTTIME="1") as command:
            for line in command.stderr:
                if "numpy" in line:
                    break
            command.send_signal(signal.SIGINT)
            out, err = command.communicate(timeout=60)
        assert (command.returncode, out) == (-signal.SIGINT, "")
        assert "Traceback" not in err

    @pytest.mark.slow
    def test_characters_outside_the_stdout_encoding_are_replaced(self, copy, programs):
        (copy / "tokenizer.json").write_text(
            (copy / "tokenizer.json").read_text(encoding="utf-8").replace('"B"', '"Ã©"'), encoding="utf-8"
        )
        arguments = ("--model", copy, "A", "--max-new-tokens", 2)
        with process(*arguments, PYTHONIOENCODING="ascii", **programs) as command:
            assert command.communicate(timeout=60) == ("?C\n", "")
        assert command.returncode == 0


@pytest.mark.parametrize("module", [options, serve_options, train_options])
@pytest.mark.parametrize("columns", [50, 80, 100])
def test_help_does_not_hyphenate_option_names(monkeypatch, module, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = module.parser().format_help()
    assert [line for line in text.splitlines() if re.search(r"(^|\s)--[a-z-]*-$", line)] == []
    assert not re.search(r"\b(True|False)\b", text)
