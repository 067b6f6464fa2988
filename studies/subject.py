"""What a study is made of: jobs, arms, controls and comparisons, each declared once; and what all subjects share: a
folder with the images, trainings, and how classifiers are judged.
"""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from duetgan.data.reading.dataset import Dataset, dataset_for_model
from duetgan.metrics.evaluate_classifier import answers_of, check_classes, classify
from duetgan.models.restore import classifier_from
from duetgan.reporting.figures import percent
from duetgan.studies.baselines import Features, Learner, hits_of, ways
from duetgan.studies.images import HELD_OUT, PARTS, TEST, TRAIN, Recipe, groups_of, make_parts, tokens
from duetgan.studies.samples import Drawing, Selector, draw_samples, last_checkpoints
from duetgan.training.engine.run import train
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError

GENERATOR, UNTRAINED, SELECTOR = "generator", "untrained generator", "selector"  # jobs
SELECTOR_SEED = 1000  # beyond the arms' seeds: no arm is trained like the selector
SEED = 0  # of what is made once
OF_SEED = "-s{seed}"  # ends the name of an arm's folder, and stands for every seed in settings
STILL = 1e-12  # a learning rate at which one step changes nothing

Settings = Mapping[str, Any]  # ready for JSON, but for paths inside the study's folder
NOTHING: Settings = MappingProxyType({})


@dataclass(frozen=True)
class Job:
    """Something that is made once: image files, a generator, a file of samples. One of a family is an arm, a row of the
    table: it is made for every seed, and what it comes to is a Result.
    """

    name: str
    what: str  # a line for people
    make: Callable[[Path, int], Any]  # (folder, which may hold what an interrupted start left; seed) -> outcome
    key: str  # what defines it, beside the jobs that it needs
    needs: tuple[Path, ...]  # places of jobs that come before it
    family: str
    place: Path  # its folder; an arm's ends in OF_SEED


@dataclass(frozen=True)
class Control:
    """A comparison whose answer is known; where it comes out otherwise the study is void.

    `helps`: the arm must be better than `against`, significantly; `not helps`: it must not; `same`: neither.
    """

    arm: str
    against: str
    expected: Literal["helps", "not helps", "same"]
    why: str  # what it shows, for people
    group: str = "all"
    figure: str | None = None  # of the runs' figures; None: hits
    larger_is_better: bool = True


@dataclass(frozen=True)
class Comparison:
    """Is the second arm better than the first, and than all `controls`? The answer is corrected within the `family`."""

    first: str
    second: str
    group: str = "all"  # of classes, or a class; ignored where a figure is named
    controls: Sequence[str] = ()  # arms without what the second is to owe its effect to
    figure: str | None = None  # of the runs' figures; None: hits
    larger_is_better: bool = True
    family: str = "main"  # Holm's correction is over all answers of a family
    asked: bool = False  # whether the verdict is of it


@dataclass(frozen=True)
class Conclusion:
    comparisons: Sequence[Comparison] = ()
    choices: Mapping[str, str] = field(default_factory=dict)  # what was chosen on held-out images: arm
    pictures: Mapping[str, str] = field(default_factory=dict)  # name -> caption; see `Subject.picture`
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Result:
    figures: dict[str, float | None] = field(default_factory=dict)
    hits: dict[str, np.ndarray] = field(default_factory=dict)  # of each set of images: bool [n], in the file's order


@dataclass(frozen=True)
class Results:
    """The results of all arms for the same seeds, in the order of the seeds.

    `groups` name sets of labels: groups of classes and the classes themselves; `labels` are each set's, int64 [n].
    """

    seeds: Sequence[int]
    by_arm: dict[str, list[Result]]
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def hits(self, arm: str, split: str = TEST) -> np.ndarray:
        """Right or wrong by seed and image, bool [seeds, n]."""
        return np.stack([result.hits[split] for result in self.by_arm[arm]])

    def figures(self, arm: str, name: str) -> list[Any]:
        return [result.figures.get(name) for result in self.by_arm[arm]]

    def mean_figure(self, arm: str, name: str) -> float | None:
        values = [value for value in self.figures(arm, name) if value is not None]
        return float(np.mean(values)) if values else None

    def weights(self, group: str, split: str = TEST) -> np.ndarray:
        """What each image counts in the group's figure, float64 [n] of sum 1: the mean of its classes' shares."""
        labels = self.labels[split]
        chosen = np.isin(labels, self.groups[group])
        return chosen / (max(1, len(np.unique(labels[chosen]))) * np.bincount(labels)[labels])

    def mean(self, arm: str, group: str, split: str = TEST) -> float:
        """The mean recall of the group's classes, over all seeds."""
        return float(self.hits(arm, split).mean(0) @ self.weights(group, split))

    def choose(self, name: str, arms: Sequence[str]) -> str:
        """Add an arm: at each seed that one of these with the largest mean recall on held-out images, of equal ones the
        first. Returns which these were, for people.
        """
        weights = self.weights("all", HELD_OUT)
        best = np.stack([self.hits(arm, HELD_OUT) @ weights for arm in arms]).round(9).argmax(0)
        chosen = [arms[place] for place in best]
        self.by_arm[name] = [self.by_arm[arm][seed] for seed, arm in enumerate(chosen)]
        return ", ".join(f"{arm} ({count} of {len(chosen)} seeds)" for arm, count in Counter(chosen).most_common())

    def recalls(self, arm: str, groups: Iterable[str], split: str = TEST) -> list[str]:
        """The mean recall of each group in writing."""
        return [percent(self.mean(arm, group, split)) for group in groups]


