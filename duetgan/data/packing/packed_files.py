"""Find the packed files that a path names, or make packed files of its images once.

Tar files (webdataset) are read through an index, a packed file without the images' bytes. A folder
or zip of images is read from a packed copy. Index and copy lie in the user's cache. Every image is
read and decoded once to make either. Afterwards an image in a tar is read from its position and
compared with the checksum in the index (docs/data-at-scale.md).
"""

import glob
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from duetgan.data.lmdb.format import Shard
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import PACKED_TARS, open_source
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
from duetgan.data.tar_files import OPEN, state_of
from duetgan.utils import files
from duetgan.utils.errors import UserError, explained
from duetgan.utils.files import hold
from duetgan.utils.runlog.run_log import say

Paths = str | Path | Sequence[str | Path]
BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
MOST_FILES = 100_000  # of one pattern, at most


def packed_files(path: Paths) -> list[Path]:
    """Return packed files with the images of `path` (see `shard_paths`), made if need be.

    Raises UserError for images that need the options of packing.
    """
    paths = shard_paths(path)
    if is_tar(paths[0]):
        return [_index_of(paths)]
    return [_copy_of(file) if _is_unpacked(file) else file for file in paths]


def shard_paths(path: Paths) -> list[Path]:
    """Return the files that `path` names.

    `path` is one file or several, a pattern ("train-*.lmdb", "train-{000..146}.tar"), whose files
    are sorted by name, or a folder of tar files.

    Raises UserError if there are none, for a folder of tar files of several splits, and for packed
    files together with tar files.
    """
    paths: list[Path] = []
    for item in path if isinstance(path, (list, tuple)) else [path]:
        paths += _paths_of(str(item))
    if not paths:
        raise UserError("no packed files are given: name at least one")
    packed = [file for file in paths if not is_tar(file)]
    if 0 < len(packed) < len(paths):
        raise UserError(
            f"{packed[0]} is no tar file, as others of this data set are: give one kind"
        )
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
    paths: list[str] = []
    for name in expand_braces(text):
        if set(name).isdisjoint("*?["):
            paths.append(name)
        else:
            paths += sorted(glob.glob(name))
    if not paths:
        raise UserError(f"{text}: no file matches this pattern; check it")
    return list(map(Path, paths))


def expand_braces(text: str) -> list[str]:
    """Expand braces as a shell does: "{08..10}" to 08, 09, 10; "{a,b}" to a, b.

    Raises UserError for more than MOST_FILES names.
    """
    parts: list[Sequence[str]] = []
    for position, part in enumerate(BRACES.split(text)):
        in_braces = position % 2 == 1
        span = RANGE.fullmatch(part)
        if in_braces and span:
            numbers = range(int(span[1]), min(int(span[2]), int(span[1]) + MOST_FILES) + 1)
            parts.append([f"{number:0{len(span[1])}d}" for number in numbers])
        else:
            parts.append(part.split(",") if in_braces else [part])
        if math.prod(map(len, parts)) > MOST_FILES:
            raise UserError(f"{text}: the pattern names more than {MOST_FILES:,} files; check it")
    return list(map("".join, itertools.product(*parts)))


def is_tar(path: Path) -> bool:
    """Return True if a file is a tar by its name. Raises UserError for a compressed one."""
    if path.name.lower().endswith(PACKED_TARS):
        raise UserError(
            f"{path} is compressed, so that no image can be found in it: make it a .tar, as gunzip"
            " does"
        )
    return path.suffix.lower() == SUFFIX


def open_at_once(path: Paths) -> int:
    """Return the number of files that are open while `path` is read."""
    paths = shard_paths(path)
    return min(len(paths), OPEN) + 1 if is_tar(paths[0]) else len(paths)


def _is_unpacked(path: Path) -> bool:
    """Return True for a folder or zip of images."""
    return (path.is_dir() and not (path / "data.mdb").is_file()) or path.suffix.lower() == ".zip"


def _index_of(shards: Sequence[Path]) -> Path:
    """Return the path of the index of tar files.

    The index is made again if the size or time of a tar file has changed.
    """
    states = []
    for shard in shards:
        with files.reading(shard, "give tar files of images"):
            size, changed = state_of(files.check(shard, files.ARCHIVE))
        states.append(Shard(path=str(shard.absolute()), size=size, changed=changed))
    location = shards[0] if len(shards) == 1 else shards[0].parent
    return _cached(
        "shards",
        [state.path for state in states],
        [(state.size, state.changed) for state in states],
        lambda: TarSource(location, SourceOptions(), shards),
        states,
    )


def _copy_of(folder: Path) -> Path:
    """Return the path of the packed copy of a folder or zip of images.

    The image files are copied unchanged. The copy is made again if the name, size or time of a file
    has changed.
    """
    with files.reading(folder, "give a folder, or a zip file, of images"):
        names = walk(folder)[0] if folder.is_dir() else ["."]
        states = []
        for name in sorted(names):
            file = folder / name
            states.append((name, *state_of(file.stat(follow_symlinks=file.exists()))))
    return _cached("folders", str(folder.resolve()), states, lambda: open_source(str(folder)))


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def _cached(
    kind: str,
    location: object,
    states: object,  # of the files at `location`; others give another packed file
    source: Callable[[], Source],
    shards: list[Shard] | None = None,
) -> Path:
    """Pack a source into the cache, unless its packed file is there, and return the file's path.

    Processes that need the file at the same time wait for the one that makes it. Files of earlier
    states are removed.
    """
    folder, key = cache_folder() / kind, _digest(location)
    path = folder / f"{key}-{_digest(states)}.lmdb"
    with explained(
        OSError,
        lambda error: (
            f"{folder}: {error.strerror}; it is kept there: set {CACHE} to another folder"
        ),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("ab")
    with lock:
        hold(lock, wait=True)
        if not _is_readable(path):
            with source() as opened:
                _pack(opened, path, shards)
    for older in folder.glob(f"{key}-*"):
        if older.stem != path.stem:
            older.unlink(missing_ok=True)
    return path


def _is_readable(path: Path) -> bool:
    try:
        LMDBReader(path).close()
    except UserError:  # The file is missing or damaged.
        return False
    return True


def _pack(source: Source, path: Path, shards: list[Shard] | None) -> None:
    """Pack a source. Raises UserError for images that need the options of packing."""
    if shards and source.splits:
        raise UserError(
            f"{source.name} holds the splits {' and '.join(source.splits)}: pack one of them, with"
            " --split"
        )
    for remark in source.remarks:
        if remark.startswith("warning: "):
            text = remark.removeprefix("warning: ").replace("packed without", "read without")
            raise UserError(
                f"{text}: to go on, pack the images with duet pack, and train from the packed file"
            )
        say(remark)
    remedy = "pack the images with duet pack --on-error skip, which leaves it out"
    source.shard_states = shards
    pack(source, path, encoding="source", overwrite=True, duplicates=False, remedy=remedy)
    if not shards:
        say(
            f"{source.name}: packed once into {path}; duet pack --size N makes a file that is read"
            " faster"
        )
