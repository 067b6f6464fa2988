"""Metrics of a classifier on images that may have several labels or none.

A label is predicted if its probability reaches the label's threshold.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from duetgan.metrics.classification.answers import Answers
from duetgan.metrics.intervals import Measured


@dataclass(frozen=True)
class LabelAnswers(Answers):
    """Logits and labels of images that may have several labels; `labels` are bool [n, K]."""

    thresholds: Tensor  # float [K]: smallest probability at which each label is predicted

    @cached_property
    def probabilities(self) -> Tensor:
        return self.logits.double().sigmoid()

    @cached_property
    def predicted_classes(self) -> Tensor:
        return self.probabilities >= self.thresholds.double()

    @cached_property
    def confidence(self) -> Tensor:
        """Largest |probability - label| among the wrong predictions of each image, float64 [n].

        It is 0 if all predictions of an image are right.
        """
        wrong = self.predicted_classes != self.labels
        return ((self.probabilities - self.labels.double()).abs() * wrong).amax(1)

    @property
    def f1_terms(self) -> tuple[Tensor, Tensor]:
        """Terms whose sums are the numerator and the denominator of F1, both float64 [n, K]."""
        hits = self.predicted_classes & self.labels
        return 2.0 * hits.double(), self.predicted_classes.double() + self.labels.double()


def micro_f1(answers: LabelAnswers) -> Measured:
    """Return the F1 over all images and labels; None if no label is present or predicted."""
    numerators, denominators = answers.f1_terms
    return _ratio(numerators.sum(1), denominators.sum(1))


def macro_f1(answers: LabelAnswers) -> Measured:
    """Return the mean F1 of the labels that are present or predicted; None if there are none."""
    numerators, denominators = answers.f1_terms
    values = []
    influences = []
    for terms in zip(numerators.T, denominators.T, strict=True):
        f1 = _ratio(*terms)
        if f1.value is not None and f1.influence is not None:
            values.append(f1.value)
            influences.append(f1.influence)
    if not values:
        return Measured(None)
    return Measured.influenced(sum(values) / len(values), np.mean(influences, axis=0))


def _ratio(numerators: Tensor, denominators: Tensor) -> Measured:
    """Return sum(numerators) / sum(denominators), both [n], with each image's influence.

    The value is None if the denominators sum to 0.
    """
    total = float(denominators.sum())
    if not total:
        return Measured(None)
    value = float(numerators.sum()) / total
    influence = len(numerators) * (numerators - value * denominators) / total
    return Measured.influenced(value, influence)


def best_thresholds(answers: Answers) -> list[float]:
    """Return, for each label, the threshold that maximises the label's F1 on these images.

    A threshold lies midway between two neighbouring probabilities of the images, or between 0 and
    the lowest. If several are equally good, the highest is returned. The threshold is 0.5 for a
    label that no image has.
    """
    thresholds = []
    for scores, present in zip(
        answers.probabilities.T.numpy(), answers.labels.T.numpy(), strict=True
    ):
        levels, level = np.unique(scores, return_inverse=True)  # ascending
        hits = np.bincount(level[present], minlength=len(levels))[::-1].cumsum()
        predicted = np.bincount(level, minlength=len(levels))[::-1].cumsum()
        best = len(levels) - 1 - int((2 * hits / (predicted + present.sum())).argmax())
        lower = levels[best - 1] if best else 0.0
        thresholds.append(float((levels[best] + lower) / 2) if present.any() else 0.5)
    return thresholds
