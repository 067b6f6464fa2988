"""Study `teach`: what does a classifier's loss do to a generator, from outside or as a head on the discriminator?"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.reading.dataset import Dataset
from inference.pseudo_labels import write_labelled
from metrics.evaluate_gan import evaluate_generator
from metrics.features.extractors import Options, build
from metrics.lineage import load_judge
from models.gan import generate
from models.restore import classifier_from, generator_from
from reporting.figures import plain
from studies.config import StudyConfig
from studies.declare import Arm, Comparison, Conclusion, Control, Job, Picture, Result, Results, Subject
from studies.execute import slug
from studies.parts import HELD_BACK, NAME, TEST, TRAIN, part, parts_job
from studies.pictures import COLUMNS
from studies.samples import SEED
from studies.train import QUIET, run_config, train_run
from utils.checkpoint import Checkpoint, load, resolve
from utils.config.model import InnerShare, PositiveFloat, PositiveInt
from utils.distributed.collectives import choose_device
from utils.errors import UserError
from utils.images import save_rows
from utils.seeding import numpy_generator

JUDGE, TEACHER, WRONG_TEACHER, WRONG_LABELS = "judge", "teacher", "teacher by chance", "labels by chance"
PLAIN, SHORT = "no classifier", "no classifier, stopped early"
FIGURES = {"recognised": True, "frechet": False, "diversity": True}  # whether larger is better
SHOWN = 10  # classes in the pictures


class TeachConfig(StudyConfig):
    """All settings of the study."""

    teacher: list[PositiveFloat] = [1.0]  # loss.classifier_weight, an arm each
    head: list[PositiveFloat] = [1.0]  # loss.auxiliary_weight, an arm each
    head_learns_samples: bool = True  # whether each head has a second arm, with loss.auxiliary_fakes
    n: PositiveInt = 2000  # samples and test images of a distance
    extractor: str = JUDGE  # whose features it is taken in: judge (its own), resnet50 or inception
    weights: str | None = None  # weights file of the extractor
    short: InnerShare = 0.1  # share of the steps after which the control stops

    def check(self) -> None:
        super().check()
        if self.gan.run is not None or not (self.teacher or self.head):
            raise UserError("gan.run must be null, and teacher or head must have a weight: the arms train generators")


class Teach(Subject):
    """Generators of one recipe, each judged by a classifier of images that neither they nor their teachers saw."""

    title = "What does a classifier's loss do to a generator?"

    def __init__(self, config: TeachConfig, folder: Path, device: str | None = None) -> None:
        self.config, self.folder, self.device = config, folder, device
        self.base = {**QUIET, "log.samples_every": 10**9, "data.val_path": None, **config.gan.overrides}
        self.base["data.path"] = str(part(folder, TRAIN))

    # --- what is made once

    def jobs(self) -> list[Job]:
        return [
            parts_job(self.config.data),
            self._classifier(JUDGE, part(self.folder, HELD_BACK), 2000, NAME, "the judge, of images held back"),
            self._classifier(TEACHER, part(self.folder, TRAIN), 1000, NAME, "the teacher"),
            Job(WRONG_LABELS, self._wrong_labels, needs=(NAME,)),
            self._classifier(
                WRONG_TEACHER, self._place(WRONG_LABELS) / "images.lmdb", 1000, WRONG_LABELS, "a teacher by chance"
            ),
        ]

    def _place(self, job: str) -> Path:
        return self.folder / "jobs" / slug(job)

    def _classifier(self, name: str, images: Path, seed: int, need: str, what: str) -> Job:
        recipe = self.config.classifier
        overrides = {**QUIET, "data.val_path": None, **recipe.overrides, "data.path": str(images)}

        def make(place: Path) -> dict[str, Any]:
            train_run(place / "run", str(recipe.file), overrides, seed=seed, device=self.device)
            return {}

        key = {"recipe": recipe.text(), "overrides": recipe.overrides}
        return Job(name, make, key=key, needs=(need,), what=f"training {what}")

    def _wrong_labels(self, place: Path) -> dict[str, Any]:
        """The training images with their labels in a random order."""
        with Dataset(part(self.folder, TRAIN)) as reader:
            order = numpy_generator(self.config.data.seed, "study", "wrong labels").permutation(len(reader))
            images = (reader, range(len(reader)), reader.labels()[order])
            source = f"{reader.meta.source}, labels by chance"
            write_labelled(place / "images.lmdb", [images], reader.classes, source=source, overwrite=True)
        return {}

    # --- arms

    def arms(self) -> list[Arm]:
        config = self.config
        found = [self._arm(PLAIN, "the recipe alone", {}, "plain")]
        for weight in config.teacher:
            name, what = teacher_name(weight), "loss.classifier: a classifier of the same training images"
            found.append(self._arm(name, what, {"loss.classifier_weight": weight}, "taught", TEACHER))
        for weight in config.head:
            own: dict[str, Any] = {"loss.auxiliary_weight": weight}
            found.append(self._arm(head_name(weight), "a head on D, of real images", own, "taught"))
            if config.head_learns_samples:
                own = own | {"loss.auxiliary_fakes": True}
                found.append(self._arm(head_name(weight, samples=True), "of samples, too", own, "taught"))
        weight = max(config.teacher, default=1.0)
        what = "the teacher has learnt labels by chance"
        found.append(self._arm(WRONG_TEACHER, what, {"loss.classifier_weight": weight}, "control", WRONG_TEACHER))
        return [*found, self._arm(SHORT, f"{config.short:g} of the steps", {}, "control", share=config.short)]

    def _arm(
        self,
        name: str,
        what: str,
        own: Mapping[str, Any],
        family: str,
        teacher: str | None = None,  # job
        share: float | None = None,  # of the steps
    ) -> Arm:
        config, recipe = self.config, self.config.gan
        overrides = {**self.base, **own}
        if teacher is not None:
            overrides["loss.classifier"] = str(self._place(teacher) / "run")
        make = partial(self._make, name, overrides, share)
        key = {"recipe": recipe.text(), "overrides": recipe.overrides, "own": dict(own), "share": share}
        key |= {"n": config.n, "extractor": config.extractor}
        needs = (NAME, JUDGE) + (() if teacher is None else (teacher,))
        return Arm(name, what, make, key=key, needs=needs, family=family)

    def _make(self, name: str, overrides: Mapping[str, Any], share: float | None, folder: Path, seed: int) -> Result:
        steps = None if share is None else max(1, round(share * run_config(self.config.gan).steps))
        train_run(folder, str(self.config.gan.file), overrides, seed=seed, device=self.device, max_steps=steps)
        checkpoint = load(resolve(str(folder)))
        if seed == self.config.first_seed:
            self._picture(name, checkpoint)
        return self.judged(checkpoint)

    def judged(self, checkpoint: Checkpoint, judge: str = JUDGE) -> Result:
        """What the job `judge` says of a generator. Raises UserError where it taught this one."""
        config, device = self.config, choose_device(self.device)
        generator = generator_from(checkpoint, device)
        with Dataset(part(self.folder, TEST)) as reader:
            run = str(self._place(judge) / "run")
            classifier = load_judge(run, checkpoint, list(checkpoint["classes"]), device, reader)
            options = Options(
                device=device,
                channels=reader.meta.channels,
                weights=config.weights,
                load_classifier=lambda path: classifier_from(load(resolve(path)), device),
            )
            spec = f"classifier:{run}" if config.extractor == JUDGE else config.extractor
            found = evaluate_generator(
                generator,
                reader,
                n=config.n,
                seed=SEED,
                extractors=build([spec], options),
                classifier=classifier,
                per_class=max(2, config.n // len(reader.classes)),
                floor=False,
                searched=0,
                details=False,
            )
        row = found["distances"][0]
        figures = {"frechet": row["frechet"], "recognised": found["recognised"], "diversity": row["diversity_ratio"]}
        return Result(figures)

    def _picture(self, name: str, checkpoint: Checkpoint) -> None:
        """Samples at the same latents for every arm, a row for each class."""
        classes = checkpoint["classes"][:SHOWN]
        labels = torch.arange(len(classes)).repeat_interleave(COLUMNS)
        images = generate(generator_from(checkpoint), labels=labels, indices=range(len(labels)), seed=SEED)
        out = self._file(name)
        out.parent.mkdir(parents=True, exist_ok=True)
        save_rows([list(row) for row in images.split(COLUMNS)], out, columns=COLUMNS, captions=classes)

    def _file(self, name: str) -> Path:
        return self.folder / "pictures" / f"{slug(name)}.png"

    # --- answers

    def controls(self) -> list[Control]:
        wrong = "a teacher that knows nothing must not help"
        short = "training on must help, or the study could not see any help"
        return [
            Control(WRONG_TEACHER, PLAIN, "not helps", wrong, figure="recognised"),
            Control(PLAIN, SHORT, "helps", short, figure="recognised"),
        ]

    def conclude(self, results: Results) -> Conclusion:
        arms = self.arms()
        taught = [arm.name for arm in arms if arm.family == "taught"]
        asked = [
            Comparison(PLAIN, name, figure=figure, larger_is_better=larger)
            for name in taught
            for figure, larger in FIGURES.items()
        ]
        rows = [[arm.name, arm.what, *(_mean(results.figures(arm.name, figure)) for figure in FIGURES)] for arm in arms]
        files = {arm.name: self._file(arm.name) for arm in arms}
        return Conclusion(
            comparisons=asked,
            asked=asked,
            tables=[("Means over the seeds", ["", "what", *FIGURES], rows)],
            pictures=[
                Picture(str(file.relative_to(self.folder)), f"{name}: the first seed's samples, a row for each class")
                for name, file in files.items()
                if file.is_file()
            ],
            notes=[
                "recognised: share of samples that the judge, a classifier of the images held back, names as asked; "
                f"frechet: distance to the test images in the features of: {self.config.extractor}; "
                "diversity: pairwise distance within a class, real test images have 1",
                "intervals are over the training seeds; judge and teacher are one each",
            ],
        )


def teacher_name(weight: float) -> str:
    """An arm's name."""
    return f"teacher, weight {weight:g}"


def head_name(weight: float, *, samples: bool = False) -> str:
    """An arm's name."""
    return f"head on D, weight {weight:g}" + (", learns samples" if samples else "")


def _mean(values: list[float | None]) -> str:
    found = [value for value in values if value is not None]
    return plain(float(np.mean(found))) if found else "none"


CONFIG, SUBJECT = TeachConfig, Teach
