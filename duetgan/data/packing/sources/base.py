"""Define the interface of image sources, and the rules for labels, splits and shards.

A new kind of source is one new file and one line in data/packing/sources/__init__.py.

Shards are the files of one data set. They are sorted by name. A shard whose name contains a split
(`train-00000-of-00002.parquet`) belongs to that split; `-of-N` is the number of its shards.
"""

import itertools
import re
import unicodedata
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from duetgan.data.errors import ImageError
from duetgan.data.images import SUFFIXES
from duetgan.data.images.values import Content
from duetgan.data.lmdb.format import Split, multi_hot
from duetgan.utils import files
from duetgan.utils.checkpoint.provenance import Provenance
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import RANGES, ImageSpec
from duetgan.utils.text import printable


class SourceOptions(NamedTuple):
    """The user's options for a source. Each reader uses only those that apply to it."""

    split: str | None = None  # "train", "test" or "val"; None: train, if there are splits
    # px, or WxH: the resolution to read, if the source has several; else the largest
    size: int | str | None = None
    # "top", "parent" or "none"; None: see data/packing/sources/files.py
    classes_from: str | None = None
    root: Path | None = None  # the folder of a named source, or of the images that a table names
    # Columns of a table (data/packing/sources/labels.py): "none" means no column; None: they are
    # found by their names.
    label_column: str | None = None
    label_separator: str | None = None  # between several labels of an image
    split_column: str | None = None  # NAME, or NAME=VALUE,... with the values of held-out images
    path_column: str | None = None
    suffix: str | None = None  # added to the paths in a table
    group_column: str | None = None  # column of group names; never chosen without the option


class Grouping(NamedTuple):
    """Groups of images, such as patients or cameras, that a split keeps whole."""

    option: str  # command-line option that defines the groups, with its value
    names: Sequence[str]  # name of each image's group, [n]


def group_images(option: str, names: Sequence[str], item_name: Callable[[int], str]) -> Grouping:
    """Return the Grouping of images with the fields `option` and `names`.

    Raises UserError if the name of a group is empty. The message contains `item_name(i)`, the name
    of the first image i in such a group.
    """
    if "" in names:
        raise UserError(
            f"{item_name(names.index(''))}: {option} finds no group of this image; give the image a "
            "group, or leave it out"
        )
    return Grouping(option, names)


@dataclass(frozen=True)
class Problem:
    """A file, folder or record that cannot be used, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.name} {self.reason}")


@dataclass
class Source(AbstractContextManager["Source"]):
    """Base class of the sources of images, which are read by index in a fixed order.

    Several threads may read a source at once, unless it is `in_order`.
    """

    in_order: ClassVar[bool] = False  # True: one thread must read it, fastest in ascending order
    takes = frozenset[str]()  # names of supported options; split and size always are
    # True: by default images are packed with their own channels and depth
    as_is: bool = field(default=False, init=False)
    # True: `spec.low` and `spec.high` are the range of the images' values
    ranged: bool = field(default=False, init=False)

    name: str  # for messages and the metadata
    classes: list[str]  # names by label; empty: unlabelled
    # format of all images; None: unknown before reading. It has no size if sizes differ.
    spec: ImageSpec | None = None
    # found when the images were listed, such as an empty class folder
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # files that are no images by their name
    splits: tuple[str, ...] = ()  # names of all splits of the source, one of which is open
    remarks: list[str] = field(default_factory=list)  # lines for the user, such as warnings
    # origin of generated images, copied to the packed file
    passport: Provenance | None = None
    # how the images were resized already, copied to the packed file unless packing resizes them
    resize_filter: str = "none"
    # how a part of a larger data set was drawn, copied to the packed file
    split: Split | None = None
    grouping: Grouping | None = None
    # class indices of each label; None: a label is a class
    label_sets: Sequence[Sequence[int]] | None = None
    # int64 [n]; a subclass sets it, or overrides `labels`
    _labels: np.ndarray = field(init=False)

    def __len__(self) -> int:
        return len(self.labels())

    @abstractmethod
    def content(self, index: int) -> Content:
        """Return the bytes of an image's file, or its pixels.

        Raises ImageError if the image cannot be read.
        """

    def later(self, index: int) -> Callable[[], Content]:
        """Return a function that returns `content(index)` and may be called in any thread.

        If the source is `in_order`, this method reads the content in the calling thread, and the
        function only returns the content or raises the error.
        """
        if not self.in_order:
            return partial(self.content, index)
        future = Future[Content]()
        try:
            future.set_result(self.content(index))
        except ImageError as error:
            future.set_exception(error)
        return future.result

    def labels(self) -> np.ndarray:
        """Return the label of each image, int64 [n]; 0 for all images of an unlabelled source."""
        return self._labels

    def take_labels(
        self,
        where: str,
        labels: Sequence[str | list[str]],
        places: Sequence[str] = (),
        *,
        whole: bool = True,
    ) -> None:
        """Set the source's labels and classes from the text of the labels.

        If an image has a list of labels, `label_sets` is set too.

        Args:
            where: name of the source in messages.
            labels: the label or labels of each image, [n].
            places: names of the images in messages, [n]; empty to use `where`.
            whole: True to sort classes as numbers if all labels are whole numbers.

        Raises UserError if no image has a label, and as `numbered` does.
        """
        lists = []
        for label in labels:
            texts = label if isinstance(label, list) else [label]
            lists.append([text for text in texts if text])
        flat = list(itertools.chain(*lists))
        if not flat:
            raise UserError(
                f"{where}: no image has a label; give some, or pack without: --label-column"
                f" {NO_LABELS}"
            )
        flat_places = list(itertools.chain(*map(itertools.repeat, places, map(len, lists))))
        self.classes, numbers = numbered(where, flat, flat_places, whole=whole)
        if any(isinstance(label, list) for label in labels):
            iterator = iter(numbers)
            label_sets = [tuple(sorted(set(itertools.islice(iterator, len(x))))) for x in lists]
            distinct = sorted(set(label_sets))
            self.label_sets = list(map(list, distinct))
            positions = {labels: position for position, labels in enumerate(distinct)}
            numbers = [positions[labels] for labels in label_sets]
        self._labels = np.array(numbers, np.int64)

    def by_class(self, histogram: np.ndarray) -> np.ndarray:
        """Convert a histogram of labels to the number of images of each class."""
        if self.label_sets is None:
            return histogram
        return histogram @ multi_hot(self.label_sets, len(self.classes))

    def check_classes(self) -> None:
        """Raise UserError for a class without images."""
        kinds = len(self.classes if self.label_sets is None else self.label_sets)
        counts = self.by_class(np.bincount(self.labels(), minlength=kinds))
        if self.classes and not counts.all():
            raise UserError(
                f"{self.name}: class {self.classes[int(counts.argmin())]} has no images; add some,"
                " or --against "
                "TRAIN.lmdb for held-out images"
            )

    def fill_classes(self, classes: Sequence[str]) -> None:
        """Replace the source's classes by `classes`, and renumber its labels.

        If `classes` is not a proper superset of the source's classes, or if images have several
        labels (`label_sets`), do nothing.
        """
        if self.label_sets is None and set(self.classes) < set(classes):
            numbers = [classes.index(name) for name in self.classes]
            self._labels = np.array(numbers)[self._labels]
            self.classes = list(classes)

    def item_name(self, index: int) -> str:
        """Return the name of an image for messages."""
        return f"record {index}"

    def stored_name(self, index: int) -> str:
        """Return the name of an image for the packed file; "" if the image has no name."""
        return ""

    def __exit__(self, *error: object) -> None:
        """Close the source's files."""


