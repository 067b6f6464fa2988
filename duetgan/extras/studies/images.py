"""The config keys that all studies have, and the division of a study's images.

A recipe configs/study_*.yaml sets only the keys that differ from the defaults here. The images of
one file are divided at random into training images, held-out images (on which choices are made),
and held-back images (which only controls use). The test images are another file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from annotated_types import Ge, Interval

from duetgan.data.lmdb.format import Meta
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source
from duetgan.data.reading.dataset import Dataset
from duetgan.inference.dataset import write_labelled
from duetgan.metrics.protocol import Document
from duetgan.training.base.config import RunConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.build import with_value
from duetgan.utils.config.model import Config, InnerFraction, PositiveInt
from duetgan.utils.config.recipes import recipe_file
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError, refuse, require_same_classes
from duetgan.utils.seeding import numpy_generator
from duetgan.utils.text import listed

Tail = Annotated[float, Interval(ge=1, le=1e6)]


class StudyData(Config):
    """The images of a study: two packed files, or the name of a data set."""

    # packed images, which are divided into training, held-out and held-back images
    path: str | None = None
    test_path: str | None = None  # packed test images, which are not divided
    # name of a data set that the study packs, instead of path and test_path
    source: Literal["sample", "fashion-mnist", "cifar10"] | None = None
    root: str | None = None  # folder of that data set's files
    size: Annotated[int, Ge(4)] | None = None  # side in px at which that data set is packed
    held_out: InnerFraction = 0.1  # fraction of each class on which choices are made
    held_back: InnerFraction = 0.3  # smallest fraction of each class that only controls use
    # largest number of training images of a class; null: no limit
    largest: PositiveInt | None = None
    # ratio of the largest to the rarest class; sizes fall exponentially in the order of the
    # classes; 1: sizes stay as they are
    long_tail: Tail = 1.0
    seed: int = 0  # seed of the division

    def check(self) -> None:
        if self.held_out + self.held_back >= 1:
            raise UserError(
                "held_out and held_back leave no image to train on; make their sum less than 1"
            )


class Recipe(Config):
    """A recipe of configs/ with overrides."""

    config: str = ""  # recipe for train.py
    overrides: dict[str, Any] = {}  # dotted key -> value, such as optimizer.lr: 0.1

    @property
    def file(self) -> Path:
        """The path of the recipe, which is found in configs/ from any working directory."""
        return Path(recipe_file(self.config))

    def settings(self) -> RunConfig:
        """Return the config of a run of this recipe; raise UserError if it is invalid."""
        return build_run_config(read_yaml(self.file), tokens(self.overrides), str(self.file))


class StudyConfig(Config):
    """The config keys that all studies have."""

    seeds: PositiveInt = 5  # trainings of each arm, with successive seeds
    data: StudyData = StudyData()
    classifier: Recipe = Recipe()
    gan: Recipe = Recipe()
    # dotted key -> value that --quick sets; a mapping is merged into an existing one
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
        for name, recipe in (("classifier", self.classifier), ("gan", self.gan)):
            if not recipe.config:
                raise UserError(
                    f"{name}.config is not set; name a recipe, such as configs/quickstart_{name}.yaml"
                )

    def key(self) -> Document:
        """Return the settings that identify a study's runs, with the content of the recipes.

        Raises UserError if a recipe cannot be read.
        """
        recipes = {name: read_yaml(part.file) for name, part in self if isinstance(part, Recipe)}
        return self.model_dump(exclude={"seeds", "quick"}) | {"recipes": recipes}


def quickened(tree: Document) -> Document:
    """Apply the section `quick` of a study's recipe to the recipe `tree`, and return the result.

    Raises UserError if the recipe has no such section.
    """
    quick = tree.get("quick")
    if not isinstance(quick, dict) or not quick:
        raise UserError(
            "the recipe has no section quick; leave --quick out, or name the keys that it is to set there"
        )
    for key, value in quick.items():
        tree = with_value(tree, str(key), value)
    return tree


def tokens(overrides: Mapping[str, object]) -> list[str]:
    """Return `overrides`, a dict from dotted key to value, as options of train.py."""
    return [f"--{key}={_text(value)}" for key, value in overrides.items()]


def _text(value: object) -> str:
    """Return a value as YAML on one line.

    A bool becomes `on` or `off`: some keys have the text `off` as a value, which YAML reads as a
    bool.
    """
    if isinstance(value, str):  # Options of type str take the text unquoted.
        return value
    if isinstance(value, bool):
        return "on" if value else "off"
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n...\n").strip()


PARTS = "parts"  # name of the job that divides the images
TRAIN, TEST = "train", "test"
HELD_OUT, HELD_BACK = "held_out", "held_back"
ROUNDING = 1e-6  # added before rounding down, because powers may be computed slightly too small
EVEN_SOURCE = 10**6  # assumed size of each class of a named data set; these are equally large
EVEN = 1.5  # largest ratio of class sizes at which classes count as equally large


def make_parts(data: StudyData, place: Path) -> Document:
    """Write packed files of the training, held-out, held-back and test images into `place`.

    Returns a dict with `classes`, the class names, and `counts`, a dict from the name of a part to
    the number of images of each class. Raises UserError if there are fewer than two classes, if
    training and test images have different classes, if a class has no test image or too few images
    to divide, or if images differ in size.
    """
    train, test = _sources(data, place)
    with Dataset(train) as dataset, Dataset(test) as test_dataset:
        if len(dataset.classes) < 2:
            raise UserError(
                f"{train}: a study needs images of two classes or more; pack class folders"
            )
        require_same_classes(
            str(test),
            test_dataset.classes,
            str(train),
            dataset.classes,
            "pack both from the same folders",
        )
        for part in (dataset, test_dataset):
            part.spec.need_plain("a study")
            if not part.resolution:
                raise UserError(
                    f"{part.path}: its images have sizes of their own; pack with --size N"
                )
        counts = zip(test_dataset.classes, test_dataset.meta.histogram, strict=True)
        if missing := [name for name, count in counts if not count]:
            raise UserError(
                f"{test}: has no image of {listed(missing)}; add some, or leave the class out of both files"
            )
        records = usable(dataset, test_dataset)
        chosen = divide(records, dataset.labels(), len(dataset.classes), data)
        metas = {
            name: write_subset(dataset, rows, place / f"{name}.lmdb")
            for name, rows in chosen.items()
        }
        all_records = np.arange(len(test_dataset))
        metas[TEST] = write_subset(test_dataset, all_records, place / f"{TEST}.lmdb")
    return {
        "classes": dataset.classes,
        "counts": {name: list(meta.histogram) for name, meta in metas.items()},
    }


def _sources(data: StudyData, place: Path) -> tuple[Path, Path]:
    """Return the packed files of the training and the test images.

    If the study names a data set, it is packed into `place` first.
    """
    if data.path is not None and data.test_path is not None:
        return Path(data.path), Path(data.test_path)
    files = place / "whole-train.lmdb", place / "whole-test.lmdb"
    for file, split in zip(files, ("train", "test"), strict=True):
        with open_source(str(data.source), split=split, root=data.root) as source:
            pack(source, file, size=data.size, overwrite=True, duplicates=False)
    return files


def usable(dataset: Dataset, test_dataset: Dataset) -> np.ndarray:
    """Return the indices, ascending, of a data set's images that are not in the test set.

    Of images that are equal pixel for pixel, only the first is returned.
    """
    digests = dataset.signatures()["digest"]
    first = np.zeros(len(digests), bool)
    first[np.unique(digests, return_index=True)[1]] = True
    return np.flatnonzero(first & ~np.isin(digests, test_dataset.signatures()["digest"]))


def divide(
    records: np.ndarray, labels: np.ndarray, classes: int, data: StudyData
) -> dict[str, np.ndarray]:
    """Divide images into held-out, training and held-back ones.

    `records` are the indices of the images to divide, `labels` the labels of the whole data set.
    The images of a class are shuffled by the key (seed, "study", class). The first ones are held
    out, the next ones are for training, and all others are held back.

    Returns a dict from the name of a part to its indices, ascending. Raises UserError if a class is
    too small.
    """
    order = []
    for label in range(classes):
        rows = records[labels[records] == label]
        order.append(numpy_generator(data.seed, "study", label).permutation(rows))
    held_out, available = _limits([len(rows) for rows in order], data)
    counts = training_counts(available, data)
    if min(counts) < 1 or any(np.less(available, counts)):
        smallest = int(np.argmin(available))
        raise UserError(
            f"class {smallest} has {len(order[smallest])} images that are not among the test images, too few to "
            "divide; add some, or lower data.held_out and data.held_back"
        )
    divided = [
        np.split(rows, [first, first + count])
        for rows, first, count in zip(order, held_out, counts, strict=True)
    ]
    parts = [np.sort(np.concatenate(rows)) for rows in zip(*divided, strict=True)]
    return dict(zip((HELD_OUT, TRAIN, HELD_BACK), parts, strict=True))


def _limits(counts: Sequence[int], data: StudyData) -> tuple[list[int], list[int]]:
    """Return two lists: each class's number of held-out images, and its limit for training."""
    held_out = [max(1, round(data.held_out * count)) for count in counts]
    not_held_back = [int((1 - data.held_back) * count) for count in counts]
    return held_out, np.subtract(not_held_back, held_out).tolist()


