"""Open sources of images: `open_source` chooses the reader by the user's argument."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from duetgan.data.lmdb.environment import is_lmdb
from duetgan.data.packing.sources.base import (
    NO_LABELS,
    SPLITS,
    Grouping,
    Problem,
    Source,
    SourceOptions,
    group_images,
    sharded,
)
from duetgan.data.packing.sources.files import CLASSES_FROM, ZipSource, open_folder
from duetgan.data.packing.sources.lmdb_files import open_lmdb
from duetgan.data.packing.sources.named import (
    find_idx,
    open_cifar10,
    open_fashion_mnist,
    open_idx,
    open_sample,
)
from duetgan.data.packing.sources.path_tables import PathTable
from duetgan.data.packing.sources.tables import TableSource
from duetgan.data.packing.sources.tars import TarSource
from duetgan.utils import extras, files
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import did_you_mean

__all__ = ["CLASSES_FROM", "NAMED", "SPLITS", "Problem", "Source", "open_source"]

# Data sets that are opened by a name. A folder with the same name is written ./NAME.
NAMED: dict[str, Callable[[str, Path | None], Source]] = {
    "sample": open_sample,
    "fashion-mnist": open_fashion_mnist,
    "cifar10": open_cifar10,
    "idx": open_idx,
}
# Readers of a file, or a folder of shards, by its suffix
READERS: dict[str, Callable[[Path, SourceOptions], Source]] = {
    ".lmdb": open_lmdb,
    ".mdb": open_lmdb,
    ".parquet": TableSource,
    ".arrow": TableSource,
    ".tar": TarSource,
    ".csv": PathTable,
    ".tsv": PathTable,
    ".zip": ZipSource,
}
TABLES = (".csv", ".tsv")
WHOLE = (".lmdb", ".mdb", *TABLES, ".zip")  # suffixes that shards never have


def open_source(
    spec: str,
    *,
    split: str | None = None,  # see SourceOptions, also for the following parameters
    size: int | str | None = None,
    classes_from: str | None = None,
    root: str | Path | None = None,
    label_column: str | None = None,
    label_separator: str | None = None,
    split_column: str | None = None,
    path_column: str | None = None,
    suffix: str | None = None,
    group_column: str | None = None,
    group_from: str | None = None,  # regular expression for `group_by_name`
) -> Source:
    """Open a source of images.

    `spec` is a key of NAMED, a folder (of images, idx, Parquet, Arrow or tar files, or of an LMDB),
    or a file (zip, tar, LMDB, or a table in CSV, TSV, Parquet or Arrow). If the source has no
    splits, all of its images are used.

    Raises UserError if the source does not exist, has no images or is of an unknown kind, and for
    an option that does not apply to it.
    """
    folder = None if root is None else Path(root).expanduser()
    if folder is not None and not folder.is_dir():
        raise UserError(f"--root {folder}: no such folder")
    options = SourceOptions(
        split,
        size,
        classes_from,
        folder,
        label_column,
        label_separator,
        split_column,
        path_column,
        suffix,
        group_column,
    )
    if group_from is not None and group_column is not None:
        raise UserError("--group-column and --group-from both define groups: drop one")
    source = _open(spec, options)
    values = options._asdict()
    del values["split"], values["size"]  # These apply to every source.
    for name, value in values.items():
        if value is not None and name not in source.takes:
            source.__exit__()
            raise UserError(f"--{name.replace('_', '-')} does not apply to {spec}: leave it out")
    if group_from is not None:
        source.grouping = group_by_name(source, group_from)
    return source


def group_by_name(source: Source, expression: str) -> Grouping:
    """Group images by a part of their stored names.

    The part is what the parentheses in the regular expression `expression` match. It becomes the
    name of the group. Raises UserError for an invalid expression, and for an image without a match.
    """
    option = f"--group-from {shlex.quote(expression)}"
    with explained(re.error, lambda error: f"{option}: is not a regular expression ({error})"):
        pattern = re.compile(expression)
    if pattern.groups != 1:
        raise UserError(
            f"{option}: put the part that names the group, and nothing else, in parentheses: 'patient([0-9]+)'"
        )
    matches = [pattern.search(source.stored_name(index)) for index in range(len(source))]
    names = [(match and match[1]) or "" for match in matches]
    return group_images(option, names, source.item_name)


def is_source(path: Path) -> bool:
    """Return True for a folder, and for a file that `open_source` reads, such as a zip file."""
    suffix = path.suffix.lower()
    return path.is_dir() or suffix in READERS or (path.is_file() and is_lmdb(path))


def kinds() -> str:
    """Return a text that lists the supported kinds of sources, for messages."""
    return f"a folder, a file ({', '.join(READERS)}), or a name: {', '.join(NAMED)}"


def open_images(spec: str) -> Source:
    """Open all images of a file or folder as a source without labels and without splits.

    Sub-folders at any depth are included. Raises UserError if there are no images.
    """
    options = SourceOptions(label_column=NO_LABELS, split_column=NO_LABELS, classes_from="none")
    return _open(os.path.join(".", spec), options)


def _open(spec: str, options: SourceOptions) -> Source:
    side = "test" if options.split in ("test", "val") else "train"
    name = spec.replace("_", "-")
    if name in NAMED:
        source = NAMED[name](side, options.root)
        if name != "sample":
            source.takes = frozenset(("root",))
        source.splits = source.splits or ("test", "train")
        return source
    path = Path(spec).expanduser()
    if not path.exists():
        names = list(NAMED)
        if path.parent.is_dir():
            names += [item.name for item in path.parent.iterdir()]
        raise UserError(
            f"{spec}: no such folder or zip file{did_you_mean(path.name, names)}; give {kinds()}"
        )
    if not path.is_dir():
        return _open_file(path, options)
    if (path / "data.mdb").is_file():
        return open_lmdb(path / "data.mdb", options)
    if find_idx(path, "test") or find_idx(path, "train"):
        return open_idx(side, path)
    suffix = sharded(path, [suffix for suffix in READERS if suffix not in WHOLE])
    return READERS.get(suffix, open_folder)(path, options)


def _open_file(path: Path, options: SourceOptions) -> Source:
    """Open a file with the reader for its suffix. An LMDB file may have any suffix."""
    with files.reading(path, f"give {kinds()}"):
        files.check(path, files.ARCHIVE)
    suffix = ".lmdb" if is_lmdb(path) else path.suffix.lower()
    if suffix in READERS:
        return READERS[suffix](path, options)
    raise UserError(f"{path} is not a source of images; give {kinds()}")


extras.attach(__name__)
