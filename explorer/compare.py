"""Two runs side by side, whatever they are: their figures in a table, their curves in the same charts.

Whether a difference is more than chance `python -m reporting.compare` says, of runs that were evaluated alike.
"""

from reporting import figures
from reporting.compare import shared_charts
from reporting.report import render
from reporting.run_files import Run

Row = tuple[str, str, str]  # what it is, and the figure of each run


def compare_page(names: tuple[str, str], runs: tuple[Run, Run]) -> str:
    """The HTML of the comparison, to be put into the page."""
    pairs = dict(zip(names, runs, strict=True))
    notes = [f"{name}: {note}" for name, run in pairs.items() for note in run.notes]
    curves = shared_charts(pairs)
    return render("side_by_side.html.j2", names=names, rows=rows(runs), charts_of_both=curves, notes=notes)


def rows(runs: tuple[Run, Run]) -> list[Row]:
    """The evaluation's figures, then how far and how fast the runs trained; a dash where one lacks what the other has.

    How sure a figure is stands beside it, not in the first column: it is another for each run.
    """
    found: list[Row] = []
    for told in (_results, _progress):
        a, b = map(told, runs)
        found += [(what, a.get(what, "-"), b.get(what, "-")) for what in a | b]
    return found


def _results(run: Run) -> dict[str, str]:
    """The evaluation's figures by what they are."""
    side: dict[str, str] = {}
    for row in figures.TILES:
        for value, told in figures.results(run, [row]):
            side[row.meaning] = f"{value}{told.removeprefix(row.meaning)}"
    for value, told in figures.headline(run):
        what, bracket, rest = told.partition(" (real images: ")  # of a distance
        if bracket:
            side[what] = f"{value} (real images: {rest}"
    return side


def _progress(run: Run) -> dict[str, str]:
    return {what: value for value, what in figures.progress(run)}
