"""Parquet and Arrow files with the bytes of images in a column, read by a separate process
(table_child.py).

Hugging Face's `save_to_disk` writes a folder of Arrow files, listed in `state.json` in order, or
such a folder for each split, listed in `dataset_dict.json`. A folder of `.arrow` files without
these documents is the library's cache.
"""

import errno
import functools
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import unicodedata
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from duetgan.data.errors import ImageError, read_error
from duetgan.data.sources import base, labels
from duetgan.data.sources.path_tables import PathTable
from duetgan.utils import files
from duetgan.utils.errors import UserError, explained
from duetgan.utils.machine import available_bytes
from duetgan.utils.text import listed, printable

MEMORY_FRACTION = 0.5  # of the available memory, for the reading process
LABEL_ROWS = 10_000  # rows requested at a time of columns that may be labels
IMAGE_ROWS = 16  # rows requested at a time of images
LABELS = ("text", "number", "flag", "list")  # uses of a column that may be labels
READABLE = (*LABELS, "real")
INSTEAD = ", perhaps only paths: give the folder of the images, or a CSV file with the column path"


class _Table(NamedTuple):
    """The description of a file by table_child.py."""

    rows: int
    columns: list[tuple[str, str, str]]  # name, type and use
    metadata: bytes | None  # of Hugging Face's library

    @property
    def types(self) -> dict[str, str]:
        return {name: kind for name, kind, _ in self.columns}

    def of_use(self, *uses: str) -> list[str]:
        return [name for name, _, use in self.columns if use in uses]

    def use(self, column: str) -> str:
        return next(use for name, _, use in self.columns if name == column)


