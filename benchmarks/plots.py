"""Plots of results: one per JSON file, and a roofline where the batch grows.

python -m benchmarks plots benchmarks/results/*/*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

AXES = {"rows": "rows in the batch", "prompt": "tokens in the context"}


def main() -> None:
    for name in sys.argv[1:]:
        print(*draw(Path(name)), sep="\n")


def draw(file: Path) -> list[Path]:
    """Draw what a result shows, beside its JSON file; return the pictures."""
    try:
        import matplotlib
    except ImportError:
        print('no plots: pip install -e ".[bench]", then python -m benchmarks plots FILE', file=sys.stderr)
        return []
    matplotlib.use("svg")
    result = json.loads(file.read_text("utf-8"))
    drawn = []
    if result["axis"]:
        drawn.append(_against_axis(result, file.with_suffix(".svg")))
    if result["axis"] == "rows" and "probe" in result:
        drawn.append(_roofline(result, file.with_name(file.stem.replace("batch", "roofline", 1) + ".svg")))
    return drawn


def _figure(title: str, x: str, y: str):
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure, axes, target: Path) -> Path:
    from matplotlib import pyplot

    axes.legend(fontsize="small")
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)
    return target


def _against_axis(result: dict[str, Any], target: Path) -> Path:
    """Draw tokens/s against rows or prompt, with bars from the smallest to the largest."""
    axis, prefill = result["axis"], result["cases"][0]["new_tokens"] == 1
    name = "prefill_tokens_per_second" if prefill else "decode_tokens_per_second"
    other = "prompt" if axis == "rows" else "rows"
    figure, axes = _figure(_title(result), AXES[axis], "prefill, tokens/s" if prefill else "decode, tokens/s")
    fixed = sorted({case[other] for case in result["cases"]})
    for program in result["programs"]:
        for value in fixed:
            points = [
                (case[axis], case["programs"][program]["figures"][name])
                for case in result["cases"]
                if case[other] == value and "figures" in case["programs"][program]
            ]
            label = program if len(fixed) == 1 else f"{program}, {value} {other}"
            _line(axes, points, label)
    if axis == "rows" and "probe" in result:
        rows = [case["rows"] for case in result["cases"]]
        limit = result["probe"]["bytes_per_second"]["median"] / next(iter(result["programs"].values()))["step_bytes"]
        axes.plot(rows, [limit * count for count in rows], "k--", lw=1, label="the first program at the bandwidth")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({case[axis] for case in result["cases"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    return _save(figure, axes, target)


def _line(axes, points: list[tuple[int, dict[str, float]]], label: str) -> None:
    if points:
        x, figures = zip(*points, strict=True)
        middle = [figure["median"] for figure in figures]
        down = [figure["median"] - figure["min"] for figure in figures]
        up = [figure["max"] - figure["median"] for figure in figures]
        axes.errorbar(x, middle, yerr=[down, up], marker="o", ms=4, lw=1.3, capsize=3, label=label)


def _roofline(result: dict[str, Any], target: Path) -> Path:
    """Draw FLOP/s of decoding against FLOP per byte of weights, below the measured bandwidth and product."""
    bandwidth, peak = (result["probe"][name]["median"] for name in ("bytes_per_second", "flops"))
    figure, axes = _figure(f"Roofline, {_title(result)}", "FLOP per byte of weights", "GFLOP/s")
    operations = 2 * result["model"]["weights"]  # of a row's token
    intensities = []
    for program, facts in result["programs"].items():
        points = []
        for case in result["cases"]:
            if "figures" in (own := case["programs"][program]):
                intensity = operations * case["rows"] / facts["step_bytes"]
                speeds = own["figures"]["decode_tokens_per_second"]
                points.append((intensity, {key: operations * value / 1e9 for key, value in speeds.items()}))
                intensities.append(intensity)
        _line(axes, points, program)
    low, high = min(intensities) / 2, max(max(intensities), peak / bandwidth) * 2
    x = [low, peak / bandwidth, high]
    roof = [min(value * bandwidth, peak) / 1e9 for value in x]
    label = f"{bandwidth / 1e9:.1f} GB/s, {peak / 1e9:,.0f} GFLOP/s"
    axes.plot(x, roof, "k-", lw=1, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    return _save(figure, axes, target)


def _title(result: dict[str, Any]) -> str:
    return f"{result['model']['name']}, {result['machine']['cpu']}, {result['machine']['cores']} cores"


if __name__ == "__main__":
    main()
