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
from duetgan.reporting.figures import percent
from duetgan.studies.images import PARTS, TRAIN, StudyConfig, write_subset
from duetgan.studies.samples import share_of_batch
from duetgan.studies.subject import SEED, Comparison, Conclusion, Control, Job, Result, Results, Settings, Subject
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.model import PositiveFloat, PositiveInt, Probability
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator

GENERATOR, SAMPLES, UNLABELLED = "generator without labels", "samples without labels", "images without labels"
ALL = "all labels"
GUESSED, WITH_SAMPLES, WRONG = "pseudo-labels", "pseudo-labels and samples", "labels by chance"
HEAD, TUNED = "features of D", "from D on"
PSEUDO = {"pseudo_labels": "labelled", "pseudo_right": "rightly", "samples_kept": "samples labelled"}  # figures
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

    def check(self) -> None:
        super().check()
        if not self.per_class or sorted(set(self.per_class)) != self.per_class:
            raise UserError("per_class: give numbers of labels, the smallest first, each once")


def arm_name(per_class: int, way: str = "") -> str:
    return f"{per_class} labels" + (f", {way}" if way else "")


class Labels(Subject):
    """Every seed draws its own labelled images. The generator has seen no label at all, so one serves all arms."""

    title = "What do images without labels add?"

    # --- what is made once

    def jobs(self) -> list[Job]:
        gan, unlabelled = self.config.gan, self.place(UNLABELLED) / "images.lmdb"
        how: dict[str, Any] = {"what": f"training the generator: {gan.config}", "needs": (PARTS, UNLABELLED)}
        return [
            self.parts_job(),
            Job(UNLABELLED, UNLABELLED, self._unlabelled, needs=(PARTS,)),
            self.training(GENERATOR, gan, unlabelled, seed=SEED, key=gan.key(), **how),
            Job(SAMPLES, "samples of the generator", self._samples, {"ratio": self.config.ratio}, (GENERATOR,)),
        ]

    def _unlabelled(self, place: Path) -> dict[str, Any]:
        with Dataset(self.part(TRAIN)) as reader:
            every = (reader, range(len(reader)), np.zeros(len(reader), np.int64))
            source = f"{reader.meta.source}, labels left out"
            meta = write_labelled(place / "images.lmdb", [every], (), source=source, overwrite=True)
        return {"images": meta.count}

    def _samples(self, place: Path) -> dict[str, Any]:
        checkpoint = load(resolve(self.run_of(GENERATOR)))
        sampler = Sampler(generator=generator_from(checkpoint, choose_device(self.device)), seed=SEED)
        count = max(1, round(self.config.ratio * self.outcome(UNLABELLED)["images"]))
        out = place / "samples.lmdb"
        write_dataset(sampler, checkpoint, out, source="samples for a study", count=count, overwrite=True)
        return {"samples": count}

    # --- arms

    def arms(self) -> list[Job]:
        arms, least = [], self.config.per_class[0]
        for count in self.config.per_class:
            what = f"supervised: {count} labelled images of each class alone"
            key = self.recipe_key() | {"threshold": self.config.threshold}
            arms += [
                Job(arm_name(count), what, partial(self._first, count), key, (PARTS, SAMPLES), "labels"),
                self._arm(count, GUESSED, "and all others that it is sure of", "guessed"),
                self._arm(count, WITH_SAMPLES, "and samples that it is sure of", "guessed"),
                self._arm(count, HEAD, "a linear head on D's features", "few", {"finetune.freeze": ["backbone"]}),
                self._arm(count, TUNED, "a network that starts as D", "few"),
            ]
        arms.append(self._arm(least, WRONG, "labels drawn by chance", "wrong", family="control"))
        make = partial(self.learn, self.part(TRAIN), {})
        return [*arms, Job(ALL, "every training image with its label", make, self.recipe_key(), (PARTS,), "control")]

    def _arm(
        self, count: int, way: str, what: str, images: str, own: Settings | None = None, family: str = "more"
    ) -> Job:
        """An arm on a draw's images of a kind; those with D start from the generator's run."""
        config = self.config
        own = {**(config.discriminator if way in (HEAD, TUNED) else {}), **(own or {})}
        key = self.recipe_key() | {"own": own, "threshold": config.threshold, "labels": count}
        make = partial(self._make, count, way, images, own)
        return Job(arm_name(count, way), what, make, key, (PARTS, SAMPLES), family)

    def _make(self, count: int, way: str, kind: str, own: Settings, folder: Path, seed: int) -> Result:
        images, samples = self._file(count, kind, seed), self._file(count, "samples", seed)
        if not images.is_file():
            raise UserError(f"{images}: is missing; remove this study's folder, and start it again")
        more = dict(own)
        if way in (HEAD, TUNED):
            more |= {"model.name": "discriminator", "model.weights": self.run_of(GENERATOR)}
        if way == WITH_SAMPLES and samples.is_file():  # there is none where none was sure; all are seen equally often
            with Dataset(samples) as some, Dataset(images) as others:
                share = share_of_batch(len(some) / len(others))
            more |= {"data.synthetic.path": str(samples), "data.synthetic.share": share}
        return self.learn(images, more, folder, seed)

    # --- labels

    def _file(self, count: int, kind: str, seed: int) -> Path:
        """A seed's images of a kind: `few` labelled ones; these and those `guessed`, or `wrong`; `samples`."""
        return self.folder / "draws" / f"{count}-s{seed}" / f"{kind}.lmdb"

    def _first(self, count: int, folder: Path, seed: int) -> Result:
        """Draw the labelled images, train on them, and label the others and the samples, for the arms that follow."""
        files = {kind: self._file(count, kind, seed) for kind in ("few", "guessed", "wrong", "samples")}
        files["few"].parent.mkdir(parents=True, exist_ok=True)
        with Dataset(self.part(TRAIN)) as reader, Dataset(self.place(SAMPLES) / "samples.lmdb") as samples:
            labels, classes = reader.labels(), reader.classes
            chosen = few_labels(labels, count, seed, classes)
            write_subset(reader, chosen, files["few"])
            result = self.learn(files["few"], {}, folder, seed)
            classifier = classifier_from(load(resolve(str(folder))), choose_device(self.device))
            rest = np.setdiff1d(np.arange(len(reader)), chosen)
            guessed, kept = self._sure(classifier, reader, rest)
            by_chance = numpy_generator(seed, "study", "wrong labels").integers(len(classes), size=len(kept))
            source, first = f"{count} labels a class and pseudo-labels", (reader, chosen, labels[chosen])
            for kind, given in (("guessed", guessed[kept]), ("wrong", by_chance)):
                parts = [first, (reader, kept, given)]
                write_labelled(files[kind], parts, classes, source=source, overwrite=True)
            drawn, sure = self._sure(classifier, samples, np.arange(len(samples)))
            files["samples"].unlink(missing_ok=True)  # of an interrupted start
            if len(sure):
                parts, source = [(samples, sure, drawn[sure])], "samples with pseudo-labels"
                write_labelled(files["samples"], parts, classes, source=source, overwrite=True)
            figures = {
                "pseudo_labels": len(kept) / len(rest) if len(rest) else None,
                "pseudo_right": float((guessed == labels)[kept].mean()) if len(kept) else None,
                "samples_kept": len(sure) / len(samples),
            }
        return Result(result.figures | figures, result.hits)

    def _sure(self, classifier: Classifier, reader: Dataset, of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest class of each image, and which `of` these records the classifier is sure of."""
        labels, sure = guesses(classifier, reader, batch_size=BATCH)
        return labels, of[sure[of] >= self.config.threshold]

    # --- answers

    def controls(self) -> list[Control]:
        least = self.config.per_class[0]
        return [
            Control(arm_name(least, WRONG), arm_name(least), "not helps", "labels by chance must not help"),
            Control(ALL, arm_name(least), "helps", "more labels must help, or the study could not see any help"),
        ]

    def conclude(self, results: Results) -> Conclusion:
        comparisons, pseudo = [], []
        for count in self.config.per_class:
            pairs = [("", way) for way in (GUESSED, WITH_SAMPLES, HEAD, TUNED)] + [(GUESSED, WITH_SAMPLES)]
            comparisons += [Comparison(arm_name(count, a), arm_name(count, b), asked=True) for a, b in pairs]
            means = [results.mean_figure(arm_name(count), name) for name in PSEUDO]
            pseudo.append([arm_name(count), *map(percent, means)])
        rows = [[arm.name, arm.what, *results.recalls(arm.name, ["all"])] for arm in self.arms()]
        return Conclusion(
            comparisons=comparisons,
            tables=[
                ("Mean recall of the classes", ["", "what", "test"], rows),
                ("Pseudo-labels", ["", *PSEUDO.values()], pseudo),  # means over the seeds
            ],
            notes=[
                "every seed draws its own labelled images, the same for all arms; the generator has seen no label",
                "every arm has the same number of steps; nothing was chosen on the test images",
            ],
        )


CONFIG, SUBJECT = LabelsConfig, Labels
