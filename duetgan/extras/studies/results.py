"""Comparison of a study's arms: differences, Holm's correction, verdicts and controls."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from duetgan.extras.studies.images import HELD_OUT, TEST
from duetgan.extras.studies.seeds_and_images import by_seeds_and_images
from duetgan.metrics.comparison.paired import LEVEL, Difference, holm
from duetgan.metrics.protocol import Document
from duetgan.reporting.figures import change

GROUPS = "each group"  # value of Comparison.group
HELPS, HURTS = "helps", "hurts"
OPEN = "cannot tell"
# Comparison.expected -> the verdicts with which a control passes
ACCEPTED = {"helps": (HELPS,), "not helps": (HURTS, OPEN)}
MIN_SEEDS = 5  # smallest number of seeds for the verdict `helps`


@dataclass(frozen=True)
class Comparison:
    """A test of whether the arm `second` is better than the arm `first` and than all `controls`.

    A comparison with `expected` is a check of the study itself: the study is void unless the result
    is the expected one. With "helps", the second arm must be significantly better than the first;
    with "not helps", it must not.
    """

    first: str
    second: str = ""  # the arm that declares this comparison
    # a group of classes, or GROUPS for one comparison of each group
    group: str = "all"
    controls: Sequence[str] = ()  # arms that lack the supposed cause of the effect
    expected: Literal["helps", "not helps"] | None = None


@dataclass(frozen=True)
class Result:
    """The metrics and the correct predictions of one run."""

    figures: dict[str, float]  # name of a metric -> value
    # split -> True for each image that is predicted correctly, bool [n], in the file's order
    hits: dict[str, np.ndarray]


@dataclass(frozen=True)
class Results:
    """The results of all arms for the same seeds."""

    seeds: Sequence[int]
    by_arm: dict[str, list[Result]]  # arm -> results in the order of the seeds
    # split -> labels of its images, int64 [n]
    labels: Mapping[str, np.ndarray]
    # name of a group of classes -> labels of the classes
    groups: Mapping[str, Sequence[int]]

    def hits(self, arm: str, split: str) -> np.ndarray:
        """Return the correct predictions of an arm on a split: bool [seeds, n], True if correct."""
        return np.stack([result.hits[split] for result in self.by_arm[arm]])

    def weights(self, group: str, split: str) -> np.ndarray:
        """Return the weight of each image in the mean recall of a group of classes, float64 [n].

        The weights sum to 1. Images of other classes have weight 0.
        """
        labels = self.labels[split]
        chosen = np.isin(labels, self.groups[group])
        return chosen / (max(1, len(np.unique(labels[chosen]))) * np.bincount(labels)[labels])

    def mean(self, arm: str, group: str) -> float:
        """Return the recall of an arm on the test split, averaged over the classes and all seeds."""
        return float(self.hits(arm, TEST).mean(0) @ self.weights(group, TEST))

    def choose(self, name: str, arms: Sequence[str]) -> str:
        """Add an arm `name` that has, for each seed, the results of the best of `arms`.

        The best arm has the largest mean recall on held-out images. If several are equal, the first
        is chosen. Returns a text that lists the chosen arms, each with its number of seeds.
        """
        weights = self.weights("all", HELD_OUT)
        best = np.stack([self.hits(arm, HELD_OUT) @ weights for arm in arms]).round(9).argmax(0)
        chosen = [arms[index] for index in best]
        self.by_arm[name] = [self.by_arm[arm][seed] for seed, arm in enumerate(chosen)]
        return ", ".join(
            f"{arm} ({count} of {len(chosen)} seeds)"
            for arm, count in Counter(chosen).most_common()
        )


def difference(results: Results, first: str, second: str, group: str) -> Difference:
    """Compare the mean recalls of two arms in a group of classes: second minus first."""
    return by_seeds_and_images(
        results.hits(first, TEST), results.hits(second, TEST), results.weights(group, TEST)
    )


def answer(value: float, p: float | None) -> str:
    """Return the verdict `helps`, `hurts` or `cannot tell` on a difference and its p-value."""
    if p is None or p >= LEVEL:
        return OPEN
    return HELPS if value > 0 else HURTS


def compared(results: Results, comparisons: Sequence[Comparison]) -> list[Document]:
    """Test the comparisons.

    The second arm is tested against the first arm and against each control. The p-value of an
    improvement is the largest p-value of these tests, as in an intersection-union test (Berger
    1982). With fewer than MIN_SEEDS seeds the verdict is never `helps`.

    Returns:
        A dict for each comparison, with its fields except `expected`, the mean recalls
        `first_value` and `second_value`, their `difference`, its 95 % `interval`, `p` (with Holm's
        correction), `method`, `unbeaten` (the controls that the second arm does not beat) and
        `verdict`.
    """
    rows: list[Document] = []
    for comparison in comparisons:
        first, second = comparison.first, comparison.second
        group = comparison.group
        effect = difference(results, first, second, group)
        row = asdict(comparison) | asdict(effect)
        row |= {"controls": list(comparison.controls), "unbeaten": []}
        del row["expected"]
        row["first_value"] = results.mean(first, group)
        row["second_value"] = results.mean(second, group)
        if effect.difference > 0 and effect.p is not None:
            row["p"] = effect.p
            for name in comparison.controls:
                test = difference(results, name, second, group)
                p = test.p if test.difference > 0 else None
                if p is None or p >= LEVEL:
                    row["unbeaten"].append(name)
                row["p"] = max(row["p"], 1.0 if p is None else p)
        rows.append(row)
    holm(rows)
    for row in rows:
        verdict = answer(row["difference"], row["p"])
        if verdict == HELPS and len(results.seeds) < MIN_SEEDS:
            verdict = OPEN
        row["verdict"] = verdict
    return rows


def checked(results: Results, controls: Sequence[Comparison]) -> list[Document]:
    """Test the controls of a study, which are comparisons with an expected result.

    Returns:
        A dict for each control, with the second arm `arm`, the first arm `against`, `group`,
        `expected`, `difference`, `interval`, `p` (not corrected), `method`, the verdict `found`,
        and `ok`: True if the verdict is the expected one, None if one seed is too few to tell.
    """
    rows = []
    for control in controls:
        effect = difference(results, control.first, control.second, control.group)
        verdict = answer(effect.difference, effect.p)
        ok: bool | None = verdict in ACCEPTED[control.expected or "helps"]
        if control.expected == "helps" and effect.p is None:
            ok = None
        row = {
            "arm": control.second,
            "against": control.first,
            "found": verdict,
            "ok": ok,
            "expected": control.expected,
            "group": control.group,
        }
        rows.append(row | asdict(effect))
    return rows


def in_words(row: Document) -> str:
    """Return one line of text about `row`, a comparison that `compared` tested."""
    effect = f"{change(100 * row['difference'])} points"
    if row["interval"]:
        ends = " to ".join(change(100 * end) for end in row["interval"])
        effect += f", 95 % interval {ends}"
    if row["p"] is not None:
        effect += f", p {row['p']:.2g}"
    if row["unbeaten"]:
        effect += f"; no better than {', '.join(row['unbeaten'])}"
    arms = f"{row['second']} against {row['first']}"
    return f"{row['group']} classes: {row['verdict']} ({arms}: {effect})"


def packed(result: Result) -> Document:
    """Return a result as a JSON object.

    The predictions on a split are a string of digits: 1 if correct, 0 if wrong.
    """
    hits = {name: "".join(map(str, bits.astype(int))) for name, bits in result.hits.items()}
    return {"figures": result.figures, "hits": hits}


def unpacked(tree: Document) -> Result:
    """Return the result in a JSON object that `packed` returned."""
    hits = {name: np.array([*bits]) == "1" for name, bits in tree["hits"].items()}
    return Result(tree["figures"], hits)
