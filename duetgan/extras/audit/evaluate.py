"""Run membership inference on a generator for `evaluate.py --audit`."""

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.extras.audit import membership_inference
from duetgan.metrics.evaluate_gan import sample_features
from duetgan.metrics.features.extractors import (
    RealFeatures,
    build_extractors,
    find_weights,
)
from duetgan.metrics.features.precision import device_of
from duetgan.metrics.features.selection import Selection
from duetgan.metrics.lineage import identities, training_images
from duetgan.metrics.protocol import GAN_IMAGES, SEARCHED, Document
from duetgan.metrics.samples.memorisation import nearest, neighbour_images, pairs, search_extractor
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.checkpoint.provenance import recorded
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.images import save_captioned
from duetgan.utils.seeding import generator as keyed_generator
from duetgan.utils.seeding import numpy_generator

PAIRS = 24  # training images that audit_nearest.png shows beside their nearest sample


def audit_gan_run(
    checkpoint: Checkpoint, dataset: Dataset, out: Path, options: Namespace
) -> Document:
    """Test if a generator's samples reveal its training images; return the results, ready for JSON.

    The results include `attacks`, `controls` (see `audit_score`) and the `verdict`. The function
    also writes `audit_nearest.png` into the folder `out`, and sets an empty `options.extractor` to
    the default.

    Raises:
        UserError: If the training images are not available, if there are too few training images or
            held-out images (see `choose_sides`), if the generator was also trained on the held-out
            images `dataset` or has other classes, or if `options.searched` is 0.
    """
    with collectives.raising_together():
        generator = generator_from(checkpoint, collectives.choose_device(options.device))
        if generator.classes:
            require_same_classes(
                "the generator", checkpoint["classes"], "the images", dataset.classes
            )
        train = _training_images(checkpoint, dataset)
        if options.searched == 0:
            raise UserError("--audit is a search: leave --searched 0 out")
    seed: int = options.seed
    n: int = options.n or GAN_IMAGES
    size: int = options.batch_size
    with train:
        with collectives.raising_together():
            members, held_out, dropped = choose_sides(
                train,
                dataset,
                conditional=bool(generator.classes),
                searched=options.searched or SEARCHED,
                seed=seed,
            )
            options.extractor = options.extractor or [
                "pixels" if find_weights(options.weights) is None else "resnet50"
            ]
        files = [(train, members), (dataset, held_out)]
        device = device_of(generator)
        extractors = collectives.main_first(
            lambda: build_extractors(options, generator.spec, device, None)
        )
        extractor = search_extractor(extractors, generator.spec)
        if collectives.is_main():
            print(f"extractor: {extractor.name}", file=sys.stderr)
        real_features = RealFeatures(batch_size=size, show=True)
        real = torch.cat(
            [real_features.get(file, selection, [extractor])[0] for file, selection in files]
        )
        labels = members.labels[np.arange(n) % len(members.labels)]
        (samples,) = sample_features(
            generator,
            torch.from_numpy(labels) if generator.classes else None,
            [extractor],
            total=n,
            seed=seed,
            batch_size=size,
            progress="samples",
        )

        def finish() -> Document:
            count = len(members.indices)
            near = nearest(real, samples)
            document = audit_score(-near.distances, members=count, seed=seed)
            closest = near.distances[:count].sort(stable=True).indices[:PAIRS].numpy()
            indices = near.indices.numpy()[closest]
            copies = {
                "closest": pairs(
                    indices, labels[indices], members.indices[closest], near.distances[closest]
                ),
                "first": [],
                "usual_distance": float(near.distances[count:].median()),
            }
            save_captioned(
                *neighbour_images(generator, train, copies, seed=seed), out / "audit_nearest.png"
            )
            return {
                "n": n,
                "extractor": extractor.name,
                "weights": extractor.source,
                "dropped": dropped,
                **document,
                "verdict": membership_inference.verdict(document),
                "not_shown": membership_inference.NOT_SHOWN,
                "images": ["audit_nearest.png"],
            }

        return collectives.from_main_process(finish)


