"""Arrow files with images' bytes, as Hugging Face's `save_to_disk` writes them: a folder, or folders of splits.

- A data set: `state.json` names its files in order (`data-00000-of-00002.arrow`). The columns are chosen as
  data/sources/tables.py says; the names of classes stand in the files' own schemas.
- A dictionary of data sets: `dataset_dict.json` names its splits, each a folder of that kind.
- One `.arrow` file, and a folder of them without `state.json`, as in the library's cache.

Files are mapped, and every batch is checked whole before a cell of it is read: its offsets are followed as they are.
Nothing but columns of bytes, numbers and text is looked at; what the metadata say of types is not used.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import ImageError
from data.images import SUFFIXES
from data.sources.listing import first_of
from data.sources.splits import choose_shards
from data.sources.tables import LOOKED_AT, TableSource, pyarrow, reason
from utils import bounded
from utils.errors import UserError

SUFFIX = ".arrow"
STATE, SPLITS = "state.json", "dataset_dict.json"
FILE_MAGIC = b"ARROW1\0\0"  # of the kind with an index at its end, which holds a stream behind these bytes
COMPRESSION = 3  # field of a record batch's head


def is_arrow_folder(folder: Path) -> bool:
    """Whether a folder is one of `save_to_disk`, or holds Arrow files and neither images nor visible sub-folders."""
    if (folder / SPLITS).is_file() or (folder / STATE).is_file():
        return True
    visible = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    suffixes = {entry.suffix.lower() for entry in visible}
    return SUFFIX in suffixes and not suffixes & SUFFIXES and not any(entry.is_dir() for entry in visible)


class ArrowSource(TableSource):
    """The images of an Arrow file or of a folder of `save_to_disk`. Raises UserError for what cannot be used, by
    name.
    """

    kind = "an Arrow file"

    def __init__(self, path: Path, *, split: str | None, label_column: str | None = None) -> None:
        shards, splits, chosen = _choose(path, split)
        super().__init__(path, shards, label_column)
        self.splits = splits
        if chosen:
            self.name = f"{path.name} {chosen}"
            others = [name for name in splits if name != chosen]
            if split is None and others:
                self.remarks.append(f"{path}: its split {chosen} is packed; others: --split {' or '.join(others)}")

    def describe(self, shard: Path) -> tuple[Any, int]:
        with ArrowFile(shard) as file:
            return file.schema, sum(batch.num_rows for batch in file.batches())

    def first(self, shard: Path, columns: list[str]) -> Any:
        with ArrowFile(shard) as file:
            batch = next(file.batches(), None)
            return None if batch is None else checked(batch.select(columns)).slice(0, LOOKED_AT)

    def column(self, shard: Path, name: str) -> Any:
        with ArrowFile(shard) as file:
            parts = [checked(batch.select([name])).column(0) for batch in file.batches()]
            size = sum(part.nbytes for part in parts)
            if found := bounded.too_large(size, bounded.TABLE):
                raise bounded.Refused(f"its column {name} {found}")
            kind = file.schema.field(name).type
            return pyarrow().chunked_array(parts, kind)

    def cells(self, column: str) -> Any:
        return CellReader(self.shards, column)


class ArrowFile:
    """A mapped file: its schema, and its record batches one after the other. Raises OSError and what pyarrow raises."""

    def __init__(self, path: Path) -> None:
        arrow, ipc = pyarrow(), pyarrow("ipc")
        bounded.check(path, bounded.ARCHIVE)
        self._file = arrow.memory_map(str(path))
        if self._file.read(len(FILE_MAGIC)) != FILE_MAGIC:
            self._file.seek(0)
        self._messages = ipc.MessageReader.open_stream(self._file)
        self.schema = ipc.read_schema(self._next("schema"))

    def batches(self) -> Iterator[Any]:
        """The batches, in order, as views into the file; not checked."""
        read = pyarrow("ipc").read_record_batch
        while (message := self._next("record batch")) is not None:
            yield read(message, self.schema)

    def _next(self, kind: str) -> Any:
        """The next message, which must be of a kind; None at the end."""
        try:
            message = self._messages.read_next_message()
        except StopIteration:
            message = None
        if message is None and kind != "schema":
            return None
        if message is None or message.type != kind:
            raise bounded.Refused(f"holds a {message.type if message else 'stream without a schema'}, not a {kind}")
        if kind == "record batch" and _is_compressed(message.metadata.to_pybytes()):
            raise bounded.Refused("is compressed; write it without compression")
        return message

    def __enter__(self) -> "ArrowFile":
        return self

    def __exit__(self, *error: object) -> None:
        """Views into the file stay valid: each keeps it mapped."""
        self._file.close()


def checked(batch: Any) -> Any:
    """A batch whose offsets lie within it. Raises pyarrow's ArrowInvalid."""
    batch.validate(full=True)
    return batch


