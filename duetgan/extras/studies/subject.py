"""The jobs and arms of a study, and the base class of subjects.

A subject is the definition of a study. It declares jobs that are done once, arms that are done for
each seed (mostly trainings of a classifier), and comparisons of arms. The base class divides the
images, trains networks, and evaluates classifiers.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from duetgan.data.opening import dataset_for_model
from duetgan.data.reading.dataset import Dataset
from duetgan.extras.studies.baselines import Features, Labelled, baselines, hits_of
from duetgan.extras.studies.images import (
    HELD_OUT,
    PARTS,
    TEST,
    TRAIN,
    Recipe,
    groups_of,
    make_parts,
    tokens,
    write_first,
)
from duetgan.extras.studies.results import GROUPS, Comparison, Result
from duetgan.extras.studies.samples import draw_samples
from duetgan.metrics.evaluate_classifier import answers_of, classify
from duetgan.metrics.protocol import Document
from duetgan.models.restore import classifier_from
from duetgan.training.engine.run import train
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.runlog.run_folder import is_finished

GENERATOR, UNTRAINED = "generator", "untrained generator"  # names of jobs
SEED = 0  # seed of jobs that are made once
# Suffix of an arm's folder. Settings contain it unchanged; `of_seed` inserts a seed.
OF_SEED = "-s{seed}"
STILL = 1e-12  # a learning rate at which one step changes nothing

# Dotted keys of a recipe; values may be paths in the study's folder.
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """A piece of work in a study: a job that is done once, or an arm.

    A job that is done once makes, for example, image files, a generator, or a file of samples. A
    job with a `family` is an arm: it is done for each seed, its outcome is a `Result`, and it is a
    row of the results. `Subject.add` sets `make` and `place`.
    """

    name: str
    description: str = ""
    family: str = ""  # name of a group of arms; empty if the job is no arm
    against: Sequence[Comparison] = ()  # comparisons with other arms
    # (folder, perhaps with files of an interrupted start; seed) -> outcome
    make: Callable[[Path, int], object] = print
    place: Path = Path()  # folder of the job; an arm's ends in OF_SEED


class Subject(ABC):
    """The definition of a study: its jobs, its arms and their comparisons."""

    splits: tuple[str, ...] = (TEST,)  # parts of the images on which classifiers are evaluated

    def __init__(self, config: Any, folder: Path, device: str | None = None) -> None:
        self.config = config
        self.folder = folder
        self.device = device
        self.jobs: list[Job] = []  # jobs and arms; each needs only earlier ones
        self.comparisons: list[Comparison] = []
        # name of a best arm -> the family from which it is chosen, see `best`
        self.choices: dict[str, str] = {}
        self.add(
            Job(PARTS, "the images: training, held-out, held-back and test ones"),
            lambda place, _: make_parts(config.data, place),
        )
        self.declare()

    @abstractmethod
    def declare(self) -> None:
        """Declare all jobs and arms of the study, in the order in which they are made."""

    @property
    def arms(self) -> list[Job]:
        return [job for job in self.jobs if job.family]

    def of_family(self, family: str) -> list[str]:
        """Return the names of the arms in a family."""
        return [arm.name for arm in self.arms if arm.family == family]

    def compared(self) -> list[Comparison]:
        """Return the declared comparisons.

        A comparison whose group is GROUPS is replaced by one comparison for each group of classes.
        """
        comparisons = []
        for row in self.comparisons:
            names = self.groups() if row.group == GROUPS else [row.group]
            comparisons += [replace(row, group=name) for name in names]
        return comparisons

    def labels(self) -> dict[str, np.ndarray]:
        """Return a dict from the name of a split to the labels of its images, int64 [n].

        The images must be divided already.
        """
        labels = {}
        for name in self.splits:
            with Dataset(self.part(name)) as dataset:
                labels[name] = dataset.labels().copy()
        return labels

    def groups(self) -> dict[str, list[int]]:
        """Return the groups of classes as a dict from a group's name to the labels of its classes.

        The groups are "all", "many", "medium" and "few" (see `groups_of`). The images must be
        divided already.
        """
        return groups_of(self.counts(TRAIN))

    # --- places and outcomes

    def place(self, job: str) -> Path:
        """Return the folder of the job named `job`, which is done once."""
        return self.folder / "jobs" / slug(job)

    def part(self, name: str) -> Path:
        """Return the path of the packed file of a part of the images, such as "train"."""
        return self.place(PARTS) / f"{name}.lmdb"

    def outcome(self, place: Path) -> Document:
        """Return the outcome of the job whose folder is `place`.

        Returns an empty dict if the job is not done.
        """
        file = record(place)
        outcome: Document = json.loads(file.read_text())["told"] if file.is_file() else {}
        return outcome

    def classes(self) -> list[str]:
        """Return the class names; the images must be divided already."""
        return list(self.outcome(self.place(PARTS))["classes"])

    def counts(self, part: str) -> list[int]:
        """Return the number of images of each class in a part of the divided images."""
        return list(self.outcome(self.place(PARTS))["counts"][part])

    # --- declarations

    def add(self, job: Job, make: Callable[[Path, int], object]) -> Path:
        """Declare a job or an arm, and return its folder.

        The study calls `make(folder, seed)` to do the job.
        """
        place = self.place(job.name)
        if job.family:
            place = self.folder / "runs" / (slug(job.name) + OF_SEED)
        self.jobs.append(replace(job, make=make, place=place))
        self.comparisons += [replace(row, second=job.name) for row in job.against]
        return place

    def best(self, name: str, family: str, against: Sequence[Comparison] = ()) -> None:
        """Declare an arm `name` that has, for each seed, the results of the best arm of a family.

        The best arm is chosen on held-out images. `against` are comparisons of the new arm with
        others.
        """
        self.choices[name] = family
        self.comparisons += [replace(row, second=name) for row in against]

    def training(
        self,
        job: Job,
        recipe: Recipe,
        overrides: Settings = MappingProxyType({}),  # dotted keys of the recipe
        *,
        images: Path | None = None,  # packed images; None: the training images
        fixed: int = SEED,  # seed of a job that is no arm
        steps: int | None = None,  # number of steps; None: as in the recipe
    ) -> Path:
        """Declare a training, and return its run folder.

        If `job` is an arm, the path of the folder contains OF_SEED, and the trained classifier is
        also evaluated.
        """
        overrides = {"data.path": images or self.part(TRAIN), **overrides}

        def make(place: Path, seed: int) -> Result | Document:
            run = place / "run"
            self.train(run, recipe, overrides, seed if job.family else fixed, steps)
            return self.judge(run) if job.family else {}

        return self.add(job, make) / "run"

    def generators(self, images: Path | None = None) -> tuple[Path, Path]:
        """Declare a trained and an untrained generator; return their run folders.

        The generator is trained on the packed `images`; None: the training images.
        """
        gan = self.config.gan
        overrides = {} if images else {"data.val_path": self.part(HELD_OUT)}
        job = Job(GENERATOR, f"training the generator: {gan.config}")
        trained = self.training(job, gan, overrides, images=images)
        still = {"generator_optimizer.lr": STILL, "discriminator_optimizer.lr": STILL}
        untrained = self.training(
            Job(UNTRAINED, UNTRAINED), gan, overrides | still, images=images, steps=1
        )
        return trained, untrained

    def bases(self, template: Job, images: Path | None, labelled: Labelled | None) -> None:
        """Declare baseline arms, which use no second model such as a GAN.

        These are logistic regressions (see `baselines`) and, if the classifier's recipe starts from
        trained weights, training from scratch.

        Args:
            template: Job with the family and the comparisons of the arms. The arms' names begin
                with the name of this job.
            images: Packed file of labelled images; None: all training images.
            labelled: Function of the labels of all training images and of `seed=`. It returns the
                indices of the labelled images. None: all.
        """
        recipe = self.config.classifier
        model = recipe.settings().model
        for name, (description, features) in baselines(model.changed(weights=None)).items():
            full_name = f"{template.name}, {name}".lstrip(", ")
            arm = replace(template, name=full_name, description=description)
            self.readout(arm, features, labelled)
        if model.weights is not None:
            full_name = f"{template.name}, from scratch".lstrip(", ")
            arm = replace(template, name=full_name, description="the recipe without its weights")
            self.training(arm, recipe, {"model.weights": None}, images=images)

    def readout(self, arm: Job, features: Features, labelled: Labelled | None) -> None:
        """Declare an arm that fits a logistic regression on `features`, such as pixels.

        `labelled` is a function that chooses the training images whose labels are used. It takes
        all labels and `seed=`, and returns indices; None: use all labels.
        """

        def make(_: Path, seed: int) -> Result:
            files = {name: self.part(name) for name in self.splits}
            of_this_seed = partial(labelled, seed=seed) if labelled else None
            return scored(hits_of(self.part(TRAIN), files, features, of_this_seed))

        self.add(arm, make)

    # --- functions that make jobs and arms

    def draw(self, file: Path, counts: Sequence[int], source: Path, seed: int) -> None:
        """Write a packed file with `counts[k]` images of each class k.

        `source` is the run folder of a generator, whose samples are written, or a packed file.
        """
        if source.suffix == ".lmdb":
            write_first(source, counts, file, seed)
        else:
            device = choose_device(self.device)
            draw_samples(file, counts, source, self.classes(), seed=seed, device=device)

    def train(
        self,
        folder: Path,
        recipe: Recipe,
        overrides: Settings,
        seed: int,
        max_steps: int | None = None,
    ) -> None:
        """Train by a recipe in the run folder `folder`, or resume the run.

        Does nothing if the run is finished. The output goes to FOLDER.log. Raises the exceptions of
        training, and StoppedBySignal after a signal, when a checkpoint has been saved.
        """
        if is_finished(folder, max_steps):
            return
        # A GAN saves samples only at its end.
        grids = 10**9 if recipe is self.config.gan else 0
        quiet = {"log.tensorboard": False, "log.samples_every": grids, "data.val_path": None}
        settings = {**quiet, **recipe.overrides, **overrides, "seed": seed}
        for key, value in overrides.items():
            if isinstance(value, Path):
                settings[key] = str(of_seed(value, seed))
        folder.mkdir(parents=True, exist_ok=True)
        with (
            folder.with_name(f"{folder.name}.log").open("a", encoding="utf-8") as log,
            redirect_stdout(log),
            redirect_stderr(log),
        ):
            train(
                str(recipe.file),
                tokens(settings),
                run_dir=str(folder),
                device=self.device,
                max_steps=max_steps,
            )

    def judge(self, run: Path) -> Result:
        """Evaluate the EMA weights of a classifier's run on each split.

        Returns the accuracies and the correct predictions.
        """
        checkpoint = load(resolve(str(run)))
        classifier = classifier_from(checkpoint, choose_device(self.device))
        hits = {}
        for name in self.splits:
            with dataset_for_model(self.part(name), checkpoint) as dataset:
                logits = classify(classifier, dataset, batch_size=250)
                hits[name] = answers_of(classifier, dataset, logits).hits.numpy()
        return scored(hits)


def scored(hits: dict[str, np.ndarray]) -> Result:
    """Return a result with the correct predictions `hits`, and with the accuracy on each split.

    `hits` is a dict from the name of a split to bool [n], True for each correct prediction.
    """
    return Result({f"{name}_accuracy": float(right.mean()) for name, right in hits.items()}, hits)


def of_seed(path: Path, seed: int) -> Path:
    """Return `path` with OF_SEED replaced by the suffix of `seed`, such as `-s3`."""
    return Path(str(path).replace(OF_SEED, OF_SEED.format(seed=seed)))


def record(place: Path) -> Path:
    """Return the path of the file with the outcome of the job whose folder is `place`.

    The file exists once the job is done.
    """
    return place.with_name(f"{place.name}.json")


def slug(name: str) -> str:
    """Return `name` in lower case; characters other than a-z, 0-9 and `.` become `-`."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
