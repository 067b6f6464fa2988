"""Where pictures come from: `open_source` finds the right reader for what the user names."""

import zipfile
from collections.abc import Callable
from pathlib import Path

from data.sources.base import Item, Problem, Source
from data.sources.cifar10 import open_cifar10
from data.sources.fashion_mnist import open_fashion_mnist, open_sample
from data.sources.files import FolderSource, ZipSource
from data.sources.idx import find_idx, idx_source
from data.sources.listing import SPLITS
from utils.cli import did_you_mean
from utils.errors import UserError

__all__ = ["NAMED", "SPLITS", "Item", "Problem", "Source", "open_source"]


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


def open_source(spec: str, *, split: str = "train", root: str | Path | None = None) -> Source:
    """Open a source: a name of NAMED, a folder of pictures or idx files, or a zip file.

    `split` is "train" or "test"; a folder or zip file without split folders is taken whole. `root` says where a named
    source lies. Raises UserError if there is nothing there, no pictures in it, or if it is something else.
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
    path = Path(spec).expanduser()
    if path.is_dir():
        if find_idx(path, "train") or find_idx(path, "test"):
            return idx_source(f"{path.name} {split}", path, split)
        return FolderSource(path, split=split)
    if path.is_file():
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path} is neither a folder nor a zip file: give one of them")
        return ZipSource(path, split=split)
    near = [*NAMED, *(item.name for item in path.parent.iterdir())] if path.parent.is_dir() else list(NAMED)
    raise UserError(f"{spec}: no such folder or zip file{did_you_mean(path.name, near)}; names are {', '.join(NAMED)}")
