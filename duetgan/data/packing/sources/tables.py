"""Open Parquet and Arrow files that have the bytes of images in a column.

table_files.py reads them. Hugging Face's `save_to_disk` writes a folder of Arrow files for each
split.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.errors import ImageError, read_error
from duetgan.data.packing.sources import base, labels
from duetgan.utils import files
from duetgan.utils.errors import UserError, explained, refuse
from duetgan.utils.text import printable

LABEL_ROWS = 10_000  # rows read at a time of columns of labels
IMAGE_ROWS = 4  # rows read at a time of images
REMEDY = "copy or get it again"


class TableSource(base.Source):
    """A source of the images in a column of Parquet or Arrow files.

    Reading is fast in ascending order, as in packing. If an earlier row is needed, reading starts
    again at that row. Raises UserError for an unusable file.
    """

    in_order = True
    takes = frozenset(("label_column", "label_separator", "split_column", "group_column"))

    def __init__(self, path: Path, options: base.SourceOptions) -> None:
        super().__init__(path.name, [])
        if importlib.util.find_spec("pyarrow") is None:
            raise UserError(
                "Parquet and Arrow files need pyarrow, which is not installed: pip install pyarrow"
            )
        from duetgan.data.packing.sources import table_files  # imports pyarrow

        suffix = base.sharded(path) if path.is_dir() else path.suffix.lower()
        self.paths, self.splits, self.ignored = base.choose_shards(path, suffix, options.split)
        self._read = table_files.read
        counts = [0]
        for number, file in enumerate(self.paths):
            with files.reading(file, REMEDY):
                size = files.check(file, files.ARCHIVE).st_size
                table = table_files.open_table(file)
            counts.append(table.rows)
            if not number:
                self._schema = schema = table.schema
            refuse(
                (  # An image has at least a byte.
                    table.rows > size,
                    f"{file} says that it holds {table.rows:,} rows in {size:,} bytes; get it again",
                ),
                (
                    table.schema != schema,
                    f"{file} has other columns than {self.paths[0].name}; get both from one place",
                ),
            )
        # number of the first row of each file, and the number of all rows
        self._starts = np.cumsum(counts)
        names = [field.name for field in schema if table_files.holds_images(field.type)]
        if "image" in names:
            names = ["image"]
        if len(names) != 1:
            reason = "no column holds bytes of images; for paths give a CSV file"
            if names:
                reason = f"{' and '.join(names)} could be images, call one image"
            kinds = ", ".join(f"{field.name} ({field.type})" for field in schema)
            raise UserError(f"{path}: {reason}; its columns are {kinds}")
        self._image = names[0]
        self._rows = np.arange(self._starts[-1])  # rows of the images in all files
        self._images: Iterator[Any] | None = None  # from row `_next` on
        self._next = 0
        self._take_rows(path, options)

    def _take_rows(self, path: Path, options: base.SourceOptions) -> None:
        """Choose the rows of the split as the source's images, and set their labels.

        A row without a label becomes a problem. This is a row with null, empty text or, if the
        classes have names, -1 in the column of labels.
        """
        where, schema = str(path), self._schema
        is_named = path.is_file() and base.SPLIT_INSIDE.search(path.stem.lower())
        if self.splits or is_named:  # The files are those of one split.
            options = options._replace(
                split_column=options.split_column or base.NO_LABELS, split=None
            )
        names = [name for name in schema.names if name != self._image]
        columns = labels.choose_columns(where, names, options)
        class_names = class_names_of(where, schema.metadata, columns.label)
        rows: list[list[labels.Value]] = [[] for _ in self._rows]
        if columns.names:
            rows = list(self._values(columns.names))
        if class_names:
            rows = [["", *row[1:]] if row[0] == "-1" else row for row in rows]
        places = list(map(self.item_name, range(len(rows))))
        self._rows = self._rows[labels.take_columns(self, where, columns, rows, places, options)]
        if class_names:
            if not {*self.classes} <= {*map(str, range(len(class_names)))}:
                raise UserError(
                    f"{where}: a label is none of its {len(class_names)} classes; get it again"
                )
            self.classes = [class_names[int(label)] for label in self.classes]

    def _values(self, columns: list[str]) -> Iterator[list[labels.Value]]:
        """Yield the values of each row in `columns`.

        Raises UserError if all values together exceed the size limit of a table.
        """
        size = 0
        for file in self.paths:
            with files.reading(file, REMEDY):
                for piece_size, values in self._read(file, columns, 0, LABEL_ROWS):
                    size += piece_size
                    files.refuse_large(size, files.TABLE)
                    for row in zip(*values, strict=True):
                        yield list(map(labels.as_value, row))

    def _images_from(self, row: int) -> Iterator[Any]:
        shard, row = self._place(row)
        for file in self.paths[shard:]:
            for _, (images,) in self._read(file, [self._image], row, IMAGE_ROWS):
                yield from images
            row = 0

    def content(self, index: int) -> bytes:
        row = int(self._rows[index])
        if self._images is None or row < self._next:
            self._images, self._next = self._images_from(row), row
        content: Any = None
        try:
            while self._next <= row:
                content = next(self._images, None)
                self._next += 1
        except OSError as error:
            self._images = None
            raise read_error(error) from None
        if isinstance(content, dict):
            content = content["bytes"]
        if content is None:
            raise ImageError("holds no bytes, perhaps only a path")
        with explained(OSError, read_error):
            files.refuse_large(len(content), files.IMAGE)
        return bytes(content)

    def _place(self, row: int) -> tuple[int, int]:
        """Return the index of the file that has a row, and the row's number in that file."""
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        return shard, row - int(self._starts[shard])

    def item_name(self, index: int) -> str:
        shard, row = self._place(int(self._rows[index]))
        return f"{self.paths[shard]}: row {row}"

    def stored_name(self, index: int) -> str:
        shard, row = self._place(int(self._rows[index]))
        return f"{self.paths[shard].name}: row {row}"


def class_names_of(
    where: str, metadata: dict[bytes, bytes] | None, column: str | None
) -> list[str]:
    """Return a column's class names from Hugging Face's metadata (ClassLabel); [] if it has none.

    `metadata` is that of the table's schema. `where` names the table in messages.
    """
    record = (metadata or {}).get(b"huggingface")
    if record is None or column is None:
        return []
    with files.reading(
        f"{where}: its metadata record huggingface",
        "get it again",
        *(ValueError, AttributeError, TypeError, KeyError, RecursionError),
    ):
        feature = json.loads(record)["info"]["features"].get(column, {})
        # The column may have lists of a feature.
        names = feature.get("feature", feature).get("names", [])
        return [printable(str(name)) for name in names]
