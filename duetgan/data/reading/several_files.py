"""Several files as one data set: which they are and what they say together. Webdataset's tar files
are read by an index of them, which is a packed file without the images' bytes; a folder or zip of
images by a packed copy.

Making these reads and decodes every image once, as packing does. Afterwards an image's bytes are
read from their place in the tar and compared with the checksum in the index
(docs/data-at-scale.md).
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
from duetgan.utils import bounded
from duetgan.utils.errors import UserError, explained
from duetgan.utils.files import hold
from duetgan.utils.runlog.run_log import say

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
MOST_FILES = 100_000  # that one pattern names


def shard_paths(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that `path` names: one, several, those of a pattern ("train-*.lmdb",
    "train-{000..146}.tar") in order of name, or the tar files of a folder. Raises UserError for
    none, for a folder of tar files of several splits, and for packed files and tar files side by
    side.
    """
    if isinstance(path, (list, tuple)):
        if not path:
            raise UserError("no packed files are given: name at least one")
        files = [file for item in path for file in shard_paths(item)]
    else:
        files = _paths_of(str(path))
    packed = [file for file in files if not is_tar(file)]
    if 0 < len(packed) < len(files):
        raise UserError(
            f"{packed[0]} is no tar file, as others of this data set are: give one kind"
        )
    return files


def _paths_of(text: str) -> list[Path]:
    place = Path(text)
    if place.is_dir() and sharded(place) == SUFFIX:
        groups, _ = shards_by_split(place, SUFFIX)
        if len(groups) > 1:
            splits = sorted(groups, reverse=True)
            raise UserError(
                f"{text} holds shards of {' and '.join(splits)}: give a pattern, {text}/*{splits[0]}*.tar"
            )
        (tars,) = groups.values()
        check_complete(place, tars)
        return tars
    if place.exists():
        return [place]
    files: list[str] = []
    for name in expand_braces(text):
        files += sorted(glob.glob(name)) if any(mark in name for mark in "*?[") else [name]
    if not files:
        raise UserError(f"{text}: no file matches this pattern; check it")
    return list(map(Path, files))


def expand_braces(text: str) -> list[str]:
    """The names that a pattern of braces stands for, as a shell makes them: "{08..10}" 08, 09, 10;
    "{a,b}" a, b.
    Raises UserError for more than MOST_FILES.
    """
    parts: list[Sequence[str]] = []
    # what stands inside braces has the odd places
    for place, part in enumerate(BRACES.split(text)):
        span = RANGE.fullmatch(part)
        if place % 2 and span:
            numbers = range(int(span[1]), min(int(span[2]), int(span[1]) + MOST_FILES) + 1)
            parts.append([f"{number:0{len(span[1])}d}" for number in numbers])
        else:
            parts.append(part.split(",") if place % 2 else [part])
        if math.prod(map(len, parts)) > MOST_FILES:
            raise UserError(f"{text}: the pattern names more than {MOST_FILES:,} files; check it")
    return list(map("".join, itertools.product(*parts)))


def is_tar(path: Path) -> bool:
    """Whether a file is a tar by its name. Raises UserError for one that is compressed."""
    if path.name.lower().endswith(PACKED_TARS):
        raise UserError(
            f"{path} is compressed, so that no image can be found in it: make it a .tar, as gunzip does"
        )
    return path.suffix.lower() == SUFFIX


def open_at_once(path: str | Path | Sequence[str | Path]) -> int:
    """How many files are open while `path` is read."""
    files = shard_paths(path)
    return min(len(files), OPEN) + 1 if is_tar(files[0]) else len(files)


def open_files(
    path: str | Path | Sequence[str | Path], size: tuple[int, int] | None, *, tolerant: bool
) -> list[LMDBReader]:
    """Readers of the files that `path` names, of tar files the one of their index, at the stored
    resolution that serves images of that height and width best: the next larger one; None: the
    largest.
    """
    files = shard_paths(path)
    files = (
        [index_of(files)]
        if is_tar(files[0])
        else [copy_of(file) if is_unpacked(file) else file for file in files]
    )
    readers = [LMDBReader(file, tolerant=tolerant) for file in files]
    if size is not None:
        for reader in readers:
            enough = [
                side for side in reader.meta.resolutions if reader.meta.spec.at(side).holds(size)
            ]
            reader.resolution = min(enough, default=reader.resolution)
    return readers


