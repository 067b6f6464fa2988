"""Study `labels`: with few labels, what do pseudo-labels, a generator's samples and a
discriminator's features add?
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.weighted_sampling import few_labels
from duetgan.inference.dataset import guesses, write_labelled
from duetgan.models.restore import classifier_from
from duetgan.studies.baselines import before_training, readout, spread
from duetgan.studies.images import HELD_OUT, TEST, TRAIN, Recipe, StudyConfig, write_subset
from duetgan.studies.results import Comparison, Result
from duetgan.studies.subject import Job, Subject
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.model import PositiveInt, Probability
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator

UNLABELLED = "images without labels"
ALL = "all labels"
GUESSED, WRONG = "pseudo-labels", "labels by chance"
READ, SPREAD, TUNED, CONSISTENT = "readout of D", "spread by D", "from D on", "consistency from D"
OF_UNTRAINED = "untrained"  # D, in the controls of these
BASE = "best without"  # of the arms without another model
BATCH = 250  # images that are labelled at a time


class LabelsConfig(StudyConfig):
    per_class: list[PositiveInt] = [10, 50]  # labels of each class
    threshold: Probability = 0.95  # least probability of a pseudo-label
    # of the arms that start from the discriminator: keys of the classifier's recipe
    discriminator: dict[str, Any] = {
        "model.stem": "imagenet",
        "optimizer.name": "adam",
        "optimizer.lr": 0.002,
        "optimizer.weight_decay": 0.0,
    }
    # of those that learn from all images besides
    few: Recipe = Recipe(config="configs/few_labels.yaml")

    def check(self) -> None:
        super().check()
        if not self.per_class or sorted(set(self.per_class)) != self.per_class:
            raise UserError("per_class: give numbers of labels, the smallest first, each once")


def arm_name(per_class: int, way: str = "") -> str:
    return f"{per_class} labels" + (f", {way}" if way else "")


class Labels(Subject):
    """Every seed draws its own labelled images. The generator has seen no label at all, so one
    serves all arms.
    """

    title = "What do images without labels add?"
    sets = (HELD_OUT, TEST)

    notes = (
        "every seed draws its own labelled images, the same for all arms; the generator has seen no label",
        "networks have the same number of steps, but for those of `few`; nothing was chosen on the test images",
    )

    def declare(self) -> None:
        config, recipe, train = self.config, self.config.classifier, self.part(TRAIN)
        images = (
            self.add(Job(UNLABELLED, UNLABELLED), self._unlabelled, images=train) / "images.lmdb"
        )
        generator, untrained = self.generators(images)
        settings = {"recipe": recipe, "threshold": config.threshold, "images": train}
        least, why = (
            arm_name(config.per_class[0]),
            "more labels must help, or the study could not see any help",
        )
        chance = Comparison(least, expected="not helps", why="labels by chance must not help")
        for count in config.per_class:
            named, known = partial(arm_name, count), partial(few_labels, per_class=count)

            def asked(*controls: str, named: Callable[[str], str] = named) -> list[Comparison]:
                return [Comparison(named(BASE), controls=tuple(map(named, controls)), asked=True)]

            arm = Job(named(), f"supervised: {count} labelled images of each class alone", named())
            first = self.add(arm, self._first, count=count, **settings)
            self.bases(Job(named(), family=named()), first / "few.lmdb", known)
            self.best(named(BASE), named())
            for way, what, kind, family, against in (
                (GUESSED, "and all others that it is sure of", "guessed", "more", asked(WRONG)),
                (
                    WRONG,
                    "labels drawn by chance",
                    "wrong",
                    "control",
                    [chance] * (named() == least),
                ),
            ):
                used = first, "pseudo_labels"
                self.training(
                    Job(named(way), what, family, against),
                    recipe,
                    images=first / f"{kind}.lmdb",
                    used=used,
                )
            for run, suffix, family in (
                (generator, "", "more"),
                (untrained, f", {OF_UNTRAINED}", "control"),
            ):
                start = {"model.name": "discriminator", "model.weights": run}
                maps = partial(before_training, name="discriminator", weights=run, head="readout")
                for way, what, how, more in (
                    (TUNED, "a network that starts as D", recipe, config.discriminator | start),
                    (
                        CONSISTENT,
                        "one that learns from all images",
                        config.few,
                        start | {"unlabelled.path": images},
                    ),
                    (READ, "a logistic regression on D's maps", readout, None),
                    (SPREAD, "labels spread over neighbours, by D's maps", spread, None),
                ):
                    against = [] if suffix else asked(f"{way}, {OF_UNTRAINED}")
                    arm = Job(named(way + suffix), what + suffix, family, against)
                    if isinstance(how, Recipe):
                        self.training(arm, how, more or {}, images=first / "few.lmdb")
                    else:
                        self.learning(arm, maps, how, known)
        known_to_help = Comparison(least, expected="helps", why=why)
        self.training(
            Job(ALL, "every training image with its label", "control", [known_to_help]), recipe
        )

    # --- what jobs and arms do

    def _unlabelled(self, place: Path, _seed: int, images: Path) -> dict[str, Any]:
        with Dataset(images) as reader:
            every = (reader, range(len(reader)), np.zeros(len(reader), np.int64))
            meta = write_labelled(
                place / "images.lmdb",
                [every],
                (),
                source=f"{reader.meta.source}, labels left out",
                overwrite=True,
            )
        return {"images": meta.count}

    def _first(
        self, place: Path, seed: int, count: int, recipe: Recipe, threshold: float, images: Path
    ) -> Result:
        """Draw the labelled images (`few.lmdb`), train on them, and label the others, for the arms
        that follow: `guessed.lmdb`, and `wrong.lmdb` by chance.
        """
        with Dataset(images) as reader:
            labels, classes = reader.labels(), reader.classes
            chosen = few_labels(labels, count, seed, classes)
            write_subset(reader, chosen, place / "few.lmdb")
            self.train(place / "run", recipe, {"data.path": place / "few.lmdb"}, seed)
            result = self.judge(place / "run")
            classifier = classifier_from(
                load(resolve(str(place / "run"))), choose_device(self.device)
            )
            guessed, chances = guesses(classifier, reader, batch_size=BATCH)
            rest = np.setdiff1d(np.arange(len(reader)), chosen)
            kept = rest[chances[rest] >= threshold]
            by_chance = numpy_generator(seed, "study", "wrong labels").integers(
                len(classes), size=len(kept)
            )
            for kind, named in (("guessed", guessed[kept]), ("wrong", by_chance)):
                parts = [(reader, chosen, labels[chosen]), (reader, kept, named)]
                write_labelled(
                    place / f"{kind}.lmdb",
                    parts,
                    classes,
                    source=f"{count} labels a class and pseudo-labels",
                    overwrite=True,
                )
            result.figures["pseudo_labels"] = len(kept) / len(rest) if len(rest) else None
            result.figures["pseudo_right"] = (
                float((guessed == labels)[kept].mean()) if len(kept) else None
            )
        return result


CONFIG, SUBJECT = LabelsConfig, Labels
