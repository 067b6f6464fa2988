"""A classifier's figures that need every image's logits at once: rankings, calibration, and which classes it confuses.

All are functions of the logits in the order of the images, so they do not depend on batches and processes.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metrics.classification.calibration import calibration_error, judged_temperature, negative_log_likelihood
from metrics.classification.corruptions import CORRUPTIONS
from metrics.classification.ranking import Ranking
from metrics.evaluate_classifier import TOP
from metrics.intervals import balanced_interval, influence_interval, interval_of, wilson

MEASURES = ("auroc", "average_precision")
PAIRS = 10  # most confused pairs of classes that are named


def further_figures(
    counted: dict[str, Any], logits: Tensor, labels: Tensor, *, seed: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a classifier's document has beside `ClassificationCounts.figures`, and what is kept of every image.

    Args: `counted` those figures; `logits` float32 [n, K]; `labels` int64 [n]; `seed` of the halves for the
    temperature.

    Returns: `accuracy_interval`, `top5_accuracy_interval`, `balanced_accuracy` and its interval, `ece_interval`, `nll`
    and its interval, `auroc` and `average_precision` (means over the classes) and their intervals, `per_class` with
    both for each class, `temperature`, `confused`; and the columns of `metrics.comparison.predictions`, each [n].
    """
    n, rows = counted["n"], counted["per_class"]
    probabilities = logits.double().softmax(1)
    confidence, named = probabilities.max(1)
    ranked, influences = rankings(probabilities.numpy(), labels.numpy())
    influences["ece"] = calibration_error(confidence, named == labels)[1].numpy()
    losses = negative_log_likelihood(logits, labels)
    loss = float(losses.mean())
    recalls = [row["recall"] for row in rows.values() if row["recall"] is not None]
    figures = {
        "accuracy_interval": interval_of(counted["accuracy"], n),
        f"top{TOP}_accuracy_interval": interval_of(counted[f"top{TOP}_accuracy"], n),
        "balanced_accuracy": sum(recalls) / len(recalls),
        "balanced_accuracy_interval": balanced_interval(counted["confusion"]),
        "ece_interval": influence_interval(counted["ece"], influences["ece"]),
        "nll": loss,
        "nll_interval": influence_interval(loss, (losses - loss).numpy(), high=math.inf),
        **{name: _mean(each) for name, each in ranked.items()},
        **{f"{name}_interval": _mean_interval(each, influences[name]) for name, each in ranked.items()},
        "per_class": {
            name: row | {measure: each[place] for measure, each in ranked.items()}
            for place, (name, row) in enumerate(rows.items())
        },
        "temperature": judged_temperature(logits, labels, seed=seed),
        "confused": confused_pairs(counted["confusion"], list(rows)),
    }
    kept = {"label": labels, "prediction": named, "confidence": confidence, "loss": losses}
    return figures, {name: column.numpy() for name, column in kept.items()} | influences


def rankings(
    probabilities: np.ndarray, labels: np.ndarray
) -> tuple[dict[str, list[float | None]], dict[str, np.ndarray]]:
    """AUROC and average precision of each class against all others, [K] each, and each image's influence on their
    means over the classes, [n] each.

    Args: `probabilities` [n, K]; `labels` int64 [n]. A class without images, or that all images have, has no figure:
    None, and it does not count in the means.
    """
    found: dict[str, list[float | None]] = {name: [] for name in MEASURES}
    influences = {name: np.zeros(len(labels)) for name in MEASURES}
    for label in range(probabilities.shape[1]):
        positive = labels == label
        ranking = Ranking(probabilities[:, label], positive) if positive.any() and not positive.all() else None
        for name in MEASURES:
            found[name].append(None if ranking is None else getattr(ranking, name)())
            if ranking is not None:
                influences[name] += getattr(ranking, f"{name}_influence")()
    there = max(1, sum(value is not None for value in found[MEASURES[0]]))
    return found, {name: influence / there for name, influence in influences.items()}


def _mean(values: list[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _mean_interval(values: list[float | None], influence: np.ndarray) -> list[float] | None:
    mean = _mean(values)
    return None if mean is None else influence_interval(mean, influence)


def confused_pairs(confusion: Sequence[Sequence[int]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The pairs of a true and a predicted class with the most images, at most PAIRS: `true`, `predicted`, `n`."""
    counts = np.array(confusion)
    np.fill_diagonal(counts, 0)
    order = np.argsort(-counts, axis=None, kind="stable")[:PAIRS]
    places = [divmod(int(place), len(names)) for place in order]
    return [{"true": names[i], "predicted": names[j], "n": int(counts[i, j])} for i, j in places if counts[i, j]]


def robustness(hits: Tensor, n: int, side: int) -> dict[str, Any]:
    """Accuracy under each corruption and strength, from `corrupted_hits` of n images of `side` px.

    Returns `n`; `accuracy`, the mean over all of them; `corruptions`: name -> `unit` and `strengths`, a list of
    `amount`, `accuracy` and `accuracy_interval`, weakest first.
    """
    rows = {}
    for (name, corruption), counts in zip(CORRUPTIONS.items(), hits.tolist(), strict=True):
        amounts = [corruption.amount(strength, side) for strength in range(1, len(counts) + 1)]
        strengths = [
            {"amount": amount, "accuracy": count / n, "accuracy_interval": wilson(count, n)}
            for amount, count in zip(amounts, counts, strict=True)
        ]
        rows[name] = {"unit": corruption.unit, "strengths": strengths}
    return {"n": n, "accuracy": int(hits.sum()) / (n * hits.numel()), "corruptions": rows}


def outliers(logits: Tensor, others: Tensor) -> dict[str, Any]:
    """How well two scores tell the classifier's own images from others: logits [n, K] of both.

    `max_probability` is the largest probability (Hendrycks and Gimpel 1610.02136), `energy` the logarithm of the sum
    of e^logit (Liu et al. 2010.03759); own images should have the larger ones. Each has `auroc`, `auroc_interval` and
    `fpr95`: the share of others above the score that 95 % of the own images reach.
    """
    both = torch.cat([logits, others]).double()
    own = np.arange(len(both)) < len(logits)
    found: dict[str, Any] = {"n": len(others)}
    for name, scores in (("max_probability", both.softmax(1).amax(1)), ("energy", both.logsumexp(1))):
        values = scores.numpy()
        ranking = Ranking(values, own)
        reached = np.sort(values[own])[len(logits) - -(-95 * len(logits) // 100)]
        found[name] = {
            "auroc": ranking.auroc(),
            "auroc_interval": influence_interval(ranking.auroc(), ranking.auroc_influence()),
            "fpr95": float((values[~own] >= reached).mean()),
        }
    return found
