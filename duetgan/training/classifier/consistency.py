"""Training on unlabelled images besides the labelled ones (FixMatch, 2001.07685).

The average network predicts the class of a weakly augmented image. Where it is confident, the
prediction is the label of the same image under strong augmentation. Labels that are propagated from
labelled neighbours in the feature space of the initial network can take part in the prediction.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from duetgan.data.augment.transforms import MixingAugment, draw_and_apply, to_float
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.metrics.features.precision import evaluating
from duetgan.training.base.data import open_images, require_same_images
from duetgan.training.classifier.loss import Targets
from duetgan.training.optim.updater import Precision
from duetgan.utils.config.model import Config, NonNegativeFloat, PositiveInt, Probability
from duetgan.utils.distributed import collectives
from duetgan.utils.memory import upload

if TYPE_CHECKING:
    from duetgan.training.classifier.config import ClassifierConfig

DECAY = 0.99  # per step, of the means from which the thresholds are computed


class UnlabelledConfig(Config):
    """Unlabelled images that a classifier learns from too."""

    path: str | None = None  # packed images; their labels are ignored
    ratio: PositiveInt = 4  # unlabelled images for each labelled one
    # weight of labels propagated from neighbours in the pseudo-labels; needs finetune.probe
    spread: Probability = 0.0
    weight: NonNegativeFloat = 1.0  # of their loss; 0: they only standardise finetune.probe
    threshold: Probability = 0.95  # least probability of a pseudo-label, by the average network
    # multiply the threshold by the mean confidence, and by less for rare classes (FreeMatch)
    adaptive: bool = True


class Unlabelled:
    """The unlabelled images and their pseudo-labels.

    `draw` reads and labels the images of a step, `append_to` adds them to the labelled ones. The
    order of the images is a function of the seed and the step. The state is the means from which
    the thresholds are computed, and the propagated labels.
    """

    optional = True  # A run that started without unlabelled images has no such state.

    def __init__(self, config: "ClassifierConfig", dataset: Dataset) -> None:
        settings, augment = config.unlabelled, config.augment
        path, remedy = str(settings.path), "pack the unlabelled images like the labelled ones"
        self.images = open_images(
            "unlabelled.path",
            path,
            remedy,
            resolution=dataset.resolution or None,
            workers=dataset.workers,
        )
        scaled = config.data.resolution is not None
        require_same_images(path, self.images, config.data.path, dataset, remedy, any_size=scaled)
        dataset.spec.need_plain("unlabelled, with its strong augmentation,")
        self.settings = settings
        self.seed = config.seed
        world, rank = collectives.world_size(), collectives.rank()
        batch_size = config.batch_size * settings.ratio
        self.sampler = GlobalSampler(
            len(self.images),
            batch_size=batch_size,
            stream="unlabelled",
            seed=config.seed,
            rank=rank,
            world_size=world,
        )
        self.rank_batch = batch_size // world
        self.first_row = rank * self.rank_batch  # in the global batch
        self.weak = MixingAugment(
            flip=bool(augment.flip), shift=augment.shift, shift_edge=augment.shift_edge
        )
        self.strong = self.weak.changed(trivial_augment=True, erase=1.0)
        classes = len(dataset.classes)
        # Moving means of the class probabilities [K], then of the largest probability.
        self.means = torch.full((classes + 1,), 1 / classes)
        # Class probabilities of each image by propagation; empty without it.
        self.propagated_labels = torch.zeros(len(self.images) if settings.spread else 0, classes)
        self._drawn: tuple[Tensor, Targets] | None = None  # of the current step

    def draw(
        self, step: int, teacher: nn.Module, precision: Precision, device: torch.device
    ) -> dict[str, Tensor]:
        """Read the images of update number `step` and label them by `teacher`.

        Returns the fraction of them that is used, as a metric that adds up over the ranks.
        """
        settings, batch_size = self.settings, self.sampler.batch_size
        indices, keys = self.sampler.at(step * batch_size + self.first_row, self.rank_batch)
        images = upload(read_batch(self.images, np.asarray(indices), keys=keys).images, device)

        def augmented(config: MixingAugment, phase: str) -> Tensor:
            return draw_and_apply(
                images,
                config,
                seed=self.seed,
                step=step,
                start=self.first_row,
                global_batch=batch_size,
                phase=phase,
            )

        weak, strong = augmented(self.weak, "weak"), augmented(self.strong, "strong")
        with evaluating(teacher), precision.autocast():
            probabilities = teacher(to_float(weak)).to(torch.get_default_dtype()).softmax(1)
        if settings.spread:
            propagated = upload(self.propagated_labels[indices], device).to(probabilities.dtype)
            probabilities = probabilities.lerp(propagated, settings.spread)
        confidences, labels = probabilities.max(1)
        is_used = confidences >= self._thresholds(probabilities, confidences)[labels]
        targets = Targets(labels, weights=is_used * (settings.weight / settings.ratio))
        self._drawn = strong, targets
        return {"unlabelled/used": is_used.sum() / batch_size}

    def _thresholds(self, probabilities: Tensor, confidences: Tensor) -> Tensor:
        """Return the threshold of each class, [K]; adaptive ones are those of FreeMatch
        (2205.07246, equations 5, 8 and 9) times `threshold`.
        """
        if not self.settings.adaptive:
            return confidences.new_full((probabilities.shape[1],), self.settings.threshold)
        means = torch.cat([probabilities.mean(0), confidences.mean()[None]])
        collectives.average_([means])
        self.means = means.lerp(self.means.to(means), DECAY)
        class_means, confidence = self.means[:-1], self.means[-1]
        return self.settings.threshold * confidence * class_means / class_means.max()

    def append_to(self, images: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        """Append the drawn images to labelled images uint8 [n, C, H, W] and their targets."""
        assert self._drawn is not None
        drawn_images, drawn_targets = self._drawn
        assert drawn_targets.weights is not None
        weights = targets.weights
        if weights is None:
            weights = drawn_targets.weights.new_ones(len(images))
        return torch.cat([images, drawn_images]), Targets(
            torch.cat([targets.labels, drawn_targets.labels]),
            weights=torch.cat([weights, drawn_targets.weights]),
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {"means": self.means.clone(), "said": self.propagated_labels.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means = state["means"].clone()
        self.propagated_labels = state["said"].clone()
