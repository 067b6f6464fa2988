"""Parquet files with images' bytes, as the Hugging Face hub has them: one file, or a folder of shards.

- Images: the column `image`, else the only one that can hold them: binary, or a struct with the field `bytes`.
- Labels: the column `label`, else the only one that has the name of one (data/sources/labels.py), else the only
  ClassLabel: text, or whole numbers, whose names may stand in the schema's metadata (key "huggingface": a ClassLabel).
  Images without a label (null or negative) are problems.
- Shards are taken in order of name. Names that begin with a split's (`train-00000-of-00002.parquet`) are its shards;
  `-of-N` says that there are N of them.

Images are read by row group; labels at once; the number of images stands in the files' metadata. pyarrow is imported
at the first use.
"""

import contextlib
import functools
import importlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.images import SUFFIXES, ImageError
from data.sources.base import Item, PerProcess, Problem, Source
from data.sources.labels import choose_label, looks_like_labels, only_label
from data.sources.listing import SPLIT_NAMES, first_of
from utils import door
from utils.classes import listed
from utils.errors import UserError

SUFFIX = ".parquet"
LOOKED_AT = 10_000  # rows of a column that may be labels
SPLIT_PREFIX = re.compile(rf"({'|'.join(sorted(SPLIT_NAMES, key=len, reverse=True))})([-_.].*)?")
SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})")
PIECE_ROWS = 16
INSTEAD = ", perhaps only paths: give the folder of the images, or a CSV file with the column path"
PACKED = 50  # times; pages of images never shrink so far
BUFFER = 1 << 20  # bytes read at a time from a row group, instead of all of it


def is_parquet_folder(folder: Path) -> bool:
    """Whether a folder holds Parquet files and neither images nor visible sub-folders."""
    try:
        visible = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; check its permissions") from None
    suffixes = {entry.suffix.lower() for entry in visible}
    return SUFFIX in suffixes and not suffixes & SUFFIXES and not any(entry.is_dir() for entry in visible)


