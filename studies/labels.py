"""Study `labels`: with few labels, what do pseudo-labels, a generator's samples and a discriminator's features add?"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.reading.dataset import Dataset
from data.reading.few_labels import few_labels
from inference.dataset import write_dataset
from inference.pseudo_labels import guesses, write_labelled
from inference.samples import Sampler
from models.classifier import Classifier
from models.restore import classifier_from, generator_from
from reporting.figures import percent
from studies.augment import share_of_batch
from studies.config import StudyConfig
from studies.declare import Arm, Comparison, Conclusion, Control, Job, Result, Results
from studies.declare import Subject as Declared
from studies.execute import told
from studies.parts import NAME, TEST, TRAIN, labels_of, part, parts_job, write_subset
from studies.samples import SEED, generator_run
from studies.train import QUIET, judge_classifier, require_trained_on, train_run
from studies.verdict import groups_of
from utils.checkpoint import load, resolve
from utils.config.model import PositiveFloat, PositiveInt, Probability
from utils.distributed.collectives import choose_device
from utils.errors import UserError
from utils.seeding import numpy_generator

GENERATOR, SAMPLES, UNLABELLED = "generator without labels", "samples without labels", "images without labels"
ALL = "all labels"
GUESSED, WITH_SAMPLES, WRONG = "pseudo-labels", "pseudo-labels and samples", "labels by chance"
HEAD, TUNED = "features of D", "from D on"
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
    """An arm's name; no way: the labels alone."""
    return f"{per_class} labels" + (f", {way}" if way else "")


