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
from pyarrow import compute, ipc, parquet

from duetgan.utils import files
from duetgan.utils.machine import available_bytes

MEMORY_FRACTION = 0.5  # of the available memory, for pyarrow
BUFFER = 1 << 20  # bytes read at a time from a row group
PIECE = 16 << 20  # bytes returned at a time, unless a row has more
# first bytes of the Arrow file format, which contains a stream after them
MAGIC = b"ARROW1\0\0"
USES = {"binary": "bytes", "string": "text", "bool": "flag"}
Batches = Iterator[tuple[int, Any]]  # number of the first row, record batch
# number of bytes, and values column by column
Pieces = Iterator[tuple[int, list[list[Any]]]]

_lock = threading.Lock()  # the limit is one of the process

# Other memory pools reserve more than they use.
pyarrow.set_memory_pool(pyarrow.system_memory_pool())


@contextmanager
def limited() -> Iterator[None]:
    """Limit the memory that pyarrow may take in the block, and raise its errors as OSError."""
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
        """Yield the record batches of whole row groups, from the group with row `start` on."""
        parts = [f"{name}.bytes" if is_struct(self.schema, name) else name for name in columns]
        first = 0
        for number in range(self._file.metadata.num_row_groups):
            group = self._file.metadata.row_group(number)
            if first + group.num_rows > start:
                most = max(1, min(rows, PIECE * group.num_rows // max(1, group.total_byte_size)))
                row = first
                for batch in self._file.iter_batches(most, [number], parts, use_threads=False):
                    yield row, batch
                    row += batch.num_rows
            first += group.num_rows


class ArrowTable:
    """An Arrow file, in the file or the stream format."""

    def __init__(self, path: str) -> None:
        self._path = path
        with self._open() as stream:
            self.schema = stream.schema
            self.rows = sum(batch.num_rows for batch in stream)

    def _open(self) -> Any:
        file = pyarrow.memory_map(self._path)
        file.seek(len(MAGIC) if file.read(len(MAGIC)) == MAGIC else 0)
        return ipc.open_stream(file)

    def batches(self, columns: list[str], start: int, rows: int) -> Batches:
        """Yield whole record batches, from the one with row `start` on. They are validated because
        pyarrow trusts their offsets.
        """
        first = 0
        with self._open() as stream:
            for batch in stream:
                if first + batch.num_rows > start:
                    part = batch.select(columns)
                    part.validate(full=True)
                    yield first, part
                first += batch.num_rows


def open_table(path: str) -> ParquetTable | ArrowTable:
    return ParquetTable(path) if path.lower().endswith(".parquet") else ArrowTable(path)


def describe(path: str) -> tuple[int, list[tuple[str, str, str]], bytes | None]:
    """Return the number of rows of a file, the name, type and use of each column, and the metadata
    of Hugging Face's library. Raises OSError.
    """
    with limited():
        table = open_table(path)
        columns = [(field.name, str(field.type), use_of(field.type)) for field in table.schema]
        return table.rows, columns, (table.schema.metadata or {}).get(b"huggingface")


def is_struct(schema: Any, name: str) -> bool:
    return bool(pyarrow.types.is_struct(schema.field(name).type))


def read(path: str, columns: list[str], start: int, rows: int, kind: files.FileLimit) -> Pieces:
    """Yield the rows of a file from row `start` on, at most `rows` at a time: their number of
    bytes, and their values column by column. Raises OSError.
    """
    with limited():
        batches = open_table(path).batches(columns, start, rows)
    while True:
        with limited():
            first, batch = next(batches, (0, None))
            if batch is None:
                return
            # A struct becomes its field `bytes`.
            arrays = [
                compute.struct_field(column, "bytes") if is_struct(batch.schema, name) else column
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            ]
            part = pyarrow.record_batch(arrays, batch.schema.names)
        part = part.slice(min(part.num_rows, max(0, start - first)))
        while part.num_rows:
            piece = part.slice(0, rows)
            while piece.num_rows > 1 and piece.nbytes > PIECE:
                piece = piece.slice(0, piece.num_rows // 2)
            if piece.num_rows == 1:
                files.refuse_large(piece.nbytes, kind)
            with limited():
                values = [column.to_pylist() for column in piece.columns]
            yield piece.nbytes, values
            part = part.slice(piece.num_rows)


def use_of(kind: Any) -> str:
    """Return the possible use of a column of type `kind`: "bytes" of images, labels as "text",
    "number", "flag" or "list", or "" for none of these. Floats are numbers.
    """
    if pyarrow.types.is_struct(kind):
        has_bytes = any(field.name == "bytes" and use_of(field.type) == "bytes" for field in kind)
        return "bytes" if has_bytes else ""
    if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind):
        return "number"
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return "list" if use_of(kind.value_type) in ("text", "number") else ""
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return USES.get(str(kind).removeprefix("large_").removesuffix("_view"), "")
