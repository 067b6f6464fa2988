"""Read Parquet and Arrow files, for data/packing/sources/tables.py.

pyarrow trusts the sizes in a file, so it runs with limited memory.
"""

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import ipc, parquet

from duetgan.utils.machine import available_bytes

MEMORY_FRACTION = 0.5  # of the available memory, for pyarrow
BUFFER = 1 << 20  # bytes read at a time from a row group
Batches = Iterator[tuple[int, Any]]  # number of the first row, record batch

_lock = threading.Lock()  # the limit is one of the process

# Other memory pools reserve more than they use.
pyarrow.set_memory_pool(pyarrow.system_memory_pool())


@contextmanager
def limited() -> Iterator[None]:
    """Limit the memory of pyarrow inside the block, and raise its errors as OSError."""
    with _lock:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = pages * os.sysconf("SC_PAGE_SIZE") + int(MEMORY_FRACTION * available_bytes())
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
        try:
            yield
        except Exception as error:  # pyarrow raises many types
            # Python's own MemoryError has no text.
            unnamed = "too much memory" if isinstance(error, MemoryError) else type(error).__name__
            lines = str(error).strip().splitlines() or [unnamed]
            raise OSError(errno.EIO, lines[0].rstrip(".")) from None
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class ParquetTable:
    def __init__(self, path: str) -> None:
        self._file = parquet.ParquetFile(
            path, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True
        )
        self.schema = self._file.schema_arrow
        self.rows = self._file.metadata.num_rows

    def batches(self, columns: list[str], start: int, rows: int) -> Batches:
        """Yield batches of at most `rows` rows, each with the number of its first row.

        Reading starts at the row group that contains the row `start`.
        """
        first = 0
        for number in range(self._file.metadata.num_row_groups):
            count = self._file.metadata.row_group(number).num_rows
            if first + count > start:
                row = first
                for batch in self._file.iter_batches(rows, [number], columns, use_threads=False):
                    yield row, batch
                    row += batch.num_rows
            first += count


class ArrowTable:
    """An Arrow file in the stream format, as Hugging Face's `save_to_disk` writes it."""

    def __init__(self, path: str) -> None:
        self._path = path
        with self._open() as stream:
            self.schema = stream.schema
            self.rows = sum(batch.num_rows for batch in stream)

    def _open(self) -> Any:
        return ipc.open_stream(pyarrow.memory_map(self._path))

    def batches(self, columns: list[str], start: int, rows: int) -> Batches:
        """Yield batches of at most `rows` rows, each with the number of its first row.

        Reading starts at the record batch that contains the row `start`. Batches are validated
        because pyarrow trusts their offsets.
        """
        first = 0
        with self._open() as stream:
            for batch in stream:
                if first + batch.num_rows > start:
                    part = batch.select(columns)
                    part.validate(full=True)
                    for row in range(0, part.num_rows, rows):
                        yield first + row, part.slice(row, rows)
                first += batch.num_rows


def open_table(path: Path) -> ParquetTable | ArrowTable:
    """Open a Parquet or Arrow file, by its suffix. Raises OSError."""
    with limited():
        is_parquet = path.suffix.lower() == ".parquet"
        return ParquetTable(str(path)) if is_parquet else ArrowTable(str(path))


def read(
    path: Path, columns: list[str], start: int, rows: int
) -> Iterator[tuple[int, list[list[Any]]]]:
    """Yield the rows of a file from row `start` on, in pieces of at most `rows` rows.

    Each piece is a pair: its size in bytes, and for each of `columns` the list of its values.
    Raises OSError.
    """
    batches = open_table(path).batches(columns, start, rows)
    while True:
        with limited():
            first, batch = next(batches, (0, None))
            if batch is None:
                return
            batch = batch.slice(min(batch.num_rows, max(0, start - first)))
            values = [column.to_pylist() for column in batch.columns]
        yield batch.nbytes, values


def holds_images(kind: Any) -> bool:
    """Return True if a column's type is bytes, or a struct with a field `bytes`."""
    types = pyarrow.types
    if types.is_struct(kind):
        return any(field.name == "bytes" and holds_images(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))
