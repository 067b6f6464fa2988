"""Results of a study's arms: differences between arms, Holm's correction, verdicts and controls."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np

from duetgan.metrics.comparison.paired import LEVEL, Difference, by_seeds, by_seeds_and_images, holm
from duetgan.metrics.protocol import Document
from duetgan.reporting.figures import change
from duetgan.studies.images import HELD_OUT, TEST

GROUPS, CLASSES = "each group", "each class"  # values of Comparison.group
HELPS, HURTS = "helps", "hurts"
OPEN, EMPTY = "cannot tell", "not tried"
ACCEPTED = {"helps": (HELPS,), "not helps": (HURTS, OPEN), "same": (OPEN,)}  # by `expected`
MIN_SEEDS = 5  # for the verdict `helps`
MIN_USED = 0.05  # fraction of the images that an arm should use, below which it was not tried


@dataclass(frozen=True)
class Comparison:
    """A test if the second arm is better than the first one and than all `controls`.

    With `expected`, it is a control of the study, which is void if a control comes out differently.
    `helps`: the second arm must be significantly better; `not helps`: it must not be; `same`: it
    must be neither better nor worse.
    """

    first: str
    second: str = ""  # the arm that declares it
    # a group of classes, a class, GROUPS or CLASSES (a comparison for each); ignored for a figure
    group: str = "all"
    controls: Sequence[str] = ()  # arms that lack the supposed cause of the effect
    figure: str | None = None  # a metric of the runs; None: hits
    larger_is_better: bool = True
    family: str = "main"  # Holm's correction is over all comparisons of a family
    asked: bool = False  # True: it is one of the study's verdicts
    expected: Literal["helps", "not helps", "same"] | None = None
    why: str = ""  # the purpose of a control, for the report


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    figures: dict[str, float | None] = field(default_factory=dict)
    # split -> True for correct predictions, bool [n], in the file's order
    hits: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """The results of all arms for the same seeds."""

    seeds: Sequence[int]
    by_arm: dict[str, list[Result]]  # in the order of the seeds
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)  # of each split, int64 [n]
    # labels of each group of classes, then of each class alone
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def hits(self, arm: str, split: str = TEST) -> np.ndarray:
        """Return correct predictions by seed and image, bool [seeds, n]."""
        return np.stack([result.hits[split] for result in self.by_arm[arm]])

    def figures(self, arm: str, name: str) -> list[float | None]:
        """Return a metric of an arm at each seed."""
        return [result.figures.get(name) for result in self.by_arm[arm]]

    def mean_figure(self, arm: str, name: str) -> float | None:
        """Return the mean of a metric over the seeds that have it."""
        values = _without_none(self.figures(arm, name))
        return float(np.mean(values)) if values else None

    def weights(self, group: str, split: str = TEST) -> np.ndarray:
        """Return the weight of each image in the group's mean recall, float64 [n], of sum 1."""
        labels = self.labels[split]
        chosen = np.isin(labels, self.groups[group])
        return chosen / (max(1, len(np.unique(labels[chosen]))) * np.bincount(labels)[labels])

    def mean(self, arm: str, group: str, split: str = TEST) -> float:
        """Return the mean recall of the group's classes over all seeds."""
        return float(self.hits(arm, split).mean(0) @ self.weights(group, split))

    def choose(self, name: str, arms: Sequence[str]) -> str:
        """Add an arm that has, for each seed, the results of the best of `arms`.

        The best arm has the largest mean recall on held-out images; of equal ones it is the first.
        Returns a text that lists the chosen arms with their numbers of seeds.
        """
        weights = self.weights("all", HELD_OUT)
        best = np.stack([self.hits(arm, HELD_OUT) @ weights for arm in arms]).round(9).argmax(0)
        chosen = [arms[index] for index in best]
        self.by_arm[name] = [self.by_arm[arm][seed] for seed, arm in enumerate(chosen)]
        return ", ".join(
            f"{arm} ({count} of {len(chosen)} seeds)"
            for arm, count in Counter(chosen).most_common()
        )


def difference(
    results: Results, first: str, second: str, group: str, figure: str | None
) -> Difference | None:
    """Return the second arm's metric minus the first one's; None if a metric is missing."""
    if figure is None:
        return by_seeds_and_images(
            results.hits(first), results.hits(second), results.weights(group)
        )
    first_values = _without_none(results.figures(first, figure))
    second_values = _without_none(results.figures(second, figure))
    if len(first_values) + len(second_values) < 2 * len(results.seeds):
        return None
    if len(first_values) > 1:
        return by_seeds(first_values, second_values)
    return Difference(second_values[0] - first_values[0], None, None, "one seed")


