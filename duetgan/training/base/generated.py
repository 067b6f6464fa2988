"""Synthetic images that a generator draws during training, new ones in every epoch."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

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
from duetgan.utils.checkpoint.provenance import Provenance
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec

# samples per forward pass; fixed because rounding depends on the batch size
BLOCK = 16


class GeneratedSamples:
    """A data set of `count` synthetic images per epoch, which a GAN's average generator draws.

    `data.reading.mixture` mixes them with real images. Sample i of epoch e depends only on its
    label and the seed key (seed, "synthetic", e, i). If it is drawn again on the same kind of
    device, it has the same bits, because samples [16 k, 16 k + 16) are always drawn in one pass.
    Truncation is off (psi 1). The `generator` computes on its own device.

    Raises UserError if the checkpoint is not a GAN's, or if its number of classes is not that of
    `class_frequencies`.
    """

    workers = 0

    def __init__(
        self,
        run: str,  # run folder or checkpoint file
        count: int,
        # relative frequencies of the classes; None: all equal
        class_frequencies: Sequence[float] | None,
    ) -> None:
        checkpoint = load(resolve(run))
        self.path = str(run)
        self.generator = generator_from(checkpoint)
        self.spec: ImageSpec = self.generator.spec
        classes = self.generator.classes
        self.classes: list[str] = list(checkpoint["classes"]) if classes else []
        if class_frequencies is not None and len(class_frequencies) != classes:
            raise UserError(
                f"{run}: its generator has {classes} classes, the images {len(class_frequencies)}; "
                "use one of these images"
            )
        self._labels = even_labels(class_frequencies or [1.0] * classes, count)
        self._origin = {key: checkpoint.get(key) for key in ("step", "data", "classes")}
        # The last block is cached because the next batch often begins in it.
        self._block = lru_cache(maxsize=1)(self._draw)
        channels, step = self.generator.channels, checkpoint["step"]
        identity = f"{fingerprint(self.generator)} {count}".encode() + self._labels.tobytes()
        histogram = np.bincount(self._labels, minlength=classes).tolist() if classes else []
        self.meta = Meta(
            count=count,
            classes=self.classes,
            **Layout.of(self.spec).document,
            histogram=histogram,
            mean=[0.5] * channels,
            std=[0.5] * channels,
            resize_filter="none",
            source=f"drawn while training from {run}, step {step}",
            fingerprint="",
            content_hash=hashlib.sha256(identity).hexdigest(),
            blocks=[BLOCK],
        )

    def __len__(self) -> int:
        return self.meta.count

    def labels(self) -> np.ndarray:
        return self._labels

    def passport(self, seed: int) -> Provenance:
        """Return the provenance of the samples in a run with the seed `seed`, for checkpoints."""
        return provenance_of(self.generator, self._origin, seed=seed)

    def read(
        self,
        indices: Sequence[int] | np.ndarray,
        out: np.ndarray | None = None,
        keys: SampleKeys | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples with these indices, [n, C, H, W], and their labels, int64 [n].

        The samples have the generator's pixel depth. They are written into `out` if it is given.
        `keys` holds the seed, and the epoch of each sample; without it ValueError is raised.
        """
        if keys is None:
            raise ValueError("fresh samples depend on their epoch: keys are needed")
        numbers = np.asarray(indices, dtype=np.int64)
        images = np.empty((len(numbers), *self.spec.shape), self.spec.depth) if out is None else out
        passes = np.stack([keys.epochs, numbers // BLOCK])
        for epoch, block in np.unique(passes, axis=1).T.tolist():
            rows = np.flatnonzero((passes[0] == epoch) & (passes[1] == block))
            images[rows] = self._block(keys.seed, epoch, block)[numbers[rows] - block * BLOCK]
        return images, self._labels[numbers]

    def _draw(self, seed: int, epoch: int, block: int) -> np.ndarray:
        """Draw the samples of a block, [m, C, H, W] with m up to BLOCK."""
        indices = range(block * BLOCK, min(len(self), (block + 1) * BLOCK))
        labels = None
        if self.classes:
            labels = torch.from_numpy(self._labels[indices.start : indices.stop])
        with full_float32(next(self.generator.parameters()).device):
            stream = ("synthetic", epoch)
            return generate(
                self.generator, labels=labels, indices=indices, seed=seed, stream=stream
            ).numpy()

    def close(self) -> None:
        """Do nothing, because no file is open."""


def even_labels(class_frequencies: Sequence[float], count: int) -> np.ndarray:
    """Return labels, int64 [count], in which classes have the given relative frequencies.

    The labels of each class are spread evenly. Counts are rounded by the largest remainders. K
    equal frequencies give 0, 1, ..., K - 1, 0, 1, ... Without classes all labels are 0.
    """
    if not len(class_frequencies):
        return np.zeros(count, np.int64)
    expected = count * np.array(class_frequencies, np.float64) / np.sum(class_frequencies)
    counts = np.floor(expected).astype(np.int64)
    counts[np.argsort(counts - expected, kind="stable")[: count - counts.sum()]] += 1
    labels = np.repeat(np.arange(len(counts)), counts)
    positions = np.concatenate([(np.arange(n) + 0.5) / max(1, n) for n in counts.tolist()])
    return labels[np.argsort(positions, kind="stable")].astype(np.int64)
