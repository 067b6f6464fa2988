"""Study `augment`: do a generator's samples help a classifier, beyond what weights, sampling and augmentation do?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.studies.images import HELD_BACK, HELD_OUT, TEST, TRAIN, StudyConfig, even, expected_counts, write_subset
from duetgan.studies.samples import Drawing, draw_rows, share_of_batch
from duetgan.studies.subject import UNTRAINED, Comparison, Conclusion, Control, Result, Results, Settings, Subject
from duetgan.utils.config.model import Config, PositiveFloat, PositiveInt, Probability
from duetgan.utils.errors import UserError

REAL, HELD = "real only", "held-back real images"
CLASSIC, SYNTHETIC, CONTROL = "classic", "synthetic", "control"
CHOSEN = {"best classic arm": CLASSIC, "best arm with samples": SYNTHETIC}  # of each seed
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
    controls = (
        Control(UNTRAINED, REAL, "not helps", "samples without any content must not help"),
        Control(HELD, REAL, "helps", "further real images must help, or the study could not see any help"),
    )

    def declare(self) -> None:
        config, control = self.config, self.config.control_ratio
        self.tail = not even(expected_counts(config.data))
        generator, untrained = self.generators()
        # by a classifier of the training images alone, every class seen equally often
        selector = self.selector(config.classifier, {"data.sampling": "balanced"})
        band = config.selection.low, config.selection.high
        selected = {"drawing": Drawing(recognised=True, confidence=band), "pool": config.selection.pool}
        self._samples(NOISE, untrained, [control])
        self._samples(SAMPLES, generator, config.ratios)
        self._samples(SELECTED, generator, config.ratios, **selected, selector=selector)
        key = {"ratio": control, "tail": self.tail, "images": self.part(HELD_BACK)}
        self.add(HELD, HELD, self._held_back, key)

        self._arm(REAL, "the training images alone", {}, CLASSIC)
        if self.tail:
            weights, sampling = {"loss.class_weights": "balanced"}, {"data.sampling": "balanced"}
            self._arm("class weights", "each class's loss by 1 / its frequency", weights, CLASSIC)
            self._arm("balanced sampling", "every class is seen equally often", sampling, CLASSIC)
        self.bases(CLASSIC)
        self._arm("stronger augmentation", _settings(config.stronger), config.stronger, CLASSIC)
        mixing = f", {_settings(config.mixing)}" if config.mixing else ""
        for kind in [SELECTED if selected else SAMPLES for selected in config.selected]:
            for ratio in config.ratios:
                name, what = synthetic_name(ratio, kind == SELECTED), f"{ratio:g} {kind} per real image{mixing}"
                self._arm(name, what, config.mixing, SYNTHETIC, kind, ratio)
        what = f"{control:g} samples of an untrained generator per real image"
        self._arm(UNTRAINED, what, {}, CONTROL, NOISE, control)
        self._arm(HELD, f"{control:g} further real images per real image", {}, CONTROL, HELD, control)

    def _file(self, job: str, ratio: float) -> Path:
        return self.place(job) / f"ratio-{ratio:g}.lmdb"

    def _wanted(self, ratio: float) -> list[int]:
        return sample_counts(self.counts(TRAIN), ratio, fill=self.tail)

    def _arm(self, name: str, what: str, own: Settings, family: str, job: str = "", ratio: float = 0.0) -> None:
        """An arm with overrides of its own, and with the images of a job mixed in."""
        if job:
            mixed = {"data.synthetic.path": self._file(job, ratio), "data.synthetic.share": share_of_batch(ratio)}
            own = mixed | ({"data.synthetic.balance": "fill"} if self.tail else {}) | dict(own)

        def judge(run: Path, _seed: int) -> Result:
            result = self.judge(run)
            if job in (SAMPLES, SELECTED):
                made = self.outcome(self.place(job))["counts"][self._file(job, ratio).stem]
                result.figures["used"] = sum(made) / sum(self._wanted(ratio))
            return result

        self.training(name, what, self.config.classifier, own, family, judge=judge)

    def _samples(
        self,
        name: str,
        generator: Path,
        ratios: Sequence[float],
        drawing: Drawing = Drawing(),  # noqa: B008
        pool: int | None = None,
        selector: Path | None = None,
    ) -> None:
        """A file for each ratio. Tells `kept`, the share of the drawn samples of each class that the selection keeps,
        and `counts`: what each file holds, fewer than asked for where the selection's pool has no more.
        """

        def make(_place: Path, seed: int) -> Settings:
            files = {self._file(name, ratio): self._wanted(ratio) for ratio in ratios}
            kept, counts = self.draw(files, generator, drawing, seed, pool=pool), {}
            for file in files:
                with Dataset(file) as reader:
                    counts[file.stem] = list(reader.meta.histogram)
            return {"kept": kept, "counts": counts}

        key = {"generator": generator, "ratios": ratios, "tail": self.tail, "selector": selector, "pool": pool}
        self.add(name, f"{name}, {drawing}", make, key | {"drawing": drawing.model_dump()})

    def _held_back(self, _place: Path, _seed: int) -> Settings:
        with Dataset(self.part(HELD_BACK)) as reader:
            wanted = enumerate(self._wanted(self.config.control_ratio))
            rows = [np.flatnonzero(reader.labels() == label)[:count] for label, count in wanted]
            out = self._file(HELD, self.config.control_ratio)
            write_subset(reader, np.sort(np.concatenate(rows)), out)
        return {"counts": list(map(len, rows))}

    # --- answers

    def conclude(self, results: Results) -> Conclusion:
        """Choices are made on held-out images; the test images are looked at only by what was chosen."""
        of_family = {name: [arm.name for arm in self.arms if arm.family == name] for name in (CLASSIC, SYNTHETIC)}
        groups = self.class_groups(results)
        choices = {name: results.choose(name, of_family[family]) for name, family in CHOSEN.items()}
        best, samples = CHOSEN
        asked = [Comparison(best, samples, of, (UNTRAINED,), asked=True) for of in groups]
        by_class = [Comparison(best, samples, name, family="classes") for name in self.classes()]
        arms = [samples, *(arm.name for arm in self.arms if arm.name != REAL)]
        rest = [Comparison(REAL, arm, of, family="all arms") for arm in arms for of in groups]
        return Conclusion([*asked, *by_class, *rest], choices, self._drawn(), self._notes())

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
            "training images: "
            + ", ".join(f"{name} {count:,}" for name, count in zip(self.classes(), self.counts(TRAIN), strict=True)),
        ]
        if made := self.outcome(self.place(SELECTED)):
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


def _settings(overrides: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.partition('.')[2] or key} {value}" for key, value in overrides.items())


CONFIG, SUBJECT = AugmentConfig, Augment
