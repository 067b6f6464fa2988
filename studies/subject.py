"""What a study is made of: jobs that are done once, arms that are run for every seed, controls, comparisons; and what
all subjects share: a folder with the images, trainings, and how classifiers are judged.
"""

import json
import re
from abc import ABC, abstractmethod
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
from duetgan.studies.images import HELD_OUT, PARTS, TEST, TRAIN, Recipe, groups_of, make_parts, tokens
from duetgan.studies.samples import Drawing, Selector, draw_samples, last_checkpoints
from duetgan.training.engine.run import train
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.collectives import choose_device
from duetgan.utils.errors import UserError

GENERATOR, UNTRAINED, SELECTOR = "generator", "untrained generator", "selector"  # jobs
SELECTOR_SEED = 1000  # beyond the arms' seeds: no arm is trained like the selector
SEED = 0  # of the generators and of what they draw
STILL = 1e-12  # a learning rate at which one step changes nothing

Settings = Mapping[str, Any]  # ready for JSON


@dataclass(frozen=True)
class Job:
    """Something that arms share and that is made once: image files, a generator, a file of samples. Or an arm: one row
    of the table, run once for every seed.
    """

    name: str
    what: str  # a line for people
    # (folder, which may hold what an interrupted start left) -> outcome; of an arm (folder, seed) -> Result
    make: Callable[..., Any]
    key: Settings = field(default_factory=dict)  # what defines it, beside those that it needs
    needs: tuple[str, ...] = ()  # jobs that come before it
    family: str = ""  # how subjects group their arms: "classic", "synthetic", "control"


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
    """Is the second arm better than the first? The answer is corrected within the `family`."""

    first: str
    second: str
    group: str = "all"  # of classes, or a class; ignored where a figure is named
    figure: str | None = None  # of the runs' figures; None: hits
    larger_is_better: bool = True
    family: str = "main"  # Holm's correction is over all answers of a family
    asked: bool = False  # whether the verdict is of it


@dataclass(frozen=True)
class Conclusion:
    comparisons: Sequence[Comparison] = ()
    choices: Mapping[str, str] = field(default_factory=dict)  # what was chosen on held-out images: arm
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = ()  # heading, header, rows
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
    by_arm: Mapping[str, Sequence[Result]]
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

    def recalls(self, arm: str, groups: Iterable[str], split: str = TEST) -> list[str]:
        """The mean recall of each group in writing."""
        return [percent(self.mean(arm, group, split)) for group in groups]


