"""Define the losses of the classifier, with soft targets and class weights.

To add a loss, add an entry to `CLASSIFIER_LOSSES`. Its settings are keys of `ClassifierLossConfig`.
A key that changes every loss is read in `classifier_loss`, or in `Criterion`, which holds what is
computed once for a training.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.models.gan import one_hot
from duetgan.training.base.teacher import Teacher
from duetgan.training.optim.config import cosine
from duetgan.training.optim.updater import Precision
from duetgan.utils.config.cli import entry
from duetgan.utils.config.model import (
    Config,
    Decay,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    Probability,
)
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.text import did_you_mean

FOCUS, MARGIN = 4, 0.05  # settings of the asymmetric loss, as in 2009.14119
MIN_FREQUENCY = 1e-9  # least class frequency / largest one, in the logarithm of the prior


class ClassifierLossConfig(Config):
    """Settings of the classifier's loss, which every loss function gets."""

    # cross-entropy, focal (1708.02002), generalised-cross-entropy (1805.07836) or squared-error
    # (2006.07322); for images with several labels bce, binary-focal or asymmetric (2009.14119)
    kind: str = "cross-entropy"
    # exponent of the weight (1 - probability) in focal and binary-focal; 0: cross-entropy
    focal_gamma: NonNegativeFloat = 2.0
    # generalised-cross-entropy: 1 is the mean absolute error, near 0 is cross-entropy; larger
    # values are more robust to wrong labels
    gce_q: PositiveFraction = 0.7
    # fraction of every target that is spread over all classes, or with several labels over 0 and 1
    label_smoothing: Decay = 0.1
    # final value of label_smoothing, reached by a cosine over all steps; null: constant
    label_smoothing_final: Decay | None = None
    # {class: weight}, 1 for other classes; balanced: 1 / frequency. With several labels an image:
    # weights of present labels
    class_weights: Literal["balanced"] | dict[str, NonNegativeFloat] | None = None
    # factor of log(class frequency), which is added to logits in training (2007.07314)
    logit_adjustment: NonNegativeFloat = 0.0
    # run of a classifier whose predictions are additional targets (distillation)
    teacher: str | None = None
    teacher_share: Probability = 1.0  # weight of the teacher's targets; the labels have 1 - weight
    temperature: PositiveFloat = 2.0  # temperature of both networks' predictions in distillation

    def check(self) -> None:
        refuse(
            (
                self.several and self.teacher,
                "loss.teacher is for one class an image; set loss.kind cross-entropy or squared-error",
            ),
            (
                self.logit_adjustment and (self.several or not self.function.softmax),
                "loss.logit_adjustment is for one class an image by a softmax; set loss.kind cross-entropy",
            ),
        )

    @property
    def function(self) -> "ClassifierLoss":
        """The loss named `kind`; raises UserError, with the most similar name, if there is none."""
        return entry(CLASSIFIER_LOSSES, self.kind, "loss.kind")

    @property
    def several(self) -> bool:
        """True if the loss is for images that may have several labels."""
        return self.function.several


@dataclass(frozen=True, kw_only=True)
class ClassifierLoss:
    """A loss function, `errors`, and its properties.

    `errors` is a function of logits and targets, both [n, classes], and of the loss's config
    section. It returns one value per sample, [n], or if `several` is True one per label, [n,
    classes]. Targets are soft: they may be mixed and smoothed. Raises UserError if `errors` returns
    another shape, such as a mean.
    """

    errors: Callable[[Tensor, Tensor, ClassifierLossConfig], Tensor]
    # True: an image may have several labels, and targets are in 0..1. False: targets add up to 1.
    several: bool = False
    # True if the loss is least where the softmax of the logits equals the class frequencies,
    # which `logit_adjustment` needs
    softmax: bool = True

    def __post_init__(self) -> None:
        config = ClassifierLossConfig.model_construct()
        shape = list(self.errors(torch.zeros(3, 2), torch.full((3, 2), 0.5), config).shape)
        expected = [3, 2] if self.several else [3]
        if shape != expected:
            raise UserError(
                f"a classifier's loss gives {shape} of logits [3, 2]; give {expected}, no mean"
            )


