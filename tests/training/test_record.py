"""The record of a training run, its picture, evaluations, the best state, and continuing."""

import dataclasses
import json
import re
import types
import warnings
import xml.etree.ElementTree
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import ConfigError, InputError
from jaxgen.errors import JaxgenWarning
from jaxgen.training import record as module
from jaxgen.training.curve import curve
from jaxgen.training.dataset import pack, shuffled
from jaxgen.training.examples import Example
from jaxgen.training.loop import Metrics, TrainConfig, TrainState, train
from jaxgen.training.record import Evaluation, Meter, Record, duration
from jaxgen.training.run_log import RunLog
from tests.support.models import model_config, random_params

MODEL = model_config(tie_word_embeddings=True, num_hidden_layers=1)
PARAMS = random_params(MODEL)
CFG = TrainConfig(steps=12, learning_rate=1e-2, warmup=2)
RNG = np.random.default_rng(0)
DATA = pack([Example(*[RNG.integers(0, 97, 12).tolist()] * 2) for _ in range(8)], 32)[0]
BATCHES = shuffled(DATA, 2, seed=0)
LOSSES = [5.0, 4.0, 3.0, 3.5, 2.0, 2.5, 2.2, 2.1]  # before, and after each evaluation


class Losses:
    """A held-out loss that returns the given numbers in turn, and keeps the parameters that it was called with."""

    def __init__(self, losses=LOSSES):
        self.left, self.seen = list(losses), []

    def __call__(self, params) -> float:
        self.seen.append(jax.tree.map(np.asarray, params))
        return self.left.pop(0)


def run(directory: Path | None, loss=None, cfg=CFG, stop: int | None = None, lines=None, **options):
    """Train with an evaluation after every second step; raise KeyboardInterrupt before step `stop`."""

    def batches(step):
        if step == stop:
            raise KeyboardInterrupt
        return BATCHES(step)

    evaluation = Evaluation(loss or Losses(), 2, **options)
    report = (lambda line: None) if lines is None else lines.append
    settings = {"save_every": 4, "report_every": 3, "report": report, "evaluation": evaluation}
    return train(PARAMS, batches, model=MODEL, cfg=cfg, directory=directory, **settings)


def entries(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "training.jsonl").read_text().splitlines()]


def without_speed(directory: Path) -> list[dict]:
    return [
        {name: value for name, value in entry.items() if name != "tokens_per_second"} for entry in entries(directory)
    ]


def saved(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "states").iterdir())


