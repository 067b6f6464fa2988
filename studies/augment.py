"""Study `augment`: do a generator's samples help a classifier, beyond what weights, sampling and augmentation do?"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.reading.dataset import Dataset
from reporting.figures import percent
from studies.config import StudyConfig
from studies.declare import Arm, Comparison, Conclusion, Control, Job, Picture, Results, Settings, Subject
from studies.execute import told
from studies.parts import (
    HELD_BACK,
    HELD_OUT,
    NAME,
    TEST,
    TRAIN,
    expected_counts,
    labels_of,
    part,
    parts_job,
    subset_job,
)
from studies.pictures import class_rows
from studies.samples import Selection, generator_job, samples_job
from studies.train import QUIET, classifier_arm, train_run
from studies.verdict import class_groups, even, groups_of
from utils.config.model import Config, PositiveFloat, PositiveInt, Probability
from utils.errors import UserError

REAL, HELD, UNTRAINED = "real only", "held-back real images", "untrained generator"
CLASSIC, SYNTHETIC, CONTROL = "classic", "synthetic", "control"
GENERATOR, SELECTOR = "generator", "selector"
SELECTOR_SEED = 1000  # beyond the arms' seeds: no arm is trained like the selector


class SelectionConfig(Config):
    """Which samples the arms `selected` train on."""

    pool: PositiveInt = 4  # samples drawn for each that is wanted
    low: Probability = 0.5  # confidence of the class that was asked for, at least
    high: Probability = 1.0  # and at most


class AugmentConfig(StudyConfig):
    """All settings of the study."""

    ratios: list[PositiveFloat] = [0.25, 0.5, 1.0, 2.0]  # samples per real image
    selected: list[bool] = [False, True]  # which kinds of samples
    selection: SelectionConfig = SelectionConfig()
    control_ratio: PositiveFloat = 1.0  # of both controls: images per real image
    # of the arm "stronger augmentation": keys of the classifier's recipe
    stronger: dict[str, Any] = {"augment.trivial_augment": True, "augment.cutmix": 1.0, "augment.mix_prob": 0.5}
    # of every arm with samples, not of the controls: keys of the classifier's recipe, such as data.sampling
    mixing: dict[str, Any] = {}

    def check(self) -> None:
        super().check()
        if not self.ratios or not self.selected:
            raise UserError("ratios and selected: give at least one each, such as [0.5] and [false]")
        if self.selection.low > self.selection.high:
            raise UserError("selection.low lies above selection.high; exchange them")

    @property
    def needs_selector(self) -> bool:
        return True in self.selected


def synthetic_name(ratio: float, selected: bool) -> str:
    """An arm's name."""
    return f"samples {ratio:g}" + (", selected" if selected else "")


def share_of_batch(ratio: float) -> float:
    """The share of every batch that is synthetic where there are `ratio` samples per real image."""
    return round(ratio / (1 + ratio), 6)


def sample_counts(counts: Sequence[int], ratio: float, *, fill: bool) -> list[int]:
    """Samples of each class at a ratio, rounded up: as many of each, or with `fill` each class's share of what all
    classes lack of the largest, which is how `data.synthetic.balance fill` mixes them in.
    """
    parts = np.ones(len(counts))
    if fill:
        parts = max(counts) - np.array(counts, np.float64)
    wanted = np.ceil(ratio * sum(counts) * parts / parts.sum() - 1e-9)
    return [int(count) for count in wanted]


