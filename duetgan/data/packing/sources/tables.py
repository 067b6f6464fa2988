"""Parquet and Arrow files with the bytes of images in a column (table_files.py reads them).
Hugging Face's `save_to_disk` writes a folder of Arrow files for each split.
"""

import errno
import functools
import importlib.util
import json
import math
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from duetgan.data.errors import ImageError, read_error
from duetgan.data.packing.sources import base, labels
from duetgan.data.packing.sources.path_tables import PathTable
from duetgan.utils import files
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import listed, printable

LABEL_ROWS = 10_000  # rows received at a time of columns that may be labels
IMAGE_ROWS = 16  # rows received at a time of images
LABELS = ("text", "number", "flag", "list")  # uses of a column that may be labels
# number of bytes, and values column by column
Pieces = Iterator[tuple[int, list[list[Any]]]]
INSTEAD = ", perhaps only paths: give the folder of the images, or a CSV file with the column path"


class Table(NamedTuple):
    """The description of a file by table_files.py."""

    rows: int
    columns: list[tuple[str, str, str]]  # name, type and use
    metadata: bytes | None  # of Hugging Face's library

    def of_use(self, *uses: str) -> list[str]:
        return [name for name, _, use in self.columns if use in uses]


_reading = functools.partial(files.reading, remedy="copy or get it again")


