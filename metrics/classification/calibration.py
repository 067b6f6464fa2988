"""How far a classifier's probabilities can be believed, and the temperature that mends them (Guo et al. 2017)."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.metrics.intervals import influence_interval
from duetgan.utils.seeding import numpy_generator

BINS = 15  # of the calibration error, as in Guo et al. 2017 (1706.04599)
COLDEST, HOTTEST = 0.01, 100.0  # a temperature beyond is not looked for
HALVINGS = 60  # of that range's logarithm: to the last digits of a float64


def bin_of(confidence: Tensor, bins: int) -> Tensor:
    """Bins 0 to M - 1 of confidences float64 [n]: bin m - 1 holds those in ((m - 1)/M, m/M], M bins."""
    return (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)


def calibration_error(confidence: Tensor, hits: Tensor) -> tuple[float, Tensor]:
    """The expected calibration error and each image's influence on it, [n].

    Args: `confidence` float64 [n], the largest probabilities; `hits` bool [n], whether the class is the true one.
    """
    gaps = confidence - hits.double()
    index = bin_of(confidence, BINS)
    sums = torch.zeros(BINS, dtype=torch.float64).index_add_(0, index, gaps)
    error = float(sums.abs().sum()) / len(gaps)
    return error, sums.sign()[index] * gaps - error


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """-log of the true class's probability of each image, float64 [n], from logits [n, K]."""
    logits = logits.double()
    return logits.logsumexp(1) - logits.gather(1, labels[:, None])[:, 0]


def halves(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of two halves of the images, ascending, equal in every class to within one image.

    Drawn by the key (seed, "eval", "temperature").
    """
    order = numpy_generator(seed, "eval", "temperature").permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.sort(order[::2]), np.sort(order[1::2])


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T that minimises the likelihood loss of softmax(logits / T), in float64.

    The loss is convex in 1/T: its slope, the mean of E[z] - z_y, has one sign below the best T and another above.
    Where every image is right, T would be 0: it stops at COLDEST; HOTTEST is the other end.
    """
    logits = logits.double()
    mean_own = logits.gather(1, labels[:, None]).mean()
    low, high = math.log(COLDEST), math.log(HOTTEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        expected = ((logits / math.exp(middle)).softmax(1) * logits).sum(1).mean()
        # the sharper the softmax, the larger the expected logit: above the own one's mean it is too sharp
        low, high = (middle, high) if expected > mean_own else (low, middle)
    return math.exp((low + high) / 2)


def judged_temperature(logits: Tensor, labels: Tensor, *, seed: int) -> dict[str, Any] | None:
    """A temperature fitted on one half of the images, and what it changes on the other; None of less than 4 images.

    Returns `value`, `fitted_on`, `judged_on` (images), and of the judged half without (`_before`) and with it
    (`_after`): `nll`, `ece`, `ece_interval`.
    """
    if len(labels) < 4:
        return None
    fitted, judged = (torch.from_numpy(half) for half in halves(labels.numpy(), seed))
    temperature = fit_temperature(logits[fitted], labels[fitted])
    result: dict[str, Any] = {"value": temperature, "fitted_on": len(fitted), "judged_on": len(judged)}
    for name, divisor in (("before", 1.0), ("after", temperature)):
        scaled, wanted = logits[judged].double() / divisor, labels[judged]
        confidence, predicted = scaled.softmax(1).max(1)
        error, influence = calibration_error(confidence, predicted == wanted)
        result[f"nll_{name}"] = float(negative_log_likelihood(scaled, wanted).mean())
        result[f"ece_{name}"] = error
        result[f"ece_interval_{name}"] = influence_interval(error, influence.numpy())
    return result
