"""CSV manifests: a header with the column `path` and, if wanted, `label` and `split`; then a row for each image.

Without `label` the only column that has the name of one is taken for it (data/sources/labels.py).

Rows of the wrong length, with an empty field, with a file that is not there, or that repeat another are problems, named
with their line. Rows that contradict each other are refused. docs/lmdb.md has the other rules.
"""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from data.sources.base import Problem, SourceOptions
from data.sources.files import LocalSource
from data.sources.labels import MOST_VALUES, choose_label, classes_of, looks_like_labels
from data.sources.listing import Listing
from data.sources.splits import SPLIT_NAMES, choose_split, refuse_split, split_name
from utils import bounded
from utils.config.cli import did_you_mean
from utils.errors import UserError

DELIMITERS = (",", ";", "\t")
COLUMNS = ("path", "label", "split")


class Row(NamedTuple):
    """A row of the manifest; `label` and `split` are empty where there is no such column."""

    line: int  # of the file, from 1
    path: str
    label: str
    split: str


def open_manifest(path: Path, options: SourceOptions) -> LocalSource:
    """The images that a CSV file names. Raises UserError if it cannot be used."""
    rows, problems, columns, remarks = _parse(path, options.label_column)
    if not rows and not problems:
        raise UserError(f"{path} has no rows below its header: add a row for each image")
    classes: list[str] = []
    if "label" in columns:
        lines = [row.line for row in rows]
        classes, numbers, spellings = classes_of(str(path), [row.label for row in rows], lines)
        rows = [row._replace(label=classes[number]) for row, number in zip(rows, numbers, strict=True)]
        remarks += spellings
    rows = _without_repeats(path, rows, problems)
    splits = tuple(sorted({row.split for row in rows} - {""}))
    if "split" in columns:
        chosen = choose_split(path, options.split, splits) if rows else ""
        rows = [row for row in rows if row.split == chosen]
    else:
        refuse_split(path, options.split, "column split")
    present = []
    for row in rows:
        if os.path.isfile(path.parent / row.path):
            present.append(row)
        else:
            problems.append(Problem(str(path.parent / row.path), f"is no file (line {row.line} of {path.name})"))
    number = {name: place for place, name in enumerate(classes or [""])}
    names, labels = [row.path for row in present], [number[row.label] for row in present]
    listing = Listing(names, labels, classes, problems, splits=splits, remarks=remarks)
    return LocalSource(path.parent, path.name, listing)


def _parse(path: Path, label_column: str | None) -> tuple[list[Row], list[Problem], list[str], list[str]]:
    """The usable rows, the others as problems, those of COLUMNS that there are, and remarks."""
    lines = _lines(path)
    _, header = next(lines, (1, []))
    names = _names(header)
    places, remarks = _places(path, names, label_column)
    rows, problems = [], []
    others = {place: Counter[str]() for place in range(len(names)) if place not in places.values()}
    for line, fields in lines:
        where = f"{path} line {line}"
        if len(fields) != len(names):
            problems.append(Problem(where, f"has {len(fields)} fields where the header has {len(names)}"))
            continue
        found = {name: fields[place].strip() for name, place in places.items()}
        empty = [name for name, text in found.items() if not text]
        if empty:
            problems.append(Problem(where, f"has an empty {empty[0]}"))
            continue
        part = split_name(found.get("split", ""))
        if "split" in found and not part:
            part = found["split"].lower()
            hint = did_you_mean(part, sorted(SPLIT_NAMES))
            raise UserError(f"{where}: split {part!r}{hint} is none of {', '.join(sorted(SPLIT_NAMES))}")
        rows.append(Row(line, found["path"], found.get("label", ""), part))
        for place, counts in others.items():
            if len(counts) <= MOST_VALUES:
                counts[fields[place].strip()] += 1
    if "label" not in places and label_column is None:
        remarks += looks_like_labels(str(path), {names[place]: counts for place, counts in others.items()})
    return rows, problems, list(places), remarks


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number of each row's first line and its fields; empty lines are left out."""
    line = 1
    try:
        with (
            bounded.reading(path, "check the file and its permissions"),
            io.TextIOWrapper(bounded.open_file(path, bounded.TABLE), encoding="utf-8-sig", newline="") as file,
        ):
            delimiter = _delimiter(file.readline())
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for fields in reader:
                if fields:
                    yield line, fields
                line = reader.line_num + 1
    except UnicodeDecodeError:
        raise UserError(f"{path}: a line from {line} on is not UTF-8; save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path} line {line} cannot be read ({error}); fix it") from None


def _delimiter(header: str) -> str:
    """The delimiter that makes `path` a column, else the one that makes most columns."""

    def fitness(delimiter: str) -> tuple[bool, int]:
        names = _names(next(csv.reader([header], delimiter=delimiter), []))
        return "path" in names, len(names)

    return max(DELIMITERS, key=fitness)


def _names(header: list[str]) -> list[str]:
    return [name.strip().lower() for name in header]


def _places(path: Path, names: list[str], label_column: str | None) -> tuple[dict[str, int], list[str]]:
    """Where COLUMNS stand in the header, and remarks. A near miss is refused: without it images would lose their
    labels unseen.
    """
    label, remarks = choose_label(str(path), names, label_column and label_column.lower())
    others = [name for name in names if name not in (*COLUMNS, label)]
    wanted = {"path": "path", "split": "split"} | ({} if label is None else {"label": label})
    for column in COLUMNS:
        name = wanted.get(column, column)
        if names.count(name) > 1:
            raise UserError(f"{path} line 1: the column {name} appears {names.count(name)} times; rename one")
        hint = did_you_mean(column, others) if column not in wanted or name not in names else ""
        asked = column == "label" and label_column is not None
        if name not in names and ((hint and not asked) or column == "path"):
            found = ", ".join(names) or "none"
            raise UserError(f"{path} line 1: no column {column}{hint}, its columns are {found}; rename one")
    return {column: names.index(name) for column, name in wanted.items() if name in names}, remarks


def _without_repeats(path: Path, rows: list[Row], problems: list[Problem]) -> list[Row]:
    """The first row of each file. Rows that give one file two labels or put it into two splits raise UserError."""
    first: dict[str, Row] = {}
    for row in rows:
        known = first.setdefault(os.path.normpath(path.parent / row.path), row)
        if known is row:
            continue
        for what, one, other in (("label", known.label, row.label), ("split", known.split, row.split)):
            if one != other:
                raise UserError(f"{path} line {row.line}: {row.path} has {what} {other}, in line {known.line} {one}")
        problems.append(Problem(f"{path} line {row.line}", f"repeats {row.path} of line {known.line}"))
    return list(first.values())
