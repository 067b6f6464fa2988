"""Where images come from: `open_source` finds the right reader for what the user names."""

import zipfile
from collections.abc import Callable
from pathlib import Path

from data.lmdb.environment import is_lmdb
from data.sources.base import Item, Problem, Source
from data.sources.cifar10 import open_cifar10
from data.sources.files import ZipSource, open_folder
from data.sources.listing import SPLITS
from data.sources.lmdb_files import open_lmdb
from data.sources.manifest import open_manifest
from data.sources.mnist import find_idx, idx_source, open_fashion_mnist, open_sample
from data.sources.parquet import ParquetSource, is_parquet_folder
from data.sources.remote import RemoteSource
from utils.cli import did_you_mean
from utils.errors import UserError

__all__ = ["NAMED", "SPLITS", "Item", "Problem", "Source", "open_source"]

ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".7z", ".rar")


def _idx(split: str, root: Path | None) -> Source:
    if root is None:
        raise UserError("idx needs --root with the folder of its files, or give that folder as the source")
    return idx_source(f"{root.name} {split}", root, split)


# Sources that go by a name; a folder of that name is written ./NAME.
NAMED: dict[str, Callable[[str, Path | None], Source]] = {
    "sample": open_sample,
    "fashion-mnist": open_fashion_mnist,
    "cifar10": open_cifar10,
    "idx": _idx,
}
KINDS = f"a folder, a .zip, .csv, .parquet or LMDB file, a URL, or a name: {', '.join(NAMED)}"


def open_source(spec: str, *, split: str = "train", root: str | Path | None = None, size: int | None = None) -> Source:
    """Open a source: a name of NAMED, a URL, a folder (of images, idx files, Parquet files, or an LMDB's) or a file
    (zip, CSV manifest, Parquet, LMDB).

    `split` is "train" or "test"; a source without splits is taken whole. `root` says where a named source lies. `size`
    in px chooses among the resolutions of a source that has several; without it, or if it is none of them, the largest
    is taken. Raises UserError if there is nothing there, no images in it, or if it is something else.
    """
    if split not in SPLITS:
        raise UserError(f"split {split!r}: choose train or test")
    place = None if root is None else Path(root).expanduser()
    if place is not None and not place.is_dir():
        raise UserError(f"--root {place}: no such folder")
    name = spec.replace("_", "-")
    if name in NAMED:
        return NAMED[name](split, place)
    if place is not None:
        raise UserError(f"--root does not apply to {spec}: it is for fashion-mnist, cifar10 and idx")
    if "://" in spec:
        return RemoteSource(spec, split=split)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _open_folder(path, split, size)
    if path.is_file():
        return _open_file(path, split, size)
    near = [*NAMED, *(item.name for item in path.parent.iterdir())] if path.parent.is_dir() else list(NAMED)
    raise UserError(f"{spec}: no such folder or zip file{did_you_mean(path.name, near)}; give {KINDS}")


def _open_folder(path: Path, split: str, size: int | None) -> Source:
    if (path / "data.mdb").is_file():
        return open_lmdb(path / "data.mdb", split=split, size=size)
    if find_idx(path, "train") or find_idx(path, "test"):
        return idx_source(f"{path.name} {split}", path, split)
    if is_parquet_folder(path):
        return ParquetSource(path, split=split)
    return open_folder(path, split=split)


def _open_file(path: Path, split: str, size: int | None) -> Source:
    """By content where that is certain, else by suffix; a damaged file of a known suffix is refused by its reader."""
    suffix = path.suffix.lower()
    if is_lmdb(path) or suffix in (".lmdb", ".mdb"):
        return open_lmdb(path, split=split, size=size)
    if suffix == ".parquet":
        return ParquetSource(path, split=split)
    if suffix == ".csv":
        return open_manifest(path, split=split)
    if suffix == ".zip" or zipfile.is_zipfile(path):
        return ZipSource(path, split=split)
    if path.name.lower().endswith(ARCHIVES):
        raise UserError(f"{path}: archives of this kind are not read; unpack it first or make a zip file of it")
    raise UserError(f"{path} is not a source of images; give {KINDS}")
