"""Several packed files as one data set: which they are and what they say together."""

import dataclasses
import glob
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.lmdb.format import Meta
from data.lmdb.reader import LMDBReader
from utils.errors import UserError


def shard_paths(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that `path` names: one, several, or those of a pattern in order of name. Raises UserError for none."""
    if isinstance(path, (list, tuple)):
        if not path:
            raise UserError("no packed files are given: name at least one")
        return [file for item in path for file in shard_paths(item)]
    text = str(path)
    if not Path(text).exists() and any(mark in text for mark in "*?["):
        found = sorted(glob.glob(text))
        if not found:
            raise UserError(f"{text}: no file matches this pattern; check it")
        return [Path(item) for item in found]
    return [Path(text)]


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
    return dataclasses.replace(
        first,
        count=sum(meta.count for meta in metas),
        histogram=np.sum([meta.histogram for meta in metas], axis=0).astype(int).tolist(),
        mean=mean.tolist(),
        std=np.sqrt(np.maximum(square - mean**2, 0)).tolist(),
        source=" + ".join(meta.source for meta in metas),
        fingerprint=_joined([meta.fingerprint for meta in metas]) if all(meta.fingerprint for meta in metas) else "",
        content_hash=_joined([meta.content_hash for meta in metas]),
        split=None,
        passport=next((meta.passport for meta in metas if meta.passport), None),
    )


def _joined(hashes: Sequence[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
