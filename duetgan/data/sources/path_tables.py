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
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol
from urllib.parse import unquote

from duetgan.data.images import SUFFIXES
from duetgan.data.sources import base, labels
from duetgan.data.sources.files import LocalSource
from duetgan.utils import files
from duetgan.utils.errors import UserError

DELIMITERS = (",", ";", "\t")
LABELS = re.compile(r"""[^;|,\s"'\[\]]+""")  # a label in a text of several
# names of the column of paths, in descending order of preference
PATHS = (
    "path",
    "file",
    "filename",
    "file_name",
    "filepath",
    "image",
    "image_path",
    "img",
    "img_path",
    "fname",
    "image_name",
    "image index",
    "image_id",
    "id_code",
    "id",
    "name",
)
MOST_TRIALS = 20  # One of so many first values must be a file; also most sub-folders to search.
DEEPEST = 12  # Fewer leading folders than this are removed from a path.


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
        for name, times in Counter(map(str.lower, self.names)).items():
            if times > 1:
                raise UserError(
                    f"{path} line 1: the column {name} appears {times} times; rename one"
                )
        if odd := [name for name in header if PurePosixPath(name).suffix.lower() in SUFFIXES]:
            raise UserError(
                f"{path} line 1: {odd[0]} is no name of a column: add a header such as path,label"
            )

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[str, list[str] | str]]:
        indices = [self.names.index(name) for name in columns]
        for line, fields in itertools.islice(self._lines(), 1, None):
            if len(fields) != len(self.names):
                yield (
                    f"line {line}",
                    f"has {len(fields)} fields where the header has {len(self.names)}",
                )
            else:
                yield f"line {line}", [fields[index] for index in indices]

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of each row's first line, and its fields. Empty lines are skipped."""
        line = 1
        try:
            with (
                files.reading(self.path, "check the file and its permissions"),
                files.open_file(self.path, files.TABLE) as content,
                io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as file,
            ):
                header = file.readline()
                file.seek(0)
                reader = csv.reader(file, delimiter=self._delimiter(header), strict=True)
                for fields in reader:
                    if fields:
                        yield line, [field.strip() for field in fields]
                    line = reader.line_num + 1
        except UnicodeDecodeError:
            raise UserError(
                f"{self.path}: a line from {line} on is not UTF-8; save it as UTF-8"
            ) from None
        except csv.Error as error:
            raise UserError(f"{self.path} line {line} cannot be read ({error}); fix it") from None

    def _delimiter(self, header: str) -> str:
        """Return the delimiter that gives a column of PATHS, else the one with the most columns."""
        if self.path.suffix.lower() == ".tsv":
            return "\t"

        def fitness(delimiter: str) -> tuple[bool, int]:
            row = next(csv.reader([header], delimiter=delimiter), [])
            names = [name.strip().lower() for name in row]
            return not {*PATHS}.isdisjoint(names), len(names)

        return max(DELIMITERS, key=fitness)


class JsonTable:
    """A file of JSON lines, or of a JSON array of objects."""

    def __init__(self, path: Path) -> None:
        with files.reading(
            path, "save it as JSON lines, an object a line", ValueError, RecursionError
        ):
            text = files.read_file(path, files.TABLE).decode("utf-8-sig")
            if text.lstrip().startswith("["):
                rows = list(enumerate(json.loads(text), start=1))
                self._unit = "entry"
            else:
                rows = []
                for line, row in enumerate(text.split("\n"), start=1):
                    if row.strip():
                        rows.append((line, json.loads(row)))
                self._unit = "line"
        self._rows: list[tuple[int, dict[str, str]]] = []
        names: dict[str, None] = {}  # in the order of their first rows
        for number, row in rows:
            if not isinstance(row, dict):
                raise UserError(
                    f"{path} {self._unit} {number} is no JSON object: give one per image, with its"
                    " path and label"
                )
            self._rows.append((number, {name: labels.as_text(row[name]) for name in row}))
            names |= dict.fromkeys(row)
        self.names = list(names)

    def rows(self, columns: Sequence[str]) -> Iterator[tuple[str, list[str] | str]]:
        for number, row in self._rows:
            yield f"{self._unit} {number}", [row.get(name, "") for name in columns]


def open_csv(path: Path, options: base.SourceOptions) -> "PathTable":
    return PathTable(path, options, CsvTable(path))


def open_json(path: Path, options: base.SourceOptions) -> "PathTable":
    return PathTable(path, options, JsonTable(path))


class Place(NamedTuple):
    """The conversion of a column's values to files."""

    column: str
    skipped: int  # number of leading folders removed from a value
    suffix: str  # added to a value
    folder: Path

    def name(self, value: str) -> str:
        return "/".join(value.split("/")[self.skipped :]) + self.suffix

    def file(self, value: str) -> Path:
        return self.folder / self.name(value)