def pyarrow(module: str = "") -> Any:
    """pyarrow or one of its modules. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError:
        raise UserError("Parquet files need pyarrow, which is not installed: pip install pyarrow") from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around reading a file: what pyarrow raises becomes a UserError that names it."""
    arrow = pyarrow()
    try:
        yield
    except (OSError, arrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as a Parquet file ({reason(error)}); copy or get it again") from None


def open_parquet(path: Path, **options: Any) -> Any:
    """A `pyarrow.parquet.ParquetFile`. Raises OSError and what pyarrow raises."""
    door.check(path, door.ARCHIVE)
    return pyarrow("parquet").ParquetFile(path, **options)


def check_group(metadata: Any, group: int, column: str) -> None:
    """Raise door.Refused for a row group whose images are too large: a cell or a page that was packed small may fill
    the memory. Images are compressed already; what shrinks to a part of PACKED is none.
    """
    for size, packed, rows in _chunks(metadata, group, column):
        found = door.too_large(size // max(1, rows), door.IMAGE) or (
            door.too_large(size, door.IMAGE) if size > PACKED * packed else None
        )
        if found:
            raise door.Refused(f"lies in a row group that {found}")


def check_labels(metadata: Any, column: str) -> None:
    """Raise door.Refused for a column that is too large to be read at once."""
    chunks = [chunk for group in range(metadata.num_row_groups) for chunk in _chunks(metadata, group, column)]
    if found := door.too_large(sum(size for size, _, _ in chunks), door.TABLE):
        raise door.Refused(f"its column {column} {found}")


def _chunks(metadata: Any, group: int, column: str) -> Iterator[tuple[int, int, int]]:
    """Bytes unpacked, bytes in the file, and rows of a column's parts (a struct's fields) in a row group."""
    row_group = metadata.row_group(group)
    for place in range(row_group.num_columns):
        chunk = row_group.column(place)
        if chunk.path_in_schema.split(".")[0] == column:
            yield chunk.total_uncompressed_size, chunk.total_compressed_size, row_group.num_rows


def reason(error: Exception) -> str:
    """The first line of pyarrow's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


class ParquetSource(Source):
    """The images of a Parquet file or of a folder of them. Raises UserError for what cannot be used, by name."""

    def __init__(self, path: Path, *, split: str | None, label_column: str | None = None) -> None:
        super().__init__(path.name, [])
        names = [path]
        if path.is_dir():
            visible = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
            names = [entry for entry in visible if entry.suffix.lower() == SUFFIX]
            self.ignored = [entry.name for entry in visible if entry.suffix.lower() != SUFFIX]
        self.shards, self.splits = choose_shards(path, names, split)
        schemas, counts = [], [0]
        for shard in self.shards:
            with reading(shard), open_parquet(shard) as file:
                schemas.append(file.schema_arrow)
                counts.append(file.metadata.num_rows)
            if counts[-1] > (size := shard.stat().st_size):  # no image takes less than a byte
                raise UserError(f"{shard} says that it holds {counts[-1]:,} rows in {size:,} bytes; get it again")
        image, label, self.remarks = choose_columns(self.shards[0], schemas[0], label_column)
        for name in filter(None, (image, label)):
            kind = schemas[0].field(name).type
            for shard, schema in zip(self.shards, schemas, strict=True):
                found = schema.field(name).type if name in schema.names else "missing"
                if found != kind:
                    raise UserError(f"{shard}: the column {name} is {found}, in {self.shards[0].name} {kind}")
        self._starts = np.cumsum(counts)  # of the shards' rows, and their end
        if not self._starts[-1]:
            raise UserError(f"{path} holds no rows: get it again")
        labels = np.zeros(self._starts[-1], np.int64)
        if label:
            labels, classes = _labels(path, self.shards, schemas, label)
            self.classes = list(map(door.printable, classes))
            if _class_names(self.shards[0], schemas[0], label):
                labels = self._without_unused(labels)
        self._rows = np.flatnonzero(labels >= 0)  # rows of all shards, one after the other
        self.problems = [Problem(self._row_name(int(row)), "has no label") for row in np.flatnonzero(labels < 0)]
        self._labels = labels[self._rows]
        self._reader = PerProcess(functools.partial(CellReader, self.shards, image))

    def _without_unused(self, labels: np.ndarray) -> np.ndarray:
        """Leave out classes that only the schema names, and say so; the others are numbered anew."""
        used = np.bincount(labels[labels >= 0], minlength=len(self.classes)) > 0
        unused = [name for name, there in zip(self.classes, used, strict=True) if not there]
        if not unused:
            return labels
        self.remarks.append(f"left out: {listed(unused)}: classes of {self.name} that no image belongs to")
        self.classes = [name for name, there in zip(self.classes, used, strict=True) if there]
        return np.where(labels < 0, -1, (np.cumsum(used) - 1)[labels])

    def item(self, index: int) -> Item:
        shard, row = self._place(int(self._rows[index]))
        value = self._reader.get().cell(shard, row)
        content = value.get("bytes") if isinstance(value, dict) else value
        if content is None:
            raise ImageError(f"holds no bytes{INSTEAD}")
        return Item(self.item_name(index), int(self._labels[index]), content)

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

    def __exit__(self, *error: object) -> None:
        self._reader.release()


def choose_shards(
    where: Path,
    paths: Sequence[Path],
    split: str | None,  # None: train, if there are splits
) -> tuple[list[Path], tuple[str, ...]]:
    """The files of a split, and the splits that there are. Raises UserError if it has none, if a shard is missing, or
    if only some name a split.
    """
    groups: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        match = SPLIT_PREFIX.fullmatch(path.stem.lower())
        groups[match[1] if match else ""].append(path)
    if "" in groups and len(groups) > 1:
        named = next(iter(groups[name] for name in groups if name))[0]
        raise UserError(f"{where}: {named.name} names a split, {groups[''][0].name} does not: rename or remove one")
    if "" in groups:
        if split in ("test", "val"):
            raise UserError(
                f"{where} has no splits in its files' names: leave --split out to take all of it, or add"
                " --val-share 0.1"
            )
        chosen = groups[""]
    elif where.is_file() and split in (None, "train"):
        chosen = list(paths)  # a file that is named is meant, whatever its split
    else:
        name = first_of(split or "train", groups)
        if name is None:
            raise UserError(
                f"{where} has no {split or 'train'} split, only {', '.join(sorted(groups))}: pass another --split"
            )
        chosen = groups[name]
    if where.is_dir():
        _check_complete(where, chosen)
    return chosen, tuple(sorted(filter(None, groups))) if where.is_dir() else ()


def _check_complete(where: Path, paths: Sequence[Path]) -> None:
    """Raise UserError if the files' names say that there are more."""
    names = {path.stem for path in paths}
    for match in filter(None, map(SHARD.fullmatch, sorted(names))):
        for number in range(int(match[3])):
            wanted = f"{match[1]}-{number:05d}-of-{match[3]}"
            if wanted not in names:
                raise UserError(f"{where}: {wanted}{SUFFIX} is missing beside {match[0]}{SUFFIX}: add it")


def choose_columns(path: Path, schema: Any, label_column: str | None = None) -> tuple[str, str | None, list[str]]:
    """The columns of images and of labels (None: unlabelled), and remarks. Raises UserError if that is unclear."""
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    images = [field.name for field in schema if _holds_bytes(field.type)]
    if "image" in images:
        images = ["image"]
    if len(images) != 1:
        several = f"{' and '.join(images)} could be images, call one image"
        found = several if images else f"no column holds bytes{INSTEAD}"
        raise UserError(f"{path}: {found}; its columns are {columns}")
    fitting = [field.name for field in schema if field.name == "label" or _may_label(field.type)]
    names = fitting if label_column is None else schema.names
    label, remarks = choose_label(str(path), names, label_column)
    if label is None and label_column is None:
        label, remarks = only_label(str(path), [name for name in fitting if _class_names(path, schema, name)], columns)
        remarks = remarks or looks_like_labels(str(path), _first_values(path, fitting))
    if label is not None and not _may_label(schema.field(label).type):
        kind = schema.field(label).type
        raise UserError(f"{path}: the column {label} is {kind}; labels are whole numbers or text")
    return images[0], label, remarks


def _may_label(kind: Any) -> bool:
    return pyarrow("types").is_integer(kind) or _is_text(kind)


def _first_values(path: Path, columns: Sequence[str]) -> dict[str, Counter[str]]:
    """How often each value appears in the first rows of some columns."""
    if not columns:
        return {}
    with reading(path), open_parquet(path) as file:
        for column in columns:
            check_labels(file.metadata, column)
        batch = next(file.iter_batches(LOOKED_AT, columns=list(columns)), None)
    return {} if batch is None else {name: Counter(map(str, batch[name].to_pylist())) for name in columns}


def _holds_bytes(kind: Any) -> bool:
    types = pyarrow("types")
    if types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _is_text(kind: Any) -> bool:
    types = pyarrow("types")
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _labels(where: Path, shards: Sequence[Path], schemas: Sequence[Any], column: str) -> tuple[np.ndarray, list[str]]:
    """Labels int64 of all rows, below 0 where a row has none, and the names of the classes."""
    chunks, arrow = [], pyarrow()
    text = _is_text(schemas[0].field(column).type)
    kind = arrow.large_string() if text else arrow.int64()
    for shard in shards:
        with reading(shard), open_parquet(shard) as file:
            check_labels(file.metadata, column)
            chunks += file.read(columns=[column], use_threads=False).column(0).cast(kind).chunks
    values = arrow.chunked_array(chunks, kind)
    classes = sorted(filter(None, values.unique().to_pylist())) if text else []
    if text:  # null and empty text are no labels
        values = pyarrow("compute").index_in(values, value_set=arrow.array(classes, arrow.large_string()))
    labels = values.fill_null(-1).to_numpy().astype(np.int64)
    if labels.max() < 0:
        raise UserError(
            f"{where}: no row has a label in the column {column}: choose another --split or drop the column"
        )
    if text:
        return labels, classes
    classes = _class_names(shards[0], schemas[0], column)
    for shard, schema in zip(shards, schemas, strict=True):
        if _class_names(shard, schema, column) != classes:
            raise UserError(f"{shard} and {shards[0].name} name their classes differently: get both from one place")
    largest = int(labels.max())
    if largest >= (len(classes) or len(labels)):
        limit = f"{len(classes)} classes" if classes else f"{len(labels)} images"
        raise UserError(f"{where}: labels go up to {largest}, but there are only {limit}; get it again")
    return labels, classes or [str(number) for number in range(largest + 1)]


def _class_names(path: Path, schema: Any, column: str) -> list[str]:
    """The names of a ClassLabel in Hugging Face's metadata, or none."""
    record = (schema.metadata or {}).get(b"huggingface")
    if record is None:
        return []
    try:
        content = json.loads(record)
        names = content.get("info", content).get("features", {}).get(column, {}).get("names", [])
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: its metadata record huggingface is damaged ({error}); get it again") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise UserError(f"{path}: the names of the classes in its metadata are not distinct strings; get it again")
    return names


class CellReader:
    """The cells of one column of several files.

    A row group is read in pieces, forward, as packing goes; a step back begins it anew. So no more than a piece is
    held, or two pages of the file if that is more: pyarrow writes at least 1,024 rows into a page unless told
    otherwise. One file is open at a time.
    """

    def __init__(self, paths: Sequence[Path], column: str) -> None:
        self._paths, self._column = paths, column
        self._shard = self._group = -1  # of `_pieces`
        self._file: Any = None
        self._ends = np.empty(0, np.int64)  # the row after each row group of the open file
        self._pieces: Iterator[Any] = iter(())
        self._piece: Any = None
        self._piece_start = 0  # its first row in the row group

    def cell(self, shard: int, row: int) -> bytes | dict[str, Any] | None:
        """A cell, by the file's place in `paths` and the row in it. Raises ImageError if it cannot be read."""
        if shard != self._shard:
            with reading(self._paths[shard]):
                self._open(shard)
        group = int(np.searchsorted(self._ends, row, side="right"))
        offset = row - (int(self._ends[group - 1]) if group else 0)
        try:
            if group != self._group or offset < self._piece_start:
                check_group(self._file.metadata, group, self._column)
                struct = pyarrow("types").is_struct(self._file.schema_arrow.field(self._column).type)
                columns = [f"{self._column}.bytes" if struct else self._column]  # of a struct only its bytes
                self._pieces = self._file.iter_batches(PIECE_ROWS, [group], columns=columns, use_threads=False)
                self._group, self._piece, self._piece_start = group, next(self._pieces), 0
            while offset >= self._piece_start + len(self._piece):
                self._piece_start += len(self._piece)
                self._piece = next(self._pieces)
            return self._piece.column(0)[offset - self._piece_start].as_py()
        except (OSError, MemoryError, IndexError, StopIteration, pyarrow().ArrowException) as error:
            self._group = -1
            raise ImageError(
                str(error) if isinstance(error, door.Refused) else f"cannot be read ({reason(error)})"
            ) from None

    def _open(self, shard: int) -> None:
        self._shard = self._group = -1
        self._file = open_parquet(
            self._paths[shard], buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True
        )
        metadata = self._file.metadata
        self._ends = np.cumsum([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)])
        self._shard = shard