def _without_none(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def answer(value: float, p: float | None, *, larger_is_better: bool = True) -> str:
    """Return the verdict `helps`, `hurts` or `cannot tell` on a difference and its p-value."""
    if p is None or p >= LEVEL:
        return OPEN
    return HELPS if (value > 0) == larger_is_better else HURTS


def compared(results: Results, comparisons: Sequence[Comparison]) -> list[Document]:
    """Test each comparison whose metrics are present.

    The p-value of an improvement is the largest one of the tests against the first arm and against
    each control, an intersection-union test (Berger 1982). With fewer than MIN_SEEDS seeds the
    verdict is never `helps`. An arm whose metric `used` is below MIN_USED is not tested; its
    verdict is `not tried`.

    Returns:
        Of each comparison its fields, `first_value`, `second_value`, `difference`, its 95 %
        `interval`, `p` (corrected after Holm within the family), `method`, `unbeaten` (controls
        that are as good) and `verdict`.
    """
    rows: list[Document] = []
    for comparison in comparisons:
        first, second = comparison.first, comparison.second
        group, figure = comparison.group, comparison.figure
        sign = 1 if comparison.larger_is_better else -1
        effect = difference(results, first, second, group, figure)
        if effect is None:
            continue
        row = asdict(comparison) | asdict(effect)
        row |= {"controls": list(comparison.controls), "unbeaten": []}
        del row["expected"], row["why"]
        row["first_value"], row["second_value"] = (
            results.mean(arm, group) if figure is None else results.mean_figure(arm, figure)
            for arm in (first, second)
        )
        used = results.mean_figure(second, "used")
        if used is not None and used < MIN_USED:
            row |= {"p": None, "verdict": EMPTY}
        elif sign * effect.difference > 0 and effect.p is not None:
            row["p"] = effect.p
            for name in comparison.controls:
                test = difference(results, name, second, group, figure)
                is_better = test is not None and sign * test.difference > 0
                p = test.p if test is not None and is_better else None
                if p is None or p >= LEVEL:
                    row["unbeaten"].append(name)
                row["p"] = max(row["p"], 1.0 if p is None else p)
        rows.append(row)
    for family in dict.fromkeys(row["family"] for row in rows):
        holm(row for row in rows if row["family"] == family)
    for row in rows:
        verdict = answer(row["difference"], row["p"], larger_is_better=row["larger_is_better"])
        if verdict == HELPS and len(results.seeds) < MIN_SEEDS:
            verdict = OPEN
        row.setdefault("verdict", verdict)
    return rows


def checked(results: Results, controls: Sequence[Comparison]) -> list[Document]:
    """Test the controls of a study.

    Returns:
        Of each control its fields, `difference`, `interval`, `p` (not corrected), the verdict
        `found`, and `ok`, which is None if one seed is too few to tell. A control whose metrics are
        missing has failed.
    """
    rows = []
    for control in controls:
        effect = difference(results, control.first, control.second, control.group, control.figure)
        values: Document = {"difference": None, "interval": None, "p": None}
        verdict = ""
        if effect is not None:
            values = asdict(effect)
            verdict = answer(effect.difference, effect.p, larger_is_better=control.larger_is_better)
        ok: bool | None = verdict in ACCEPTED[control.expected or "helps"]
        if control.expected == "helps" and effect is not None and effect.p is None:
            ok = None
        row = {
            "arm": control.second,
            "against": control.first,
            "found": verdict or OPEN,
            "ok": ok,
            "expected": control.expected,
            "why": control.why,
            "group": control.group,
            "figure": control.figure,
            "larger_is_better": control.larger_is_better,
        }
        rows.append(row | values)
    return rows


def in_words(row: Document) -> str:
    """Return the text of a row of `compared`."""
    name = row["figure"]
    scale, unit = 1, ""
    if name is None:
        name = f"{row['group']} classes"
        scale, unit = 100, " points"
    effect = f"{change(scale * row['difference'])}{unit}"
    if row["interval"]:
        effect += f", 95 % interval {' to '.join(change(scale * end) for end in row['interval'])}"
    p = "not known" if row["p"] is None else f"{row['p']:.2g}"
    if row["p"] is not None and row["p"] < 1e-4:
        p = "below 0.0001"
    effect += f", p {p}"
    if row["unbeaten"]:
        effect += f"; no better than {', '.join(row['unbeaten'])}"
    return f"{name}: {row['verdict']} ({row['second']} against {row['first']}: {effect})"


def packed(result: Result) -> Document:
    """Return a result ready for JSON, with each hit as a digit."""
    hits = {name: "".join(map(str, bits.astype(int))) for name, bits in result.hits.items()}
    return {"figures": result.figures, "hits": hits}


def unpacked(tree: Document) -> Result:
    """Return the result that `packed` made ready for JSON."""
    hits = {name: np.array([*bits]) == "1" for name, bits in tree["hits"].items()}
    return Result(tree["figures"], hits)
