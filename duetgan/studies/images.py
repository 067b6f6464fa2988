"""The settings that every study has: a recipe configs/study_*.yaml sets only what differs from the
defaults here. And a study's images: training, held-out and held-back ones of one file, drawn by a
seed, and the test images.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from annotated_types import Ge, Interval

from duetgan.data.lmdb.format import Meta
from duetgan.data.packing.pack import pack
from duetgan.data.reading.dataset import Dataset
from duetgan.data.sources import open_source
from duetgan.inference.dataset import write_labelled
from duetgan.training.base.config import RunConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.build import with_value
from duetgan.utils.config.model import Config, InnerShare, NonNegativeInt, PositiveInt
from duetgan.utils.config.recipes import recipe_file
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError, refuse, require_same_classes
from duetgan.utils.seeding import numpy_generator
from duetgan.utils.text import listed

Tail = Annotated[float, Interval(ge=1, le=1e6)]


class StudyData(Config):
    """The images. The study divides those of `path` into training, held-out and held-back ones and
    leaves out the rest; the test images stay as they are.
    """

    path: str | None = None  # packed training images
    test_path: str | None = None  # packed test images
    # instead: a named set, which the study packs
    source: Literal["sample", "fashion-mnist", "cifar10"] | None = None
    root: str | None = None  # folder of its files
    size: Annotated[int, Ge(4)] | None = None  # px to which a source is packed
    held_out: InnerShare = 0.1  # of each class: choices are made on these, never on test images
    held_back: InnerShare = 0.3  # of each class at least: only a control sees them
    # training images of the largest class at most; null: all that are left
    largest: PositiveInt | None = None
    # largest class over rarest: classes fall off exponentially in their order; 1: as they are
    long_tail: Tail = 1.0
    seed: int = 0  # of the division

    def check(self) -> None:
        if self.held_out + self.held_back >= 1:
            raise UserError(
                "held_out and held_back leave no image to train on; make their sum less than 1"
            )


class Recipe(Config):
    """What is trained, and how it differs from a recipe of configs/."""

    config: str = ""  # a recipe for train.py
    overrides: dict[str, Any] = {}  # its keys, dotted: optimizer.lr: 0.1
    # a run that was trained on exactly this study's training images; nothing is trained then
    run: str | None = None

    @property
    def file(self) -> Path:
        """The recipe's file; those of configs/ are found from any folder."""
        return Path(recipe_file(self.config))

    def key(self) -> dict[str, Any]:
        """What defines a training: what the recipe says, not only its name. Raises UserError if it
        cannot be read.
        """
        return self.model_dump() | {
            "recipe": json.dumps(read_yaml(self.file), sort_keys=True) if self.config else ""
        }

    def settings(self) -> RunConfig:
        """Those of its run. Raises UserError for what is wrong in them."""
        return build_run_config(read_yaml(self.file), tokens(self.overrides), str(self.file))


class StudyConfig(Config):
    """The keys every study has."""

    seeds: PositiveInt = 5  # trainings of each arm
    first_seed: NonNegativeInt = 0
    # arms to try, by patterns of their names: "*readout of D"; what they are compared with comes
    # along; none: all
    only: list[str] = []
    # the checkpoints of arms that are done; without them a run takes kilobytes
    keep_runs: bool = False
    data: StudyData = StudyData()
    classifier: Recipe = Recipe()
    gan: Recipe = Recipe()
    # keys that --quick sets, dotted; a mapping is merged into what is there
    quick: dict[str, Any] = {}

    def check(self) -> None:
        data = self.data
        refuse(
            (
                (data.source is None) == (data.path is None),
                "data: give either source (a named set) or path and test_path (packed files)",
            ),
            (
                (data.path is None) != (data.test_path is None),
                "data.path and data.test_path: give both, the packed training and test images",
            ),
        )
        for name, recipe in vars(self).items():
            if isinstance(recipe, Recipe) and recipe.run is not None and name != "gan":
                raise UserError(f"{name}.run: only gan.run may name a trained run; leave it out")
        for name, recipe in (("classifier", self.classifier), ("gan", self.gan)):
            if not recipe.config and recipe.run is None:
                raise UserError(
                    f"{name}.config is not set; name a recipe, such as configs/quickstart_{name}.yaml"
                )


