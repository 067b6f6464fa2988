"""How good a training set samples are: the classification accuracy score (Ravuri and Vinyals 2019,
1905.10887), its gap to as many real images, and what a selection does to it.
"""

from pathlib import Path
from typing import Any

import numpy as np

from duetgan.studies.images import HELD_BACK, HELD_OUT, TRAIN, Recipe, StudyConfig
from duetgan.studies.results import GROUPS, Comparison, Result
from duetgan.studies.samples import Drawing
from duetgan.studies.subject import Job, Subject
from duetgan.utils.config.model import PositiveInt
from duetgan.utils.errors import UserError

# arms
REAL, CONTROL, PLAIN, TOGETHER, NOISE = "real", "real again", "plain", "together", "untrained"
GAP, EFFECT = "gap to real images", "effect of an ingredient"  # families of answers


class CasConfig(StudyConfig):
    # images that a classifier is trained on; null: as many as the held-back ones allow
    n: PositiveInt | None = None
    # the classifier that selects, trained on the training images; without a config: the recipe
    # `classifier`
    selector: Recipe = Recipe()
    drawing: Drawing = Drawing()  # the ingredients: an arm for each alone, and one for all


class Cas(Subject):
    """Classifiers trained on samples only, against as many real images."""

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
        """An arm whose images are of a file, or with a drawing of a generator's run."""
        images = {"n": self.config.n, "source": source, "drawing": drawing, "selector": selector}
        self.add(arm, self._make, recipe=self.config.classifier, **images)
        self.captions[arm.name] = f"{arm.name}, seed {self.config.first_seed}"

    def _make(
        self, place: Path, seed: int, source: Path, recipe: Recipe, n: int | None, **how: Any
    ) -> Result:
        file = place / "images.lmdb"  # drawn again after an interruption, the same ones
        kept = self.draw(
            {file: self._wanted()}, source, seed=seed, stream=("study", "sample"), **how
        )
        self.show(place.name.rpartition("-s")[0], file)
        self.train(place / "run", recipe, {"data.path": file, "data.val_path": None}, seed)
        result = self.judge(place / "run")
        result.figures["kept"] = float(np.array(kept, np.float64).mean()) if kept else None
        file.unlink()
        return result

    def _wanted(self) -> list[int]:
        """Images of each class, the same for every arm: `n` of them with the training images'
        shares. Raises UserError where there are not so many held-back ones.
        """
        training, other = (np.array(self.counts(name)) for name in (TRAIN, HELD_BACK))
        most = int(min(1.0, (other / training).min()) * training.sum())
        n = self.config.n or most
        counts = np.floor(n * training / training.sum() + 0.5).astype(int)
        if n > most or not counts.all():
            raise UserError(
                f"n {n}: give {len(counts)} to {most:,}, or raise data.held_back: the control takes as many held-back"
                " images"
            )
        return [int(count) for count in counts]


CONFIG, SUBJECT = CasConfig, Cas
