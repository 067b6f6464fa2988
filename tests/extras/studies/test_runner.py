"""A study of runs that cost nothing: what is kept, what is made again, what an end in the middle leaves."""

import json
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from duetgan.extras.studies.images import Recipe, StudyConfig, StudyData, groups_of
from duetgan.extras.studies.results import Comparison, Result, Results, checked, compared, in_words
from duetgan.extras.studies.runner import Study
from duetgan.extras.studies.subject import Job, Subject
from duetgan.reporting.figures import change
from duetgan.utils.errors import StoppedBySignal, UserError

LABELS = np.arange(400) % 4
SHARES = {"real": 0.5, "samples": 0.5, "untrained": 0.45, "held back": 0.7}


class MadeUp(Subject):
    """Arms that are right on a share of the images; `calls` are the runs and jobs that were made, in order."""

    def __init__(self, config, folder, shares=SHARES, *, before=lambda call: None):
        self.shares, self.before = shares, before
        self.calls = []
        super().__init__(config, folder)

    def made(self, call, file):
        self.calls.append(call)
        self.before(call)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    def declare(self):
        def job(name):
            return lambda place, _seed: self.made(name, place / "file") or {"name": name}

        self.jobs.clear()  # the division of images
        self.add(Job("images"), job("images"))
        self.add(Job("generator"), job("generator"))
        against = {
            "samples": [Comparison("real", group=of) for of in ("all", "few")],
            "untrained": [Comparison("real", expected="not helps")],
            "held back": [Comparison("real"), Comparison("real", expected="helps")],
        }

        def make(number, name, share):
            def run(place, seed):
                self.made((name, seed), place / "checkpoints/x")
                hits = np.random.default_rng([number, seed]).random(len(LABELS)) < share
                return Result({"accuracy": float(hits.mean())}, {"test": hits})

            self.add(Job(name, f"right on {share}", "made up", against.get(name, ())), run)

        for number, arm in enumerate(self.shares.items()):
            make(number, *arm)

    def labels(self):
        return {"test": LABELS}

    def groups(self):
        return {"all": [0, 1, 2, 3], "few": [3]}


def study(folder, seeds=3, **options):
    recipes: Any = {name: Recipe(config=f"configs/quickstart_{name}.yaml") for name in ("gan", "classifier")}
    subject = MadeUp(StudyConfig(seeds=seeds, data=StudyData(source="sample"), **recipes), folder, **options)
    return Study("made-up", subject), subject


def test_all_is_made_once_and_the_table_says_what_came_out(tmp_path):
    made, subject = study(tmp_path / "a")
    found = made.run()
    order = ["images", "generator", ("real", 0), ("samples", 0), ("untrained", 0), ("held back", 0), ("real", 1)]
    assert subject.calls[:7] == order
    assert len(subject.calls) == 2 + 12
    assert (found["complete"], found["void"], found["seeds"]) == (True, False, [0, 1, 2])
    rows = found["comparisons"]
    assert [row["group"] for row in rows] == ["all", "few", "all"]
    assert {row["verdict"] for row in rows} == {"cannot tell"}
    held = rows[2]
    assert held["difference"] == pytest.approx(0.2, abs=0.05)
    for number, arm in enumerate(found["arms"]):
        hits = np.mean(
            [np.random.default_rng([number, seed]).random(400) < SHARES[arm["name"]] for seed in range(3)], 0
        )
        assert arm["recall"] == pytest.approx({"all": hits.mean(), "few": hits[LABELS == 3].mean()})
    recalls = {arm["name"]: arm["recall"]["all"] for arm in found["arms"]}
    assert (held["first_value"], held["second_value"]) == (recalls["real"], recalls["held back"])
    points = change(100 * (recalls["held back"] - recalls["real"]))
    assert in_words(held).startswith(
        f"all classes: cannot tell (held back against real: {points} points, 95 % interval "
    )
    assert found == json.loads((tmp_path / "a/study.json").read_text())
    assert subject.outcome(subject.place("generator")) == {"name": "generator"}
    assert not list((tmp_path / "a/runs").glob("*/checkpoints"))  # 4 * 3 of them would be gigabytes
    again, subject = study(tmp_path / "a")
    assert (again.run(), subject.calls) == (found, [])


