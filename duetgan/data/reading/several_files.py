"""Several files as one data set: find the files, and combine their metadata.

Tar files (webdataset) are read through an index, a packed file without the images' bytes. A folder
or zip of images is read from a packed copy. Every image is read and decoded once to make the index
or the copy. Afterwards an image in a tar is read from its position and compared with the checksum
in the index (docs/data-at-scale.md).
"""

import glob
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np

from duetgan.data.lmdb.format import Meta, Shard
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.sources import PACKED_TARS, open_source
from duetgan.data.sources.base import (
    Source,
    SourceOptions,
    check_complete,
    sharded,
    shards_by_split,
)
from duetgan.data.sources.files import walk
from duetgan.data.sources.named import CACHE, cache_folder
from duetgan.data.sources.tars import SUFFIX, TarSource
from duetgan.data.tar_files import OPEN, state_of
from duetgan.utils import files
from duetgan.utils.errors import UserError, explained
from duetgan.utils.files import hold
from duetgan.utils.runlog.run_log import say

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
MOST_FILES = 100_000  # of one pattern, at most


def shard_paths(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that `path` names.

    `path` is one file or several, a pattern ("train-*.lmdb", "train-{000..146}.tar"), whose files
    are sorted by name, or a folder of tar files.

    Raises UserError if there are none, for a folder of tar files of several splits, and for packed
    files together with tar files.
    """
    files: list[Path] = []
    if isinstance(path, (list, tuple)):
        if not path:
            raise UserError("no packed files are given: name at least one")
        for item in path:
            files += shard_paths(item)
    else:
        files = _paths_of(str(path))
    packed = [file for file in files if not is_tar(file)]
    if 0 < len(packed) < len(files):
        raise UserError(
            f"{packed[0]} is no tar file, as others of this data set are: give one kind"
        )
    return files


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
    files: list[str] = []
    for name in expand_braces(text):
        if set(name).isdisjoint("*?["):
            files.append(name)
        else:
            files += sorted(glob.glob(name))
    if not files:
        raise UserError(f"{text}: no file matches this pattern; check it")
    return list(map(Path, files))


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


def open_at_once(path: str | Path | Sequence[str | Path]) -> int:
    """Return the number of files that are open while `path` is read."""
    files = shard_paths(path)
    return min(len(files), OPEN) + 1 if is_tar(files[0]) else len(files)


def open_files(
    path: str | Path | Sequence[str | Path], size: tuple[int, int] | None, *, tolerant: bool
) -> list[LMDBReader]:
    """Open the files that `path` names; tar files have one reader, that of their index.

    Args:
        path: see `shard_paths`.
        size: height and width in px. The readers use the smallest stored resolution that is at
            least as large, else the largest one. None: the largest.
        tolerant: read the intact images of a damaged block (LMDBReader).
    """
    files = shard_paths(path)
    if is_tar(files[0]):
        files = [index_of(files)]
    readers = []
    for file in files:
        packed = copy_of(file) if is_unpacked(file) else file
        readers.append(LMDBReader(packed, tolerant=tolerant))
    if size is not None:
        for reader in readers:
            meta = reader.meta
            sufficient = [side for side in meta.resolutions if meta.spec.at(side).holds(size)]
            reader.resolution = min(sufficient, default=reader.resolution)
    return readers


def combined_meta(shards: Sequence[LMDBReader]) -> Meta:
    """Combine the metadata of shards into that of one data set.

    `mean` and `std` weigh each file by its number of images: they are those of all pixels if the
    images have one size. If files hold generated images, the passport is that of the first one.

    Raises UserError if the shards do not belong together.
    """
    first = shards[0].meta
    if len(shards) == 1:
        return first
    for shard in shards[1:]:
        for name in (
            "classes",
            "sets",
            "channels",
            "pixel_format",
            "resolutions",
            "size",
            "encoding",
        ):
            ours, theirs = getattr(first, name), getattr(shard.meta, name)
            if ours != theirs:
                raise UserError(
                    f"{shard.path} does not belong to {shards[0].path}: {name}"
                    f" {shorten(str(theirs), 80)} and "
                    f"{shorten(str(ours), 80)}; pack them alike"
                )
    metas = [shard.meta for shard in shards]
    parts = {shard.meta.split.part: shard.path for shard in shards if shard.meta.split}
    if len(parts) > 1:
        raise UserError(
            f"{parts['val']} holds images held out from training, {parts['train']} training images:"
            " give a pattern "
            "that leaves one kind out"
        )
    counts = np.array([meta.count for meta in metas])
    means = np.array([meta.mean for meta in metas])
    deviations = np.array([meta.std for meta in metas])
    weights = counts / counts.sum()
    mean = weights @ means
    square = weights @ (deviations**2 + means**2)

    def joined(name: str) -> str:
        return hashlib.sha256("".join(getattr(meta, name) for meta in metas).encode()).hexdigest()

    combined = {
        "count": int(counts.sum()),
        "histogram": np.sum([meta.histogram for meta in metas], axis=0).astype(int).tolist(),
        "mean": mean.tolist(),
        "std": np.sqrt(np.maximum(square - mean**2, 0)).tolist(),
        "source": " + ".join(meta.source for meta in metas),
        "fingerprint": joined("fingerprint") if all(meta.fingerprint for meta in metas) else "",
        "content_hash": joined("content_hash"),
        "split": None,
        "passport": next((meta.passport for meta in metas if meta.passport), None),
    }
    return first.model_copy(update=combined)


# --- the index of tar files and the copy of a folder, in the user's cache


def is_unpacked(path: Path) -> bool:
    """Return True for a folder or zip of images."""
    return (path.is_dir() and not (path / "data.mdb").is_file()) or path.suffix.lower() == ".zip"


def index_of(shards: Sequence[Path]) -> Path:
    """Return the path of the index of tar files. The index is made if it is missing or outdated.

    Raises UserError for tar files that training cannot read unless they are packed.
    """
    states = []
    for shard in shards:
        with files.reading(shard, "give tar files of images"):
            size, changed = state_of(files.check(shard, files.ARCHIVE))
        states.append(Shard(path=str(shard.absolute()), size=size, changed=changed))
    path = cache_folder() / "shards" / f"{_digest([shard.path for shard in states])}.lmdb"
    location = shards[0] if len(shards) == 1 else shards[0].parent
    return _cached(path, lambda: TarSource(location, SourceOptions(), shards), states)


def copy_of(folder: Path) -> Path:
    """Return the path of the packed copy of a folder or zip of images.

    The image files are copied unchanged. The copy is made again if the name, size or time of a file
    has changed. Raises UserError for images that need the options of packing.
    """
    with files.reading(folder, "give a folder, or a zip file, of images"):
        names = walk(folder)[0] if folder.is_dir() else ["."]
        states = []
        for name in sorted(names):
            file = folder / name
            states.append((name, *state_of(file.stat(follow_symlinks=file.exists()))))
    key = _digest(str(folder.resolve()))
    path = cache_folder() / "folders" / f"{key}-{_digest(states)}.lmdb"
    path = _cached(path, lambda: open_source(str(folder)), None)
    for older in path.parent.glob(f"{key}-*.lmdb"):
        if older != path:
            older.unlink(missing_ok=True)
    return path


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def _cached(path: Path, source: Callable[[], Source], shards: list[Shard] | None) -> Path:
    """Write the packed file `path`, or the index of the tar files `shards`, unless `path` is
    current.

    Processes that need the file at the same time wait for the one that makes it. Returns `path`.
    """
    if _is_current(path, shards):
        return path
    with explained(
        OSError,
        lambda error: (
            f"{path.parent}: {error.strerror}; it is kept there: set {CACHE} to another folder"
        ),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("ab")
    with lock:
        hold(lock, wait=True)
        if not _is_current(path, shards):
            with source() as opened:
                _make(path, opened, shards)
    return path


def _is_current(path: Path, shards: list[Shard] | None) -> bool:
    """Return True if the packed file exists and is up to date: if it was made of tar files, these
    are unchanged since (`shards`).
    """
    try:
        with LMDBReader(path) as reader:
            return reader.meta.shards == shards
    except UserError:  # The file is missing or damaged.
        return False


def _make(path: Path, source: Source, shards: list[Shard] | None) -> None:
    """Pack a source. Raises UserError for images that need the options of packing."""
    from duetgan.data.packing.pack import pack  # slow to import, and rarely needed

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
