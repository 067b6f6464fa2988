"""What arms came to, and what follows: differences between arms, Holm's correction, verdicts and
controls.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from duetgan.metrics.comparison.paired import LEVEL, Difference, by_seeds, by_seeds_and_images, holm
from duetgan.reporting.figures import change
from duetgan.studies.images import HELD_OUT, TEST

GROUPS, CLASSES = "each group", "each class"  # of the images: a comparison for each
HELPS, HURTS, OPEN, EMPTY = "helps", "hurts", "cannot tell", "not tried"
PAIRS = 5  # draws, each with and without, that `helps` needs at least
LEAST_USED = 0.05  # of what an arm should use; one with less was not tried


@dataclass(frozen=True)
class Comparison:
    """Is the second arm better than the first, and than all `controls`? The answer is corrected
    within the `family`.

    One whose answer is known is a control of the study, which is void where it comes out otherwise.
    `helps`: the second must be better, significantly; `not helps`: it must not; `same`: neither.
    """

    first: str
    second: str = ""  # the arm that it is declared with
    # of classes, or a class, or GROUPS or CLASSES; ignored where a figure is named
    group: str = "all"
    controls: Sequence[str] = ()  # arms without what the second is to owe its effect to
    figure: str | None = None  # of the runs' figures; None: hits
    larger_is_better: bool = True
    family: str = "main"  # Holm's correction is over all answers of a family
    asked: bool = False  # whether the verdict is of it
    expected: Literal["helps", "not helps", "same"] | None = None
    why: str = ""  # what a control shows, for people


@dataclass(frozen=True)
class Result:
    figures: dict[str, float | None] = field(default_factory=dict)
    # of each set of images: bool [n], in the file's order
    hits: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """The results of all arms for the same seeds, in the order of the seeds.

    `groups` name sets of labels: groups of classes and the classes themselves; `labels` are each
    set's, int64 [n].
    """

    seeds: Sequence[int]
    by_arm: dict[str, list[Result]]
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def hits(self, arm: str, split: str = TEST) -> np.ndarray:
        """Right or wrong by seed and image, bool [seeds, n]."""
        return np.stack([result.hits[split] for result in self.by_arm[arm]])

    def figures(self, arm: str, name: str) -> list[Any]:
        return [result.figures.get(name) for result in self.by_arm[arm]]

    def mean_figure(self, arm: str, name: str) -> float | None:
        values = [value for value in self.figures(arm, name) if value is not None]
        return float(np.mean(values)) if values else None

    def weights(self, group: str, split: str = TEST) -> np.ndarray:
        """What each image counts in the group's figure, float64 [n] of sum 1: the mean of its
        classes' shares.
        """
        labels = self.labels[split]
        chosen = np.isin(labels, self.groups[group])
        return chosen / (max(1, len(np.unique(labels[chosen]))) * np.bincount(labels)[labels])

    def mean(self, arm: str, group: str, split: str = TEST) -> float:
        """The mean recall of the group's classes, over all seeds."""
        return float(self.hits(arm, split).mean(0) @ self.weights(group, split))

    def choose(self, name: str, arms: Sequence[str]) -> str:
        """Add an arm: at each seed that one of these with the largest mean recall on held-out
        images, of equal ones the first. Returns which these were, for people.
        """
        weights = self.weights("all", HELD_OUT)
        best = np.stack([self.hits(arm, HELD_OUT) @ weights for arm in arms]).round(9).argmax(0)
        chosen = [arms[place] for place in best]
        self.by_arm[name] = [self.by_arm[arm][seed] for seed, arm in enumerate(chosen)]
        return ", ".join(
            f"{arm} ({count} of {len(chosen)} seeds)"
            for arm, count in Counter(chosen).most_common()
        )


def difference(
    results: Results, first: str, second: str, group: str, figure: str | None
) -> Difference | None:
    """The second arm less the first; None where a figure is missing, or one seed cannot tell."""
    if figure is None:
        return by_seeds_and_images(
            results.hits(first), results.hits(second), results.weights(group)
        )
    one, other = results.figures(first, figure), results.figures(second, figure)
    if None in (*one, *other):
        return None
    return (
        by_seeds(one, other)
        if len(one) > 1
        else Difference(other[0] - one[0], None, None, "one seed")
    )


def answer(value: float, p: float | None, *, larger_is_better: bool = True) -> str:
    """`helps`, `hurts`, or `cannot tell`."""
    if p is None or p >= LEVEL:
        return OPEN
    return HELPS if (value > 0) == larger_is_better else HURTS


