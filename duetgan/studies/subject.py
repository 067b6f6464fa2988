"""Parts of a study: jobs, arms and the base class of subjects.

A subject declares its jobs and arms, with the comparisons of each arm. The base class has what all
subjects need: the folder with the images, trainings, and the evaluation of classifiers.
"""

import fnmatch
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.inspect import save_grid
from duetgan.data.reading.dataset import Dataset, dataset_for_model
from duetgan.metrics.evaluate_classifier import answers_of, classify
from duetgan.metrics.protocol import Document
from duetgan.models.restore import classifier_from
from duetgan.studies.baselines import Features, Labelled, Learner, baselines, hits_of
from duetgan.studies.images import (
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
from duetgan.studies.results import CLASSES, GROUPS, Comparison, Result, Results
from duetgan.studies.samples import Drawing, draw_samples
from duetgan.training.engine.run import train
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.model import Config
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_folder import is_finished

GENERATOR, UNTRAINED = "generator", "untrained generator"  # jobs
SELECTOR = "selector"
SELECTOR_SEED = 1000  # above the seeds of the arms, so that no arm is trained as the selector is
SEED = 0  # of jobs that are made once
OF_SEED = "-s{seed}"  # suffix of an arm's folder, where `{seed}` stands for any seed in settings
STILL = 1e-12  # a learning rate at which one step changes nothing

# values may be paths inside the study's folder, sections of its config, and functions
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """A job that is made once, such as image files, a generator or a file of samples, or an arm.

    A job with a family is an arm, a row of the table. It is made for each seed, and its outcome is
    a Result. `Subject.add` sets `make` and the fields that follow it.
    """

    name: str
    description: str = ""  # a line for the report
    family: str = ""
    against: Sequence[Comparison] = ()  # the comparisons of an arm
    # (folder, which may have files of an interrupted start; seed) -> outcome
    make: Callable[[Path, int], object] = field(repr=False, default=print)
    key: str = ""  # JSON of the settings that define it
    needs: Sequence[Path] = ()  # places of the jobs that must be made first
    place: Path = Path()  # its folder; an arm's ends in OF_SEED


class Subject(ABC):
    """The subject of a study: its jobs and arms for a config and a folder."""

    title: str
    splits: tuple[str, ...] = (TEST,)  # images on which classifiers are evaluated
    notes: Sequence[str] = ()  # on the method, for the report
    left_out: Sequence[str] = ()  # names of arms that `only` excludes

    def __init__(self, config: Any, folder: Path, device: str | None = None) -> None:
        self.config = config
        self.folder = folder
        self.device = device
        self.jobs: dict[Path, Job] = {}  # by their places
        self.comparisons: list[Comparison] = []
        # name of an arm -> family, of which it is the best arm at each seed, on held-out images
        self.choices: dict[str, str] = {}
        self.captions: dict[str, str] = {}  # name of a picture -> caption
        self.add(
            Job(PARTS, "the images: training, held-out, held-back and test ones"),
            lambda place, _, data: make_parts(data, place),
            data=config.data,
        )
        self.declare()
        included = self._included()
        self.left_out = [arm.name for arm in self.arms if arm.name not in included]
        self.comparisons = [row for row in self.comparisons if row.second in included]
        self.choices = {name: family for name, family in self.choices.items() if name in included}

    @abstractmethod
    def declare(self) -> None:
        """Declare all jobs and arms, whether they are made already or not.

        A job is made when an arm needs it.
        """

    @property
    def arms(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.family and job.name not in self.left_out]

    def _included(self) -> set[str]:
        """Return the names of the arms to try.

        These are the arms that match `only`, controls that must come out, and all arms that these
        are compared with. If such an arm is the best of a family, it is the whole family.

        Raises UserError for a pattern that matches no arm.
        """
        arms = [arm.name for arm in self.arms]
        requested = set()
        for pattern in self.config.only or ["*"]:
            if not (names := fnmatch.filter(arms, pattern)):
                raise UserError(f"only: no arm is called {pattern!r}; there are: {'; '.join(arms)}")
            requested.update(names)
        compared = {row.second for row in self.comparisons}
        controls = [row.second for row in self.comparisons if row.expected in ("helps", "same")]
        queue = [*requested, *controls]
        for name in self.choices.keys() & compared:
            if requested & set(self.of_family(self.choices[name])):
                queue.append(name)
        included: set[str] = set()
        while queue:
            included.add(name := queue.pop())
            needed: set[str] = set()
            for row in self.comparisons:
                if row.second == name:
                    needed.update((row.first, *row.controls))
            if name in self.choices and name not in compared:
                needed.update(self.of_family(self.choices[name]))
            queue += needed - included
        return included

    def of_family(self, family: str) -> list[str]:
        """Return the names of a family's arms."""
        return [arm.name for arm in self.arms if arm.family == family]

    def compared(self, results: Results) -> list[Comparison]:
        """Return the comparisons, with one for each group in place of GROUPS and of CLASSES."""
        class_groups = self.class_groups(results)
        groups = {GROUPS: class_groups, CLASSES: tuple(results.groups)[len(class_groups) :]}
        comparisons = []
        for row in self.comparisons:
            names = groups.get(row.group, (row.group,))
            comparisons += [replace(row, group=name) for name in names]
        return comparisons

    def labels(self) -> dict[str, np.ndarray]:
        """Return the labels of each split, int64 [n]; the images must be divided already."""
        labels = {}
        for name in self.splits:
            with Dataset(self.part(name)) as dataset:
                labels[name] = dataset.labels().copy()
        return labels

    def groups(self) -> dict[str, list[int]]:
        """Return groups of classes by name, see `groups_of`; the images must be divided already."""
        return groups_of(self.counts(TRAIN), self.classes())

    def class_groups(self, results: Results) -> tuple[str, ...]:
        """Return the names of the groups that are not single classes."""
        return tuple(results.groups)[: len(results.groups) - len(self.classes())]

    # --- places and outcomes

    def place(self, job: str) -> Path:
        """Return the folder of a job that is made once."""
        return self.folder / "jobs" / slug(job)

    def part(self, name: str) -> Path:
        """Return the packed file of a part of the images."""
        return self.place(PARTS) / f"{name}.lmdb"

    def picture(self, name: str) -> Path:
        """Return the file of a picture, which the report shows if it exists."""
        return self.folder / "pictures" / f"{slug(name)}.png"

    def outcome(self, place: Path) -> Document:
        """Return the outcome of a job; empty if it is not done."""
        file = record(place)
        outcome: Document = json.loads(file.read_text())["told"] if file.is_file() else {}
        return outcome

    def classes(self) -> list[str]:
        """Return the class names; the images must be divided already."""
        return list(self.outcome(self.place(PARTS))["classes"])

    def counts(self, part: str) -> list[int]:
        """Return the number of images of each class in a part of the divided images."""
        return list(self.outcome(self.place(PARTS))["counts"][part])

    # --- what is declared

    def add(self, job: Job, make: Callable[..., object], **settings: object) -> Path:
        """Declare a job or an arm, which `make(place, seed, **settings)` makes; return its place.

        The settings identify it: an outcome of other settings is refused. If they have a path in
        the study's folder, its job is made first.
        """
        needs: dict[Path, None] = {}

        def serialized(value: Any) -> object:
            if isinstance(value, Path):
                inside = value.relative_to(self.folder)
                needs[self.folder.joinpath(*inside.parts[:2])] = None
                return inside.as_posix()
            if isinstance(value, Config):
                return getattr(value, "key", value.model_dump)()
            return [value.func, value.keywords] if isinstance(value, partial) else value.__name__

        key = json.dumps({"name": job.name, **settings}, default=serialized, sort_keys=True)
        place = self.place(job.name)
        if job.family:
            place = self.folder / "runs" / (slug(job.name) + OF_SEED)
        self.jobs[place] = replace(
            job, make=partial(make, **settings), key=key, needs=tuple(needs), place=place
        )
        self.comparisons += [replace(row, second=job.name) for row in job.against]
        return place

    def best(self, name: str, family: str, against: Sequence[Comparison] = ()) -> None:
        """Declare an arm that is at each seed the best of a family on held-out images."""
        self.choices[name] = family
        self.comparisons += [replace(row, second=name) for row in against]

    def training(
        self,
        job: Job,
        recipe: Recipe,
        overrides: Settings = MappingProxyType({}),  # dotted keys of the recipe
        *,
        images: Path | None = None,  # None: the training images
        fixed: int = SEED,  # seed of a job that is no arm
        steps: int | None = None,  # None: the recipe's
        # place of an arm or job, and the name of its metric that is this arm's metric `used`
        used: tuple[Path, str] | None = None,
        **settings: object,  # further settings that identify it
    ) -> Path:
        """Declare a training, or the use of the run that `gan.run` names; return the run folder."""
        overrides = {"data.path": images or self.part(TRAIN), **overrides}

        def make(place: Path, seed: int, **_settings: object) -> Result | Document:
            run = place / "run"
            if recipe is not self.config.gan or recipe.run is None or steps is not None:
                self.train(run, recipe, overrides, seed if job.family else fixed, steps)
            elif not run.is_symlink():
                require_trained_on(recipe.run, overrides["data.path"])
                run.symlink_to(Path(recipe.run).resolve())
            if not job.family:
                return {}
            result = self.judge(run)
            if used:
                result.figures["used"] = self.outcome(of_seed(used[0], seed))["figures"][used[1]]
            return result

        place = self.add(
            job, make, recipe=recipe, own=overrides, fixed=fixed, steps=steps, **settings
        )
        return place / "run"

    def generators(self, images: Path | None = None) -> tuple[Path, Path]:
        """Declare a generator and an untrained one; return their run folders.

        The generator is trained on the training images by default.
        """
        gan = self.config.gan
        overrides = {} if images else {"data.val_path": self.part(HELD_OUT)}
        job = Job(GENERATOR, f"training the generator: {gan.config or gan.run}")
        trained = self.training(job, gan, overrides, images=images)
        still = {"generator_optimizer.lr": STILL, "discriminator_optimizer.lr": STILL}
        untrained = self.training(
            Job(UNTRAINED, UNTRAINED), gan, overrides | still, images=images, steps=1
        )
        return trained, untrained

    def bases(
        self, template: Job, images: Path | None = None, labelled: Labelled | None = None
    ) -> None:
        """Declare the baselines without the other model: cheap learners, and from scratch.

        Args:
            template: A job whose name, family and comparisons the arms take; the name of the
                baseline is appended.
            images: File of the labelled training images; None: all training images.
            labelled: Function of (labels, seed=) that returns the labelled ones among the training
                images, those in `images`; None: all.
        """
        recipe = self.config.classifier
        model = recipe.settings().model
        for name, (description, features, learner) in baselines(
            model.changed(weights=None)
        ).items():
            full_name = f"{template.name}, {name}".lstrip(", ")
            arm = replace(template, name=full_name, description=description)
            self.learning(arm, features, learner, labelled)
        if model.weights is not None:
            full_name = f"{template.name}, from scratch".lstrip(", ")
            arm = replace(template, name=full_name, description="the recipe without its weights")
            self.training(arm, recipe, {"model.weights": None}, images=images)

    def learning(
        self, arm: Job, features: Features, learner: Learner, labelled: Labelled | None
    ) -> None:
        """Declare an arm that learns from features of an untrained or fixed network, see `hits_of`.

        `labelled` is as for `bases`.
        """

        def make(_: Path, seed: int, images: Path, **_settings: object) -> Result:
            files = {name: self.part(name) for name in self.splits}
            of_this_seed = partial(labelled, seed=seed) if labelled else None
            return scored(hits_of(images, files, features, learner, of_this_seed))

        self.add(
            arm, make, images=self.part(TRAIN), features=features, learn=learner, known=labelled
        )

    def selector(self, recipe: Recipe, overrides: Settings) -> Path:
        """Declare the classifier that selects samples; return its run folder."""
        job = Job(SELECTOR, "training the classifier that selects samples")
        return self.training(job, recipe, overrides, fixed=SELECTOR_SEED)

    # --- what jobs and arms do

    def draw(
        self,
        files: Mapping[Path, Sequence[int]],
        generator: Path,
        drawing: Drawing | None,
        seed: int,
        selector: Path | None,
        **options: Any,  # of `draw_samples`
    ) -> list[float | None]:
        """Write files of a generator's samples, see `draw_samples`.

        Args:
            files: File -> number of samples of each class.
            generator: Run of the generator; without `drawing`, a packed file, whose images are
                written instead.
            drawing: The selection.
            seed: Seed of the samples.
            selector: Run of the classifier that selects samples.
        """
        if drawing is None:
            for file, counts in files.items():
                write_first(generator, counts, file, seed)
            return []
        device = choose_device(self.device)
        if selector is not None:
            classifier = classifier_from(load(resolve(str(selector))), device)
            options["rule"] = partial(drawing.accepts, classifier)
        return draw_samples(
            files, generator, self.classes(), seed=seed, drawing=drawing, device=device, **options
        )

    def show(self, name: str, file: Path) -> None:
        """Save a picture of a packed file, with a row for each class, unless it exists."""
        if not self.picture(name).is_file():
            with LMDBReader(file) as reader:
                save_grid(reader, self.picture(name))

    def train(
        self,
        folder: Path,
        recipe: Recipe,
        overrides: Settings,
        seed: int,
        max_steps: int | None = None,
    ) -> None:
        """Train or resume a run of a recipe, unless it has ended; its output goes to FOLDER.log.

        Raises StoppedBySignal after saving, and the exceptions of training.
        """
        if is_finished(folder, max_steps):
            return
        grids = 10**9 if recipe is self.config.gan else 0  # at the end alone, or none
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
        """Return the correct predictions and accuracies of a run's EMA classifier on each split."""
        checkpoint = load(resolve(str(run)))
        classifier = classifier_from(checkpoint, choose_device(self.device))
        hits = {}
        for name in self.splits:
            with dataset_for_model(self.part(name), checkpoint) as dataset:
                logits = classify(classifier, dataset, batch_size=250)
                hits[name] = answers_of(classifier, dataset, logits).hits.numpy()
        return scored(hits)


def scored(hits: dict[str, np.ndarray]) -> Result:
    """Return a result with hits and the accuracy of each split."""
    return Result({f"{name}_accuracy": float(right.mean()) for name, right in hits.items()}, hits)


def of_seed(path: Path, seed: int) -> Path:
    """Return a path of the settings for a seed."""
    return Path(str(path).replace(OF_SEED, OF_SEED.format(seed=seed)))


def record(place: Path) -> Path:
    """Return the file of a job's outcome, which exists once the job is done."""
    return place.with_name(f"{place.name}.json")


def slug(name: str) -> str:
    """Return a name as part of a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def require_trained_on(run: str, images: Path) -> None:
    """Raise UserError unless a run was trained on exactly these images.

    Another run may have been trained on the images for evaluation.
    """
    checkpoint = load(resolve(run))
    with Dataset(images) as dataset:
        content_hash = dataset.meta.content_hash
    if (checkpoint.get("data") or {}).get("content_hash") != content_hash:
        raise UserError(
            f"{run}: was not trained on this study's training images; train it with --data.path {images}, or leave "
            "gan.run out"
        )
