"""Study `labels`: with few labels, what do pseudo-labels and a discriminator's features add?"""

from functools import partial
from pathlib import Path

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.extras.studies.baselines import before_training
from duetgan.extras.studies.few_labels import few_labels
from duetgan.extras.studies.images import HELD_OUT, TEST, TRAIN, Recipe, StudyConfig, write_subset
from duetgan.extras.studies.results import Comparison, Result
from duetgan.extras.studies.subject import Job, Settings, Subject
from duetgan.inference.dataset import predicted_labels, write_labelled
from duetgan.models.restore import classifier_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.model import PositiveInt, Probability
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator

UNLABELLED = "images without labels"
ALL = "all labels"
PSEUDO, RANDOM = "pseudo-labels", "labels by chance"
READOUT, CONSISTENT = "readout of D", "consistency from D"
OF_UNTRAINED = "untrained"  # suffix of the controls whose discriminator D is untrained
BASE = "best without"  # the best of the arms that use no second model
BATCH = 250  # images per batch when pseudo-labels are predicted


class LabelsConfig(StudyConfig):
    per_class: list[PositiveInt] = [10, 50]  # numbers of labels per class, each with its own arms
    threshold: Probability = 0.95  # smallest predicted probability that makes a pseudo-label
    # recipe of the arms that also learn from unlabelled images
    few: Recipe = Recipe(config="configs/few_labels.yaml")

    def check(self) -> None:
        super().check()
        if not self.per_class or sorted(set(self.per_class)) != self.per_class:
            raise UserError("per_class: give numbers of labels, the smallest first, each once")


def arm_name(per_class: int, method: str = "") -> str:
    return f"{per_class} labels" + (f", {method}" if method else "")


class Labels(Subject):
    """A comparison of methods that learn from a few labelled and many unlabelled images.

    Each seed draws its own labelled images. One generator serves all arms, because it is trained
    without labels.
    """

    splits = (HELD_OUT, TEST)

    def declare(self) -> None:
        config, recipe = self.config, self.config.classifier
        place = self.add(Job(UNLABELLED, UNLABELLED), self._unlabelled)
        images = place / "images.lmdb"
        generator, untrained = self.generators(images)
        fewest = arm_name(config.per_class[0])
        for count in config.per_class:
            supervised = arm_name(count)
            description = f"supervised: {count} labelled images of each class alone"
            job = Job(supervised, description, supervised)
            first = self.add(job, partial(self._first, count=count))
            labelled = partial(few_labels, per_class=count)
            self.bases(Job(supervised, family=supervised), first / "few.lmdb", labelled)
            self.best(arm_name(count, BASE), supervised)
            self._pseudo_labels(count, first, is_control=supervised == fewest)
            self._from_discriminator(count, first, generator, images)
            self._from_discriminator(count, first, untrained, images, f", {OF_UNTRAINED}")
        must_help = Comparison(fewest, expected="helps")
        self.training(
            Job(ALL, "every training image with its label", "control", [must_help]), recipe
        )

    def _against_base(self, count: int, control: str) -> Comparison:
        controls = (arm_name(count, control),)
        return Comparison(arm_name(count, BASE), controls=controls)

    def _pseudo_labels(self, count: int, first: Path, *, is_control: bool) -> None:
        """Declare an arm that trains on pseudo-labels, and an arm that trains on random labels.

        `count` is the number of labelled images of each class. The classifier of the supervised
        arm, whose folder is `first`, predicts the pseudo-labels. If `is_control` is True, the study
        is void in case random labels help.
        """
        pseudo = Job(
            arm_name(count, PSEUDO),
            "and all others that it is sure of",
            "more",
            [self._against_base(count, RANDOM)],
        )
        by_chance = Comparison(arm_name(count), expected="not helps")
        random = Job(
            arm_name(count, RANDOM),
            "labels drawn by chance",
            "control",
            [by_chance] if is_control else [],
        )
        for arm, file in ((pseudo, "guessed.lmdb"), (random, "wrong.lmdb")):
            self.training(arm, self.config.classifier, images=first / file)

    def _from_discriminator(
        self, count: int, first: Path, run: Path, images: Path, suffix: str = ""
    ) -> None:
        """Declare the arms that use the discriminator of the GAN in the run folder `run`.

        They train on the labelled images in the folder `first`, `count` of each class, and on the
        unlabelled `images`. A `suffix` is added to the names of the arms, and marks them as
        controls.
        """

        def arm(method: str, description: str) -> Job:
            if suffix:
                return Job(arm_name(count, method + suffix), description + suffix, "control")
            against = [self._against_base(count, f"{method}, {OF_UNTRAINED}")]
            return Job(arm_name(count, method), description, "more", against)

        start = {"model.name": "discriminator", "model.weights": run}
        self.training(
            arm(CONSISTENT, "a network that starts as D and learns from all images"),
            self.config.few,
            start | {"unlabelled.path": images},
            images=first / "few.lmdb",
        )
        maps = partial(before_training, name="discriminator", weights=run, head="readout")
        labelled = partial(few_labels, per_class=count)
        self.readout(arm(READOUT, "a logistic regression on D's maps"), maps, labelled)

    # --- functions that make jobs and arms

    def _unlabelled(self, place: Path, _seed: int) -> Settings:
        with Dataset(self.part(TRAIN)) as dataset:
            unlabelled = (dataset, range(len(dataset)), np.zeros(len(dataset), np.int64))
            write_labelled(
                place / "images.lmdb",
                [unlabelled],
                (),
                source=f"{dataset.meta.source}, labels left out",
                overwrite=True,
            )
        return {}

    def _first(self, place: Path, seed: int, count: int) -> Result:
        """Train on few labelled images, and write packed files that other arms use.

        `few.lmdb` has the labelled images. `guessed.lmdb` has these and images with pseudo-labels.
        `wrong.lmdb` has the same images as `guessed.lmdb`, but random labels instead of
        pseudo-labels.
        """
        recipe = self.config.classifier
        with Dataset(self.part(TRAIN)) as dataset:
            labels, classes = dataset.labels(), dataset.classes
            chosen = few_labels(labels, count, seed, classes)
            write_subset(dataset, chosen, place / "few.lmdb")
            self.train(place / "run", recipe, {"data.path": place / "few.lmdb"}, seed)
            result = self.judge(place / "run")
            classifier = classifier_from(
                load(resolve(str(place / "run"))), choose_device(self.device)
            )
            predicted, confidence = predicted_labels(classifier, dataset, batch_size=BATCH)
            unlabelled = np.setdiff1d(np.arange(len(dataset)), chosen)
            confident = unlabelled[confidence[unlabelled] >= self.config.threshold]
            random_labels = numpy_generator(seed, "study", "wrong labels").integers(
                len(classes), size=len(confident)
            )
            for kind, new_labels in (("guessed", predicted[confident]), ("wrong", random_labels)):
                parts = [(dataset, chosen, labels[chosen]), (dataset, confident, new_labels)]
                write_labelled(
                    place / f"{kind}.lmdb",
                    parts,
                    classes,
                    source=f"{count} labels a class and pseudo-labels",
                    overwrite=True,
                )
            if len(confident):
                result.figures["pseudo_labels"] = len(confident) / len(unlabelled)
                result.figures["pseudo_right"] = float((predicted == labels)[confident].mean())
        return result


CONFIG, SUBJECT = LabelsConfig, Labels
