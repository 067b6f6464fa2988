"""The study `teach`: what its arms train with, who judges them, and a tiny one from images to page."""

import pytest

from duetgan.metrics.features.extractors import fingerprint
from duetgan.models.restore import classifier_from
from duetgan.studies.images import TEST
from duetgan.studies.teach import PLAIN, SHORT, WRONG_TEACHER, Teach, TeachConfig
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.build import build
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from tests.conftest import REPOSITORY
from tests.metrics.conftest import classifier_run, gan_run, pack

RECIPE = REPOSITORY / "configs/study_teach.yaml"


def subject_in(folder, **changes):
    """The study's own recipe, changed."""
    return Teach(build(TeachConfig, read_yaml(RECIPE) | changes), folder)


def test_arms_differ_by_their_classifiers_loss_alone(tmp_path, asked):
    configs = asked(subject_in(tmp_path, teacher=[0.5]).arms())
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
    figures = subject.judged(taught).figures
    assert 0 <= figures["recognised"] <= 1
    assert figures["frechet"] > 0
    assert figures["diversity"] > 0
    with pytest.raises(UserError, match="supplied a loss to this generator, so it cannot judge it"):
        subject.judged(wrongly)


@pytest.mark.slow
def test_a_tiny_study_from_images_to_page(tmp_path, tiny):
    found, shown, _ = tiny("teach", tmp_path / "out", "--n", "20", "--short", "0.5", "--teacher", "[0.5]")
    assert found["runs"] == {"done": 6, "planned": 6}
    assert {row["figure"] for row in found["comparisons"]} == {"recognised", "frechet", "diversity"}
    assert shown.tags.count("img") == 6
