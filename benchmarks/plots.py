"""Plot results: speed against rows or tokens, bars for a single case, and a roofline for several batch sizes.

python -m benchmarks plots benchmarks/results/*/*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.program import KINDS, spec

AXES = {"rows": "rows in the batch", "prompt": "tokens in the prompt"}
# A program has the same color in all plots; its variants are lighter, and have different markers.
COLORS = {"jaxgen": "#0072b2", "transformers": "#d55e00", "llama.cpp": "#009e73", "keras-hub": "#aa4499"}
MARKS = "os^Dv<>phHdP*X8"


def main() -> None:
    for name in sys.argv[1:]:
        for picture in draw(Path(name)):
            print(picture)


def draw(file: Path) -> list[Path]:
    """Draw the plots of a result next to its JSON file; return their paths."""
    try:
        import matplotlib
    except ImportError:
        print('no plots: pip install -e ".[bench]", then python -m benchmarks plots FILE', file=sys.stderr)
        return []
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxgen"  # makes the file reproducible
    result = json.loads(file.read_text("utf-8"))
    axis, cases = result.get("axis"), result.get("cases", [])
    drawn = []
    if axis and len({case[axis] for case in cases}) > 1:
        drawn.append(_against_axis(result, file.with_suffix(".svg")))
    elif len(cases) == 1 and any(_speed(own, cases[0]) for own in cases[0]["programs"].values()):
        drawn.append(_bars(result, file.with_suffix(".svg")))
    if axis == "rows" and "probe" in result:
        drawn.append(_roofline(result, file.with_name(file.stem.replace("batch", "roofline", 1) + ".svg")))
    return drawn


def _speed(own: dict[str, Any], case: dict[str, Any]) -> dict[str, float] | None:
    """Return a program's decoding speed in a case, or its prefill speed if nothing is decoded, in tokens/s."""
    return own.get("figures", {}).get(f"{_stage(case)}_tokens_per_second")


def _stage(case: dict[str, Any]) -> str:
    return "prefill" if case["new_tokens"] == 1 else "decode"


def style(program: str) -> dict[str, Any]:
    """Return the label, color and marker of a program, given its name in the results."""
    from matplotlib import colors

    own = spec(program)
    kind = KINDS[own.kind]
    number = kind.variants.index(own.variant) + len(kind.variants) * kind.dtypes.index(own.dtype)
    light = 0.7 * (1 - 0.6**number)
    color = [light + (1 - light) * part for part in colors.to_rgb(COLORS.get(own.kind, "black"))]
    return {"label": own.spoken, "color": color, "marker": MARKS[number]}


