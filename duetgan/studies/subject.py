"""What a study is made of: jobs and arms, each declared once with what it is compared with; and
what all subjects share: a folder with the images, trainings, and how classifiers are judged.
"""

import fnmatch
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.inspect import save_grid
from duetgan.data.reading.dataset import Dataset, dataset_for_model
from duetgan.metrics.evaluate_classifier import answers_of, classify
from duetgan.models.restore import classifier_from
from duetgan.studies.baselines import hits_of, ways
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
from duetgan.utils.runlog.run_folder import ended

GENERATOR, UNTRAINED, SELECTOR = "generator", "untrained generator", "selector"  # jobs
SELECTOR_SEED = 1000  # beyond the arms' seeds: no arm is trained like the selector
SEED = 0  # of what is made once
OF_SEED = "-s{seed}"  # ends the name of an arm's folder, and stands for every seed in settings
STILL = 1e-12  # a learning rate at which one step changes nothing

# by name; paths inside the study's folder, sections of its config and functions too
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """Something that is made once: image files, a generator, a file of samples. One of a family is
    an arm, a row of the table: it is made for every seed, and what it comes to is a Result.
    """

    name: str
    what: str = ""  # a line for people
    family: str = ""
    against: Sequence[Comparison] = ()  # what an arm is compared with
    # (folder, which may hold what an interrupted start left; seed) -> outcome; this and what
    # follows: of `Subject.add`
    make: Callable[[Path, int], Any] = field(repr=False, default=print)
    key: str = ""  # what defines it, beside the jobs that it needs
    needs: Sequence[Path] = ()  # places of jobs that come before it
    place: Path = Path()  # its folder; an arm's ends in OF_SEED


