"""The process that reads Parquet and Arrow files, for data/packing/sources/tables.py.

pyarrow trusts the sizes in a file. It therefore runs in a process with limited memory, whose crash
does not end the program. This script imports nothing of the package.

It receives one request and sends its answers:

- `describe(paths)`: for each file the number of rows, the name, type and use of each column, and
  the metadata of Hugging Face's library;
- `read(paths, columns, start, rows, limit, remedy)`: the rows of the files from row `start` of the
  first one on, at most `rows` at a time: their number of bytes, and the values column by column. A
  row of more than `limit` bytes is an error, whose message ends with `remedy`.

After an error it sends the message, a text, and ends.
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
USES = {"binary": "bytes", "string": "text", "bool": "flag"}
Batches = Iterator[tuple[int, Any]]  # number of the first row, record batch


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


def is_struct(schema: Any, name: str) -> bool:
    return bool(pyarrow.types.is_struct(schema.field(name).type))


def describe(paths: list[str]) -> Iterator[object]:
    for path in paths:
        table = open_table(path)
        columns = [(field.name, str(field.type), use_of(field.type)) for field in table.schema]
        yield table.rows, columns, (table.schema.metadata or {}).get(b"huggingface")


def read(
    paths: list[str], columns: list[str], start: int, rows: int, limit: int, remedy: str
) -> Iterator[object]:
    for path in paths:
        for first, batch in open_table(path).batches(columns, start, rows):
            # A struct becomes its field `bytes`.
            arrays = [
                compute.struct_field(column, "bytes") if is_struct(batch.schema, name) else column
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            ]
            batch_part = pyarrow.record_batch(arrays, batch.schema.names)
            batch_part = batch_part.slice(min(batch_part.num_rows, max(0, start - first)))
            while batch_part.num_rows:
                piece = batch_part.slice(0, rows)
                while piece.num_rows > 1 and piece.nbytes > PIECE:
                    piece = piece.slice(0, piece.num_rows // 2)
                if piece.num_rows == 1 and piece.nbytes > limit:
                    raise ValueError(f"a row has {piece.nbytes:,} bytes, more than {remedy}")
                yield piece.nbytes, [column.to_pylist() for column in piece.columns]
                batch_part = batch_part.slice(piece.num_rows)
        start = 0


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


def main(descriptor: int, memory: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent process ends this one.
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with Connection(descriptor) as connection:
        function, *arguments = connection.recv()
        try:
            answers = describe(*arguments) if function == "describe" else read(*arguments)
            for answer in answers:
                connection.send(answer)
        except Exception as error:  # pyarrow raises many types
            lines = str(error).strip().splitlines() or [type(error).__name__]
            connection.send(lines[0].rstrip("."))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
