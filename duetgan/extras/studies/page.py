"""The page of a study: verdicts, comparisons, controls, tables and images."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from markupsafe import Markup

from duetgan.reporting.figures import change
from duetgan.reporting.pictures import picture
from duetgan.reporting.report import write_page
from duetgan.reporting.run_files import Document
from duetgan.utils.text import counted

HEADINGS = {"main": "Main comparisons", "classes": "By class", "all arms": "All arms"}
# value of a control's `ok` -> text
OUTCOMES = {True: "as expected", False: "WRONG", None: "unknown yet"}
WIDTH, MIDDLE = 150, 9  # width and half height of the drawing of an interval, in px


def write_study_page(
    folder: Path, document: Document, *, command: str, config: Mapping[str, object]
) -> Path:
    """Write FOLDER/report.html from the content of study.json, and return its path."""
    rows, runs = document["comparisons"], document["runs"]
    state = "finished" if document["complete"] else "unfinished"
    seeds = counted(len(document["seeds"]), "complete seed")
    families: dict[str, list[Document]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    # The headline has a tile for each metric or group of classes of the first pair of arms.
    verdicts = document["verdicts"]
    tiles = {}
    for row in verdicts:
        if (row["first"], row["second"]) == (verdicts[0]["first"], verdicts[0]["second"]):
            title = row["figure"] or f"{row['group']} classes"
            tiles[title] = (row["verdict"], f"{title}: {row['second']} against {row['first']}")
    arms = []
    for arm in document["arms"]:
        arms.append([arm["name"], arm["family"], len(arm["figures"]), arm["what"]])
    images = document.get("pictures", [])
    return write_page(
        folder / "report.html",
        Path(__file__).with_name("study.html.j2"),
        page=sys.modules[__name__],
        study=document,
        state=f"{state}: {runs['done']} of {runs['planned']} runs, {seeds}",
        headline=list(tiles.values()),
        families=families,
        controls=[_control(row) for row in document["controls"]],
        arms=arms,
        images=[picture(folder / image["file"], image["caption"]) for image in images],
        command=command,
        config=yaml.safe_dump(dict(config), sort_keys=False),
    )


def _control(row: Document) -> list[str]:
    """Return the table cells of a study's control."""
    is_fraction = row["figure"] is None
    cells = [row["arm"], row["against"], row["expected"], row["found"]]
    cells.append(signed(row["difference"], is_fraction=is_fraction))
    cells.append(span(row["interval"], is_fraction=is_fraction))
    return [*cells, OUTCOMES[row["ok"]], row["why"]]


def signed(value: float | None, *, is_fraction: bool) -> str:
    """Format a difference with its sign, and a difference of fractions in percentage points."""
    if value is None:
        return "-"
    return f"{100 * value:+z.1f}" if is_fraction else change(value)


def span(interval: Sequence[float] | None, *, is_fraction: bool) -> str:
    """Format the interval of a difference as `LOW to HIGH`."""
    if interval is None:
        return "-"
    return " to ".join(signed(end, is_fraction=is_fraction) for end in interval)


def p_value(p: float | None) -> str:
    """Format a p-value."""
    if p is None:
        return "-"
    return "<0.0001" if p < 1e-4 else f"{p:.2g}"


def draw_interval(row: Document, rows: Sequence[Document]) -> Markup:
    """Draw a row's difference and its interval as SVG, on one scale with all `rows` of the same
    metric. The drawing contains only numbers, so it needs no escaping.
    """
    ends = [1e-9]
    for comparable in rows:
        if comparable["figure"] == row["figure"]:
            ends += [comparable["difference"], *(comparable["interval"] or [])]
    reach = max(map(abs, ends))

    def position(difference: float) -> str:
        return f"{WIDTH / 2 + (WIDTH / 2 - 5) * difference / reach:.1f}"

    drawing = f'<line class="zero" x1="{WIDTH / 2}" x2="{WIDTH / 2}" y1="0" y2="{2 * MIDDLE}"/>'
    if row["interval"]:
        low, high = map(position, row["interval"])
        drawing += f'<line class="span" x1="{low}" x2="{high}" y1="{MIDDLE}" y2="{MIDDLE}"/>'
    drawing += f'<circle cx="{position(row["difference"])}" cy="{MIDDLE}" r="4"/>'
    return Markup(f'<svg class="forest" viewBox="0 0 {WIDTH} {2 * MIDDLE}">{drawing}</svg>')
