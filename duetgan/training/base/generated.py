"""Synthetic images that are drawn while training: new ones in every epoch, from a generator's
checkpoint.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from duetgan.data.lmdb.format import Meta
from duetgan.data.lmdb.record import Layout
from duetgan.data.reading.sampler import SampleKeys
from duetgan.metrics.features.extractors import fingerprint
from duetgan.metrics.features.precision import full_float32
from duetgan.metrics.lineage import provenance_of
from duetgan.models.gan import generate
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.provenance import Provenance

# samples a forward pass, always the same ones together: rounding depends on a batch's size
BLOCK = 16


class GeneratedSamples:
    """`count` samples an epoch of a run's average generator, as a source of synthetic images
    (data/reading/mixture.py).

    Sample i of epoch e depends on the key (seed, "synthetic", e, i) and its label alone, to the bit
    on one kind of device: the samples [16 k, 16 k + 16) are always made in one pass. Truncation is
    off (psi 1). Labels go round the classes evenly, each as often as `shares` say. The `generator`
    computes where it lies.

    Raises UserError for a checkpoint of another task.
    """

    gathers = True  # nothing is decoded
    workers = 0
    replaced: set[int] = set()

    def __init__(
        self,
        run: str,  # or a checkpoint's file
        count: int,
        shares: Sequence[float] | None = None,  # how often each class is drawn; None: equally often
    ) -> None:
        checkpoint = load(resolve(run))
        self.path = str(run)
        self.generator: Any = generator_from(checkpoint)
        self.spec: ImageSpec = self.generator.spec
        kinds = self.generator.classes
        # their names by label
        self.classes: list[str] = list(checkpoint["classes"]) if kinds else []
        if shares is not None and len(shares) != kinds:
            raise UserError(
                f"{run}: its generator has {kinds} classes, the images {len(shares)}; use one of these images"
            )
        self._labels = even_labels(shares or [1.0] * kinds, count)
        self._about = {key: checkpoint.get(key) for key in ("step", "data", "classes")}
        # of the last one: the next batch begins in it
        self._block = lru_cache(maxsize=1)(self._draw)
        channels, step = self.generator.channels, checkpoint["step"]
        known = f"{fingerprint(self.generator)} {count}".encode() + self._labels.tobytes()
        self.meta = Meta(
            count=count,
            classes=self.classes,
            **Layout.of(self.spec).document,
            histogram=np.bincount(self._labels, minlength=kinds).tolist() if kinds else [],
            mean=[0.5] * channels,
            std=[0.5] * channels,
            resize_filter="none",
            source=f"drawn while training from {run}, step {step}",
            fingerprint="",
            content_hash=hashlib.sha256(known).hexdigest(),
            blocks=[BLOCK],
        )

    def __len__(self) -> int:
        return self.meta.count

    def labels(self) -> np.ndarray:
        return self._labels

    def passport(self, seed: int) -> Provenance:
        """What a checkpoint records of them where the run has this seed."""
        return provenance_of(self.generator, self._about, seed=seed)

    def read(
        self,
        indices: Sequence[int] | np.ndarray,
        out: np.ndarray | None = None,
        keys: SampleKeys | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Samples uint8 [n, C, H, W] and labels int64 [n]; `keys` say their epochs. Raises
        ValueError without keys.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if keys is None:
            raise ValueError("fresh samples depend on their epoch: keys are needed")
        images = np.empty((len(wanted), *self.spec.shape), self.spec.depth) if out is None else out
        numbers = np.stack([keys.epochs, wanted // BLOCK])
        for epoch, block in np.unique(numbers, axis=1).T.tolist():
            places = np.flatnonzero((numbers[0] == epoch) & (numbers[1] == block))
            images[places] = self._block(keys.seed, epoch, block)[wanted[places] - block * BLOCK]
        return images, self._labels[wanted]

    def _draw(self, seed: int, epoch: int, block: int) -> np.ndarray:
        """The samples of a block, uint8 [m, C, H, W]."""
        indices = range(block * BLOCK, min(len(self), (block + 1) * BLOCK))
        labels = (
            torch.from_numpy(self._labels[indices.start : indices.stop]) if self.classes else None
        )
        with full_float32(next(self.generator.parameters()).device):
            stream = ("synthetic", epoch)
            return generate(
                self.generator, labels=labels, indices=indices, seed=seed, stream=stream
            ).numpy()

    def close(self) -> None:
        """Nothing is open."""


def even_labels(shares: Sequence[float], count: int) -> np.ndarray:
    """Labels int64 [count], class c count * shares[c] / sum(shares) times (the largest remainders
    are rounded up), each class spread evenly: equal shares give 0, 1, ..., K - 1, 0, 1, ... Without
    classes all are 0.
    """
    if not len(shares):
        return np.zeros(count, np.int64)
    expected = count * np.array(shares, np.float64) / np.sum(shares)
    counts = np.floor(expected).astype(np.int64)
    counts[np.argsort(counts - expected, kind="stable")[: count - counts.sum()]] += 1
    labels = np.repeat(np.arange(len(counts)), counts)
    places = np.concatenate([(np.arange(n) + 0.5) / max(1, n) for n in counts.tolist()])
    return labels[np.argsort(places, kind="stable")].astype(np.int64)
