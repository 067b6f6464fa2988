"""Files of every kind that a source reads, made by tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from duetgan.data.errors import ImageError
from duetgan.data.packing.sources import Source, open_source
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.data.conftest import as_file, save


def content_of(shade: int) -> bytes:
    """A PNG of one colour."""
    return as_file(Image.new("RGB", (8, 8), (shade, 0, 0)))


def contents(source: Source) -> list[Any]:
    return [source.content(index) for index in range(len(source))]


def refused(where: object, message: str, **options: Any) -> None:
    """That no source opens there, in these words."""
    assert_raises(UserError, message, open_source, str(where), **options)


def item_refused(source: Source, index: int, message: str) -> None:
    assert_raises(ImageError, message, source.content, index)


def manifest(folder: Path, text: str, encoding: str = "utf-8") -> str:
    for name in ("a.png", "b.png", "deep/c.png"):
        save(folder / name)
    (folder / "list.csv").write_bytes(text.encode(encoding))
    return str(folder / "list.csv")


def arrow_table(table: dict[str, Any], names: Sequence[str], columns: Sequence[str] = ("label",)) -> Any:
    """Columns, of which some hold classes of these names, as Hugging Face's library writes them down."""
    made = pytest.importorskip("pyarrow").table(table)
    if names:
        features = {"info": {"features": {column: {"names": names, "_type": "ClassLabel"} for column in columns}}}
        made = made.replace_schema_metadata({"huggingface": json.dumps(features)})
    return made


def parquet(path: Path, table: dict[str, Any], *, names=(), columns=("label",), rows: int = 2, **options: Any) -> Path:
    made = arrow_table(table, names, columns)
    path.parent.mkdir(exist_ok=True)
    pytest.importorskip("pyarrow.parquet").write_table(made, path, row_group_size=rows, **options)
    return path


def arrow(path: Path, table: dict[str, Any], *, names: Sequence[str] = (), rows: int = 2, **options: Any) -> Path:
    """A file as the library writes it: a stream of batches, the features in the schema's metadata."""
    made, ipc = arrow_table(table, names), pytest.importorskip("pyarrow").ipc
    path.parent.mkdir(exist_ok=True, parents=True)
    with ipc.new_stream(str(path), made.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(made, max_chunksize=rows)
    return path


def cells(*shades: int) -> list[dict[str, Any]]:
    return [{"bytes": content_of(shade), "path": f"{shade}.png"} for shade in shades]
