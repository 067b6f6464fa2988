"""Trainings that arms ask for, and tiny studies from images to verdicts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from duetgan.extras.studies import command as script
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli
from tests.end_to_end.helpers import CLASSIFIER, GAN


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Of each arm the config of its training and the step where that is to stop; nothing is trained."""
    told: dict[str, tuple[Any, Any]] = {}

    def note(recipe, overrides, *, run_dir, max_steps, **_more):
        told[Path(run_dir).parent.name] = build_run_config(read_yaml(recipe), overrides, recipe), max_steps
        raise KeyError  # before it is judged

    def of(arms):
        for arm in arms:
            with pytest.raises(KeyError):
                arm.make(tmp_path / arm.name, 3)
        return told

    monkeypatch.setattr("duetgan.extras.studies.subject.train", note)
    return of


def study_recipe(folder: Path, packed: Path) -> Path:
    """Of studies whose trainings take seconds."""
    common = "precision: fp32\nlog: {every: 4, tensorboard: false}\nevaluation: {every: 0, n: 20}\n"
    for name, recipe in (("gan", GAN), ("classifier", CLASSIFIER)):
        (folder / f"study-{name}.yaml").write_text(recipe + common)
    images = {"path": str(packed / "train.lmdb"), "test_path": str(packed / "test.lmdb"), "largest": 8}
    tree = {
        "seeds": 1,
        "data": {**images, "held_out": 0.2, "held_back": 0.3},
        "classifier": {"config": str(folder / "study-classifier.yaml"), "overrides": {"steps": 4}},
        "gan": {"config": str(folder / "study-gan.yaml")},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(tree))
    return folder / "study.yaml"


@pytest.fixture
def tiny(tmp_path, packed, capsys):
    """A study whose trainings take seconds: its document, and what the command printed."""
    recipe = study_recipe(tmp_path, packed)

    def made(subject, out, *options):
        argv = [subject, "--config", str(recipe), "--out", str(out), *options]
        assert run_cli(script.main, argv) == 0
        return json.loads((out / "study.json").read_text()), capsys.readouterr().out

    return made
