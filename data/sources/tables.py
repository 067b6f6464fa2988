"""Tables with images' bytes in a column: Parquet and Arrow files, read by a process of its own (table_child.py).

Images are binary, or a struct with the field `bytes`. Labels are the column that has the name of one
(data/sources/base.py), else the only ClassLabel: text, or whole numbers, whose names may stand in the schema's
metadata (key "huggingface"). pyarrow is imported at the first use.

Hugging Face's `save_to_disk` writes a folder of Arrow files whose `state.json` names them in order, or a folder of such
folders, the splits that `dataset_dict.json` names. A folder of `.arrow` files without either is the library's cache.
"""

import importlib
import json
import os
import subprocess
import sys
import threading
import unicodedata
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.errors import ImageError
from duetgan.data.sources import base
from duetgan.utils import bounded
from duetgan.utils.errors import UserError, explained
from duetgan.utils.memory import available_bytes
from duetgan.utils.text import listed, printable

MEMORY_SHARE = 0.5  # of what is available, for the process that reads
LOOKED_AT = 10_000  # rows of a column that may be labels
PIECE_ROWS = 16  # of images at a time
INSTEAD = ", perhaps only paths: give the folder of the images, or a CSV file with the column path"


def pyarrow(module: str = "") -> Any:
    """pyarrow or one of its modules. Raises UserError if it is not installed."""
    with explained(ImportError, "Parquet and Arrow files need pyarrow, which is not installed: pip install pyarrow"):
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")


