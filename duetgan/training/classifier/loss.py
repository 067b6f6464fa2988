"""The classifier's losses, with soft targets and class weights. Another loss is one entry in
`CLASSIFIER_LOSSES`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.models.gan import one_hot
from duetgan.utils.config.cli import entry
from duetgan.utils.config.model import Config, Decay, NonNegativeFloat, PositiveFloat, Probability
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.text import did_you_mean

FOCUS, MARGIN = 4, 0.05  # of the asymmetric loss for absent labels; the paper's own
LEAST_SHARE = 1e-9  # of the largest class


@dataclass(frozen=True, kw_only=True)
class ClassifierLoss:
    """A loss of logits and targets, both [n, classes]: one value a sample, [n], or with `several`
    one a label.

    Raises UserError for a loss that is a mean.
    """

    errors: Callable[[Tensor, Tensor], Tensor]
    # for images that may have several labels: targets are 0 and 1, else they add up to 1
    several: bool = False
    softmax: bool = True  # the logits are a softmax's, so that `logit_adjustment` applies

    def __post_init__(self) -> None:
        given, expected = (
            list(self.errors(torch.zeros(3, 2), torch.full((3, 2), 0.5)).shape),
            [3, 2][: 1 + self.several],
        )
        if given != expected:
            raise UserError(
                f"a classifier's loss gives {given} of logits [3, 2]; give {expected}, no mean"
            )


def asymmetric(logits: Tensor, targets: Tensor) -> Tensor:
    """2009.14119, equations 4 to 7: absent labels count by q^FOCUS, q = max(p - MARGIN, 0)."""
    q = (logits.sigmoid() - MARGIN).clamp(min=0)
    return -targets * F.logsigmoid(logits) - (1 - targets) * q**FOCUS * torch.log1p(-q)


CLASSIFIER_LOSSES = {
    "cross-entropy": ClassifierLoss(
        errors=lambda logits, targets: F.cross_entropy(logits, targets, reduction="none")
    ),
    # of the outputs against one-hot targets (2006.07322)
    "squared-error": ClassifierLoss(
        errors=lambda logits, targets: (logits - targets).square().mean(1), softmax=False
    ),
    "bce": ClassifierLoss(
        errors=lambda logits, targets: F.binary_cross_entropy_with_logits(
            logits, targets, reduction="none"
        ),
        several=True,
    ),
    "asymmetric": ClassifierLoss(errors=asymmetric, several=True),
}


class ClassifierLossConfig(Config):
    """Settings of the loss."""

    # cross-entropy, squared-error (2006.07322); for several labels an image bce, asymmetric
    # (2009.14119); see loss.py
    kind: str = "cross-entropy"
    # this share of every target is spread over all classes, or over yes and no
    label_smoothing: Decay = 0.1
    # by name, others 1; balanced: 1 / frequency. Several labels: what those that are there count
    class_weights: Literal["balanced"] | dict[str, NonNegativeFloat] | None = None
    # times log(class's share), added to logits in training (2007.07314)
    logit_adjustment: NonNegativeFloat = 0.0
    # run of a classifier whose answers to the same images are targets, too (distillation)
    teacher: str | None = None
    teacher_share: Probability = 1.0  # of the loss, that is to these; the rest is to the labels
    temperature: PositiveFloat = 2.0  # of its and the network's answers

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
    def function(self) -> ClassifierLoss:
        """The kind's entry in the table; UserError, with the near one, for a name that is not
        there.
        """
        return entry(CLASSIFIER_LOSSES, self.kind, "loss.kind")

    @property
    def several(self) -> bool:
        """Return whether the loss is for images that may have several labels."""
        return self.function.several


class Targets(NamedTuple):
    """What n images show: classes, or two classes in proportion; of several labels an image which,
    as 0 and 1.
    """

    labels: Tensor  # int64 [n]; float [n, classes] of several labels
    others: Tensor | None = None  # likewise: the partners' labels; None: nothing is mixed
    own: Tensor | None = None  # float [n]: the share of `labels`, 0 to 1
    weights: Tensor | None = None  # float [n]: what each sample's loss counts; None: 1

    def rows(self, rows: slice) -> "Targets":
        return Targets(*(part if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def correct(self, logits: Tensor) -> Tensor:
        """Number of correct predictions, 0-d; a mixed sample counts by the share of the predicted
        class, one of several labels by the share of its classes that are predicted correctly.
        """
        if self.labels.is_floating_point():
            errors = (logits > 0).to(logits.dtype) - soft_targets(
                self, logits.shape[1], logits.dtype
            )
            return (1 - errors.abs()).mean(1).sum()
        predicted = logits.argmax(1)
        if self.others is None or self.own is None:
            return (predicted == self.labels).sum()
        # the sum is as exact as the loss
        own = self.own.to(torch.promote_types(self.own.dtype, logits.dtype))
        return (own * (predicted == self.labels) + (1 - own) * (predicted == self.others)).sum()


def class_weight_list(
    config: ClassifierLossConfig,
    classes: Sequence[str],
    shares: Sequence[float],  # how often each class is seen in training, relative to the others
) -> list[float] | None:
    """Each class's weight, scaled so that its mean over the images that are seen is 1; None without
    weights. Of several labels (then `shares` are of the images, and add up to no 1) the weight of
    an image that has it, as it is.

    So a batch's loss can be divided by its size, the same on all ranks and in all micro-batches,
    whatever classes it holds. Raises UserError for an unknown class, or weights of 0 only.
    """
    if config.class_weights is None:
        return None
    if config.class_weights == "balanced":
        weights = [(1 / share - config.several) if share else 0.0 for share in shares]
    else:
        for name in config.class_weights:
            if name not in classes:
                raise UserError(
                    f"loss.class_weights: no class {name!r} in the data{did_you_mean(name, list(classes))}"
                )
        weights = [float(config.class_weights.get(name, 1.0)) for name in classes]
    if config.several:
        return weights
    mean = sum(w * share for w, share in zip(weights, shares, strict=True)) / sum(shares)
    if not mean > 0:
        raise UserError(
            "loss.class_weights: all classes in the data have weight 0; give one of them more"
        )
    return [weight / mean for weight in weights]


def by_class(
    config: ClassifierLossConfig,
    classes: Sequence[str],
    shares: Sequence[float],
    device: torch.device,
) -> list[Tensor | None]:
    """`class_weight_list`, and what `logit_adjustment` adds to each class's logit; None for what is
    not asked for.
    """
    tau, most = config.logit_adjustment, max(shares)
    prior = [tau * math.log(max(share / most, LEAST_SHARE)) for share in shares] if tau else None
    given = class_weight_list(config, classes, shares), prior
    return [None if each is None else torch.tensor(each, device=device) for each in given]


def classifier_loss(
    logits: Tensor,  # [n, classes]
    targets: Targets,
    config: ClassifierLossConfig,
    weights: Tensor | None = None,  # [classes], as by `by_class`
    prior: Tensor | None = None,  # [classes], likewise
) -> Tensor:
    """Return the sum over the samples of the loss to their labels, each by its weight, 0-d.

    The caller divides it by the global batch. A sample's loss, to its smoothed label, counts by
    that label's weight, and with it the share of the label that is spread: were that share weighted
    class by class, the rarest class would have the largest target of every image. A mixed sample
    has the mean of the losses to both labels. Where a prior is added, labels are spread in its
    proportions: spread evenly, they would undo it.
    """
    loss, smoothing, classes = config.function, config.label_smoothing, logits.shape[1]
    if config.kind == "cross-entropy" and weights is None and prior is None:
        return _cross_entropy(logits, targets, smoothing)
    even = logits.new_full((classes,), 1 / (2 if loss.several else classes))
    logits, even = (
        (logits, even) if prior is None else (logits + prior, prior.to(logits.dtype).softmax(0))
    )

    def errors(labels: Tensor) -> Tensor:
        hard = one_hot(labels, classes, logits.dtype)
        each = loss.errors(
            logits, torch.lerp(hard, even.expand_as(hard), smoothing) if smoothing else hard
        )
        if weights is not None:
            each = each * (torch.where(hard > 0, weights, 1) if loss.several else weights[labels])
        return each.mean(1) if loss.several else each

    return _total(
        errors(targets.labels), None if targets.others is None else errors(targets.others), targets
    )


def _cross_entropy(logits: Tensor, targets: Targets, smoothing: float) -> Tensor:
    """Return the same of a cross entropy without class weights, by torch's fused function."""
    reduction = "sum" if targets.weights is None else "none"
    if targets.others is None:
        errors = F.cross_entropy(
            logits, targets.labels, label_smoothing=smoothing, reduction=reduction
        )
    else:
        soft = soft_targets(targets, logits.shape[1], logits.dtype)
        soft = soft * (1 - smoothing) + smoothing / logits.shape[1] if smoothing else soft
        errors = F.cross_entropy(logits, soft, reduction=reduction)
    return errors if targets.weights is None else (errors * targets.weights).sum()


