"""Two runs side by side: their figures in a table, their curves in the same charts."""

import math
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import reporting
from reporting import figures
from reporting.charts import Chart, line_chart
from reporting.report import SHOWN_AT_ONCE, chart_of
from reporting.run_files import Run

Row = tuple[str, str, str]  # what it is, and the figure of each run


def compare_page(names: tuple[str, str], runs: tuple[Run, Run]) -> str:
    """The HTML of the comparison, to be put into the page."""
    folders = [str(Path(__file__).parent), str(Path(reporting.__path__[0]))]
    page = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    notes = [f"{name}: {note}" for name, run in zip(names, runs, strict=True) for note in run.notes]
    how = {"names": names, "rows": rows(runs), "charts_of_both": shared_charts(names, runs), "notes": notes}
    return page.get_template("compare.html.j2").render(**how)


def rows(runs: tuple[Run, Run]) -> list[Row]:
    """The evaluation's figures, then how far and how fast the runs trained; a dash where one lacks what the other has.

    How sure a figure is stands beside it, not in the first column: it is another for each run.
    """
    found: list[Row] = []
    for sides in (
        [_results(run) for run in runs],
        [{what: value for value, what in figures.progress(r)} for r in runs],
    ):
        a, b = sides
        found += [(what, a.get(what, "-"), b.get(what, "-")) for what in a | b]
    return found


def _results(run: Run) -> dict[str, str]:
    """The evaluation's figures by what they are."""
    side: dict[str, str] = {}
    for key, (what, _) in figures.RESULTS.items():
        for value, told in figures.results(run, [key]):
            side[what] = f"{value}{told.removeprefix(what)}"
    for value, told in figures.headline(run):
        what, bracket, rest = told.partition(" (real images: ")  # of a distance
        if bracket:
            side[what] = f"{value} (real images: {rest}"
    return side


def _progress(run: Run) -> dict[str, str]:
    return {what: value for value, what in figures.progress(run)}


def shared_charts(names: tuple[str, str], runs: tuple[Run, Run]) -> list[Chart]:
    """A chart for each key of metrics.jsonl that both have and that a report shows at once."""
    first, second = (run.series for run in runs)
    keys = [key for key in first if key in second and key.split("/")[0] in SHOWN_AT_ONCE]
    charts = []
    for key in keys:
        curves = {names[0]: first[key], names[1]: second[key]}
        if any(math.isfinite(y) for points in curves.values() for _, y in points):
            charts.append(line_chart(curves, title=key if "/" in key else chart_of(key)))
    return charts
