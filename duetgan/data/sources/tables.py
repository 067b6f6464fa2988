"""Tables with images' bytes in a column: Parquet and Arrow files, read by a process of its own
(table_child.py).

Hugging Face's `save_to_disk` writes a folder of Arrow files whose `state.json` names them in order,
or a folder of such folders, the splits that `dataset_dict.json` names. A folder of `.arrow` files
without either is the library's cache.
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from duetgan.data.errors import ImageError, unread
from duetgan.data.sources import base, labels
from duetgan.data.sources.path_tables import PathTable
from duetgan.utils import bounded
from duetgan.utils.errors import UserError, explained
from duetgan.utils.memory import available_bytes
from duetgan.utils.text import listed, printable

MEMORY_SHARE = 0.5  # of what is available, for the process that reads
LOOKED_AT = 10_000  # rows of a column that may be labels
PIECE_ROWS = 16  # of images at a time
LABELS = ("text", "number", "flag", "list")  # uses of a column that may be labels
READABLE = (*LABELS, "real")
INSTEAD = ", perhaps only paths: give the folder of the images, or a CSV file with the column path"


class _Table(NamedTuple):
    """What a file holds, see table_child.py."""

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
    """The process that reads, one for all tables; it is started when it is needed, and again after
    it has died.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # who started it, what stops it, the connection
        self._alive: tuple[int, Any, Any] | None = None

    def ask(
        self,
        path: Path,
        columns: Sequence[str] | None,
        start: int,
        rows: int,
        kind: bounded.FileLimit,
    ) -> Any:
        """What table_child.py answers with. Raises OSError."""
        bounded.check(path, bounded.ARCHIVE)
        with self._lock:
            if self._alive is None or self._alive[0] != os.getpid():
                self._alive = self._start()
            _, stop, connection = self._alive
            try:
                connection.send([str(path), columns, start, rows, kind.limit])
                what, answer = connection.recv()
            except BaseException as error:  # also an answer that nobody waits for
                stop()
                self._alive = None
                if not isinstance(error, (EOFError, OSError)):
                    raise
                raise OSError(
                    errno.EIO, "it takes too much memory, or ends the process that reads it"
                ) from None
        if what == "large":
            bounded.refuse_large(answer, kind)
        if what == "error":
            raise OSError(errno.EIO, answer)
        return answer

    def _start(self) -> tuple[int, Any, Any]:
        ours, theirs = Pipe()
        memory = str(int(MEMORY_SHARE * available_bytes()))
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(Path(__file__).with_name("table_child.py")),
                str(theirs.fileno()),
                memory,
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # the others reserve more than they use
            env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},
        )
        theirs.close()
        return os.getpid(), weakref.finalize(self, _stop, process, ours, os.getpid()), ours


def _stop(process: "subprocess.Popen[bytes]", connection: Any, pid: int) -> None:
    connection.close()
    if pid == os.getpid():
        process.kill()
        process.wait()


_child = _Child()
_reading = functools.partial(bounded.reading, remedy="copy or get it again")


