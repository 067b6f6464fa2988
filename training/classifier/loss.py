"""The classifier's loss: cross entropy or the squared error, with soft targets and class weights."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.utils.config.cli import did_you_mean
from duetgan.utils.config.model import Config, Decay, NonNegativeFloat
from duetgan.utils.errors import UserError


class ClassifierLossConfig(Config):
    """Settings of the loss."""

    # squared-error: of the outputs against one-hot targets (2006.07322); its outputs are no log-probabilities
    kind: Literal["cross-entropy", "squared-error"] = "cross-entropy"
    label_smoothing: Decay = 0.1  # this share of every target is spread over all classes
    # by name, others 1; balanced: 1 / frequency
    class_weights: Literal["balanced"] | dict[str, NonNegativeFloat] | None = None


class Targets(NamedTuple):
    """What n images show: classes, or two classes in proportion."""

    labels: Tensor  # int64 [n]
    others: Tensor | None = None  # int64 [n]: the partners' labels; None: nothing is mixed
    own: Tensor | None = None  # float [n]: the share of `labels`, 0 to 1
    weights: Tensor | None = None  # float [n]: what each sample's loss counts; None: 1

    def rows(self, rows: slice) -> "Targets":
        return Targets(*(part if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def correct(self, logits: Tensor) -> Tensor:
        """Number of correct predictions, 0-d; a mixed sample counts by the share of the predicted class."""
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
    """Each class's weight, scaled so that its mean over the images that are seen is 1; None without weights.

    So a batch's loss can be divided by its size, the same on all ranks and in all micro-batches, whatever classes it
    holds. Raises UserError for an unknown class, or weights of 0 only.
    """
    if config.class_weights is None:
        return None
    if config.class_weights == "balanced":
        weights = [1 / share if share else 0.0 for share in shares]
    else:
        for name in config.class_weights:
            if name not in classes:
                hint = did_you_mean(name, list(classes))
                raise UserError(f"loss.class_weights: no class {name!r} in the data{hint}")
        weights = [float(config.class_weights.get(name, 1.0)) for name in classes]
    mean = sum(w * share for w, share in zip(weights, shares, strict=True)) / sum(shares)
    if not mean > 0:
        raise UserError("loss.class_weights: all classes in the data have weight 0; give one of them more")
    return [weight / mean for weight in weights]


def classifier_loss(
    logits: Tensor,  # [n, classes]
    targets: Targets,
    config: ClassifierLossConfig,
    weights: Tensor | None = None,  # [classes], as by class_weight_list
) -> Tensor:
    """The sum over the samples, each by its weight, 0-d; the caller divides it by the global batch.

    Cross entropy is -sum_c w_c t_c log softmax(z)_c, the squared error (t . w) mean_c (z_c - t_c)^2, with t the target
    after smoothing and mixing (for the squared error's weight: before smoothing).
    """
    if config.kind == "cross-entropy":
        reduction = "sum" if targets.weights is None else "none"
        if targets.others is None or targets.own is None:
            smoothing = config.label_smoothing
            losses = F.cross_entropy(logits, targets.labels, weights, label_smoothing=smoothing, reduction=reduction)
        else:
            soft = soft_targets(targets, logits.shape[1], logits.dtype, config.label_smoothing)
            losses = F.cross_entropy(logits, soft, weights, reduction=reduction)
        return losses if targets.weights is None else (losses * targets.weights).sum()
    soft = soft_targets(targets, logits.shape[1], logits.dtype, config.label_smoothing)
    errors = (logits - soft).square().mean(1)
    if weights is not None:
        errors = errors * (soft_targets(targets, logits.shape[1], logits.dtype) @ weights)
    if targets.weights is not None:
        errors = errors * targets.weights
    return errors.sum()


def sample_weights(synthetic: Tensor, weight: float, others: Tensor | None, own: Tensor | None) -> Tensor:
    """What each sample's loss counts, float [n]: `weight` for synthetic images (bool [n]), 1 for real ones; for a mixed
    sample the mean of both by their shares of the label, `own` and its partner's (`others`, bool [n]).
    """
    first = torch.where(synthetic, weight, 1.0)
    if others is None or own is None:
        return first
    return torch.lerp(torch.where(others, weight, 1.0), first, own.to(first.dtype))


def soft_targets(targets: Targets, classes: int, dtype: torch.dtype, smoothing: float = 0.0) -> Tensor:
    """The targets' distributions [n, classes]."""
    soft = F.one_hot(targets.labels, classes).to(dtype)
    if targets.others is not None and targets.own is not None:
        soft = torch.lerp(F.one_hot(targets.others, classes).to(dtype), soft, targets.own.to(dtype)[:, None])
    return soft * (1 - smoothing) + smoothing / classes if smoothing else soft
