"""Compare two sets of images by the metrics with which generators are evaluated.

If the two sets are the samples and the real images of an evaluation, the metrics are the same as in
that evaluation.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from duetgan.data.opening import open_dataset
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.features.extractors import Extractor, build, compute_features
from duetgan.metrics.features.selection import Selection, select
from duetgan.metrics.figures import UNLABELLED, Samples, measured
from duetgan.metrics.intervals import Measured
from duetgan.metrics.protocol import GAN_IMAGES, PER_CLASS, SEARCHED, Document
from duetgan.metrics.results import Evaluation
from duetgan.metrics.samples import memorisation
from duetgan.metrics.tables import few_images
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.machine import cores


def compare_images(
    images: str | Path,
    reference: str | Path,
    *,
    training: str | Path | None = None,
    extractors: Sequence[str] = ("resnet50",),
    weights: str | Path | None = None,
    n: int = GAN_IMAGES,
    seed: int = 0,
    size: int | str | None = None,
    batch_size: int = 64,
    device: str | None = None,
    progress: bool = False,
) -> Evaluation:
    """Compare two sets of images, such as samples and real images, by features of the images.

    The floor of a metric is its value between n training images and n reference images. Without
    training images, it is the value between two disjoint sets of n reference images, or between the
    halves of the reference if that has fewer than 2 n images.

    Args:
        images: Folder, zip, tar or packed file.
        reference: The images to compare with.
        training: Images that the generator of `images` was trained on. They are searched for the
            originals of copies. None: the reference is searched.
        extractors: Names: resnet50, inception, pixels, classifier:RUN_OR_FILE.
        weights: Weights file of resnet50 or inception.
        n: Number of images of each set; at most the number of images of the smallest set.
        seed: Seed of the random choice of images from larger sets.
        size: Side in px, or "WIDTHxHEIGHT", to which images are cropped and scaled. None:
            unchanged.
        batch_size: Images per batch; changes speed and memory only.
        device: "cpu", "cuda", ...; None: the accelerator if the machine has one, else the CPU.
        progress: True to show progress bars.

    Returns:
        The metrics. `document` has the paths `images`, `reference` and, if given, `training`; `n`;
        `seed`; `size`; `distances`, with a dict for each extractor; `memorisation`, the result of
        `search_copies` or `near_copies`, whose pairs have the record number `sample` and the
        `label` of an image of `images`; and `notes`. The dict of an extractor has `extractor`,
        `weights`, `n`, the metrics with their intervals, and `floors`, the metrics' floors and
        their n.

    Raises:
        UserError: If a file cannot be read, images differ in size, channels or depth, or a set has
            fewer than four images.
    """
    paths = {"images": images, "reference": reference}
    if training is not None:
        paths["training"] = training
    document: Document = {role: str(path) for role, path in paths.items()}
    with ExitStack() as stack:
        datasets = [stack.enter_context(open_images(path, size)) for path in paths.values()]
        spec = common_spec(datasets)
        n = min(n, *map(len, datasets))
        if n < 4:
            raise UserError(f"a comparison needs at least 4 images of each set, not {n}")
        labels = [dataset.label_numbers() for dataset in datasets]
        # all images, in their order, as in an evaluation
        whole = Selection(np.arange(n), labels[0], "images")
        draws = [
            whole if n == len(labels[0]) else select(labels[0], n=n, seed=seed, role="images"),
            select(labels[1], n=2 * n if training is None else n, seed=seed, role="test"),
        ]
        if training is not None:
            draws.append(
                memorisation.training_selection(labels[2], n=n, searched=SEARCHED, seed=seed)
            )
        built = build(extractors, device=choose_device(device), spec=spec, weights=weights)
        search = memorisation.search_extractor(built, spec)
        used = [*built, *([] if search in built else [search])]
        features = []  # of each set, under each extractor
        for dataset, draw in zip(datasets, draws, strict=True):
            parts = compute_features(
                partial(_read, dataset, draw, spec.channels),
                used,
                total=len(draw.indices),
                side=spec.side,
                batch_size=batch_size,
                progress="images" if progress else "",
            )
            features.append(parts)
        image_sets = [
            memorisation.RealImages(*row)
            for row in zip(
                datasets, draws, [parts[used.index(search)] for parts in features], strict=True
            )
        ]
        find = near_copies if training is None else memorisation.search_copies
        copies = find(search, image_sets[0].features, *image_sets[1:])
        for name in ("closest", "first"):
            if name in copies:
                copies[name] = [_of_record(pair, draws[0]) for pair in copies[name]]
    notes = few_images(n, distances=True)
    distances = []
    for extractor, fake, real, *train in zip(built, *features, strict=False):
        half = len(real) // 2
        floor = (train[0], real) if train else (real[half:], real[:half])
        row: Document = {"extractor": extractor.name, "weights": extractor.source, "n": n}
        row |= _metrics(fake, real[:n], seed, extractor, notes)
        distances.append(row | {"floors": _metrics(*floor, seed, extractor, {})})
    size = f"{spec.width}x{spec.height}"
    document |= {"n": n, "seed": seed, "size": size, "distances": distances}
    return Evaluation.of(document | {"memorisation": copies, "notes": notes})


def open_images(path: str | Path, size: int | str | None = None) -> Dataset:
    """Open a folder, zip, tar or packed file of images, and make sure that they have one size.

    If `size` is given, images are cropped and scaled to it. Raises UserError if images differ in
    size and `size` is None, or if a file cannot be read.
    """
    dataset = open_dataset(path, resolution=size, workers=cores())
    if dataset.resolution:
        return dataset
    sizes: set[tuple[int, int]] = set()  # height and width
    with dataset:
        for shard in dataset.shards:
            for record in range(len(shard)):
                with shard.encoded(record) as (_, _, image_size):
                    sizes.add(image_size)
    ordered = [f"{width}x{height}" for height, width in sorted(sizes)]
    if len(ordered) != 1:
        raise UserError(
            f"{path}: its images have {len(ordered)} sizes, {ordered[0]} to {ordered[-1]}; give one "
            "with --size"
        )
    return open_dataset(path, resolution=ordered[0], workers=cores())


def common_spec(datasets: Sequence[Dataset]) -> ImageSpec:
    """Return the size, channels and pixel format in which the images of all sets are compared.

    If some 8-bit sets are RGB and others are grey, all are compared as RGB. Raises UserError if the
    sets differ in size or depth, or otherwise in channels.
    """
    channels = max(dataset.spec.plain * dataset.spec.channels for dataset in datasets)
    specs = [
        replace(dataset.spec, channels=channels) if dataset.spec.plain else dataset.spec
        for dataset in datasets
    ]
    for dataset, spec in zip(datasets, specs, strict=True):
        if spec != specs[0]:
            raise UserError(
                f"{dataset.path}: its images have {spec}, {dataset.spec.words}, those of "
                f"{datasets[0].path} {specs[0]}, {datasets[0].spec.words}; give --size for one size, "
                "or pack them alike"
            )
    return specs[0]


def _read(dataset: Dataset, draw: Selection, channels: int, rows: range) -> Tensor:
    return draw.images(dataset, rows).expand(-1, channels, -1, -1)


def _of_record(pair: Document, draw: Selection) -> Document:
    """Replace the position of an image in the draw by its record number, and set its label."""
    position = pair["sample"]
    return pair | {"sample": int(draw.indices[position]), "label": int(draw.labels[position])}


def _metrics(
    fake: Tensor, real: Tensor, seed: int, extractor: Extractor, notes: dict[str, str]
) -> Document:
    """Return `n`, the size of the smaller set, and the metrics of the first n of both sets.

    `fake` and `real` are features of the sets, [images, F]. Notes on metrics are added to `notes`.
    """
    n = min(len(fake), len(real))
    samples = Samples(
        fake=fake[:n],
        real=real[:n],
        training=None,
        labels=torch.zeros(n, dtype=torch.int64),
        n=n,
        names=[],
        probabilities=None,
        thresholds=None,
        seed=seed,
        per_class=PER_CLASS,
        extractor=extractor.name,
    )
    return {"n": n} | measured(UNLABELLED, samples, notes)


def near_copies(
    extractor: Extractor, features: Tensor, reference: memorisation.RealImages
) -> Document:
    """Find images that are unusually near to a reference image.

    The images, whose features are [n, F], are compared with the first n reference images. An image
    is unusually near to a reference image if their distance is smaller than that of 99 % of the
    reference images to their nearest other reference image.

    Returns:
        `extractor`; `weights`; `searched`, n; `share`, the fraction of the images that are
        unusually near, with its interval; `expected`, the share that is expected if both sets have
        the same distribution; and `closest`, a list of `pairs` for the images nearest to a
        reference image.
    """
    n = len(features)
    candidates = reference.features[:n]
    near = memorisation.nearest(features, candidates)
    usual = memorisation.nearest(candidates, candidates).distances
    _, expected, bound = memorisation.fraction_below(near.distances, usual)
    fraction = Measured.fraction(near.distances < bound)
    rows = memorisation.pairs(
        range(n),
        reference.selection.labels[:n],
        reference.selection.indices[near.indices.numpy()],
        near.distances,
    )
    return {
        "extractor": extractor.name,
        "weights": extractor.source,
        "searched": n,
        "share": fraction.value,
        "share_interval": fraction.interval,
        "expected": expected,
        "closest": sorted(rows, key=lambda row: row["distance"])[: memorisation.PAIRS],
    }
