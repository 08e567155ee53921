"""The benchmarks run on small inputs and count correctly. The measured times are not checked."""

import argparse
import itertools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import accelerator, attack, evaluate, measure, plots, processors, program, serving, suites, workarounds
from benchmarks.__main__ import main
from convert import load_hf
from jaxgen import Tokenizer
from jaxgen.core.config.generation_options import OPTIONS
from tests.support import checkpoints
from tests.support.goldens import GOLDENS

ROOT = Path(__file__).parents[1]
TIMED = Path(__file__).parent / "support" / "timed_program.py"
FAULTS = {
    "short": r"1 x 64 new tokens became",
    "compiles": "3 compilations while measuring",
    "grows": "choose --short nearer",
    "endless": "takes no longer than a short one",
    "ends": "ended with status 3",
}
CONFIG = checkpoints.QWEN2 | {"max_position_embeddings": 1024, "torch_dtype": "bfloat16", "num_hidden_layers": 6}
CONFIG |= {"use_sliding_window": False, "sliding_window": 1024, "max_window_layers": 6}  # keras-hub reads these


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(measure, "PAUSE", 0.0)
    variants = ("fast", "slow", "differs", "no beams", *FAULTS)
    monkeypatch.setitem(program.KINDS, "timed", program.Kind(str(TIMED), None, variants))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoints.write(tmp_path_factory.mktemp("model") / "tiny", CONFIG, checkpoints.weights(CONFIG, "bfloat16"))


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    config = CONFIG | {"hidden_size": 128, "num_hidden_layers": 1}
    return checkpoints.write(tmp_path_factory.mktemp("model") / "wide", config, checkpoints.weights(config, "bfloat16"))


def run(subcommand: str, model: Path, results: Path, *words: str) -> dict:
    """Run a subcommand and return the result that it wrote."""
    main([subcommand, "--model", str(model), "--results", str(results), *words])
    (file,) = results.glob(f"*/{subcommand}-tiny*.json")
    assert file.with_suffix(".md").read_text("utf-8").startswith("# ")
    return json.loads(file.read_text("utf-8"))


def medians(result: dict, name: str) -> dict[str, float]:
    own = result["cases"][0]["programs"]
    return {program: found["figures"][name]["median"] for program, found in own.items() if name in found["figures"]}


@pytest.mark.slow
def test_figures_follow_from_the_times(model, tmp_path):
    result = run("decode", model, tmp_path, "--programs", "timed", "timed:slow", "timed:differs", "--rounds", "3")
    fast, slow, differs = (f"timed:{variant}:bfloat16" for variant in ("fast", "slow", "differs"))
    assert medians(result, "first") == {fast: 1.0, slow: 1.0, differs: 1.0}
    assert medians(result, "decode_tokens_per_second") == pytest.approx({fast: 10.0, slow: 5.0, differs: 10.0})
    assert medians(result, "step_ratio") == pytest.approx({slow: 2.0, differs: 1.0})
    assert medians(result, "weights_bytes_per_second")[fast] == pytest.approx(1e7)
    found = result["cases"][0]["programs"]
    assert [len(own["turns"]) for own in found.values()] == [3, 3, 3]
    assert found[slow]["equal_leading_tokens"] == [64]
    assert found[differs]["equal_leading_tokens"] == [3]


def test_cost_is_relative_to_the_baseline(model, tmp_path):
    result = run("modes", model, tmp_path, "--programs", "timed", "--rounds", "2")
    labels = {case["label"]: case["programs"]["timed:fast:bfloat16"] for case in result["cases"]}
    assert labels["contrastive search, top-k 4"]["figures"]["cost"]["median"] == pytest.approx(1.0)
    assert labels["4 beams"] == {"refused": "no beams"}


def test_new_processes_are_measured(model, tmp_path):
    result = run("startup", model, tmp_path, "--programs", "timed", "--rounds", "2")
    assert medians(result, "load_seconds") == {"timed:fast:bfloat16": 2.0}
    assert medians(result, "first_call")["timed:fast:bfloat16"] == pytest.approx(1.0 + 63 * 0.1)