class Shards:
    """The rows of some files of one kind, one after the other; a Table of path_tables.py. Raises
    UserError for what cannot be used, by name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise UserError(
                "Parquet and Arrow files need pyarrow, which is not installed: pip install pyarrow"
            )
        self.paths, self.tables = list(paths), list[_Table]()
        for path in self.paths:
            with _reading(path):
                table = _Table(*_child.ask(path, None, 0, 0, bounded.TABLE))
            self.tables.append(table)
            if table.rows > (size := path.stat().st_size):  # no image takes less than a byte
                raise UserError(
                    f"{path} says that it holds {table.rows:,} rows in {size:,} bytes; get it again"
                )
        # of the files' rows, and their end
        self.starts = np.cumsum([0, *(table.rows for table in self.tables)])
        self.first = self.tables[0]
        self.names = self.first.of_use(*READABLE)

    def check(self, columns: Iterable[str]) -> None:
        """Raise UserError for a column that some file lacks or has of another type."""
        for name in columns:
            kind = self.first.types[name]
            for path, table in zip(self.paths, self.tables, strict=True):
                if (other := table.types.get(name, "missing")) != kind:
                    raise UserError(
                        f"{path}: the column {name} is {other}, in {self.paths[0].name} {kind}"
                    )

    def rows(
        self, columns: Sequence[str], limit: float = math.inf
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield the rows as text. Raises UserError beyond so many bytes."""
        self.check(columns)
        number, size = itertools.count(), 0
        for path, table in zip(self.paths, self.tables, strict=True):
            read = 0
            while columns and read < table.rows:
                with _reading(path):
                    more, values = _child.ask(path, list(columns), read, LOOKED_AT, bounded.TABLE)
                    size += more
                    if size > limit:
                        raise bounded.Refused(
                            f"its columns {', '.join(columns)} have more than {bounded.TABLE.remedy}"
                        )
                for row in zip(*values, strict=True):
                    yield f"row {next(number)}", list(map(labels.as_text, row))
                read += len(values[0])

    def place(self, row: int) -> tuple[int, int]:
        """Return the file in which a row lies, and its number there."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return shard, row - int(self.starts[shard])


class TableSource(base.Source):
    """The images in the rows of some files. Raises UserError for what cannot be used, by name.

    Rows are read forward, as packing goes; a step back begins anew.
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
        self._rows = np.arange(shards.starts[-1])  # of all files, one after the other
        counts = labels.count(shards.names, (row for _, row in shards.rows(shards.names)))
        odd = (name for name in shards.first.types if name in (labels.LABEL, options.label_column))
        counts = {name: Counter() for name in odd} | counts
        declared = [name for name in shards.names if class_names(first, shards.first, name)]
        columns = labels.choose_columns(self, str(path), counts, options, declared=declared)
        for name in columns.names:
            if shards.first.use(name) not in LABELS and not columns.one_hot:
                kind = shards.first.types[name]
                raise UserError(
                    f"{first}: the column {name} is {kind}; labels are whole numbers, text or lists"
                )
        self._take_rows(str(path), columns, options)
        # the file, the first row in it, and the images there
        self._piece: tuple[int, int, Any] = (0, 0, [])

    # --- columns

    def _image_column(self, path: Path, table: _Table) -> str:
        images = table.of_use("bytes")
        if "image" in images:
            images = ["image"]
        if len(images) != 1:
            several = f"{' and '.join(images)} could be images, call one image"
            reason = several if images else f"no column holds bytes{INSTEAD}"
            columns = ", ".join(f"{name} ({kind})" for name, kind in table.types.items())
            raise UserError(f"{path}: {reason}; its columns are {columns}")
        return images[0]

    def _take_rows(self, where: str, columns: labels.Columns, options: base.SourceOptions) -> None:
        """Take the labels, and leave out rows that have none (null, empty text and numbers below 0)
        and those of other splits. Of classes that the schema names, those that no image has are
        left out.
        """
        rows = [row for _, row in self.shards.rows(columns.names, bounded.TABLE.limit)]
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
        """Give the classes the names of the schema, if it has them, and its order."""
        paths, tables = self.shards.paths, self.shards.tables
        names = class_names(paths[0], tables[0], column)
        for path, table in zip(paths, tables, strict=True):
            if class_names(path, table, column) != names:
                raise UserError(
                    f"{path} and {paths[0].name} name their classes differently: get both from one place"
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
            with explained(OSError, unread):
                _, (images,) = _child.ask(
                    self.shards.paths[shard], [self._image], row, PIECE_ROWS, bounded.IMAGE
                )
            first = row
            self._piece = (shard, first, images)
        content: bytes | None = images[row - first]
        if content is None:
            raise ImageError(f"holds no bytes{INSTEAD}")
        with explained(OSError, unread):
            bounded.refuse_large(len(content), bounded.IMAGE)
        return content

    def item_name(self, index: int) -> str:
        shard, row = self.shards.place(int(self._rows[index]))
        return f"{self.shards.paths[shard]}: row {row}"

    def stored_name(self, index: int) -> str:
        shard, row = self.shards.place(int(self._rows[index]))
        return f"{self.shards.paths[shard].name}: row {row}"


def class_names(path: Path, table: _Table, column: str) -> list[str]:
    """The names of a ClassLabel in Hugging Face's metadata, or none."""
    if table.metadata is None:
        return []
    record = f"{path}: its metadata record huggingface"
    faults = (ValueError, AttributeError, IndexError, RecursionError)
    with bounded.reading(record, "get it again", *faults):
        content = json.loads(table.metadata)
        feature = content.get("info", content).get("features", {}).get(column, {})
        # of a list
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
    """Return the images of Parquet or Arrow files (None: those of the path's split): in a column of
    bytes, else those that a column of paths names.
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
    source: base.Source = (
        PathTable(path, options, table) if named else TableSource(path, options, table)
    )
    source.splits, source.ignored = splits or source.splits, ignored
    return source


STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    return (folder / SPLITS).is_file() or (folder / STATE).is_file()


def open_arrow(path: Path, options: base.SourceOptions) -> base.Source:
    """The images of an Arrow file or of a folder of `save_to_disk`. Raises UserError for what
    cannot be used.
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
    """Whether it names a file or folder beside the document."""
    return isinstance(name, str) and Path(name).name == name != ".."


def _shards(folder: Path) -> list[Path]:
    """The files of a data set. Raises UserError for what is not there, leads out of the folder, or
    is reordered.
    """
    state = _document(folder / STATE)
    names: list[Any] = []
    with suppress(KeyError, TypeError):
        names = [item["filename"] for item in state["_data_files"]]
    if not names or not all(map(_is_name, names)):
        raise UserError(f"{folder / STATE} names no files in _data_files; save it again")
    if state.get("_indices_data_files"):
        raise UserError(
            f"{folder} is a selection of another data set: save it after flatten_indices()"
        )
    if (
        missing := next((name for name in names if not (folder / name).is_file()), None)
    ) is not None:
        raise UserError(
            f"{folder}: {missing} is missing, which {STATE} names: copy or save it again"
        )
    return [folder / name for name in names]


def _document(path: Path) -> dict[str, Any]:
    with bounded.reading(path, "save it again", ValueError, RecursionError):
        content = json.loads(bounded.read_file(path, bounded.TABLE))
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; save it again")
    return content