@pytest.mark.parametrize("call", [("real", 0), ("untrained", 1)])
def test_a_study_that_was_killed_goes_on_and_ends_in_the_same_table(tmp_path, call):
    def kill(number):
        def before(now):
            if now == call:
                os.kill(os.getpid(), number)
                time.sleep(1)

        return before

    whole = study(tmp_path / "whole")[0].run()
    stopped, first = study(tmp_path / "killed", before=kill(signal.SIGTERM))
    with pytest.raises(StoppedBySignal, match="SIGTERM; the same command goes on"):
        stopped.run()
    if call == ("untrained", 1):
        half = json.loads((tmp_path / "killed/study.json").read_text())
        assert (half["complete"], half["void"], half["runs"]["done"]) == (False, False, 6)
    goes_on, second = study(tmp_path / "killed")
    assert goes_on.run() == whole
    assert second.calls[0] == call  # and nothing before it
    assert len(first.calls) + len(second.calls) == 14 + 1
    assert (tmp_path / "killed/study.json").read_bytes() == (tmp_path / "whole/study.json").read_bytes()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_more_seeds_are_added_and_other_settings_refused(tmp_path):
    study(tmp_path, seeds=2)[0].run()
    more, subject = study(tmp_path, seeds=3)
    found = more.run()
    assert found["seeds"] == [0, 1, 2]
    assert study(tmp_path, seeds=1)[0].run()["seeds"] == [0]
    assert [call for call in subject.calls if call[1] != 2] == []
    other, subject = study(tmp_path)
    subject.config = subject.config.changed(seeds=4)
    other.run()
    subject.config = subject.config.changed(data=StudyData(source="sample", seed=1))
    with pytest.raises(UserError, match="has runs with other settings; remove it, or choose another --out"):
        other.run()
    recipe = tmp_path / "recipe.yaml"
    edited, subject = study(tmp_path / "edited")
    subject.config = subject.config.changed(gan=Recipe(config=str(recipe)))
    recipe.write_text("steps: 6\n")
    edited.run()
    recipe.write_text("steps: 7\n")
    with pytest.raises(UserError, match="has runs with other settings"):
        edited.run()


def test_a_study_whose_control_fails_says_that_it_is_void(tmp_path):
    wrong = {"held back": 0.5}
    found = study(tmp_path, shares=SHARES | wrong)[0].run()
    assert found["void"]
    assert "void" in found["words"][0]
    assert next(iter(wrong)) in found["words"][1]


COUNTS = [1000, 100, 50, 10]


def made_up(shares, *, seeds=5, each=300, wobble=0.01):
    """Results of arms whose share of right answers on every class is `shares[arm]`, of `each` images of every class."""
    labels = np.repeat(np.arange(4), each)
    by_arm = {}
    easy = np.random.default_rng(0).random(len(labels))  # some images are easier than others, for all arms
    for number, (arm, share) in enumerate(shares.items()):
        runs = []
        for seed in range(seeds):
            draw = np.random.default_rng([number, seed])
            level = np.repeat(np.broadcast_to(share, 4), each) + wobble * draw.standard_normal()
            runs.append(Result({}, {"test": 0.8 * easy + 0.2 * draw.random(len(labels)) < level}))
        by_arm[arm] = runs
    return Results(range(seeds), by_arm, {"test": labels}, groups_of(COUNTS))