def expected_counts(data: StudyData) -> list[int]:
    """Return each class's number of training images before the removal of duplicates.

    The classes of a named data set count as equally large.
    """
    if data.path is None:
        return training_counts([EVEN_SOURCE] * 10, data.changed(largest=None))
    with Dataset(data.path) as dataset:
        return training_counts(_limits(dataset.meta.histogram, data)[1], data)


def training_counts(available: Sequence[int], data: StudyData) -> list[int]:
    """Return the number of training images of each class, at most `available` and `data.largest`.

    With a long tail, class k of K classes has largest * ratio ** (-k / (K - 1)) images, rounded
    down, but at least one (Cui et al. 2019, "Class-Balanced Loss Based on Effective Number of
    Samples", section 5.1). Here largest is the number for class 0, and ratio is `data.long_tail`.
    """
    largest = min(max(available), data.largest or max(available))
    if data.long_tail == 1:
        return [min(count, largest) for count in available]
    largest = min(largest, *available[:1])
    steps = np.arange(len(available)) / max(1, len(available) - 1)
    tail = np.floor(largest * data.long_tail**-steps + ROUNDING).astype(int).tolist()
    return [min(count, max(1, size)) for count, size in zip(available, tail, strict=True)]


def write_subset(dataset: Dataset, records: Sequence[int] | np.ndarray, out: Path) -> Meta:
    """Write the images of some records, uncompressed, to the packed file `out`.

    An existing file is replaced.
    """
    source = f"{len(records)} images of {dataset.meta.source}"
    images = (dataset, records, dataset.labels()[records])
    return write_labelled(
        out, [images], dataset.classes, source=source, encoding="raw", overwrite=True
    )


def write_first(source: Path, counts: Sequence[int], out: Path, seed: int) -> None:
    """Write `counts[k]` images of each class k from the packed file `source` to `out`.

    They are chosen at random with the key (seed, "study", "real", class).
    """
    with Dataset(source) as dataset:
        chosen = []
        for label, count in enumerate(counts):
            rows = np.flatnonzero(dataset.labels() == label)
            order = numpy_generator(seed, "study", "real", label).permutation(rows)
            chosen.append(order[:count])
        write_subset(dataset, np.sort(np.concatenate(chosen)), out)


def groups_of(counts: Sequence[int]) -> dict[str, list[int]]:
    """Return the groups of classes as a dict from the name of a group to the labels of its classes.

    `counts` is the number of training images of each class. The group "all" has all classes. Unless
    the classes are `even`, the groups "many", "medium" and "few" divide the classes into thirds by
    their numbers of images.
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
    return groups


def even(counts: Sequence[int]) -> bool:
    """Return True if the largest class has at most EVEN times as many images as the smallest."""
    return max(counts) <= EVEN * min(counts)