def combined_meta(shards: Sequence[LMDBReader]) -> Meta:
    """The metadata of shards as one data set. Raises UserError if they do not fit together.

    A file of samples among them makes it a synthetic set: the first passport stands for all. `mean`
    and `std` are those of all pixels where the images have one size, else each file counts by its
    images.
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
                    f"{shard.path} does not belong to {shards[0].path}: {name} {shorten(str(theirs), 80)} and "
                    f"{shorten(str(ours), 80)}; pack them alike"
                )
    metas = [shard.meta for shard in shards]
    parts = {shard.meta.split.part: shard.path for shard in shards if shard.meta.split}
    if len(parts) > 1:
        raise UserError(
            f"{parts['val']} holds images held out from training, {parts['train']} training images: give a pattern "
            "that leaves one kind out"
        )
    counts = np.array([meta.count for meta in metas])
    means, deviations = (
        np.array([getattr(meta, name) for meta in metas]) for name in ("mean", "std")
    )
    share = counts / counts.sum()
    mean = share @ means
    square = share @ (deviations**2 + means**2)

    def joined(name: str) -> str:
        return hashlib.sha256("".join(getattr(meta, name) for meta in metas).encode()).hexdigest()

    together = {
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
    return first.model_copy(update=together)


# --- an index of tar files, a copy of a folder: kept in the user's cache


def is_unpacked(path: Path) -> bool:
    """Whether it is a folder or zip of images."""
    return (path.is_dir() and not (path / "data.mdb").is_file()) or path.suffix.lower() == ".zip"


def index_of(shards: Sequence[Path]) -> Path:
    """The index of tar files, which is made if there is none that fits them. Raises UserError for
    shards that cannot be trained from as they are.
    """
    known = []
    for shard in shards:
        with bounded.reading(shard, "give tar files of images"):
            size, changed = state_of(bounded.check(shard, bounded.ARCHIVE))
        known.append(Shard(path=str(shard.absolute()), size=size, changed=changed))
    path = cache_folder() / "shards" / f"{_digest([shard.path for shard in known])}.lmdb"
    place = shards[0] if len(shards) == 1 else shards[0].parent
    return _kept(path, lambda: TarSource(place, SourceOptions(), shards), known)


def copy_of(place: Path) -> Path:
    """The packed copy of a folder or zip of images, files as they are, made anew where a name, size
    or time in it has changed. Raises UserError for images that only packing, which has options for
    it, can make a data set of.
    """
    with bounded.reading(place, "give a folder, or a zip file, of images"):
        names = walk(place)[0] if place.is_dir() else ["."]
        states = sorted(
            (name, *state_of((place / name).stat(follow_symlinks=(place / name).exists())))
            for name in names
        )
    of_place = _digest(str(place.resolve()))
    path = cache_folder() / "folders" / f"{of_place}-{_digest(states)}.lmdb"
    path = _kept(path, lambda: open_source(str(place)), None)
    for older in path.parent.glob(f"{of_place}-*.lmdb"):
        if older != path:
            older.unlink(missing_ok=True)
    return path


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def _kept(path: Path, source: Callable[[], Source], known: list[Shard] | None) -> Path:
    """The packed file `path` of a source, or the index of the tar files `known`, made unless it is
    there. Processes that want it at the same time wait for the one that makes it.
    """
    if _fits(path, known):
        return path
    with explained(
        OSError,
        lambda why: (
            f"{path.parent}: {why.strerror}; it is kept there: set {CACHE} to another folder"
        ),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("ab")
    with lock:
        hold(lock, wait=True)
        if not _fits(path, known):
            with source() as opened:
                _make(path, opened, known)
    return path


def _fits(path: Path, known: list[Shard] | None) -> bool:
    """Whether there is a packed file, of an index one of shards in this state."""
    try:
        with LMDBReader(path) as reader:
            return reader.meta.shards == known
    except UserError:  # none, or a damaged one
        return False


def _make(path: Path, source: Source, known: list[Shard] | None) -> None:
    """Raises UserError for images that only packing, which has options for it, can make a data set
    of.
    """
    from duetgan.data.packing.pack import pack  # not needed where there is a file

    if known and source.splits:
        raise UserError(
            f"{source.name} holds the splits {' and '.join(source.splits)}: pack one of them, with --split"
        )
    for remark in source.remarks:
        if remark.startswith("warning: "):
            text = remark.removeprefix("warning: ").replace("packed without", "read without")
            raise UserError(
                f"{text}: to go on, pack the images with duet pack, and train from the packed file"
            )
        say(remark)
    remedy = "pack the images with duet pack --on-error skip, which leaves it out"
    source.shard_states = known
    pack(source, path, encoding="source", overwrite=True, duplicates=False, remedy=remedy)
    if not known:
        say(
            f"{source.name}: packed once into {path}; duet pack --size N makes a file that is read faster"
        )
