"""Tables with images' bytes in a column: Parquet and Arrow files, read by a process of its own (table_child.py).

Hugging Face's `save_to_disk` writes a folder of Arrow files whose `state.json` names them in order, or a folder of such
folders, the splits that `dataset_dict.json` names. A folder of `.arrow` files without either is the library's cache.
"""

import errno
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
import unicodedata
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from duetgan.data.errors import ImageError, unread
from duetgan.data.sources import base
from duetgan.utils import bounded
from duetgan.utils.errors import UserError, explained
from duetgan.utils.memory import available_bytes
from duetgan.utils.text import listed, printable

MEMORY_SHARE = 0.5  # of what is available, for the process that reads
LOOKED_AT = 10_000  # rows of a column that may be labels
PIECE_ROWS = 16  # of images at a time
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


class _Child:
    """The process that reads, one for all tables; it is started when it is needed, and again after it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: tuple[int, Any, Any] | None = None  # who started it, what stops it, the connection

    def ask(self, path: Path, columns: Sequence[str] | None, start: int, rows: int, kind: bounded.FileLimit) -> Any:
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
                raise OSError(errno.EIO, "it takes too much memory, or ends the process that reads it") from None
        if what == "large":
            bounded.refuse_large(answer, kind)
        if what == "error":
            raise OSError(errno.EIO, answer)
        return answer

    def _start(self) -> tuple[int, Any, Any]:
        ours, theirs = Pipe()
        memory = str(int(MEMORY_SHARE * available_bytes()))
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("table_child.py")), str(theirs.fileno()), memory],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},  # the others reserve more than they use
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


class TableSource(base.Source):
    """The images of some files of one kind. Raises UserError for what cannot be used, by name.

    Rows are read forward, as packing goes; a step back begins anew.
    """

    in_order = True

    def __init__(
        self,
        path: Path,
        options: base.SourceOptions,
        shards: Sequence[Path] | None = None,  # these of the folder; None: those of the split
    ) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise UserError("Parquet and Arrow files need pyarrow, which is not installed: pip install pyarrow")
        super().__init__(path.name, [])
        if shards is None:
            suffix = base.sharded(path) if path.is_dir() else path.suffix.lower()
            shards, self.splits, self.ignored = base.choose_shards(path, suffix, options.split)
        self.shards, self._tables = list(shards), []
        for shard in self.shards:
            with _reading(shard):
                table = _Table(*_child.ask(shard, None, 0, 0, bounded.TABLE))
            self._tables.append(table)
            if table.rows > (size := shard.stat().st_size):  # no image takes less than a byte
                raise UserError(f"{shard} says that it holds {table.rows:,} rows in {size:,} bytes; get it again")
        self._starts = np.cumsum([0, *(table.rows for table in self._tables)])  # of the shards' rows, and their end
        self._image, label = self._choose_columns(self.shards[0], self._tables[0], options.label_column)
        for name in filter(None, (self._image, label)):
            kind = self._tables[0].types[name]
            for shard, table in zip(self.shards, self._tables, strict=True):
                if (other := table.types.get(name, "missing")) != kind:
                    raise UserError(f"{shard}: the column {name} is {other}, in {self.shards[0].name} {kind}")
        if not self._starts[-1]:
            raise UserError(f"{path} holds no rows: get it again")
        self._rows = np.arange(self._starts[-1])  # of all shards, one after the other
        self._labels = np.zeros_like(self._rows)
        if label is not None:
            self._read_labels(path, label)
        self._piece: tuple[int, int, Any] = (0, 0, [])  # the shard, the first row in it, and the images there

    # --- columns

    def _choose_columns(self, path: Path, table: _Table, label_column: str | None) -> tuple[str, str | None]:
        """The columns of images and of labels (None: unlabelled); sets remarks. Raises UserError if it is unclear."""
        images = table.of_use("bytes")
        if "image" in images:
            images = ["image"]
        if len(images) != 1:
            several = f"{' and '.join(images)} could be images, call one image"
            reason = several if images else f"no column holds bytes{INSTEAD}"
            columns = ", ".join(f"{name} ({kind})" for name, kind in table.types.items())
            raise UserError(f"{path}: {reason}; its columns are {columns}")
        may = table.of_use("text", "number")
        fitting = [name for name in table.types if name == base.LABEL or name in may]
        names = fitting if label_column is None else list(table.types)
        declared = (name for name in fitting if class_names(path, table, name))
        label = self.choose_label(str(path), names, label_column, declared)
        if label is None:
            if label_column is None and fitting and table.rows:
                with _reading(path):
                    _, values = _child.ask(path, fitting, 0, LOOKED_AT, bounded.TABLE)
                counts = {name: Counter(map(str, column)) for name, column in zip(fitting, values, strict=True)}
                self.remarks += base.looks_like_labels(str(path), counts)
        elif label not in may:
            raise UserError(f"{path}: the column {label} is {table.types[label]}; labels are whole numbers or text")
        return images[0], label

    def _read_labels(self, where: Path, column: str) -> None:
        """Take the labels, and leave out rows that have none: null, empty text and numbers below 0 are none. Of classes
        that the schema names, those that no image has are left out.
        """
        text, values = column in self._tables[0].of_use("text"), []
        for shard, table in zip(self.shards, self._tables, strict=True):
            with _reading(shard):
                values += _column(shard, column, table.rows)
        has = np.array([value not in (None, "") and (text or value >= 0) for value in values])
        self.problems = [base.Problem(self.item_name(int(row)), "has no label") for row in np.flatnonzero(~has)]
        self._rows = np.flatnonzero(has)
        given = list(itertools.compress(values, has))
        if not given:
            raise UserError(
                f"{where}: no row has a label in the column {column}: choose another --split or drop the column"
            )
        classes = [] if text else class_names(self.shards[0], self._tables[0], column)
        for shard, table in zip(self.shards, self._tables, strict=True):
            if not text and class_names(shard, table, column) != classes:
                raise UserError(
                    f"{shard} and {self.shards[0].name} name their classes differently: get both from one place"
                )
        if not classes:
            self.take_labels(str(where), list(map(str, given)), whole=not text)
            return
        used, self._labels = np.unique(given, return_inverse=True)
        if used[-1] >= len(classes):
            raise UserError(
                f"{where}: labels go up to {used[-1]}, but there are only {len(classes)} classes; get it again"
            )
        self.classes = [classes[number] for number in used]
        if unused := [name for name in classes if name not in self.classes]:
            self.remarks.append(f"left out: {listed(unused)}: classes of {self.name} that no image belongs to")

    # --- images

    def content(self, index: int) -> bytes:
        shard, row = self._place(index)
        number, first, images = self._piece
        if number != shard or not first <= row < first + len(images):
            with explained(OSError, unread):
                _, (images,) = _child.ask(self.shards[shard], [self._image], row, PIECE_ROWS, bounded.IMAGE)
            first = row
            self._piece = (shard, first, images)
        content: bytes | None = images[row - first]
        if content is None:
            raise ImageError(f"holds no bytes{INSTEAD}")
        with explained(OSError, unread):
            bounded.refuse_large(len(content), bounded.IMAGE)
        return content

    def item_name(self, index: int) -> str:
        shard, row = self._place(index)
        return f"{self.shards[shard]}: row {row}"

    def stored_name(self, index: int) -> str:
        shard, row = self._place(index)
        return f"{self.shards[shard].name}: row {row}"

    def _place(self, index: int) -> tuple[int, int]:
        """The shard in which an image lies, and its row there."""
        row = int(self._rows[index])
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        return shard, row - int(self._starts[shard])


def _column(path: Path, name: str, rows: int) -> list[Any]:
    """All of a column of small values. Raises OSError."""
    values: list[Any] = []
    size = 0
    while len(values) < rows:
        more, (part,) = _child.ask(path, [name], len(values), LOOKED_AT, bounded.TABLE)
        values, size = values + part, size + more
        with explained(bounded.Refused, lambda why: bounded.Refused(f"its column {name} {why}")):
            bounded.refuse_large(size, bounded.TABLE)
    return values


def class_names(path: Path, table: _Table, column: str) -> list[str]:
    """The names of a ClassLabel in Hugging Face's metadata, or none."""
    if table.metadata is None:
        return []
    record, faults = f"{path}: its metadata record huggingface", (ValueError, AttributeError, RecursionError)
    with bounded.reading(record, "get it again", *faults):
        content = json.loads(table.metadata)
        names = content.get("info", content).get("features", {}).get(column, {}).get("names", [])
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        names = [unicodedata.normalize("NFC", name) for name in names]
        if len(set(names)) == len(names):
            return list(map(printable, names))
    raise UserError(f"{path}: the names of the classes in its metadata are not distinct strings; get it again")


STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    return (folder / SPLITS).is_file() or (folder / STATE).is_file()


def open_arrow(path: Path, options: base.SourceOptions) -> TableSource:
    """The images of an Arrow file or of a folder of `save_to_disk`. Raises UserError for what cannot be used."""
    if not is_saved(path):
        return TableSource(path, options)
    if not (path / SPLITS).is_file():
        base.refuse_split(path, options.split)
        return TableSource(path, options, _shards(path))
    splits = _document(path / SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(map(_is_name, splits)):
        raise UserError(f"{path / SPLITS} names no splits; save it again")
    if options.split in splits or (options.split is None and len(splits) == 1):
        chosen = options.split or splits[0]
    else:
        chosen = base.choose_split(path, options.split, splits)
    source = TableSource(path, options, _shards(path / chosen))
    source.name, source.splits = f"{path.name} {chosen}", tuple(sorted(splits))
    return source


def _is_name(name: object) -> bool:
    """Whether it names a file or folder beside the document."""
    return isinstance(name, str) and Path(name).name == name != ".."


def _shards(folder: Path) -> list[Path]:
    """The files of a data set. Raises UserError for what is not there, leads out of the folder, or is reordered."""
    state = _document(folder / STATE)
    names: list[Any] = []
    with suppress(KeyError, TypeError):
        names = [item["filename"] for item in state["_data_files"]]
    if not names or not all(map(_is_name, names)):
        raise UserError(f"{folder / STATE} names no files in _data_files; save it again")
    if state.get("_indices_data_files"):
        raise UserError(f"{folder} is a selection of another data set: save it after flatten_indices()")
    missing = next((name for name in names if not (folder / name).is_file()), None)
    if missing is not None:
        raise UserError(f"{folder}: {missing} is missing, which {STATE} names: copy or save it again")
    return [folder / name for name in names]


def _document(path: Path) -> dict[str, Any]:
    with bounded.reading(path, "save it again", ValueError, RecursionError):
        content = json.loads(bounded.read_file(path, bounded.TABLE))
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; save it again")
    return content
