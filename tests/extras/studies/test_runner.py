"""A study of runs that cost nothing: what is kept, what is made again, what an end in the middle leaves."""

import json
import os
import signal
import time

import numpy as np
import pytest

from duetgan.extras.studies.images import StudyConfig, StudyData, groups_of
from duetgan.extras.studies.page import signed, write_study_page
from duetgan.extras.studies.results import Comparison, Result, Results, checked, compared, in_words
from duetgan.extras.studies.runner import Study
from duetgan.extras.studies.subject import Job, Subject
from duetgan.metrics.comparison.paired import holm
from duetgan.utils.errors import StoppedBySignal, UserError
from tests.reporting.test_report import page

LABELS = np.arange(400) % 4
SHARES = {"real": 0.5, "samples": 0.5, "untrained": 0.45, "held back": 0.7}


class MadeUp(Subject):
    """Arms that are right on a share of the images; `calls` are the runs and jobs that were made, in order."""

    title = "Do they help?"
    notes = ("so",)

    def __init__(self, config, folder, shares=SHARES, *, before=lambda call: None, setting=1):
        self.shares, self.before, self.setting = shares, before, setting
        self.calls = []
        super().__init__(config, folder)

    def made(self, call, file):
        self.calls.append(call)
        self.before(call)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    def declare(self):
        def job(name):
            return lambda place, _seed, **_key: self.made(name, place / "file") or {"name": name}

        images = self.add(Job("images"), job("images"), setting=self.setting)
        generator = self.add(Job("generator"), job("generator"), of=images / "file")
        asked = [Comparison("real", group=of, asked=True) for of in ("all", "few")]
        against = {
            "samples": asked,
            "untrained": [Comparison("real", expected="not helps", why="no")],
            "held back": [Comparison("real", family="all arms"), Comparison("real", expected="helps", why="yes")],
        }

        def make(number, name, share):
            def run(place, seed, **_key):
                self.made((name, seed), place / "checkpoints/x")
                hits = np.random.default_rng([number, seed]).random(len(LABELS)) < share
                return Result({"accuracy": float(hits.mean())}, {"test": hits})

            needs = [images, generator] if name == "samples" else [images]
            arm = Job(name, f"right on {share}", "made up", against.get(name, ()))
            self.add(arm, run, share=share, needs=needs)

        for number, arm in enumerate(self.shares.items()):
            make(number, *arm)

    def labels(self):
        return {"test": LABELS}

    def groups(self):
        return {"all": [0, 1, 2, 3], "few": [3]}


def study(folder, seeds=3, **options):
    subject = MadeUp(StudyConfig.model_construct(seeds=seeds, data=StudyData()), folder, **options)
    return Study("made-up", subject), subject


def test_all_is_made_once_and_the_table_says_what_came_out(tmp_path):
    made, subject = study(tmp_path / "a")
    found = made.run()
    order = ["images", ("real", 0), "generator", ("samples", 0), ("untrained", 0), ("held back", 0), ("real", 1)]
    assert subject.calls[:7] == order
    assert len(subject.calls) == 2 + 12
    assert (found["complete"], found["void"], found["seeds"]) == (True, False, [0, 1, 2])
    assert {row["group"]: row["verdict"] for row in found["verdicts"]} == dict.fromkeys(("all", "few"), "cannot tell")
    held = next(row for row in found["comparisons"] if row["second"] == "held back")
    assert (held["p"] < 0.05, held["verdict"]) == (True, "cannot tell")  # of three seeds
    assert found == json.loads((tmp_path / "a/study.json").read_text())
    assert subject.outcome(subject.place("generator")) == {"name": "generator"}
    assert not list((tmp_path / "a/runs").glob("*/checkpoints"))  # 4 * 3 of them would be gigabytes
    again, subject = study(tmp_path / "a")
    assert (again.run(), subject.calls) == (found, [])


@pytest.mark.parametrize("call", ["generator", ("untrained", 1)])
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
    half = json.loads((tmp_path / "killed/study.json").read_text())
    assert (half["complete"], half["void"]) == (False, None if call != ("untrained", 1) else False)
    assert half["runs"]["done"] < 12
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
    with pytest.raises(UserError, match="made or begun with other settings, or by an earlier version; remove it and"):
        study(tmp_path, setting=2)[0].run()
    with pytest.raises(UserError, match="was made or begun with other settings"):
        study(tmp_path, shares=SHARES | {"real": 0.4})[0].run()


def test_a_study_whose_control_fails_says_that_it_is_void(tmp_path):
    wrong = {"held back": 0.5}
    found = study(tmp_path, shares=SHARES | wrong)[0].run()
    assert found["void"]
    assert "void" in found["words"][0]
    assert next(iter(wrong)) in found["words"][1]
    text = page(write_study_page(tmp_path, found, command="duet study", config={})).text
    assert "This study is void." in text
    assert "WRONG" in text


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
            runs.append(Result(hits={"test": 0.8 * easy + 0.2 * draw.random(len(labels)) < level}))
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
    results = Results([0], {"x": [Result(hits={"test": hits})]}, {"test": labels}, groups)
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
            return Result(hits={name: 0.7 * of + 0.3 * draw.random(200) < level for name, of in easy.items()})

        by_arm = {arm: [result(level) for _ in range(5)] for arm, level in levels.items()}
        results = Results(range(5), by_arm, labels, groups)
        results.choose("base", ["scratch", "pixels"])
        rows = compared(results, [Comparison("base", arm, controls=("untrained",)) for arm in "abc"])
        false += any(row["verdict"] == "helps" for row in rows)
        (row,) = compared(results, [Comparison("base", "better", controls=("untrained",))])
        found += row["verdict"] == "helps"
    assert false <= 0.05 * 400
    assert found > 0.3 * 400


def test_holm_is_over_all_answers_of_a_family():
    results = made_up({"first": 0.6, "a": 0.62, "b": 0.63, "c": 0.59})
    alone = [compared(results, [Comparison("first", name, family=name)])[0] for name in "abc"]
    holm(alone)
    together = compared(results, [Comparison("first", name) for name in "abc"])
    assert [row["p"] for row in together] == pytest.approx([row["p"] for row in alone])


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


def test_a_difference_that_rounds_to_nothing_has_no_minus():
    assert [signed(value) for value in (-0.0002, -0.0123, 0.05)] == ["+0.0", "-1.2", "+5.0"]
