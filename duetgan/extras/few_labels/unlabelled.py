"""Training on unlabelled images in addition to labelled ones (FixMatch, 2001.07685).

The network with averaged weights (EMA) predicts the class of a weakly augmented image. A confident
prediction becomes the label of the same image under strong augmentation. Predictions can be mixed
with labels that are propagated from labelled neighbours in the initial network's feature space.
"""

import numpy as np
import torch
from torch import Tensor, nn

from duetgan.data.augment.transforms import MixingAugment, draw_and_apply, to_float
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import read_batch
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.metrics.features.precision import evaluating
from duetgan.training.base.data import open_images, require_same_images
from duetgan.training.base.monitors import State
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.inputs import Samples
from duetgan.training.classifier.loss import Targets
from duetgan.training.optim.updater import Precision
from duetgan.utils.config.model import Config, NonNegativeFloat, PositiveInt, Probability
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import refuse
from duetgan.utils.machine import upload

DECAY = 0.99  # decay per step of the means from which the adaptive thresholds are computed


class UnlabelledConfig(Config):
    """Unlabelled images from which a classifier learns in addition to labelled ones."""

    path: str | None = None  # packed images, whose labels are ignored
    ratio: PositiveInt = 4  # unlabelled images for each labelled one in a batch
    # weight of labels propagated from neighbours in the pseudo-labels; needs finetune.probe
    spread: Probability = 0.0
    # weight of the loss of unlabelled images; 0: they only standardise the features of
    # finetune.probe
    weight: NonNegativeFloat = 1.0
    threshold: Probability = 0.95  # least probability of a pseudo-label that is used
    # multiply the threshold by the mean confidence, and by less for rare classes (FreeMatch)
    adaptive: bool = True


class FewLabelsConfig(ClassifierConfig):
    """All settings for training a classifier on labelled and, optionally, unlabelled images."""

    unlabelled: UnlabelledConfig = UnlabelledConfig()

    def check(self) -> None:
        super().check()
        several = self.augment.mixes or self.loss.several or self.loss.teacher
        refuse(
            (
                self.unlabelled.spread and not self.finetune.probe,
                "unlabelled.spread: labels spread by what the probe reads; set finetune.probe true",
            ),
            (
                self.unlabelled.path
                and self.unlabelled.weight
                and (several or self.loss.kind != "cross-entropy"),
                "unlabelled images learn by cross-entropy of one label: leave out augment.mixup, "
                "cutmix, loss.teacher",
            ),
        )


class Unlabelled:
    """The unlabelled images of a training and their pseudo-labels.

    `draw` reads the images of a step and labels them. The choice of images depends only on the seed
    and the step. The state in checkpoints consists of the moving means from which the thresholds
    are computed, and of the propagated labels.
    """

    optional = True  # A run that started without unlabelled images has no such state.

    def __init__(self, config: FewLabelsConfig, dataset: Dataset) -> None:
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
        self.first_row = rank * self.rank_batch  # this rank's first row of the global batch
        self.weak = MixingAugment(
            flip=bool(augment.flip), shift=augment.shift, shift_edge=augment.shift_edge
        )
        self.strong = self.weak.changed(trivial_augment=True, erase=1.0)
        classes = len(dataset.classes)
        # Moving means of the class probabilities [K], then of the largest probability.
        self.means = torch.full((classes + 1,), 1 / classes)
        # Propagated class probabilities of each image [n, K]; n is 0 without propagation.
        self.propagated_labels = torch.zeros(len(self.images) if settings.spread else 0, classes)
        self.used_fraction = torch.zeros(())

    def draw(self, step: int, teacher: nn.Module, precision: Precision) -> tuple[Tensor, Targets]:
        """Read the unlabelled images of a step, and label them by the predictions of `teacher`.

        Returns the images under strong augmentation, uint8 [n, C, H, W], and their targets. Images
        whose prediction is below its threshold are not used: their weight is 0. Also sets
        `used_fraction` to the number of this rank's used images, divided by the global batch size.
        Summed over the ranks, this is the fraction of images that are used.
        """
        settings, batch_size, device = self.settings, self.sampler.batch_size, precision.device
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
        self.used_fraction = is_used.sum() / batch_size
        return strong, Targets(
            labels,
            weights=is_used * (settings.weight / settings.ratio),
            is_counted=torch.zeros_like(is_used),
        )

    def _thresholds(self, probabilities: Tensor, confidences: Tensor) -> Tensor:
        """Return the threshold of each class, [K]: the least probability of a pseudo-label.

        `confidences` are the largest of the `probabilities` of each image. If `settings.adaptive`
        is False, every threshold is `settings.threshold`. If it is True, `settings.threshold` is
        multiplied by the thresholds of FreeMatch (2205.07246, equations 5, 8 and 9). These are
        computed from `means`, which this method first updates over all ranks.
        """
        if not self.settings.adaptive:
            return confidences.new_full((probabilities.shape[1],), self.settings.threshold)
        means = torch.cat([probabilities.mean(0), confidences.mean()[None]])
        collectives.average_([means])
        self.means = means.lerp(self.means.to(means), DECAY)
        class_means, confidence = self.means[:-1], self.means[-1]
        return self.settings.threshold * confidence * class_means / class_means.max()

    def state_dict(self) -> State:
        return {"means": self.means.clone(), "said": self.propagated_labels.clone()}

    def load_state_dict(self, state: State) -> None:
        # In place: the memory may be that of the stream on which a CUDA graph's inputs are drawn.
        self.means.copy_(state["means"])
        self.propagated_labels = state["said"].clone()


def joined(labelled: Samples, images: Tensor, targets: Targets) -> Samples:
    """Append unlabelled images uint8 [m, C, H, W] and their targets to labelled samples."""
    assert targets.weights is not None
    assert targets.is_counted is not None
    labels = labelled.targets.labels
    weights = labelled.targets.weights
    if weights is None:
        weights = targets.weights.new_ones(len(labels))
    is_counted = torch.ones_like(labels, dtype=torch.bool)
    all_targets = Targets(
        torch.cat([labels, targets.labels]),
        weights=torch.cat([weights, targets.weights]),
        is_counted=torch.cat([is_counted, targets.is_counted]),
    )
    return Samples(torch.cat([labelled.images, images]), all_targets)
