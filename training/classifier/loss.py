"""The classifier's loss: cross entropy or the squared error of one label an image, the binary cross entropy or the
asymmetric loss of several; with soft targets and class weights.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.models.gan import one_hot
from duetgan.utils.config.cli import did_you_mean
from duetgan.utils.config.model import Config, Decay, NonNegativeFloat, PositiveFloat, Probability
from duetgan.utils.errors import UserError

FOCUS, MARGIN = 4, 0.05  # of the asymmetric loss for absent labels; the paper's own
LEAST_SHARE = 1e-9  # of the largest class


class ClassifierLossConfig(Config):
    """Settings of the loss."""

    # squared-error: of the outputs against one-hot targets (2006.07322). bce, asymmetric (2009.14119): for several
    # labels an image
    kind: Literal["cross-entropy", "squared-error", "bce", "asymmetric"] = "cross-entropy"
    label_smoothing: Decay = 0.1  # this share of every target is spread over all classes, or over yes and no
    # by name, others 1; balanced: 1 / frequency. Several labels: what those that are there count
    class_weights: Literal["balanced"] | dict[str, NonNegativeFloat] | None = None
    logit_adjustment: NonNegativeFloat = 0.0  # times log(class's share), added to logits in training (2007.07314)
    teacher: str | None = None  # run of a classifier whose answers to the same images are targets, too (distillation)
    teacher_share: Probability = 1.0  # of the loss, that is to these; the rest is to the labels
    temperature: PositiveFloat = 2.0  # of its and the network's answers

    def check(self) -> None:
        for key in ("teacher", "logit_adjustment"):
            if self.several and getattr(self, key):
                raise UserError(f"loss.{key} is for one class an image; set loss.kind cross-entropy or squared-error")

    @property
    def several(self) -> bool:
        """Whether it is for images that may have several labels."""
        return self.kind in ("bce", "asymmetric")


class Targets(NamedTuple):
    """What n images show: classes, or two classes in proportion; of several labels an image which, as 0 and 1."""

    labels: Tensor  # int64 [n]; float [n, classes] of several labels
    others: Tensor | None = None  # likewise: the partners' labels; None: nothing is mixed
    own: Tensor | None = None  # float [n]: the share of `labels`, 0 to 1
    weights: Tensor | None = None  # float [n]: what each sample's loss counts; None: 1

    def rows(self, rows: slice) -> "Targets":
        return Targets(*(part if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def correct(self, logits: Tensor) -> Tensor:
        """Number of correct predictions, 0-d; a mixed sample counts by the share of the predicted class, one of several
        labels by the share of its classes that are told rightly.
        """
        if self.labels.is_floating_point():
            told = (logits > 0).to(logits.dtype) - soft_targets(self, logits.shape[1], logits.dtype)
            return (1 - told.abs()).mean(1).sum()
        predicted = logits.argmax(1)
        if self.others is None or self.own is None:
            return (predicted == self.labels).sum()
        own = self.own.to(torch.promote_types(self.own.dtype, logits.dtype))  # the sum is as exact as the loss
        return (own * (predicted == self.labels) + (1 - own) * (predicted == self.others)).sum()


def class_weight_list(
    config: ClassifierLossConfig,
    classes: Sequence[str],
    shares: Sequence[float],  # how often each class is seen in training, relative to the others
) -> list[float] | None:
    """Each class's weight, scaled so that its mean over the images that are seen is 1; None without weights. Of several
    labels (then `shares` are of the images, and add up to no 1) the weight of an image that has it, as it is.

    So a batch's loss can be divided by its size, the same on all ranks and in all micro-batches, whatever classes it
    holds. Raises UserError for an unknown class, or weights of 0 only.
    """
    if config.class_weights is None:
        return None
    if config.class_weights == "balanced":
        weights = [(1 / share - config.several) if share else 0.0 for share in shares]
    else:
        for name in config.class_weights:
            if name not in classes:
                hint = did_you_mean(name, list(classes))
                raise UserError(f"loss.class_weights: no class {name!r} in the data{hint}")
        weights = [float(config.class_weights.get(name, 1.0)) for name in classes]
    if config.several:
        return weights
    mean = sum(w * share for w, share in zip(weights, shares, strict=True)) / sum(shares)
    if not mean > 0:
        raise UserError("loss.class_weights: all classes in the data have weight 0; give one of them more")
    return [weight / mean for weight in weights]


def by_class(
    config: ClassifierLossConfig, classes: Sequence[str], shares: Sequence[float], device: torch.device
) -> list[Tensor | None]:
    """`class_weight_list`, and what `logit_adjustment` adds to each class's logit; None for what is not asked for."""
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
    """The sum over the samples, each by its weight, 0-d; the caller divides it by the global batch.

    Cross entropy is -sum_c w_c t_c log softmax(z)_c, the squared error (t . w) mean_c (z_c - t_c)^2, with t the target
    after smoothing and mixing (for the squared error's weight: before smoothing). With p_c = sigmoid(z_c) the binary
    cross entropy is mean_c -(w_c t_c log p_c + (1 - t_c) log(1 - p_c)); the asymmetric loss (2009.14119, equations 4
    to 7) has q_c^FOCUS log(1 - q_c), q_c = max(p_c - MARGIN, 0), in the last term.
    """
    logits = logits if prior is None else logits + prior
    reduction, smoothing = "sum" if targets.weights is None else "none", config.label_smoothing
    if config.kind == "cross-entropy" and targets.others is None:
        errors = F.cross_entropy(logits, targets.labels, weights, label_smoothing=smoothing, reduction=reduction)
        return errors if targets.weights is None else (errors * targets.weights).sum()
    soft = soft_targets(targets, logits.shape[1], logits.dtype, smoothing)
    if config.kind == "cross-entropy":
        errors = F.cross_entropy(logits, soft, weights, reduction=reduction)
    elif config.kind == "bce":
        errors = F.binary_cross_entropy_with_logits(logits, soft, pos_weight=weights, reduction="none").mean(1)
    elif config.kind == "asymmetric":
        q = (logits.sigmoid() - MARGIN).clamp(min=0)
        errors = -soft * F.logsigmoid(logits) * (1 if weights is None else weights)
        errors = (errors - (1 - soft) * q**FOCUS * torch.log1p(-q)).mean(1)
    else:
        errors = (logits - soft).square().mean(1)
        if weights is not None:
            errors = errors * (soft_targets(targets, logits.shape[1], logits.dtype) @ weights)
    return (errors if targets.weights is None else errors * targets.weights).sum()


