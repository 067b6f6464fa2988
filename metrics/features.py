"""From images to feature sets: which images are taken, and one pass over them for all extractors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset
from metrics.extractors import Extractor, extract
from metrics.frechet import Moments
from utils.progress import Bar
from utils.seeding import numpy_generator


@dataclass(frozen=True)
class Selection:
    """Which images of a file are looked at. The first `n` make the distances; those after it fill up the classes."""

    indices: np.ndarray  # int64 [m], m >= n
    labels: np.ndarray  # int64 [m]
    n: int
    key: str  # tells this draw from every other one of the same file


@dataclass(frozen=True)
class FeatureSet:
    """Features of one set of images under one extractor."""

    features: Tensor  # float32 [m, F] on the CPU
    moments: Moments  # of the first n
    n: int

    @property
    def counted(self) -> Tensor:
        """The features that distances are computed from, [n, F]."""
        return self.features[: self.n]


def select(labels: np.ndarray, *, n: int, seed: int, role: str, per_class: int = 0) -> Selection:
    """Draw n images without replacement by the key (seed, "eval", role), then add until a class has `per_class`.

    `labels` int64 [count] are those of the whole file. A class with fewer than `per_class` in it comes with all it has.
    """
    order = numpy_generator(seed, "eval", role).permutation(len(labels))
    wanted = np.zeros(len(order), dtype=bool)
    for label in np.unique(labels):
        wanted[np.flatnonzero(labels[order] == label)[:per_class]] = True
    order = np.concatenate([order[:n], order[n:][wanted[n:]]])
    return Selection(order, labels[order], n, f"{role} {seed} {n} {per_class}")


def feature_sets(
    batches: Iterable[Tensor],  # uint8 [b, C, H, W] each
    extractors: Sequence[Extractor],
    *,
    n: int,
    total: int,
    what: str,
    show: bool = False,  # a progress bar
) -> list[FeatureSet]:
    """One pass over the images for all extractors; returns a feature set for each of them."""
    rows: list[list[Tensor]] = [[] for _ in extractors]
    moments = [Moments(extractor.dim) for extractor in extractors]
    done = 0
    with Bar(total=total, desc=what, unit="image", disable=not show) as bar:
        for images in batches:
            for position, extractor in enumerate(extractors):
                features = extract(extractor, images)
                moments[position].update(features[: max(0, n - done)])
                rows[position].append(features)
            done += len(images)
            bar.update(len(images))
    return [FeatureSet(torch.cat(part), moment, n) for part, moment in zip(rows, moments, strict=True)]


@dataclass
class RealFeatures:
    """Features of real images, kept between the evaluations of one training run.

    Keyed by the file's content, the draw, and the extractor's name and weights, so that no stale entry is met.
    """

    batch_size: int = 64
    show: bool = False  # a progress bar
    _sets: dict[tuple[str, ...], FeatureSet] = field(default_factory=dict)

    def get(self, reader: Dataset, selection: Selection, extractors: Sequence[Extractor]) -> list[FeatureSet]:
        """The feature set of `selection` under each extractor; reads images only for those not kept yet."""
        keys = [(reader.meta.content_hash, selection.key, each.name, each.source) for each in extractors]
        missing = {key: each for key, each in zip(keys, extractors, strict=True) if key not in self._sets}
        if missing:
            order, size = selection.indices, self.batch_size
            found = feature_sets(
                (torch.from_numpy(reader.read(order[i : i + size])[0]) for i in range(0, len(order), size)),
                list(missing.values()),
                n=selection.n,
                total=len(selection.indices),
                what=f"real {selection.key.split()[0]} images",
                show=self.show,
            )
            self._sets.update(zip(missing, found, strict=True))
        return [self._sets[key] for key in keys]
