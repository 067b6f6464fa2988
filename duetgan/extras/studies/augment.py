"""Study `augment`: do a generator's samples help a classifier more than classic methods do?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.extras.studies.images import (
    HELD_BACK,
    HELD_OUT,
    TEST,
    TRAIN,
    StudyConfig,
    even,
    expected_counts,
)
from duetgan.extras.studies.results import CLASSES, GROUPS, Comparison
from duetgan.extras.studies.samples import Band, Drawing
from duetgan.extras.studies.subject import UNTRAINED, Job, Settings, Subject
from duetgan.utils.config.model import PositiveFloat, PositiveInt
from duetgan.utils.errors import UserError

REAL, HELD_BACK_ARM = "real only", "held-back real images"
CLASSIC, SYNTHETIC = "classic", "synthetic"
CONTROL = "control"
BASE, BEST = "best classic arm", "best arm with samples"
SAMPLES, SELECTED = "samples", "selected samples"  # jobs that write files of samples
NOISE = "untrained samples"
AGAINST_REAL = Comparison(REAL, group=GROUPS, family="all arms")


class SelectionConfig(Drawing):
    """Criteria that select the samples of the arms with selection."""

    recognised: bool = True
    confidence: Band | None = (0.5, 1.0)
    pool: PositiveInt = 4  # candidates that are drawn for each requested sample


class AugmentConfig(StudyConfig):
    ratios: list[PositiveFloat] = [0.25, 0.5, 1.0, 2.0]  # samples per real image
    selected: list[bool] = [False, True]  # false: arms with all samples; true: with selected ones
    selection: SelectionConfig = SelectionConfig()
    control_ratio: PositiveFloat = 1.0  # added images per real image in the controls
    # overrides of the classifier's recipe for the arm "stronger augmentation"
    stronger: dict[str, Any] = {
        "augment.trivial_augment": True,
        "augment.cutmix": 1.0,
        "augment.mix_prob": 0.5,
    }
    # overrides of the classifier's recipe, such as data.sampling, for the arms with samples, except
    # the controls
    mixing: dict[str, Any] = {}

    def check(self) -> None:
        super().check()
        if not self.ratios or not self.selected:
            raise UserError(
                "ratios and selected: give at least one each, such as [0.5] and [false]"
            )


def synthetic_name(ratio: float, selected: bool) -> str:
    return f"samples {ratio:g}" + (", selected" if selected else "")


def file_of(place: Path, ratio: float) -> Path:
    return place / f"ratio-{ratio:g}.lmdb"


def sample_counts(counts: Sequence[int], ratio: float, *, fill: bool) -> list[int]:
    """Return the number of samples of each class, rounded up.

    All classes get equally many. With `fill`, a class gets them in proportion to the number of real
    images that it has less than the largest class, as training with `data.synthetic.balance: fill`
    needs. `counts` are the real images of each class, `ratio` is samples per real image.
    """
    parts = max(counts) - np.array(counts, np.float64) if fill else np.ones(len(counts))
    return [int(count) for count in np.ceil(ratio * sum(counts) * parts / parts.sum() - 1e-9)]


class Augment(Subject):
    """A comparison of classifiers trained with samples against classic methods.

    All arms have the same number of steps. A ratio is the number of added images per real image in
    every batch. The best arms are chosen on held-out images and compared on test images.
    """

    title = "Do samples help the classifier?"
    splits = (HELD_OUT, TEST)

    def declare(self) -> None:
        config, control = self.config, self.config.control_ratio
        self.tail = not even(expected_counts(config.data))
        # True if rare classes get more samples; False if all classes get equally many.
        self.fill = self.tail and config.mixing.get("data.synthetic.balance", "fill") == "fill"
        generator, untrained = self.generators()
        # The selector is trained on the training images alone, with all classes equally often.
        selector = self.selector(config.classifier, {"data.sampling": "balanced"})

        def draw(
            name: str,
            source: Path,
            ratios: Sequence[float],
            drawing: Drawing | None,
            *,
            tail: bool,
            selection: tuple[int, Path] | None = None,  # candidates per sample, selector's run
        ) -> None:
            pool, chosen_selector = selection or (None, None)
            self.add(
                Job(name, f"{name}, {drawing or 'as they are'}"),
                self._draw,
                ratios=ratios,
                tail=tail,
                generator=source,
                drawing=drawing,
                pool=pool,
                selector=chosen_selector,
            )
            self.captions[name] = f"{name}, a row for each class"

        draw(HELD_BACK_ARM, self.part(HELD_BACK), [control], None, tail=self.tail)
        draw(SAMPLES, generator, config.ratios, Drawing(), tail=self.fill)
        draw(
            SELECTED,
            generator,
            config.ratios,
            config.selection,
            tail=self.fill,
            selection=(config.selection.pool, selector),
        )
        draw(NOISE, untrained, [control], Drawing(), tail=self.tail)

        answer = Comparison(BASE, group=GROUPS, controls=(UNTRAINED,), asked=True)
        self.best(BASE, CLASSIC)
        self.best(
            BEST,
            SYNTHETIC,
            [answer, Comparison(BASE, group=CLASSES, family="classes"), AGAINST_REAL],
        )
        self._arm(Job(REAL, "the training images alone", CLASSIC), {})
        if self.tail:
            weights, sampling = {"loss.class_weights": "balanced"}, {"data.sampling": "balanced"}
            self._arm(
                Job(
                    "class weights",
                    "each class's loss by 1 / its frequency",
                    CLASSIC,
                    [AGAINST_REAL],
                ),
                weights,
            )
            adjusted = Job(
                "logit adjustment",
                "log frequencies are added to logits in training",
                CLASSIC,
                [AGAINST_REAL],
            )
            self._arm(adjusted, {"loss.logit_adjustment": 1.0})
            self._arm(
                Job(
                    "balanced sampling",
                    "every class is seen equally often",
                    CLASSIC,
                    [AGAINST_REAL],
                ),
                sampling,
            )
        self.bases(Job("", family=CLASSIC, against=[AGAINST_REAL]))
        self._arm(
            Job("stronger augmentation", _settings(config.stronger), CLASSIC, [AGAINST_REAL]),
            config.stronger,
        )
        mixing = f", {_settings(config.mixing)}" if config.mixing else ""
        for kind in [SELECTED if selected else SAMPLES for selected in config.selected]:
            for ratio in config.ratios:
                name = synthetic_name(ratio, kind == SELECTED)
                description = f"{ratio:g} {kind} per real image{mixing}"
                arm = Job(name, description, SYNTHETIC, [AGAINST_REAL])
                self._arm(arm, config.mixing, kind, ratio)
        no_help = Comparison(
            REAL, expected="not helps", why="samples without any content must not help"
        )
        description = f"{control:g} samples of an untrained generator per real image"
        arm = Job(UNTRAINED, description, CONTROL, [no_help, AGAINST_REAL])
        self._arm(arm, {}, NOISE, control)
        must_help = Comparison(
            REAL,
            expected="helps",
            why="further real images must help, or the study could not see any help",
        )
        description = f"{control:g} further real images per real image"
        arm = Job(HELD_BACK_ARM, description, CONTROL, [must_help, AGAINST_REAL])
        self._arm(arm, {}, HELD_BACK_ARM, control)

    def _arm(self, arm: Job, overrides: Settings, job: str = "", ratio: float = 0.0) -> None:
        """Declare an arm with `overrides` and, if a job is named, with `ratio` of the job's images
        per real image.
        """
        used = None
        if job:
            file = file_of(self.place(job), ratio)
            mixing: dict[str, object] = {
                "data.synthetic.path": file,
                "data.synthetic.share": round(ratio / (1 + ratio), 6),
            }
            if self.tail:
                mixing["data.synthetic.balance"] = "fill"
            overrides = mixing | dict(overrides)
            if arm.family == SYNTHETIC:
                used = self.place(job), file.stem
        self.training(arm, self.config.classifier, overrides, used=used)

    def _draw(
        self, place: Path, seed: int, ratios: Sequence[float], tail: bool, **options: Any
    ) -> Settings:
        """Write a file of samples for each ratio into the folder `place`.

        Returns:
            `kept`, the fraction of candidates of each class that the selection accepts; `counts`,
            the number of samples of each class in each file, fewer than requested if the pool has
            too few; and `figures`, each file's number of samples divided by the requested number.
        """
        files = {
            file_of(place, ratio): sample_counts(self.counts(TRAIN), ratio, fill=tail)
            for ratio in ratios
        }
        accepted = self.draw(files, seed=seed, **options)
        counts = {}
        figures = {}
        for file, requested in files.items():
            with Dataset(file) as dataset:
                counts[file.stem] = list(dataset.meta.histogram)
            figures[file.stem] = sum(counts[file.stem]) / sum(requested)
        self.show(place.name, file_of(place, max(ratios)))
        return {"kept": accepted, "counts": counts, "figures": figures}

    @property
    def notes(self) -> list[str]:  # type: ignore[override]
        steps = self.config.classifier.overrides.get("steps")
        steps_text = "" if steps is None else f", {steps}"
        sizes = zip(self.classes(), self.counts(TRAIN), strict=True)
        notes = [
            f"every arm has the same recipe and number of steps{steps_text}: where samples "
            "are mixed in, real images are seen less often, and in short trainings what learns slowly, as under strong "
            "augmentation, looks worse than it is",
            "choices were made by the mean recall on held-out images; the intervals cover the chance of training and "
            "the draw of test images, not the training images or the generator, of which there is one",
            "training images: " + ", ".join(f"{name} {count:,}" for name, count in sizes),
        ]
        if outcome := self.outcome(self.place(SELECTED)):
            accepted = [fraction for fraction in outcome["kept"] if fraction is not None]
            notes.append(
                f"the selection kept {min(accepted):.0%} to {max(accepted):.0%} of the drawn samples of a class"
            )
            for ratio in self.config.ratios:
                requested = sample_counts(self.counts(TRAIN), ratio, fill=self.fill)
                counts = outcome["counts"][f"ratio-{ratio:g}"]
                rows = zip(counts, requested, self.classes(), strict=True)
                if few := [f"{name} {count} of {n}" for count, n, name in rows if count < n]:
                    notes.append(
                        f"{synthetic_name(ratio, True)}: the pool had too few of some classes, so that each of these is"
                        f" seen more often ({', '.join(few)}); a larger selection.pool gives more"
                    )
        return notes


def _settings(overrides: Settings) -> str:
    return ", ".join(f"{key.partition('.')[2] or key} {value}" for key, value in overrides.items())


CONFIG, SUBJECT = AugmentConfig, Augment
