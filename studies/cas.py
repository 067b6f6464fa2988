"""How good a training set samples are: the classification accuracy score (Ravuri and Vinyals 2019, 1905.10887), its gap
to as many real images, and what each ingredient of GaFi (2305.10118) does to it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.reading.dataset import Dataset
from models.restore import classifier_from
from studies.config import Recipe, StudyConfig
from studies.declare import Arm, Comparison, Conclusion, Control, Job, Picture, Result, Results, Subject
from studies.drawing import Drawing, Selector, draw_samples, last_checkpoints
from studies.execute import told
from studies.parts import HELD_BACK, HELD_OUT, NAME, TEST, TRAIN, labels_of, part, parts_job, write_subset
from studies.pictures import class_rows
from studies.samples import generator_job, generator_run
from studies.train import QUIET, ended, judge_classifier, run_config, train_run
from studies.verdict import class_groups, difference, groups_of
from utils.checkpoint import load, resolve
from utils.config.model import PositiveInt
from utils.distributed.collectives import choose_device
from utils.errors import UserError
from utils.seeding import numpy_generator

REAL, CONTROL, PLAIN, TOGETHER, UNTRAINED = "real", "real again", "plain", "together", "untrained"
GENERATOR, SELECTOR = "generator", "selector"  # jobs; the untrained generator's is UNTRAINED
SELECTOR_SEED = 1000  # beyond the arms' seeds: no arm is trained like the selector


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
        self.config, self.folder, self.device = config, folder, device
        self.sets = {TEST: part(folder, TEST)}
        self.drawings = {PLAIN: Drawing(), **config.drawing.alone()}
        if len(self.drawings) > 2:
            self.drawings[TOGETHER] = config.drawing
        if config.drawing.checkpoints > 1:
            self._check_checkpoints(config.gan, config.drawing.checkpoints)

    def _check_checkpoints(self, gan: Recipe, count: int) -> None:
        """Raise UserError where the generator's run has, or will have, fewer checkpoints than are to take turns."""
        if gan.run is not None:
            resolve(gan.run)  # says so where there is none
            last_checkpoints(Path(gan.run), count)
        else:
            saving = run_config(gan).checkpoint
            if saving.keep < count and not saving.keep_every:
                raise UserError(
                    f"drawing.checkpoints {count}: a run of {gan.config} keeps {saving.keep}; set checkpoint.keep "
                    "higher in gan.overrides"
                )

    def labels(self) -> dict[str, np.ndarray]:
        """The labels of the test images."""
        return labels_of(self.folder, TEST)

    def groups(self) -> dict[str, list[int]]:
        """All classes, many, medium and few, and each."""
        parts = told(self.folder, NAME)
        return groups_of(parts["counts"][TRAIN], parts["classes"])

    # --- what is made once

    def jobs(self) -> list[Job]:
        gan, device = self.config.gan, self.device
        return [
            parts_job(self.config.data),
            generator_job(GENERATOR, self.folder, gan, device=device),
            generator_job(UNTRAINED, self.folder, gan, device=device, untrained=True),
            self._selector_job(),
        ]

    def _selector_job(self) -> Job:
        recipe = self.config.selector if self.config.selector.config else self.config.classifier
        images = {"data.path": str(part(self.folder, TRAIN)), "data.val_path": str(part(self.folder, HELD_OUT))}

        def make(place: Path) -> dict[str, Any]:
            overrides = {**QUIET, **recipe.overrides, **images}
            train_run(place / "run", str(recipe.file), overrides, seed=SELECTOR_SEED, device=self.device)
            found = judge_classifier(place / "run", {HELD_OUT: part(self.folder, HELD_OUT)}, device=self.device)
            return found.figures

        return Job(SELECTOR, make, key=recipe.key(), needs=(NAME,), what="training the classifier that selects")

    # --- arms

    def arms(self) -> list[Arm]:
        return [
            self._arm(REAL, "as many real images: the floor", "real"),
            self._arm(CONTROL, "other real images, passed off as samples", "control"),
            *(self._arm(name, f"samples, {drawing}", "samples") for name, drawing in self.drawings.items()),
            self._arm(UNTRAINED, "samples of an untrained generator", "control"),
        ]

    def _arm(self, name: str, what: str, family: str) -> Arm:
        drawing = self.drawings.get(name)
        jobs = () if drawing is None else (GENERATOR, *([SELECTOR] if drawing.selects else []))
        recipe = self.config.classifier
        overrides = {**QUIET, **recipe.overrides, "data.val_path": None}

        def make(folder: Path, seed: int) -> Result:
            file, shares = folder.with_name(f"{folder.name}.lmdb"), folder.with_name(f"{folder.name}.kept")
            if not ended(folder):
                if not (file.exists() and shares.exists()):
                    shares.write_text(" ".join(map(str, self._write(name, file, seed))))
                train_run(
                    folder,
                    str(recipe.file),
                    {**overrides, "data.path": str(file)},
                    seed=seed,
                    device=self.device,
                )
            result = judge_classifier(folder, self.sets, device=self.device)
            kept = [float(share) for share in shares.read_text().split()]
            result.figures["kept"] = float(np.mean(kept)) if kept else None
            file.unlink(missing_ok=True)
            return result

        key = {"drawing": drawing.model_dump() if drawing else None, "classifier": recipe.key(), "n": self.config.n}
        return Arm(
            name, what, make, key=key, needs=(NAME, *jobs, *([name] if name == UNTRAINED else [])), family=family
        )

    def counts(self) -> list[int]:
        """Images of each class, the same for every arm: `n` of them with the training images' shares. Raises UserError
        where there are not so many held-back ones.
        """
        parts = told(self.folder, NAME)
        training, other = (np.array(parts["counts"][name]) for name in (TRAIN, HELD_BACK))
        most = int(min(1.0, (other / training).min()) * training.sum())
        n = self.config.n or most
        found = np.floor(n * training / training.sum() + 0.5).astype(int)
        if n > most or not found.all():
            raise UserError(
                f"n {n}: give {len(found)} to {most:,}, or raise data.held_back: the control takes as many held-back"
                " images"
            )
        return found.tolist()

    def _write(self, name: str, file: Path, seed: int) -> list[float]:
        """The images that an arm is trained on; returns the share of the samples that was kept, by class."""
        counts = np.array(self.counts())
        if name in (REAL, CONTROL):
            self._write_real(file, TRAIN if name == REAL else HELD_BACK, counts, seed)
            kept = []
        else:
            drawing = self.drawings.get(name, Drawing())
            if drawing.fresh:
                counts = -(-counts * self._seen() // int(counts.sum()))
            run = Path(generator_run(self.folder, UNTRAINED if name == UNTRAINED else GENERATOR))
            device = choose_device(self.device)
            rule = self._selector(drawing, device) if drawing.selects else None
            files = last_checkpoints(run, drawing.checkpoints)
            kept = draw_samples(file, files, counts.tolist(), seed=seed, drawing=drawing, rule=rule, device=device)
        if seed == self.config.first_seed:
            self._show(name, file)
        return kept

    def _write_real(self, file: Path, source: str, counts: np.ndarray, seed: int) -> None:
        """Real images: of each class the first of a permutation with the key (seed, "study", "real", class)."""
        with Dataset(part(self.folder, source)) as reader:
            rows = []
            for label, count in enumerate(counts.tolist()):
                members = np.flatnonzero(reader.labels() == label)
                rows.append(numpy_generator(seed, "study", "real", label).permutation(members)[:count])
            write_subset(reader, np.sort(np.concatenate(rows)), file)

    def _selector(self, drawing: Drawing, device: torch.device) -> Selector:
        classifier = classifier_from(load(resolve(str(self.folder / "jobs" / SELECTOR / "run"))), device)
        with Dataset(part(self.folder, TRAIN)) as training, Dataset(part(self.folder, HELD_OUT)) as held_out:
            return Selector(drawing, classifier, training, held_out)

    def _seen(self) -> int:
        """Images that a training sees."""
        config = run_config(self.config.classifier)
        return config.steps * config.batch_size

    def _picture(self, name: str) -> Path:
        return self.folder / "pictures" / f"{name.replace(' ', '-')}.png"

    def _show(self, name: str, file: Path) -> None:
        """The first images of each class, for the page."""
        with Dataset(file) as reader:
            class_rows(reader, self._picture(name))

    # --- what is made of the results

    def controls(self) -> list[Control]:
        return [
            Control(CONTROL, REAL, "same", "real images passed off as samples train like real ones"),
            Control(UNTRAINED, REAL, "not helps", "noise is no training set"),
        ]

    def conclude(self, results: Results) -> Conclusion:
        arms = list(self.drawings)
        groups = tuple(class_groups(dict(results.groups), told(self.folder, NAME)["classes"]))
        gaps = [Comparison(REAL, name, groups, family="gap to real images") for name in (arms[-1], *arms[:-1])]
        effects = [Comparison(PLAIN, name, groups, family="effect of an ingredient") for name in arms[1:]]
        shown = [name for name in (REAL, CONTROL, *arms, UNTRAINED) if self._picture(name).is_file()]
        return Conclusion(
            comparisons=[*gaps, *effects],
            asked=[*gaps[:2], *effects],
            tables=[self._gap_table(results), self._class_table(results, arms[-1])],
            pictures=[
                Picture(f"pictures/{self._picture(name).name}", f"{name}, seed {results.seeds[0]}") for name in shown
            ],
            notes=[
                f"The gap to as many real images: {_told_gaps(results, arms)}.",
                "Every classifier has the same recipe, number of steps and, but for samples that are never seen twice,"
                " the same number of images; test images choose nothing.",
                "The generator was trained once: intervals are over the classifiers' seeds, the draws of images and the"
                " test images, not over generators.",
                "Selection knows real images: its classifier was trained on all training images of the generator.",
            ],
        )

    def _gap_table(self, results: Results) -> tuple[str, list[str], list[list[str]]]:
        """Accuracy, what is missing to real images and what an ingredient brings, in points."""
        rows = []
        for name in (REAL, CONTROL, *self.drawings, UNTRAINED):
            kept = [value for value in results.figures(name, "kept") if value is not None]
            effect = _points(results, PLAIN, name) if name in self.drawings and name != PLAIN else ""
            gap = "" if name == REAL else _points(results, name, REAL)
            shares = f"{100 * np.mean(kept):.0f} %" if kept else ""
            rows.append([name, f"{100 * results.mean(name, 'all'):.2f}", gap, effect, shares])
        head = ["trained on", "accuracy, %", "gap to real, points", "against plain, points", "samples kept"]
        return "Accuracy on real test images, and the gap (95 % intervals)", head, rows

    def _class_table(self, results: Results, last: str) -> tuple[str, list[str], list[list[str]]]:
        names = list(dict.fromkeys((REAL, PLAIN, last)))
        rows = []
        for group, labels in results.groups.items():
            if len(labels) == 1:
                values = [f"{100 * results.mean(name, group):.1f}" for name in names]
                rows.append([group, *values, _points(results, last, REAL, group)])
        return "Recall by class, %", ["class", *names, f"gap of {last}, points"], rows


def _told_gaps(results: Results, arms: list[str]) -> str:
    """The gaps without and with everything that is done to samples."""
    return ", ".join(f"{name} {_points(results, name, REAL)} points" for name in dict.fromkeys((arms[0], arms[-1])))


def _points(results: Results, first: str, second: str, group: str = "all") -> str:
    """The second arm less the first in points, with its interval where there is one."""
    found = difference(results, first, second, group, None)
    if found is None:
        return ""
    sure = "" if found.interval is None else f" [{100 * found.interval[0]:+.2f}, {100 * found.interval[1]:+.2f}]"
    return f"{100 * found.value:+.2f}{sure}"


CONFIG, SUBJECT = CasConfig, Cas
