"""From results to answers: differences between arms, Holm's correction, controls, and what they say in words."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from metrics.comparison.paired import LEVEL, Difference, by_seeds, by_seeds_and_images, holm
from reporting.figures import change
from studies.declare import Comparison, Control, Results

EVEN = 1.5  # largest class over rarest, up to which classes count as equally large
HELPS, HURTS, OPEN = "helps", "hurts", "cannot tell"


def groups_of(counts: Sequence[int], classes: Sequence[str]) -> dict[str, list[int]]:
    """Sets of labels by name: `all`; for classes of unequal size `many`, `medium` and `few`, a third of the classes
    each by the number of training images (`medium` takes what does not divide); and every class by its name.
    """
    groups = {"all": list(range(len(counts)))}
    order = sorted(groups["all"], key=lambda label: (-counts[label], label))
    third = len(order) // 3
    if third and not even(counts):
        groups |= {"many": order[:third], "medium": order[third : len(order) - third], "few": order[-third:]}
    return groups | {name: [label] for label, name in enumerate(classes) if name not in groups}


def even(counts: Sequence[int]) -> bool:
    """Whether classes count as equally large."""
    return max(counts) <= EVEN * min(counts)


def class_groups(groups: Mapping[str, Sequence[int]], classes: Sequence[str]) -> list[str]:
    """The names of the groups that are no single class."""
    return [name for name in groups if name not in classes]


def difference(results: Results, first: str, second: str, group: str, figure: str | None) -> Difference | None:
    """The second arm less the first; None where a figure is missing, or one seed cannot tell."""
    if figure is None:
        weights = results.weights(group)
        return by_seeds_and_images(results.hits(first), results.hits(second), weights)
    one, other = results.figures(first, figure), results.figures(second, figure)
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    if len(pairs) < len(one):
        return None
    if len(pairs) == 1:
        return Difference(pairs[0][1] - pairs[0][0], None, None, "one seed")
    return by_seeds(*zip(*pairs, strict=True))


def answer(value: float, p: float | None, *, larger_is_better: bool = True) -> str:
    """`helps`, `hurts`, or `cannot tell`."""
    if p is None or p >= LEVEL:
        return OPEN
    return HELPS if (value > 0) == larger_is_better else HURTS


def compared(results: Results, comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The rows of study.json: `first`, `second`, `group`, `figure`, both values, `difference`, its 95 % `interval`,
    `p` (corrected after Holm within the family), `verdict`, `method`, `family`.
    """
    rows: list[dict[str, Any]] = []
    for comparison in comparisons:
        for group in comparison.groups if comparison.figure is None else ("all",):
            found = difference(results, comparison.first, comparison.second, group, comparison.figure)
            if found is None:
                continue
            rows.append(
                {
                    "first": comparison.first,
                    "second": comparison.second,
                    "group": group,
                    "figure": comparison.figure,
                    "larger_is_better": comparison.larger_is_better,
                    "first_value": _value(results, comparison.first, group, comparison.figure),
                    "second_value": _value(results, comparison.second, group, comparison.figure),
                    "difference": found.value,
                    "interval": found.interval,
                    "p": found.p,
                    "method": found.method,
                    "family": comparison.family,
                }
            )
    for family in dict.fromkeys(row["family"] for row in rows):
        tested = [row for row in rows if row["family"] == family and row["p"] is not None]
        for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
            row["p"] = p
    for row in rows:
        row["verdict"] = answer(row["difference"], row["p"], larger_is_better=row["larger_is_better"])
    return rows


def _value(results: Results, arm: str, group: str, figure: str | None) -> float:
    if figure is None:
        return results.mean(arm, group)
    return float(np.mean([value for value in results.figures(arm, figure) if value is not None]))


def checked(results: Results, controls: Sequence[Control]) -> list[dict[str, Any]]:
    """The controls and how they came out: the declaration, `difference`, `interval`, `p` (of each alone), `found` and
    `ok`. A control that could not be computed has failed.
    """
    rows = []
    for control in controls:
        found = difference(results, control.against, control.arm, control.group, control.figure)
        row = asdict(control) | {"difference": None, "interval": None, "p": None, "found": OPEN, "ok": False}
        if found is not None:
            verdict = answer(found.value, found.p, larger_is_better=control.larger_is_better)
            fine = {"helps": verdict == HELPS, "not helps": verdict != HELPS, "same": verdict == OPEN}
            row |= {"difference": found.value, "interval": found.interval, "p": found.p}
            row |= {"found": verdict, "ok": fine[control.expected]}
        rows.append(row)
    return rows


def in_words(row: dict[str, Any]) -> str:
    """A comparison in a line."""
    scale, unit = (100, " points") if row["figure"] is None else (1, "")
    interval = row["interval"]
    ends = [] if interval is None else [change(scale * end) for end in interval]
    sure = f", 95 % interval {' to '.join(ends)}" if ends else ""
    what = f"{row['group']} classes" if row["figure"] is None else row["figure"]
    told = f"{change(scale * row['difference'])}{unit}{sure}, p {chance(row['p'])}"
    return f"{what}: {row['verdict']} ({row['second']} against {row['first']}: {told})"


def chance(p: float | None) -> str:
    """A p-value in writing."""
    if p is None:
        return "not known"
    return "below 0.0001" if p < 1e-4 else f"{p:.2g}"