class Shards:
    """The concatenated rows of files of one kind, as a Table of path_tables.py.

    Raises UserError for a file that cannot be used, or that has other columns than the first.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise UserError(
                "Parquet and Arrow files need pyarrow, which is not installed: pip install pyarrow"
            )
        self.paths = list(paths)
        tables = []
        # column -> class names, of the first file
        self.class_names: dict[str, list[str]] = {}
        from duetgan.data.packing.sources import table_files  # imports pyarrow

        for path in paths:
            with _reading(path):
                size = files.check(path, files.ARCHIVE).st_size
                table = Table(*table_files.describe(str(path)))
            tables.append(table)
            names = {name: class_names(path, table, name) for name in table.of_use(*LABELS)}
            self.class_names = self.class_names or names
            if table.rows > size:  # An image has at least a byte.
                raise UserError(
                    f"{path} says that it holds {table.rows:,} rows in {size:,} bytes; get it again"
                )
            if table.columns != tables[0].columns or names != self.class_names:
                raise UserError(
                    f"{path} has other columns or class names than {paths[0].name}; get both from"
                    " one place"
                )
        self.first = tables[0]
        # number of the first row of each file, and the number of all rows
        self.starts = np.cumsum([0, *(table.rows for table in tables)])
        self.names = list(self.class_names)

    def pieces(
        self, columns: Sequence[str], start: int, rows: int, kind: files.FileLimit
    ) -> Pieces:
        """Yield the rows from row `start` on, at most `rows` at a time: their number of bytes, and
        their values column by column. Raises OSError if a file cannot be read.
        """
        from duetgan.data.packing.sources import table_files

        shard, row = self.place(start)
        for path in self.paths[shard:]:
            yield from table_files.read(str(path), list(columns), row, rows, kind)
            row = 0
        raise OSError(errno.EIO, "its rows end too early")

    def rows(
        self, columns: Sequence[str], limit: float = math.inf
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield each row's name and values as text. Raises UserError beyond `limit` bytes."""
        if not columns:
            return
        number, size = 0, 0
        pieces = self.pieces(columns, 0, LABEL_ROWS, files.TABLE)
        while number < self.starts[-1]:
            with _reading(self.paths[self.place(number)[0]]):
                piece_size, values = next(pieces)
                size += piece_size
                if size > limit:
                    raise files.Refused(
                        f"its columns {', '.join(columns)} have more than {files.TABLE.remedy}"
                    )
            for row in zip(*values, strict=True):
                yield f"row {number}", list(map(labels.as_text, row))
                number += 1

    def place(self, row: int) -> tuple[int, int]:
        """Return the index of the file that has a row, and the row's number in that file."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return shard, row - int(self.starts[shard])


class TableSource(base.Source):
    """The images in a column of Parquet or Arrow files. Raises UserError for an unusable file.

    Reading is fast in ascending order, as in packing; for an earlier row the file is opened again.
    """

    in_order = True
    takes = frozenset(("label_column", "label_separator", "split_column", "group_column"))

    def __init__(self, path: Path, options: base.SourceOptions, shards: Shards) -> None:
        super().__init__(path.name, [])
        self.shards = shards
        first = shards.first
        images = first.of_use("bytes")
        if "image" in images:
            images = ["image"]
        if len(images) != 1:
            reason = f"no column holds bytes{INSTEAD}"
            if images:
                reason = f"{' and '.join(images)} could be images, call one image"
            kinds = ", ".join(f"{name} ({kind})" for name, kind, _ in first.columns)
            raise UserError(f"{path}: {reason}; its columns are {kinds}")
        self._image = images[0]
        self._rows = np.arange(shards.starts[-1])  # rows of the images in all files
        self._images: Iterator[bytes | None] | None = None  # from row `_next` on
        self._next = 0
        self._take_rows(str(path), options)

    def _take_rows(self, where: str, options: base.SourceOptions) -> None:
        """Set the images, which are the rows of the split, and their labels.

        Rows without a label (null, empty text, a number below 0) become problems. Classes of the
        schema without images are omitted.
        """
        shards, first = self.shards, self.shards.first
        counts = labels.count(shards.names, (row for _, row in shards.rows(shards.names)))
        declared = [name for name in shards.names if shards.class_names[name]]
        columns = labels.choose_columns(self, where, counts, options, declared=declared)
        rows = [row for _, row in shards.rows(columns.names, files.TABLE.limit)]
        rows = rows or [[]] * len(self._rows)
        if columns.label in first.of_use("number"):
            rows = [["", *row[1:]] if row[0].startswith("-") else row for row in rows]
        places = list(map(self.item_name, range(len(rows))))
        self._rows = self._rows[labels.take_columns(self, where, columns, rows, places, options)]
        if not len(self._rows):
            raise UserError(
                f"{where}: no row has an image and label: choose another --split, or no column"
            )
        if names := shards.class_names.get(columns.label or "", []):
            if not {*self.classes} <= {*map(str, range(len(names)))}:
                raise UserError(
                    f"{where}: a label is none of its {len(names)} classes; get it again"
                )
            self.classes = [names[int(label)] for label in self.classes]
            if unused := [name for name in names if name not in self.classes]:
                self.remarks.append(
                    f"left out: {listed(unused)}: classes of {self.name} that no image belongs to"
                )

    def _images_from(self, row: int) -> Iterator[bytes | None]:
        for _, (images,) in self.shards.pieces([self._image], row, IMAGE_ROWS, files.IMAGE):
            yield from images

    def content(self, index: int) -> bytes:
        row = int(self._rows[index])
        if self._images is None or row < self._next:
            self._images, self._next = self._images_from(row), row
        content: bytes | None = None
        try:
            while self._next <= row:
                content = next(self._images)
                self._next += 1
        except OSError as error:
            self._images = None
            raise read_error(error) from None
        if content is None:
            raise ImageError(f"holds no bytes{INSTEAD}")
        with explained(OSError, read_error):
            files.refuse_large(len(content), files.IMAGE)
        return content

    def item_name(self, index: int) -> str:
        shard, row = self.shards.place(int(self._rows[index]))
        return f"{self.shards.paths[shard]}: row {row}"

    def stored_name(self, index: int) -> str:
        shard, row = self.shards.place(int(self._rows[index]))
        return f"{self.shards.paths[shard].name}: row {row}"


def class_names(path: Path, table: Table, column: str) -> list[str]:
    """Return the class names of a column in Hugging Face's metadata (ClassLabel), or []."""
    if table.metadata is None:
        return []
    record = f"{path}: its metadata record huggingface"
    faults = (ValueError, AttributeError, IndexError, RecursionError)
    with files.reading(record, "get it again", *faults):
        content = json.loads(table.metadata)
        feature = content.get("info", content).get("features", {}).get(column, {})
        # The column may have lists of a feature.
        feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        names = feature.get("names", [])
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        names = [unicodedata.normalize("NFC", name) for name in names]
        if len(set(names)) == len(names):
            return list(map(printable, names))
    return []


def open_table(path: Path, options: base.SourceOptions) -> base.Source:
    """Open the images of one or several files from a column of bytes or else a column of paths."""
    suffix = base.sharded(path) if path.is_dir() else path.suffix.lower()
    shards, splits, ignored = base.choose_shards(path, suffix, options.split)
    table = Shards(shards)
    is_named = path.is_file() and base.SPLIT_INSIDE.search(path.stem.lower())
    if splits or is_named:  # the files are those of one split
        options = options._replace(split_column=options.split_column or base.NO_LABELS, split=None)
    source: base.Source
    if not table.first.of_use("bytes") and table.first.of_use("text"):
        source = PathTable(path, options, table)
    else:
        source = TableSource(path, options, table)
    source.splits = splits or source.splits
    source.ignored = ignored
    return source
