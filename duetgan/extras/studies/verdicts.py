"""A Markdown page of the results of studies, those with failed controls included."""

import json
from collections.abc import Sequence
from pathlib import Path

from duetgan.extras.studies.page import p_value, signed, span
from duetgan.reporting.run_files import Document
from duetgan.utils.files import TABLE, read_file, reading
from duetgan.utils.text import duration

HEAD = ["arm", "base", "controls", "of", "effect", "95 % interval", "p", "verdict"]


def verdicts(folders: Sequence[Path]) -> str:
    """Return Markdown with a section for each study: its title, number of seeds, time, and a table
    of its main comparisons.

    Raises UserError for a folder without a readable study.json.
    """
    lines = ["# Results of studies", ""]
    for folder in folders:
        with reading(
            folder, "give a study's folder, with a study.json", ValueError, KeyError, TypeError
        ):
            lines += _section(folder, json.loads(read_file(folder / "study.json", TABLE)))
    return "\n".join(lines)


def _section(folder: Path, study: Document) -> list[str]:
    seconds = sum(json.loads(read_file(file, TABLE))["seconds"] for file in folder.glob("*/*.json"))
    runs = study["runs"]
    progress = f"{len(study['seeds'])} seeds, {runs['done']} of {runs['planned']} runs"
    text = f"Study `{study['subject']}`, {folder.name}: {progress}"
    if seconds:
        text += f", {duration(seconds)}"
    text += "."
    for arm, choice in study["choices"].items():
        text += f" {arm}: {choice}."
    failed = []
    for row in study["controls"]:
        if row["ok"] is False:
            failed.append(f"{row['arm']}: {row['found']}, expected: {row['expected']}")
    if failed:
        text += f" Void, because a control came out wrong: {'; '.join(failed)}."
    table = [_line(HEAD), _line(["---"] * len(HEAD))]
    for row in study["comparisons"]:
        if row["asked"]:
            table.append(_line(_cells(row)))
    images = []
    for image in study["pictures"][:1]:
        images += [f"![{image['caption']}]({folder / image['file']})", ""]
    return [f"## {study['title']}", "", text, "", *table, "", *images]


def _line(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _cells(row: Document) -> list[str]:
    """Return the cells of a comparison, in the order of HEAD."""
    is_fraction = row["figure"] is None
    subject, effect = row["figure"], signed(row["difference"], is_fraction=is_fraction)
    if is_fraction:
        subject, effect = row["group"], f"{effect} points"
    return [
        row["second"],
        row["first"],
        "; ".join(row["controls"]) or "-",
        subject,
        effect,
        span(row["interval"], is_fraction=is_fraction),
        p_value(row["p"]),
        f"**{row['verdict']}**",
    ]
