"""Study `cas`: how good a training set are samples?

It measures the accuracy of classifiers trained on samples alone (classification accuracy score,
Ravuri and Vinyals 2019, 1905.10887), the gap to equally many real images, and the effect of
selecting samples.
"""

from pathlib import Path
from typing import Any

import numpy as np

from duetgan.extras.studies.images import HELD_BACK, HELD_OUT, TRAIN, Recipe, StudyConfig
from duetgan.extras.studies.results import GROUPS, Comparison, Result
from duetgan.extras.studies.samples import Drawing
from duetgan.extras.studies.subject import Job, Subject
from duetgan.utils.config.model import PositiveInt
from duetgan.utils.errors import UserError

# names of arms
REAL, CONTROL = "real", "real again"
PLAIN, TOGETHER = "plain", "together"
NOISE = "untrained"
GAP, EFFECT = "gap to real images", "effect of an ingredient"  # families of comparisons


class CasConfig(StudyConfig):
    # training images of each classifier; null: as many as the held-back images allow
    n: PositiveInt | None = None
    # recipe of the classifier that selects samples, which is trained on the training images; if its
    # `config` is empty, the recipe `classifier` is used
    selector: Recipe = Recipe()
    drawing: Drawing = Drawing()  # criteria of selection; one arm for each, and one for all of them


class Cas(Subject):
    """A comparison of classifiers trained on samples alone and on equally many real images."""

    title = "How good a training set are samples?"

    notes = (
        "Every classifier has the same recipe, number of steps and number of images; test images choose nothing.",
        "The generator was trained once: intervals are over the classifiers' seeds, the draws of images and the"
        " test images, not over generators.",
        "Selection knows real images: its classifier was trained on all training images of the generator.",
    )

    def declare(self) -> None:
        config = self.config
        drawings = {PLAIN: Drawing(), **config.drawing.alone()}
        if len(drawings) > 2:
            drawings[TOGETHER] = config.drawing
        *_, last = drawings
        generator, untrained = self.generators()
        recipe = config.selector if config.selector.config else config.classifier
        selector = self.selector(recipe, {"data.val_path": self.part(HELD_OUT)})
        again = Comparison(
            REAL, expected="same", why="real images passed off as samples train like real ones"
        )
        nothing = Comparison(REAL, expected="not helps", why="noise is no training set")
        self._arm(Job(REAL, "as many real images: the floor", "real"), self.part(TRAIN))
        self._arm(
            Job(CONTROL, "other real images, passed off as samples", "control", [again]),
            self.part(HELD_BACK),
        )
        effect = Comparison(PLAIN, group=GROUPS, controls=(NOISE,), family=EFFECT, asked=True)
        for name, drawing in drawings.items():
            gap = Comparison(REAL, group=GROUPS, family=GAP, asked=name in (PLAIN, last))
            arm = Job(name, f"samples, {drawing}", "samples", [gap, *[effect] * (name != PLAIN)])
            self._arm(arm, generator, drawing, selector if drawing.selects else None)
        self._arm(
            Job(NOISE, "samples of an untrained generator", "control", [nothing]),
            untrained,
            Drawing(),
        )
        self.comparisons.sort(
            key=lambda row: (row.family != GAP, row.family == GAP and row.second != last)
        )

    def _arm(
        self, arm: Job, source: Path, drawing: Drawing | None = None, selector: Path | None = None
    ) -> None:
        """Declare an arm with images of the packed file `source`, or, with `drawing`, with samples
        of the generator in the run folder `source`.
        """
        images = {"n": self.config.n, "source": source, "drawing": drawing, "selector": selector}
        self.add(arm, self._make, recipe=self.config.classifier, **images)
        self.captions[arm.name] = f"{arm.name}, seed {self.config.first_seed}"

    def _make(
        self, place: Path, seed: int, source: Path, recipe: Recipe, n: int | None, **options: Any
    ) -> Result:
        file = place / "images.lmdb"  # An interrupted job draws the same images again.
        accepted = self.draw(
            {file: self._class_counts()}, source, seed=seed, stream=("study", "sample"), **options
        )
        self.show(place.name.rpartition("-s")[0], file)
        self.train(place / "run", recipe, {"data.path": file, "data.val_path": None}, seed)
        result = self.judge(place / "run")
        result.figures["kept"] = float(np.array(accepted, float).mean()) if accepted else None
        file.unlink()
        return result

    def _class_counts(self) -> list[int]:
        """Return the number of images of each class on which every arm trains, `n` in all.

        The class frequencies are those of the training images. Raises UserError if there are too
        few held-back images.
        """
        training = np.array(self.counts(TRAIN))
        held_back = np.array(self.counts(HELD_BACK))
        largest = int(min(1.0, (held_back / training).min()) * training.sum())
        n = self.config.n or largest
        counts = np.floor(n * training / training.sum() + 0.5).astype(int)
        if n > largest or not counts.all():
            raise UserError(
                f"n {n}: give {len(counts)} to {largest:,}, or raise data.held_back: the control takes as "
                "many held-back images"
            )
        return [int(count) for count in counts]


CONFIG, SUBJECT = CasConfig, Cas
