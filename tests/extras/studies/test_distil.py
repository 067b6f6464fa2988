"""The study `distil`: what each arm learns from and from whom, and a tiny one from images to verdicts."""

from pathlib import Path

import pytest

from duetgan.extras.studies.distil import BASE, FEW, NOISE, SAMPLES, UNSEEN, Distil, DistilConfig
from duetgan.extras.studies.images import HELD_BACK, TRAIN
from duetgan.utils.config.build import build
from duetgan.utils.config.yaml_files import read_yaml
from tests.conftest import REPOSITORY
from tests.metrics.conftest import pack

RECIPE = REPOSITORY / "configs/study_distil.yaml"


def subject_in(folder):
    return Distil(build(DistilConfig, read_yaml(RECIPE)), folder)


def test_arms_differ_by_their_images_and_their_teacher_alone(tmp_path, asked):
    subject = subject_in(tmp_path)
    pack(subject.part(TRAIN))
    configs = asked(arm for arm in subject.arms if arm.name in (FEW, SAMPLES, NOISE) or arm.name.endswith("taught"))

    def told(config):
        paths = (config.data.path, config.data.synthetic.path, config.loss.teacher)
        return *(path and Path(path).relative_to(tmp_path).parts[1] for path in paths), config.augment.mixup

    first, samples, noise, others = "few-real-images-s3", "samples", "untrained-samples", "other-real-images"
    own, _ = configs.pop(FEW)
    assert own.data.path == str(tmp_path / FEW / "few.lmdb")
    assert (own.steps, own.batch_size) == next((config.steps, config.batch_size) for config, _ in configs.values())
    assert {name: told(config) for name, (config, _) in configs.items()} == {
        f"{FEW}, taught": (first, None, "teacher", 0.0),
        f"{FEW}, mixups taught": (first, None, "teacher", 1.0),
        SAMPLES: (first, samples, None, 0.0),
        f"{SAMPLES}, taught": (first, samples, "teacher", 0.0),
        f"{SAMPLES} alone, taught": (samples, None, "teacher", 0.0),
        NOISE: (first, noise, None, 0.0),
        f"{NOISE}, taught": (first, noise, "teacher", 0.0),
        f"{NOISE} alone, taught": (noise, None, "teacher", 0.0),
        f"{UNSEEN}, taught": (first, others, "teacher", 0.0),
    }
    assert len({(config.steps, config.batch_size) for config, _ in configs.values()}) == 1
    asked_of = {row.second: (row.first, *row.controls) for row in subject.comparisons if not row.expected}
    assert asked_of == {
        SAMPLES: (BASE, f"{NOISE}, taught"),
        f"{SAMPLES}, taught": (BASE, f"{NOISE}, taught"),
        f"{SAMPLES} alone, taught": (BASE, f"{NOISE} alone, taught"),
    }


def test_images_are_drawn_from_their_source(tmp_path, monkeypatch):
    """As many of a class as are in both parts of the real images."""
    drawn, counts = {}, {TRAIN: [5, 2, 9], HELD_BACK: [3, 4, 4]}
    monkeypatch.setattr(Distil, "counts", lambda self, part: counts[part])
    monkeypatch.setattr(Distil, "draw", lambda self, file, *of: drawn.update({file.parent.name: of}))
    subject = subject_in(tmp_path)
    for job in subject.jobs:
        if job.name in (SAMPLES, NOISE, UNSEEN) and not job.family:
            job.make(job.place, 7)
    sources = {
        "samples": tmp_path / "jobs/generator/run",
        "untrained-samples": tmp_path / "jobs/untrained-generator/run",
    }
    sources["other-real-images"] = subject.part(HELD_BACK)
    assert drawn == {name: ([3, 2, 4], source, 7) for name, source in sources.items()}


@pytest.mark.slow
def test_a_tiny_study_from_images_to_verdicts(tmp_path, tiny):
    student = ("--student.config", str(tmp_path / "study-classifier.yaml"), "--student.overrides", "{steps: 4}")
    found, _ = tiny("distil", tmp_path / "out", "--per-class", "2", *student)
    assert found["runs"] == {"done": 12, "planned": 12}
    assert {row["first"] for row in found["comparisons"]} == {BASE}
    assert {row["arm"] for row in found["controls"]} == {NOISE, f"{UNSEEN}, taught"}
