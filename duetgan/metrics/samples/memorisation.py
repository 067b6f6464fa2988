"""Test if a generator copies training images, by nearest neighbours in a feature space.

There are two tests, because a single one can mislead:

- Are samples nearer to training images than held-out images are? (`fraction_below`; as in Meehan,
  Chaudhuri and Dasgupta 2020, 2004.05675.) Copies are, but so are bland or collapsed samples: the
  mean of all images is nearer to each image than images are to one another.
- For samples that are unusually near to a real image, is that image more often a training image
  than a held-out one? (`training_bound`.) Without memorisation it is a training image as often as
  the numbers of training and held-out images suggest, whatever the samples look like. This test
  decides the verdict.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, SupportsFloat, SupportsInt

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import Extractor, pixel_features
from duetgan.metrics.features.selection import Selection, draw_samples, select
from duetgan.metrics.protocol import Document
from duetgan.metrics.samples.neighbours import QUERY_BLOCK, neighbours
from duetgan.models.gan import ImageGenerator
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.images import visible

PAIRS = 12  # length of the lists of the closest and of the first samples
TAIL = 0.01  # fraction of the held-out images that counts as unusually near to training images
LEVEL = 0.001  # significance level: one false alarm in a thousand evaluations


@dataclass(frozen=True)
class Nearest:
    """The nearest reference image of each query image, and the distance to it."""

    distances: Tensor  # float64 [n], Euclidean
    indices: Tensor  # int64 [n], rows of the references


@dataclass(frozen=True)
class RealSet:
    """Features and labels of real images."""

    features: Tensor  # [m, F]
    labels: Tensor  # int64 [m]; all 0 if classes are ignored


def nearest(queries: Tensor, references: Tensor) -> Nearest:
    """Find the nearest of the references [m, F] for each of the queries [n, F].

    Of equally near references, the first is returned. If queries and references are the same
    tensor, an image is not compared with itself. Distances are computed from differences, so that
    the distance of a copy is 0 and not a rounding error.
    """
    is_same = queries is references
    references = references.detach().cpu()
    queries = references if is_same else queries.detach().cpu()
    indices = neighbours(queries, references, 1)[1][:, 0]
    pieces = zip(queries.split(QUERY_BLOCK), indices.split(QUERY_BLOCK), strict=True)
    distances = [(part.double() - references[rows].double()).norm(dim=1) for part, rows in pieces]
    return Nearest(torch.cat(distances), indices)


def fraction_below(
    samples: Tensor, held_out: Tensor, *, tail: float = TAIL
) -> tuple[float, float, float]:
    """Return the fraction of samples that are unusually near to a training image.

    The distance of such a sample to its nearest training image is below a bound. The bound is the
    `tail` quantile of the held-out images' distances.

    Args:
        samples: Distance of each sample to the nearest training image, [n].
        held_out: Distance of each held-out image to the nearest training image, [m].
        tail: Fraction of the held-out images that lies below the bound.

    Returns:
        The fraction of samples below the bound; the fraction that is expected if both sets have the
        same distribution, k / (m + 1) if the bound is the k-th smallest of the m held-out images'
        distances; and the bound.
    """
    k = max(1, int(tail * len(held_out)))
    bound = held_out.sort().values[k - 1]
    return float((samples < bound).double().mean()), k / (len(held_out) + 1), float(bound)


def chance_bound(counts: np.ndarray, probabilities: np.ndarray, observed: int) -> float:
    """Return P(sum of counts_i * B_i >= observed) for independent B_i ~ Bernoulli(probabilities_i).

    The result is exact, by the Fourier transform. Samples with the same nearest image count as one
    draw B_i, so that a collapsed generator is no evidence of copying.

    Args:
        counts: Number of samples whose nearest image is the i-th real image, int64 [k].
        probabilities: Probability that the i-th real image is a training image, [k].
        observed: Number of samples whose nearest image is a training image.
    """
    size = int(counts.sum()) + 1
    angles = 2 * np.pi * np.arange(size) / size
    transform = np.ones(size, dtype=np.complex128)
    pairs, repeats = np.unique(
        np.stack([counts, probabilities], axis=1), axis=0, return_counts=True
    )
    for (count, p), times in zip(pairs, repeats, strict=True):
        transform *= (1 - p + p * np.exp(1j * angles * count)) ** times
    return float(np.clip((np.fft.fft(transform).real / size)[observed:].sum(), 0.0, 1.0))


def training_bound(
    to_train: Nearest,  # nearest training image of each sample
    to_held_out: Nearest,  # nearest held-out image of each sample
    train: RealSet,
    held_out: RealSet,
    *,
    bound: float,  # only samples that are nearer than this to a real image count
) -> tuple[int, int, float]:
    """Test if the images nearest to samples are training images more often than by chance.

    The null hypothesis is that chance has divided the real images of each class into training and
    held-out images.

    Returns:
        The number of samples below the bound; the number of these samples that are nearer to a
        training image than to any held-out image; and the p-value.
    """
    nearer = to_train.distances < to_held_out.distances
    near = torch.minimum(to_train.distances, to_held_out.distances) < bound
    held_out_rows = to_held_out.indices + len(train.labels)
    images, counts = torch.where(nearer, to_train.indices, held_out_rows)[near].unique(
        return_counts=True
    )
    labels = torch.cat([train.labels, held_out.labels])
    classes = int(labels.max()) + 1
    train_counts = torch.bincount(train.labels, minlength=classes).double()
    fractions = train_counts / torch.bincount(labels, minlength=classes).clamp(min=1)
    observed = int((nearer & near).sum())
    p = chance_bound(counts.numpy(), fractions[labels[images]].numpy(), observed)
    return int(near.sum()), observed, p


def memorisation(samples: Tensor, train: RealSet, held_out: RealSet) -> tuple[Document, Nearest]:
    """Test if a generator copies training images, by the features of its samples, [n, F].

    Returns:
        The results, ready for JSON, and the nearest training image of each sample. The results are
        `n`; `searched`, the number of training images; `share` and `expected` of `fraction_below`;
        `near`, `near_train` and `p_value` of `training_bound`; the verdict `copies`; and
        `usual_distance`, the median distance of held-out images to their nearest training image.
    """
    to_train = nearest(samples, train.features)
    to_held_out = nearest(samples, held_out.features)
    reference = nearest(held_out.features, train.features)
    fraction, expected, bound = fraction_below(to_train.distances, reference.distances)
    near, near_train, p = training_bound(to_train, to_held_out, train, held_out, bound=bound)
    figures = {
        "n": len(samples),
        "searched": len(train.labels),
        "share": fraction,
        "expected": expected,
        "near": near,
        "near_train": near_train,
        "p_value": p,
        "copies": p < LEVEL,
        "usual_distance": float(reference.distances.median()),
    }
    return figures, to_train


def search_extractor(extractors: Sequence[Extractor], spec: ImageSpec) -> Extractor:
    """Return the extractor for the search for copies: the first that is no classifier, or `pixels`.

    A classifier is not used, because its features place samples too near to the images that it was
    trained on.
    """
    for extractor in extractors:
        if not extractor.name.startswith("classifier:"):
            return extractor
    return pixel_features(spec)


def training_selection(labels: np.ndarray, *, n: int, searched: int, seed: int) -> Selection:
    """Draw `searched` training images, but at least n, because the floor needs n.

    If the dataset has fewer than `searched`, all its images are drawn. The first n do not depend on
    `searched`.
    """
    count = max(n, min(searched, len(labels)))
    return replace(
        select(labels, n=count, seed=seed, role="train"), key=f"train {seed} {n} of {count}"
    )


class RealImages(NamedTuple):
    """Selected images of a dataset with their features."""

    dataset: Dataset
    selection: Selection
    features: Tensor  # [m, F]


def search_copies(
    extractor: Extractor,
    samples: Tensor,  # features, [n, F]; sample i has the label of held-out image i
    held_out: RealImages,  # n images or more
    train: RealImages,
) -> Document:
    """Search the samples for copies of training images.

    Returns:
        `extractor` and `weights`; the results of `memorisation`; and two lists that `pairs` makes:
        `closest`, the samples nearest to a training image, by rising distance, and `first`, the
        first samples. Each list has at most PAIRS entries.
    """
    n = len(samples)
    names = train.dataset.meta.label_names
    by_class = bool(names) and held_out.dataset.meta.label_names == names
    real_sets = []
    for (dataset, selection, features), count in ((train, len(train.features)), (held_out, n)):
        labels = np.zeros(count, np.int64)
        if by_class:
            labels = dataset.label_numbers()[selection.indices[:count]].astype(np.int64)
        real_sets.append(RealSet(features[:count], torch.from_numpy(labels)))
    results, near = memorisation(samples, *real_sets)
    records = train.selection.indices[near.indices.numpy()]
    rows = pairs(range(n), held_out.selection.labels[:n], records, near.distances)
    return {
        "extractor": extractor.name,
        "weights": extractor.source,
        **results,
        "closest": sorted(rows, key=lambda row: row["distance"])[:PAIRS],
        "first": rows[:PAIRS],
    }


def pairs(
    samples: Iterable[SupportsInt],
    labels: Iterable[SupportsInt],
    records: Iterable[SupportsInt],
    distances: Iterable[SupportsFloat],
) -> list[Document]:
    """Return a dict for each sample, ready for JSON, about its nearest training image.

    The dict has the entries `sample`, the number of the sample; `label`; `train`, the record number
    of the image; and `distance`.
    """
    return [
        {
            "sample": int(sample),
            "label": int(label),
            "train": int(record),
            "distance": float(distance),
        }
        for sample, label, record, distance in zip(samples, labels, records, distances, strict=True)
    ]


def neighbour_images(
    generator: ImageGenerator,
    train: Dataset,
    copies: Document,
    *,
    seed: int,
    conditions: Callable[[list[int]], np.ndarray] = np.array,
) -> tuple[list[Tensor], list[str]]:
    """Return pictures of the samples that `search_copies` lists, and their captions.

    The samples are generated again. A picture, uint8 [C, H, 2 W + gap], has a sample on the left
    and its nearest training image on the right.

    Args:
        copies: The result of `search_copies`.
        conditions: Function that converts labels to the generator's format.
    """
    rows = [*copies["closest"], *copies["first"]]
    labels = None
    if generator.classes:
        labels = torch.from_numpy(conditions([row["label"] for row in rows]))
    samples = draw_samples(generator, labels, [row["sample"] for row in rows], seed=seed)
    real = torch.from_numpy(train.read([row["train"] for row in rows])[0])
    samples, real = visible(samples, train.spec), visible(real, train.spec)
    gap = torch.full_like(samples[..., : max(1, samples.shape[-1] // 16)], 255)
    usual = copies["usual_distance"]
    captions = []
    for row in rows:
        distance = f"distance {row['distance']:.3g}"
        if usual:
            distance = f"{row['distance'] / usual:.2f} of the usual distance"
        captions.append(f"sample {row['sample']} | record {row['train']}\n{distance}")
    return list(torch.cat([samples, gap, real], dim=-1)), captions