def compared(results: Results, comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """An answer for each comparison: the comparison, both values, `difference`, its 95 %
    `interval`, `p` (corrected after Holm within the family), `method`, `unbeaten` (controls that
    are as good), `verdict`.

    An effect in the right direction has the largest p of the tests against the first arm and each
    control, as an intersection-union test has (Berger 1982). With fewer than PAIRS seeds there is
    no `helps`. An arm whose figure `used` is below LEAST_USED is not tried, and not tested.
    """
    rows: list[dict[str, Any]] = []
    for each in comparisons:
        arms, group, figure = (each.first, each.second), each.group, each.figure
        sign = 1 if each.larger_is_better else -1
        if (found := difference(results, *arms, group, figure)) is None:
            continue
        values = [
            results.mean(arm, group) if figure is None else results.mean_figure(arm, figure)
            for arm in arms
        ]
        row = asdict(each) | asdict(found) | {"controls": list(each.controls), "unbeaten": []}
        del row["expected"], row["why"]
        row |= {"first_value": values[0], "second_value": values[1]}
        used = results.mean_figure(each.second, "used")
        if used is not None and used < LEAST_USED:
            row |= {"p": None, "verdict": EMPTY}
        elif sign * found.difference > 0 and found.p is not None:
            tests = {
                name: difference(results, name, each.second, group, figure)
                for name in each.controls
            }
            chances = {
                name: test.p if test and sign * test.difference > 0 else None
                for name, test in tests.items()
            }
            row["unbeaten"] = [name for name, p in chances.items() if p is None or p >= LEVEL]
            row["p"] = max(found.p, *(1.0 if p is None else p for p in chances.values()), 0.0)
        rows.append(row)
    for family in dict.fromkeys(row["family"] for row in rows):
        holm(row for row in rows if row["family"] == family)
    for row in rows:
        verdict = answer(row["difference"], row["p"], larger_is_better=row["larger_is_better"])
        row.setdefault(
            "verdict", OPEN if verdict == HELPS and len(results.seeds) < PAIRS else verdict
        )
    return rows


def checked(results: Results, controls: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The controls and how they came out: the declaration, `difference`, `interval`, `p` (of each
    alone), `found` and `ok`: None where one seed cannot tell. A control that could not be computed
    has failed.
    """
    rows = []
    for each in controls:
        found, told = (
            difference(results, each.first, each.second, each.group, each.figure),
            asdict(each),
        )
        verdict = (
            answer(found.difference, found.p, larger_is_better=each.larger_is_better)
            if found
            else None
        )
        fine: dict[str, bool | None] = {
            "not helps": verdict in (HURTS, OPEN),
            "same": verdict == OPEN,
        }
        fine["helps"] = None if found and found.p is None else verdict == HELPS
        row = {
            "arm": each.second,
            "against": each.first,
            "found": verdict or OPEN,
            "ok": fine[str(each.expected)],
        }
        row |= {
            key: told[key] for key in ("expected", "why", "group", "figure", "larger_is_better")
        }
        rows.append(
            row | (asdict(found) if found else {"difference": None, "interval": None, "p": None})
        )
    return rows


def in_words(row: dict[str, Any]) -> str:
    scale, unit = (100, " points") if row["figure"] is None else (1, "")
    ends = [change(scale * end) for end in row["interval"] or []]
    sure = f", 95 % interval {' to '.join(ends)}" if ends else ""
    what = f"{row['group']} classes" if row["figure"] is None else row["figure"]
    p = (
        "not known"
        if row["p"] is None
        else "below 0.0001"
        if row["p"] < 1e-4
        else f"{row['p']:.2g}"
    )
    size = f"{change(scale * row['difference'])}{unit}{sure}, p {p}"
    size += f"; no better than {', '.join(row['unbeaten'])}" if row["unbeaten"] else ""
    return f"{what}: {row['verdict']} ({row['second']} against {row['first']}: {size})"


def packed(result: Result) -> dict[str, Any]:
    """A result ready for JSON: hits as a digit each."""
    hits = {name: "".join(map(str, bits.astype(int))) for name, bits in result.hits.items()}
    return {"figures": result.figures, "hits": hits}


def unpacked(tree: dict[str, Any]) -> Result:
    """The result in a file's tree."""
    return Result(
        tree["figures"], {name: np.array([*bits]) == "1" for name, bits in tree["hits"].items()}
    )
