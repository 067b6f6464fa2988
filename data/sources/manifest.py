"""CSV manifests: a header with the column `path` and, if wanted, `label` and `split`; then a row for each image.

A label may be a list, `cat;dog` or JSON's: then an image has several, or none where it is empty.

Without `label` the only column that has the name of one is taken for it (data/sources/base.py).

Rows of the wrong length, with an empty field, with a file that is not there, or that repeat another are problems, named
with their line. Rows that contradict each other are refused. docs/lmdb.md has the other rules.
"""

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from duetgan.data.sources import base
from duetgan.data.sources.files import Listing, LocalSource
from duetgan.utils import bounded
from duetgan.utils.config.cli import did_you_mean
from duetgan.utils.errors import UserError

DELIMITERS = (",", ";", "\t")
PATHS = ("path", "file", "filename", "image")  # names of the column of paths; the first that is there


class Row(NamedTuple):
    """A row of the manifest; `label` and `split` are empty where there is no such column."""

    line: int  # of the file, from 1
    path: str
    label: str = ""
    split: str = ""


def open_manifest(path: Path, options: base.SourceOptions) -> LocalSource:
    """The images that a CSV file names. Raises UserError if it cannot be used."""
    listing = Listing([])
    columns, rows = _parse(path, options.label_column, listing)
    if not rows and not listing.problems:
        raise UserError(f"{path} has no rows below its header: add a row for each image")
    names: Sequence[str] = [""]
    if "label" in columns:
        rows, names = _numbered(path, rows, listing)
    rows = _without_repeats(path, rows, listing.problems)
    listing.splits = tuple(sorted({row.split for row in rows} - {""}))
    if "split" not in columns:
        base.refuse_split(path, options.split, "column split")
    elif rows:
        chosen = base.choose_split(path, options.split, listing.splits)
        rows = [row for row in rows if row.split == chosen]
    number = {name: place for place, name in enumerate(names)}
    for row in rows:
        place = path.parent / row.path
        if os.path.isfile(place):
            listing.names.append(row.path)
            listing.labels.append(number[row.label])
        else:
            listing.problems.append(base.Problem(str(place), f"is no file (line {row.line} of {path.name})"))
    return LocalSource(path.parent, path.name, listing)


def _numbered(path: Path, rows: list[Row], listing: Listing) -> tuple[list[Row], Sequence[str]]:
    """The rows with labels that can be compared, and these by number; sets classes, remarks and, where a row has a list
    of labels, sets: then an empty label is a list of none, else a problem.
    """
    given, where = [base.listed_labels(row.label) for row in rows], [f"{path} line {row.line}" for row in rows]
    if any(labels is not None for labels in given):
        pairs = zip(rows, given, strict=True)
        lists = [list(filter(None, [row.label])) if labels is None else labels for row, labels in pairs]
        listing.classes, listing.sets, numbers, remarks = base.label_sets(str(path), lists, where)
        names = [json.dumps([listing.classes[label] for label in labels]) for labels in listing.sets]
    else:
        empty = [place for row, place in zip(rows, where, strict=True) if not row.label]
        listing.problems += [base.Problem(place, "has an empty label") for place in empty]
        rows = [row for row in rows if row.label]
        lines, labels = [row.line for row in rows], [row.label for row in rows]
        names, numbers, remarks = base.classes_of(str(path), labels, lines)
        listing.classes = names
    listing.remarks += remarks
    return [row._replace(label=names[number]) for row, number in zip(rows, numbers, strict=True)], names


def _parse(path: Path, label_column: str | None, listing: Listing) -> tuple[Collection[str], list[Row]]:
    """Where its columns stand, and the usable rows; the others become problems of the listing."""
    lines = _lines(path)
    names = _names(next(lines, (1, []))[1])
    columns, listing.remarks = _places(path, names, label_column)
    others = {place: Counter[str]() for place in range(len(names)) if place not in columns.values()}
    rows = []
    for line, fields in lines:
        where = f"{path} line {line}"
        if len(fields) != len(names):
            reason = f"has {len(fields)} fields where the header has {len(names)}"
            listing.problems.append(base.Problem(where, reason))
            continue
        values = {name: fields[place].strip() for name, place in columns.items()}
        empty = next((name for name, text in values.items() if not text and name != "label"), None)
        if empty is not None:
            listing.problems.append(base.Problem(where, f"has an empty {empty}"))
            continue
        if split := values.get("split", "").lower():
            values["split"] = base.split_name(split)
            if not values["split"]:
                known = sorted(base.SPLIT_NAMES)
                hint = did_you_mean(split, known)
                raise UserError(f"{where}: split {split!r}{hint} is none of {', '.join(known)}")
        rows.append(Row(line, **values))
        for place, counts in others.items():
            if len(counts) <= base.MOST_VALUES:
                counts[fields[place].strip()] += 1
    if "label" not in columns and label_column is None:
        listing.remarks += base.looks_like_labels(str(path), {names[place]: counts for place, counts in others.items()})
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


def _places(path: Path, names: list[str], label_column: str | None) -> tuple[dict[str, int], list[str]]:
    """Where path, label and split stand in the header, and remarks. A near miss is refused: without it images would
    lose their labels unseen.
    """
    label, remarks = base.choose_label(str(path), names, label_column and label_column.lower())
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
    return {column: names.index(name) for column, name in columns.items() if name in names}, remarks


def _without_repeats(path: Path, rows: list[Row], problems: list[base.Problem]) -> list[Row]:
    """The first row of each file. Rows that give one file two labels or put it into two splits raise UserError."""
    first: dict[str, Row] = {}
    for row in rows:
        known = first.setdefault(os.path.normpath(path.parent / row.path), row)
        if known is row:
            continue
        for what, one, other in (("label", known.label, row.label), ("split", known.split, row.split)):
            if one != other:
                raise UserError(f"{path} line {row.line}: {row.path} has {what} {other}, in line {known.line} {one}")
        problems.append(base.Problem(f"{path} line {row.line}", f"repeats {row.path} of line {known.line}"))
    return list(first.values())
