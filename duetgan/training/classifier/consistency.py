"""Images without labels beside the labelled ones (FixMatch, 2001.07685): what the average network
says of one that is flipped and shifted becomes, where it is sure, the label of the same one under
strong augmentation. Labels that spread over neighbours, by what the network began with, may have a
say in it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from duetgan.data.augment.transforms import MixingAugment, draw_and_apply, to_float
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.metrics.features.precision import evaluating
from duetgan.training.base.data import open_images, require_same_images
from duetgan.training.base.monitors import Fields
from duetgan.training.classifier.loss import Targets
from duetgan.utils.config.model import Config, NonNegativeFloat, PositiveInt, Probability
from duetgan.utils.distributed import collectives
from duetgan.utils.memory import upload

DECAY = 0.99  # a step, of what the thresholds follow


class UnlabelledConfig(Config):
    """Images without labels that a classifier learns from as well."""

    path: str | None = None  # packed; labels are not looked at
    ratio: PositiveInt = 4  # of them for each labelled image
    # share of labels spread over neighbours in what names them; needs a probe
    spread: Probability = 0.0
    weight: NonNegativeFloat = 1.0  # of their loss; 0: they standardise finetune.probe alone
    threshold: Probability = 0.95  # the average network's least probability of a label
    # threshold: a share of the mean largest probability, less in seldom classes (FreeMatch)
    adaptive: bool = True


class Unlabelled(Fields):
    """The images of `UnlabelledConfig` and what is thought of them: `look` draws a step's, `beside`
    puts them behind the labelled ones. Their order is a function of the seed and the step; the
    state is what the thresholds follow, and what labels that spread have said.
    """

    STATE = ("means", "said")
    optional = True  # a run that was begun without has no such state

    def __init__(self, config: Any, reader: Dataset) -> None:  # config: a ClassifierConfig
        about, augment = config.unlabelled, config.augment
        path, size, remedy = (
            str(about.path),
            reader.resolution or None,
            "pack images without labels alike",
        )
        self.images = open_images(
            "unlabelled.path", path, remedy, resolution=size, workers=reader.workers
        )
        scaled = config.data.resolution is not None
        require_same_images(path, self.images, config.data.path, reader, remedy, scaled=scaled)
        reader.spec.need_plain("unlabelled, with its strong augmentation,")
        self.about, self.seed = about, config.seed
        world, rank, count = (
            collectives.world_size(),
            collectives.rank(),
            config.batch_size * about.ratio,
        )
        same: Any = {"seed": config.seed, "rank": rank, "world_size": world}
        self.sampler = GlobalSampler(
            len(self.images), batch_size=count, stream="unlabelled", **same
        )
        self.share, self.first = count // world, rank * (count // world)
        self.weak = MixingAugment(
            flip=bool(augment.flip), shift=augment.shift, shift_edge=augment.shift_edge
        )
        self.strong = self.weak.changed(trivial_augment=True, erase=1.0)
        classes = len(reader.classes)
        # of the probabilities, and of each image's largest
        self.means = torch.full((classes + 1,), 1 / classes)
        # of each, by labels that spread
        self.said = torch.zeros(len(self.images) if about.spread else 0, classes)
        self._beside: tuple[Tensor, Targets] | None = None

    def look(
        self, step: int, teacher: nn.Module, precision: Any, device: torch.device
    ) -> dict[str, Tensor]:
        """Draw the images of update number `step` and name them; returns the share that is used."""
        size = self.sampler.batch_size
        indices, keys = self.sampler.at(step * size + self.first, self.share)
        images = upload(read_batch(self.images, np.asarray(indices), keys=keys).images, device)
        draw: Any = {"seed": self.seed, "step": step, "start": self.first, "global_batch": size}
        weak, strong = (
            draw_and_apply(images, getattr(self, kind), phase=kind, **draw)
            for kind in ("weak", "strong")
        )
        with evaluating(teacher), precision.autocast():
            probabilities = teacher(to_float(weak)).to(torch.get_default_dtype()).softmax(1)
        if self.about.spread:
            said = upload(self.said[indices], device).to(probabilities.dtype)
            probabilities = probabilities.lerp(said, self.about.spread)
        sure, labels = probabilities.max(1)
        used = sure >= self._thresholds(probabilities, sure)[labels]
        self._beside = (
            strong,
            Targets(labels, weights=used * (self.about.weight / self.about.ratio)),
        )
        return {"unlabelled/used": used.sum() / size}

    def _thresholds(self, probabilities: Tensor, sure: Tensor) -> Tensor:
        """Of each class, [K]: equations 5, 8 and 9 of FreeMatch (2205.07246) times `threshold`."""
        if not self.about.adaptive:
            return sure.new_full((probabilities.shape[1],), self.about.threshold)
        now = torch.cat([probabilities.mean(0), sure.mean()[None]])
        collectives.average_([now])
        self.means = now.lerp(self.means.to(now), DECAY)
        mean, top = self.means[:-1], self.means[-1]
        return self.about.threshold * top * mean / mean.max()

    def beside(self, images: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        """A process's labelled images uint8 [n, C, H, W] and what they show, the others behind
        them.
        """
        assert self._beside is not None
        more, named = self._beside
        assert named.weights is not None
        ones = named.weights.new_ones(len(images)) if targets.weights is None else targets.weights
        labels, weights = (
            torch.cat([targets.labels, named.labels]),
            torch.cat([ones, named.weights]),
        )
        return torch.cat([images, more]), Targets(labels, weights=weights)