def assert_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def damage(directory: Path, step: int) -> None:
    """Flip a bit in the largest file of a state."""
    file = max((directory / "states" / str(step)).rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


class TestRecord:
    @pytest.mark.slow
    def test_each_report_and_each_evaluation_is_an_entry(self, tmp_path):
        run(tmp_path)
        found = entries(tmp_path)
        assert [(entry["step"], entry["eval_loss"]) for entry in found if "eval_loss" in entry] == [
            (2 * number, loss) for number, loss in enumerate(LOSSES[:7])
        ]
        steps = [entry for entry in found if "loss" in entry]
        assert [entry["step"] for entry in steps] == [3, 6, 9, 12]
        for entry in steps:
            assert entry.keys() == {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second"}
            assert entry["learning_rate"] == pytest.approx(float(CFG.rate(entry["step"] - 1)), rel=1e-5)
            assert entry["tokens_per_second"] > 0
        assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]

    @pytest.mark.slow
    def test_killed_run_has_the_same_record(self, tmp_path):
        whole = run(tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "killed", stop=7)
        assert entries(tmp_path / "killed")[-1]["step"] == 6  # was recorded, but not saved
        lines = []
        # The state after step 4 counts the loss of step 4, which has not been reported.
        assert_equal(run(tmp_path / "killed", Losses(LOSSES[3:]), lines=lines), whole)
        assert lines[0] == f"resuming after step 4 from the state in {tmp_path / 'killed'}"
        assert without_speed(tmp_path / "killed") == without_speed(tmp_path / "whole")

    def test_without_a_directory_nothing_is_written(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        run(None)
        assert list(tmp_path.iterdir()) == []


class TestBest:
    def test_the_parameters_with_the_lowest_held_out_loss_are_returned(self, tmp_path):
        loss = Losses()
        lines = []
        assert_equal(run(tmp_path, loss, keep_best=True, lines=lines), loss.seen[4])
        assert "step 8/12  held-out loss 2.0000, the lowest so far" in lines
        assert "step 10/12  held-out loss 2.5000" in lines
        assert saved(tmp_path) == [8, 12]
        last = Losses()
        assert_equal(run(tmp_path / "last", last), last.seen[6])

    @pytest.mark.slow
    def test_killed_run_restores_the_best_state(self, tmp_path):
        losses = [5.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0]
        loss = Losses(losses)
        expected = run(tmp_path / "whole", loss, keep_best=True)
        assert_equal(expected, loss.seen[1])
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "killed", Losses(losses), keep_best=True, stop=9)
        assert saved(tmp_path / "killed") == [2, 4, 8]
        assert_equal(run(tmp_path / "killed", Losses(losses[5:]), keep_best=True), expected)

    def test_damaged_best_state_draws_a_warning(self, tmp_path):
        losses = [5.0, 2.0, 3.0, 2.5, 3.0, 2.7, 2.6]
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, Losses(losses), keep_best=True, stop=9)
        damage(tmp_path, 2)
        rest = Losses(losses[5:])
        with pytest.warns(JaxgenWarning) as told:
            assert_equal(run(tmp_path, rest, keep_best=True), rest.seen[1])
        assert "the state of step 2" in str(told[0].message)
        assert "the held-out loss was lowest at step 2, but no undamaged state of that step is left" in str(
            told[1].message
        )

    def test_patience(self, tmp_path):
        lines = []
        loss = Losses()
        best = run(tmp_path, loss, keep_best=True, patience=1, lines=lines)
        assert_equal(best, loss.seen[2])
        assert lines[-1] == "stopping after step 6: the held-out loss has not been lower since step 4"
        assert saved(tmp_path) == [4, 6]
        nothing = Losses([])
        assert_equal(run(tmp_path, nothing, keep_best=True, patience=1), best)  # the run is still over
        more = Losses(LOSSES[4:])
        assert_equal(run(tmp_path, more, keep_best=True, patience=3), more.seen[0])  # until it has more patience
        assert entries(tmp_path)[-1]["step"] == 12

    @pytest.mark.parametrize(("options", "name"), [({"every": 0}, "every"), ({"patience": 0}, "patience")])
    def test_bad_numbers_are_refused(self, options, name):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
            Evaluation(Losses(), **options)

    def test_keep_best_requires_a_directory(self):
        with pytest.raises(ConfigError, match="keep_best=True needs a directory"):
            run(None, keep_best=True)

    def test_non_finite_held_out_loss_is_an_error(self, tmp_path):
        with pytest.raises(ConfigError, match="training diverged: the loss is nan at step 2"):
            run(tmp_path, Losses([5.0, float("nan")]))
        with pytest.raises(ConfigError, match="the held-out loss is nan before the first step: check"):
            run(tmp_path / "b", Losses([float("nan")]))

    def test_the_record_of_a_run_that_stops_early_has_its_last_steps(self, tmp_path):
        run(tmp_path, Losses([5.0, 4.0, 4.5]), patience=1)
        assert [(entry["step"], "loss" in entry) for entry in entries(tmp_path)[-2:]] == [(4, False), (4, True)]
        steps = [entry["step"] for entry in entries(tmp_path) if "loss" in entry]
        assert steps == [3, 4]

    @pytest.mark.parametrize(
        ("loss", "weight", "fault"),
        [
            (float("nan"), 1.0, "the loss is nan at step 2"),
            (1.0, float("inf"), "parameters are infinite or NaN after step 3"),
        ],
    )
    def test_a_state_of_a_run_that_has_diverged_is_not_saved(self, tmp_path, loss, weight, fault):
        log = RunLog(9, tmp_path, "", None, None)
        state = TrainState.create({"weight": jnp.ones(3)}, CFG)
        log.begin(state)
        often = {"report_every": 100, "save_every": 1}
        log.count(1, state, Metrics(*np.ones(4)), 7, **often)
        log.count(2, state, Metrics(loss, *np.ones(3)), 7, report_every=100, save_every=100)
        worse = state.replace(params={"weight": jnp.array([1.0, 1.0, weight])})
        with pytest.raises(ConfigError, match=f"training diverged: {fault}; lower the learning rate"):
            log.count(3, worse, Metrics(*np.ones(4)), 7, **often)
        assert saved(tmp_path) == [1]