def quickened(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of a recipe with what its `quick` sets. Raises UserError where it sets nothing."""
    quick = tree.get("quick")
    if not isinstance(quick, dict) or not quick:
        raise UserError(
            "the recipe has no section quick; leave --quick out, or name the keys that it is to set there"
        )
    for key, value in quick.items():
        tree = with_value(tree, str(key), value)
    return tree


def tokens(overrides: dict[str, Any]) -> list[str]:
    """Dotted keys as train.py's command line takes them."""
    return [f"--{key}={_text(value)}" for key, value in overrides.items()]


def _text(value: Any) -> str:
    """A value as YAML on one line. What YAML reads as a boolean is the word again, which fits
    `mode: off` as well.
    """
    if isinstance(value, str):  # a key of text takes it as it is
        return value
    if isinstance(value, bool):
        return "on" if value else "off"
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
    )


PARTS = "parts"  # the job
TRAIN, HELD_OUT, HELD_BACK, TEST = "train", "held_out", "held_back", "test"
ROUNDING = 1e-6  # a power that is a whole number may come out a little below it
EVEN_SOURCE = 10**6  # images of each class: those of a named source are even
EVEN = 1.5  # largest class over rarest, up to which classes count as equally large


def make_parts(data: StudyData, place: Path) -> dict[str, Any]:
    """Make all four files; returns `classes` and each part's `counts` by class. Raises UserError
    for images without classes, of other ones, or of sizes of their own.
    """
    train, test = _sources(data, place)
    with Dataset(train) as reader, Dataset(test) as tested:
        if len(reader.classes) < 2:
            raise UserError(
                f"{train}: a study needs images of two classes or more; pack class folders"
            )
        require_same_classes(
            str(test), tested.classes, str(train), reader.classes, "pack both from the same folders"
        )
        for each in (reader, tested):
            each.spec.need_plain("a study")
            if not each.resolution:
                raise UserError(
                    f"{each.path}: its images have sizes of their own; pack with --size N"
                )
        if untested := [
            name
            for name, count in zip(tested.classes, tested.meta.histogram, strict=True)
            if not count
        ]:
            raise UserError(
                f"{test}: has no image of {listed(untested)}; add some, or leave the class out of both files"
            )
        chosen = divide(usable(reader, tested), reader.labels(), len(reader.classes), data)
        metas = {
            name: write_subset(reader, rows, place / f"{name}.lmdb")
            for name, rows in chosen.items()
        }
        metas[TEST] = write_subset(tested, np.arange(len(tested)), place / f"{TEST}.lmdb")
    return {
        "classes": reader.classes,
        "counts": {name: list(meta.histogram) for name, meta in metas.items()},
    }


def _sources(data: StudyData, place: Path) -> tuple[Path, Path]:
    """The packed training and test images; a source is packed first."""
    if data.path is not None and data.test_path is not None:
        return Path(data.path), Path(data.test_path)
    files = place / "whole-train.lmdb", place / "whole-test.lmdb"
    for file, split in zip(files, ("train", "test"), strict=True):
        with open_source(str(data.source), split=split, root=data.root) as source:
            pack(source, file, size=data.size, overwrite=True, duplicates=False)
    return files


def usable(reader: Dataset, tested: Dataset) -> np.ndarray:
    """Records of the training file that are no test image's twin, pixel for pixel, and no earlier
    record's.
    """
    digests = reader.signatures()["digest"]
    first = np.zeros(len(digests), bool)
    first[np.unique(digests, return_index=True)[1]] = True
    return np.flatnonzero(first & ~np.isin(digests, tested.signatures()["digest"]))


