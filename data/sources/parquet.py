"""Parquet files with images' bytes, as the Hugging Face hub has them: one file, or a folder of shards.

Columns are chosen as data/sources/tables.py says, shards as data/sources/splits.py does. Images are read by row group;
labels at once; the number of images stands in the files' metadata.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import ImageError
from data.images import SUFFIXES
from data.sources.parquet_pages import page_sizes
from data.sources.splits import choose_shards
from data.sources.tables import LOOKED_AT, TableSource, pyarrow, reason
from utils import bounded
from utils.errors import UserError

SUFFIX = ".parquet"
KIND = "a Parquet file"
PIECE_ROWS = 16
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


class ParquetSource(TableSource):
    """The images of a Parquet file or of a folder of them. Raises UserError for what cannot be used, by name."""

    kind = KIND

    def __init__(self, path: Path, *, split: str | None, label_column: str | None = None) -> None:
        names, ignored = [path], []
        if path.is_dir():
            visible = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
            names = [entry for entry in visible if entry.suffix.lower() == SUFFIX]
            ignored = [entry.name for entry in visible if entry.suffix.lower() != SUFFIX]
        shards, splits = choose_shards(path, names, split)
        super().__init__(path, shards, label_column)
        self.splits, self.ignored = splits, ignored

    def describe(self, shard: Path) -> tuple[Any, int]:
        with open_parquet(shard) as file:
            return file.schema_arrow, file.metadata.num_rows

    def first(self, shard: Path, columns: list[str]) -> Any:
        with open_parquet(shard) as file:
            for column in columns:
                check_column(shard, file.metadata, column)
            return next(file.iter_batches(LOOKED_AT, columns=columns), None)

    def column(self, shard: Path, name: str) -> Any:
        with open_parquet(shard) as file:
            check_column(shard, file.metadata, name)
            return file.read(columns=[name], use_threads=False).column(0)

    def cells(self, column: str) -> Any:
        return CellReader(self.shards, column)


def open_parquet(path: Path, **options: Any) -> Any:
    """A `pyarrow.parquet.ParquetFile`. Raises OSError and what pyarrow raises."""
    bounded.check(path, bounded.ARCHIVE)
    return pyarrow("parquet").ParquetFile(path, **options)


def check_group(path: Path, metadata: Any, group: int, column: str) -> int:
    """The largest number of bytes that a cell of the row group may have. Raises bounded.Refused for a row group whose
    images are too large: a cell or a page that was packed small may fill the memory. Images are compressed already;
    what shrinks to a part of PACKED is none.
    """
    largest = 0
    for chunk in _chunks(metadata, group, column):
        size, packed = chunk.total_uncompressed_size, chunk.total_compressed_size
        found = bounded.too_large(size // max(1, metadata.row_group(group).num_rows), bounded.IMAGE) or (
            bounded.too_large(size, bounded.IMAGE) if size > PACKED * packed else None
        )
        if found:
            raise bounded.Refused(f"lies in a row group that {found}")
        _check_pages(path, chunk)
        largest = max(largest, size)
    return largest


def check_column(path: Path, metadata: Any, column: str) -> None:
    """Raise bounded.Refused for a column that is too large to be read at once."""
    chunks = [chunk for group in range(metadata.num_row_groups) for chunk in _chunks(metadata, group, column)]
    if found := bounded.too_large(sum(chunk.total_uncompressed_size for chunk in chunks), bounded.TABLE):
        raise bounded.Refused(f"its column {column} {found}")
    for chunk in chunks:
        _check_pages(path, chunk)


def _check_pages(path: Path, chunk: Any) -> None:
    """Raise bounded.Refused if the pages of a part of a column say that they hold more than the file's end says:
    pyarrow makes room for what each page says.
    """
    start: int = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    with bounded.open_file(path, bounded.ARCHIVE) as file:
        found = sum(page_sizes(file.fileno(), start, chunk.total_compressed_size))
    if found > chunk.total_uncompressed_size:
        told = f"{found:,} bytes where the file's end says {chunk.total_uncompressed_size:,}"
        raise bounded.Refused(f"lies in pages of {told}; get it again")


def _chunks(metadata: Any, group: int, column: str) -> Iterator[Any]:
    """The parts of a column (a struct's fields) in a row group: pyarrow's ColumnChunkMetaData."""
    row_group = metadata.row_group(group)
    for place in range(row_group.num_columns):
        chunk = row_group.column(place)
        if chunk.path_in_schema.split(".")[0] == column:
            yield chunk


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
            try:
                self._open(shard)
            except (OSError, pyarrow().ArrowException) as error:
                told = f"{self._paths[shard]} cannot be read as {KIND} ({reason(error)})"
                raise UserError(f"{told}; copy or get it again") from None
        group = int(np.searchsorted(self._ends, row, side="right"))
        offset = row - (int(self._ends[group - 1]) if group else 0)
        try:
            if group != self._group or offset < self._piece_start:
                largest = check_group(self._paths[shard], self._file.metadata, group, self._column)
                # A value that stands in the file once may be that of every row.
                rows = max(1, min(PIECE_ROWS, bounded.IMAGE.limit // max(1, largest)))
                struct = pyarrow("types").is_struct(self._file.schema_arrow.field(self._column).type)
                columns = [f"{self._column}.bytes" if struct else self._column]  # of a struct only its bytes
                self._pieces = self._file.iter_batches(rows, [group], columns=columns, use_threads=False)
                self._group, self._piece, self._piece_start = group, next(self._pieces), 0
            while offset >= self._piece_start + len(self._piece):
                self._piece_start += len(self._piece)
                self._piece = next(self._pieces)
            return self._piece.column(0)[offset - self._piece_start].as_py()
        except (OSError, MemoryError, IndexError, StopIteration, pyarrow().ArrowException) as error:
            self._group = -1
            raise ImageError(
                str(error) if isinstance(error, bounded.Refused) else f"cannot be read ({reason(error)})"
            ) from None

    def _open(self, shard: int) -> None:
        self._shard = self._group = -1
        self._file = open_parquet(
            self._paths[shard], buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True
        )
        metadata = self._file.metadata
        self._ends = np.cumsum([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)])
        self._shard = shard
