"""Find the packed files that a path names. Images that are not packed are packed once.

A folder, a zip file or tar files (webdataset) are read from a packed copy in the user's cache. The
copy holds the image files unchanged (docs/data-at-scale.md).
"""

import glob
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source
from duetgan.data.packing.sources.base import (
    Source,
    SourceOptions,
    check_complete,
    sharded,
    shards_by_split,
)
from duetgan.data.packing.sources.files import walk
from duetgan.data.packing.sources.named import CACHE, cache_folder
from duetgan.data.packing.sources.tars import SUFFIX, TarSource
from duetgan.utils import files
from duetgan.utils.errors import UserError, explained
from duetgan.utils.files import hold
from duetgan.utils.runlog.run_log import say

Paths = str | Path | Sequence[str | Path]


def packed_files(path: Paths) -> list[Path]:
    """Return the packed files with the images of `path` (see `shard_paths`).

    Images that are not packed are packed into the cache first. Raises UserError if they need
    options that only `duet pack` has.
    """
    paths = shard_paths(path)
    if paths[0].suffix.lower() == SUFFIX:
        location = paths[0] if len(paths) == 1 else paths[0].parent
        return [_copy_of(paths, lambda: TarSource(location, SourceOptions(), paths))]
    return [
        _copy_of([file], partial(open_source, str(file))) if _is_unpacked(file) else file
        for file in paths
    ]


def shard_paths(path: Paths) -> list[Path]:
    """Return the files that `path` names.

    `path` is a file or folder, a pattern such as "train-*.lmdb", or a list of these. The files of a
    pattern are sorted by name. A folder of tar files stands for its files.

    Raises UserError for an empty list, for a pattern without files, and for a folder that has tar
    files of several splits.
    """
    paths: list[Path] = []
    for item in path if isinstance(path, (list, tuple)) else [path]:
        paths += _paths_of(str(item))
    if not paths:
        raise UserError("no packed files are given: name at least one")
    return paths


def _paths_of(text: str) -> list[Path]:
    path = Path(text)
    if path.is_dir() and sharded(path) == SUFFIX:
        groups, _ = shards_by_split(path, SUFFIX)
        if len(groups) > 1:
            splits = sorted(groups, reverse=True)
            raise UserError(
                f"{text} holds shards of {' and '.join(splits)}: give a pattern,"
                f" {text}/*{splits[0]}*.tar"
            )
        (tars,) = groups.values()
        check_complete(path, tars)
        return tars
    if path.exists():
        return [path]
    if set(text).isdisjoint("*?["):
        return [path]
    paths = sorted(glob.glob(text))
    if not paths:
        raise UserError(f"{text}: no file matches this pattern; check it")
    return list(map(Path, paths))


def _is_unpacked(path: Path) -> bool:
    """Return True for a zip file, and for a folder unless it is an LMDB (has a file data.mdb)."""
    return (path.is_dir() and not (path / "data.mdb").is_file()) or path.suffix.lower() == ".zip"


def _copy_of(paths: Sequence[Path], source: Callable[[], Source]) -> Path:
    """Return the path of the packed copy of a folder, a zip file or tar files.

    If there is no copy yet, it is made from the images that the function `source` opens. If the
    name, size or time of a file has changed, a new copy replaces the old one. Processes that need
    the copy at the same time wait for the one that makes it.
    """
    states = []
    for path in paths:
        with files.reading(path, "give a folder, a zip file or tar files of images"):
            if not path.is_dir():
                files.check(path, files.ARCHIVE)
            for name in sorted(walk(path)[0]) if path.is_dir() else ["."]:
                file = path / name
                status = file.stat(follow_symlinks=file.exists())
                states.append((name, status.st_size, status.st_mtime_ns))
    folder, key = cache_folder() / "folders", _digest([str(path.resolve()) for path in paths])
    copy = folder / f"{key}-{_digest(states)}.lmdb"
    with explained(
        OSError,
        lambda error: (
            f"{folder}: {error.strerror}; it is kept there: set {CACHE} to another folder"
        ),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        lock = copy.with_suffix(".lock").open("ab")
    with lock:
        hold(lock, wait=True)
        if not _is_readable(copy):
            with source() as opened:
                _pack(opened, copy)
    for older in folder.glob(f"{key}-*"):
        if older.stem != copy.stem:
            older.unlink(missing_ok=True)
    return copy


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def _is_readable(path: Path) -> bool:
    try:
        LMDBReader(path).close()
    except UserError:  # The file is missing or damaged.
        return False
    return True


def _pack(source: Source, path: Path) -> None:
    """Pack a source into `path`, with its image files unchanged.

    Raises UserError if the images need options that only `duet pack` has.
    """
    for remark in source.remarks:
        say(remark)
    remedy = "pack the images with duet pack --on-error skip, which leaves it out"
    pack(source, path, encoding="source", overwrite=True, duplicates=False, remedy=remedy)
    say(
        f"{source.name}: packed once into {path}; duet pack --size N makes a file that is read"
        " faster"
    )
