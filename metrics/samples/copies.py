"""The search for copies of training images among a generator's samples, as a part of its evaluation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import Extractor, pixel_features
from duetgan.metrics.features.precision import full_float32
from duetgan.metrics.features.sets import Selection, select
from duetgan.metrics.samples.memorisation import RealSet, memorisation
from duetgan.models.gan import ImageGenerator, generate

PAIRS = 12  # samples listed with their nearest training image: the closest of all, and the first ones


def search_place(extractors: Sequence[Extractor], channels: int) -> Extractor:
    """The extractor in whose space copies are searched: the first that was not trained on the training images.

    To a classifier that was, they are all too familiar, and samples would seem nearer to them than to held-out images
    without being copies. Where there is no other extractor, pixels serve.
    """
    return next((each for each in extractors if not each.name.startswith("classifier:")), pixel_features(channels))


def training_selection(labels: np.ndarray, *, n: int, searched: int, seed: int) -> Selection:
    """The draw of training images: the first n of it, which make the floor, are the same for any `searched`."""
    count = max(n, min(searched, len(labels)))
    return replace(select(labels, n=count, seed=seed, role="train"), key=f"train {seed} {n} of {count}")


@dataclass(frozen=True)
class Drawn:
    """Real images that were drawn from a file."""

    reader: Dataset
    side: Selection
    features: Tensor  # [m, F]


def search_copies(place: Extractor, samples: Tensor, held_out: Drawn, train: Drawn) -> dict[str, Any]:
    """The figures of `metrics.samples.memorisation.memorisation` for samples [n, F], which were asked for the labels of
    the first n held-out images.

    With `extractor` and `weights`, and two lists of {`sample` (its index), `label`, `train` (record of the nearest
    training image), `distance`}: `closest`, the smallest distances first, and `first`, the first samples as drawn.
    """
    n, labels = len(samples), []
    alike = held_out.reader.classes == train.reader.classes  # if not, they are all of one kind
    for drawn, count in ((held_out, n), (train, len(train.features))):
        of_file = drawn.reader.labels()[drawn.side.indices[:count]].astype(np.int64)
        labels.append(torch.from_numpy(of_file if alike and drawn.reader.classes else np.zeros_like(of_file)))
    real = RealSet(held_out.features[:n], labels[0])
    figures, neighbours = memorisation(samples, RealSet(train.features, labels[1]), real)
    records = train.side.indices[neighbours.indices.numpy()]
    rows = pairs(range(n), held_out.side.labels[:n], records, neighbours.distances)
    lists = {"closest": sorted(rows, key=lambda row: row["distance"])[:PAIRS], "first": rows[:PAIRS]}
    return {"extractor": place.name, "weights": place.source, **figures, **lists}


def pairs(
    samples: Iterable[Any], labels: Iterable[Any], records: Iterable[Any], distances: Iterable[Any]
) -> list[dict[str, Any]]:
    """Samples, each with its nearest training image, as a document lists them."""
    return [
        {"sample": int(sample), "label": int(label), "train": int(record), "distance": float(distance)}
        for sample, label, record, distance in zip(samples, labels, records, distances, strict=True)
    ]


def neighbour_images(
    generator: ImageGenerator, train: Dataset, copies: dict[str, Any], *, seed: int
) -> tuple[list[Tensor], list[str]]:
    """The pairs of `search_copies` as images uint8 [C, H, 2 * W + gap], the sample on the left, with captions.

    The samples are drawn again: sample i depends on the seed, i and its label alone.
    """
    rows = [*copies["closest"], *copies["first"]]
    labels = torch.tensor([row["label"] for row in rows]) if generator.classes else None
    device = next(generator.parameters()).device
    with full_float32(device):
        samples = generate(generator, labels=labels, indices=[row["sample"] for row in rows], seed=seed)
    real = torch.cat([torch.from_numpy(train.read(np.array([row["train"]]))[0]) for row in rows])
    gap = torch.full_like(samples[..., : max(1, samples.shape[-1] // 16)], 255)
    usual = copies["usual_distance"]
    captions = [
        f"sample {row['sample']} | record {row['train']}\n"
        + (f"{row['distance'] / usual:.2f} of the usual distance" if usual else f"distance {row['distance']:.3g}")
        for row in rows
    ]
    return list(torch.cat([samples, gap, real], dim=-1)), captions