class Subject(ABC):
    """A question, declared for a configuration and a folder."""

    title: str
    sets: tuple[str, ...] = (TEST,)  # of images that classifiers are judged on
    controls: Sequence[Control] = ()  # what must come out as it is known to be

    def __init__(self, config: Any, folder: Path, device: str | None = None) -> None:
        self.config, self.folder, self.device = config, folder, device
        self.jobs: dict[Path, Job] = {}  # by their places
        data = config.data
        what = "the images: training, held-out, held-back and test ones"
        self.add(PARTS, what, lambda place, _: make_parts(data, place), data.model_dump())
        self.declare()

    @abstractmethod
    def declare(self) -> None:
        """Add the jobs, which are made where an arm needs them, and the arms; the same whatever is done already."""

    @abstractmethod
    def conclude(self, results: Results) -> Conclusion:
        """What is compared, given the results of the seeds that are complete."""

    @property
    def arms(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.family]

    def labels(self) -> dict[str, np.ndarray]:
        """Of each set of images whose hits the arms return, int64 [n]; asked for once there are results."""
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
        return tuple(name for name in results.groups if name not in self.classes())

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

    def add(
        self,
        name: str,
        what: str,
        make: Callable[[Path, int], Any],
        key: Settings,  # of a path in it the job comes first
        family: str = "",
    ) -> Path:
        """Declare a job, or with a family an arm; returns its place."""
        needs: dict[Path, None] = {}

        def note(path: Path) -> str:
            inside = path.relative_to(self.folder)
            needs[self.folder.joinpath(*inside.parts[:2])] = None
            return inside.as_posix()

        text = json.dumps({"name": name, **key}, default=note, sort_keys=True)
        place = self.folder / "runs" / (slug(name) + OF_SEED) if family else self.place(name)
        self.jobs[place] = Job(name, what, make, text, tuple(needs), family, place)
        return place

    def training(
        self,
        name: str,
        what: str,
        recipe: Recipe,
        own: Settings = NOTHING,  # dotted keys of the recipe
        family: str = "",
        *,
        images: Path | None = None,  # None: the training images
        seed: int = SEED,  # of a job
        steps: int | None = None,  # None: the recipe's
        judge: Callable[[Path, int], Any] | None = None,  # (run, seed) -> outcome; None: an arm's is a classifier's
        key: Settings = NOTHING,  # what else defines it
    ) -> Path:
        """Declare a job that trains a run, or takes the one that `gan.run` names, or with a family an arm; returns the
        run's folder.
        """
        path = self.part(TRAIN) if images is None else images
        settings = {"data.path": path, **own}
        answer = judge or (lambda run, _: self.judge(run) if family else {})

        def make(place: Path, given: int) -> Any:
            run = place / "run"
            if recipe is not self.config.gan or recipe.run is None or steps is not None:
                self.train(run, recipe, settings, given if family else seed, steps)
            elif not run.is_symlink():
                require_trained_on(recipe.run, path)
                run.symlink_to(Path(recipe.run).resolve())
            return answer(run, given)

        own_key = {"own": settings, "seed": seed, "steps": steps, **key}
        return self.add(name, what, make, recipe.key() | own_key, family) / "run"

    def generators(self, images: Path | None = None) -> tuple[Path, Path]:
        """The generator of the training images, or of others, and one as it is before its first step: their runs."""
        gan, own = self.config.gan, {} if images else {"data.val_path": self.part(HELD_OUT)}
        still = {f"{network}_optimizer.lr": STILL for network in ("generator", "discriminator")}
        trained = self.training(GENERATOR, f"training the generator: {gan.config or gan.run}", gan, own, images=images)
        return trained, self.training(UNTRAINED, UNTRAINED, gan, own | still, images=images, steps=1)

    def bases(
        self,
        family: str,
        images: Path | None = None,
        named: Callable[[str], str] = str,  # a way -> the arm's name
        known: Callable[..., np.ndarray] | None = None,
    ) -> None:
        """Declare arms of what is cheap without the other model. `known`: (labels, seed=) -> the training images whose
        labels are known, which `images` holds; None: all.
        """
        recipe = self.config.classifier
        model = recipe.settings().model
        for way, (what, features, learn) in ways(model.changed(weights=None)).items():
            self.untrained(named(way), what, features, learn, family, known, {**recipe.key(), "known": images})
        if model.weights is not None:
            what = "the recipe without its weights"
            self.training(named("from scratch"), what, recipe, {"model.weights": None}, family, images=images)

    def untrained(
        self,
        name: str,
        what: str,
        features: Features,
        learn: Learner,
        family: str,
        known: Callable[..., np.ndarray] | None,  # as for `bases`
        key: Settings,
    ) -> None:
        """Declare an arm that learns from features of a network that is not trained for it."""

        def make(_place: Path, seed: int) -> Result:
            asked = {part: self.part(part) for part in self.sets}
            return scored(hits_of(features, learn, self.part(TRAIN), known and partial(known, seed=seed), asked))

        self.add(name, what, make, {**key, "images": self.part(TRAIN)}, family)

    def selector(self, recipe: Recipe, own: Settings) -> Path:
        """The classifier of the training images by which samples are selected: its run."""
        return self.training(SELECTOR, "training the classifier that selects samples", recipe, own, seed=SELECTOR_SEED)

    # --- what jobs and arms do

    def draw(
        self, files: Mapping[Path, Sequence[int]], generator: Path, drawing: Drawing, seed: int, **how: Any
    ) -> list[float | None]:
        """Files of samples of a generator's run, selected by the job SELECTOR; see `draw_samples`."""
        device = choose_device(self.device)
        if drawing.selects:
            classifier = classifier_from(load(resolve(str(self.place(SELECTOR) / "run"))), device)
            how["rule"] = Selector(drawing, classifier, self.part(TRAIN), self.part(HELD_OUT))
        checkpoints = last_checkpoints(generator, drawing.checkpoints)
        return draw_samples(files, checkpoints, self.classes(), seed=seed, drawing=drawing, device=device, **how)

    def train(self, folder: Path, recipe: Recipe, overrides: Settings, seed: int, max_steps: int | None = None) -> None:
        """Train a run of a recipe to its end, or resume it; what it prints goes into FOLDER.log. Nothing where it has
        ended. Raises StoppedBySignal once it has saved, and what training raises.
        """
        if ended(folder, max_steps):
            return
        grids = 10**9 if recipe is self.config.gan else 0  # at the end alone, or none
        quiet = {"log.tensorboard": False, "log.samples_every": grids, "data.val_path": None}
        paths = {key: str(of_seed(value, seed)) for key, value in overrides.items() if isinstance(value, Path)}
        given = tokens({**quiet, **recipe.overrides, **overrides, **paths, "seed": seed})
        folder.mkdir(parents=True, exist_ok=True)
        with (
            folder.with_name(f"{folder.name}.log").open("a", encoding="utf-8") as log,
            redirect_stdout(log),
            redirect_stderr(log),
        ):
            train(str(recipe.file), given, run_dir=str(folder), device=self.device, max_steps=max_steps)

    def judge(self, run: Path) -> Result:
        """The answers of a run's average classifier to every image of the sets, and accuracies."""
        checkpoint, hits = load(resolve(str(run))), {}
        classifier = classifier_from(checkpoint, choose_device(self.device))
        for name in self.sets:
            with dataset_for_model(self.part(name), checkpoint) as reader:
                check_classes(classifier, reader)
                hits[name] = answers_of(classifier, reader, classify(classifier, reader, batch_size=250)).hits.numpy()
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


def ended(folder: Path, max_steps: int | None = None) -> bool:
    """Whether a run's training came to its end, or to the step where it was to stop."""
    file = folder / "status.json"
    status = json.loads(file.read_text()) if file.is_file() else {"state": None}
    return status["state"] == "finished" or (max_steps is not None and status.get("step") == max_steps)


def require_trained_on(run: str, images: Path) -> None:
    """Raise UserError unless a run was trained on exactly these images: another may have seen those that judge."""
    checkpoint = load(resolve(run))
    with Dataset(images) as reader:
        wanted = reader.meta.content_hash
    if (checkpoint.get("data") or {}).get("content_hash") != wanted:
        raise UserError(
            f"{run}: was not trained on this study's training images; train it with --data.path {images}, or leave "
            "gan.run out"
        )