class Augment(Subject):
    """The arms, trained alike for as many steps, with the same share of every batch where images are added."""

    title = "Do samples help the classifier?"

    def __init__(self, config: AugmentConfig, folder: Path, device: str | None = None) -> None:
        self.config, self.folder, self.device = config, folder, device
        self.sets = {name: part(folder, name) for name in (HELD_OUT, TEST)}
        self.recipe = dict(config.classifier.overrides)
        self.base = {"data.path": str(part(folder, TRAIN)), "data.val_path": None, **self.recipe}
        self.tail = not even(expected_counts(config.data))

    # --- what is made once

    def jobs(self) -> list[Job]:
        config, folder = self.config, self.folder
        ratios = {_file(ratio): ratio for ratio in config.ratios}
        controls = {_file(config.control_ratio): config.control_ratio}
        found = [
            parts_job(config.data),
            generator_job(GENERATOR, folder, config.gan, device=self.device),
            generator_job(UNTRAINED, folder, config.gan, device=self.device, untrained=True),
            self._samples("untrained samples", UNTRAINED, controls),
            subset_job(HELD, folder, HELD_BACK, self._held_counts, {"ratio": config.control_ratio}),
        ]
        if False in config.selected:
            found.append(self._samples("samples", GENERATOR, ratios))
        if config.needs_selector:
            rule = Selection(config.selection.pool, confidence=(config.selection.low, config.selection.high))
            found += [self._selector(), self._samples("selected samples", GENERATOR, ratios, rule)]
        return found

    def _samples(self, name: str, generator: str, ratios: Mapping[str, float], rule: Selection | None = None) -> Job:
        counts = partial(_counts, ratios, self.tail)
        how: dict[str, Any] = {"key": {"ratios": dict(ratios)}, "device": self.device}
        how |= {"selection": rule, "classifier": None if rule is None else SELECTOR}
        return samples_job(name, self.folder, generator, counts, **how)

    def _held_counts(self, parts: dict[str, Any]) -> list[int]:
        return sample_counts(parts["counts"][TRAIN], self.config.control_ratio, fill=self.tail)

    def _selector(self) -> Job:
        """A classifier of the training images alone, every class seen equally often."""
        overrides = {**QUIET, **self.base, "data.sampling": "balanced"}

        def make(place: Path) -> Settings:
            train_run(
                place / "run", str(self.config.classifier.file), overrides, seed=SELECTOR_SEED, device=self.device
            )
            return {}

        key = {"recipe": self.config.classifier.text(), "overrides": self.recipe}
        return Job(SELECTOR, make, key=key, needs=(NAME,), what="training the classifier that selects samples")

    # --- arms

    def arms(self) -> list[Arm]:
        config = self.config
        found = [self._arm(REAL, "the training images alone", {}, CLASSIC)]
        if self.tail:
            weights = {"loss.class_weights": "balanced"}
            found.append(self._arm("class weights", "each class's loss by 1 / its frequency", weights, CLASSIC))
            sampling = {"data.sampling": "balanced"}
            found.append(self._arm("balanced sampling", "every class is seen equally often", sampling, CLASSIC))
        found.append(self._arm("stronger augmentation", _settings(config.stronger), config.stronger, CLASSIC))
        mixing = f", {_settings(config.mixing)}" if config.mixing else ""
        for selected in config.selected:
            job = "selected samples" if selected else "samples"
            for ratio in config.ratios:
                what = f"{ratio:g} {job} per real image{mixing}"
                file = self.folder / "jobs" / job.replace(" ", "-") / f"{_file(ratio)}.lmdb"
                found.append(self._with(synthetic_name(ratio, selected), what, file, ratio, job, SYNTHETIC))
        ratio = config.control_ratio
        file = self.folder / "jobs" / "untrained-samples" / f"{_file(ratio)}.lmdb"
        what = f"{ratio:g} samples of an untrained generator per real image"
        found.append(self._with(UNTRAINED, what, file, ratio, "untrained samples", CONTROL))
        file = self.folder / "jobs" / "held-back-real-images" / "images.lmdb"
        what = f"{ratio:g} further real images per real image"
        found.append(self._with(HELD, what, file, ratio, HELD, CONTROL))
        return found

    def _with(self, name: str, what: str, file: Path, ratio: float, job: str, family: str) -> Arm:
        """An arm that mixes the images of a file in."""
        added: dict[str, Any] = {"data.synthetic.path": str(file), "data.synthetic.share": share_of_batch(ratio)}
        added |= {"data.synthetic.balance": "fill"} if self.tail else {}
        added |= self.config.mixing if family == SYNTHETIC else {}
        return self._arm(name, what, added, family, (NAME, job))

    def _arm(
        self, name: str, what: str, overrides: Mapping[str, Any], family: str, needs: tuple[str, ...] = (NAME,)
    ) -> Arm:
        recipe = self.config.classifier
        own = {key: value for key, value in overrides.items() if key != "data.synthetic.path"}
        key = {"recipe": recipe.text(), "overrides": {**self.recipe, **own}}
        make = classifier_arm(str(recipe.file), {**self.base, **overrides}, self.sets, device=self.device)
        return Arm(name, what, make, key=key, needs=needs, family=family)

    # --- answers

    def controls(self) -> list[Control]:
        return [
            Control(UNTRAINED, REAL, "not helps", "samples without any content must not help"),
            Control(HELD, REAL, "helps", "further real images must help, or the study could not see any help"),
        ]

    def labels(self) -> dict[str, np.ndarray]:
        return labels_of(self.folder, HELD_OUT, TEST)

    def groups(self) -> dict[str, list[int]]:
        parts = told(self.folder, NAME)
        return groups_of(parts["counts"][TRAIN], parts["classes"])

    def conclude(self, results: Results) -> Conclusion:
        """Choices are made on held-out images; the test images are looked at only by what was chosen."""
        families = {arm.name: arm.family for arm in self.arms()}
        classes = told(self.folder, NAME)["classes"]
        groups = tuple(class_groups(results.groups, classes))
        chosen = {family: choose(results, families, family) for family in (CLASSIC, SYNTHETIC)}
        best, samples = chosen[CLASSIC], chosen[SYNTHETIC]
        asked = [Comparison(best, samples, groups)]
        if best != REAL:
            asked.append(Comparison(REAL, samples, groups))
        rest = [Comparison(REAL, name, groups, family="all arms") for name in families if name != REAL]
        by_class = Comparison(best, samples, tuple(classes), family="classes")
        told_choices = {"best classic arm": best, "best arm with samples": samples}
        return Conclusion(
            comparisons=[*asked, by_class, *rest],
            choices=told_choices,
            asked=asked,
            tables=[self._table(results, groups, list(families)), self._classes(results, classes, best, samples)],
            pictures=self._pictures(),
            notes=self._notes(),
        )

    def _table(self, results: Results, groups: Sequence[str], names: Sequence[str]) -> Any:
        """Every arm's figures: held out, then on the test images by group."""
        header = ["", "held out", *(f"test, {group}" for group in groups)]
        rows = [
            [
                name,
                percent(results.mean(name, "all", HELD_OUT)),
                *(percent(results.mean(name, group)) for group in groups),
            ]
            for name in names
        ]
        return "Mean recall of the classes", header, rows

    def _classes(self, results: Results, classes: Sequence[str], best: str, samples: str) -> Any:
        """Every class's images, and its recall on the test images by arm."""
        counts = told(self.folder, NAME)["counts"][TRAIN]
        shown = list(dict.fromkeys([REAL, best, samples, HELD]))
        rows = [
            [name, f"{counts[label]:,}", *(percent(results.mean(arm, name)) for arm in shown)]
            for label, name in enumerate(classes)
        ]
        return "Recall by class", ["", "training images", *shown], rows

    def _pictures(self) -> list[Picture]:
        """Real images and samples of every kind, a row for each class; drawn once."""
        jobs = {"parts/train": "Training images", f"samples/{_file(max(self.config.ratios))}": "Samples"}
        jobs[f"selected-samples/{_file(max(self.config.ratios))}"] = "Selected samples"
        jobs[f"untrained-samples/{_file(self.config.control_ratio)}"] = "Samples of the untrained generator"
        found = []
        for name, caption in jobs.items():
            path = self.folder / "jobs" / f"{name}.lmdb"
            out = Path("pictures") / f"{name.partition('/')[0]}.png"
            if path.is_file():
                if not (self.folder / out).is_file():
                    with Dataset(path) as reader:
                        class_rows(reader, self.folder / out)
                found.append(Picture(str(out), f"{caption}, a row for each class"))
        return found

    def _notes(self) -> list[str]:
        notes = [
            f"every arm has the same recipe and number of steps{self._steps()}: where samples are mixed in, real "
            "images are seen less often, and in short trainings what learns slowly, as under strong augmentation, "
            "looks worse than it is",
            "choices were made by the mean recall on held-out images; the intervals cover the chance of training and "
            "the draw of test images, not the training images or the generator, of which there is one",
        ]
        if self.config.needs_selector and (made := told(self.folder, "selected samples")):
            shares = [share for share in made["kept"] if share is not None]
            notes.append(f"the selection kept {min(shares):.0%} to {max(shares):.0%} of the drawn samples of a class")
            parts = told(self.folder, NAME)
            for ratio in self.config.ratios:
                wanted = sample_counts(parts["counts"][TRAIN], ratio, fill=self.tail)
                rows = zip(made["counts"][_file(ratio)], wanted, parts["classes"], strict=True)
                if few := [f"{name} {held} of {asked}" for held, asked, name in rows if held < asked]:
                    notes.append(
                        f"{synthetic_name(ratio, True)}: the pool had too few of some classes, so that each of these is"
                        f" seen more often ({', '.join(few)}); a larger selection.pool gives more"
                    )
        return notes

    def _steps(self) -> str:
        steps = self.recipe.get("steps")
        return "" if steps is None else f", {steps}"


def choose(results: Results, families: Mapping[str, str], family: str) -> str:
    """The arm of a family with the largest mean recall on held-out images; of equal ones the first."""
    names = [name for name, own in families.items() if own == family]
    return max(names, key=lambda name: results.mean(name, "all", HELD_OUT))


def _settings(overrides: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.partition('.')[2] or key} {value}" for key, value in overrides.items())


def _file(ratio: float) -> str:
    return f"ratio-{ratio:g}"


def _counts(ratios: Mapping[str, float], fill: bool, parts: dict[str, Any]) -> dict[str, list[int]]:
    return {file: sample_counts(parts["counts"][TRAIN], ratio, fill=fill) for file, ratio in ratios.items()}


CONFIG, SUBJECT = AugmentConfig, Augment