class _Child:
    """The process that reads, one for all tables; it is started when it is needed, and again after it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: tuple[int, Any, Any] | None = None  # who started it, what stops it, the connection

    def ask(self, path: Path, columns: Sequence[str] | None, start: int, rows: int, kind: bounded.FileLimit) -> Any:
        """The stream that table_child.py answers with. Raises OSError."""
        bounded.check(path, bounded.ARCHIVE)
        with self._lock:
            if self._alive is None or self._alive[0] != os.getpid():
                self._alive = self._start()
            _, stop, connection = self._alive
            try:
                connection.send_bytes(json.dumps([str(path), columns, start, rows, kind.limit]).encode())
                answer = connection.recv_bytes()
            except BaseException as error:  # also an answer that nobody waits for
                stop()
                self._alive = None
                if not isinstance(error, (EOFError, OSError)):
                    raise
                raise bounded.Refused("it takes too much memory, or ends the process that reads it") from None
        match answer[:1]:
            case b"S":
                return pyarrow("ipc").open_stream(pyarrow().py_buffer(answer)[1:])
            case b"L":
                raise bounded.Refused(str(bounded.too_large(int(answer[1:]), kind)))
        raise bounded.Refused(answer[1:].decode())

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


class TableSource(base.Source):
    """The images of some files of one kind. Raises UserError for what cannot be used, by name.

    Rows are read forward, as packing goes; a step back begins anew.
    """

    in_order = True

    def __init__(
        self,
        path: Path,
        shards: Sequence[Path],
        label_column: str | None,
        splits: tuple[str, ...] = (),
        ignored: Sequence[str] = (),
    ) -> None:
        super().__init__(path.name, [], splits=splits, ignored=list(ignored))
        self.shards, self._schemas, counts = list(shards), [], [0]
        for shard in self.shards:
            with _reading(shard):
                schema = _child.ask(shard, None, 0, 0, bounded.TABLE).schema
                rows = int(schema.metadata[b"rows"])
                _ = [(field.name, str(field.type)) for field in schema]  # raises for names that are no UTF-8
            self._schemas.append(schema)
            counts.append(rows)
            if rows > (size := shard.stat().st_size):  # no image takes less than a byte
                raise UserError(f"{shard} says that it holds {rows:,} rows in {size:,} bytes; get it again")
        self._starts = np.cumsum(counts)  # of the shards' rows, and their end
        self._image, label = self._choose_columns(self.shards[0], self._schemas[0], label_column)
        for name in filter(None, (self._image, label)):
            kind = self._schemas[0].field(name).type
            for shard, schema in zip(self.shards, self._schemas, strict=True):
                other = schema.field(name).type if name in schema.names else "missing"
                if other != kind:
                    raise UserError(f"{shard}: the column {name} is {other}, in {self.shards[0].name} {kind}")
        if not self._starts[-1]:
            raise UserError(f"{path} holds no rows: get it again")
        labels = np.zeros(self._starts[-1], np.int64) if label is None else self._read_labels(path, label)
        self._rows = np.flatnonzero(labels >= 0)  # rows of all shards, one after the other
        self.problems = [base.Problem(self._row_name(int(row)), "has no label") for row in np.flatnonzero(labels < 0)]
        self._labels = labels[self._rows]
        self._piece: tuple[int, int, Any] = (0, 0, [])  # the shard, the first row in it, and the images there

    # --- columns

    def _choose_columns(self, path: Path, schema: Any, label_column: str | None) -> tuple[str, str | None]:
        """The columns of images and of labels (None: unlabelled); sets remarks. Raises UserError if it is unclear."""
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        images = [field.name for field in schema if _holds_bytes(field.type)]
        if "image" in images:
            images = ["image"]
        if len(images) != 1:
            several = f"{' and '.join(images)} could be images, call one image"
            reason = several if images else f"no column holds bytes{INSTEAD}"
            raise UserError(f"{path}: {reason}; its columns are {columns}")
        fitting = [field.name for field in schema if field.name == "label" or _may_label(field.type)]
        names = fitting if label_column is None else schema.names
        declared = (name for name in fitting if class_names(path, schema, name))
        label, self.remarks = base.choose_label(str(path), names, label_column, declared)
        if label is None:
            if label_column is None and fitting and self._starts[1]:
                with _reading(path):
                    first = next(iter(_child.ask(path, fitting, 0, LOOKED_AT, bounded.TABLE)))
                    values = {name: Counter(map(str, first[name].to_pylist())) for name in fitting}
                self.remarks = base.looks_like_labels(str(path), values)
        elif not _may_label(kind := schema.field(label).type):
            raise UserError(f"{path}: the column {label} is {kind}; labels are whole numbers or text")
        return images[0], label

    def _read_labels(self, where: Path, column: str) -> np.ndarray:
        """Labels int64 of all rows, below 0 where a row has none; sets the classes."""
        arrow, chunks = pyarrow(), []
        text = _is_text(self._schemas[0].field(column).type)
        kind = arrow.large_string() if text else arrow.int64()
        for shard, rows in zip(self.shards, np.diff(self._starts).tolist(), strict=True):
            with _reading(shard):
                chunks += [part.cast(kind) for part in _column(shard, column, rows)]
        values = arrow.chunked_array(chunks, kind)
        if text:  # null and empty text are no labels
            with _reading(where):
                names = sorted(filter(None, values.unique().to_pylist()))
            self.take_labels(str(where), names, whole=False)
            values = pyarrow("compute").index_in(values, value_set=arrow.array(names, kind))
        labels = values.fill_null(-1).to_numpy().astype(np.int64)
        largest = int(labels.max())
        if largest < 0:
            raise UserError(
                f"{where}: no row has a label in the column {column}: choose another --split or drop the column"
            )
        if text:
            return np.append(self.labels(), -1)[labels]  # the last one: of no label
        classes = class_names(self.shards[0], self._schemas[0], column)
        for shard, schema in zip(self.shards, self._schemas, strict=True):
            if class_names(shard, schema, column) != classes:
                raise UserError(
                    f"{shard} and {self.shards[0].name} name their classes differently: get both from one place"
                )
        if largest >= (len(classes) or len(labels)):
            limit = f"{len(classes)} classes" if classes else f"{len(labels)} images"
            raise UserError(f"{where}: labels go up to {largest}, but there are only {limit}; get it again")
        self.classes = classes or [str(number) for number in range(largest + 1)]
        return self._without_unused(labels) if classes else labels

    def _without_unused(self, labels: np.ndarray) -> np.ndarray:
        """Leave out classes that only the schema names, and say so; the others are numbered anew."""
        used = np.bincount(labels[labels >= 0], minlength=len(self.classes)) > 0
        if used.all():
            return labels
        unused = [self.classes[number] for number in np.flatnonzero(~used)]
        self.remarks.append(f"left out: {listed(unused)}: classes of {self.name} that no image belongs to")
        self.classes = [self.classes[number] for number in np.flatnonzero(used)]
        return np.where(labels < 0, -1, (np.cumsum(used) - 1)[labels])

    # --- images

    def content(self, index: int) -> bytes:
        shard, row = self._place(int(self._rows[index]))
        number, first, images = self._piece
        if number != shard or not first <= row < first + len(images):
            try:
                stream = _child.ask(self.shards[shard], [self._image], row, PIECE_ROWS, bounded.IMAGE)
                first, images = row, next(iter(stream)).column(0)
            except OSError as error:
                raise ImageError(f"cannot be read ({error.strerror or error})") from None
            self._piece = (shard, first, images)
        value = images[row - first]
        size = value.as_buffer().size if value.is_valid else 0
        if refused := bounded.too_large(size, bounded.IMAGE):
            raise ImageError(refused)
        if not value.is_valid:
            raise ImageError(f"holds no bytes{INSTEAD}")
        content: bytes = value.as_py()
        return content

    def item_name(self, index: int) -> str:
        return self._row_name(int(self._rows[index]))

    def stored_name(self, index: int) -> str:
        shard, row = self._place(int(self._rows[index]))
        return f"{self.shards[shard].name}: row {row}"

    def _place(self, row: int) -> tuple[int, int]:
        """The shard in which a row lies, and its number there."""
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        return shard, row - int(self._starts[shard])

    def _row_name(self, row: int) -> str:
        shard, row = self._place(row)
        return f"{self.shards[shard]}: row {row}"


def open_tables(path: Path, options: base.SourceOptions) -> TableSource:
    """A Parquet or Arrow file, or a folder of one kind of them."""
    suffix = base.sharded(path) if path.is_dir() else path.suffix.lower()
    shards, splits, ignored = base.choose_shards(path, suffix, options.split)
    return TableSource(path, shards, options.label_column, splits, ignored)


def _reading(path: Path) -> AbstractContextManager[None]:
    """Around reading a file: what pyarrow raises becomes a UserError that names it."""
    return bounded.reading(path, "copy or get it again", UnicodeDecodeError, pyarrow().ArrowException)


def _column(path: Path, name: str, rows: int) -> Iterator[Any]:
    """All of a column of small values, in arrays. Raises OSError."""
    start = size = 0
    while start < rows:
        part = next(iter(_child.ask(path, [name], start, LOOKED_AT, bounded.TABLE))).column(0)
        start, size = start + len(part), size + part.nbytes
        if refused := bounded.too_large(size, bounded.TABLE):
            raise bounded.Refused(f"its column {name} {refused}")
        yield part


def _may_label(kind: Any) -> bool:
    return pyarrow("types").is_integer(kind) or _is_text(kind)


def _is_text(kind: Any) -> bool:
    kind = kind.value_type if pyarrow("types").is_dictionary(kind) else kind
    return str(kind) in ("string", "large_string", "string_view")


def _holds_bytes(kind: Any) -> bool:
    if pyarrow("types").is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return str(kind) in ("binary", "large_binary", "binary_view")


def class_names(path: Path, schema: Any, column: str) -> list[str]:
    """The names of a ClassLabel in Hugging Face's metadata, or none."""
    record = (schema.metadata or {}).get(b"huggingface")
    if record is None:
        return []
    with explained(
        (ValueError, AttributeError, RecursionError),
        lambda why: f"{path}: its metadata record huggingface is damaged ({why}); get it again",
    ):
        content = json.loads(record)
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
        return open_tables(path, options)
    if not (path / SPLITS).is_file():
        base.refuse_split(path, options.split)
        return TableSource(path, _shards(path), options.label_column)
    splits = _document(path / SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(map(_is_name, splits)):
        raise UserError(f"{path / SPLITS} names no splits; save it again")
    if options.split in splits or (options.split is None and len(splits) == 1):
        chosen = options.split or splits[0]
    else:
        chosen = base.choose_split(path, options.split, splits)
    source = TableSource(path, _shards(path / chosen), options.label_column, splits=tuple(sorted(splits)))
    source.name = f"{path.name} {chosen}"
    others = [name for name in source.splits if name != chosen]
    if options.split is None and others:
        source.remarks.append(f"{path}: its split {chosen} is packed; others: --split {' or '.join(others)}")
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
