"""Membership inference: an attack that separates training images (members) from held-out images.

The score of an image is minus its distance to the nearest sample of the generator, which should be
higher for members (GAN-Leaks, 1909.03935). The attack tests if members score higher on average. It
also tests if they are over-represented at the highest scores, which reveals even a few copies
(2112.03570).
"""

import numpy as np
import torch
from torch import Tensor

from duetgan.metrics.classification.answers import Ranking
from duetgan.metrics.intervals import Measured, wilson
from duetgan.metrics.protocol import Document
from duetgan.utils.text import columns, decimal

LEVEL = 0.005  # significance level of an audit: one false alarm in two hundred
# false positive rates: fractions of the held-out images above a threshold; 0 means one image
TOPS = (0.0, 0.001, 0.01, 0.1)
NOT_SHOWN = [
    "differential privacy, or any bound on what could be learnt",
    "safety from other attacks: only this one was made, with these features and samples",
    "that no single image is at risk: averages and tops of many were looked at",
    "that no part of an image, a face or a text, was copied into another scene",
    "anything of training images that were not searched",
]


def attack(members: Tensor, held_out: Tensor) -> Document:
    """Measure how well the scores of members, [m], and of held-out images, [n], are separated.

    Both sets of images must be drawn from the same distribution.

    Returns a dict with:

    - `auc` and its 95 % `interval`;
    - `p_value`, the smallest p-value of all tests, with Bonferroni's correction for their number;
    - `top`, a dict: the key is the fraction of held-out images that lie at or above a threshold,
      the value is the fraction of members above the same threshold;
    - `members` and `held_out`, the numbers of images.
    """
    from scipy.stats import mannwhitneyu  # imported here because the import takes a second

    members, held_out = members.double(), held_out.double()
    ranks = [max(1, int(fraction * len(held_out))) for fraction in TOPS]
    ranked = mannwhitneyu(members, held_out, alternative="greater", use_continuity=False)
    p_values = [float(ranked.pvalue)]
    for rank in sorted(set(ranks)):
        p_values.append(top_p_value(members, held_out, rank))
    ordered = held_out.sort(descending=True).values
    top = {
        f"{rank / len(held_out):.4g}": float((members > ordered[rank - 1]).double().mean())
        for rank in ranks[1:]
    }
    area, interval = auc(members, held_out)
    return {
        "auc": area,
        "interval": interval,
        "p_value": min(1.0, len(p_values) * min(p_values)),
        "top": top,
        "members": len(members),
        "held_out": len(held_out),
    }


def auc(members: Tensor, held_out: Tensor) -> tuple[float, list[float]]:
    """Return the area under the ROC curve, and its 95 % interval.

    `members`, [m], and `held_out`, [n], are scores. Members are the positive class. Ties count as
    half. The interval is that of DeLong, DeLong and Clarke-Pearson (1988). A perfect separation has
    variance 0 and no such interval. In this case the interval is Wilson's for the number of images
    in the smaller set.
    """
    sizes = len(members), len(held_out)
    ranking = Ranking(torch.cat([members, held_out]).numpy(), np.arange(sum(sizes)) < sizes[0])
    area, influence = ranking.auroc(), ranking.auroc_influence() / sum(sizes)
    sides = influence[: sizes[0]], influence[sizes[0] :]
    variance = 0.0
    for side in sides:
        if len(side) > 1:
            variance += float(np.square(side).sum()) * len(side) / (len(side) - 1)
    interval = Measured.normal(area, variance, low=0.0, high=1.0).interval
    return area, interval or wilson(round(area * min(sizes)), min(sizes)) or [0.0, 1.0]


def top_p_value(members: Tensor, held_out: Tensor, rank: int) -> float:
    """Return the exact p-value for the number of members with very high scores.

    `members`, [m], and `held_out`, [n], are scores. The threshold is the `rank`-th highest score of
    a held-out image, and k is the number of members above it. With the `rank` - 1 best held-out
    images, these members are the k + `rank` - 1 images with the highest scores. The null hypothesis
    is that all m + n images are in random order. Then the number of held-out images among the
    highest scores has a hypergeometric distribution, and the p-value is the probability that it is
    below `rank`. Ties count against the members.
    """
    from scipy.stats import hypergeom  # imported here because the import takes a second

    threshold = held_out.sort(descending=True).values[rank - 1]
    above = int((members > threshold).sum())
    return float(
        hypergeom.cdf(rank - 1, len(members) + len(held_out), len(held_out), above + rank - 1)
    )


def halves(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Divide `count` images at random into two halves for a control; return their indices."""
    order = torch.randperm(count, generator=generator)
    return order[: count // 2], order[count // 2 :]


# --- text


def verdict(document: Document) -> str:
    """Return a verdict in words on the results of an audit (see `audit_score`)."""
    words = []
    if document["controls"]["generator"]["p_value"] < LEVEL:
        words.append(
            "the control found a difference between halves of the held-out images: do not trust this audit"
        )
    if document["attacks"]["generator"]["p_value"] < LEVEL:
        words.append("the samples tell of training images: do not hand them on as they are")
    return "; ".join(words) or "the attack found nothing; it can miss a few copies"


def audit_table(document: Document) -> str:
    """Format the results of an audit as text."""
    attack, control = document["attacks"]["generator"], document["controls"]["generator"]
    rows = [["AUC", "95 %", "p", "control", "95 %"]]
    rows.append([*_auc(attack), f"{attack['p_value']:.2g}", *_auc(control)])
    return "\n".join(
        [
            f"{document['checkpoint']} (step {document['step']}): {attack['members']} training images against "
            f"{attack['held_out']} held-out ones of {document['data']}, {document['n']} samples, "
            f"{document['extractor']}",
            columns(rows),
            "",
            document["verdict"],
            f"This does not show: {'; '.join(NOT_SHOWN)}.",
        ]
    )


def _auc(result: Document) -> list[str]:
    low, high = result["interval"]
    return [decimal(result["auc"], 3), f"{low:.3f} to {high:.3f}"]