def divide(
    records: np.ndarray, labels: np.ndarray, classes: int, data: StudyData
) -> dict[str, np.ndarray]:
    """Which of these records are in which part, ascending: of each class, in the order of the key
    (seed, "study", class), first the held-out ones, then as many training ones as `training_counts`
    says; all others are held back.
    Raises UserError for a class that is too small.
    """
    by_class = [records[labels[records] == label] for label in range(classes)]
    order = [
        numpy_generator(data.seed, "study", label).permutation(rows)
        for label, rows in enumerate(by_class)
    ]
    held, left = _shares([len(rows) for rows in order], data)
    wanted = training_counts(left, data)
    if min(wanted) < 1 or any(have < want for have, want in zip(left, wanted, strict=True)):
        small = int(np.argmin(left))
        raise UserError(
            f"class {small} has {len(order[small])} images that are not among the test images, too few to divide; add "
            "some, or lower data.held_out and data.held_back"
        )
    drawn = [
        np.split(rows, [first, first + count])
        for rows, first, count in zip(order, held, wanted, strict=True)
    ]
    parts = [np.sort(np.concatenate(rows)) for rows in zip(*drawn, strict=True)]
    return dict(zip((HELD_OUT, TRAIN, HELD_BACK), parts, strict=True))


def _shares(counts: Sequence[int], data: StudyData) -> tuple[list[int], list[int]]:
    """Of each class how many images are held out, and how many are left for training at most."""
    held = [max(1, round(data.held_out * count)) for count in counts]
    return held, [
        int((1 - data.held_back) * count) - kept for count, kept in zip(counts, held, strict=True)
    ]


def expected_counts(data: StudyData) -> list[int]:
    """Training images of each class, before anything is packed; but for twins that are left out."""
    if data.path is None:
        return training_counts([EVEN_SOURCE] * 10, data.changed(largest=None))
    with Dataset(data.path) as reader:
        return training_counts(_shares(reader.meta.histogram, data)[1], data)


def training_counts(available: Sequence[int], data: StudyData) -> list[int]:
    """Training images of each class: all, or `largest` at most. With a long tail of K classes, at
    least one: of class k largest * ratio ** (-k / (K - 1)), rounded down (Cui et al. 2019,
    "Class-Balanced Loss Based on Effective Number of Samples", section 5.1).
    """
    largest = min(max(available), data.largest or max(available))
    if data.long_tail == 1:
        return [min(count, largest) for count in available]
    largest = min(largest, *available[:1])
    steps = np.arange(len(available)) / max(1, len(available) - 1)
    tail = np.floor(largest * data.long_tail**-steps + ROUNDING).astype(int).tolist()
    return [min(count, max(1, wanted)) for count, wanted in zip(available, tail, strict=True)]


def write_subset(reader: Dataset, records: Sequence[int] | np.ndarray, out: Path) -> Meta:
    """Copy records, as they are read, into a file of raw images; one that is there is replaced."""
    source = f"{len(records)} images of {reader.meta.source}"
    images = (reader, records, reader.labels()[records])
    return write_labelled(
        out, [images], reader.classes, source=source, encoding="raw", overwrite=True
    )


def write_first(source: Path, counts: Sequence[int], out: Path, seed: int) -> None:
    """Write so many images of each class of a file: the first of a permutation, key (seed, "study",
    "real", class).
    """
    with Dataset(source) as reader:
        rows = [np.flatnonzero(reader.labels() == label) for label in range(len(counts))]
        order = [
            numpy_generator(seed, "study", "real", label).permutation(of)
            for label, of in enumerate(rows)
        ]
        chosen = [of[:count] for of, count in zip(order, counts, strict=True)]
        write_subset(reader, np.sort(np.concatenate(chosen)), out)


def groups_of(counts: Sequence[int], classes: Sequence[str]) -> dict[str, list[int]]:
    """Sets of labels by name: `all`; for classes of unequal size `many`, `medium` and `few`, a
    third of the classes each by the number of training images (`medium` takes what does not
    divide); then every class by its name, "class NAME" where a group has it.
    """
    groups = {"all": list(range(len(counts)))}
    order = sorted(groups["all"], key=lambda label: (-counts[label], label))
    third = len(order) // 3
    if third and not even(counts):
        groups |= {
            "many": order[:third],
            "medium": order[third : len(order) - third],
            "few": order[-third:],
        }
    return groups | {
        f"class {name}" if name in groups else name: [label] for label, name in enumerate(classes)
    }


def even(counts: Sequence[int]) -> bool:
    """Whether classes count as equally large."""
    return max(counts) <= EVEN * min(counts)
