"""The study `augment`: its arms, its choices, and a tiny one from images to verdicts."""

import json
import shutil

import numpy as np
import pytest

from duetgan.extras.studies import command as script
from duetgan.extras.studies.augment import (
    HELD_BACK_ARM,
    REAL,
    UNTRAINED,
    Augment,
    AugmentConfig,
)
from duetgan.extras.studies.images import HELD_BACK, HELD_OUT, TEST, quickened
from duetgan.extras.studies.results import Result, Results
from duetgan.extras.studies.subjects import SUBJECTS, load_subject
from duetgan.utils.config.build import build
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli
from tests.conftest import REPOSITORY

CHEAP = ("pixels", "untrained features")  # nothing is trained
RECIPES = sorted((REPOSITORY / "configs").glob("study_*.yaml"))


def config_of(**changes):
    """The study's own recipe, changed."""
    return build(AugmentConfig, read_yaml(REPOSITORY / "configs/study_augment.yaml") | changes)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_one_of_a_study_whose_parts_fit_together(recipe, tmp_path):
    config_class, subject_class = load_subject(recipe.stem.split("_")[1])
    trees = [read_yaml(recipe)]
    trees += [quickened(read_yaml(recipe))] if "quick" in trees[0] else []
    for tree in trees:
        made = subject_class(build(config_class, tree, source=str(recipe)), tmp_path, None)
        names = [arm.name for arm in made.arms]
        assert len(set(names)) == len(names)
        known = {*names, *made.choices}
        for row in made.comparisons:
            assert {row.first, row.second, *row.controls} <= known
        assert {row.expected for row in made.comparisons} > {"not helps"}


def test_every_arm_is_a_training_that_its_recipe_takes(tmp_path, asked):
    arms = [arm for arm in Augment(config_of(), tmp_path).arms if arm.name not in CHEAP]
    told = {name: config for name, (config, _) in asked(arms).items()}
    assert {config.seed for config in told.values()} == {3}
    assert len({config.steps for config in told.values()}) == 1
    assert told["samples 0.25"].data.synthetic.share == pytest.approx(0.2)
    assert told["samples 2"].data.synthetic.share == pytest.approx(2 / 3, abs=1e-6)
    files = {name: config.data.synthetic.path for name, config in told.items() if config.data.synthetic.on}
    places = {f"samples {ratio}": f"samples/ratio-{ratio}" for ratio in ("0.25", "0.5", "1", "2")}
    places |= {UNTRAINED: "untrained-samples/ratio-1", HELD_BACK_ARM: "held-back-real-images/ratio-1"}
    assert files == {name: str(tmp_path / f"jobs/{place}.lmdb") for name, place in places.items()}
    assert told["class weights"].loss.class_weights == "balanced"
    assert told["balanced sampling"].data.sampling == "balanced"
    assert told[HELD_BACK_ARM].data.synthetic.balance == told[UNTRAINED].data.synthetic.balance == "fill"
    assert told[HELD_BACK_ARM].data.synthetic.share == told[UNTRAINED].data.synthetic.share == 0.5
    assert not told[REAL].data.synthetic.on
    assert len({repr(config) for config in told.values()}) == len(told) == 11
    assert told["logit adjustment"].loss.logit_adjustment == 1


def test_added_images_are_of_their_source_and_as_many_as_a_ratio_says(tmp_path, monkeypatch):
    """Rare classes get more: as many as they lack of the largest one's."""
    drawn = {}
    monkeypatch.setattr(Augment, "counts", lambda self, part: [60, 30, 10])
    monkeypatch.setattr(Augment, "draw", lambda self, file, *of: drawn.update({file.parent.name: of}))
    for tail, counts in ((50, [0, 38, 63]), (1, [34, 34, 34])):
        subject = Augment(config_of(ratios=[1.0], data={"source": "sample", "long_tail": tail}), tmp_path)
        for job in subject.jobs[3:6]:
            job.make(job.place, 7)
        runs = {
            "samples": tmp_path / "jobs/generator/run",
            "untrained-samples": tmp_path / "jobs/untrained-generator/run",
        }
        sources = runs | {"held-back-real-images": subject.part(HELD_BACK)}
        assert drawn == {name: (counts, source, 7) for name, source in sources.items()}


def test_the_ratio_is_chosen_on_held_out_images_whatever_the_test_images_say():
    right = np.arange(10) < 8
    some = Result({}, {HELD_OUT: right, TEST: ~right})
    none = Result({}, {HELD_OUT: ~right, TEST: right})
    every = Result({}, {HELD_OUT: np.ones(10, bool), TEST: right})
    labels = dict.fromkeys((HELD_OUT, TEST), np.zeros(10, int))
    arms = {"a": [some, some], "b": [none, none], "c": [none, every]}
    results = Results([0, 1], arms, labels, {"all": [0]})
    assert results.choose("best", ["a", "b"]) == "a (2 of 2 seeds)"
    assert results.choose("other", ["b", "a", "c"]) == "a (1 of 2 seeds), c (1 of 2 seeds)"
    assert results.by_arm["other"] == [some, every]
    assert results.hits("other", TEST).tolist() == [(~right).tolist(), right.tolist()]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["augmnt"], "study 'augmnt' is unknown (did you mean 'augment'?)"),
        (["augment", "--data.source", "null"], "data: give either source"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(argv, words, capsys, tmp_path):
    assert run_cli(script.main, [*argv, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_study_has_a_recipe():
    assert {recipe.stem.split("_")[1] for recipe in RECIPES} == set(SUBJECTS)


@pytest.mark.slow
def test_a_tiny_study_from_images_to_verdicts_and_an_arm_made_again(tmp_path, tiny):
    more = ["--data.long-tail", "4", "--ratios", "[0.5]"]
    found, printed = tiny("augment", tmp_path / "whole", *more)
    assert "samples 0.5: mean recall, all " in printed
    assert (found["complete"], found["runs"]) == (True, {"done": 10, "planned": 10})
    assert [arm["name"] for arm in found["arms"]][7:] == ["samples 0.5", UNTRAINED, HELD_BACK_ARM]
    assert set(found["choices"]) == {"best classic arm", "best arm with samples"}
    assert found["void"] == any(row["ok"] is False for row in found["controls"])
    for log in (tmp_path / "whole").glob("runs/*/run.log"):
        assert "done: step 4 of 4" in log.read_text()

    (tmp_path / "whole/runs/real-only-s0.json").unlink()
    shutil.rmtree(tmp_path / "whole/runs/real-only-s0")
    again, printed = tiny("augment", tmp_path / "whole", *more, "--json")
    assert json.loads(printed) == again == found
