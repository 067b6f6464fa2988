"""What a study is made of: things that are made once, arms that are run for every seed, controls, comparisons."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

Settings = Mapping[str, Any]  # ready for JSON
Expected = Literal["helps", "not helps", "same"]


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    figures: dict[str, float | None] = field(default_factory=dict)
    hits: dict[str, np.ndarray] = field(default_factory=dict)  # of each set of images: bool [n], in the file's order


@dataclass(frozen=True)
class Job:
    """Something that arms share and that is made once: image files, a generator, a file of samples."""

    name: str
    make: Callable[[Path], Settings]  # into a folder that may hold what an interrupted start left; returns what to tell
    key: Settings = field(default_factory=dict)  # what defines it
    needs: tuple[str, ...] = ()  # jobs that come before it
    what: str = ""  # for people; empty: the name


@dataclass(frozen=True)
class Arm:
    """One row of the table, run once for every seed."""

    name: str
    what: str  # a line for people
    make: Callable[[Path, int], Result]  # (run folder, seed): train, or resume, and judge
    key: Settings = field(default_factory=dict)  # what defines it, beside its jobs'
    needs: tuple[str, ...] = ()  # jobs
    family: str = ""  # how subjects group their arms: "classic", "synthetic", "control"


@dataclass(frozen=True)
class Control:
    """A comparison whose answer is known; where it comes out otherwise the study is void.

    `helps`: the arm must be better than `against`, significantly; `not helps`: it must not; `same`: neither.
    """

    arm: str
    against: str
    expected: Expected
    why: str  # what it shows, for people
    group: str = "all"
    figure: str | None = None  # of the runs' figures; None: hits
    larger_is_better: bool = True


@dataclass(frozen=True)
class Comparison:
    """Is the second arm better than the first? One answer for each group, corrected within the `family`."""

    first: str
    second: str
    groups: tuple[str, ...] = ("all",)  # of classes, or classes; ignored where a figure is named
    figure: str | None = None  # of the runs' figures; None: hits
    larger_is_better: bool = True
    family: str = "main"  # Holm's correction is over all answers of a family


@dataclass(frozen=True)
class Picture:
    """An image of the page."""

    file: str  # within the study's folder
    caption: str


@dataclass(frozen=True)
class Conclusion:
    """What a subject makes of the results so far."""

    comparisons: Sequence[Comparison] = ()
    choices: Mapping[str, str] = field(default_factory=dict)  # what was chosen on held-out images: arm
    asked: Sequence[Comparison] = ()  # those of `comparisons` that the verdict is of
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = ()  # heading, header, rows
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()


class Subject(ABC):
    """A question, declared for a configuration and a folder."""

    title: str

    @abstractmethod
    def jobs(self) -> list[Job]:
        """What arms share."""

    @abstractmethod
    def arms(self) -> list[Arm]:
        """The rows of the table; the same whatever is done already."""

    @abstractmethod
    def controls(self) -> list[Control]:
        """What must come out as it is known to be."""

    @abstractmethod
    def conclude(self, results: "Results") -> Conclusion:
        """What is compared, given the results of the seeds that are complete."""

    def labels(self) -> dict[str, np.ndarray]:
        """Of each set of images whose hits the arms return, int64 [n]; asked for once there are results."""
        return {}

    def groups(self) -> dict[str, list[int]]:
        """Sets of labels by name, see `studies.verdict.groups_of`; asked for once there are results."""
        return {"all": []}


@dataclass(frozen=True)
class Results:
    """The results of all arms for the same seeds, in the order of the seeds.

    `groups` name sets of labels: groups of classes and the classes themselves; `labels` are each set's, int64 [n].
    """

    seeds: Sequence[int]
    by_arm: Mapping[str, Sequence[Result]]
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def hits(self, arm: str, split: str = "test") -> np.ndarray:
        """Right or wrong by seed and image, bool [seeds, n]."""
        return np.stack([result.hits[split] for result in self.by_arm[arm]])

    def figures(self, arm: str, name: str) -> list[float | None]:
        """One figure by seed."""
        return [result.figures.get(name) for result in self.by_arm[arm]]

    def weights(self, group: str, split: str = "test") -> np.ndarray:
        """What each image counts in the group's figure, float64 [n] of sum 1: the mean of its classes' shares."""
        labels = self.labels[split]
        counts = np.bincount(labels, minlength=max(self.groups[group]) + 1)
        there = [label for label in self.groups[group] if counts[label]]
        weights = np.zeros(len(labels))
        for label in there:
            weights[labels == label] = 1 / (len(there) * counts[label])
        return weights

    def mean(self, arm: str, group: str, split: str = "test") -> float:
        """The mean recall of the group's classes, over all seeds."""
        return float(self.hits(arm, split).mean(0) @ self.weights(group, split))
