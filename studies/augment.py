"""Study `augment`: do a generator's samples help a classifier, beyond what weights, sampling and augmentation do?"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.studies.images import (
    HELD_BACK,
    HELD_OUT,
    PARTS,
    TEST,
    TRAIN,
    StudyConfig,
    even,
    expected_counts,
    write_subset,
)
from duetgan.studies.samples import Drawing, draw_rows, share_of_batch
from duetgan.studies.subject import (
    GENERATOR,
    SEED,
    SELECTOR,
    UNTRAINED,
    Comparison,
    Conclusion,
    Control,
    Job,
    Results,
    Settings,
    Subject,
)
from duetgan.utils.config.model import Config, PositiveFloat, PositiveInt, Probability
from duetgan.utils.errors import UserError

REAL, HELD = "real only", "held-back real images"
CLASSIC, SYNTHETIC, CONTROL = "classic", "synthetic", "control"
SAMPLES, SELECTED, NOISE = "samples", "selected samples", "untrained samples"  # jobs


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


def synthetic_name(ratio: float, selected: bool) -> str:
    return f"samples {ratio:g}" + (", selected" if selected else "")


def sample_counts(counts: Sequence[int], ratio: float, *, fill: bool) -> list[int]:
    """Samples of each class at a ratio, rounded up: as many of each, or with `fill` each class's share of what all
    classes lack of the largest, which is how `data.synthetic.balance fill` mixes them in.
    """
    parts = max(counts) - np.array(counts, np.float64) if fill else np.ones(len(counts))
    wanted = np.ceil(ratio * sum(counts) * parts / parts.sum() - 1e-9)
    return [int(count) for count in wanted]


class Augment(Subject):
    """The arms, trained alike for as many steps, with the same share of every batch where images are added."""

    title = "Do samples help the classifier?"
    sets = (HELD_OUT, TEST)

    def __init__(self, config: AugmentConfig, folder: Path, device: str | None = None) -> None:
        super().__init__(config, folder, device)
        self.tail = not even(expected_counts(config.data))
        self.kinds = [SELECTED if selected else SAMPLES for selected in config.selected]

    def _file(self, job: str, ratio: float) -> Path:
        return self.place(job) / ("images.lmdb" if job == HELD else f"ratio-{ratio:g}.lmdb")

    def _wanted(self, ratio: float) -> list[int]:
        return sample_counts(self.counts(TRAIN), ratio, fill=self.tail)

    # --- what is made once

    def jobs(self) -> list[Job]:
        config = self.config
        jobs = [self.parts_job(), *self.generators(), self._samples(NOISE, UNTRAINED, [config.control_ratio])]
        jobs.append(Job(HELD, HELD, self._held_back, {"ratio": config.control_ratio}, (PARTS,)))
        jobs += [self._samples(SAMPLES, GENERATOR, config.ratios)] if SAMPLES in self.kinds else []
        if SELECTED in self.kinds:  # by a classifier of the training images alone, every class seen equally often
            jobs.append(self.selector(config.classifier, self.recipe_key(), {"data.sampling": "balanced"}))
            jobs.append(self._samples(SELECTED, GENERATOR, config.ratios))
        return jobs

    def _samples(self, name: str, generator: str, ratios: Sequence[float]) -> Job:
        """A file for each ratio. Tells `kept`, the share of the drawn samples of each class that the selection keeps,
        and `counts`: what each file holds, fewer than asked for where the selection's pool has no more.
        """
        selection = self.config.selection
        band = selection.low, selection.high
        rule: dict[str, Any] = {"recognised": True, "confidence": band} if name == SELECTED else {}
        drawing, pool = Drawing(**rule), selection.pool if rule else None

        def make(_place: Path) -> Settings:
            files = {self._file(name, ratio): self._wanted(ratio) for ratio in ratios}
            kept, counts = self.draw(files, generator, drawing, SEED, pool=pool), {}
            for file in files:
                with Dataset(file) as reader:
                    counts[file.stem] = list(reader.meta.histogram)
            return {"kept": kept, "counts": counts}

        needs = (PARTS, generator, *([SELECTOR] if rule else []))
        selected = {"pool": pool, **rule} if rule else None
        key = {"ratios": {f"ratio-{ratio:g}": ratio for ratio in ratios}, "selection": selected}
        return Job(name, f"samples of {generator}" + (f", {drawing}" * drawing.selects), make, key, needs)

    def _held_back(self, _place: Path) -> Settings:
        with Dataset(self.part(HELD_BACK)) as reader:
            wanted = enumerate(self._wanted(self.config.control_ratio))
            rows = [np.flatnonzero(reader.labels() == label)[:count] for label, count in wanted]
            write_subset(reader, np.sort(np.concatenate(rows)), self._file(HELD, 0))
        return {"counts": list(map(len, rows))}

    # --- arms

    def arms(self) -> list[Job]:
        config, control = self.config, self.config.control_ratio
        arms = [self._arm(REAL, "the training images alone", {}, CLASSIC)]
        if self.tail:
            weights, sampling = {"loss.class_weights": "balanced"}, {"data.sampling": "balanced"}
            arms.append(self._arm("class weights", "each class's loss by 1 / its frequency", weights, CLASSIC))
            arms.append(self._arm("balanced sampling", "every class is seen equally often", sampling, CLASSIC))
        arms.append(self._arm("stronger augmentation", _settings(config.stronger), config.stronger, CLASSIC))
        mixing = f", {_settings(config.mixing)}" if config.mixing else ""
        for kind in self.kinds:
            for ratio in config.ratios:
                what = f"{ratio:g} {kind} per real image{mixing}"
                arms.append(self._arm(synthetic_name(ratio, kind == SELECTED), what, {}, SYNTHETIC, kind, ratio))
        what = f"{control:g} samples of an untrained generator per real image"
        arms.append(self._arm(UNTRAINED, what, {}, CONTROL, NOISE, control))
        what = f"{control:g} further real images per real image"
        return [*arms, self._arm(HELD, what, {}, CONTROL, HELD, control)]

    def _arm(self, name: str, what: str, own: Settings, family: str, job: str = "", ratio: float = 0.0) -> Job:
        """An arm with overrides of its own, and with the images of a job mixed in."""
        own, images = dict(own), {}
        if job:
            images = {"data.synthetic.path": str(self._file(job, ratio))}
            own |= {"data.synthetic.share": share_of_batch(ratio)}
            own |= {"data.synthetic.balance": "fill"} if self.tail else {}
            own |= self.config.mixing if family == SYNTHETIC else {}
        make = partial(self.learn, self.part(TRAIN), own | images)
        return Job(name, what, make, self.recipe_key(own), (PARTS, *([job] if job else [])), family)

    # --- answers

    def controls(self) -> list[Control]:
        return [
            Control(UNTRAINED, REAL, "not helps", "samples without any content must not help"),
            Control(HELD, REAL, "helps", "further real images must help, or the study could not see any help"),
        ]

    def conclude(self, results: Results) -> Conclusion:
        """Choices are made on held-out images; the test images are looked at only by what was chosen."""
        families = {arm.name: arm.family for arm in self.arms()}
        classes, groups = self.classes(), self.class_groups(results)
        best, samples = (choose(results, families, family) for family in (CLASSIC, SYNTHETIC))
        asked = [Comparison(first, samples, of, asked=True) for first in dict.fromkeys((best, REAL)) for of in groups]
        by_class = [Comparison(best, samples, name, family="classes") for name in classes]
        rest = [Comparison(REAL, arm, of, family="all arms") for arm in families if arm != REAL for of in groups]
        rows = [[arm, *results.recalls(arm, ["all"], HELD_OUT), *results.recalls(arm, groups)] for arm in families]
        shown = list(dict.fromkeys([REAL, best, samples, HELD]))
        recalls = zip(*(results.recalls(arm, classes) for arm in shown), strict=True)
        counts = [f"{count:,}" for count in self.counts(TRAIN)]
        of_classes = [[name, count, *row] for name, count, row in zip(classes, counts, recalls, strict=True)]
        return Conclusion(
            comparisons=[*asked, *by_class, *rest],
            choices={"best classic arm": best, "best arm with samples": samples},
            tables=[
                ("Mean recall of the classes", ["", "held out", *(f"test, {group}" for group in groups)], rows),
                ("Recall by class", ["", "training images", *shown], of_classes),
            ],
            pictures=self._drawn(),
            notes=self._notes(),
        )

    def _drawn(self) -> dict[str, str]:
        """Real images and samples of every kind, a row for each class; drawn once."""
        most, control = max(self.config.ratios), self.config.control_ratio
        files = {"Training images": self.part(TRAIN), "Samples": self._file(SAMPLES, most)}
        files |= {"Selected samples": self._file(SELECTED, most)}
        files |= {"Samples of the untrained generator": self._file(NOISE, control)}
        for name, file in files.items():
            if file.is_file() and not self.picture(name).is_file():
                draw_rows(file, self.picture(name))
        return {name: f"{name}, a row for each class" for name in files}

    def _notes(self) -> list[str]:
        steps = self.config.classifier.overrides.get("steps")
        notes = [
            f"every arm has the same recipe and number of steps{'' if steps is None else f', {steps}'}: where samples "
            "are mixed in, real images are seen less often, and in short trainings what learns slowly, as under strong "
            "augmentation, looks worse than it is",
            "choices were made by the mean recall on held-out images; the intervals cover the chance of training and "
            "the draw of test images, not the training images or the generator, of which there is one",
        ]
        if SELECTED in self.kinds and (made := self.outcome(SELECTED)):
            shares = [share for share in made["kept"] if share is not None]
            notes.append(f"the selection kept {min(shares):.0%} to {max(shares):.0%} of the drawn samples of a class")
            for ratio in self.config.ratios:
                rows = zip(made["counts"][f"ratio-{ratio:g}"], self._wanted(ratio), self.classes(), strict=True)
                if few := [f"{name} {held} of {asked}" for held, asked, name in rows if held < asked]:
                    notes.append(
                        f"{synthetic_name(ratio, True)}: the pool had too few of some classes, so that each of these is"
                        f" seen more often ({', '.join(few)}); a larger selection.pool gives more"
                    )
        return notes


def choose(results: Results, families: Mapping[str, str], family: str) -> str:
    """The arm of a family with the largest mean recall on held-out images; of equal ones the first."""
    names = [name for name, of in families.items() if of == family]
    return max(names, key=lambda name: results.mean(name, "all", HELD_OUT))


def _settings(overrides: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.partition('.')[2] or key} {value}" for key, value in overrides.items())


CONFIG, SUBJECT = AugmentConfig, Augment
