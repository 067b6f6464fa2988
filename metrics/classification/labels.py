"""A classifier's answers to images that may have several labels or none, and its figures: pure functions, as those of
metrics/classification/answers.py are. A label counts as named where its probability reaches its threshold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from duetgan.metrics.classification.answers import Ranking, rankings_of
from duetgan.metrics.intervals import Measured
from duetgan.utils.errors import UserError


@dataclass(frozen=True)
class LabelAnswers:
    """What figures are made of. Raises UserError for no image."""

    logits: Tensor  # float32 [n, K]
    labels: Tensor  # bool [n, K]: which of the labels each image has
    names: Sequence[str]  # [K]
    thresholds: Tensor  # float [K]: the probability from which on a label is named

    def __post_init__(self) -> None:
        if self.logits.shape != self.labels.shape or self.logits.shape[1] != len(self.names):
            raise ValueError(f"logits {list(self.logits.shape)} and labels {list(self.labels.shape)} do not fit")
        if not len(self.labels):
            raise UserError("there is no image to evaluate the classifier on; give some with --data")

    @cached_property
    def probabilities(self) -> Tensor:
        """float64 [n, K]."""
        return self.logits.double().sigmoid()

    @cached_property
    def predicted(self) -> Tensor:
        """bool [n, K]: which labels are named."""
        return self.probabilities >= self.thresholds.double()

    @cached_property
    def hits(self) -> Tensor:
        """bool [n]: whether exactly its labels are named."""
        return (self.predicted == self.labels).all(1)

    @cached_property
    def confidence(self) -> Tensor:
        """float64 [n]: of the wrong decisions on each image's labels the surest one's, 0.0 where there is none."""
        return ((self.probabilities - self.labels.double()).abs() * (self.predicted != self.labels)).amax(1)

    def words(self, label: Tensor) -> str:
        """What a set of labels, bool [K], is called."""
        return "; ".join(name for name, there in zip(self.names, label.tolist(), strict=True) if there) or "no label"

    @cached_property
    def rankings(self) -> list[Ranking | None]:
        """Of the images by each label's probability; None for a label that no image has, or that all have."""
        return rankings_of(self.probabilities, self.labels.T)

    @cached_property
    def tallies(self) -> tuple[list[int], list[int], list[int]]:
        """Of each label: images of which it is named rightly, that have it, of which it is named."""
        hits = self.predicted & self.labels
        return hits.sum(0).tolist(), self.labels.sum(0).tolist(), self.predicted.sum(0).tolist()

    @cached_property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Of F1 = sum of the first / sum of the second, each image's part in every label: float64 [n, K], twice the
        labels that are named rightly, and the labels that are there plus those that are named.
        """
        return 2.0 * (self.predicted & self.labels).double(), self.predicted.double() + self.labels.double()


def micro_f1(answers: LabelAnswers) -> Measured:
    """F1 of all decisions together; None where nothing is there and nothing is named."""
    return _ratio(*(part.sum(1) for part in answers.parts))


def macro_f1(answers: LabelAnswers) -> Measured:
    """The mean of the labels' F1; one that no image has and none is named to have is left out."""
    each = [_ratio(above, below) for above, below in zip(*(part.T for part in answers.parts), strict=True)]
    there = [one for one in each if one.value is not None]
    if not there:
        return Measured(None, by_class=[None] * len(each))
    mean = Measured.influenced(
        sum(one.value or 0.0 for one in there) / len(there),
        np.mean([np.asarray(one.influence) for one in there], axis=0),
    )
    return Measured(mean.value, mean.interval, [one.value for one in each], influence=mean.influence)


def _ratio(above: Tensor, below: Tensor) -> Measured:
    """The sum of `above` over that of `below`, both [n], and each image's influence on it; None of nothing."""
    total = float(below.sum())
    if not total:
        return Measured(None)
    value = float(above.sum()) / total
    return Measured.influenced(value, len(above) * (above - value * below) / total)


def exact_match(answers: LabelAnswers) -> Measured:
    """Share of images of which exactly their labels are named."""
    return Measured.share(answers.hits)


def best_thresholds(answers: LabelAnswers) -> list[float]:
    """Each label's threshold with the best F1 on these images, the highest of equal ones, in the middle between two
    probabilities; 0.5 for a label that no image has.
    """
    found = []
    for scores, present in zip(answers.probabilities.T.numpy(), answers.labels.T.numpy(), strict=True):
        levels, level = np.unique(scores, return_inverse=True)  # ascending
        hits = np.bincount(level[present], minlength=len(levels))[::-1].cumsum()
        named = np.bincount(level, minlength=len(levels))[::-1].cumsum()
        best = len(levels) - 1 - int((2 * hits / (named + present.sum())).argmax())
        below = levels[best - 1] if best else 0.0
        found.append(float((levels[best] + below) / 2) if present.any() else 0.5)
    return found