class ArraySource(Source):
    def __init__(
        self,
        name: str,
        images: np.ndarray,  # [n, H, W, C], of any type of numbers
        labels: np.ndarray | None,  # integers [n]
        classes: Sequence[str],
    ) -> None:
        _, height, width, channels = images.shape
        depth: Any = images.dtype.name if images.dtype.name in RANGES else "float32"
        spec = ImageSpec(channels, height, width, False, depth, *RANGES[depth])
        super().__init__(name, list(classes), spec)
        self.images = images
        self._labels = np.array([0] * len(images) if labels is None else labels, np.int64)

    def content(self, index: int) -> np.ndarray:
        return np.asarray(self.images[index])


# --- labels

NO_LABELS = "none"  # value of the column options: there is no such column
NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")


def numbered(
    where: str, labels: Sequence[str], places: Sequence[str], *, whole: bool
) -> tuple[list[str], list[int]]:
    """Return the class names that occur in `labels`, and the class index of each label.

    Classes are sorted as text. With `whole`, they are sorted as numbers if all labels are whole
    numbers, and a negative number raises UserError. Labels are compared in Unicode's form NFC,
    because "é" may be one character, or two as macOS writes it.

    Args:
        where: name of the source in messages, used if there are no `places`.
        places: name of each label's image in messages.
    """
    spelled = {label: unicodedata.normalize("NFC", label) for label in labels}
    names = set(spelled.values())
    numeric = whole and all(map(NUMBER.fullmatch, names))
    if numeric and (odd := next((label for label in labels if label.startswith("-")), None)):
        place = places[labels.index(odd)] if places else where
        raise UserError(f"{place}: label {odd}; labels are names, or whole numbers from 0")
    classes = sorted(names, key=int if numeric else None)
    order = {name: number for number, name in enumerate(classes)}
    return list(map(printable, classes)), [order[spelled[label]] for label in labels]


def with_slashes(name: str) -> str:
    """Replace backslashes, which tools for Windows write in a path, by slashes."""
    return name.replace("\\", "/")


# --- splits

SIDES = {
    "train": ("train", "training", "trainval", "trn"),
    "test": ("test", "testing", "tst", "privatetest"),
    "val": (
        *("val", "valid", "validation", "dev", "eval", "evaluation", "holdout", "heldout"),
        "publictest",
    ),
}
SPLIT_NAMES = {name: side for side, names in SIDES.items() for name in names}
# value of --split -> the splits that are taken for it, in descending order of preference
SPLITS = {"train": ("train",), "test": ("test", "val"), "val": ("val", "test")}
SHARDED = (".parquet", ".arrow", ".tar")  # suffixes of shards
NAMES = "|".join(sorted(SPLIT_NAMES, key=len, reverse=True))
SPLIT_INSIDE = re.compile(rf"(?:^|[-_.])({NAMES})(?=[-_.]|$)")
SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})")


