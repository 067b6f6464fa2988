"""Study `distil`: can samples carry to a student what a teacher has learnt from images that the
student may not see?
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.weighted_sampling import few_labels
from duetgan.studies.images import (
    HELD_BACK,
    HELD_OUT,
    TEST,
    TRAIN,
    Recipe,
    StudyConfig,
    write_subset,
)
from duetgan.studies.results import Comparison, Result
from duetgan.studies.samples import Drawing
from duetgan.studies.subject import Job, Settings, Subject
from duetgan.utils.config.model import PositiveInt, Probability

# jobs
TEACHER, SAMPLES, NOISE, OTHERS = "teacher", "samples", "untrained samples", "other real images"
FEW, BASE = "few real images", "best without samples"


class DistilConfig(StudyConfig):
    per_class: PositiveInt = 10  # images of each class that a student has, with labels
    share: Probability = 0.9  # of a student's batches that is no image of these, where it has more
    student: Recipe = Recipe(config="configs/quickstart_classifier.yaml")
    # of all arms with a teacher: keys of the student's recipe
    taught: dict[str, Any] = {"loss.temperature": 2.0}


class Distil(Subject):
    """Teacher and generator have seen all training images. A student has a few, drawn anew for
    every seed, or none.
    """

    title = "Can samples carry what a teacher knows?"
    sets = (HELD_OUT, TEST)
    notes = (
        "taught: by the teacher's probabilities alone, not by labels; all arms have the same number of steps",
        "as many samples, untrained samples and other real images as of the smaller part of each class",
        "teacher and generator were trained once: intervals are over the draws of the few images, the students and the"
        " test images",
    )

    def declare(self) -> None:
        config = self.config
        student, count = config.student, config.per_class
        teacher = self.training(Job(TEACHER, "training the teacher"), config.classifier, fixed=1000)
        generator, untrained = self.generators()
        sources = {SAMPLES: generator, NOISE: untrained, OTHERS: self.part(HELD_BACK)}
        files = {}
        for name, source in sources.items():
            drawing = None if name == OTHERS else Drawing()
            files[name] = (
                self.add(Job(name, name), self._draw, source=source, drawing=drawing)
                / "images.lmdb"
            )
            self.captions[name] = f"{name}, a row for each class"
        job = Job(FEW, f"{count} of each class, with labels", "without")
        few = (
            self.add(job, self._few, count=count, recipe=student, images=self.part(TRAIN))
            / "few.lmdb"
        )
        self.bases(Job("", family="without"), few, partial(few_labels, per_class=count))
        self.best(BASE, "without")

        taught: dict[str, Any] = {"loss.teacher": teacher, **config.taught}
        help_must = Comparison(
            FEW, expected="helps", why="real images must help, or the study could not see any help"
        )
        gap = Comparison(f"{OTHERS}, taught", family="gap to real images")

        def asked(*controls: str) -> list[Comparison]:
            return [Comparison(BASE, controls=controls, asked=True), gap]

        def arm(job: Job, own: Settings, more: str = "", *, alone: bool = False) -> None:
            mixed = (
                {"data.synthetic.path": files[more], "data.synthetic.share": config.share}
                if more
                else {}
            )
            self.training(
                job,
                student,
                own if alone else {**own, **mixed},
                images=files[more] if alone else few,
            )

        nothing, nothing_alone = f"{NOISE}, taught", f"{NOISE} alone, taught"
        arm(Job(f"{FEW}, taught", "by the teacher", "without"), taught)
        arm(
            Job(f"{FEW}, mixups taught", "mixed in pairs", "without"),
            taught | {"augment.mixup": 1.0},
        )
        arm(
            Job(SAMPLES, "and samples with the labels asked for", "samples", asked(nothing)),
            {},
            SAMPLES,
        )
        arm(Job(f"{SAMPLES}, taught", "and samples", "samples", asked(nothing)), taught, SAMPLES)
        job = Job(
            f"{SAMPLES} alone, taught", "samples, no real image", "samples", asked(nothing_alone)
        )
        arm(job, taught, SAMPLES, alone=True)
        content = Comparison(
            FEW, expected="not helps", why="samples without any content must not help"
        )
        arm(
            Job(NOISE, "and untrained samples with the labels asked for", "control", [content]),
            {},
            NOISE,
        )
        arm(Job(nothing, "and samples of the untrained generator", "control"), taught, NOISE)
        arm(
            Job(nothing_alone, "samples of the untrained generator", "control"),
            taught,
            NOISE,
            alone=True,
        )
        arm(
            Job(f"{OTHERS}, taught", "and others without labels", "control", [help_must]),
            taught,
            OTHERS,
        )

    # --- what jobs and arms do

    def _draw(
        self, place: Path, seed: int, source: Path, drawing: Drawing | None
    ) -> dict[str, Any]:
        counts = np.minimum(self.counts(TRAIN), self.counts(HELD_BACK)).tolist()
        self.draw({place / "images.lmdb": counts}, source, drawing, seed, None)
        self.show(place.name, place / "images.lmdb")
        return {}

    def _few(self, place: Path, seed: int, count: int, recipe: Recipe, images: Path) -> Result:
        """Draw the images of a seed, for the arms that follow, and train on them."""
        with Dataset(images) as reader:
            write_subset(
                reader, few_labels(reader.labels(), count, seed, reader.classes), place / "few.lmdb"
            )
        self.train(place / "run", recipe, {"data.path": place / "few.lmdb"}, seed)
        return self.judge(place / "run")


CONFIG, SUBJECT = DistilConfig, Distil
