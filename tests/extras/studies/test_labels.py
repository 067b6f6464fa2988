"""The study `labels`: whose labels, and a tiny one from images to verdicts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.data.reading.dataset import Dataset
from duetgan.extras.studies.few_labels import few_labels
from duetgan.extras.studies.images import HELD_OUT, TEST, TRAIN
from duetgan.extras.studies.labels import (
    CONSISTENT,
    OF_UNTRAINED,
    PSEUDO,
    RANDOM,
    READOUT,
    UNLABELLED,
    Labels,
    LabelsConfig,
    arm_name,
)
from duetgan.extras.studies.subject import GENERATOR, UNTRAINED, of_seed
from duetgan.inference.dataset import predicted_labels
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.build import build
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator
from tests.conftest import REPOSITORY, assert_raises
from tests.metrics.conftest import classifier_run, pack

RECIPE = REPOSITORY / "configs/study_labels.yaml"


@pytest.fixture
def subject(tmp_path, monkeypatch, request):
    """The study over small files, whose classifiers are untrained; it notes each training's overrides."""

    def train(self, folder, _recipe, overrides, seed, _steps=None):
        self.notes[folder.parent.name] = {
            key: str(of_seed(value, seed)) if isinstance(value, Path) else value for key, value in overrides.items()
        }
        if not folder.is_dir():
            classifier_run(folder, seed=seed)

    monkeypatch.setattr(Labels, "train", train)
    tree = read_yaml(RECIPE) | {"per_class": [4], "threshold": getattr(request, "param", 0.35)}
    made: Any = Labels(build(LabelsConfig, tree), tmp_path)
    made.notes = {}
    pack(made.part(TRAIN), count=60)
    for name, seed in ((TEST, 5), (HELD_OUT, 7)):
        pack(made.part(name), count=30, seed=seed)
    return made


def made_by(subject, way, seed=3):
    """The result of an arm of 4 labels, and the images and overrides that it trained with."""
    (arm,) = [arm for arm in subject.arms if arm.name == arm_name(4, way)]
    place = of_seed(arm.place, seed)
    place.mkdir(parents=True, exist_ok=True)
    return arm.make(place, seed), subject.notes[place.name]


def test_a_seed_draws_its_labels_and_what_learnt_them_labels_the_rest(subject):
    result, overrides = made_by(subject, "")
    draws = subject.folder / "runs/4-labels-s3"
    classifier = classifier_from(load(resolve(draws / "run")))
    assert overrides["data.path"] == str(draws / "few.lmdb")
    with Dataset(subject.part(TRAIN)) as train:
        chosen = few_labels(train.labels(), 4, 3)
        named, sure = predicted_labels(classifier, train, batch_size=16)
        rest = np.setdiff1d(np.arange(60), chosen)
        kept = rest[sure[rest] >= 0.35]
        assert len(kept) > 0
        expected = np.concatenate([chosen, kept])
        for kind in ("guessed", "wrong"):
            with Dataset(draws / f"{kind}.lmdb") as file:
                images, labels = file.read(range(len(file)))
                assert (images == train.read(expected)[0]).all()
                assert (labels[:12] == train.labels()[chosen]).all()
                assert (labels[12:] == named[kept]).all() == (kind == "guessed")
        assert result.figures["pseudo_labels"] == len(kept) / 48
        assert result.figures["pseudo_right"] == (named == train.labels())[kept].mean()


def test_arms_differ_by_their_files_and_their_discriminator(subject, monkeypatch):
    """The generators see no label, and a readout of pixels or maps only those of the arm's images."""
    images, draws = subject.place(UNLABELLED) / "images.lmdb", subject.folder / "runs/4-labels-s3"
    monkeypatch.setattr(Labels, "judge", lambda self, run: None)
    monkeypatch.setattr(f"{__name__}.classifier_run", lambda *_, **__: None)
    readouts: dict[str, Any] = {}
    monkeypatch.setattr("duetgan.extras.studies.subject.hits_of", lambda *of: readouts.update(last=of) or {})
    made = {way: made_by(subject, way)[1] for way in (PSEUDO, RANDOM)}
    assert made == {
        PSEUDO: {"data.path": str(draws / "guessed.lmdb")},
        RANDOM: {"data.path": str(draws / "wrong.lmdb")},
    }
    labels = np.arange(60) % 3
    for name, suffix in ((GENERATOR, ""), (UNTRAINED, f", {OF_UNTRAINED}")):
        (job,) = [job for job in subject.jobs if job.name == name]
        job.make(job.place, 0)
        assert subject.notes[job.place.name]["data.path"] == str(images)
        start = {"model.name": "discriminator", "model.weights": str(job.place / "run"), "unlabelled.path": str(images)}
        assert made_by(subject, CONSISTENT + suffix)[1] == start | {"data.path": str(draws / "few.lmdb")}
        for way in (READOUT + suffix, "pixels"):
            (arm,) = [arm for arm in subject.arms if arm.name == arm_name(4, way)]
            arm.make(arm.place, 3)
            training, files, features, labelled = readouts["last"]
            assert (training, [*files]) == (subject.part(TRAIN), [HELD_OUT, TEST])
            assert (labelled(labels) == few_labels(labels, 4, 3)).all()
            assert way == "pixels" or features.keywords["weights"] == job.place / "run"


@pytest.mark.slow
def test_a_tiny_study_from_images_to_verdicts(tmp_path, tiny):
    few = ("--few.overrides", "{finetune.probe: true, steps: 4, batch_size: 8}")
    found, _ = tiny("labels", tmp_path / "out", "--per-class", "[2]", "--threshold", "0.1", *few)
    assert found["runs"] == {"done": 10, "planned": 10}
    assert found["comparisons"][0]["second"] == arm_name(2, PSEUDO)
    assert {row["first"] for row in found["comparisons"]} == {"2 labels, best without"}
    assert found["choices"]["2 labels, best without"].endswith("(1 of 1 seeds)")


def test_each_class_keeps_as_many_labels_by_its_key():
    labels = np.arange(90) % 3
    found = few_labels(labels, 4, seed=5)
    assert found.tolist() == sorted(set(found.tolist()))
    assert np.bincount(labels[found]).tolist() == [4, 4, 4]
    of_two = np.flatnonzero(labels == 2)[numpy_generator(5, "labels", 2).permutation(30)[:4]]
    assert set(of_two.tolist()) == set(found[labels[found] == 2].tolist())
    for call, message in (
        (lambda: few_labels(labels, 31, 0, ["c", "b", "a"]), "class c has 30 images"),
        (lambda: few_labels(np.array([0, 2]), 1, 0, ["a", "b", "c"]), "class b has 0 images"),
        (lambda: few_labels(labels, 0, 0), "give 1 or more"),
    ):
        assert_raises(UserError, message, call)
