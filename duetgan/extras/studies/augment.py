"""Study `augment`: do a generator's samples help a classifier more than classic methods do?"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from duetgan.extras.studies.images import (
    HELD_BACK,
    HELD_OUT,
    TEST,
    TRAIN,
    StudyConfig,
    even,
    expected_counts,
)
from duetgan.extras.studies.results import GROUPS, Comparison
from duetgan.extras.studies.subject import UNTRAINED, Job, Settings, Subject
from duetgan.utils.config.model import PositiveFloat
from duetgan.utils.errors import UserError

REAL, HELD_BACK_ARM = "real only", "held-back real images"
CLASSIC, SYNTHETIC = "classic", "synthetic"
CONTROL = "control"
BASE, BEST = "best classic arm", "best arm with samples"
SAMPLES = "samples"  # job that writes files of samples
NOISE = "untrained samples"


class AugmentConfig(StudyConfig):
    ratios: list[PositiveFloat] = [0.25, 0.5, 1.0, 2.0]  # samples per real image
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
        if not self.ratios:
            raise UserError("ratios: give at least one, such as [0.5]")


def file_of(place: Path, ratio: float) -> Path:
    return place / f"ratio-{ratio:g}.lmdb"


def sample_counts(counts: Sequence[int], ratio: float, *, fill: bool) -> list[int]:
    """Return the number of samples of each class, rounded up.

    Without `fill`, all classes get equally many. With `fill`, the number for a class is
    proportional to the number of real images that it lacks compared with the largest class.
    Training with `data.synthetic.balance: fill` needs such numbers.

    Args:
        counts: Number of real images of each class.
        ratio: Number of samples per real image.
    """
    parts = max(counts) - np.array(counts, np.float64) if fill else np.ones(len(counts))
    return [int(count) for count in np.ceil(ratio * sum(counts) * parts / parts.sum() - 1e-9)]


class Augment(Subject):
    """A comparison of classifiers that are trained with samples and by classic methods.

    All arms have the same number of steps. A ratio is the number of added images per real image in
    every batch. The best arms are chosen on held-out images and compared on test images.
    """

    splits = (HELD_OUT, TEST)

    def declare(self) -> None:
        config, control = self.config, self.config.control_ratio
        self.tail = not even(expected_counts(config.data))
        # True if rare classes get more samples; False if all classes get equally many.
        self.fill = self.tail and config.mixing.get("data.synthetic.balance", "fill") == "fill"
        generator, untrained = self.generators()

        def draw(name: str, source: Path, ratios: Sequence[float], *, fill: bool) -> None:
            self.add(Job(name, name), partial(self._draw, ratios=ratios, fill=fill, source=source))

        draw(HELD_BACK_ARM, self.part(HELD_BACK), [control], fill=self.tail)
        draw(SAMPLES, generator, config.ratios, fill=self.fill)
        draw(NOISE, untrained, [control], fill=self.tail)

        self.best(BASE, CLASSIC)
        self.best(BEST, SYNTHETIC, [Comparison(BASE, group=GROUPS, controls=(UNTRAINED,))])
        self._arm(Job(REAL, "the training images alone", CLASSIC), {})
        classic: list[tuple[str, str, Settings]] = []
        if self.tail:
            weights, adjustment = {"loss.class_weights": "balanced"}, {"loss.logit_adjustment": 1.0}
            sampling = {"data.sampling": "balanced"}
            classic += [
                ("class weights", "each class's loss by 1 / its frequency", weights),
                ("logit adjustment", "log frequencies are added to logits in training", adjustment),
                ("balanced sampling", "every class is seen equally often", sampling),
            ]
        classic.append(("stronger augmentation", _settings(config.stronger), config.stronger))
        for name, description, overrides in classic:
            self._arm(Job(name, description, CLASSIC), overrides)
        self.bases(Job("", family=CLASSIC), images=None, labelled=None)
        mixing = f", {_settings(config.mixing)}" if config.mixing else ""
        for ratio in config.ratios:
            description = f"{ratio:g} samples per real image{mixing}"
            arm = Job(f"samples {ratio:g}", description, SYNTHETIC)
            self._arm(arm, config.mixing, SAMPLES, ratio)
        description = f"{control:g} samples of an untrained generator per real image"
        arm = Job(UNTRAINED, description, CONTROL, [Comparison(REAL, expected="not helps")])
        self._arm(arm, {}, NOISE, control)
        description = f"{control:g} further real images per real image"
        arm = Job(HELD_BACK_ARM, description, CONTROL, [Comparison(REAL, expected="helps")])
        self._arm(arm, {}, HELD_BACK_ARM, control)

    def _arm(self, arm: Job, overrides: Settings, job: str = "", ratio: float = 0.0) -> None:
        """Declare an arm that trains the classifier by its recipe with `overrides`.

        If `job` is not empty, it is the name of a job that writes images. The arm adds `ratio` of
        these images per real image.
        """
        if job:
            mixing: dict[str, object] = {
                "data.synthetic.path": file_of(self.place(job), ratio),
                "data.synthetic.share": round(ratio / (1 + ratio), 6),
            }
            if self.tail:
                mixing["data.synthetic.balance"] = "fill"
            overrides = mixing | dict(overrides)
        self.training(arm, self.config.classifier, overrides)

    def _draw(
        self, place: Path, seed: int, ratios: Sequence[float], fill: bool, source: Path
    ) -> Settings:
        """Write a packed file of added images into the folder `place` for each ratio.

        `source` is the run folder of a generator, whose samples are added, or a packed file. `fill`
        divides the images among the classes as in `sample_counts`.
        """
        for ratio in ratios:
            counts = sample_counts(self.counts(TRAIN), ratio, fill=fill)
            self.draw(file_of(place, ratio), counts, source, seed)
        return {}


def _settings(overrides: Settings) -> str:
    return ", ".join(f"{key.partition('.')[2] or key} {value}" for key, value in overrides.items())


CONFIG, SUBJECT = AugmentConfig, Augment