class Labels(Declared):
    """Every seed draws its own labelled images. The generator has seen no label at all, so one serves all arms."""

    title = "What do images without labels add?"

    def __init__(self, config: LabelsConfig, folder: Path, device: str | None = None) -> None:
        self.config, self.folder, self.device = config, folder, device
        self.base = {**QUIET, "data.val_path": None, **config.classifier.overrides}

    # --- what is made once

    def jobs(self) -> list[Job]:
        config = self.config
        needs = (NAME, UNLABELLED)
        return [
            parts_job(config.data),
            Job(UNLABELLED, self._unlabelled, needs=(NAME,)),
            Job(GENERATOR, self._generator, config.gan.key(), needs, f"training the generator: {config.gan.config}"),
            Job(SAMPLES, self._samples, {"ratio": config.ratio}, (GENERATOR,), "samples of the generator"),
        ]

    @property
    def unlabelled(self) -> Path:
        return self.folder / "jobs" / "images-without-labels" / "images.lmdb"

    @property
    def samples(self) -> Path:
        return self.folder / "jobs" / "samples-without-labels" / "samples.lmdb"

    def _unlabelled(self, place: Path) -> dict[str, Any]:
        with Dataset(part(self.folder, TRAIN)) as reader:
            every = (reader, range(len(reader)), np.zeros(len(reader), np.int64))
            source = f"{reader.meta.source}, labels left out"
            meta = write_labelled(place / "images.lmdb", [every], (), source=source, overwrite=True)
        return {"images": meta.count}

    def _generator(self, place: Path) -> dict[str, Any]:
        """It and its discriminator, trained on the images alone."""
        recipe = self.config.gan
        if recipe.run is not None:
            require_trained_on(recipe.run, self.unlabelled)
            return {"run": str(Path(recipe.run).resolve())}
        images = {"data.path": str(self.unlabelled), "data.val_path": None}
        overrides = {**QUIET, **recipe.overrides, **images}
        train_run(place / "run", str(recipe.file), overrides, seed=SEED, device=self.device)
        return {"run": None}

    def _samples(self, place: Path) -> dict[str, Any]:
        checkpoint = load(resolve(generator_run(self.folder, GENERATOR)))
        sampler = Sampler(generator=generator_from(checkpoint, choose_device(self.device)), seed=SEED)
        count = max(1, round(self.config.ratio * told(self.folder, UNLABELLED)["images"]))
        out = place / "samples.lmdb"
        write_dataset(sampler, checkpoint, out, source="samples for a study", count=count, overwrite=True)
        return {"samples": count}

    # --- arms

    def arms(self) -> list[Arm]:
        found, least = [], self.config.per_class[0]
        for count in self.config.per_class:
            few, guessed = self._file(count, "few"), self._file(count, "guessed")
            found += [
                Arm(
                    arm_name(count),
                    f"supervised: {count} labelled images of each class alone",
                    partial(self._first, count),
                    self._key({"threshold": self.config.threshold}),
                    (NAME, SAMPLES),
                    "labels",
                ),
                self._arm(count, GUESSED, "and all others that it is sure of", guessed, {}),
                self._arm(count, WITH_SAMPLES, "and samples that it is sure of", guessed, {}),
                self._arm(count, HEAD, "a linear head on D's features", few, {"finetune.freeze": ["backbone"]}),
                self._arm(count, TUNED, "a network that starts as D", few, {}),
            ]
        found.append(self._arm(least, WRONG, "labels drawn by chance", self._file(least, "wrong"), {}, "control"))
        make = partial(self._train, lambda seed: part(self.folder, TRAIN), {})
        return [*found, Arm(ALL, "every training image with its label", make, self._key({}), (NAME,), "control")]

    def _key(self, more: Mapping[str, Any]) -> dict[str, Any]:
        recipe = self.config.classifier
        return {"recipe": recipe.text(), "overrides": recipe.overrides, **more}

    def _arm(self, count: int, way: str, what: str, file: Any, more: Mapping[str, Any], family: str = "more") -> Arm:
        """An arm whose images are `file(seed)`; those with D start from the generator's run."""
        config = self.config
        own = {**config.discriminator, **more} if way in (HEAD, TUNED) else dict(more)
        key = self._key({"own": own, "threshold": config.threshold, "labels": count})
        make = partial(self._make, count, way, file, own)
        return Arm(arm_name(count, way), what, make, key, (NAME, SAMPLES), family)

    def _make(self, count: int, way: str, file: Any, own: Mapping[str, Any], folder: Path, seed: int) -> Result:
        more = dict(own)
        if way in (HEAD, TUNED):
            more |= {"model.name": "discriminator", "model.weights": generator_run(self.folder, GENERATOR)}
        if way == WITH_SAMPLES:
            more |= self._mixed(self._file(count, "samples")(seed), file(seed))
        return self._train(file, more, folder, seed)

    def _mixed(self, samples: Path, images: Path) -> dict[str, Any]:
        """Labelled samples beside labelled images, each seen equally often; nothing where there are no samples."""
        if not samples.is_file():
            return {}
        with Dataset(samples) as some, Dataset(images) as others:
            share = share_of_batch(len(some) / len(others))
        return {"data.synthetic.path": str(samples), "data.synthetic.share": share}

    def _train(self, file: Any, more: Mapping[str, Any], folder: Path, seed: int) -> Result:
        """Train on the images `file(seed)` and judge."""
        images = file(seed)
        if not images.is_file():
            raise UserError(f"{images}: is missing; remove this study's folder, and start it again")
        overrides = {**self.base, "data.path": str(images), **more}
        train_run(folder, str(self.config.classifier.file), overrides, seed=seed, device=self.device)
        return judge_classifier(folder, {TEST: part(self.folder, TEST)}, device=self.device)

    # --- labels

    def _file(self, count: int, kind: str) -> Any:
        """The images of a kind, by the seed: `few` labelled ones; these and those `guessed`, or `wrong`; `samples`."""
        return lambda seed: self.folder / "draws" / f"{count}-s{seed}" / f"{kind}.lmdb"

    def _first(self, count: int, folder: Path, seed: int) -> Result:
        """Draw the labelled images, train on them, and label the others and the samples, for the arms that follow."""
        with Dataset(part(self.folder, TRAIN)) as reader:
            labels = reader.labels()
            chosen = few_labels(labels, count, seed, reader.classes)
            few = self._file(count, "few")(seed)
            few.parent.mkdir(parents=True, exist_ok=True)
            write_subset(reader, chosen, few)
            result = self._train(lambda seed: few, {}, folder, seed)
            classifier = classifier_from(load(resolve(str(folder))), choose_device(self.device))
            rest = np.setdiff1d(np.arange(len(reader)), chosen)
            guessed, sure = guesses(classifier, reader, batch_size=BATCH)
            kept = rest[sure[rest] >= self.config.threshold]
            by_chance = numpy_generator(seed, "study", "wrong labels").integers(len(reader.classes), size=len(kept))
            source, first = f"{count} labels a class and pseudo-labels", (reader, chosen, labels[chosen])
            for kind, named in (("guessed", guessed[kept]), ("wrong", by_chance)):
                parts = [first, (reader, kept, named)]
                write_labelled(self._file(count, kind)(seed), parts, reader.classes, source=source, overwrite=True)
            figures: dict[str, float | None] = {"pseudo_labels": len(kept) / len(rest) if len(rest) else None}
            figures["pseudo_right"] = float((guessed == labels)[kept].mean()) if len(kept) else None
            figures["samples_kept"] = self._label_samples(classifier, reader.classes, count, seed)
        return Result(result.figures | figures, result.hits)

    def _label_samples(self, classifier: Classifier, classes: Sequence[str], count: int, seed: int) -> float:
        """Label the samples that the classifier is sure of; returns their share. None of them: there is no file."""
        out = self._file(count, "samples")(seed)
        with Dataset(self.samples) as reader:
            guessed, sure = guesses(classifier, reader, batch_size=BATCH)
            kept = np.flatnonzero(sure >= self.config.threshold)
            out.unlink(missing_ok=True)  # of an interrupted start
            if len(kept):
                source = "samples with pseudo-labels"
                write_labelled(out, [(reader, kept, guessed[kept])], classes, source=source, overwrite=True)
            return len(kept) / len(reader)

    # --- answers

    def controls(self) -> list[Control]:
        least = self.config.per_class[0]
        return [
            Control(arm_name(least, WRONG), arm_name(least), "not helps", "labels by chance must not help"),
            Control(ALL, arm_name(least), "helps", "more labels must help, or the study could not see any help"),
        ]

    def labels(self) -> dict[str, np.ndarray]:
        return labels_of(self.folder, TEST)

    def groups(self) -> dict[str, list[int]]:
        parts = told(self.folder, NAME)
        return groups_of(parts["counts"][TRAIN], parts["classes"])

    def conclude(self, results: Results) -> Conclusion:
        asked = []
        for count in self.config.per_class:
            plain, pseudo = arm_name(count), arm_name(count, GUESSED)
            asked += [Comparison(plain, arm_name(count, way)) for way in (GUESSED, WITH_SAMPLES, HEAD, TUNED)]
            asked.append(Comparison(pseudo, arm_name(count, WITH_SAMPLES)))
        rows = [[arm.name, arm.what, percent(results.mean(arm.name, "all", TEST))] for arm in self.arms()]
        return Conclusion(
            comparisons=asked,
            asked=asked,
            tables=[("Mean recall of the classes", ["", "what", "test"], rows), self._pseudo(results)],
            notes=[
                "every seed draws its own labelled images, the same for all arms; the generator has seen no label",
                "every arm has the same number of steps; nothing was chosen on the test images",
            ],
        )

    def _pseudo(self, results: Results) -> Any:
        """How many images and samples were labelled, and how many rightly: means over the seeds."""
        names = {"pseudo_labels": "labelled", "pseudo_right": "rightly", "samples_kept": "samples labelled"}
        rows = []
        for count in self.config.per_class:
            found = [[v for v in results.figures(arm_name(count), name) if v is not None] for name in names]
            rows.append([arm_name(count), *(percent(float(np.mean(each))) if each else "none" for each in found)])
        return "Pseudo-labels", ["", *names.values()], rows


CONFIG, SUBJECT = LabelsConfig, Labels