def side_of(text: str) -> str:
    """Return the split that a name stands for: "train", "test", "val", or "" if it is none.

    For example, `Training_Set` stands for "train".
    """
    name = re.sub(r"[\W_]", "", text.lower())
    name = re.sub(r"(set|images?|imgs|data|split|20[0-9]{2})$", "", name)
    return SPLIT_NAMES.get(name, "")


def first_of(split: str, names: Iterable[str]) -> str | None:
    """Return the name in `names` that stands for `split` (`side_of`).

    If there is none, return a name that stands for the split that SPLITS allows instead, such as
    "val" instead of "test". If there is none either, return None.
    """
    sides = {side_of(name): name for name in sorted(names, reverse=True)}
    return next((sides[side] for side in SPLITS[split] if side in sides), None)


def choose_split(where: str | Path, split: str | None, names: Iterable[str]) -> str:
    """Return the name in `names` of the split that the user requests.

    This is a name that stands for `split` (`side_of`), such as "validation" for "val". If there is
    none, the test split is taken for "val", and the validation split for "test".

    Args:
        where: the source, for the message of an error.
        split: "train", "test" or "val"; None means "train".
        names: the names of the source's splits.

    Raises UserError if there is no such name.
    """
    names = sorted(names)
    if (name := first_of(split or "train", names)) is None:
        raise UserError(
            f"{where} has no {split or 'train'} split, only {', '.join(names)}: pass another"
            " --split"
        )
    return name


def refuse_split(where: str | Path, split: str | None, noun: str = "splits") -> None:
    """Raise UserError if the user requests the test or val split of a source without splits.

    The message names the source `where`, and says that it has no `noun`.
    """
    if split in ("test", "val"):
        raise UserError(
            f"{where} has no {noun}: leave --split out to take all of it, or add --val-share 0.1"
        )


def sharded(folder: Path, shards: Iterable[str] = SHARDED) -> str:
    """Return the suffix of the shards in a folder; "" if it has no shards.

    `shards` lists the possible suffixes. A folder with images or visible sub-folders has no shards.
    """
    with files.reading(folder, "check its permissions"):
        visible = _visible(folder)
        suffixes = {entry.suffix.lower() for entry in visible}
        if suffixes & SUFFIXES or any(entry.is_dir() for entry in visible):
            return ""
    return next((suffix for suffix in shards if suffix in suffixes), "")


def _visible(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def shards_by_split(where: Path, suffix: str) -> tuple[dict[str, list[Path]], list[str]]:
    """Group the shards at `where`, a file or a folder, by the split in their names.

    A shard is a file with the suffix `suffix`. Returns a dict from the split, as the names spell it
    in lower case ("validation"), to the paths, and a list of the names of all other files. The key
    is "" for shards whose names contain no split. Raises UserError if only some names contain one.
    """
    groups: dict[str, list[Path]] = defaultdict(list)
    ignored = []
    for path in _visible(where) if where.is_dir() else [where]:
        if path.suffix.lower() == suffix:
            match = SPLIT_INSIDE.search(path.stem.lower())
            groups[match[1] if match else ""].append(path)
        else:
            ignored.append(path.name)
    if "" in groups and len(groups) > 1:
        first = next(iter(groups[name] for name in groups if name))[0]
        raise UserError(
            f"{where}: {first.name} names a split, {groups[''][0].name} does not: rename or remove"
            " one"
        )
    return groups, ignored


def choose_shards(
    where: Path, suffix: str, split: str | None
) -> tuple[list[Path], tuple[str, ...], list[str]]:
    """Choose the shards of a split at `where`, a file or a folder.

    If `split` is None, the train split is chosen. If the names of the shards contain no split, all
    shards are chosen. A single file also counts as train split if its name contains another split.

    Returns the paths of the chosen shards, the names of all splits in the folder, and the names of
    its files without the suffix `suffix`.

    Raises UserError if the split does not exist, or if one of its shards is missing.
    """
    groups, ignored = shards_by_split(where, suffix)
    # A single file is used whatever split its name has.
    single = "" in groups or (where.is_file() and split in (None, "train"))
    chosen = groups[next(iter(groups)) if single else choose_split(where, split, groups)]
    if where.is_file():
        return chosen, (), []
    check_complete(where, chosen)
    return chosen, tuple(sorted(filter(None, groups))), ignored


def check_complete(where: Path, paths: Sequence[Path]) -> None:
    """Raise UserError if the shards' names (`-of-N`) show that one of them is missing."""
    names, suffix = {path.stem for path in paths}, paths[0].suffix
    for match in filter(None, map(SHARD.fullmatch, sorted(names))):
        for number in range(int(match[3])):
            expected = f"{match[1]}-{number:05d}-of-{match[3]}"
            if expected not in names:
                raise UserError(
                    f"{where}: {expected}{suffix} is missing beside {match[0]}{suffix}: add it"
                )
