"""Arrow files with images' bytes, as Hugging Face's `save_to_disk` writes them: a folder, or folders of splits.

- A data set: `state.json` names its files in order (`data-00000-of-00002.arrow`). The columns are chosen as
  data/sources/tables.py says; the names of classes stand in the files' own schemas.
- A dictionary of data sets: `dataset_dict.json` names its splits, each a folder of that kind.
- One `.arrow` file, and a folder of them without `state.json`, as in the library's cache.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from duetgan.data.sources.base import SourceOptions
from duetgan.data.sources.splits import choose_split, refuse_split
from duetgan.data.sources.tables import TableSource, open_tables
from duetgan.utils import bounded
from duetgan.utils.errors import UserError

STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    return (folder / SPLITS).is_file() or (folder / STATE).is_file()


def open_arrow(path: Path, options: SourceOptions) -> TableSource:
    """The images of an Arrow file or of a folder of `save_to_disk`. Raises UserError for what cannot be used."""
    if not is_saved(path):
        return open_tables(path, options)
    if not (path / SPLITS).is_file():
        refuse_split(path, options.split)
        return TableSource(path, _shards(path), options.label_column)
    splits = _document(path / SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(map(_is_name, splits)):
        raise UserError(f"{path / SPLITS} names no splits; save it again")
    if options.split in splits or (options.split is None and len(splits) == 1):
        chosen = options.split or splits[0]
    else:
        chosen = choose_split(path, options.split, splits)
    source = TableSource(path, _shards(path / chosen), options.label_column, splits=tuple(sorted(splits)))
    source.name = f"{path.name} {chosen}"
    others = [name for name in source.splits if name != chosen]
    if options.split is None and others:
        source.remarks.append(f"{path}: its split {chosen} is packed; others: --split {' or '.join(others)}")
    return source


def _is_name(name: object) -> bool:
    """Whether it names a file or folder beside the document."""
    return isinstance(name, str) and Path(name).name == name != ".."


def _shards(folder: Path) -> list[Path]:
    """The files of a data set. Raises UserError for what is not there, leads out of the folder, or is reordered."""
    state = _document(folder / STATE)
    names: list[Any] = []
    with suppress(KeyError, TypeError):
        names = [item["filename"] for item in state["_data_files"]]
    if not names or not all(map(_is_name, names)):
        raise UserError(f"{folder / STATE} names no files in _data_files; save it again")
    if state.get("_indices_data_files"):
        raise UserError(f"{folder} is a selection of another data set: save it after flatten_indices()")
    missing = next((name for name in names if not (folder / name).is_file()), None)
    if missing is not None:
        raise UserError(f"{folder}: {missing} is missing, which {STATE} names: copy or save it again")
    return [folder / name for name in names]


def _document(path: Path) -> dict[str, Any]:
    with bounded.reading(path, "save it again", ValueError, RecursionError):
        content = json.loads(bounded.read_file(path, bounded.TABLE))
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; save it again")
    return content
