"""One page of what studies found, as Markdown, from their folders: the failures, too."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duetgan.reporting.report import chance, signed, span
from duetgan.utils.bounded import TABLE, read_file, reading
from duetgan.utils.text import duration

HEAD = ["arm", "base", "controls", "of", "effect", "95 % interval", "p", "verdict"]


def verdicts(folders: Sequence[Path]) -> str:
    """A section for each study: question, seeds, cost, and a table of what was asked. Raises
    UserError for what is no study's folder.
    """
    lines = ["# What studies found", ""]
    for folder in folders:
        with reading(
            folder, "give a study's folder, with a study.json", ValueError, KeyError, TypeError
        ):
            lines += _section(folder, json.loads(read_file(folder / "study.json", TABLE)))
    return "\n".join(lines)


def _section(folder: Path, study: dict[str, Any]) -> list[str]:
    seconds = sum(json.loads(read_file(file, TABLE))["seconds"] for file in folder.glob("*/*.json"))
    runs, rows = study["runs"], [HEAD, ["---"] * len(HEAD)]
    for row in [row for row in study["comparisons"] if row["asked"]]:
        share = row["figure"] is None
        effect, of = (
            signed(row["difference"], share=share) + " points" * share,
            row["group" if share else "figure"],
        )
        known = span(row["interval"], share=share), chance(row["p"]), f"**{row['verdict']}**"
        rows.append(
            [row["second"], row["first"], "; ".join(row["controls"]) or "-", of, effect, *known]
        )
    made = f"{len(study['seeds'])} seeds, {runs['done']} of {runs['planned']} runs"
    state = f"Study `{study['subject']}`, {folder.name}: {made}"
    cost = f", {duration(seconds)}" if seconds else ""
    void = [
        f"{row['arm']}: {row['found']}, not: {row['expected']}"
        for row in study["controls"]
        if row["ok"] is False
    ]
    failed = f" Void, for a control came out wrong: {'; '.join(void)}." if void else ""
    shown = [
        line
        for each in study["pictures"][:1]
        for line in (f"![{each['caption']}]({folder / each['file']})", "")
    ]
    table = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    chosen = "".join(f" {arm}: {which}." for arm, which in study["choices"].items())
    return [f"## {study['title']}", "", f"{state}{cost}.{chosen}{failed}", "", *table, "", *shown]
