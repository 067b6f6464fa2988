"""Tables with paths of image files: CSV, TSV, JSON lines, a JSON array of objects, and Parquet or
Arrow files with a column of paths. labels.py chooses the columns of labels and splits.

Rows of the wrong length, with an empty path or label, with a missing file, or that repeat another
row are problems, reported with their line. Rows that contradict each other are refused.
docs/lmdb.md has the other rules.
"""

import csv
import io
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from duetgan.data.packing.sources import base, labels
from duetgan.data.packing.sources.files import LocalSource
from duetgan.utils import files
from duetgan.utils.errors import UserError

DELIMITERS = (",", ";", "\t")
# names of the column of paths, in descending order of preference
PATHS = (
    *("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img"),
    *("img_path", "fname", "image_name", "image index", "image_id", "id_code", "id", "name"),
)
MOST_TRIALS = 20  # number of values of a column, at its beginning, of which one must be a file


class Table(Protocol):
    """A table of text."""

    names: list[str]  # of the columns

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[str, list[str] | str]]:
        """Yield the position of each row, for messages, and its values of `columns`, or the reason
        why the row cannot be used.
        """


class CsvTable:
    def __init__(self, path: Path) -> None:
        self.path = path
        _, header = next(self._lines(), (1, []))
        self.names = [name or f"unnamed: {number}" for number, name in enumerate(header)]
        if len(set(map(str.lower, self.names))) < len(self.names):
            raise UserError(f"{path} line 1: a column appears twice; rename one")

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[str, list[str] | str]]:
        indices = [self.names.index(name) for name in columns]
        for line, fields in itertools.islice(self._lines(), 1, None):
            if len(fields) == len(self.names):
                yield f"line {line}", [fields[index] for index in indices]
            else:
                reason = f"has {len(fields)} fields where the header has {len(self.names)}"
                yield f"line {line}", reason

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of each row's first line, and its fields. Empty lines are skipped."""
        line = 1
        try:
            with (
                files.reading(self.path, "check the file and its permissions"),
                files.open_file(self.path, files.TABLE) as content,
                io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as file,
            ):
                delimiter = max(DELIMITERS, key=file.readline().count)
                file.seek(0)
                reader = csv.reader(file, delimiter=delimiter, strict=True)
                for fields in reader:
                    if fields:
                        yield line, [field.strip() for field in fields]
                    line = reader.line_num + 1
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(
                f"{self.path} line {line} cannot be read ({error}); save it as CSV in UTF-8"
            ) from None


class JsonTable:
    """A file of JSON lines, or of a JSON array of objects."""

    def __init__(self, path: Path) -> None:
        with files.reading(
            path, "save it as JSON lines, an object a line", ValueError, RecursionError
        ):
            text = files.read_file(path, files.TABLE).decode("utf-8-sig")
            if text.lstrip().startswith("["):
                rows = json.loads(text)
            else:
                rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        self._rows: list[dict[str, str]] = []
        names: dict[str, None] = {}  # in the order of their first rows
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise UserError(
                    f"{path} entry {number} is no JSON object: give one per image, with its path"
                    " and label"
                )
            self._rows.append({name: labels.as_text(row[name]) for name in row})
            names |= dict.fromkeys(row)
        self.names = list(names)

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[str, list[str] | str]]:
        for number, row in enumerate(self._rows, start=1):
            yield f"entry {number}", [row.get(name, "") for name in columns]


def open_csv(path: Path, options: base.SourceOptions) -> "PathTable":
    return PathTable(path, options, CsvTable(path))


def open_json(path: Path, options: base.SourceOptions) -> "PathTable":
    return PathTable(path, options, JsonTable(path))


class Place(NamedTuple):
    """The conversion of a column's values to files."""

    column: str
    folder: Path
    suffix: str  # added to a value

    def file(self, value: str) -> Path:
        return self.folder / (base.with_slashes(value) + self.suffix)


