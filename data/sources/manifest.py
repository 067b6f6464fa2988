"""CSV manifests: a header with the column `path` and, if wanted, `label` and `split`; then a row for each image.

Rows of the wrong length, with an empty field, with a file that is not there, or that repeat another are problems, named
with their line. Rows that contradict each other are refused. docs/lmdb.md has the other rules.
"""

import csv
import io
import os
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from duetgan.data.sources import base
from duetgan.data.sources.files import LocalSource
from duetgan.utils import bounded
from duetgan.utils.config.cli import did_you_mean
from duetgan.utils.errors import UserError

DELIMITERS = (",", ";", "\t")
PATHS = (
    "path",
    "file",
    "filename",
    "file_name",
    "filepath",
    "image",
    "image_path",
)  # names of the column of paths; the first that is there


@dataclass
class Row:
    """A row of the manifest; `label` and `split` are empty where there is no such column."""

    line: int  # of the file, from 1
    path: str
    label: str = ""
    split: str = ""
    number: int = 0  # of the label


def open_manifest(path: Path, options: base.SourceOptions) -> LocalSource:
    """The images that a CSV file names. Raises UserError if it cannot be used."""
    source = LocalSource(path.parent, path.name, str(path))
    columns, rows = _parse(path, options.label_column, source)
    if not rows and not source.problems:
        raise UserError(f"{path} has no rows below its header: add a row for each image")
    if "label" in columns:
        if not any(isinstance(base.listed_labels(row.label), list) for row in rows):  # else it is a list of none
            places = [f"{path} line {row.line}" for row in rows if not row.label]
            source.problems += [base.Problem(place, "has an empty label") for place in places]
            rows = [row for row in rows if row.label]
        given = [base.listed_labels(row.label) for row in rows]
        source.take_labels(str(path), given, [f"{path} line {row.line}" for row in rows])
        for row, number in zip(rows, source.labels().tolist(), strict=True):
            row.number = number
    rows = _without_repeats(path, rows, source.problems)
    source.splits = tuple(sorted({row.split for row in rows} - {""}))
    if "split" not in columns:
        base.refuse_split(path, options.split, "column split")
    elif rows:
        chosen = base.choose_split(path, options.split, source.splits)
        rows = [row for row in rows if row.split == chosen]
    there = []
    for row in rows:
        place = path.parent / row.path
        if os.path.isfile(place):
            there.append(row)
        else:
            source.problems.append(base.Problem(str(place), f"is no file (line {row.line} of {path.name})"))
    source.take_names([row.path for row in there], [row.number for row in there])
    return source


def _parse(path: Path, label_column: str | None, source: LocalSource) -> tuple[Collection[str], list[Row]]:
    """Where its columns stand, and the usable rows; the others become problems of the source."""
    lines = _lines(path)
    names = _names(next(lines, (1, []))[1])
    columns = _places(path, names, label_column, source)
    others = {place: Counter[str]() for place in range(len(names)) if place not in columns.values()}
    rows = []
    for line, fields in lines:
        where = f"{path} line {line}"
        if len(fields) != len(names):
            reason = f"has {len(fields)} fields where the header has {len(names)}"
            source.problems.append(base.Problem(where, reason))
            continue
        values = {name: fields[place].strip() for name, place in columns.items()}
        empty = next((name for name, text in values.items() if not text and name != "label"), None)
        if empty is not None:
            source.problems.append(base.Problem(where, f"has an empty {empty}"))
            continue
        if split := values.get("split", "").lower():
            values["split"] = base.split_name(split)
            if not values["split"]:
                known = sorted(base.SPLIT_NAMES)
                hint = did_you_mean(split, known)
                raise UserError(f"{where}: split {split!r}{hint} is none of {', '.join(known)}")
        rows.append(Row(line, values["path"], values.get("label", ""), values.get("split", "")))
        for place, counts in others.items():
            if len(counts) <= base.MOST_VALUES:
                counts[fields[place].strip()] += 1
    for place, counts in others.items():
        if "split" not in columns and len(counts) > 1 and all(map(base.split_name, counts)):
            raise UserError(f"{path}: the column {names[place]} names splits; call it split, or remove it")
    if "label" not in columns and label_column is None:
        source.remarks += base.looks_like_labels(str(path), {names[place]: counts for place, counts in others.items()})
    return columns, rows


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number of each row's first line and its fields; empty lines are left out."""
    line = 1
    try:
        with (
            bounded.reading(path, "check the file and its permissions"),
            io.TextIOWrapper(bounded.open_file(path, bounded.TABLE), encoding="utf-8-sig", newline="") as file,
        ):
            header = file.readline()
            file.seek(0)
            headers = [_names(next(csv.reader([header], delimiter=delimiter), [])) for delimiter in DELIMITERS]
            # one of PATHS is a column, else most columns
            fitness = [(not {*PATHS}.isdisjoint(names), len(names)) for names in headers]
            reader = csv.reader(file, delimiter=DELIMITERS[fitness.index(max(fitness))], strict=True)
            for fields in reader:
                if fields:
                    yield line, fields
                line = reader.line_num + 1
    except UnicodeDecodeError:
        raise UserError(f"{path}: a line from {line} on is not UTF-8; save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path} line {line} cannot be read ({error}); fix it") from None


def _names(header: list[str]) -> list[str]:
    return [name.strip().lower() for name in header]


def _places(path: Path, names: list[str], label_column: str | None, source: LocalSource) -> dict[str, int]:
    """Where path, label and split stand in the header. A near miss is refused: without it images would lose their
    labels unseen.
    """
    label = source.choose_label(str(path), names, label_column and label_column.lower())
    path_column = next((name for name in PATHS if name in names), "path")
    columns = {"path": path_column, "label": label or "label", "split": "split"}
    others = [name for name in names if name not in columns.values()]
    for column, name in columns.items():
        if names.count(name) > 1:
            raise UserError(f"{path} line 1: the column {name} appears {names.count(name)} times; rename one")
        hint = did_you_mean(column, others)
        asked = column == "label" and label_column is not None
        if name not in names and ((hint and not asked) or column == "path"):
            known = ", ".join(names) or "none"
            raise UserError(f"{path} line 1: no column {column}{hint}, its columns are {known}; rename one")
    if label is None:
        del columns["label"]
    return {column: names.index(name) for column, name in columns.items() if name in names}


def _without_repeats(path: Path, rows: list[Row], problems: list[base.Problem]) -> list[Row]:
    """The first row of each file. Rows that give one file two labels or put it into two splits raise UserError."""
    first: dict[str, Row] = {}
    for row in rows:
        known = first.setdefault(os.path.normpath(path.parent / row.path), row)
        if known is row:
            continue
        for what, same in (("label", known.number == row.number), ("split", known.split == row.split)):
            if not same:
                one, other = (getattr(each, what) or "none" for each in (known, row))
                several = "; several in one row: a;b" if what == "label" else ""
                where = f"{path} line {row.line}: {row.path}"
                raise UserError(f"{where} has {what} {other}, in line {known.line} {one}{several}")
        problems.append(base.Problem(f"{path} line {row.line}", f"repeats {row.path} of line {known.line}"))
    return list(first.values())
