"""What is kept of every sample of a generator, so that two evaluations can be compared sample by sample."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass
class SamplePredictions:
    """The judge's predictions of the samples, in their order; `observe` is an `Observer` of `evaluate_generator`."""

    _labels: list[Tensor] = field(default_factory=list)
    _confidence: list[Tensor] = field(default_factory=list)
    _named: list[Tensor] = field(default_factory=list)

    def observe(self, _images: Tensor, labels: Tensor, probabilities: Tensor | None) -> None:
        """Take a batch: labels int64 [b], probabilities [b, K] or None without a judge."""
        self._labels.append(labels)
        if probabilities is not None:
            confidence, named = probabilities.double().max(1)
            self._confidence.append(confidence)
            self._named.append(named)

    def columns(self, n: int) -> dict[str, np.ndarray]:
        """The columns of `metrics.comparison.predictions` for the first n samples, from which the figures are."""
        there = {"label": self._labels, "prediction": self._named, "confidence": self._confidence}
        return {name: torch.cat(parts)[:n].numpy() for name, parts in there.items() if parts}