def focal(logits: Tensor, targets: Tensor, config: ClassifierLossConfig) -> Tensor:
    """Return the focal loss of the softmax, [n]: -(1 - p)^gamma log p (1708.02002, equation 4)."""
    log_p = logits.log_softmax(1)
    # For gamma below 1 the power has an infinite slope at 0.
    q = (-log_p.expm1()).clamp(min=torch.finfo(log_p.dtype).tiny)
    return -(targets * q**config.focal_gamma * log_p).sum(1)


def binary_focal(logits: Tensor, targets: Tensor, config: ClassifierLossConfig) -> Tensor:
    """Return the focal loss of each label's sigmoid, [n, classes] (1708.02002, equation 4)."""
    log_p, log_q = F.logsigmoid(logits), F.logsigmoid(-logits)
    present = (config.focal_gamma * log_q).exp() * log_p
    absent = (config.focal_gamma * log_p).exp() * log_q
    return -torch.lerp(absent, present, targets)


def generalised_cross_entropy(
    logits: Tensor, targets: Tensor, config: ClassifierLossConfig
) -> Tensor:
    """Return (1 - p^q) / q, [n], for the probability p of the target (1805.07836, equation 6)."""
    powers = config.gce_q * logits.log_softmax(1)
    return -(targets * powers.expm1()).sum(1) / config.gce_q


def asymmetric(logits: Tensor, targets: Tensor, _config: ClassifierLossConfig) -> Tensor:
    """Return the asymmetric loss of each label, [n, classes] (2009.14119, equations 4 to 7).

    The loss of an absent label with probability p is weighted by q^FOCUS with q = max(p - MARGIN,
    0).
    """
    q = (logits.sigmoid() - MARGIN).clamp(min=0)
    return -targets * F.logsigmoid(logits) - (1 - targets) * q**FOCUS * torch.log1p(-q)


CLASSIFIER_LOSSES = {
    "cross-entropy": ClassifierLoss(
        errors=lambda logits, targets, _: F.cross_entropy(logits, targets, reduction="none")
    ),
    "focal": ClassifierLoss(errors=focal, softmax=False),
    "generalised-cross-entropy": ClassifierLoss(errors=generalised_cross_entropy, softmax=False),
    # The error is that between logits and one-hot targets (2006.07322).
    "squared-error": ClassifierLoss(
        errors=lambda logits, targets, _: (logits - targets).square().mean(1), softmax=False
    ),
    "bce": ClassifierLoss(
        errors=lambda logits, targets, _: F.binary_cross_entropy_with_logits(
            logits, targets, reduction="none"
        ),
        several=True,
    ),
    "binary-focal": ClassifierLoss(errors=binary_focal, several=True),
    "asymmetric": ClassifierLoss(errors=asymmetric, several=True),
}