def _total(own: Tensor, others: Tensor | None, targets: Targets) -> Tensor:
    """Return the sum over the samples, by their weights, of values [n] for their labels and for
    their partners'.
    """
    own = _mixed(own, others, targets.own)
    return (own if targets.weights is None else own * targets.weights).sum()


def _mixed(own: Tensor, others: Tensor | None, fraction: Tensor | None) -> Tensor:
    """Return the mean of values for labels and for partners' labels by the labels' fraction;
    without partners `own`.
    """
    return (
        own
        if others is None or fraction is None
        else torch.lerp(others, own, fraction.to(own.dtype))
    )


def distilled(
    loss: Tensor,
    logits: Tensor,
    teacher: Tensor | None,
    targets: Targets,
    config: ClassifierLossConfig,
    weights: Tensor | None = None,  # [classes], as by `by_class`
) -> Tensor:
    """A `classifier_loss` and, by `teacher_share`, that of a teacher's logits t [n, classes], if
    any: the sum over the samples, each by its label's weight, of T^2 KL(softmax(t / T) || softmax(z
    / T)), 0-d (Hinton et al. 2015, 1503.02531).
    """
    if teacher is None:
        return loss
    own, wanted = (
        (each / config.temperature).log_softmax(1) for each in (logits, teacher.to(logits.dtype))
    )
    errors = F.kl_div(own, wanted, reduction="none", log_target=True).sum(1) * config.temperature**2
    of_labels, others = errors, None
    if weights is not None:
        of_labels = errors * weights[targets.labels]
        others = None if targets.others is None else errors * weights[targets.others]
    return torch.lerp(loss, _total(of_labels, others, targets), config.teacher_share)


def sample_weights(
    synthetic: Tensor, weight: float, others: Tensor | None, own: Tensor | None
) -> Tensor:
    """What each sample's loss counts, float [n]: `weight` for synthetic images (bool [n]), 1 for
    real ones; for a mixed sample the mean of both by their shares of the label, `own` and its
    partner's (`others`, bool [n]).
    """
    partners = None if others is None else torch.where(others, weight, 1.0)
    return _mixed(torch.where(synthetic, weight, 1.0), partners, own)


def soft_targets(targets: Targets, classes: int, dtype: torch.dtype) -> Tensor:
    """The targets' distributions [n, classes]; of several labels each one's share, in [0, 1]."""
    partners = None if targets.others is None else one_hot(targets.others, classes, dtype)
    fraction = None if targets.own is None else targets.own[:, None]
    return _mixed(one_hot(targets.labels, classes, dtype), partners, fraction)