class Subject(ABC):
    """A question, declared for a configuration and a folder."""

    title: str
    sets: tuple[str, ...] = (TEST,)  # of images that classifiers are judged on
    notes: Sequence[str] = ()  # on how it was made, for people
    left_out: Sequence[str] = ()  # arms that were not asked for

    def __init__(self, config: Any, folder: Path, device: str | None = None) -> None:
        self.config, self.folder, self.device = config, folder, device
        self.jobs: dict[Path, Job] = {}  # by their places
        self.comparisons: list[Comparison] = []
        # arms that are at each seed the best of a family, on held-out images: which
        self.choices: dict[str, str] = {}
        self.captions: dict[str, str] = {}  # of the pictures, by name
        self.add(
            Job(PARTS, "the images: training, held-out, held-back and test ones"),
            lambda place, _, data: make_parts(data, place),
            data=config.data,
        )
        self.declare()
        tried = self._tried()
        self.left_out = [arm.name for arm in self.arms if arm.name not in tried]
        self.comparisons = [row for row in self.comparisons if row.second in tried]
        self.choices = {name: family for name, family in self.choices.items() if name in tried}

    @abstractmethod
    def declare(self) -> None:
        """Add the jobs, which are made where an arm needs them, and the arms; the same whatever is
        done already.
        """

    @property
    def arms(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.family and job.name not in self.left_out]

    def _tried(self) -> set[str]:
        """What `only` asks for and the controls that must come out, with all that these are
        compared with: of a base that is the best of a family, the family. Raises UserError for a
        pattern of no arm's name.
        """
        arms, answered = [arm.name for arm in self.arms], {row.second for row in self.comparisons}
        found = {pattern: fnmatch.filter(arms, pattern) for pattern in self.config.only or ["*"]}
        for pattern in [pattern for pattern, of in found.items() if not of]:
            raise UserError(f"only: no arm is called {pattern!r}; there are: {'; '.join(arms)}")
        asked = {*chain(*found.values())}
        more = [
            *asked,
            *(row.second for row in self.comparisons if row.expected in ("helps", "same")),
        ]
        more += [
            name
            for name in self.choices.keys() & answered
            if asked & {*self.of_family(self.choices[name])}
        ]
        tried: set[str] = set()
        while more:
            tried.add(name := more.pop())
            needs = {
                other
                for row in self.comparisons
                if row.second == name
                for other in (row.first, *row.controls)
            }
            if name in self.choices.keys() - answered:
                needs |= {*self.of_family(self.choices[name])}
            more += needs - tried
        return tried

    def of_family(self, family: str) -> list[str]:
        return [arm.name for arm in self.arms if arm.family == family]

    def compared(self, results: Results) -> list[Comparison]:
        """The comparisons, one for each group or class that is meant."""
        of = self.class_groups(results)
        groups = {GROUPS: of, CLASSES: tuple(results.groups)[len(of) :]}
        return [
            replace(row, group=of)
            for row in self.comparisons
            for of in groups.get(row.group, (row.group,))
        ]

    def labels(self) -> dict[str, np.ndarray]:
        """Of each set of images whose hits the arms return, int64 [n]; asked for once there are
        results.
        """
        labels = {}
        for name in self.sets:
            with Dataset(self.part(name)) as reader:
                labels[name] = reader.labels().copy()
        return labels

    def groups(self) -> dict[str, list[int]]:
        """Sets of labels by name, see `groups_of`; asked for once there are results."""
        return groups_of(self.counts(TRAIN), self.classes())

    def class_groups(self, results: Results) -> tuple[str, ...]:
        """The names of the groups that are no single class."""
        return tuple(results.groups)[: len(results.groups) - len(self.classes())]

    # --- places and outcomes

    def place(self, job: str) -> Path:
        """The folder of a job that is made once."""
        return self.folder / "jobs" / slug(job)

    def part(self, name: str) -> Path:
        """The packed file of a part of the images."""
        return self.place(PARTS) / f"{name}.lmdb"

    def picture(self, name: str) -> Path:
        """The file of a picture; the page shows those that are there."""
        return self.folder / "pictures" / f"{slug(name)}.png"

    def outcome(self, place: Path) -> dict[str, Any]:
        """What a job came to; empty where it is not done."""
        file = record(place)
        outcome: dict[str, Any] = json.loads(file.read_text())["told"] if file.is_file() else {}
        return outcome

    def classes(self) -> list[str]:
        """Of the images; once they are divided."""
        return list(self.outcome(self.place(PARTS))["classes"])

    def counts(self, part: str) -> list[int]:
        """Images of each class in a part; once they are divided."""
        return list(self.outcome(self.place(PARTS))["counts"][part])

    # --- what is declared

    def add(self, job: Job, make: Callable[..., Any], **settings: Any) -> Path:
        """Declare a job or an arm; returns its place. It is made by `make(place, seed,
        **settings)`. These settings define it, and of a path in them the job comes first.
        """
        needs: dict[Path, None] = {}

        def said(value: Any) -> Any:
            if isinstance(value, Path):
                inside = value.relative_to(self.folder)
                needs[self.folder.joinpath(*inside.parts[:2])] = None
                return inside.as_posix()
            if isinstance(value, Config):
                return getattr(value, "key", value.model_dump)()
            return [value.func, value.keywords] if isinstance(value, partial) else value.__name__

        key = json.dumps({"name": job.name, **settings}, default=said, sort_keys=True)
        place = (
            self.folder / "runs" / (slug(job.name) + OF_SEED)
            if job.family
            else self.place(job.name)
        )
        self.jobs[place] = replace(
            job, make=partial(make, **settings), key=key, needs=tuple(needs), place=place
        )
        self.comparisons += [replace(each, second=job.name) for each in job.against]
        return place

    def best(self, name: str, family: str, against: Sequence[Comparison] = ()) -> None:
        """Declare an arm that is at each seed the best of a family on held-out images."""
        self.choices[name] = family
        self.comparisons += [replace(each, second=name) for each in against]

    def training(
        self,
        job: Job,
        recipe: Recipe,
        own: Settings = MappingProxyType({}),  # dotted keys of the recipe
        *,
        images: Path | None = None,  # None: the training images
        fixed: int = SEED,  # seed of what is no arm
        steps: int | None = None,  # None: the recipe's
        # an arm or job, by its place, and its figure of how much this could use
        used: tuple[Path, str] | None = None,
        **key: Any,  # what else defines it
    ) -> Path:
        """Declare what trains a run, or takes the one that `gan.run` names; returns the folder of
        the run.
        """
        own = {"data.path": images or self.part(TRAIN), **own}

        def make(place: Path, seed: int, **_key: Any) -> Any:
            run = place / "run"
            if recipe is not self.config.gan or recipe.run is None or steps is not None:
                self.train(run, recipe, own, seed if job.family else fixed, steps)
            elif not run.is_symlink():
                require_trained_on(recipe.run, own["data.path"])
                run.symlink_to(Path(recipe.run).resolve())
            result: Any = self.judge(run) if job.family else {}
            if used:
                result.figures["used"] = self.outcome(of_seed(used[0], seed))["figures"][used[1]]
            return result

        return self.add(job, make, recipe=recipe, own=own, fixed=fixed, steps=steps, **key) / "run"

    def generators(self, images: Path | None = None) -> tuple[Path, Path]:
        """The generator of the training images, or of others, and one as it is before its first
        step: their runs.
        """
        gan, own = self.config.gan, {} if images else {"data.val_path": self.part(HELD_OUT)}
        still = {f"{network}_optimizer.lr": STILL for network in ("generator", "discriminator")}
        trained = Job(GENERATOR, f"training the generator: {gan.config or gan.run}")
        first = self.training(trained, gan, own, images=images)
        return first, self.training(
            Job(UNTRAINED, UNTRAINED), gan, own | still, images=images, steps=1
        )

    def bases(
        self, like: Job, images: Path | None = None, known: Callable[..., np.ndarray] | None = None
    ) -> None:
        """Declare arms of what is cheap without the other model, the way after the name of `like`.
        `known`: (labels, seed=) -> the training images whose labels are known, which `images`
        holds; None: all.
        """
        recipe = self.config.classifier
        model = recipe.settings().model
        for way, (what, features, learn) in ways(model.changed(weights=None)).items():
            self.learning(
                replace(like, name=f"{like.name}, {way}".lstrip(", "), what=what),
                features,
                learn,
                known,
            )
        if model.weights is not None:
            arm = replace(
                like,
                name=f"{like.name}, from scratch".lstrip(", "),
                what="the recipe without its weights",
            )
            self.training(arm, recipe, {"model.weights": None}, images=images)

    def learning(self, arm: Job, features: Any, learn: Any, known: Any) -> None:
        """Declare an arm that learns from features of what is not trained for it, see `hits_of`;
        `known`: as above.
        """

        def make(_: Path, seed: int, images: Path, **how: Any) -> Result:
            asked = {part: self.part(part) for part in self.sets}
            return scored(
                hits_of(images, asked, **how | {"known": known and partial(known, seed=seed)})
            )

        self.add(arm, make, images=self.part(TRAIN), features=features, learn=learn, known=known)

    def selector(self, recipe: Recipe, own: Settings) -> Path:
        """The classifier of the training images by which samples are selected: its run."""
        job = Job(SELECTOR, "training the classifier that selects samples")
        return self.training(job, recipe, own, fixed=SELECTOR_SEED)

    # --- what jobs and arms do

    def draw(
        self,
        files: Mapping[Path, Sequence[int]],
        generator: Path,
        drawing: Drawing | None,
        seed: int,
        selector: Path | None,
        **how: Any,
    ) -> list[float | None]:
        """Files of samples of a generator's run, selected by a classifier's, see `draw_samples`;
        without a drawing, files of images of a packed one.
        """
        if drawing is None:
            for file, counts in files.items():
                write_first(generator, counts, file, seed)
            return []
        device = choose_device(self.device)
        if selector is not None:
            classifier = classifier_from(load(resolve(str(selector))), device)
            how["rule"] = partial(drawing.keeps, classifier)
        return draw_samples(
            files, generator, self.classes(), seed=seed, drawing=drawing, device=device, **how
        )

    def show(self, name: str, file: Path) -> None:
        """A picture of a packed file, a row for each class; drawn once."""
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
        """Train a run of a recipe to its end, or resume it; what it prints goes into FOLDER.log.
        Nothing where it has ended. Raises StoppedBySignal once it has saved, and what training
        raises.
        """
        if ended(folder, max_steps):
            return
        grids = 10**9 if recipe is self.config.gan else 0  # at the end alone, or none
        quiet = {"log.tensorboard": False, "log.samples_every": grids, "data.val_path": None}
        paths = {
            key: str(of_seed(value, seed))
            for key, value in overrides.items()
            if isinstance(value, Path)
        }
        given = tokens({**quiet, **recipe.overrides, **overrides, **paths, "seed": seed})
        folder.mkdir(parents=True, exist_ok=True)
        with (
            folder.with_name(f"{folder.name}.log").open("a", encoding="utf-8") as log,
            redirect_stdout(log),
            redirect_stderr(log),
        ):
            train(
                str(recipe.file),
                given,
                run_dir=str(folder),
                device=self.device,
                max_steps=max_steps,
            )

    def judge(self, run: Path) -> Result:
        """The answers of a run's average classifier to every image of the sets, and accuracies."""
        checkpoint, hits = load(resolve(str(run))), {}
        classifier = classifier_from(checkpoint, choose_device(self.device))
        for name in self.sets:
            with dataset_for_model(self.part(name), checkpoint) as reader:
                hits[name] = answers_of(
                    classifier, reader, classify(classifier, reader, batch_size=250)
                ).hits.numpy()
        return scored(hits)


def scored(hits: dict[str, np.ndarray]) -> Result:
    return Result({f"{name}_accuracy": float(right.mean()) for name, right in hits.items()}, hits)


def of_seed(path: Path, seed: int) -> Path:
    """A path in settings as it is for a seed."""
    return Path(str(path).replace(OF_SEED, OF_SEED.format(seed=seed)))


def record(place: Path) -> Path:
    """The file of what the job of a place came to, which is there once it is done."""
    return place.with_name(f"{place.name}.json")


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def require_trained_on(run: str, images: Path) -> None:
    """Raise UserError unless a run was trained on exactly these images: another may have seen those
    that judge.
    """
    checkpoint = load(resolve(run))
    with Dataset(images) as reader:
        wanted = reader.meta.content_hash
    if (checkpoint.get("data") or {}).get("content_hash") != wanted:
        raise UserError(
            f"{run}: was not trained on this study's training images; train it with --data.path {images}, or leave "
            "gan.run out"
        )
