"""Study `labels`: with few labels, what do pseudo-labels, a generator's samples and a discriminator's features add?"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.weighted_sampling import few_labels
from duetgan.inference.dataset import guesses, write_dataset, write_labelled
from duetgan.inference.samples import Sampler
from duetgan.models.classifier import Classifier
from duetgan.models.restore import classifier_from, generator_from
from duetgan.studies.baselines import before_training, readout, spread
from duetgan.studies.images import HELD_OUT, TEST, TRAIN, Recipe, StudyConfig, write_subset
from duetgan.studies.subject import SEED, Comparison, Conclusion, Control, Result, Results, Subject, of_seed
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.model import PositiveFloat, PositiveInt, Probability
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator

SAMPLES, UNLABELLED = "samples without labels", "images without labels"
ALL = "all labels"
GUESSED, WITH_SAMPLES, WRONG = "pseudo-labels", "pseudo-labels and samples", "labels by chance"
READ, SPREAD, TUNED, CONSISTENT = "readout of D", "spread by D", "from D on", "consistency from D"
OF_UNTRAINED = "untrained"  # D, in the controls of these
BASE = "best without"  # of the arms without another model
BATCH = 250  # images that are labelled at a time


class LabelsConfig(StudyConfig):
    """All settings of the study."""

    per_class: list[PositiveInt] = [10, 50]  # labels of each class
    threshold: Probability = 0.95  # least probability of a pseudo-label
    ratio: PositiveFloat = 1.0  # samples per training image, before those that are not sure are left out
    # of the arms that start from the discriminator: keys of the classifier's recipe
    discriminator: dict[str, Any] = {
        "model.stem": "imagenet",
        "optimizer.name": "adam",
        "optimizer.lr": 0.002,
        "optimizer.weight_decay": 0.0,
    }
    few: Recipe = Recipe(config="configs/few_labels.yaml")  # of those that learn from all images besides

    def check(self) -> None:
        super().check()
        if not self.per_class or sorted(set(self.per_class)) != self.per_class:
            raise UserError("per_class: give numbers of labels, the smallest first, each once")


def arm_name(per_class: int, way: str = "") -> str:
    return f"{per_class} labels" + (f", {way}" if way else "")


class Labels(Subject):
    """Every seed draws its own labelled images. The generator has seen no label at all, so one serves all arms."""

    title = "What do images without labels add?"
    sets = (HELD_OUT, TEST)

    def declare(self) -> None:
        config, recipe = self.config, self.config.classifier
        images = self.add(UNLABELLED, UNLABELLED, self._unlabelled, {"images": self.part(TRAIN)}) / "images.lmdb"
        self.run, untrained = self.generators(images)
        key = {"ratio": config.ratio, "generator": self.run, "images": images}
        samples = self.add(SAMPLES, "samples of the generator", self._samples, key)
        for count in config.per_class:
            named = partial(arm_name, count)
            what = f"supervised: {count} labelled images of each class alone"
            key = {**recipe.key(), "threshold": config.threshold, "images": self.part(TRAIN), "samples": samples}
            first = self.add(named(), what, partial(self._first, count), key, named())
            self.bases(named(), first / "few.lmdb", named, partial(few_labels, per_class=count))
            for way, what, kind, figure, family in (
                (GUESSED, "and all others that it is sure of", "guessed", "pseudo_labels", "more"),
                (WITH_SAMPLES, "and samples that it is sure of", "mixed", "samples_kept", "more"),
                (WRONG, "labels drawn by chance", "wrong", "pseudo_labels", "control"),
            ):
                judge = partial(self._judge, first, figure)
                self.training(named(way), what, recipe, family=family, images=first / f"{kind}.lmdb", judge=judge)
            for run, suffix, family in ((self.run, "", "more"), (untrained, f", {OF_UNTRAINED}", "control")):
                start = {"model.name": "discriminator", "model.weights": run}
                for way, what, how, more in (
                    (TUNED, "a network that starts as D", recipe, config.discriminator | start),
                    (CONSISTENT, "one that learns from all images", config.few, start | {"unlabelled.path": images}),
                ):
                    self.training(named(way + suffix), what + suffix, how, more, family, images=first / "few.lmdb")
                maps = before_training(name="discriminator", weights=str(run), head="readout")
                for way, what, learn in (
                    (READ, "a logistic regression on D's maps", readout),
                    (SPREAD, "labels spread over neighbours, by D's maps", spread),
                ):
                    known = partial(few_labels, per_class=count)
                    self.untrained(named(way + suffix), what + suffix, maps, learn, family, known, {"run": run})
        self.training(ALL, "every training image with its label", recipe, family="control")
        least = arm_name(config.per_class[0])
        self.controls = (
            Control(f"{least}, {WRONG}", least, "not helps", "labels by chance must not help"),
            Control(ALL, least, "helps", "more labels must help, or the study could not see any help"),
        )

    # --- what jobs and arms do

    def _unlabelled(self, place: Path, _seed: int) -> dict[str, Any]:
        with Dataset(self.part(TRAIN)) as reader:
            every = (reader, range(len(reader)), np.zeros(len(reader), np.int64))
            source = f"{reader.meta.source}, labels left out"
            meta = write_labelled(place / "images.lmdb", [every], (), source=source, overwrite=True)
        return {"images": meta.count}

    def _samples(self, place: Path, _seed: int) -> dict[str, Any]:
        checkpoint = load(resolve(str(self.run)))
        sampler = Sampler(generator=generator_from(checkpoint, choose_device(self.device)), seed=SEED)
        count = max(1, round(self.config.ratio * self.outcome(self.place(UNLABELLED))["images"]))
        out = place / "samples.lmdb"
        write_dataset(sampler, checkpoint, out, source="samples for a study", count=count, overwrite=True)
        return {"samples": count}

    def _first(self, count: int, place: Path, seed: int) -> Result:
        """Draw the labelled images (`few.lmdb`), train on them, and label the others and the samples, for the arms that
        follow: `guessed.lmdb`, `mixed.lmdb` with the samples, and `wrong.lmdb`.
        """
        with Dataset(self.part(TRAIN)) as reader, Dataset(self.place(SAMPLES) / "samples.lmdb") as samples:
            labels, classes = reader.labels(), reader.classes
            chosen = few_labels(labels, count, seed, classes)
            write_subset(reader, chosen, place / "few.lmdb")
            self.train(place / "run", self.config.classifier, {"data.path": place / "few.lmdb"}, seed)
            result = self.judge(place / "run")
            classifier = classifier_from(load(resolve(str(place / "run"))), choose_device(self.device))
            rest = np.setdiff1d(np.arange(len(reader)), chosen)
            guessed, kept = self._sure(classifier, reader, rest)
            drawn, sure = self._sure(classifier, samples, np.arange(len(samples)))
            by_chance = numpy_generator(seed, "study", "wrong labels").integers(len(classes), size=len(kept))
            first, more = (reader, chosen, labels[chosen]), (reader, kept, guessed[kept])
            files = {"guessed": [first, more], "wrong": [first, (reader, kept, by_chance)]}
            files["mixed"] = [first, more, *[(samples, sure, drawn[sure])] * bool(len(sure))]
            source = f"{count} labels a class and pseudo-labels"
            for kind, parts in files.items():
                write_labelled(place / f"{kind}.lmdb", parts, classes, source=source, overwrite=True)
            result.figures["pseudo_labels"] = len(kept) / len(rest) if len(rest) else None
            result.figures["pseudo_right"] = float((guessed == labels)[kept].mean()) if len(kept) else None
            result.figures["samples_kept"] = len(sure) / len(samples)
        return result

    def _judge(self, first: Path, figure: str, run: Path, seed: int) -> Result:
        """Of an arm whose images the arm `first` has labelled, which says in a figure how many of them there are."""
        result = self.judge(run)
        result.figures["used"] = self.outcome(of_seed(first, seed))["figures"][figure]
        return result

    def _sure(self, classifier: Classifier, reader: Dataset, of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest class of each image, and which `of` these records the classifier is sure of."""
        labels, sure = guesses(classifier, reader, batch_size=BATCH)
        return labels, of[sure[of] >= self.config.threshold]

    # --- answers

    def conclude(self, results: Results) -> Conclusion:
        comparisons, choices = [], {}
        for count in self.config.per_class:
            named = partial(arm_name, count)
            bases = [arm.name for arm in self.arms if arm.family == named()]
            choices[named(BASE)] = results.choose(named(BASE), bases)
            for way, controls in {
                GUESSED: [WRONG],
                WITH_SAMPLES: [WRONG, GUESSED],
                **{way: [f"{way}, {OF_UNTRAINED}"] for way in (READ, SPREAD, TUNED, CONSISTENT)},
            }.items():
                comparisons.append(
                    Comparison(named(BASE), named(way), controls=tuple(map(named, controls)), asked=True)
                )
        return Conclusion(
            comparisons=comparisons,
            choices=choices,
            notes=[
                "every seed draws its own labelled images, the same for all arms; the generator has seen no label",
                "networks have the same number of steps, but for those of `few`; nothing was chosen on the test images",
            ],
        )


CONFIG, SUBJECT = LabelsConfig, Labels