class Targets(NamedTuple):
    """The targets of n images: one class each, a mixture of two classes, or several labels."""

    labels: Tensor  # int64 [n]; with several labels per image float [n, classes] of 0 and 1
    # Labels of the images that are mixed in, in the form of `labels`; None if none are.
    partner_labels: Tensor | None = None
    fraction: Tensor | None = None  # float [n]: fraction of `labels` in the mixture, 0 to 1
    weights: Tensor | None = None  # float [n]: weight of each sample's loss; None for 1
    is_counted: Tensor | None = None  # bool [n]: True for samples of the accuracy; None for all

    def rows(self, rows: slice) -> "Targets":
        return Targets(*(part if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def correct(self, logits: Tensor) -> Tensor:
        """Return the number of correct predictions, 0-d.

        A mixed sample counts as the fraction that the predicted class has in it. A sample with
        several labels counts as the fraction of all classes that are rightly predicted as present
        or absent.
        """
        if self.labels.is_floating_point():
            targets = soft_targets(self, logits.shape[1], logits.dtype)
            errors = (logits > 0).to(logits.dtype) - targets
            return (1 - errors.abs()).mean(1).sum()
        predicted = logits.argmax(1)
        if self.partner_labels is None or self.fraction is None:
            is_correct = predicted == self.labels
            return (is_correct if self.is_counted is None else is_correct & self.is_counted).sum()
        pairs = torch.stack([self.labels, self.partner_labels])
        is_label, is_partner = (predicted == pairs).to(logits.dtype)
        return _mixed(is_label, is_partner, self.fraction).sum()


def class_weight_list(
    config: ClassifierLossConfig,
    classes: Sequence[str],
    class_frequencies: Sequence[float],
) -> list[float] | None:
    """Return the weight of each class; None if the config has no class weights.

    Weights are scaled to a mean of 1 over the training images. So the loss of a batch can be
    divided by its size, which is the same on all ranks and in all micro-batches, whatever classes
    it holds. With several labels per image, the weights apply to the labels that an image has, and
    are not scaled.

    Args:
        class_frequencies: Relative frequency of each class in training. With several labels per
            image: the fraction of the images that have the label.

    Raises:
        UserError: A class is unknown, or all weights are 0.
    """
    if config.class_weights is None:
        return None
    if config.class_weights == "balanced":
        weights = [(1 / f - config.several) if f else 0.0 for f in class_frequencies]
    else:
        for name in config.class_weights:
            if name not in classes:
                raise UserError(
                    f"loss.class_weights: no class {name!r} in the data{did_you_mean(name, list(classes))}"
                )
        weights = [float(config.class_weights.get(name, 1.0)) for name in classes]
    if config.several:
        return weights
    total = sum(weight * f for weight, f in zip(weights, class_frequencies, strict=True))
    mean = total / sum(class_frequencies)
    if not mean > 0:
        raise UserError(
            "loss.class_weights: all classes in the data have weight 0; give one of them more"
        )
    return [weight / mean for weight in weights]


class Criterion:
    """The classifier's loss with its class weights, the prior of the classes, and a teacher.

    Raises UserError for weights of unknown classes, and for a teacher that has other classes.
    """

    def __init__(
        self,
        config: ClassifierLossConfig,
        dataset: Dataset,
        label_frequencies: Sequence[float],  # in training, of each class or label set
        precision: Precision,
        steps: int,  # length of the schedule of label smoothing
    ) -> None:
        self.config = config
        self.steps = steps
        self.precision = precision
        device = precision.device
        frequencies = np.array(label_frequencies)
        if config.several:
            frequencies = frequencies @ dataset.meta.multi_hot / frequencies.sum()
        class_frequencies = frequencies.tolist()
        self.smoothing = torch.tensor(config.label_smoothing, device=device)  # 0-d
        self.weights: Tensor | None = None  # [classes]
        weights = class_weight_list(config, dataset.meta.classes, class_frequencies)
        if weights is not None:
            self.weights = torch.tensor(weights, device=device)
        self.prior: Tensor | None = None  # [classes]
        if config.logit_adjustment:
            relative = [f / max(class_frequencies) for f in class_frequencies]  # 2007.07314
            logs = [math.log(max(f, MIN_FREQUENCY)) for f in relative]
            self.prior = torch.tensor([config.logit_adjustment * x for x in logs], device=device)
        self.teacher: Teacher | None = None
        if config.teacher:
            self.teacher = Teacher("loss.teacher", config.teacher, dataset, device)

    def at(self, step: int) -> None:
        """Set the label smoothing of update number `step`."""
        start, end = self.config.label_smoothing, self.config.label_smoothing_final
        if end is not None:
            self.smoothing.fill_(cosine(start, end, step, self.steps))

    def __call__(self, logits: Tensor, targets: Targets, images: Tensor) -> Tensor:
        """Return the sum of the samples' losses, 0-d, from the network's logits for `images`.

        If there is a teacher, it computes its own logits for `images`.
        """
        smoothing = self.smoothing.to(logits.dtype)
        loss = classifier_loss(logits, targets, self.config, self.weights, self.prior, smoothing)
        if self.teacher is None:
            return loss
        with self.precision.autocast():
            teacher_logits = self.teacher(images)
        taught = distillation_loss(logits, teacher_logits, targets, self.config, self.weights)
        return torch.lerp(loss, taught, self.config.teacher_share)


def classifier_loss(
    logits: Tensor,  # [n, classes]
    targets: Targets,
    config: ClassifierLossConfig,
    weights: Tensor | None,  # [classes]: class weights
    prior: Tensor | None,  # [classes]: added to the logits
    smoothing: Tensor | float | None,  # 0-d; None: the config's
) -> Tensor:
    """Return the sum of the weighted losses of the samples, 0-d.

    The caller divides it by the global batch size.

    With one label per image, the weight of a sample's class applies to its whole loss, and so to
    its smoothed label. If each class of a smoothed label had its own weight, the rarest class would
    become the largest target of every image.

    A mixed sample has a mixed label. With class weights, its loss is the mean of its losses for
    both labels, weighted by their fractions. With a prior, label smoothing is proportional to the
    prior's softmax, because uniform smoothing would undo the prior.
    """
    loss = config.function
    classes = logits.shape[1]
    if smoothing is None:
        smoothing = config.label_smoothing
    if prior is None:
        smooth = logits.new_full((classes,), 1 / (2 if loss.several else classes))
    else:
        logits, smooth = logits + prior, prior.to(logits.dtype).softmax(0)

    def errors(hard: Tensor, label_weights: Tensor | None) -> Tensor:
        soft = torch.lerp(hard, smooth.expand_as(hard), smoothing)
        values = loss.errors(logits, soft, config)
        if label_weights is not None:
            values = values * label_weights
        return values.mean(1) if loss.several else values

    if weights is None:
        return _total(errors(soft_targets(targets, classes, logits.dtype), None), None, targets)

    def weighted_errors(labels: Tensor) -> Tensor:
        hard = one_hot(labels, classes, logits.dtype)
        return errors(hard, torch.where(hard > 0, weights, 1) if loss.several else weights[labels])

    partner_errors = None
    if targets.partner_labels is not None:
        partner_errors = weighted_errors(targets.partner_labels)
    return _total(weighted_errors(targets.labels), partner_errors, targets)


def _total(label_errors: Tensor, partner_errors: Tensor | None, targets: Targets) -> Tensor:
    """Return the sum of the samples' errors, 0-d, after mixing and weighting.

    `label_errors` and `partner_errors`, [n], are the errors for the labels of the samples and of
    their partners.
    """
    errors = _mixed(label_errors, partner_errors, targets.fraction)
    return (errors if targets.weights is None else errors * targets.weights).sum()


def _mixed(values: Tensor, partner_values: Tensor | None, fraction: Tensor | None) -> Tensor:
    if partner_values is None or fraction is None:
        return values
    return torch.lerp(partner_values, values, fraction.to(values.dtype))


def distillation_loss(
    logits: Tensor,  # z [n, classes]
    teacher_logits: Tensor,  # t [n, classes]
    targets: Targets,
    config: ClassifierLossConfig,
    weights: Tensor | None,  # [classes]: class weights
) -> Tensor:
    """Return the distillation loss, 0-d (Hinton et al. 2015, 1503.02531).

    It is the sum of T^2 KL(softmax(t / T) || softmax(z / T)) over the samples. Each sample has the
    weight of its class. T is the config's temperature.
    """
    temperature = config.temperature
    student = (logits / temperature).log_softmax(1)
    teacher = (teacher_logits.to(logits.dtype) / temperature).log_softmax(1)
    errors = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1) * temperature**2
    label_errors, partner_errors = errors, None
    if weights is not None:
        label_errors = errors * weights[targets.labels]
        if targets.partner_labels is not None:
            partner_errors = errors * weights[targets.partner_labels]
    return _total(label_errors, partner_errors, targets)


def sample_weights(
    is_synthetic: Tensor,
    weight: float,
    is_partner_synthetic: Tensor | None,
    fraction: Tensor | None,
) -> Tensor:
    """Return the weight of each sample's loss, float [n].

    It is `weight` for synthetic images, and 1 for real images. For a mixed sample it is the mean of
    both images' weights, according to `fraction`.

    Args:
        is_synthetic: bool [n].
        weight: Weight of a synthetic image.
        is_partner_synthetic: bool [n], for the images that are mixed in; None if none are.
        fraction: float [n], the fraction of the sample's label in the mixture; the rest is its
            partner's.
    """
    partner_weights = None
    if is_partner_synthetic is not None:
        partner_weights = torch.where(is_partner_synthetic, weight, 1.0)
    return _mixed(torch.where(is_synthetic, weight, 1.0), partner_weights, fraction)


def soft_targets(targets: Targets, classes: int, dtype: torch.dtype) -> Tensor:
    """Return the targets of the samples, [n, classes] in [0, 1].

    Rows add up to 1 if each image has one label.
    """
    if targets.partner_labels is None or targets.fraction is None:
        return one_hot(targets.labels, classes, dtype)
    pairs = torch.stack([targets.labels, targets.partner_labels])
    hard, partners = one_hot(pairs, classes, dtype)
    return _mixed(hard, partners, targets.fraction[:, None])
