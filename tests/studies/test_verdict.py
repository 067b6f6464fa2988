"""Answers from results that are made up: differences, groups, Holm's correction, controls."""

import numpy as np
import pytest

from duetgan.metrics.comparison.paired import holm
from duetgan.studies.images import groups_of
from duetgan.studies.subject import Comparison, Control, Result, Results
from duetgan.studies.verdict import checked, compared, in_words

CLASSES = ["a", "b", "c", "d"]
COUNTS = [1000, 100, 50, 10]


def made_up(shares, *, seeds=4, each=300, wobble=0.01):
    """Results of arms whose share of right answers on every class is `shares[arm]`, of `each` images of every class."""
    labels = np.repeat(np.arange(4), each)
    by_arm = {}
    easy = np.random.default_rng(0).random(len(labels))  # some images are easier than others, for all arms
    for number, (arm, share) in enumerate(shares.items()):
        runs = []
        for seed in range(seeds):
            draw = np.random.default_rng([number, seed])
            level = np.repeat(np.broadcast_to(share, 4), each) + wobble * draw.standard_normal()
            runs.append(Result(hits={"test": 0.8 * easy + 0.2 * draw.random(len(labels)) < level}))
        by_arm[arm] = runs
    return Results(range(seeds), by_arm, {"test": labels}, groups_of(COUNTS, CLASSES))


def test_groups_are_thirds_by_the_number_of_training_images():
    assert groups_of([5, 1000, 10, 400, 30, 90, 7], list("stuvwxy")) == {
        "all": [0, 1, 2, 3, 4, 5, 6],
        "many": [1, 3],
        "medium": [5, 4, 2],
        "few": [6, 0],
        **{name: [label] for label, name in enumerate("stuvwxy")},
    }
    assert list(groups_of([9, 10, 11], list("abc"))) == ["all", "a", "b", "c"]  # even


def test_a_groups_figure_is_the_mean_recall_of_its_classes():
    labels = np.array([0, 0, 0, 1, 2, 2])
    hits = np.array([1, 1, 0, 1, 0, 1], bool)
    groups = {"all": [0, 1, 2], "few": [2, 1]}
    results = Results([0], {"x": [Result(hits={"test": hits})]}, {"test": labels}, groups)
    assert results.mean("x", "all") == pytest.approx((2 / 3 + 1 + 1 / 2) / 3)
    assert results.mean("x", "few") == pytest.approx(3 / 4)


def test_what_helps_helps_and_what_hurts_hurts():
    results = made_up({"first": 0.6, "better": [0.6, 0.6, 0.6, 0.75], "worse": 0.4, "like": 0.6})
    comparisons = [Comparison("first", name, of) for name in ("better", "worse", "like") for of in ("all", "few")]
    rows = compared(results, comparisons)
    told = {(row["second"], row["group"]): row["verdict"] for row in rows}
    assert told["better", "few"] == "helps"
    assert told["worse", "all"] == told["worse", "few"] == "hurts"
    assert told["like", "all"] == told["like", "few"] == "cannot tell"
    best = next(row for row in rows if (row["second"], row["group"]) == ("better", "few"))
    assert best["second_value"] - best["first_value"] == pytest.approx(best["difference"])
    assert in_words(best).startswith("few classes: helps (better against first: +")


def test_holm_is_over_all_answers_of_a_family():
    results = made_up({"first": 0.6, "a": 0.62, "b": 0.63, "c": 0.59})
    alone = [compared(results, [Comparison("first", name, family=name)])[0] for name in "abc"]
    holm(alone)
    together = compared(results, [Comparison("first", name) for name in "abc"])
    assert [row["p"] for row in together] == pytest.approx([row["p"] for row in alone])


@pytest.mark.parametrize(
    ("shares", "held_back", "untrained", "as_samples"),
    [
        ({"held back": 0.7, "untrained": 0.55, "as samples": 0.6}, ("helps", True), ("hurts", True), True),
        ({"held back": 0.6, "untrained": 0.6, "as samples": 0.5}, ("cannot tell", False), ("cannot tell", True), False),
        ({"held back": 0.7, "untrained": 0.7, "as samples": 0.6}, ("helps", True), ("helps", False), True),
    ],
    ids=["as it must be", "blind", "a leak"],
)
def test_controls_come_out_as_they_must_or_not(shares, held_back, untrained, as_samples):
    """The same images under two names, of seeds of their own: a gap lies within the seeds' noise, or beyond it."""
    expected = {"held back": "helps", "untrained": "not helps", "as samples": "same"}
    controls = [Control(arm, "real", how, "") for arm, how in expected.items()]  # type: ignore[arg-type]
    rows = checked(made_up({"real": 0.6, **shares}), controls)
    assert [(row["found"], row["ok"]) for row in rows[:2]] == [held_back, untrained]
    assert rows[2]["ok"] is as_samples


def test_figures_are_compared_by_seeds():
    runs: dict[str, list[float | None]] = {
        "plain": [3.0, 3.2, 3.1],
        "taught": [2.0, 2.3, 2.1],
        "gone": [1.0, None, 1.0],
    }
    by_arm = {arm: [Result({"distance": value}) for value in values] for arm, values in runs.items()}
    results = Results([0, 1, 2], by_arm, {}, {"all": []})
    comparisons = [Comparison("plain", name, figure="distance", larger_is_better=False) for name in ("taught", "gone")]
    (row,) = compared(results, comparisons)  # a run without the figure: no answer
    assert (row["verdict"], row["difference"]) == ("helps", pytest.approx(-0.9667, abs=1e-3))
    assert in_words(row | {"difference": -1234.5, "interval": [-2000.0, 31.0]}).startswith(
        "distance: helps (taught against plain: -1,234, 95 % interval -2,000 to +31, p "
    )
    assert checked(results, [Control("gone", "plain", "not helps", "", figure="distance")])[0]["ok"] is False