class _Child:
    """The process of table_child.py for all tables, started when a request finds none running."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def ask(
        self,
        path: Path,
        columns: Sequence[str] | None,
        start: int,
        rows: int,
        kind: files.FileLimit,
    ) -> Any:
        """Send a request and return the answer. Raises OSError if the file cannot be read."""
        files.check(path, files.ARCHIVE)
        with self._lock:
            if self._running is None or self._running.parent != os.getpid():
                self._running = self._start()
            try:
                self._running.connection.send([str(path), columns, start, rows, kind.limit])
                status, answer = self._running.connection.recv()
            except BaseException as error:  # BaseException: after Ctrl-C an answer would be pending
                self._running.stop()
                self._running = None
                if not isinstance(error, (EOFError, OSError)):
                    raise
                raise OSError(
                    errno.EIO, "it takes too much memory, or ends the process that reads it"
                ) from None
        if status == "large":
            files.refuse_large(answer, kind)
        if status == "error":
            raise OSError(errno.EIO, answer)
        return answer

    def _start(self) -> "_Running":
        connection, child_connection = Pipe()
        memory = str(int(MEMORY_FRACTION * available_bytes()))
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(Path(__file__).with_name("table_child.py")),
                str(child_connection.fileno()),
                memory,
            ],
            pass_fds=[child_connection.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Other memory pools reserve more than they use.
            env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},
        )
        child_connection.close()
        stop = weakref.finalize(self, _stop, process, connection, os.getpid())
        return _Running(os.getpid(), stop, connection)


class _Running(NamedTuple):
    """A running process of table_child.py."""

    parent: int  # id of the process that started it
    stop: Callable[[], object]
    connection: Connection


def _stop(process: "subprocess.Popen[bytes]", connection: Connection, parent: int) -> None:
    connection.close()
    if parent == os.getpid():
        process.kill()
        process.wait()


_child = _Child()
_reading = functools.partial(files.reading, remedy="copy or get it again")


class Shards:
    """The concatenated rows of files of one kind, as a Table of path_tables.py.

    Raises UserError for a file that cannot be used.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise UserError(
                "Parquet and Arrow files need pyarrow, which is not installed: pip install pyarrow"
            )
        self.paths = list(paths)
        self.tables: list[_Table] = []
        for path in self.paths:
            with _reading(path):
                table = _Table(*_child.ask(path, None, 0, 0, files.TABLE))
            self.tables.append(table)
            if table.rows > (size := path.stat().st_size):  # An image has at least a byte.
                raise UserError(
                    f"{path} says that it holds {table.rows:,} rows in {size:,} bytes; get it again"
                )
        # number of the first row of each file, and the number of all rows
        self.starts = np.cumsum([0, *(table.rows for table in self.tables)])
        self.first = self.tables[0]
        self.names = self.first.of_use(*READABLE)

    def check(self, columns: Iterable[str]) -> None:
        """Raise UserError for a column that is missing in a file or has another type there."""
        for name in columns:
            kind = self.first.types[name]
            for path, table in zip(self.paths, self.tables, strict=True):
                if (other_kind := table.types.get(name, "missing")) != kind:
                    raise UserError(
                        f"{path}: the column {name} is {other_kind}, in {self.paths[0].name} {kind}"
                    )

    def rows(
        self, columns: Sequence[str], limit: float = math.inf
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield the rows as text. Raises UserError for more than `limit` bytes."""
        self.check(columns)
        number, size = itertools.count(), 0
        for path, table in zip(self.paths, self.tables, strict=True):
            read = 0
            while columns and read < table.rows:
                with _reading(path):
                    piece_size, values = _child.ask(
                        path, list(columns), read, LABEL_ROWS, files.TABLE
                    )
                    size += piece_size
                    if size > limit:
                        raise files.Refused(
                            f"its columns {', '.join(columns)} have more than {files.TABLE.remedy}"
                        )
                for row in zip(*values, strict=True):
                    yield f"row {next(number)}", list(map(labels.as_text, row))
                read += len(values[0])

    def place(self, row: int) -> tuple[int, int]:
        """Return the file of a row, and its number in that file."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return shard, row - int(self.starts[shard])


class TableSource(base.Source):
    """The images in a column of Parquet or Arrow files. Raises UserError for an unusable file.

    Reading is fast in ascending order, as in packing; an earlier row needs a new start.
    """

    in_order = True
    takes = frozenset(("label_column", "label_separator", "split_column"))

    def __init__(self, path: Path, options: base.SourceOptions, shards: Shards) -> None:
        super().__init__(path.name, [])
        self.shards = shards
        first = shards.paths[0]
        self._image = self._image_column(first, shards.first)
        shards.check([self._image])
        if not shards.starts[-1]:
            raise UserError(f"{path} holds no rows: get it again")
        self._rows = np.arange(shards.starts[-1])  # rows of the images in all files
        counts = labels.count(shards.names, (row for _, row in shards.rows(shards.names)))
        odd = (name for name in shards.first.types if name in (labels.LABEL, options.label_column))
        counts = {name: Counter[str]() for name in odd} | counts
        declared = [name for name in shards.names if class_names(first, shards.first, name)]
        columns = labels.choose_columns(self, str(path), counts, options, declared=declared)
        for name in columns.names:
            if shards.first.use(name) not in LABELS and not columns.one_hot:
                kind = shards.first.types[name]
                raise UserError(
                    f"{first}: the column {name} is {kind}; labels are whole numbers, text or lists"
                )
        self._take_rows(str(path), columns, options)
        # images read last: index of their file, first row, contents
        self._piece: tuple[int, int, Any] = (0, 0, [])

    # --- columns

    def _image_column(self, path: Path, table: _Table) -> str:
        images = table.of_use("bytes")
        if "image" in images:
            images = ["image"]
        if len(images) != 1:
            reason = f"no column holds bytes{INSTEAD}"
            if images:
                reason = f"{' and '.join(images)} could be images, call one image"
            columns = ", ".join(f"{name} ({kind})" for name, kind in table.types.items())
            raise UserError(f"{path}: {reason}; its columns are {columns}")
        return images[0]

    def _take_rows(self, where: str, columns: labels.Columns, options: base.SourceOptions) -> None:
        """Set the labels, and the rows of the split, as the images.

        Rows without a label (null, empty text, a number below 0) are omitted. Classes of the schema
        without images are omitted too.
        """
        rows = [row for _, row in self.shards.rows(columns.names, files.TABLE.limit)]
        rows = rows or [[]] * len(self._rows)
        single = len(columns.labels) == 1 and not columns.one_hot
        if single and self.shards.first.use(columns.labels[0]) == "number":
            rows = [["", *row[1:]] if row[0].startswith("-") else row for row in rows]
        places = list(map(self.item_name, range(len(rows))))
        self._rows = self._rows[labels.take_columns(self, where, columns, rows, places, options)]
        if not len(self._rows):
            raise UserError(
                f"{where}: no row has a label: choose another --split or drop the column"
            )
        if single:
            self._name_classes(where, columns.labels[0])

    def _name_classes(self, where: str, column: str) -> None:
        """Set the class names from the schema, if it has some."""
        paths, tables = self.shards.paths, self.shards.tables
        names = class_names(paths[0], tables[0], column)
        for path, table in zip(paths, tables, strict=True):
            if class_names(path, table, column) != names:
                raise UserError(
                    f"{path} and {paths[0].name} name their classes differently: get both from one"
                    " place"
                )
        if not names:
            return
        odd = [label for label in self.classes if not label.isdecimal() or int(label) >= len(names)]
        if odd:
            raise UserError(
                f"{where}: the label {odd[-1]} is none of its {len(names)} classes; get it again"
            )
        self.classes = [names[int(label)] for label in self.classes]
        if unused := [name for name in names if name not in self.classes]:
            self.remarks.append(
                f"left out: {listed(unused)}: classes of {self.name} that no image belongs to"
            )

    # --- images

    def content(self, index: int) -> bytes:
        shard, row = self.shards.place(int(self._rows[index]))
        number, first, images = self._piece
        if number != shard or not first <= row < first + len(images):
            with explained(OSError, read_error):
                _, (images,) = _child.ask(
                    self.shards.paths[shard], [self._image], row, IMAGE_ROWS, files.IMAGE
                )
            first = row
            self._piece = (shard, first, images)
        content: bytes | None = images[row - first]
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


def class_names(path: Path, table: _Table, column: str) -> list[str]:
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
    raise UserError(
        f"{path}: the names of the classes in its metadata are not distinct strings; get it again"
    )


def open_table(
    path: Path, options: base.SourceOptions, shards: Sequence[Path] | None = None
) -> base.Source:
    """Open the images of Parquet or Arrow files, from a column of bytes or else a column of paths.

    `shards` are the files; None: those at `path` of the split in `options`.
    """
    splits: tuple[str, ...] = ()
    ignored: list[str] = []
    if shards is None:
        suffix = base.sharded(path) if path.is_dir() else path.suffix.lower()
        shards, splits, ignored = base.choose_shards(path, suffix, options.split)
    table = Shards(shards)
    if splits or base.SPLIT_PREFIX.match(path.stem.lower()):  # the files are those of one split
        options = options._replace(split_column=options.split_column or base.NO_LABELS, split=None)
    named = not table.first.of_use("bytes") and table.first.of_use("text")
    source: base.Source
    if named:
        source = PathTable(path, options, table)
    else:
        source = TableSource(path, options, table)
    source.splits = splits or source.splits
    source.ignored = ignored
    return source


STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    return (folder / SPLITS).is_file() or (folder / STATE).is_file()


def open_arrow(path: Path, options: base.SourceOptions) -> base.Source:
    """Open the images of an Arrow file or of a folder of `save_to_disk`.

    Raises UserError if the file or folder cannot be used.
    """
    if not is_saved(path):
        return open_table(path, options)
    if not (path / SPLITS).is_file():
        return open_table(path, options, _shards(path))
    splits = _document(path / SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(map(_is_name, splits)):
        raise UserError(f"{path / SPLITS} names no splits; save it again")
    if options.split in splits or (options.split is None and len(splits) == 1):
        chosen = options.split or splits[0]
    else:
        chosen = base.choose_split(path, options.split, splits)
    options = options._replace(split=None, split_column=options.split_column or base.NO_LABELS)
    source = open_table(path, options, _shards(path / chosen))
    source.name, source.splits = f"{path.name} {chosen}", tuple(sorted(splits))
    return source


def _is_name(name: object) -> bool:
    """Return True for a file name that does not lead to another folder."""
    return isinstance(name, str) and Path(name).name == name != ".."


def _shards(folder: Path) -> list[Path]:
    """Return the files of a folder of `save_to_disk`. Raises UserError for a missing file, one
    outside the folder, and reordered rows.
    """
    state = _document(folder / STATE)
    names: list[str] = []
    with suppress(KeyError, TypeError):
        names = [item["filename"] for item in state["_data_files"]]
    if not names or not all(map(_is_name, names)):
        raise UserError(f"{folder / STATE} names no files in _data_files; save it again")
    if state.get("_indices_data_files"):
        raise UserError(
            f"{folder} is a selection of another data set: save it after flatten_indices()"
        )
    paths = [folder / name for name in names]
    for path in paths:
        if not path.is_file():
            raise UserError(
                f"{folder}: {path.name} is missing, which {STATE} names: copy or save it again"
            )
    return paths


def _document(path: Path) -> dict[str, Any]:
    with files.reading(path, "save it again", ValueError, RecursionError):
        content = json.loads(files.read_file(path, files.TABLE))
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; save it again")
    return content
