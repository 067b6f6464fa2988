"""How good a training set samples are: the classification accuracy score (Ravuri and Vinyals 2019, 1905.10887), its gap
to as many real images, and what each ingredient of GaFi (2305.10118) does to it.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.studies.images import HELD_BACK, HELD_OUT, PARTS, TRAIN, Recipe, StudyConfig, write_subset
from duetgan.studies.runner import difference
from duetgan.studies.samples import Drawing, draw_rows, last_checkpoints
from duetgan.studies.subject import (
    GENERATOR,
    SELECTOR,
    UNTRAINED,
    Comparison,
    Conclusion,
    Control,
    Job,
    Result,
    Results,
    Subject,
    ended,
)
from duetgan.utils.checkpoint import resolve
from duetgan.utils.config.model import PositiveInt
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator

REAL, CONTROL, PLAIN, TOGETHER, NOISE = "real", "real again", "plain", "together", "untrained"  # arms


class CasConfig(StudyConfig):
    """The keys of subject `cas`."""

    n: PositiveInt | None = None  # images that a classifier is trained on; null: as many as the held-back ones allow
    # the classifier that selects, trained on the training images; without a config: the recipe `classifier`
    selector: Recipe = Recipe()
    drawing: Drawing = Drawing()  # the ingredients: an arm for each alone, and one for all


class Cas(Subject):
    """Classifiers trained on samples only, against as many real images."""

    title = "How good a training set are samples?"

    def __init__(self, config: CasConfig, folder: Path, device: str | None = None) -> None:
        super().__init__(config, folder, device)
        self.drawings = {PLAIN: Drawing(), **config.drawing.alone()}
        if len(self.drawings) > 2:
            self.drawings[TOGETHER] = config.drawing
        gan, count = config.gan, config.drawing.checkpoints
        if count == 1:
            return
        if gan.run is not None:
            resolve(gan.run)  # says so where there is none
            last_checkpoints(Path(gan.run), count)
        elif (saving := gan.settings().checkpoint).keep < count and not saving.keep_every:
            raise UserError(
                f"drawing.checkpoints {count}: a run of {gan.config} keeps {saving.keep}; set checkpoint.keep higher "
                "in gan.overrides"
            )

    # --- what is made once

    def jobs(self) -> list[Job]:
        recipe = self.config.selector if self.config.selector.config else self.config.classifier
        more = {"data.val_path": str(self.part(HELD_OUT))}
        return [self.parts_job(), *self.generators(), self.selector(recipe, recipe.key(), more)]

    # --- arms

    def arms(self) -> list[Job]:
        return [
            self._arm(REAL, "as many real images: the floor", "real"),
            self._arm(CONTROL, "other real images, passed off as samples", "control"),
            *(self._arm(name, f"samples, {drawing}", "samples", GENERATOR) for name, drawing in self.drawings.items()),
            self._arm(NOISE, "samples of an untrained generator", "control", UNTRAINED),
        ]

    def _arm(self, name: str, what: str, family: str, *jobs: str) -> Job:
        drawing = self.drawings.get(name)
        key = {"drawing": drawing.model_dump() if drawing else None, "classifier": self.config.classifier.key()}
        needs = (PARTS, *jobs, *([SELECTOR] if drawing and drawing.selects else []))
        return Job(name, what, partial(self._make, name), key | {"n": self.config.n}, needs, family)

    def _make(self, name: str, folder: Path, seed: int) -> Result:
        file, shares = folder.with_name(f"{folder.name}.lmdb"), folder.with_name(f"{folder.name}.kept")
        if not (ended(folder) or (file.exists() and shares.exists())):
            shares.write_text(json.dumps(self._write(name, file, seed)))
        result = self.learn(file, {"data.val_path": None}, folder, seed)
        kept = json.loads(shares.read_text())
        result.figures["kept"] = float(np.mean(kept)) if kept else None
        file.unlink(missing_ok=True)
        return result

    def _wanted(self) -> np.ndarray:
        """Images of each class, the same for every arm: `n` of them with the training images' shares. Raises UserError
        where there are not so many held-back ones.
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
        return counts

    def _write(self, name: str, file: Path, seed: int) -> list[float | None]:
        """The images that an arm is trained on; returns the share of the samples that was kept, by class."""
        counts, kept = self._wanted(), []
        if name in (REAL, CONTROL):
            self._write_real(file, TRAIN if name == REAL else HELD_BACK, counts, seed)
        else:
            drawing, training = self.drawings.get(name, Drawing()), self.config.classifier.settings()
            if drawing.fresh:  # as many as a training sees
                counts = -(-counts * training.steps * training.batch_size // int(counts.sum()))
            generator = UNTRAINED if name == NOISE else GENERATOR
            kept = self.draw({file: counts.tolist()}, generator, drawing, seed, stream=("study", "sample"))
        if seed == self.config.first_seed:
            draw_rows(file, self.picture(name))
        return kept

    def _write_real(self, file: Path, source: str, counts: np.ndarray, seed: int) -> None:
        """Real images: of each class the first of a permutation with the key (seed, "study", "real", class)."""
        with Dataset(self.part(source)) as reader:
            rows = []
            for label, count in enumerate(counts.tolist()):
                members = np.flatnonzero(reader.labels() == label)
                rows.append(numpy_generator(seed, "study", "real", label).permutation(members)[:count])
            write_subset(reader, np.sort(np.concatenate(rows)), file)

    # --- what is made of the results

    def controls(self) -> list[Control]:
        return [
            Control(CONTROL, REAL, "same", "real images passed off as samples train like real ones"),
            Control(NOISE, REAL, "not helps", "noise is no training set"),
        ]

    def conclude(self, results: Results) -> Conclusion:
        arms, groups = list(self.drawings), self.class_groups(results)
        first, last = arms[0], arms[-1]
        gaps = [
            Comparison(REAL, name, of, family="gap to real images", asked=name in (first, last))
            for name in (last, *arms[:-1])
            for of in groups
        ]
        effects = [
            Comparison(PLAIN, name, of, family="effect of an ingredient", asked=True)
            for name in arms[1:]
            for of in groups
        ]
        told = ", ".join(f"{name} {points(results, name, REAL)} points" for name in dict.fromkeys((first, last)))
        return Conclusion(
            comparisons=[*gaps, *effects],
            tables=[self._gap_table(results), self._class_table(results, last)],
            pictures={arm.name: f"{arm.name}, seed {results.seeds[0]}" for arm in self.arms()},
            notes=[
                f"The gap to as many real images: {told}.",
                "Every classifier has the same recipe, number of steps and, but for samples that are never seen twice,"
                " the same number of images; test images choose nothing.",
                "The generator was trained once: intervals are over the classifiers' seeds, the draws of images and the"
                " test images, not over generators.",
                "Selection knows real images: its classifier was trained on all training images of the generator.",
            ],
        )

    def _gap_table(self, results: Results) -> tuple[str, list[str], list[list[str]]]:
        rows = []
        for name in (REAL, CONTROL, *self.drawings, NOISE):
            kept = results.mean_figure(name, "kept")
            effect = points(results, PLAIN, name) if name in self.drawings and name != PLAIN else ""
            gap = "" if name == REAL else points(results, name, REAL)
            shares = "" if kept is None else f"{100 * kept:.0f} %"
            rows.append([name, f"{100 * results.mean(name, 'all'):.2f}", gap, effect, shares])
        head = ["trained on", "accuracy, %", "gap to real, points", "against plain, points", "samples kept"]
        return "Accuracy on real test images, and the gap (95 % intervals)", head, rows

    def _class_table(self, results: Results, last: str) -> tuple[str, list[str], list[list[str]]]:
        names = list(dict.fromkeys((REAL, PLAIN, last)))
        rows = [
            [each, *(f"{100 * results.mean(name, each):.1f}" for name in names), points(results, last, REAL, each)]
            for each, labels in results.groups.items()
            if len(labels) == 1
        ]
        return "Recall by class, %", ["class", *names, f"gap of {last}, points"], rows


def points(results: Results, first: str, second: str, group: str = "all") -> str:
    """The second arm less the first in points, with its interval where there is one."""
    change = difference(results, first, second, group, None)
    if change is None:
        return ""
    sure = "" if change.interval is None else " [{:+.2f}, {:+.2f}]".format(*(100 * end for end in change.interval))
    return f"{100 * change.difference:+.2f}{sure}"


CONFIG, SUBJECT = CasConfig, Cas
