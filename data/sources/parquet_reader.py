"""Reading single cells of Parquet files with little memory; pyarrow is imported at the first use."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.images import ImageError
from utils.errors import UserError

PIECE_ROWS = 16
BUFFER = 1 << 20  # bytes read at a time from a row group, instead of all of it


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


def reason(error: Exception) -> str:
    """The first line of pyarrow's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


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
                columns = [self._leaf()]
                self._pieces = self._file.iter_batches(PIECE_ROWS, [group], columns=columns, use_threads=False)
                self._group, self._piece, self._piece_start = group, next(self._pieces), 0
            while offset >= self._piece_start + len(self._piece):
                self._piece_start += len(self._piece)
                self._piece = next(self._pieces)
            return self._piece.column(0)[offset - self._piece_start].as_py()
        except (OSError, MemoryError, IndexError, StopIteration, pyarrow().ArrowException) as error:
            self._group = -1
            raise ImageError(f"cannot be read ({reason(error)})") from None

    def _open(self, shard: int) -> None:
        self._shard = self._group = -1
        self._file = pyarrow("parquet").ParquetFile(
            self._paths[shard], buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True
        )
        metadata = self._file.metadata
        self._ends = np.cumsum([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)])
        self._shard = shard

    def _leaf(self) -> str:
        """The column, or of a struct only its bytes."""
        struct = pyarrow("types").is_struct(self._file.schema_arrow.field(self._column).type)
        return f"{self._column}.bytes" if struct else self._column
