"""The studies `labels` and `teach`: whose labels and teachers, who judges, and tiny ones from images to page."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.extras.studies.few_labels import few_labels
from duetgan.extras.studies.images import HELD_OUT, TEST, TRAIN
from duetgan.extras.studies.labels import (
    PSEUDO,
    Labels,
    LabelsConfig,
    arm_name,
)
from duetgan.extras.studies.subject import of_seed
from duetgan.extras.studies.teach import CHEAP, CHOSEN, PLAIN, SHORT, WRONG_TEACHER, Chosen, Teach, TeachConfig
from duetgan.inference.dataset import predicted_labels
from duetgan.metrics.features.extractors import fingerprint
from duetgan.models.gan import draw
from duetgan.models.restore import classifier_from, generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.build import build
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator
from tests.conftest import REPOSITORY, assert_raises
from tests.metrics.conftest import classifier_run, gan_run, pack

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


@pytest.mark.slow
def test_a_tiny_study_from_images_to_page(tmp_path, tiny):
    few = ("--few.overrides", "{finetune.probe: true, steps: 4, batch_size: 8}")
    found, shown, _ = tiny("labels", tmp_path / "out", "--per-class", "[2]", "--threshold", "0.1", *few)
    assert found["runs"] == {"done": 15, "planned": 15}
    assert found["comparisons"][0]["second"] == arm_name(2, PSEUDO)
    assert {row["first"] for row in found["comparisons"]} == {"2 labels, best without"}
    assert found["choices"]["2 labels, best without"].endswith("(1 of 1 seeds)")
    assert "pseudo_right" in shown.text


TEACH_RECIPE = REPOSITORY / "configs/study_teach.yaml"


def subject_in(folder, **changes):
    """The study's own recipe, changed."""
    return Teach(build(TeachConfig, read_yaml(TEACH_RECIPE) | changes), folder)


def test_arms_differ_by_their_classifiers_loss_alone(tmp_path, asked):
    arms = subject_in(tmp_path, teacher=[0.5]).arms
    configs = asked(arm for arm in arms if arm.name not in (CHOSEN, *CHEAP))
    told = {name: config for name, (config, _) in configs.items()}
    plain, taught = told[PLAIN], told["teacher, weight 0.5"]
    assert taught.loss.classifier == str(tmp_path / "jobs/teacher/run")
    assert taught.loss.classifier_weight == told[WRONG_TEACHER].loss.classifier_weight == 0.5
    assert told[WRONG_TEACHER].loss.classifier == str(tmp_path / "jobs/teacher-by-chance/run")
    head, both = told["head on D, weight 1"].loss, told["head on D, weight 1, learns samples"].loss
    assert (head.auxiliary_weight, head.auxiliary_fakes, both.auxiliary_fakes) == (1, False, True)
    for config in told.values():
        config.loss = plain.loss
    assert len({repr(config) for config in told.values()}) == 1
    assert {name: steps for name, (_, steps) in configs.items() if steps} == {SHORT: plain.steps // 10}


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
    figures = subject.judged(taught, tmp_path / "x-s0", generator_from(taught)).figures
    assert 0 <= figures["recognised"] <= 1
    assert figures["frechet"] > 0
    assert figures["diversity"] > 0
    with pytest.raises(UserError, match="supplied a loss to this generator, so it cannot judge it"):
        subject.judged(wrongly, tmp_path / "x-s0", generator_from(wrongly))


def test_of_a_pool_the_first_sample_that_is_named_as_asked_is_taken_else_the_last(tmp_path, monkeypatch):
    generator = generator_from(load(resolve(gan_run(tmp_path / "gan"))))
    labels, psis = torch.arange(12) % generator.classes, []
    by: Any = Named()
    chosen = Chosen(generator, by, 3, 1.0)
    monkeypatch.setattr("duetgan.extras.studies.teach.logits_of", lambda classifier, images: classifier(images))
    z, noise = draw(chosen, range(12), 0)
    found = chosen(z, labels, noise=noise)
    every = [
        generator(z[:, i * generator.z_dim :][:, : generator.z_dim], labels, noise=maps)
        for i, maps in enumerate(zip(*[iter(noise)] * (len(noise) // 3), strict=True))
    ]
    for row, label in enumerate(labels.tolist()):
        names = [int(Named()(chosen.spec.from_float(images[row : row + 1])).argmax()) for images in every]
        psis.append(place := next((i for i, name in enumerate(names) if name == label), 2))
        assert torch.allclose(found[row], every[place][row], atol=1e-5)
    assert {0, 1, 2} == {*psis}


class Named(torch.nn.Module):
    """A class by an image's first pixel."""

    def forward(self, images):
        return torch.nn.functional.one_hot(images[:, 0, 0, 0].long() % 3, 3).float()


@pytest.mark.slow
def test_a_tiny_study_of_teachers(tmp_path, tiny):
    found, shown, _ = tiny("teach", tmp_path / "out", "--n", "20", "--short", "0.5", "--teacher", "[0.5]")
    assert found["runs"] == {"done": 9, "planned": 9}
    assert {row["figure"] for row in found["comparisons"]} == {"recognised", "frechet", "diversity"}
    assert shown.tags.count("img") == 9


def test_each_class_keeps_as_many_labels_by_its_key() -> None:
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