class TestContinuing:
    @pytest.mark.slow
    def test_more_steps(self, tmp_path):
        run(tmp_path)
        lines = []
        run(tmp_path, Losses([1.9, 1.8]), dataclasses.replace(CFG, steps=16, warmup=3), lines=lines)
        assert lines[0] == f"resuming after step 12 from the state in {tmp_path}"
        found = entries(tmp_path)
        assert [entry["step"] for entry in found if "loss" in entry] == [3, 6, 9, 12, 15, 16]
        assert [entry["step"] for entry in found if "eval_loss" in entry] == [*range(0, 17, 2)]
        assert found[-2]["learning_rate"] == pytest.approx(1e-2 * CFG.final_rate, rel=0.3)

    def test_fewer_steps(self, tmp_path):
        run(tmp_path)
        with pytest.raises(InputError, match="has the state after 12 steps, but steps is 8: use more steps"):
            run(tmp_path, cfg=dataclasses.replace(CFG, steps=8))

    def test_a_damaged_state_is_left_out(self, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, stop=11)
        assert saved(tmp_path) == [4, 8]
        damage(tmp_path, 8)
        lines = []
        with pytest.warns(JaxgenWarning, match="the state of step 8 in .* is damaged and will not be used: .* differs"):
            trained = run(tmp_path, Losses(LOSSES[3:]), lines=lines)
        assert lines[0] == f"resuming after step 4 from the state in {tmp_path}"
        assert_equal(trained, run(tmp_path / "whole"))
        assert without_speed(tmp_path) == without_speed(tmp_path / "whole")
        assert saved(tmp_path) == [8, 12]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_equal(run(tmp_path, Losses([])), trained)


class TestMeter:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(0.2, "0 s"), (119, "119 s"), (120, "2 min"), (7100, "118 min"), (7200, "2.0 h"), (90_000, "25.0 h")],
    )
    def test_durations(self, seconds, text):
        assert duration(seconds) == text

    def test_speed_and_time_left(self, monkeypatch):
        clock = types.SimpleNamespace(now=0.0)
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
        meter = Meter(10, [])
        metrics = types.SimpleNamespace(loss=1.0, tokens=2.0, gradient_norm=3.0, learning_rate=4.0)
        lines = []
        for step, seconds in enumerate((50, 2, 2, 2), start=1):  # the first step includes compiling
            clock.now += seconds
            meter.count(metrics, 10)
            with meter.paused():
                clock.now += 3
            values, line = meter.report(step, metrics)
            assert values["tokens_per_second"] == 10 / seconds
            lines.append(line)
        assert lines[0].endswith("0 tokens/s")
        assert [re.search(r"(\d+) s left", line)[1] for line in lines[1:]] == ["40", "35", "30"]


class TestCurve:
    SVG = "{http://www.w3.org/2000/svg}"

    def drawn(self, found: list[dict]) -> dict[str, list[tuple[float, float]]]:
        picture = xml.etree.ElementTree.fromstring(curve(found))
        self.labels = [element.text for element in picture.iter(f"{self.SVG}text")]
        return {
            line.attrib["class"] + str(number): [
                tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()
            ]
            for number, line in enumerate(picture.iter(f"{self.SVG}polyline"))
        }

    def test_losses_and_rates(self):
        found = [{"step": step, "loss": 3.0 - step / 10, "learning_rate": 1e-3 * step} for step in range(1, 11)]
        lines = self.drawn([{"step": 0, "eval_loss": 3.0}, *found, {"step": 10, "eval_loss": 2.5}])
        training, held_out, rate = (lines[name][1:] for name in ("line train0", "line held-out1", "line train2"))
        assert len(training) == len(rate) == 10
        assert [x for x, _ in held_out] == [70.0, 700.0]
        assert training[-1][0] == 700.0
        heights = [y for _, y in training]
        assert heights == sorted(heights)
        assert np.ptp(np.diff(heights)) < 0.2  # the scale is linear
        assert "held-out loss, lowest 2.5 at step 10" in self.labels

    def test_losses_of_several_orders_of_magnitude(self):
        (_, *training), _, _ = self.drawn([{"step": step, "loss": 10.0 / 4**step} for step in range(1, 5)]).values()
        heights = [y for _, y in training]
        assert np.ptp(np.diff(heights)) < 0.2  # the scale is logarithmic

    def test_long_runs_are_averaged(self):
        (training, *_) = self.drawn([{"step": step, "loss": 1.0 + step % 2} for step in range(1, 10_001)]).values()
        assert len(training) < 302
        assert len({y for _, y in training}) == 1

    @pytest.mark.parametrize("found", [[], [{"step": 1, "loss": 0.0}], [{"step": 0, "eval_loss": 2.0}]])
    def test_short_runs(self, found):
        assert len(self.drawn(found)) == 3

    def test_plot_is_written(self, tmp_path):
        record = Record([], tmp_path)
        record.add(1, loss=2.0, learning_rate=0.1)
        record.draw()
        assert (tmp_path / "training.svg").read_text() == curve(record.entries)
