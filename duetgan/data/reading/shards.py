"""Several packed files as one data set: the metadata of all."""

import hashlib
from collections.abc import Sequence
from textwrap import shorten

import numpy as np

from duetgan.data.lmdb.format import Meta
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.utils.errors import UserError

# fields of Meta in which the files of a data set must agree
COMMON = ("classes", "sets", "channels", "pixel_format", "resolutions", "size", "encoding")


def combined_meta(shards: Sequence[LMDBReader]) -> Meta:
    """Combine the metadata of shards into that of one data set.

    `mean` and `std` weigh each file by its number of images: they are those of all pixels if the
    images have one size. If files hold generated images, the passport is that of the first one.

    Raises UserError if the shards do not belong together.
    """
    metas = [shard.meta for shard in shards]
    first = metas[0]
    if len(metas) == 1:
        return first
    for shard in shards[1:]:
        for name in COMMON:
            value, expected = getattr(shard.meta, name), getattr(first, name)
            if value != expected:
                raise UserError(
                    f"{shard.path} does not belong to {shards[0].path}: {name}"
                    f" {shorten(str(value), 80)} and {shorten(str(expected), 80)}; pack them alike"
                )
    parts = {meta.split.part for meta in metas if meta.split}
    if len(parts) > 1:
        paths = " + ".join(str(shard.path) for shard in shards)
        raise UserError(
            f"{paths} hold training images and images held out from training: give a pattern that"
            " leaves one kind out"
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
