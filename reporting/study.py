"""The page of a study, in the report's style: verdict, differences with their intervals, controls, tables, images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from duetgan.reporting.figures import change, percent, plain
from duetgan.reporting.pictures import picture
from duetgan.reporting.report import write_page

HEADINGS = {"main": "The answer", "classes": "The same by class", "all arms": "Every arm"}
KINDS = {"helps": "good", "hurts": "bad"}
WIDTH, MIDDLE = 150, 9  # of the drawing of an interval, in px


def write_study_page(folder: Path, document: Mapping[str, Any], *, command: str, config: Mapping[str, Any]) -> Path:
    """Write FOLDER/report.html of study.json's document, and return its path."""
    rows, runs = document["comparisons"], document["runs"]
    done = "finished" if document["complete"] else "unfinished"
    seeds = f"{len(document['seeds'])} complete seed{'s' * (len(document['seeds']) != 1)}"
    families = dict.fromkeys(row["family"] for row in rows)
    pair = [(row["first"], row["second"]) for row in document["verdicts"]]  # of the first comparison a tile for a group
    first = [row for row, arms in zip(document["verdicts"], pair, strict=True) if arms == pair[0]]
    tiles = {row["figure"] or f"{row['group']} classes": row for row in first}
    return write_page(
        folder / "report.html",
        "study.html.j2",
        title=document["title"],
        name=document["subject"],
        state=f"{done}: {runs['done']} of {runs['planned']} runs, {seeds}",
        void=document["void"],
        headline=[(row["verdict"], f"{what}: {row['second']} against {row['first']}") for what, row in tiles.items()],
        words=document["words"],
        choices=list(document["choices"].items()),
        headings=HEADINGS,
        families={name: [row for row in rows if row["family"] == name] for name in families},
        controls=[_control(row) for row in document["controls"]],
        kinds=KINDS,
        writing={"percent": percent, "plain": plain, "signed": signed, "span": span, "drawn": drawn, "chance": chance},
        tables=document["tables"],
        arms=[[arm["name"], arm["family"], len(arm["figures"]), arm["what"]] for arm in document["arms"]],
        images=[picture(folder / item["file"], item["caption"]) for item in document.get("pictures", [])],
        notes=document["notes"],
        command=command,
        config=yaml.safe_dump(dict(config), sort_keys=False),
    )


def _control(row: Mapping[str, Any]) -> list[str]:
    share, came = row["figure"] is None, "as it must" if row["ok"] else "WRONG"
    words = [row["arm"], row["against"], row["expected"], row["found"], signed(row["difference"], share=share)]
    return [*words, span(row["interval"], share=share), came, row["why"]]


def signed(value: float | None, *, share: bool) -> str:
    """A difference with its sign; of shares in percentage points."""
    return "-" if value is None else f"{100 * value:+.1f}" if share else change(value)


def span(interval: Sequence[float] | None, *, share: bool) -> str:
    return "-" if interval is None else " to ".join(signed(end, share=share) for end in interval)


def chance(p: float | None) -> str:
    return "-" if p is None else "<0.0001" if p < 1e-4 else f"{p:.2g}"


def drawn(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Markup:
    """A row's difference and its interval on a line, to one scale with those of `rows` that are of the same figure. It
    holds numbers alone.
    """
    alike = [each for each in rows if each["figure"] == row["figure"]]
    reach = max(1e-9, *(abs(end) for each in alike for end in (each["difference"], *(each["interval"] or []))))

    def place(x: float) -> str:
        return f"{WIDTH / 2 + (WIDTH / 2 - 5) * x / reach:.1f}"

    drawing = f'<line class="zero" x1="{WIDTH / 2}" x2="{WIDTH / 2}" y1="0" y2="{2 * MIDDLE}"/>'
    if row["interval"]:
        low, high = map(place, row["interval"])
        drawing += f'<line class="span" x1="{low}" x2="{high}" y1="{MIDDLE}" y2="{MIDDLE}"/>'
    drawing += f'<circle cx="{place(row["difference"])}" cy="{MIDDLE}" r="4"/>'
    return Markup(f'<svg class="forest" viewBox="0 0 {WIDTH} {2 * MIDDLE}">{drawing}</svg>')
