"""Line charts as inline SVG for the HTML report: drawn by matplotlib, coloured by the page's CSS, light or dark."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

Points = Sequence[tuple[float, float]]  # (x, y); a non-finite y breaks the line

SIZE = 4.4, 2.2  # inches of 100 CSS px
MOST_POINTS = 300  # more than a chart this wide can show
DOT = 5.0  # width in points of a point without a line
LOG_FROM = 100.0  # a chart whose largest value is this many times its smallest gets a logarithmic axis
NAMES = ("c0", "c1", "c2", "c3", "soft", "line")  # of the page's colours
COLOURS = {f"#00000{index}": f"var(--{name})" for index, name in enumerate(NAMES, 1)}
*CURVES, SOFT, LINE = COLOURS  # stand-ins that no other part of a drawing has
STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "duet", "font.family": "DejaVu Sans", "font.size": 8},
    **{"axes.edgecolor": SOFT, "axes.labelcolor": SOFT, "xtick.labelcolor": SOFT, "ytick.labelcolor": SOFT},
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.color": LINE, "xtick.major.size": 0, "ytick.major.size": 0},
    **{"axes.spines.top": False, "axes.spines.right": False},
}


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


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points: means of runs of equal length; a non-finite value makes its mean non-finite."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return points
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


class Chart:
    """The curves of some series in one chart.

    The y axis is logarithmic when all values are positive and the largest is 100 times the smallest or more.
    """

    def __init__(self, series: Mapping[str, Points], *, title: str) -> None:
        """Raises ValueError if there is no finite value in any series."""
        values = [y for points in series.values() for _, y in points if math.isfinite(y)]
        if not values:
            raise ValueError(f"chart {title!r} has no finite value")
        log = min(values) > 0 and max(values) / min(values) >= LOG_FROM
        last = {name: [y for _, y in points if math.isfinite(y)][-1:] for name, points in series.items()}
        self.title = title + " (log scale)" * log
        # a curve's name and its last finite value, in the order of the colours
        self.legend = [(name, number(value[0]) if value else "") for name, value in last.items()]
        # holds numbers and the word for the x axis alone: nothing that a run wrote
        self.svg = Markup(_svg([thin(points) for points in series.values()], log=log))


def _svg(curves: Sequence[Points], *, log: bool) -> str:
    from matplotlib import rc_context, ticker  # a second that no start of a training should wait for
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=SIZE)
        axes = figure.add_axes((0.12, 0.17, 0.85, 0.8), yscale="log" if log else "linear")
        for index, points in enumerate(curves):
            colour, there = CURVES[index % 4], [False, *(math.isfinite(y) for _, y in points), False]
            # the finite points that no line leads to, because their neighbours are not
            dots = [p for at, p in enumerate(points, 1) if there[at] and not (there[at - 1] or there[at + 1])]
            if len(dots) < sum(there):
                axes.plot(*zip(*points, strict=True), color=colour)
            for dot in dots:  # not a marker: those stand in <defs>
                axes.plot(*zip(dot, dot, strict=True), color=colour, linewidth=DOT, solid_capstyle="round")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(
            ticker.LogLocator(numticks=6) if log else ticker.MaxNLocator(5, steps=[1, 2, 5, 10])
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: number(value))
        axes.minorticks_off()
        axes.set_xlabel("step")
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    # what would reach the whole page is left out: rules for every element, and names that each chart has
    svg = re.sub(r"<defs>.*?</defs>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' (id|clip-path|width|height)="[^"]*"', "", svg)
    return re.sub("|".join(COLOURS), lambda found: COLOURS[found[0]], svg)
