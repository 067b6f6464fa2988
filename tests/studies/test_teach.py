"""The study `teach`: what its arms train with, who judges them, and a tiny one from images to page."""

import json
from pathlib import Path
from typing import Any

import pytest

import study as script
from duetgan.metrics.features.extractors import fingerprint
from duetgan.models.restore import classifier_from
from duetgan.studies.images import TEST
from duetgan.studies.teach import (
    PLAIN,
    SHORT,
    WRONG_TEACHER,
    Teach,
    TeachConfig,
)
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.build import build
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from duetgan.utils.script import run_cli
from tests.conftest import REPOSITORY
from tests.metrics.conftest import classifier_run, gan_run, pack
from tests.reporting.test_report import page
from tests.studies.test_augment import write_recipe

RECIPE = REPOSITORY / "configs/study_teach.yaml"


def subject_in(folder, **changes):
    """The study's own recipe, changed."""
    return Teach(build(TeachConfig, read_yaml(RECIPE) | changes), folder)


def test_arms_differ_by_their_classifiers_loss_alone(tmp_path, monkeypatch):
    told: dict[str, Any] = {}
    most: dict[str, Any] = {}

    def note(recipe, overrides, *, run_dir, max_steps, **_more):
        name = Path(run_dir).name
        told[name], most[name] = build_run_config(read_yaml(recipe), overrides, recipe), max_steps
        raise KeyError  # before it is judged

    monkeypatch.setattr("duetgan.studies.subject.train", note)
    for arm in subject_in(tmp_path, teacher=[0.5]).arms():
        with pytest.raises(KeyError):
            arm.make(tmp_path / arm.name, 3)
    plain, taught = told[PLAIN], told["teacher, weight 0.5"]
    assert taught.loss.classifier == str(tmp_path / "jobs/teacher/run")
    assert taught.loss.classifier_weight == told[WRONG_TEACHER].loss.classifier_weight == 0.5
    assert told[WRONG_TEACHER].loss.classifier == str(tmp_path / "jobs/teacher-by-chance/run")
    head, both = told["head on D, weight 1"].loss, told["head on D, weight 1, learns samples"].loss
    assert (head.auxiliary_weight, head.auxiliary_fakes, both.auxiliary_fakes) == (1, False, True)
    for config in told.values():
        config.loss = plain.loss
    assert len({repr(config) for config in told.values()}) == 1
    assert most == dict.fromkeys(told) | {SHORT: plain.steps // 10}


def test_the_judge_took_no_part_and_the_teacher_is_refused(tmp_path):
    subject = subject_in(tmp_path, n=30)
    pack(subject.part(TEST), count=30, seed=5)
    judge, teacher = (
        fingerprint(classifier_from(load(resolve(classifier_run(tmp_path / f"jobs/{name}/run", seed=seed)))))
        for name, seed in (("judge", 1), ("teacher", 2))
    )
    taught, wrongly = (
        load(resolve(gan_run(tmp_path / name, teachers=[weights]))) for name, weights in (("a", teacher), ("b", judge))
    )
    figures = subject.judged(taught).figures
    assert 0 <= figures["recognised"] <= 1
    assert figures["frechet"] > 0
    assert figures["diversity"] > 0
    with pytest.raises(UserError, match="supplied a loss to this generator, so it cannot judge it"):
        subject.judged(wrongly)


@pytest.mark.parametrize("more", [["--teacher", "[]", "--head", "[]"], ["--gan.run", "runs/a"], ["--short", "0"]])
def test_what_cannot_be_is_refused(more, tmp_path, capsys):
    assert run_cli(script.main, ["teach", *more, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_a_tiny_study_from_images_to_page(tmp_path, packed, capsys):
    made = read_yaml(write_recipe(tmp_path, packed))
    made["data"] |= {"source": None, "long_tail": 1.0}
    more = {f"--{key}": json.dumps(made[key]) for key in ("data", "classifier", "gan")}
    options = [text for pair in more.items() for text in pair]
    out = tmp_path / "out"
    begun = ["teach", *options, "--seeds", "1", "--n", "20", "--short", "0.5", "--out", str(out)]
    assert run_cli(script.main, [*begun, "--teacher", "[0.5]"]) == 0
    assert "page: " in capsys.readouterr().out
    found = json.loads((out / "study.json").read_text())
    assert found["runs"] == {"done": 6, "planned": 6}
    assert {row["figure"] for row in found["comparisons"]} == {"recognised", "frechet", "diversity"}
    assert page(out / "report.html").tags.count("img") == 6
