"""Membership inference: can who has a score tell images that were trained on from images that were
held out?

A score is higher for images that look more like members: the discriminator's logit (LOGAN,
1705.07663), or minus the distance to the nearest sample (GAN-Leaks, 1909.03935). Asked is whether
members score higher on the whole, and whether they crowd the very top, where a few copies show
(2112.03570).
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duetgan.metrics.classification.answers import Ranking
from duetgan.metrics.intervals import Measured, wilson
from duetgan.metrics.samples.memorisation import mann_whitney
from duetgan.metrics.samples.neighbours import neighbours
from duetgan.utils.text import columns, decimal

LEVEL = 0.01  # of significance of an audit: one that finds nothing is accused once in a hundred
# shares of the held-out images that are let above a threshold; 0: a single one
TOPS = (0.0, 0.001, 0.01, 0.1)
REPEATS = 20  # of the test whether planted copies are found
# of the planted copies' tries that must be found for "nothing was found" to mean something
ENOUGH = 0.95
SHARES = (0.01, 0.02, 0.05)  # of the samples that are copies, in the test of the audit itself
NOT_SHOWN = [
    "differential privacy, or any bound on what could be learnt",
    "safety from other attacks: only these two were made, with these features and samples",
    "that no single image is at risk: averages and tops of many were looked at",
    "that no part of an image, a face or a text, was copied into another scene",
    "anything of training images that were not searched",
]


def attack(members: Tensor, held_out: Tensor) -> dict[str, Any]:
    """How well scores [m] and [n] tell members from held-out images, both drawn from one
    distribution.

    Returns `auc` with its `interval`, `p_value` (Bonferroni's over the tests), `top` (share of
    held-out images above a threshold -> share of members above it), and how many `members` and
    `held_out` there are. Raises ValueError for an empty side.
    """
    if not len(members) or not len(held_out):
        raise ValueError("an attack needs members and held-out images")
    members, held_out = members.double(), held_out.double()
    ranks = [max(1, int(share * len(held_out))) for share in TOPS]
    z = mann_whitney(members, held_out)
    chances = [
        math.erfc(z / math.sqrt(2)) / 2,
        *(crowding(members, held_out, rank) for rank in sorted(set(ranks))),
    ]
    ordered = held_out.sort(descending=True).values
    top = {
        f"{rank / len(held_out):.4g}": float((members > ordered[rank - 1]).double().mean())
        for rank in ranks[1:]
    }
    area, interval = auc(members, held_out)
    document = {
        "auc": area,
        "interval": interval,
        "p_value": min(1.0, len(chances) * min(chances)),
        "top": top,
    }
    return document | {"members": len(members), "held_out": len(held_out)}


def auc(members: Tensor, held_out: Tensor) -> tuple[float, list[float]]:
    """The area under the ROC curve from scores [m] and [n], equal ones count half; and its 95 %
    interval, by DeLong, DeLong and Clarke-Pearson (1988).

    Where all are told apart their variance is 0: then Wilson's interval of as many images as the
    smaller side has.
    """
    sizes = len(members), len(held_out)
    ranking = Ranking(torch.cat([members, held_out]).numpy(), np.arange(sum(sizes)) < sizes[0])
    area, influence = ranking.auroc(), ranking.auroc_influence() / sum(sizes)
    sides = influence[: sizes[0]], influence[sizes[0] :]
    variance = sum(
        float(np.square(side).sum()) * len(side) / (len(side) - 1)
        for side in sides
        if len(side) > 1
    )
    interval = Measured.normal(area, variance, low=0.0, high=1.0).interval
    return area, interval or wilson(round(area * min(sizes)), min(sizes)) or [0.0, 1.0]


def crowding(members: Tensor, held_out: Tensor, rank: int) -> float:
    """The chance of as many members above the `rank`-th highest held-out image, were all m + n
    images in random order.

    Exact: k members or more are above it where fewer than `rank` of the first k + rank - 1 images
    are held-out ones, whose number is hypergeometric. Equal scores count against the members.
    """
    from scipy.stats import hypergeom  # here: its import takes a second of every start

    threshold = held_out.sort(descending=True).values[rank - 1]
    above = int((members > threshold).sum())
    return float(
        hypergeom.cdf(rank - 1, len(members) + len(held_out), len(held_out), above + rank - 1)
    )


def halves(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two random halves of `count` places: the control, where there is nothing to find."""
    order = torch.randperm(count, generator=generator)
    return order[: count // 2], order[count // 2 :]


def distances_with_copies(
    real: Tensor,  # features [r, F] of members and held-out images
    distances: Tensor,  # float64 [r] to the nearest sample
    draws: Tensor,  # int64 [R, k]: which of the real images are planted among the samples, R times
) -> Tensor:
    """The distances [R, r] where k of the real images are added to the samples as they are, in
    float64.
    """
    to_planted = torch.stack(
        [neighbours(real, real[planted], 1)[0][:, 0].sqrt() for planted in draws]
    )
    # a copy's is 0, not a rounding error
    return torch.minimum(distances, to_planted).scatter_(1, draws, 0.0)


def detection(
    real: Tensor,  # features [r, F]: those of the members first
    distances: Tensor,  # float64 [r] to the nearest of the samples
    *,
    members: int,
    samples: int,
    share: float,  # of the samples that are copies of members
    repeats: int = REPEATS,
    generator: torch.Generator,
) -> dict[str, Any]:
    """How often `attack` finds copies of members that are planted among the samples: the test of
    the audit itself.

    Returns `share`, `copies` (how many were added to the samples), `found` and `repeats`.
    """
    copies = min(members, max(1, round(share * samples / (1 - share))))
    draws = torch.stack(
        [torch.randperm(members, generator=generator)[:copies] for _ in range(repeats)]
    )
    scores = -distances_with_copies(real, distances, draws)
    found = sum(attack(row[:members], row[members:])["p_value"] < LEVEL / 2 for row in scores)
    return {"share": share, "copies": copies, "found": int(found), "repeats": repeats}


# --- for people


def verdict(document: dict[str, Any]) -> str:
    """What was found, in words. `attacks` and `controls` by name, and `planted`."""
    words = []
    if any(control["p_value"] < LEVEL / 2 for control in document["controls"].values()):
        words.append(
            "the control found a difference between halves of the held-out images: do not trust this audit"
        )
    leaks = [name for name, found in document["attacks"].items() if found["p_value"] < LEVEL / 2]
    remedies = {
        "generator": "the samples tell of training images: do not hand them on as they are",
        "discriminator": "the discriminator knows its training images: hand on the generator, never the checkpoint",
    }
    words += [remedies[name] for name in leaks]
    last = document["planted"][-1]
    if "generator" not in leaks and last["found"] < ENOUGH * last["repeats"]:
        words.append(
            f"too weak to tell: of {last['repeats']} tries, copies at {last['share']:.0%} of the samples were found in "
            f"{last['found']}; give more held-out images or a larger --n"
        )
    if not words:
        words.append("neither attack found anything")
    return "; ".join(words)


def audit_table(document: dict[str, Any]) -> str:
    rows = [["score of", "AUC", "95 %", "p", "control", "95 %"]]
    for name, result in document["attacks"].items():
        rows.append(
            [name, *_auc(result), f"{result['p_value']:.2g}", *_auc(document["controls"][name])]
        )
    one, n, planted = next(iter(document["attacks"].values())), document["n"], []
    for each in document["planted"]:
        copies, share = each["copies"], f"{each['share']:.0%}"
        if copies < round(each["share"] * n / (1 - each["share"])):
            share = f"{copies / (n + copies):.1%}, all members there are"
        planted.append(
            f"copies planted at {share} ({copies}): found in {each['found']} of {each['repeats']} tries"
        )
    return "\n".join(
        [
            f"{document['checkpoint']} (step {document['step']}): {one['members']} training images against "
            f"{one['held_out']} held-out ones of {document['data']}, {n} samples, {document['extractor']}",
            columns(rows),
            "",
            *planted,
            "",
            document["verdict"],
            f"This does not show: {'; '.join(NOT_SHOWN)}.",
        ]
    )


def _auc(result: dict[str, Any]) -> list[str]:
    low, high = result["interval"]
    return [decimal(result["auc"], 3), f"{low:.3f} to {high:.3f}"]