def distilled(
    loss: Tensor, logits: Tensor, teacher: Tensor | None, targets: Targets, config: ClassifierLossConfig
) -> Tensor:
    """A `classifier_loss` and, by `teacher_share`, that of a teacher's logits t [n, classes], if any: the sum over the
    samples of T^2 KL(softmax(t / T) || softmax(z / T)), 0-d (Hinton et al. 2015, 1503.02531).
    """
    if teacher is None:
        return loss
    own, wanted = ((each / config.temperature).log_softmax(1) for each in (logits, teacher.to(logits.dtype)))
    errors = F.kl_div(own, wanted, reduction="none", log_target=True).sum(1) * config.temperature**2
    taught = (errors if targets.weights is None else errors * targets.weights).sum()
    return torch.lerp(loss, taught, config.teacher_share)


def sample_weights(synthetic: Tensor, weight: float, others: Tensor | None, own: Tensor | None) -> Tensor:
    """What each sample's loss counts, float [n]: `weight` for synthetic images (bool [n]), 1 for real ones; for a mixed
    sample the mean of both by their shares of the label, `own` and its partner's (`others`, bool [n]).
    """
    first = torch.where(synthetic, weight, 1.0)
    if others is None or own is None:
        return first
    return torch.lerp(torch.where(others, weight, 1.0), first, own.to(first.dtype))


def soft_targets(targets: Targets, classes: int, dtype: torch.dtype, smoothing: float = 0.0) -> Tensor:
    """The targets' distributions [n, classes]; of several labels each one's share, in [0, 1]."""
    soft = one_hot(targets.labels, classes, dtype)
    if targets.others is not None and targets.own is not None:
        soft = torch.lerp(one_hot(targets.others, classes, dtype), soft, targets.own.to(dtype)[:, None])
    over = 2 if targets.labels.is_floating_point() else classes
    return soft * (1 - smoothing) + smoothing / over if smoothing else soft
