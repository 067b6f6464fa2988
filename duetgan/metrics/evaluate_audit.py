"""`evaluate.py --audit`: what a generator's samples and its discriminator tell of single training
images.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.evaluate_gan import sample_features
from duetgan.metrics.features.extractors import (
    RealFeatures,
    build_extractors,
    chunk_size,
    find_weights,
    shared_pass,
)
from duetgan.metrics.features.precision import device_of, evaluating, full_float32
from duetgan.metrics.features.selection import Selection
from duetgan.metrics.images import save_audit
from duetgan.metrics.lineage import identities, training_images
from duetgan.metrics.protocol import GAN_IMAGES, SEARCHED
from duetgan.metrics.samples import membership_inference
from duetgan.metrics.samples.memorisation import nearest, neighbour_images, pairs, search_place
from duetgan.models.gan import ImageDiscriminator, ImageGenerator, generate
from duetgan.models.restore import discriminator_from, generator_from
from duetgan.utils.checkpoint import Checkpoint
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.images import save_captioned
from duetgan.utils.provenance import recorded
from duetgan.utils.seeding import generator as keyed_generator
from duetgan.utils.seeding import numpy_generator

PAIRS = 24  # members shown with their nearest sample


def audit_gan_run(
    checkpoint: Checkpoint, reader: Dataset, out: Path, options: Namespace
) -> dict[str, Any]:
    """Attacks, controls, the test with planted copies, and images. Raises UserError where members
    or held-out images are missing or not what they must be.
    """
    with collectives.raising_together():
        generator = generator_from(checkpoint, collectives.choose_device(options.device))
        if generator.classes:
            require_same_classes(
                "the generator", checkpoint["classes"], "the images", reader.classes
            )
        train = _training_images(checkpoint, reader)
        if options.searched == 0:
            raise UserError("--audit is a search: leave --searched 0 out")
    searched, seed, n = options.searched or SEARCHED, options.seed, options.n or GAN_IMAGES
    size: int = options.batch_size
    with train:
        with collectives.raising_together():
            how_many: dict[str, Any] = {
                "conditional": bool(generator.classes),
                "searched": searched,
                "seed": seed,
            }
            members, held_out, dropped = choose_sides(train, reader, **how_many)
            options.extractor = options.extractor or [
                "pixels" if find_weights(options.weights) is None else "resnet50"
            ]
        files = [(train, members), (reader, held_out)]
        device = device_of(generator)
        extractors = collectives.main_first(
            lambda: build_extractors(options, generator.spec, device, None)
        )
        # no classifier: to it its training images are familiar
        place = search_place(extractors, generator.spec)
        if collectives.is_main():
            print(f"extractor: {place.name}", file=sys.stderr)
        features = RealFeatures(batch_size=size, show=True)
        real = torch.cat([features.get(file, selection, [place])[0] for file, selection in files])
        labels = members.labels[np.arange(n) % len(members.labels)]
        asked = torch.from_numpy(labels) if generator.classes else None
        (samples,) = sample_features(
            generator, asked, [place], total=n, seed=seed, batch_size=size, what="samples"
        )
        logits = _logits(checkpoint, generator, files, seed, size)

        def finish() -> dict[str, Any]:
            key = partial(keyed_generator, seed, "eval", "audit", "planted")
            count, near = len(members.indices), nearest(real, samples)
            scores = {"generator": -near.distances} | (
                {} if logits is None else {"discriminator": logits}
            )
            document = audit_scores(scores, members=count, seed=seed)
            document["planted"] = [
                membership_inference.detection(
                    real,
                    near.distances,
                    members=count,
                    samples=n,
                    share=share,
                    generator=key(number),
                )
                for number, share in enumerate(membership_inference.SHARES)
            ]
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
            save_audit(scores, count, out / "audit.png")
            head = {"n": n, "extractor": place.name, "weights": place.source, "dropped": dropped}
            tail = {
                "not_shown": membership_inference.NOT_SHOWN,
                "images": ["audit.png", "audit_nearest.png"],
            }
            return head | document | {"verdict": membership_inference.verdict(document)} | tail

        return collectives.from_main_process(finish)


def audit_scores(scores: dict[str, Tensor], *, members: int, seed: int) -> dict[str, Any]:
    """The attack by each score [members + held out], and its control: two halves of the held-out
    images.
    """
    document: dict[str, Any] = {"attacks": {}, "controls": {}}
    for name, score in scores.items():
        held_out = score[members:]
        one, other = membership_inference.halves(
            len(held_out), keyed_generator(seed, "eval", "audit", "halves")
        )
        document["attacks"][name] = membership_inference.attack(score[:members], held_out)
        document["controls"][name] = membership_inference.attack(held_out[one], held_out[other])
    return document


def _training_images(checkpoint: Checkpoint, reader: Dataset) -> Dataset:
    """The members. Raises UserError where they are not at hand, or the held-out images are none."""
    train, why = training_images(checkpoint)
    if train is None:
        raise UserError(f"--audit needs the images that the generator was trained on: {why}")
    if not set(recorded(checkpoint).trained_on).isdisjoint(identities(reader)):
        raise UserError(
            f"--audit: {reader.path} was trained on; give images that were held out with --data"
        )
    return train


def choose_sides(
    train: Dataset, reader: Dataset, *, conditional: bool, searched: int, seed: int
) -> tuple[Selection, Selection, int]:
    """Members and held-out images in the same mix of classes, as many as there are, at most
    `searched` members; and how many test images were left out, which are training images as well,
    pixel for pixel.

    Raises UserError for fewer than 20 on a side.
    """
    kept = np.flatnonzero(~np.isin(reader.signatures()["digest"], train.signatures()["digest"]))
    theirs = [np.zeros(len(kept), np.int64), np.zeros(len(train), np.int64)]
    if conditional:
        theirs = [reader.labels()[kept], train.labels()]
    size = 1 + max(labels.max(initial=0) for labels in theirs)
    outside, inside = (np.bincount(labels, minlength=size) for labels in theirs)
    both = (outside > 0) & (inside > 0)
    outside[~both] = 0
    ratio = min(
        (inside[both] / outside[both]).min(initial=searched), searched / max(1, outside.sum())
    )
    wanted = outside, (ratio * outside).astype(int)
    drawn = []
    for role, labels, most in zip(("held-out", "members"), theirs, wanted, strict=True):
        order = numpy_generator(seed, "eval", "audit", role).permutation(len(labels))
        chosen = [order[labels[order] == label][:count] for label, count in enumerate(most)]
        drawn.append(order[np.isin(order, np.concatenate(chosen))])
    if min(len(part) for part in drawn) < 20:
        raise UserError(
            f"--audit needs 20 training images and 20 held-out ones of the same classes, not {len(drawn[1])} and "
            f"{len(drawn[0])}; give more with --data"
        )
    held_out = Selection(kept[drawn[0]], theirs[0][drawn[0]], f"held-out {seed} audit")
    members = Selection(drawn[1], theirs[1][drawn[1]], f"members {seed} {searched} audit")
    return members, held_out, len(reader) - len(kept)


def _logits(
    checkpoint: Checkpoint,
    generator: ImageGenerator,
    files: Sequence[tuple[Dataset, Selection]],
    seed: int,
    batch_size: int,
) -> Tensor | None:
    """The discriminator's logits of the files' images, one after the other, on rank 0; None where
    there is no whole discriminator. All ranks must call this.
    """
    full = generator.spec.side
    side, alpha = checkpoint.get("stage", [full, 1.0])
    if "discriminator" not in checkpoint["state"] or (side, alpha) != (full, 1.0):
        return None
    discriminator = discriminator_from(checkpoint, device_of(generator))
    group = discriminator.config.group
    partners = Partners(generator, group - 1, seed=seed)
    parts = [torch.empty(0, dtype=torch.float64)]
    for file, selection in files:

        def work(rows: range, file: Dataset = file, selection: Selection = selection) -> Tensor:
            images = selection.images(file, rows)
            labels = torch.from_numpy(selection.labels[rows.start : rows.stop])
            pieces = zip(
                *(part.split(max(1, chunk_size(side) // group)) for part in (images, labels)),
                strict=True,
            )
            return torch.cat([partners.logits(discriminator, *piece) for piece in pieces])

        parts += shared_pass(len(selection.indices), work, side=full, batch_size=batch_size)
    return torch.cat(parts)


class Partners:
    """Samples beside which a discriminator sees every image where it looks at groups (minibatch
    standard deviation): a logit that depended on other real images would tell of them too.
    """

    def __init__(self, generator: ImageGenerator, count: int, *, seed: int) -> None:
        self.count = count
        self.labels = torch.arange(count) % max(1, generator.classes)
        if count:
            labels = self.labels if generator.classes else None
            self.images = generate(generator, labels=labels, indices=range(count), seed=seed)

    def logits(self, discriminator: ImageDiscriminator, images: Tensor, labels: Tensor) -> Tensor:
        """Logits float64 [n] on the CPU of images uint8 [n, C, R, R]; without classes labels count
        for nothing.
        """
        device, n = device_of(discriminator), len(images)
        # [n, group]: a row is a group; where groups are strided, a column is what lies together
        groups, named = images[:, None], labels[:, None]
        if self.count:
            groups = torch.cat([groups, self.images.expand(n, *self.images.shape)], dim=1)
            named = torch.cat([named, self.labels.expand(n, -1)], dim=1)
        strided = getattr(discriminator.config, "minibatch_std_order", "") == "strided"
        if strided:
            groups, named = groups.transpose(0, 1), named.t()
        with evaluating(discriminator), full_float32(device):
            logits = discriminator(
                discriminator.spec.to_float(groups.flatten(0, 1).to(device)),
                named.flatten().to(device),
            )
        logits = logits.view(named.shape)
        return (logits[0] if strided else logits[:, 0]).cpu().double()
