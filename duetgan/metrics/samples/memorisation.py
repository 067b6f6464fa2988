"""Does the generator copy its training images? Nearest neighbours in a feature space, tests of what
they say, and the search for copies as a part of an evaluation.

Two questions, because each can be answered wrongly alone:

- Are samples nearer to training images than held-out images are? (`share_below`, `data_copying`;
  the three-sample test of Meehan, Chaudhuri and Dasgupta 2020, 2004.05675.) Copies are, but so are
  bland or collapsed samples: the mean of all images is nearer to each of them than they are to one
  another.
- Are the images that such samples are nearest to training images more often than held-out ones?
  (`chance_bound`.) To a generator that keeps nothing of single images the two are alike: which is
  nearest is then a matter of how many there are of each, whatever the samples look like. This is
  the test whose verdict counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import Extractor, pixel_features
from duetgan.metrics.features.precision import device_of, full_float32
from duetgan.metrics.features.selection import Selection, select
from duetgan.metrics.samples.neighbours import QUERY_BLOCK, neighbours
from duetgan.models.gan import ImageGenerator, generate
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.images import visible

# samples listed with their nearest training image: the closest of all, and the first ones
PAIRS = 12
TAIL = 0.01  # share of the held-out images that counts as unusually near to the training images
# of significance: a generator that copies nothing is accused once in a thousand evaluations
LEVEL = 0.001
LEAST_IN_CELL = 20  # samples and held-out images of a cell that C_T takes account of


@dataclass(frozen=True)
class Nearest:
    """The nearest reference of each query."""

    distances: Tensor  # float64 [n], Euclidean
    indices: Tensor  # int64 [n], rows of the references


@dataclass(frozen=True)
class RealSet:
    """Features of real images, and what tells their kind."""

    features: Tensor  # [m, F]
    labels: Tensor  # int64 [m]; all 0 where there are no classes


def nearest(queries: Tensor, references: Tensor) -> Nearest:
    """Nearest of the references [m, F] for each of the queries [n, F], exactly; the first of
    equally near ones.

    The distances of the pairs found are taken from the differences themselves: that of a copy is 0,
    not a rounding error. Raises ValueError for no reference, or other dimensions.
    """
    if (
        queries.ndim != 2
        or references.ndim != 2
        or queries.shape[1] != references.shape[1]
        or len(references) == 0
    ):
        raise ValueError(
            f"no nearest neighbours of {list(queries.shape)} among {list(references.shape)}"
        )
    queries, references = queries.detach().cpu(), references.detach().cpu()
    indices = neighbours(queries, references, 1)[1][:, 0]
    pieces = zip(queries.split(QUERY_BLOCK), indices.split(QUERY_BLOCK), strict=True)
    distances = [
        (part.double() - references[places].double()).norm(dim=1) for part, places in pieces
    ]
    return Nearest(torch.cat(distances), indices)


def share_below(
    samples: Tensor, held_out: Tensor, *, tail: float = TAIL
) -> tuple[float, float, float]:
    """Share of samples nearer to a training image than the nearest `tail` of the held-out images.

    Args: distances [n] and [m] to the nearest training image. Returns the share, the share that is
    expected where both are of one distribution (k / (m + 1) for the k-th least of m), and the
    distance that was the bound.
    """
    k = max(1, int(tail * len(held_out)))
    bound = held_out.sort().values[k - 1]
    return float((samples < bound).double().mean()), k / (len(held_out) + 1), float(bound)


def mann_whitney(samples: Tensor, held_out: Tensor) -> float:
    """Z_U of Meehan et al. (section 3): (U - n m / 2) / sqrt(n m (n + m + 1) / 12), U counting the
    pairs in which the sample is the farther one; equally far counts half. About N(0, 1) for equal
    distributions, below 0 for copies.
    """
    from scipy.stats import mannwhitneyu  # here: its import takes a second of every start

    n, m = len(samples), len(held_out)
    u = mannwhitneyu(samples.numpy(), held_out.numpy(), method="asymptotic").statistic
    return float((u - n * m / 2) / np.sqrt(n * m * (n + m + 1) / 12))


def data_copying(
    samples: Tensor,  # distances [n] to the nearest training image
    held_out: Tensor,  # distances [m]
    sample_cells: Tensor,  # int64 [n]
    held_out_cells: Tensor,  # int64 [m]
) -> float | None:
    """C_T of Meehan et al.: the mean of Z_U over cells of the space, weighted by the held-out
    images in each.

    Far below 0 (-3 and less): samples hug the training images; above: they keep farther away than
    held-out images do. Cells with fewer than LEAST_IN_CELL samples or held-out images are left out;
    None where that leaves none.
    """
    total, weights = 0.0, 0
    for cell in held_out_cells.unique():
        near, far = samples[sample_cells == cell], held_out[held_out_cells == cell]
        if min(len(near), len(far)) >= LEAST_IN_CELL:
            total += len(far) * mann_whitney(near, far)
            weights += len(far)
    return total / weights if weights else None


def chance_bound(counts: np.ndarray, shares: np.ndarray, observed: int) -> float:
    """P(sum of counts_i * B_i >= observed) for independent B_i ~ Bernoulli(shares_i): exact, by its
    Fourier transform.

    `counts` int64 [k] samples have the i-th real image as their nearest one; `shares` [k] of such
    images are training images. Samples that share their nearest image are one draw, so a collapsed
    generator is no proof.
    """
    size = int(counts.sum()) + 1
    angles = 2 * np.pi * np.arange(size) / size
    transform = np.ones(size, dtype=np.complex128)
    kinds, repeats = np.unique(np.stack([counts, shares], axis=1), axis=0, return_counts=True)
    for (count, share), times in zip(kinds, repeats, strict=True):
        transform *= (1 - share + share * np.exp(1j * angles * count)) ** times
    return float(np.clip((np.fft.fft(transform).real / size)[observed:].sum(), 0.0, 1.0))


def training_bound(
    samples: Nearest,  # among the training images
    other: Nearest,  # the same samples' nearest held-out images
    train: RealSet,
    held_out: RealSet,
    *,
    bound: float,  # only samples nearer than this to a real image are looked at
) -> tuple[int, int, float]:
    """Do unusually near samples keep to training images? Null: which real images were trained on is
    a matter of chance, class by class.

    Returns how many such samples there are, how many of them are nearer to a training image than to
    any held-out one (equally near is not), and the probability of as many by chance.
    """
    nearer = samples.distances < other.distances
    near = torch.minimum(samples.distances, other.distances) < bound
    names = torch.where(nearer, samples.indices, other.indices + len(train.labels))[near]
    images, counts = names.unique(return_counts=True)
    labels = torch.cat([train.labels, held_out.labels])
    classes = int(labels.max()) + 1
    of_train = torch.bincount(train.labels, minlength=classes).double()
    shares = of_train / torch.bincount(labels, minlength=classes).clamp(min=1)
    observed = int((nearer & near).sum())
    return (
        int(near.sum()),
        observed,
        chance_bound(counts.numpy(), shares[labels[images]].numpy(), observed),
    )


def memorisation(
    samples: Tensor, train: RealSet, held_out: RealSet
) -> tuple[dict[str, Any], Nearest]:
    """What the neighbours of samples [n, F] say, ready for JSON, and the nearest training image of
    each sample.

    Returns `n`, `searched` (training images), `share` and `expected` of `share_below`, `c_t`,
    `near` (samples nearer than that bound to any real image), `near_train` (those of them nearest
    to a training image), `p_value` of so many, the verdict `copies`, and `usual_distance` (median
    of held-out images to their nearest training image). The cells of C_T are the classes of the
    nearest training images, a partition of the space as the paper's k-means cells are.
    """
    to_train, other = nearest(samples, train.features), nearest(samples, held_out.features)
    reference = nearest(held_out.features, train.features)
    share, expected, bound = share_below(to_train.distances, reference.distances)
    cells = train.labels[to_train.indices], train.labels[reference.indices]
    near, near_train, chance = training_bound(to_train, other, train, held_out, bound=bound)
    figures = {
        "n": len(samples),
        "searched": len(train.labels),
        "share": share,
        "expected": expected,
        "c_t": data_copying(to_train.distances, reference.distances, *cells),
        "near": near,
        "near_train": near_train,
        "p_value": chance,
        "copies": chance < LEVEL,
        "usual_distance": float(reference.distances.median()),
    }
    return figures, to_train


def search_place(extractors: Sequence[Extractor], spec: ImageSpec) -> Extractor:
    """The extractor in whose space copies are searched: the first that is no classifier, else
    pixels. To a classifier its training images are all too familiar: samples would seem nearer to
    them without being copies.
    """
    return next(
        (each for each in extractors if not each.name.startswith("classifier:")),
        pixel_features(spec),
    )


def training_selection(labels: np.ndarray, *, n: int, searched: int, seed: int) -> Selection:
    """The draw of training images: the first n of it, which make the floor, are the same for any
    `searched`.
    """
    count = max(n, min(searched, len(labels)))
    return replace(
        select(labels, n=count, seed=seed, role="train"), key=f"train {seed} {n} of {count}"
    )


@dataclass(frozen=True)
class Drawn:
    reader: Dataset
    side: Selection
    features: Tensor  # [m, F]


def search_copies(
    place: Extractor, samples: Tensor, held_out: Drawn, train: Drawn
) -> dict[str, Any]:
    """The figures of `memorisation` for samples [n, F], which were asked for the labels of the
    first n held-out images; `extractor` and `weights`; and two lists of `pairs`: `closest`, the
    smallest distances first, and `first`, the first samples as drawn.
    """
    n, labels = len(samples), []
    # if not, they are all of one kind
    alike = held_out.reader.meta.label_names == train.reader.meta.label_names
    for drawn, count in ((held_out, n), (train, len(train.features))):
        of_file = drawn.reader.label_numbers()[drawn.side.indices[:count]].astype(np.int64)
        labels.append(
            torch.from_numpy(of_file if alike and drawn.reader.classes else np.zeros_like(of_file))
        )
    figures, near = memorisation(
        samples, RealSet(train.features, labels[1]), RealSet(held_out.features[:n], labels[0])
    )
    rows = pairs(
        range(n), held_out.side.labels[:n], train.side.indices[near.indices.numpy()], near.distances
    )
    lists = {
        "closest": sorted(rows, key=lambda row: row["distance"])[:PAIRS],
        "first": rows[:PAIRS],
    }
    return {"extractor": place.name, "weights": place.source, **figures, **lists}


def pairs(
    samples: Iterable[Any], labels: Iterable[Any], records: Iterable[Any], distances: Iterable[Any]
) -> list[dict[str, Any]]:
    """Samples, each with its nearest training image (a record), as a document lists them."""
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
    copies: dict[str, Any],
    *,
    seed: int,
    asked: Any = np.array,
) -> tuple[list[Tensor], list[str]]:
    """The pairs of `search_copies` as images uint8 [C, H, 2 * W + gap], the sample, drawn again, on
    the left, with captions; `asked` makes an array of labels what the generator takes.
    """
    rows = [*copies["closest"], *copies["first"]]
    labels = torch.from_numpy(asked([row["label"] for row in rows])) if generator.classes else None
    with full_float32(device_of(generator)):
        samples = generate(
            generator, labels=labels, indices=[row["sample"] for row in rows], seed=seed
        )
    real = torch.from_numpy(train.read([row["train"] for row in rows])[0])
    samples, real = visible(samples, train.spec), visible(real, train.spec)
    gap = torch.full_like(samples[..., : max(1, samples.shape[-1] // 16)], 255)
    usual = copies["usual_distance"]
    captions = [
        f"sample {row['sample']} | record {row['train']}\n"
        + (
            f"{row['distance'] / usual:.2f} of the usual distance"
            if usual
            else f"distance {row['distance']:.3g}"
        )
        for row in rows
    ]
    return list(torch.cat([samples, gap, real], dim=-1)), captions