class PathTable(LocalSource):
    """The images with paths in a table. Raises UserError if it cannot be used."""

    takes = frozenset(
        ("label_column", "label_separator", "split_column", "path_column", "root", "suffix")
    )

    def __init__(self, path: Path, options: base.SourceOptions, table: Table) -> None:
        super().__init__(path if path.is_dir() else path.parent, path.name, str(path))
        counts = labels.count(
            table.names, (values for _, values in self._usable(table, table.names))
        )
        if not any(counts.values()):
            empty = f"{path} has no rows below its header: add a row for each image"
            raise UserError(str(self.problems[0]) if self.problems else empty)
        place = _find_place(path, options.root or self.folder, counts, options, self.remarks)
        columns = labels.choose_columns(self, str(path), counts, options, paths=place.column)
        self.problems = []
        rows = self._rows(table, place, columns)
        places = [f"{path} {where}" for where, _, _ in rows]
        usable = labels.take_columns(
            self, str(path), columns, [row[2] for row in rows], places, options
        )
        self.folder = place.folder
        names, numbers = [], []
        for index, number in zip(usable, self.labels().tolist(), strict=True):
            where, value, _ = rows[index]
            if os.path.isfile(file := place.file(value)):
                names.append(place.name(value))
                numbers.append(number)
            else:
                self.problems.append(
                    base.Problem(str(file), f"is no file ({where} of {path.name})")
                )
        self.take_names(names, numbers)

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

        Rows that repeat a file become problems. Raises UserError if they have other values.
        """
        first: dict[str, tuple[str, str, list[str]]] = {}
        for where, (path, *values) in self._usable(table, [place.column, *columns.names]):
            if not path:
                reason = f"has an empty {place.column}"
                self.problems.append(base.Problem(f"{self.where} {where}", reason))
                continue
            row = where, clean(path), values
            earlier = first.setdefault(os.path.normpath(place.file(row[1])), row)
            if earlier is row:
                continue
            for name, value, earlier_value in zip(columns.names, values, earlier[2], strict=True):
                # The labels may be in another order.
                if sorted(LABELS.findall(value)) != sorted(LABELS.findall(earlier_value)):
                    raise UserError(
                        f"{self.where} {where}: {path} has {name} {value or 'none'}, in"
                        f" {earlier[0]} "
                        f"{earlier_value or 'none'}; give several labels in one row: a;b"
                    )
            reason = f"repeats {path} of {earlier[0]}"
            self.problems.append(base.Problem(f"{self.where} {where}", reason))
        return list(first.values())


def clean(value: str) -> str:
    """Return a path with slashes; of Label Studio's `/data/local-files/?d=PATH`, return PATH."""
    if value.startswith("/data/"):
        value = unquote(value.rpartition("?d=")[2])
    return base.with_slashes(value)


def _find_place(
    path: Path, folder: Path, counts: labels.Counts, options: base.SourceOptions, remarks: list[str]
) -> Place:
    """Return the conversion that finds the files of the table, and add a remark about it.

    Raises UserError if there are no files, or several possible conversions.
    """
    suffix = options.suffix
    suffix = f".{suffix}" if suffix and suffix.isalnum() else suffix
    lower = {name.lower(): name for name in counts}
    usual = [lower[name] for name in PATHS if name in lower]
    if options.path_column is not None:
        usual = [labels.find_name(str(path), "--path-column", options.path_column, counts)]
    groups = [[name] for name in usual]
    if options.path_column is None:
        groups.append([name for name in counts if name not in usual])
    places: list[Place] = []
    for group in groups:
        if not places:
            for name in group:
                places += _places(name, counts[name], folder, suffix, options)
    for option, values in (
        ("--path-column", {place.column for place in places}),
        ("--root", {str(place.folder) for place in places}),
        ("--suffix", {place.suffix for place in places}),
    ):
        if len(values) > 1:
            raise UserError(
                f"{path}: {' and '.join(sorted(values)[:3])} fit: choose one with {option}"
            )
    if not usual and not places:
        raise UserError(
            f"{path}: no column path, its columns are {', '.join(counts)}; pass --path-column NAME"
        )
    if not places:
        value = clean(next(iter(counts[usual[0]])))
        raise UserError(
            f"{path}: {folder / value}{suffix or ''} is no file, as are others of the column"
            f" {usual[0]}: pass --root"
            " with the folder of the images, and --suffix .jpg where the names have none"
        )
    place = places[0]
    if place != Place(usual[0] if usual else "", 0, suffix or "", folder):
        value = next(
            value for value in counts[place.column] if os.path.isfile(place.file(clean(value)))
        )
        remarks.append(
            f'{path}: images from column "{place.column}": {value} is {place.file(clean(value))}'
        )
    return place


def _places(
    column: str,
    values: Iterable[str],
    folder: Path,
    suffix: str | None,
    options: base.SourceOptions,
) -> list[Place]:
    """Return the ways to convert a column's values to paths for which one of the first values is a
    file.

    Files are searched for in `folder` and, unless it is `options.root`, in its sub-folders. As few
    folders of the paths as possible are removed. A suffix is added only to paths without one.
    """
    paths = [clean(value) for value in itertools.islice(filter(None, values), MOST_TRIALS)]
    below = [] if options.root else sorted(filter(Path.is_dir, folder.iterdir()))
    folders = [[folder], below if len(below) <= MOST_TRIALS else []]
    suffixes = [[suffix or ""]]
    if suffix is None and not any(PurePosixPath(path).suffix.lower() in SUFFIXES for path in paths):
        suffixes.append(sorted(SUFFIXES | set(map(str.upper, SUFFIXES))))
    for skipped, added, inside in itertools.product(range(DEEPEST), suffixes, folders):
        for path in paths:
            hits = []
            for inner, text in itertools.product(inside, added):
                place = Place(column, skipped, text, inner)
                if place.name(path) and os.path.isfile(place.file(path)):
                    hits.append(place)
            if hits:
                return hits
    return []