class Subject(ABC):
    """A question, declared for a configuration and a folder."""

    title: str
    sets: tuple[str, ...] = (TEST,)  # of images that classifiers are judged on

    def __init__(self, config: Any, folder: Path, device: str | None = None) -> None:
        self.config, self.folder, self.device = config, folder, device

    @abstractmethod
    def jobs(self) -> list[Job]:
        """What arms share."""

    @abstractmethod
    def arms(self) -> list[Job]:
        """The rows of the table; the same whatever is done already."""

    @abstractmethod
    def controls(self) -> list[Control]:
        """What must come out as it is known to be."""

    @abstractmethod
    def conclude(self, results: Results) -> Conclusion:
        """What is compared, given the results of the seeds that are complete."""

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
        return self.folder / "jobs" / slug(job)

    def part(self, name: str) -> Path:
        """The packed file of a part of the images."""
        return self.place(PARTS) / f"{name}.lmdb"

    def picture(self, name: str) -> Path:
        """The file of a picture; the page shows those that are there."""
        return self.folder / "pictures" / f"{slug(name)}.png"

    def outcome(self, job: str) -> dict[str, Any]:
        """What a job came to; empty where it is not done."""
        file = self.folder / "jobs" / f"{slug(job)}.json"
        outcome: dict[str, Any] = json.loads(file.read_text())["told"] if file.is_file() else {}
        return outcome

    def run_of(self, job: str) -> str:
        return self.outcome(job).get("run") or str(self.place(job) / "run")

    def classes(self) -> list[str]:
        """Of the images; once they are divided."""
        return list(self.outcome(PARTS)["classes"])

    def counts(self, part: str) -> list[int]:
        """Images of each class in a part; once they are divided."""
        return list(self.outcome(PARTS)["counts"][part])

    def recipe_key(self, more: Settings | None = None) -> dict[str, Any]:
        """What defines a training by the classifier's recipe."""
        recipe = self.config.classifier
        return {"recipe": recipe.text(), "overrides": {**recipe.overrides, **(more or {})}}

    # --- jobs and arms

    def parts_job(self) -> Job:
        data = self.config.data
        what = "the images: training, held-out, held-back and test ones"
        return Job(PARTS, what, partial(make_parts, data), data.model_dump())

    def training(
        self,
        name: str,
        recipe: Recipe,
        images: Path,
        *,
        seed: int,
        what: str,
        key: Settings,
        needs: tuple[str, ...] = (PARTS,),
        max_steps: int | None = None,
        more: Settings = MappingProxyType({}),  # dotted keys of the recipe
    ) -> Job:
        """A job that trains a run, or takes the one that `gan.run` names."""

        def make(place: Path) -> Settings:
            if recipe is self.config.gan and recipe.run is not None and max_steps is None:
                require_trained_on(recipe.run, images)
                return {"run": str(Path(recipe.run).resolve())}
            self.train(place / "run", recipe, {"data.path": str(images), **more}, seed, max_steps)
            return {"run": None}

        return Job(name, what, make, key, needs)

    def generators(self) -> list[Job]:
        """The generator of the training images, and one as it is before its first step."""
        gan, of = self.config.gan, partial(self.training, recipe=self.config.gan, images=self.part(TRAIN), seed=SEED)
        more = {"data.val_path": str(self.part(HELD_OUT))}
        still = {f"{network}_optimizer.lr": STILL for network in ("generator", "discriminator")}
        what, key = f"training the generator: {gan.config or gan.run}", gan.key()
        return [
            of(GENERATOR, what=what, key=key | {"untrained": False}, more=more),
            of(UNTRAINED, what=UNTRAINED, key=key | {"untrained": True}, more=more | still, max_steps=1),
        ]

    def selector(self, recipe: Recipe, key: Settings, more: Settings) -> Job:
        """The classifier of the training images by which samples are selected."""
        how: dict[str, Any] = {"what": "training the classifier that selects samples", "key": key, "more": more}
        return self.training(SELECTOR, recipe, self.part(TRAIN), seed=SELECTOR_SEED, **how)

    # --- what jobs and arms do

    def draw(
        self, files: Mapping[Path, Sequence[int]], generator: str, drawing: Drawing, seed: int, **how: Any
    ) -> list[float | None]:
        """Files of samples of a generator's job, selected by the job SELECTOR; see `draw_samples`."""
        device = choose_device(self.device)
        if drawing.selects:
            classifier = classifier_from(load(resolve(self.run_of(SELECTOR))), device)
            how["rule"] = Selector(drawing, classifier, self.part(TRAIN), self.part(HELD_OUT))
        checkpoints = last_checkpoints(Path(self.run_of(generator)), drawing.checkpoints)
        return draw_samples(files, checkpoints, self.classes(), seed=seed, drawing=drawing, device=device, **how)

    def train(self, folder: Path, recipe: Recipe, overrides: Settings, seed: int, max_steps: int | None = None) -> None:
        """Train a run of a recipe to its end, or resume it; what it prints goes into FOLDER.log. Nothing where it has
        ended. Raises StoppedBySignal once it has saved, and what training raises.
        """
        if ended(folder, max_steps):
            return
        grids = 10**9 if recipe is self.config.gan else 0  # at the end alone, or none
        quiet = {"log.tensorboard": False, "log.samples_every": grids, "data.val_path": None}
        given = tokens({**quiet, **recipe.overrides, **overrides, "seed": seed})
        folder.mkdir(parents=True, exist_ok=True)
        with (
            folder.with_name(f"{folder.name}.log").open("a", encoding="utf-8") as log,
            redirect_stdout(log),
            redirect_stderr(log),
        ):
            train(str(recipe.file), given, run_dir=str(folder), device=self.device, max_steps=max_steps)

    def judge(self, folder: Path) -> Result:
        """The answers of a run's average classifier to every image of the sets, and accuracies."""
        checkpoint, hits = load(resolve(str(folder))), {}
        classifier = classifier_from(checkpoint, choose_device(self.device))
        for name in self.sets:
            with dataset_for_model(self.part(name), checkpoint) as reader:
                check_classes(classifier, reader)
                hits[name] = answers_of(classifier, reader, classify(classifier, reader, batch_size=250)).hits.numpy()
        return Result({f"{name}_accuracy": float(right.mean()) for name, right in hits.items()}, hits)

    def learn(self, images: Path, more: Settings, folder: Path, seed: int) -> Result:
        """Train the recipe's classifier on images, and judge it."""
        self.train(folder, self.config.classifier, {"data.path": str(images), **more}, seed)
        return self.judge(folder)


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