def _figure(title: str, result: dict[str, Any], height: float = 4.5):
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    machine = result["machine"]
    axes.set_title(f"{title}: {result['model']['name']}, {machine['cpu']}, {machine['cores']} cores", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _measure(unit: str, result: dict[str, Any]) -> str:
    rounds = result["rounds"]
    return f"{unit}: median, smallest and largest of {rounds} rounds" if rounds > 1 else unit


def _save(figure, target: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)
    return target


def _plain(axis, ticks: list[int] | None = None) -> None:
    """Label an axis with plain numbers: the given ones, or 1, 2, 5, 10, ... on a logarithmic scale."""
    from matplotlib import ticker

    if axis.get_scale() == "log":
        axis.set_major_locator(ticker.FixedLocator(ticks) if ticks else ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.9g}")


def _against_axis(result: dict[str, Any], target: Path) -> Path:
    """Draw tokens/s against rows or prompt length, with error bars from the smallest to the largest value."""
    axis, cases = result["axis"], result["cases"]
    figure, axes = _figure(result["title"], result)
    axes.set(xlabel=AXES[axis], ylabel=_measure(f"{_stage(cases[0])}, tokens/s", result))
    ticks = sorted({case[axis] for case in cases})
    other = "prompt" if axis == "rows" else "rows"
    fixed = sorted({case[other] for case in cases})
    for number, program in enumerate(result["programs"]):
        shift = (ticks[-1] / ticks[0]) ** (0.005 * (2 * number + 1 - len(result["programs"])))  # separates error bars
        for value in fixed:
            points = [
                (case[axis] * shift, speed)
                for case in cases
                if case[other] == value and (speed := _speed(case["programs"][program], case))
            ]
            look = style(program) | {"linestyle": "-" if value == fixed[0] else ":"}
            if len(fixed) > 1:
                look["label"] += f", {_size(other, value)}"
            _line(axes, points, look)
    if axis == "rows" and "probe" in result:
        first, facts = next(iter(result["programs"].items()))
        limit = result["probe"]["bytes_per_second"]["median"] / facts["step_bytes"]
        label = f"{style(first)['label']} at full bandwidth"
        axes.plot(ticks, [limit * count for count in ticks], "k--", lw=1, label=label)
    axes.set_xscale("log")
    _plain(axes.xaxis, ticks)
    if axis == "rows":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    _plain(axes.yaxis)
    figure.legend(loc="outside right upper", fontsize="small")
    return _save(figure, target)


def _line(axes, points: list[tuple[float, dict[str, float]]], look: dict[str, Any]) -> None:
    if points:
        x, figures = zip(*points, strict=True)
        axes.errorbar(
            x, [figure["median"] for figure in figures], yerr=_spread(figures), ms=5, lw=1.5, capsize=3, **look
        )


def _spread(figures) -> list[list[float]]:
    """Return the distances from the medians down to the smallest and up to the largest values."""
    down = [figure["median"] - figure["min"] for figure in figures]
    return [down, [figure["max"] - figure["median"] for figure in figures]]


def _bars(result: dict[str, Any], target: Path) -> Path:
    """Draw a bar for each program's tokens/s."""
    (case,) = result["cases"]
    speeds = {program: speed for program, own in case["programs"].items() if (speed := _speed(own, case))}
    title = f"{_stage(case).capitalize()}, {_size('rows', case['rows'])}, prompt of {_size('prompt', case['prompt'])}"
    figure, axes = _figure(title, result, height=1.2 + 0.4 * len(speeds))
    axes.set_xlabel(_measure("tokens/s", result))
    looks = [style(program) for program in speeds]
    figures = list(speeds.values())
    bars = axes.barh(
        [look["label"] for look in looks],
        [figure["median"] for figure in figures],
        xerr=_spread(figures),
        color=[look["color"] for look in looks],
        capsize=3,
    )
    axes.bar_label(bars, [_number(figure["median"]) for figure in figures], padding=4)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.1)
    _plain(axes.xaxis)
    axes.invert_yaxis()
    return _save(figure, target)


def _size(axis: str, value: int) -> str:
    if axis == "rows":
        return "1 row" if value == 1 else f"{value} rows"
    return f"{value:,} tokens"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _roofline(result: dict[str, Any], target: Path) -> Path:
    """Draw decoding FLOP/s against FLOP per byte of weights, with the roof set by the measured bandwidth and FLOP/s."""
    bandwidth, peak = (result["probe"][name]["median"] for name in ("bytes_per_second", "flops"))
    figure, axes = _figure("Roofline", result)
    axes.set(xlabel="FLOP per byte of weights", ylabel=_measure("decode, GFLOP/s", result))
    operations = 2 * result["model"]["weights"]  # FLOP per token
    intensities = []
    for program, facts in result["programs"].items():
        points = []
        for case in result["cases"]:
            if speed := _speed(case["programs"][program], case):
                intensity = operations * case["rows"] / facts["step_bytes"]
                points.append((intensity, {key: operations * value / 1e9 for key, value in speed.items()}))
                intensities.append(intensity)
        _line(axes, points, style(program))
    low, high = min(intensities) / 2, max(max(intensities), peak / bandwidth) * 2
    x = [low, peak / bandwidth, high]
    roof = [min(value * bandwidth, peak) / 1e9 for value in x]
    axes.plot(x, roof, "k-", lw=1, label=f"{bandwidth / 1e9:.1f} GB/s, {peak / 1e9:,.0f} GFLOP/s")
    axes.loglog()
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    figure.legend(loc="outside right upper", fontsize="small")
    return _save(figure, target)


if __name__ == "__main__":
    main()