def test_groups_are_thirds_with_the_mean_recall_of_their_classes():
    assert groups_of([5, 1000, 10, 400, 30, 90, 7]) == {
        "all": [0, 1, 2, 3, 4, 5, 6],
        "many": [1, 3],
        "medium": [5, 4, 2],
        "few": [6, 0],
    }
    assert groups_of([9, 10, 11]) == {"all": [0, 1, 2]}  # even
    labels = np.array([0, 0, 0, 1, 2, 2])
    hits = np.array([1, 1, 0, 1, 0, 1], bool)
    groups = {"all": [0, 1, 2], "few": [2, 1]}
    results = Results([0], {"x": [Result({}, {"test": hits})]}, {"test": labels}, groups)
    assert results.mean("x", "all") == pytest.approx((2 / 3 + 1 + 1 / 2) / 3)
    assert results.mean("x", "few") == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("shares", "seeds", "verdict", "unbeaten"),
    [
        ({"arm": 0.7}, 5, "helps", []),
        ({"arm": 0.7}, 4, "cannot tell", []),
        ({"arm": 0.7, "chance": 0.7}, 5, "cannot tell", ["chance"]),
        ({"arm": 0.7, "untrained": 0.75}, 5, "cannot tell", ["untrained"]),
        ({"arm": 0.5, "untrained": 0.75}, 5, "hurts", []),
    ],
)
def test_what_helps_is_better_than_its_base_and_each_control(shares, seeds, verdict, unbeaten):
    results = made_up({"base": 0.6, "chance": 0.6, "untrained": 0.6, **shares}, seeds=seeds)
    (row,) = compared(results, [Comparison("base", "arm", controls=("chance", "untrained"))])
    assert (row["verdict"], row["unbeaten"]) == (verdict, unbeaten)
    assert all(name in in_words(row) for name in unbeaten)


def test_false_alarms_are_rare_over_400_studies():
    """Three arms that do nothing, against the best of two bases that is chosen on held-out images, and a control that
    is worse: how often is any of them said to help? And how often is an arm that helps by 6 points found?
    """
    draw, false, found = np.random.default_rng(7), 0, 0
    groups, labels = {"all": [0, 1]}, {name: np.arange(200) % 2 for name in ("held_out", "test")}
    levels = {"scratch": 0.6, "pixels": 0.59, "untrained": 0.5, "a": 0.6, "b": 0.6, "c": 0.6, "better": 0.66}
    for _ in range(400):
        easy = {name: draw.random(200) for name in labels}

        def result(level, easy=easy):
            level += 0.02 * draw.standard_normal()
            return Result({}, {name: 0.7 * of + 0.3 * draw.random(200) < level for name, of in easy.items()})

        by_arm = {arm: [result(level) for _ in range(5)] for arm, level in levels.items()}
        results = Results(range(5), by_arm, labels, groups)
        results.choose("base", ["scratch", "pixels"])
        rows = compared(results, [Comparison("base", arm, controls=("untrained",)) for arm in "abc"])
        false += any(row["verdict"] == "helps" for row in rows)
        (row,) = compared(results, [Comparison("base", "better", controls=("untrained",))])
        found += row["verdict"] == "helps"
    assert false <= 0.05 * 400
    assert found > 0.3 * 400


def test_holm_is_over_all_comparisons():
    results = made_up({"first": 0.6, "a": 0.62, "b": 0.63, "c": 0.59})
    alone = [compared(results, [Comparison("first", name)])[0] for name in "abc"]
    together = compared(results, [Comparison("first", name) for name in "abc"])
    assert min(row["p"] for row in together) == pytest.approx(3 * min(row["p"] for row in alone))


@pytest.mark.parametrize(
    ("shares", "held_back", "untrained"),
    [
        ({"held back": 0.7, "untrained": 0.55}, ("helps", True), ("hurts", True)),
        ({"held back": 0.6, "untrained": 0.6}, ("cannot tell", False), ("cannot tell", True)),
        ({"held back": 0.7, "untrained": 0.7}, ("helps", True), ("helps", False)),
    ],
    ids=["as it must be", "blind", "a leak"],
)
def test_controls_come_out_as_they_must_or_not(shares, held_back, untrained):
    expected = {"held back": "helps", "untrained": "not helps"}
    controls = [Comparison("real", arm, expected=how) for arm, how in expected.items()]  # type: ignore[arg-type]
    rows = checked(made_up({"real": 0.6, **shares}), controls)
    assert [(row["found"], row["ok"]) for row in rows] == [held_back, untrained]
