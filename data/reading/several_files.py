"""Several files as one data set: which they are and what they say together."""

import glob
import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.lmdb.format import Meta
from data.lmdb.reader import LMDBReader
from data.reading.tar_index import index_of
from data.sources import PACKED_TARS
from data.sources.splits import check_complete, sharded, shards_of, split_of
from data.sources.tars import SUFFIX
from data.tar_files import OPEN
from utils.errors import UserError

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
MOST_FILES = 100_000  # that one pattern names


def shard_paths(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that `path` names: one, several, those of a pattern ("train-*.lmdb", "train-{000..146}.tar") in order
    of name, or the tar files of a folder. Raises UserError for none, for a folder of tar files of several splits, and
    for packed files and tar files side by side.
    """
    if isinstance(path, (list, tuple)):
        if not path:
            raise UserError("no packed files are given: name at least one")
        files = [file for item in path for file in shard_paths(item)]
    else:
        files = _paths_of(str(path))
    packed = [file for file in files if not is_tar(file)]
    if 0 < len(packed) < len(files):
        raise UserError(f"{packed[0]} is no tar file, as others of this data set are: give one kind")
    return files


def _paths_of(text: str) -> list[Path]:
    place = Path(text)
    if place.is_dir() and sharded(place) == SUFFIX:
        tars, _ = shards_of(place, SUFFIX)
        splits = sorted({split_of(tar) for tar in tars}, reverse=True)
        if len(splits) > 1:
            told = " and ".join(split or "no split" for split in splits)
            raise UserError(f"{text} holds shards of {told}: give a pattern, {text}/*{splits[0]}*.tar")
        check_complete(place, tars)
        return tars
    if place.exists():
        return [place]
    found: list[str] = []
    for name in expand_braces(text):
        found += sorted(glob.glob(name)) if any(mark in name for mark in "*?[") else [name]
    if not found:
        raise UserError(f"{text}: no file matches this pattern; check it")
    return list(map(Path, found))


def expand_braces(text: str) -> list[str]:
    """The names that a pattern of braces stands for, as a shell makes them: "{08..10}" 08, 09, 10; "{a,b}" a, b.
    Raises UserError for more than MOST_FILES.
    """
    parts: list[Sequence[str]] = []
    for place, part in enumerate(BRACES.split(text)):  # what stands inside braces has the odd places
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
        raise UserError(f"{path} is compressed, so that no image can be found in it: make it a .tar, as gunzip does")
    return path.suffix.lower() == SUFFIX


def open_at_once(path: str | Path | Sequence[str | Path]) -> int:
    """How many files are open while `path` is read."""
    files = shard_paths(path)
    return min(len(files), OPEN) + 1 if is_tar(files[0]) else len(files)


def open_files(path: str | Path | Sequence[str | Path], resolution: int | None, *, tolerant: bool) -> list[LMDBReader]:
    """Readers of the files that `path` names, see `open_level`; of tar files the one of their index."""
    files = shard_paths(path)
    if is_tar(files[0]):
        files = [index_of(files)]
    return [open_level(file, resolution, tolerant=tolerant) for file in files]


def open_level(path: Path, resolution: int | None, *, tolerant: bool) -> LMDBReader:
    """The file at the stored resolution that serves `resolution` px best: the next larger one; None: the largest."""
    reader = LMDBReader(path, tolerant=tolerant)
    if resolution is not None:
        enough = [side for side in reader.meta.resolutions if side >= resolution]
        reader.resolution = min(enough, default=reader.resolution)
    return reader


def combined_meta(shards: Sequence[LMDBReader]) -> Meta:
    """The metadata of shards as one data set. Raises UserError if they do not fit together.

    A file of samples among them makes it a synthetic set: the first passport stands for all. `mean` and `std` are
    those of all pixels where the images have one size, else each file counts by its images.
    """
    first = shards[0].meta
    if len(shards) == 1:
        return first
    for shard in shards[1:]:
        for name in ("classes", "channels", "resolutions", "encoding"):
            ours, theirs = getattr(first, name), getattr(shard.meta, name)
            if ours != theirs:
                raise UserError(
                    f"{shard.path} does not belong to {shards[0].path}: {name} {theirs} and {ours}; pack them alike"
                )
    metas = [shard.meta for shard in shards]
    share = np.array([meta.count for meta in metas]) / sum(meta.count for meta in metas)
    mean = share @ np.array([meta.mean for meta in metas])
    square = share @ (np.array([meta.std for meta in metas]) ** 2 + np.array([meta.mean for meta in metas]) ** 2)
    together = {
        "count": sum(meta.count for meta in metas),
        "histogram": np.sum([meta.histogram for meta in metas], axis=0).astype(int).tolist(),
        "mean": mean.tolist(),
        "std": np.sqrt(np.maximum(square - mean**2, 0)).tolist(),
        "source": " + ".join(meta.source for meta in metas),
        "fingerprint": _joined([meta.fingerprint for meta in metas]) if all(meta.fingerprint for meta in metas) else "",
        "content_hash": _joined([meta.content_hash for meta in metas]),
        "split": None,
        "passport": next((meta.passport for meta in metas if meta.passport), None),
    }
    return first.model_copy(update=together)


def _joined(hashes: Sequence[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