@pytest.mark.parametrize("variant", FAULTS)
def test_meaningless_figures_are_refused(variant, model, tmp_path):
    with pytest.raises(SystemExit, match=FAULTS[variant]):
        run("decode", model, tmp_path, "--programs", f"timed:{variant}", "--rounds", "1")


def test_a_program_that_fails_in_a_case_is_measured_in_the_others(model, tmp_path):
    with pytest.raises(SystemExit, match=r"timed:no beams:bfloat16, 4 beams: RuntimeError: no beams"):
        run(
            "modes", model, tmp_path, "--programs", "timed:no beams", "timed:slow", "--rounds", "2", "--only", "4 beams"
        )
    (file,) = tmp_path.glob("*/modes-tiny.json")
    labels = {case["label"]: case["programs"] for case in json.loads(file.read_text("utf-8"))["cases"]}
    assert list(labels) == ["greedy, 4 rows", "4 beams"]
    assert len(labels["greedy, 4 rows"]["timed:no beams:bfloat16"]["turns"]) == 2
    assert labels["4 beams"]["timed:no beams:bfloat16"] == {"failed": "RuntimeError: no beams"}
    assert "failed: RuntimeError: no beams" in file.with_suffix(".md").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--programs", "vllm"], "'vllm' is not one of jaxgen"),
        (["--programs", "llama.cpp:float32"], "'float32' is not one of bfloat16, q8_0, q4_0"),
        (["--programs", "transformers"], "give --environments DIR"),
        (["--programs", "transformers", "--environments", "nowhere"], "nowhere/transformers/bin/python does not exist"),
        (["--short", "64"], "--short must be less"),
        (["--only", "nothing"], "--only nothing"),
    ],
)
def test_bad_requests_are_refused(words, message, model, tmp_path, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        run("decode", model, tmp_path, *words)
    assert message in f"{error.value}{capsys.readouterr().err}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile", "--model", "nowhere"], "error: nowhere is not a directory"),
        (["compile", "--target", "h100", "--config", "nowhere"], "error: nowhere/config.json: No such file"),
        (["accelerator", "4", "--results", "x"], "invalid choice: 4"),
        (["accelerator", "1", "--results", "x", "--minutes", "0"], "--minutes must be above 0, got 0"),
        (
            ["accelerator", "1", "--results", "x", "--environments", "nowhere"],
            "--environments nowhere is not a directory",
        ),
        (["accelerator", "1", "--results", __file__], "File exists"),
    ],
)
def test_bad_arguments_are_reported_in_one_line(words, message):
    done = subprocess.run([sys.executable, "-m", "benchmarks", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert message in done.stderr


def test_installed_transformers_is_used(monkeypatch):
    monkeypatch.setattr(program, "find_spec", lambda name: name == "transformers")
    assert program.Program(program.spec("transformers"), None, None, None).command[0] == sys.executable
    with pytest.raises(SystemExit, match="llama_cpp is not installed here"):
        program.Program(program.spec("llama.cpp"), None, None, None)


def test_programs_have_readable_names():
    names = ["jaxgen", "jaxgen:int8", "jaxgen:float32", "transformers", "transformers:compile", "llama.cpp:q8_0"]
    spoken = ["jaxgen", "jaxgen, 8-bit", "jaxgen float32", "transformers", "transformers, torch.compile"]
    assert [program.spec(name).spoken for name in names] == [*spoken, "llama.cpp q8_0"]


def texts(picture: Path) -> set[str]:
    """Return the texts in a plot. matplotlib draws each text as glyphs, with the text itself in a comment."""
    return set(re.findall("<!-- (.*?) -->", picture.read_text("utf-8")))


def test_program_has_the_same_style_in_all_plots():
    pytest.importorskip("matplotlib")
    names = [
        ":".join((kind, variant, dtype))
        for kind, own in program.KINDS.items()
        for variant, dtype in itertools.product(own.variants, own.dtypes)
        if kind in plots.COLORS
    ]
    looks = [plots.style(name.replace("::", ":")) for name in names]
    assert len({(str(look["color"]), look["marker"]) for look in looks}) == len(names)


@pytest.mark.slow
def test_plots_have_plain_numbers(model, tmp_path):
    pytest.importorskip("matplotlib")
    programs = ["--rounds", "1", "--programs", "timed", "timed:slow"]
    for subcommand in ("context", "batch", "decode"):
        run(subcommand, model, tmp_path, *programs)
    drawn = {picture.stem.removesuffix("-tiny"): texts(picture) for picture in tmp_path.glob("*/*.svg")}
    assert set(drawn) == {"context", "batch", "decode"}  # the roofline plot needs jaxgen's probe
    assert {"128", "1,024", "4,096", "timed", "timed, slow", "0", "10"} <= drawn["context"]
    assert {"1", "2", "4", "8", "16", "5", "10", "20", "50", "100"} <= drawn["batch"]
    assert {"10.0", "5.0", "timed, slow", "tokens/s"} <= drawn["decode"]
    assert not any("mathdefault" in text or ":fast" in text for text in set().union(*drawn.values()))


def test_results_in_another_format_are_not_drawn(tmp_path):
    (tmp_path / "old.json").write_text('{"settings": {}}', encoding="utf-8")
    assert plots.draw(tmp_path / "old.json") == []


def test_the_main_table_measures_three_contexts(model):
    lines = (Path(plots.__file__).parent / "main_table.sh").read_text("utf-8").replace("\\\n", "").splitlines()
    calls = [shlex.split(line)[1:] for line in lines if line.startswith("measure ")]
    read = {name: suites._arguments(name, suites.SUITES[name], [*rest, "--model", str(model)]) for name, *rest in calls}
    assert read["context"].prompt == (128, 1024, 4096)
    assert {one.kind for one in read["context"].programs} == {"jaxgen", "transformers", "llama.cpp"}


def test_a_step_that_fails_or_runs_out_of_time_does_not_stop_the_others(tmp_path):
    sleep = ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)")
    planned = [
        accelerator.Step("fails", ("no_such_module",), 1),
        accelerator.Step("sleeps", sleep, 0.02),
        accelerator.Step("passes", ("this",), 1),
    ]
    found = {outcome.name: outcome.status for outcome in accelerator.run(planned, 100, tmp_path, tmp_path)}
    assert found == {"fails": "failed with status 1", "sleeps": "out of time after 1 s", "passes": "passed"}
    assert "No module named" in (tmp_path / "1-fails.log").read_text()
    assert "Beautiful is better than ugly" in (tmp_path / "3-passes.log").read_text()
    (outcome,) = accelerator.run(planned[2:], 1, tmp_path, tmp_path)
    assert outcome.status == "no time was left"


STOPPED = """
import signal, sys
from pathlib import Path
from benchmarks import accelerator

results = Path(sys.argv[1])
sleep = "import os, pathlib, time; pathlib.Path(%r).write_text(str(os.getpid())); time.sleep(60)" % str(results / "pid")
accelerator.Plan.steps = lambda *_: [accelerator.Step("sleeps", ("timeit", "-n", "1", "-r", "1", sleep), 1)]
sys.argv = ["accelerator", "1", "--results", str(results)]
accelerator.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_step_ends_with_the_command(number, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (pid := (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) != 0
        assert not Path(f"/proc/{pid}").exists()
    finally:
        process.kill()


@pytest.mark.parametrize("size", accelerator.SIZES)
@pytest.mark.parametrize("part", accelerator.PARTS)
def test_the_steps_for_an_accelerator_are_subcommands(part, size, model, tmp_path):
    planned = accelerator.Plan(accelerator.SIZES[size], tmp_path, tmp_path, tmp_path).steps(part)
    made = {step.words[3] for step in planned if step.words[1] == "checkpoint"}
    for step in planned:
        module, name, *words = step.words
        if module == "benchmarks" and name in suites.SUITES:
            used = words[words.index("--model") + 1]
            assert used in made, "its checkpoint must be made first"
            words[words.index("--model") + 1] = str(model)
            assert suites._arguments(name, suites.SUITES[name], words).rounds


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 2])  # the other needs torch
def test_a_rehearsal_for_an_accelerator(part, tmp_path):
    main(["accelerator", str(part), "--size", "tiny", "--results", str(tmp_path)])
    report = (tmp_path / f"part-{part}" / "steps.md").read_text("utf-8")
    assert "| passed |" in report
    assert "failed" not in report


@pytest.mark.slow
def test_jaxgen_is_measured_on_a_mesh_and_plotted(model, tmp_path):
    words = ["--rows", "2", "--prompt", "8", "--new-tokens", "100", "--rounds", "1", "--mesh", "1x2"]
    result = run("batch", model, tmp_path, *words)
    assert result["programs"]["jaxgen:bfloat16"]["devices"] == 2
    assert all(speed > 0 for speed in result["probe"]["bytes_per_second"].values())
    assert medians(result, "bandwidth_share")["jaxgen:bfloat16"] > 0
    pictures = {file.stem for file in tmp_path.glob("*/*.svg")}
    assert pictures == ({"batch-tiny-mesh-1x2", "roofline-tiny-mesh-1x2"} if find_spec("matplotlib") else set())


@pytest.mark.slow
@pytest.mark.parametrize("subcommand", suites.SUITES)
def test_every_subcommand_runs(subcommand, model, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "TRIES", 50)  # the noise may exceed the time of a tiny model's steps
    words = ["--prompt", "8", "--rows", "1", "--rounds", "1"]
    programs = ["jaxgen"]
    if environments := os.environ.get("JAXGEN_ENVIRONMENTS"):  # made by `python -m benchmarks environments`
        words += ["--environments", environments]
        programs += ["transformers:static", "llama.cpp", "keras-hub"]
    result = run(subcommand, model, tmp_path, *words, "--programs", *programs)
    assert all(
        not own.get("refused") for case in result["cases"] for name, own in case["programs"].items() if "jaxgen" in name
    )


@pytest.mark.slow
def test_every_processor_is_measured():
    calls = processors._calls(vocab=600, rows=2)
    assert {option.name for option in OPTIONS.values() if option.stage} <= set(calls)
    for name, (function, *arguments) in calls.items():
        result = jax.jit(function)(*arguments)
        assert result.shape in ((2, 600), (2,)), name


@pytest.mark.slow
@pytest.mark.parametrize("workaround", workarounds.WORKAROUNDS, ids=lambda one: f"{one.name}, {one.case}")
def test_every_workaround_can_be_left_out(workaround, wide_model):
    params, cfg = load_hf(wide_model, dtype=workaround.dtype, quantize=workaround.quantize)
    cfg = cfg.replace(do_sample=False, max_new_tokens=4, **dict(workaround.options))
    prepared = workarounds._prepare(params, cfg, np.ones((workaround.rows, 8), np.int32))
    programs = []
    for changes in (workaround.also, workaround.also + workaround.without):
        jax.clear_caches()
        programs.append(workarounds.lower(changes, prepared, cfg).as_text())
    assert programs[0] != programs[1]


@pytest.mark.slow
def test_workarounds_are_measured(wide_model, tmp_path):
    main(["workarounds", "--model", str(wide_model), "--results", str(tmp_path), "--turns", "1", "--only", "branch"])
    (file,) = tmp_path.glob("*/workarounds-jax-*.md")
    lines = file.read_text("utf-8").splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    assert sorted(names[1:]) == sorted(one.name for one in workarounds.WORKAROUNDS if "branch" in one.name)


@pytest.mark.slow
def test_experts_are_measured(tmp_path):
    sizes = ["--experts", "4", "--chosen", "2", "--width", "128", "--inner", "64", "--rows", "1", "80", "--turns", "2"]
    environments = os.environ.get("JAXGEN_ENVIRONMENTS")  # made by `python -m benchmarks environments`
    main(["experts", *sizes, "--results", str(tmp_path), *(["--environments", environments] if environments else [])])
    (file,) = tmp_path.glob("*/experts-jax-*.md")
    lines = [line.split(" | ") for line in file.read_text("utf-8").splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines[1:]] == ["| 1", "| 80"]
    assert all(float(line[3]) > 0 for line in lines[1:])


def test_a_greedy_call_visits_little_code():
    """Count in a new process: jax listeners and programs left behind by other tests would be counted too."""
    command = [sys.executable, "-m", "benchmarks", "calls", "--list"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"\| (\d+) \| (\d+) \| (\d+) \|", printed)
    [(files, functions, _), (_, _, calls)] = [[int(number) for number in row] for row in rows]
    assert files <= 40
    assert functions <= 254
    assert calls <= 128
    pipeline = "logits/pipeline.py"  # used only if a processor is on
    assert (ROOT / "jaxgen" / "core" / pipeline).exists()
    assert pipeline not in printed


class FakeServer(BaseHTTPRequestHandler):
    """A server that generates three words, may report `max_tokens` tokens, and refuses every fourth request."""

    protocol_version = "HTTP/1.1"
    requests: list[dict]
    numbers: Iterator[int]
    counts: bool

    def do_GET(self):
        self.reply(200, json.dumps({"data": [{"id": "fake"}]}))

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append(request)
        if next(self.numbers) % 4 == 0:
            self.reply(503, "busy")
            return
        usage = {"usage": {"completion_tokens": request["max_tokens"]}} if self.counts else {}
        ended = {"choices": [{"text": "", "finish_reason": "length"}]} | usage
        if request["stream"]:
            chunks = [{"choices": [{"text": text, "finish_reason": None}]} for text in ["", *[" the"] * 3]]
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, ended]]
            self.reply(200, f": a comment\n\n{''.join(events)}data: [DONE]\n\n")
        else:
            ended["choices"][0]["text"] = " the" * 3
            self.reply(200, json.dumps(ended))

    def reply(self, status: int, body: str):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_server_is_attacked(tmp_path):
    main(["attack", "--seconds", "0.5", "--requests", "2", "--results", str(tmp_path)])
    (file,) = tmp_path.glob("*/attack-demo.md")
    rows = [line.strip("| ").split(" | ") for line in file.read_text("utf-8").splitlines() if line.startswith("| ")]
    kinds = len(attack._kinds(random.Random(0)))
    assert len(rows) == 1 + (1 + len(attack.ATTACKS) + 1) + 1 + kinds
    assert all(float(row[-1]) <= 2 for row in rows[-kinds:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "counts"), [("--stream", True), ("--no-stream", False), ("--stream", False), ("--no-stream", True)]
)
def test_answers_of_a_server_are_counted(mode, counts, tmp_path, capsys):
    handler = type("Handler", (FakeServer,), {"requests": [], "numbers": itertools.count(1), "counts": counts})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as fake:
        threading.Thread(target=fake.serve_forever).start()
        try:
            address = f"http://127.0.0.1:{fake.server_port}"
            sizes = ["--clients", "1", "2", "--requests", "6", "--tokens", "5", "--width", "8", "--rounds", "2"]
            main(["serving", "--servers", address, *sizes, mode, "--results", str(tmp_path)])
        finally:
            fake.shutdown()
    assert "status 503: busy" in capsys.readouterr().err
    sent = handler.requests  # including the warm-up
    assert len(sent) == 2 * (6 + 1) + 2 * (6 + 2)
    assert len({request["prompt"] for request in sent}) == len(sent)
    tokenizer = Tokenizer.from_pretrained(serving.BUNDLED)
    assert {len(tokenizer.encode(request["prompt"])) for request in sent} <= {8, 9, 10}
    assert all(request["ignore_eos"] and request["model"] == "fake" for request in sent)
    (file,) = tmp_path.glob("*/serving*-demo.md")
    rows = [line.split(" | ") for line in file.read_text("utf-8").splitlines() if line.startswith("| http")]
    assert [row[1] for row in rows] == ["1", "2"]
    for row in rows:
        assert row[-2] == "12"
        assert row[-1] == "2 |"  # without the refused requests of the warm-up
        assert row[6] == ("5" if counts else "3")  # as reported by the server, or counted with the tokenizer
        assert bool(row[4]) == (mode == "--stream")


CHILD = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(str(child.pid))
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Ready).serve_forever()
"""


def test_a_server_is_stopped_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(
        serving, "_command", lambda _, args, port: [sys.executable, "-c", CHILD, str(tmp_path / "pid"), str(port)]
    )
    with serving.running(serving.server("jaxgen"), argparse.Namespace()) as address:
        assert address.startswith("http://127.0.0.1:")
        pid = int((tmp_path / "pid").read_text())
        assert Path(f"/proc/{pid}").exists()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_ends_is_an_error_with_its_messages(monkeypatch):
    monkeypatch.setattr(serving, "_command", lambda *_: [sys.executable, "-c", "import sys; sys.exit('no model')"])
    with pytest.raises(program.Failed, match=r"(?s)no model.*ended with status 1"):
        serving.running(serving.server("jaxgen"), argparse.Namespace()).__enter__()


def evaluated(responses: list, metrics: dict | None = None) -> dict:
    """Return a model's result for a task with two requests."""
    return {"metrics": metrics or {}, "requests": [[["a", "b"]], [["c", "d"]]], "responses": responses}


class Gap:
    """A model that reports a log-probability difference of `gap` between any two answers."""

    def __init__(self, gap: float):
        self.gap = gap

    def ask(self, do: str, **_) -> dict:
        assert do == "gap"
        return {"gap": self.gap}


def test_evaluations_that_agree():
    own, other = evaluated([[[-2.0, True]], [[-3.0, False]]]), evaluated([[[-2.001, True]], [[-3.0, False]]])
    assert "log-likelihoods within 5e-04" in evaluate.differ({"jaxgen": own, "hf": other}, "choices", Gap(0))
    own, other = evaluated([["x"], ["y"]]), evaluated([["x"], ["z"]])
    assert evaluate.differ({"jaxgen": own, "hf": other}, "answers", Gap(1e-5)).startswith(
        "1 of 2 answers equal, in the"
    )


@pytest.mark.parametrize(
    ("task", "own", "other", "message"),
    [
        ("choices", evaluated([[[-2.0, True]]] * 2), evaluated([[[-2.01, True]]] * 2), "differ by up to 5.0e-03"),
        ("choices", evaluated([[[-2.0, True]]] * 2, {"acc": 0.5}), evaluated([[[-2.0, True]]] * 2), "choices: "),
        ("texts", evaluated([[-2.0], [-3.0]]), evaluated([[-2.0], [-3.1]]), "differ by up to 3.2e-02"),
        ("answers", evaluated([["x"], ["y"]]), evaluated([["x"], ["z"]]), "1 of 2 answers differ"),
        ("answers", evaluated([["x"], ["y"]]), evaluated([["x"], ["y"]]) | {"requests": []}, "got different requests"),
    ],
)
def test_evaluations_that_differ_are_errors(task, own, other, message):
    with pytest.raises(program.Failed, match=message):
        evaluate.differ({"jaxgen": own, "hf": other}, task, Gap(0.5))


@pytest.mark.slow
def test_adapters_are_measured(model, tmp_path):
    sizes = ["--adapters", "2", "--rank", "2", "--rows", "2", "--rounds", "1", "--prompt", "8", "--tokens", "8"]
    main(["adapters", "--model", str(model), *sizes, "--results", str(tmp_path)])
    (file,) = tmp_path.glob("*/adapters-tiny-2x2.md")
    assert "2 adapters of rank 2 for all linear layers, 2 rows" in file.read_text("utf-8")


def test_random_checkpoint_with_experts_can_be_loaded(tmp_path):
    source = GOLDENS / "newer" / "checkpoints" / "qwen3-moe"
    main(["checkpoint", str(source), str(tmp_path / "random")])
    params, cfg = load_hf(tmp_path / "random")
    assert params["model"]["layers"]["0"]["mlp"]["experts"]["up_proj"]["weight"].shape[0] == cfg.model.num_experts


@pytest.mark.slow
def test_sampler_and_trainer_are_compared(tmp_path):
    sizes = ["--rows", "4", "--group", "2", "--tokens", "6", "--seeds", "1"]
    main(["replay", *sizes, "--results", str(tmp_path)])
    (file,) = tmp_path.glob("*/replay-demo.md")
    rows = [line.strip("| ").split(" | ") for line in file.read_text("utf-8").splitlines() if " | `score` | " in line]
    assert {row[0] for row in rows} == {"float32", "bfloat16"}
    assert all(float(row[6]) < 1e-4 for row in rows if row[0] == "float32")
