"""The page of a study: verdicts, comparisons, controls, tables and images."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from duetgan.reporting.pictures import picture
from duetgan.reporting.report import write_page
from duetgan.reporting.run_files import Document
from duetgan.utils.text import counted

HEADINGS = {"main": "Main comparisons", "all arms": "All arms"}
# value of a control's `ok` -> text
OUTCOMES = {True: "as expected", False: "WRONG", None: "unknown yet"}


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
            title = f"{row['group']} classes"
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
    cells = [row["arm"], row["against"], row["expected"], row["found"]]
    cells += [signed(row["difference"]), span(row["interval"])]
    return [*cells, OUTCOMES[row["ok"]], row["why"]]


def signed(difference: float) -> str:
    """Format a difference of fractions in percentage points, with its sign."""
    return f"{100 * difference:+z.1f}"


def span(interval: Sequence[float] | None) -> str:
    """Format the interval of a difference as `LOW to HIGH`."""
    return "-" if interval is None else " to ".join(map(signed, interval))


def p_value(p: float | None) -> str:
    """Format a p-value."""
    if p is None:
        return "-"
    return "<0.0001" if p < 1e-4 else f"{p:.2g}"