def audit_score(score: Tensor, *, members: int, seed: int) -> Document:
    """Return a dict with the results of an attack, `attacks`, and of a control, `controls`.

    Both results are dicts whose only entry, "generator", is the result of the function `attack`.
    The attack separates training images from held-out images. The control does the same with two
    halves of the held-out images, between which it should find no difference.

    Args:
        score: Scores of the training images, then of the held-out images, [members + held out].
        members: Number of training images.
        seed: Seed of the division into halves.
    """
    held_out = score[members:]
    first, second = membership_inference.halves(
        len(held_out), keyed_generator(seed, "eval", "audit", "halves")
    )
    return {
        "attacks": {"generator": membership_inference.attack(score[:members], held_out)},
        "controls": {"generator": membership_inference.attack(held_out[first], held_out[second])},
    }


def _training_images(checkpoint: Checkpoint, dataset: Dataset) -> Dataset:
    """Return the dataset that the generator was trained on; the audit calls its images members.

    Raises:
        UserError: If the dataset is not available, or if the generator was also trained on
            `dataset`, which must contain held-out images.
    """
    train, reason = training_images(checkpoint)
    if train is None:
        raise UserError(f"--audit needs the images that the generator was trained on: {reason}")
    if not set(recorded(checkpoint).trained_on).isdisjoint(identities(dataset)):
        raise UserError(
            f"--audit: {dataset.path} was trained on; give images that were held out with --data"
        )
    return train


def choose_sides(
    train: Dataset, dataset: Dataset, *, conditional: bool, searched: int, seed: int
) -> tuple[Selection, Selection, int]:
    """Choose training and held-out images, as many as possible, with the same class frequencies.

    Args:
        train: The training images.
        dataset: The held-out images.
        conditional: If False, the classes are ignored.
        searched: Largest number of training images to choose.

    Returns:
        The chosen training images, the chosen held-out images, and the number of images of
        `dataset` that were left out because they equal a training image pixel for pixel.

    Raises:
        UserError: If there are fewer than 20 training images or fewer than 20 held-out images.
    """
    unseen = np.flatnonzero(~np.isin(dataset.signatures()["digest"], train.signatures()["digest"]))
    test_labels = np.zeros(len(unseen), np.int64)
    train_labels = np.zeros(len(train), np.int64)
    if conditional:
        test_labels = dataset.labels()[unseen]
        train_labels = train.labels()
    size = 1 + max(test_labels.max(initial=0), train_labels.max(initial=0))
    test_counts = np.bincount(test_labels, minlength=size)
    train_counts = np.bincount(train_labels, minlength=size)
    common = (test_counts > 0) & (train_counts > 0)
    test_counts[~common] = 0
    ratio = min(
        (train_counts[common] / test_counts[common]).min(initial=searched),
        searched / max(1, test_counts.sum()),
    )

    def draw(role: str, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
        order = numpy_generator(seed, "eval", "audit", role).permutation(len(labels))
        chosen = [order[labels[order] == label][:count] for label, count in enumerate(counts)]
        return order[np.isin(order, np.concatenate(chosen))]

    test_rows = draw("held-out", test_labels, test_counts)
    train_rows = draw("members", train_labels, (ratio * test_counts).astype(int))
    if min(len(test_rows), len(train_rows)) < 20:
        raise UserError(
            f"--audit needs 20 training images and 20 held-out images of the same classes, not "
            f"{len(train_rows)} and {len(test_rows)}; give more with --data"
        )
    held_out = Selection(unseen[test_rows], test_labels[test_rows], f"held-out {seed} audit")
    members = Selection(train_rows, train_labels[train_rows], f"members {seed} {searched} audit")
    return members, held_out, len(dataset) - len(unseen)
