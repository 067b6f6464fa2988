"""The process that reads Parquet and Arrow files, for data/sources/tables.py: pyarrow believes what
a file says of itself, so it reads where memory is limited, and a crash ends nothing else.

A script of its own, which imports nothing of ours. A request holds path, columns (None: what the
table is), first row, rows at most, bytes of a row at most. The answer is "rows": bytes and values,
column by column, of the next few; "table": how many rows there are, name, type and use of each
column, and the metadata of Hugging Face's library; "large": the bytes of a row that is too large;
or "error": its text.
"""

import resource
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pyarrow
from pyarrow import compute, ipc, parquet

BUFFER = 1 << 20  # bytes read at a time from a row group, instead of all of it
PIECE = 16 << 20  # bytes sent at a time, unless a row has more
# of the kind of Arrow file with an index at its end, which holds a stream behind these bytes
MAGIC = b"ARROW1\0\0"
USES = {"binary": "bytes", "string": "text"}
FITTING = {
    "number": pyarrow.types.is_integer,
    "real": pyarrow.types.is_floating,
    "flag": pyarrow.types.is_boolean,
}
Batches = Iterator[tuple[int, Any]]  # the number of the first row, record batch


class ParquetTable:
    def __init__(self, path: str) -> None:
        self._file = parquet.ParquetFile(
            path, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True
        )
        self.schema, self.rows = self._file.schema_arrow, self._file.metadata.num_rows

    def batches(self, columns: list[str], start: int, rows: int) -> Batches:
        """Whole batches from that of row `start` on."""
        parts = [f"{name}.bytes" if is_struct(self.schema, name) else name for name in columns]
        first = 0
        for number in range(self._file.metadata.num_row_groups):
            group = self._file.metadata.row_group(number)
            if first + group.num_rows <= start:
                first += group.num_rows
                continue
            fitting = PIECE * group.num_rows // max(1, group.total_byte_size)
            for batch in self._file.iter_batches(
                max(1, min(rows, fitting)), [number], parts, use_threads=False
            ):
                yield first, batch
                first += batch.num_rows


class ArrowTable:
    """An Arrow file of either kind."""

    def __init__(self, path: str) -> None:
        self._path = path
        with self._open() as stream:
            self.schema, self.rows = stream.schema, sum(batch.num_rows for batch in stream)

    def _open(self) -> Any:
        file = pyarrow.memory_map(self._path)
        file.seek(len(MAGIC) if file.read(len(MAGIC)) == MAGIC else 0)
        return ipc.open_stream(file)

    def batches(self, columns: list[str], start: int, rows: int) -> Batches:
        """Whole batches from that of row `start` on; checked, since offsets are followed as they
        are.
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
    """The rows from `start` on, in batches of few bytes; of a struct the field `bytes`."""
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
    """Answers requests; where one goes on behind the last, it does too."""

    def __init__(self) -> None:
        self._path = ""  # that is open
        self._table: Any = None
        self._next: Any = None  # the request that would go on
        self._pieces: Iterator[Any] = iter(())  # of that request

    def answer(self, path: str, columns: Any, start: int, rows: int, limit: int) -> tuple[str, Any]:
        going_on, self._next = self._next == (path, columns, start, rows), None
        if columns is None or path != self._path:
            self._path = ""
            self._table = (ParquetTable if path.lower().endswith(".parquet") else ArrowTable)(path)
            self._path = path
        if columns is None:
            schema = self._table.schema
            columns = [(field.name, str(field.type), use_of(field.type)) for field in schema]
            return "table", (self._table.rows, columns, (schema.metadata or {}).get(b"huggingface"))
        if not going_on:
            self._pieces = pieces(self._table.batches(columns, start, rows), start, rows)
        if (piece := next(self._pieces, None)) is None:
            raise ValueError(f"it ends before row {start:,}")
        if piece.nbytes > limit and piece.num_rows == 1:
            return "large", piece.nbytes
        self._next = (path, columns, start + piece.num_rows, rows)
        return "rows", (piece.nbytes, [column.to_pylist() for column in piece.columns])


def use_of(kind: Any) -> str:
    """What a column may hold: images' bytes, labels as text, number, flag or list, real numbers;
    "": none of these.
    """
    if pyarrow.types.is_struct(kind):
        return (
            "bytes"
            if any(field.name == "bytes" and use_of(field.type) == "bytes" for field in kind)
            else ""
        )
    for use, fits in FITTING.items():
        if fits(kind):
            return use
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return "list" if use_of(kind.value_type) in ("text", "number") else ""
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return USES.get(str(kind).removeprefix("large_").removesuffix("_view"), "")


def main(descriptor: int, memory: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asks ends it
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    reader = Reader()
    with Connection(descriptor) as asking:
        while True:
            try:
                request = asking.recv()
            except EOFError:
                return
            try:
                answer = reader.answer(*request)
            except Exception as error:  # whatever pyarrow raises
                lines = str(error).strip().splitlines() or [type(error).__name__]
                answer = "error", lines[0].rstrip(".")
            asking.send(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
