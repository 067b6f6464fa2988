"""How good a training set samples are: the classification accuracy score (Ravuri and Vinyals 2019, 1905.10887), its gap
to as many real images, and what each ingredient of GaFi (2305.10118) does to it.
"""

import json
from pathlib import Path

import numpy as np

from duetgan.data.reading.dataset import Dataset
from duetgan.studies.images import HELD_BACK, HELD_OUT, TRAIN, Recipe, StudyConfig, write_subset
from duetgan.studies.samples import Drawing, draw_rows, last_checkpoints
from duetgan.studies.subject import NOTHING, Comparison, Conclusion, Control, Result, Results, Settings, Subject, ended
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

    controls = (
        Control(CONTROL, REAL, "same", "real images passed off as samples train like real ones"),
        Control(NOISE, REAL, "not helps", "noise is no training set"),
    )

    def declare(self) -> None:
        config = self.config
        self._check_checkpoints()
        self.drawings = {PLAIN: Drawing(), **config.drawing.alone()}
        if len(self.drawings) > 2:
            self.drawings[TOGETHER] = config.drawing
        generator, untrained = self.generators()
        recipe = config.selector if config.selector.config else config.classifier
        selector = self.selector(recipe, {"data.val_path": self.part(HELD_OUT)})
        self._arm(REAL, "as many real images: the floor", "real", self.part(TRAIN))
        self._arm(CONTROL, "other real images, passed off as samples", "control", self.part(HELD_BACK))
        for name, drawing in self.drawings.items():
            needs = {"selector": selector} if drawing.selects else {}
            self._arm(name, f"samples, {drawing}", "samples", generator, drawing, needs)
        self._arm(NOISE, "samples of an untrained generator", "control", untrained, Drawing())

    def _check_checkpoints(self) -> None:
        gan, count = self.config.gan, self.config.drawing.checkpoints
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

    def _arm(
        self,
        name: str,
        what: str,
        family: str,
        source: Path,  # of its images: a file, or with a drawing a generator's run
        drawing: Drawing | None = None,
        needs: Settings = NOTHING,
    ) -> None:
        def make(place: Path, seed: int) -> Result:
            file, shares = place / "images.lmdb", place / "kept.json"
            if not (ended(place / "run") or (file.exists() and shares.exists())):
                shares.write_text(json.dumps(self._write(file, source, drawing, seed)))
                if not self.picture(name).is_file():
                    draw_rows(file, self.picture(name))
            self.train(place / "run", self.config.classifier, {"data.path": file, "data.val_path": None}, seed)
            result, kept = self.judge(place / "run"), json.loads(shares.read_text())
            result.figures["kept"] = float(np.mean(kept)) if kept else None
            file.unlink(missing_ok=True)
            return result

        key = {"source": source, "drawing": drawing and drawing.model_dump(), "n": self.config.n, **needs}
        self.add(name, what, make, {**self.config.classifier.key(), **key}, family)

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

    def _write(self, file: Path, source: Path, drawing: Drawing | None, seed: int) -> list[float | None]:
        """The images that an arm is trained on; returns the share of the samples that was kept, by class. Of real ones
        of each class the first of a permutation with the key (seed, "study", "real", class).
        """
        counts = self._wanted()
        if drawing is not None:
            training = self.config.classifier.settings()
            if drawing.fresh:  # as many as a training sees
                counts = -(-counts * training.steps * training.batch_size // int(counts.sum()))
            return self.draw({file: counts.tolist()}, source, drawing, seed, stream=("study", "sample"))
        with Dataset(source) as reader:
            rows = []
            for label, count in enumerate(counts.tolist()):
                members = np.flatnonzero(reader.labels() == label)
                rows.append(numpy_generator(seed, "study", "real", label).permutation(members)[:count])
            write_subset(reader, np.sort(np.concatenate(rows)), file)
        return []

    # --- what is made of the results

    def conclude(self, results: Results) -> Conclusion:
        arms, groups = list(self.drawings), self.class_groups(results)
        first, last = arms[0], arms[-1]
        gaps = [
            Comparison(REAL, name, of, family="gap to real images", asked=name in (first, last))
            for name in (last, *arms[:-1])
            for of in groups
        ]
        effects = [
            Comparison(PLAIN, name, of, (NOISE,), family="effect of an ingredient", asked=True)
            for name in arms[1:]
            for of in groups
        ]
        return Conclusion(
            comparisons=[*gaps, *effects],
            pictures={arm.name: f"{arm.name}, seed {results.seeds[0]}" for arm in self.arms},
            notes=[
                "Every classifier has the same recipe, number of steps and, but for samples that are never seen twice,"
                " the same number of images; test images choose nothing.",
                "The generator was trained once: intervals are over the classifiers' seeds, the draws of images and the"
                " test images, not over generators.",
                "Selection knows real images: its classifier was trained on all training images of the generator.",
            ],
        )


CONFIG, SUBJECT = CasConfig, Cas