class PathTable(LocalSource):
    """The images with paths in a table. Raises UserError if the table cannot be used."""

    takes = frozenset(
        (
            *("label_column", "label_separator", "split_column", "group_column"),
            *("path_column", "root", "suffix"),
        )
    )

    def __init__(self, path: Path, options: base.SourceOptions, table: Table) -> None:
        super().__init__(path if path.is_dir() else path.parent, path.name, str(path))
        counts = labels.count(
            table.names, (values for _, values in self._usable(table, table.names))
        )
        if not any(counts.values()):
            empty = f"{path} has no rows below its header: add a row for each image"
            raise UserError(str(self.problems[0]) if self.problems else empty)
        place = _find_place(path, options.root or self.folder, counts, options)
        columns = labels.choose_columns(self, str(path), counts, options, paths=place.column)
        self.problems = []
        rows = self._rows(table, place, columns)
        places = [f"{path} {where}" for where, _, _ in rows]
        usable = labels.take_columns(
            self, str(path), columns, [row[2] for row in rows], places, options
        )
        self.folder = place.folder
        names = []
        numbers = []
        groups = []
        for index, number in zip(usable, self.labels().tolist(), strict=True):
            where, value, values = rows[index]
            if os.path.isfile(file := place.file(value)):
                names.append(base.with_slashes(value) + place.suffix)
                numbers.append(number)
                groups.append(values[columns.names.index(columns.group)] if columns.group else "")
            else:
                self.problems.append(
                    base.Problem(str(file), f"is no file ({where} of {path.name})")
                )
        self.take_names(names, numbers)
        if self.grouping is not None:
            self.grouping = self.grouping._replace(names=groups)

    def _usable(self, table: Table, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        for place, values in table.rows(columns):
            if isinstance(values, str):
                self.problems.append(base.Problem(f"{self.where} {place}", values))
            else:
                yield place, values

    def _rows(
        self, table: Table, place: Place, columns: labels.Columns
    ) -> list[tuple[str, str, list[str]]]:
        """Return for each file its position in the table, its path and its values of `columns`.

        Rows that repeat a file become problems. Raises UserError if a repetition has other values.
        """
        first: dict[str, tuple[str, str, list[str]]] = {}
        for where, (path, *values) in self._usable(table, [place.column, *columns.names]):
            row = where, path, values
            earlier = first.setdefault(os.path.normpath(place.file(path)), row)
            if not path:
                reason = f"has an empty {place.column}"
            elif earlier is row:
                continue
            elif values == earlier[2]:
                reason = f"repeats {path} of {earlier[0]}"
            else:
                raise UserError(
                    f"{self.where} {where}: {path} has other values in {earlier[0]}; give several"
                    " labels in one row: a;b"
                )
            self.problems.append(base.Problem(f"{self.where} {where}", reason))
        return [row for row in first.values() if row[1]]


def _find_place(
    path: Path, folder: Path, counts: labels.Counts, options: base.SourceOptions
) -> Place:
    """Return the column of paths, with the conversion of its values to files.

    It is the first column of PATHS of whose first MOST_TRIALS values one is a file. Raises UserError
    if there is none.
    """
    lower = {name.lower(): name for name in counts}
    columns = [lower[name] for name in PATHS if name in lower]
    if options.path_column is not None:
        columns = [labels.find_name(str(path), "--path-column", options.path_column, counts)]
    if not columns:
        raise UserError(
            f"{path}: no column path, its columns are {', '.join(counts)}; pass --path-column NAME"
        )
    suffix = options.suffix or ""
    if suffix.isalnum():
        suffix = f".{suffix}"
    for column in columns:
        place = Place(column, folder, suffix)
        values = itertools.islice(filter(None, counts[column]), MOST_TRIALS)
        if any(map(os.path.isfile, map(place.file, values))):
            return place
    example = folder / next(iter(counts[columns[0]]))
    raise UserError(
        f"{path}: {example} is no file, as are others of the column {columns[0]}: pass"
        " --root with the folder of the images, and --suffix .jpg where the names have none"
    )