def _is_compressed(head: bytes) -> bool:
    """Whether a record batch is compressed: it may then be of any size. The head is a FlatBuffer (Message.fbs), which
    pyarrow has verified; field 2 of the message is that of the batch.
    """

    def field(table: int, number: int) -> int:
        """The place of a table's field, or 0 if it is absent."""
        fields = table - struct.unpack_from("<i", head, table)[0]
        room = struct.unpack_from("<H", head, fields)[0]
        place = 4 + 2 * number
        offset = struct.unpack_from("<H", head, fields + place)[0] if place + 2 <= room else 0
        return table + offset if offset else 0

    try:
        message = struct.unpack_from("<I", head, 0)[0]
        place = field(message, 2)
        batch = place + struct.unpack_from("<I", head, place)[0]
        return field(batch, COMPRESSION) > 0
    except struct.error:
        return True


class CellReader:
    """The cells of one column of several files. One file is open at a time; only what is read of it takes memory."""

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        self._paths, self._column = paths, column
        self._shard = -1  # of `_batches`
        self._batches: list[Any] = []
        self._ends = np.empty(0, np.int64)  # the row after each batch
        self._checked: set[int] = set()

    def cell(self, shard: int, row: int) -> bytes | dict[str, Any] | None:
        """A cell, by the file's place in `paths` and the row in it. Raises ImageError if it cannot be read."""
        arrow = pyarrow()
        try:
            if shard != self._shard:
                self._shard = -1
                with ArrowFile(self._paths[shard]) as file:
                    self._batches = [batch.select([self._column]) for batch in file.batches()]
                self._ends = np.cumsum([batch.num_rows for batch in self._batches])
                self._shard, self._checked = shard, set()
            number = int(np.searchsorted(self._ends, row, side="right"))
            batch = self._batches[number]
            if number not in self._checked:
                checked(batch)
                self._checked.add(number)
            column = batch.column(0)
            if arrow.types.is_struct(column.type):
                column = column.field("bytes")  # of a struct only its bytes
            value = column[row - int(self._ends[number]) + batch.num_rows]
            size = value.as_buffer().size if value.is_valid else 0
            if found := bounded.too_large(size, bounded.IMAGE):
                raise ImageError(found)
            content: bytes | None = value.as_py()
            return content
        except (OSError, MemoryError, IndexError, KeyError, arrow.ArrowException) as error:
            raise ImageError(f"cannot be read ({reason(error)})") from None


def _choose(path: Path, split: str | None) -> tuple[list[Path], tuple[str, ...], str]:
    """The files of a split in order, the splits that there are, and which it is ("": there are none)."""
    if path.is_file():
        return [path], (), ""
    if (path / SPLITS).is_file():
        names = _document(path / SPLITS).get("splits")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise UserError(f"{path / SPLITS} names no splits; save it again")
        chosen = split if split in names else first_of(split or "train", names)
        if chosen is None and split is None and len(names) == 1:
            chosen = names[0]
        if chosen is None:
            raise UserError(f"{path} has no {split or 'train'} split, only {', '.join(names)}: pass another --split")
        if Path(chosen).name != chosen or chosen == "..":
            raise UserError(f"{path / SPLITS}: the split {chosen!r} is no name of a folder; save it again")
        return _shards(path / chosen), tuple(sorted(names)), chosen
    if (path / STATE).is_file():
        if split in ("test", "val"):
            raise UserError(f"{path} has no splits: leave --split out to take all of it, or add --val-share 0.1")
        return _shards(path), (), ""
    found = sorted(entry for entry in path.iterdir() if entry.suffix.lower() == SUFFIX)
    shards, splits = choose_shards(path, found, split)
    return shards, splits, ""


def _shards(folder: Path) -> list[Path]:
    """The files of a data set. Raises UserError for what is not there, leads out of the folder, or is reordered."""
    state = _document(folder / STATE)
    files = state.get("_data_files")
    found = (
        [item.get("filename") if isinstance(item, dict) else None for item in files] if isinstance(files, list) else []
    )
    names = [name for name in found if isinstance(name, str) and Path(name).name == name != ".."]
    if not names or len(names) < len(found):
        raise UserError(f"{folder / STATE} names no files in _data_files; save it again")
    if state.get("_indices_data_files"):
        raise UserError(f"{folder} is a selection of another data set: save it after flatten_indices()")
    missing = next((name for name in names if not (folder / name).is_file()), None)
    if missing is not None:
        raise UserError(f"{folder}: {missing} is missing, which {STATE} names: copy or save it again")
    return [folder / name for name in names]


def _document(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(bounded.read_file(path, bounded.TABLE))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}); save it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; save it again")
    return content
