"""How well one class's probability ranks its images before all others: AUROC and average precision.

Both come with each image's influence on them, the derivative by its weight. The mean of its squares is the variance of
the infinitesimal jackknife (Efron 1982), to which the bootstrap over images tends; for AUROC it is DeLong's (1988).
"""

from functools import cached_property

import numpy as np


class Ranking:
    """Images ordered by a score; equal scores form one level. Needs a positive and a negative image."""

    def __init__(self, scores: np.ndarray, positive: np.ndarray) -> None:
        """Args: `scores` float [n], higher for the positive ones; `positive` bool [n]."""
        self.positive = positive
        levels, self.level = np.unique(scores, return_inverse=True)  # ascending
        self._positives = np.bincount(self.level[positive], minlength=len(levels))
        self._negatives = np.bincount(self.level[~positive], minlength=len(levels))
        self.counts = int(self._positives.sum()), int(self._negatives.sum())
        if 0 in self.counts:
            raise ValueError("a ranking needs a positive and a negative image")

    @cached_property
    def _wins(self) -> tuple[np.ndarray, np.ndarray]:
        """Twice the number of negatives below, and of positives above, each level; a tie is half a win."""
        below = 2 * np.cumsum(self._negatives) - self._negatives
        above = 2 * self.counts[0] - 2 * np.cumsum(self._positives) + self._positives
        return below, above

    def auroc(self) -> float:
        """Share of the pairs of a positive and a negative image that are in the right order."""
        positives, negatives = self.counts
        return int((self._positives * self._wins[0]).sum()) / (2 * positives * negatives)

    def auroc_influence(self) -> np.ndarray:
        """Influence of each image on `auroc`, [n], of mean 0."""
        (positives, negatives), (below, above) = self.counts, self._wins
        wins = np.where(self.positive, below[self.level] / negatives, above[self.level] / positives) / 2
        return len(wins) * (wins - self.auroc()) / np.where(self.positive, positives, negatives)

    @cached_property
    def _named(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the images at each level and above: their number, and the share of positives (precision)."""
        named = np.cumsum((self._positives + self._negatives)[::-1])[::-1]
        return named, np.cumsum(self._positives[::-1])[::-1] / named

    def average_precision(self) -> float:
        """Mean precision over the positive images' levels: the sum of (R_i - R_(i-1)) P_i, without interpolation."""
        return float((self._positives * self._named[1]).sum()) / self.counts[0]

    def average_precision_influence(self) -> np.ndarray:
        """Influence of each image on `average_precision`, [n], of mean 0: on its own term, and on the precision at
        every level from the lowest up to its own.
        """
        named, precision = self._named
        own = precision - self.average_precision() + np.cumsum(self._positives / named)
        others = np.cumsum(self._positives * precision / named)
        return len(self.level) / self.counts[0] * (self.positive * own[self.level] - others[self.level])
