"""The process that reads Parquet and Arrow files, for data/sources/tables.py.

pyarrow trusts the sizes in a file. It therefore runs in a process with limited memory, whose crash
does not end the program. This script imports nothing of the package.

A request has: path, columns (None: describe the table), first row, maximal number of rows, maximal
bytes of a row. The answer is one of:

- "rows": the number of bytes, and the values column by column, of the next rows;
- "table": the number of rows, the name, type and use of each column, and the metadata of Hugging
  Face's library;
- "large": the number of bytes of a row that is too large;
- "error": a message.
"""

import resource
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pyarrow
from pyarrow import compute, ipc, parquet

BUFFER = 1 << 20  # bytes read at a time from a row group
PIECE = 16 << 20  # bytes sent at a time, unless a row has more
# first bytes of the Arrow file format, which contains a stream after them
MAGIC = b"ARROW1\0\0"
USES = {"binary": "bytes", "string": "text"}
TYPE_CHECKS = {
    "number": pyarrow.types.is_integer,
    "real": pyarrow.types.is_floating,
    "flag": pyarrow.types.is_boolean,
}
Batches = Iterator[tuple[int, Any]]  # number of the first row, record batch


class ParquetTable:
    def __init__(self, path: str) -> None:
        self._file = parquet.ParquetFile(
            path, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True
        )
        self.schema = self._file.schema_arrow
        self.rows = self._file.metadata.num_rows

    def batches(self, columns: list[str], start: int, rows: int) -> Batches:
        """Yield whole record batches, from the one with row `start` on."""
        parts = [f"{name}.bytes" if is_struct(self.schema, name) else name for name in columns]
        first = 0
        for number in range(self._file.metadata.num_row_groups):
            group = self._file.metadata.row_group(number)
            if first + group.num_rows <= start:
                first += group.num_rows
                continue
            rows_per_piece = PIECE * group.num_rows // max(1, group.total_byte_size)
            for batch in self._file.iter_batches(
                max(1, min(rows, rows_per_piece)), [number], parts, use_threads=False
            ):
                yield first, batch
                first += batch.num_rows


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


def is_struct(schema: Any, name: str) -> bool:
    return bool(pyarrow.types.is_struct(schema.field(name).type))


def pieces(batches: Batches, start: int, rows: int) -> Iterator[Any]:
    """Yield the rows from `start` on in small batches. A struct becomes its field `bytes`."""
    for first, batch in batches:
        batch = batch.slice(min(batch.num_rows, max(0, start - first)))
        names = batch.schema.names
        arrays = [
            compute.struct_field(column, "bytes") if is_struct(batch.schema, name) else column
            for name, column in zip(names, batch.columns, strict=True)
        ]
        batch = pyarrow.record_batch(arrays, names)
        while batch.num_rows:
            piece = batch.slice(0, rows)
            while piece.num_rows > 1 and piece.nbytes > PIECE:
                piece = piece.slice(0, piece.num_rows // 2)
            yield piece
            batch = batch.slice(piece.num_rows)


class Reader:
    """Answers requests. A request for the rows after the previous ones continues the iteration."""

    def __init__(self) -> None:
        self._path = ""  # of the open table
        self._table: ParquetTable | ArrowTable | None = None
        self._next: object = None  # the request that continues `_pieces`
        self._pieces: Iterator[Any] = iter(())

    def answer(
        self, path: str, columns: list[str] | None, start: int, rows: int, limit: int
    ) -> tuple[str, object]:
        continues = self._next == (path, columns, start, rows)
        self._next = None
        table = self._table
        if table is None or columns is None or path != self._path:
            self._path = ""
            kind = ParquetTable if path.lower().endswith(".parquet") else ArrowTable
            table = self._table = kind(path)
            self._path = path
        if columns is None:
            schema = table.schema
            described = [(field.name, str(field.type), use_of(field.type)) for field in schema]
            return "table", (table.rows, described, (schema.metadata or {}).get(b"huggingface"))
        if not continues:
            self._pieces = pieces(table.batches(columns, start, rows), start, rows)
        if (piece := next(self._pieces, None)) is None:
            raise ValueError(f"it ends before row {start:,}")
        if piece.nbytes > limit and piece.num_rows == 1:
            return "large", piece.nbytes
        self._next = (path, columns, start + piece.num_rows, rows)
        return "rows", (piece.nbytes, [column.to_pylist() for column in piece.columns])


def use_of(kind: Any) -> str:
    """Return the possible use of a column of type `kind`: "bytes" of images, labels as "text",
    "number", "flag" or "list", "real" numbers, or "" for none of these.
    """
    if pyarrow.types.is_struct(kind):
        has_bytes = any(field.name == "bytes" and use_of(field.type) == "bytes" for field in kind)
        return "bytes" if has_bytes else ""
    for use, has_type in TYPE_CHECKS.items():
        if has_type(kind):
            return use
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return "list" if use_of(kind.value_type) in ("text", "number") else ""
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return USES.get(str(kind).removeprefix("large_").removesuffix("_view"), "")


def main(descriptor: int, memory: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent process ends this one.
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    reader = Reader()
    with Connection(descriptor) as connection:
        while True:
            try:
                request = connection.recv()
            except EOFError:
                return
            try:
                answer = reader.answer(*request)
            except Exception as error:  # pyarrow raises many types
                lines = str(error).strip().splitlines() or [type(error).__name__]
                answer = "error", lines[0].rstrip(".")
            connection.send(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
