"""Study `distil`: can a student without the training images learn from a teacher by samples?"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.extras.studies.few_labels import few_labels
from duetgan.extras.studies.images import (
    HELD_BACK,
    HELD_OUT,
    TEST,
    TRAIN,
    Recipe,
    StudyConfig,
    write_subset,
)
from duetgan.extras.studies.results import Comparison, Result
from duetgan.extras.studies.subject import Job, Settings, Subject
from duetgan.utils.config.model import PositiveInt, Probability

# names of jobs and arms
TEACHER = "teacher"
SAMPLES, NOISE = "samples", "untrained samples"
UNSEEN = "other real images"
FEW, BASE = "few real images", "best without samples"


class DistilConfig(StudyConfig):
    per_class: PositiveInt = 10  # labelled real images of each class on which a student trains
    # fraction of a student's batches that are samples or other real images, in the arms with these
    share: Probability = 0.9
    student: Recipe = Recipe(config="configs/quickstart_classifier.yaml")
    # overrides of the student's recipe for all arms with a teacher
    taught: dict[str, Any] = {"loss.temperature": 2.0}


class Distil(Subject):
    """A comparison of students that learn the predictions of a teacher.

    The students learn the predictions on samples or on other images. Teacher and generator are
    trained on all training images. A student is trained on a few of the training images, chosen
    anew for each seed, or on none.
    """

    splits = (HELD_OUT, TEST)

    def declare(self) -> None:
        config = self.config
        student, count = config.student, config.per_class
        teacher = self.training(Job(TEACHER, "training the teacher"), config.classifier, fixed=1000)
        generator, untrained = self.generators()
        sources = {SAMPLES: generator, NOISE: untrained, UNSEEN: self.part(HELD_BACK)}
        files = {}
        for name, source in sources.items():
            place = self.add(Job(name, name), partial(self._draw, source=source))
            files[name] = place / "images.lmdb"
        place = self.add(Job(FEW, f"{count} of each class, with labels", "without"), self._few)
        few = place / "few.lmdb"
        self.bases(Job("", family="without"), few, partial(few_labels, per_class=count))
        self.best(BASE, "without")

        taught = {"loss.teacher": teacher, **config.taught}
        must_help = Comparison(FEW, expected="helps")

        def against(*controls: str) -> list[Comparison]:
            return [Comparison(BASE, controls=controls)]

        mixed: dict[str, Settings] = {"": {}}
        for kind, file in files.items():
            mixed[kind] = {"data.synthetic.path": file, "data.synthetic.share": config.share}
        content = Comparison(FEW, expected="not helps")
        nothing, nothing_alone = f"{NOISE}, taught", f"{NOISE} alone, taught"
        # arm, overrides, images that are mixed in
        arms: list[tuple[Job, Settings, str]] = [
            (Job(f"{FEW}, taught", "by the teacher", "without"), taught, ""),
            (
                Job(f"{FEW}, mixups taught", "mixed in pairs", "without"),
                taught | {"augment.mixup": 1.0},
                "",
            ),
            (
                Job(SAMPLES, "and samples with the labels asked for", "samples", against(nothing)),
                {},
                SAMPLES,
            ),
            (
                Job(f"{SAMPLES}, taught", "and samples", "samples", against(nothing)),
                taught,
                SAMPLES,
            ),
            (
                Job(NOISE, "and untrained samples with the labels asked for", "control", [content]),
                {},
                NOISE,
            ),
            (Job(nothing, "and samples of the untrained generator", "control"), taught, NOISE),
            (
                Job(f"{UNSEEN}, taught", "and others without labels", "control", [must_help]),
                taught,
                UNSEEN,
            ),
        ]
        for arm, overrides, mixed_in in arms:
            self.training(arm, student, {**overrides, **mixed[mixed_in]}, images=few)
        job = Job(
            f"{SAMPLES} alone, taught", "samples, no real image", "samples", against(nothing_alone)
        )
        self.training(job, student, taught, images=files[SAMPLES])
        job = Job(nothing_alone, "samples of the untrained generator", "control")
        self.training(job, student, taught, images=files[NOISE])

    # --- functions that make jobs and arms

    def _draw(self, place: Path, seed: int, source: Path) -> Settings:
        counts = np.minimum(self.counts(TRAIN), self.counts(HELD_BACK)).tolist()
        self.draw(place / "images.lmdb", counts, source, seed)
        return {}

    def _few(self, place: Path, seed: int) -> Result:
        """Choose a few labelled images, write them to few.lmdb, and train on them.

        The other arms of this seed use the same file.
        """
        count = self.config.per_class
        with Dataset(self.part(TRAIN)) as dataset:
            chosen = few_labels(dataset.labels(), count, seed, dataset.classes)
            write_subset(dataset, chosen, place / "few.lmdb")
        self.train(place / "run", self.config.student, {"data.path": place / "few.lmdb"}, seed)
        return self.judge(place / "run")


CONFIG, SUBJECT = DistilConfig, Distil
