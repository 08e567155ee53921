"""A picture of a training run: the losses and the learning rate by step, as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Point = tuple[float, float]
LEFT, RIGHT, WIDTH, HEIGHT = 70, 700, 720, 480
MOST = 300  # the maximum number of points in a line; more points are averaged in groups
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1c1e21; }
.back { fill: #fff; } .grid { stroke: #d9dce3; } .line { fill: none; stroke-width: 2; stroke-linecap: round; }
.train { stroke: #2757c4; } .held-out { stroke: #c2570c; } .dot { fill: #c2570c; } .hover { fill: transparent; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e6e6; } .back { fill: #16181d; } .grid { stroke: #333843; }
  .train { stroke: #8ab0ff; } .held-out { stroke: #ff9d3d; } .dot { fill: #ff9d3d; }
}
"""


def curve(entries: Iterable[dict[str, Any]]) -> str:
    """Return the picture of a record's entries. Point at a line to see its values."""
    entries = list(entries)
    losses, rates = (_averaged(_points(entries, name)) for name in ("loss", "learning_rate"))
    held_out = _points(entries, "eval_loss")
    last = max([1, *(step for step, _ in losses + held_out)])
    parts = [f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>', *_legend(held_out)]
    parts += _panel(50, 310, last, [("train", losses), ("held-out", held_out)], _loss_ticks(losses + held_out))
    parts.append(f'<text x="{LEFT}" y="362">learning rate</text>')
    parts += _panel(372, 436, last, [("train", rates)], _ticks(0.0, max((rate for _, rate in rates), default=1.0), 1))
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}</style>\n{body}\n</svg>\n'


def _points(entries: Iterable[dict[str, Any]], name: str) -> list[Point]:
    return [(entry["step"], entry[name]) for entry in entries if name in entry]


def _averaged(points: Sequence[Point]) -> list[Point]:
    size = math.ceil(len(points) / MOST) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _legend(held_out: Sequence[Point]) -> list[str]:
    def entry(x: int, kind: str, text: str) -> str:
        return f'<path class="line {kind}" d="M{x} 26h24"/><text x="{x + 32}" y="30">{text}</text>'

    parts = [entry(LEFT, "train", "training loss")]
    later = [point for point in held_out if point[0] > 0]
    if held_out:
        step, loss = min(later or held_out, key=lambda point: point[1])
        parts.append(entry(LEFT + 170, "held-out", f"held-out loss, lowest {loss:.4g} at step {step}"))
    return parts


def _panel(
    top: int, bottom: int, last: float, lines: Sequence[tuple[str, Sequence[Point]]], ticks: Sequence[float]
) -> list[str]:
    """Return the parts of a panel: a grid with labels, and lines over the steps from 0 to `last`.

    `ticks` are the labeled values, which include both ends. The scale is logarithmic if they are not equidistant.
    """
    is_log = len(ticks) > 2 and not math.isclose(ticks[1] - ticks[0], ticks[2] - ticks[1])
    scale = math.log if is_log else float
    low, high = scale(ticks[0]), scale(ticks[-1])

    def place(step: float, value: float) -> tuple[str, str]:
        x = LEFT + (RIGHT - LEFT) * step / last
        return f"{x:.1f}", f"{bottom - (bottom - top) * (scale(value) - low) / (high - low):.1f}"

    parts = []
    for tick in ticks:
        y = place(0, tick)[1]
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in (tick for tick in _ticks(0, last, 8) if tick <= last and tick == int(tick)):
        parts.append(f'<text x="{place(tick, ticks[0])[0]}" y="{bottom + 20}" text-anchor="middle">{tick:.0f}</text>')
    for kind, points in lines:
        places = [place(*point) for point in points]
        parts.append(f'<polyline class="line {kind}" points="{" ".join(map(",".join, places[:1] + places))}"/>')
        look = ("dot", 4) if kind == "held-out" else ("hover", 6)
        for (x, y), (step, value) in zip(places, points, strict=True):
            title = f"<title>step {step}: {value:.4g}</title>"
            parts.append(f'<circle class="{look[0]}" cx="{x}" cy="{y}" r="{look[1]}">{title}</circle>')
    return parts


def _loss_ticks(points: Sequence[Point]) -> list[float]:
    """Return round numbers that include all losses. They are equidistant unless the losses differ by a factor of 10."""
    values = [value for _, value in points] or [1.0]
    low, high = min(values), max(values)
    if not 0 < 10 * low < high:
        return _ticks(low, high, 6)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(number for number, tick in enumerate(ticks) if tick <= low)
    return ticks[first : min(number for number, tick in enumerate(ticks) if tick >= high) + 1]


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return about `most` round numbers, at equal distances, that include both limits."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [distance * number for number in range(math.floor(low / distance), math.ceil(high / distance) + 1)]
