"""A classifier's answers to images that may have several labels or none, and its figures: pure
functions, as those of metrics/classification/answers.py are. A label counts as named where its
probability reaches its threshold.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from duetgan.metrics.classification.answers import Answers
from duetgan.metrics.intervals import Measured


@dataclass(frozen=True)
class LabelAnswers(Answers):
    """What figures are made of; `labels` are bool [n, K]: which each image has."""

    thresholds: Tensor  # float [K]: the probability from which on a label is named

    @cached_property
    def probabilities(self) -> Tensor:
        return self.logits.double().sigmoid()

    @cached_property
    def named(self) -> Tensor:
        return self.probabilities >= self.thresholds.double()

    @cached_property
    def confidence(self) -> Tensor:
        """float64 [n]: of the wrong decisions on each image's labels the surest one's, 0.0 where
        there is none.
        """
        return (
            (self.probabilities - self.labels.double()).abs() * (self.named != self.labels)
        ).amax(1)

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Of F1, the sum of the first over the sum of the second, each image's part in each label:
        float64 [n, K].
        """
        return 2.0 * (self.named & self.labels).double(), self.named.double() + self.labels.double()


def micro_f1(answers: LabelAnswers) -> Measured:
    """F1 of all decisions together; None where nothing is there and nothing is named."""
    return _ratio(*(part.sum(1) for part in answers.parts))


def macro_f1(answers: LabelAnswers) -> Measured:
    """The mean of the labels' F1; one that no image has and none is named to have is left out."""
    each = [
        _ratio(above, below)
        for above, below in zip(*(part.T for part in answers.parts), strict=True)
    ]
    there = [(one.value, one.influence) for one in each if one.value is not None]
    if not there:
        return Measured(None)
    values, influences = zip(*there, strict=True)
    return Measured.influenced(sum(values) / len(values), np.mean(influences, axis=0))


def _ratio(above: Tensor, below: Tensor) -> Measured:
    """The sum of `above` over that of `below`, both [n], and each image's influence on it; None of
    nothing.
    """
    total = float(below.sum())
    if not total:
        return Measured(None)
    value = float(above.sum()) / total
    return Measured.influenced(value, len(above) * (above - value * below) / total)


def best_thresholds(answers: Answers) -> list[float]:
    """Each label's threshold with the best F1 on these images, the highest of equal ones, in the
    middle between two probabilities; 0.5 for a label that no image has.
    """
    found = []
    for scores, present in zip(
        answers.probabilities.T.numpy(), answers.labels.T.numpy(), strict=True
    ):
        levels, level = np.unique(scores, return_inverse=True)  # ascending
        hits = np.bincount(level[present], minlength=len(levels))[::-1].cumsum()
        named = np.bincount(level, minlength=len(levels))[::-1].cumsum()
        best = len(levels) - 1 - int((2 * hits / (named + present.sum())).argmax())
        below = levels[best - 1] if best else 0.0
        found.append(float((levels[best] + below) / 2) if present.any() else 0.5)
    return found
