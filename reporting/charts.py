"""Line charts as inline SVG for the HTML report: no script; the colours come from the page's CSS, light or dark."""

import html
import math
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[float, float]]  # (x, y); a non-finite y breaks the line

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 54, 22, 8, 36  # margins around the plotting area
MOST_POINTS = 300  # more than a chart this wide can show
LOG_FROM = 100.0  # a chart whose largest value is this many times its smallest gets a logarithmic axis


def number(value: float) -> str:
    """A short figure for people: `0.0123`, `4.57`, `1,234`, `20k`, `1.2e-05`; `not finite` for NaN and infinities."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size >= 10_000 and value % 1000 == 0:
        return f"{value / 1000:,.0f}k"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-4 or value == 0 else f"{value:.2g}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) inside [low, high], at most `most`, at least one."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(m * power for m in (1, 2, 5, 10, 20) if span / (m * power) <= most - 1)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)] or [low]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Powers of ten inside [low, high] (both positive), thinned to at most `most`."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / most))
    return [10.0**power for power in range(first, last + 1, stride)]


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points: means of runs of equal length; a non-finite value makes its mean non-finite."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return points
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


class _Scale:
    """Maps values to pixels along one axis."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool, pad: float) -> None:
        low, high = min(values), max(values)
        if log:
            low, high = math.log10(low), math.log10(high)
        if low == high:  # a flat line sits in the middle
            margin = abs(low) * 0.1 or 1.0
        else:
            margin = (high - low) * pad
        self.log, self.low, self.high, self.start, self.end = log, low - margin, high + margin, start, end

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return log_ticks(10.0**self.low, 10.0**self.high) if self.log else ticks(self.low, self.high)


def _path(points: Points, x: _Scale, y: _Scale) -> str:
    """The `d` of an SVG path; it starts anew after each non-finite value."""
    parts, pen_down = [], False
    for px, py in points:
        if math.isfinite(py):
            parts.append(f"{'L' if pen_down else 'M'}{x(px):.1f} {y(py):.1f}")
        pen_down = math.isfinite(py)
    return "".join(parts)


def _axes(x: _Scale, y: _Scale, x_label: str) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in y.ticks():
        at = y(value)
        parts.append(f'<path class="rule" d="M{LEFT} {at:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in x.ticks():
        parts.append(f'<path class="rule" d="M{x(value):.1f} {bottom}v4"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{number(value)}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{html.escape(x_label)}</text>')
    return parts


def line_chart(series: Mapping[str, Points], *, title: str, x_label: str = "step") -> str:
    """An HTML `<figure>` with the title, a legend where there are several series, and the curves as SVG.

    The y axis is logarithmic when all values are positive and the largest is 100 times the smallest or more.

    Raises:
        ValueError: no finite value in any series.
    """
    series = {name: thin(points) for name, points in series.items()}
    finite = [(x, y) for points in series.values() for x, y in points if math.isfinite(y)]
    if not finite:
        raise ValueError(f"chart {title!r} has no finite value")
    values = [y for _, y in finite]
    log = min(values) > 0 and max(values) / min(values) >= LOG_FROM
    x = _Scale([x for x, _ in finite], LEFT, WIDTH - RIGHT, log=False, pad=0.0)
    y = _Scale(values, HEIGHT - BOTTOM, TOP, log=log, pad=0.04)
    curves, legend = [], []
    for index, (name, points) in enumerate(series.items()):
        colour = f"s{index % 4}"
        last = [(px, py) for px, py in points if math.isfinite(py)][-1:]
        curves.append(f'<path class="curve {colour}" d="{_path(points, x, y)}"/>')
        curves += [f'<circle class="dot {colour}" cx="{x(px):.1f}" cy="{y(py):.1f}" r="2.5"/>' for px, py in last]
        figure = f" <b>{number(last[0][1])}</b>" if last else ""
        legend.append(f'<span class="key {colour}">{html.escape(name)}{figure}</span>')
    scale = " (log scale)" if log else ""
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}{scale}<span class="keys">{"".join(legend)}</span>'
        f'</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}{scale}">'
        f"{''.join(_axes(x, y, x_label) + curves)}</svg></figure>"
    )
