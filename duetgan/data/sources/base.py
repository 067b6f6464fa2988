"""What a source of images is. A new kind of source is one new file and one line in
data/sources/__init__.py.

Shards are taken in order of name. Those with a split's name (`train-00000-of-00002.parquet`) are
its shards; `-of-N` says that there are N of them.
"""

import itertools
import re
import unicodedata
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import numpy as np

from duetgan.data.errors import ImageError
from duetgan.data.images import SUFFIXES
from duetgan.data.lmdb.format import Shard, Split, multi_hot
from duetgan.data.values import Content
from duetgan.utils import bounded
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import RANGES, ImageSpec
from duetgan.utils.provenance import Provenance
from duetgan.utils.text import listed, printable


class SourceOptions(NamedTuple):
    """What may be asked of a source; a reader takes those that apply to it."""

    split: str | None = None  # "train", "test" or "val"; None: train, if there are splits
    # px, or WxH: among the resolutions of a source that has several; else the largest
    size: int | str | None = None
    # "top", "parent", "name" or "none"; None: see data/sources/files.py
    classes_from: str | None = None
    root: Path | None = None  # the folder of a named source, or of the images that a table names
    # of tables, see data/sources/labels.py; "none": without; None: by the columns' names and values
    label_column: str | None = None  # or several, divided by commas
    label_separator: str | None = None  # between several labels of an image
    split_column: str | None = None  # or NAME=VALUE,...: the values of held-out images
    path_column: str | None = None
    suffix: str | None = None  # that the paths lack


@dataclass(frozen=True)
class Problem:
    """Something that could not be used."""

    name: str  # file, folder or record
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.name} {self.reason}")


@dataclass
class Source(AbstractContextManager["Source"]):
    """Images by index, always in the same order. Several threads may read it at once, unless it is
    `in_order`.

    `spec` says what all images are where that is known beforehand, without a size where they have
    sizes of their own; with `ranged` also its low and high are those of their values. `as_is`:
    images are packed with their own channels and depth unless others are asked for. `problems` were
    found while listing, for example an empty class folder; `ignored` names files that are no images
    by their name. `splits` names those that the source itself has; one of them is open. `remarks`
    are lines for people, for example a warning that something looks like labels but is not used.
    """

    in_order: ClassVar[bool] = False  # one thread alone reads it, fastest in ascending order
    takes = frozenset[str]()  # of SourceOptions and `stack`: those that not every source takes
    as_is: bool = field(default=False, init=False)
    ranged: bool = field(default=False, init=False)
    # images left out that lie in a folder of that name
    unlabelled: int = field(default=0, init=False)
    # tar files: what is packed is their index
    shard_states: list[Shard] | None = field(default=None, init=False)

    name: str  # for people and the metadata
    classes: list[str]  # names by label; empty: unlabelled
    spec: ImageSpec | None = None
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    splits: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list)
    passport: Provenance | None = None  # of generated images, which a packed file goes on telling
    split: Split | None = None  # likewise, of a part
    sets: Sequence[Sequence[int]] | None = None  # of classes, by label; None: a label is a class
    # int64 [n]; a subclass sets it, or has `labels` of its own
    _labels: np.ndarray = field(init=False)

    def __len__(self) -> int:
        return len(self.labels())

    @abstractmethod
    def content(self, index: int) -> Content:
        """A file's bytes, or pixels. Raises ImageError if they cannot be had."""

    def later(self, index: int) -> Callable[[], Content]:
        """`content` for any thread to call; of a source that must be read in order it is had at
        once.
        """
        if not self.in_order:
            return partial(self.content, index)
        read = Future[Content]()
        try:
            read.set_result(self.content(index))
        except ImageError as error:
            read.set_exception(error)
        return read.result

    def labels(self) -> np.ndarray:
        """A label for each image, int64 [n]; zeros if the source is unlabelled."""
        return self._labels

    def take_labels(
        self,
        where: str,
        given: Sequence[str | list[str]],
        places: Sequence[str] = (),
        *,
        whole: bool = True,
    ) -> None:
        """Labels and classes as `numbered` has them, and where a label is a list `sets`. Raises
        UserError as that, for a label of a list that is empty or that an image has twice, and where
        no image has any.
        """
        if not any(isinstance(labels, list) for labels in given):
            self.classes, numbers, remarks = numbered(
                where, [str(label) for label in given], places, whole=whole
            )
        else:
            lists = [
                labels if isinstance(labels, list) else [labels] if labels else []
                for labels in given
            ]
            owned = [
                (place, label)
                for place, labels in zip(places, lists, strict=True)
                for label in labels
            ]
            if not owned:
                raise UserError(
                    f"{where}: no image has a label; give some, or pack without: --label-column {NO_LABELS}"
                )
            if empty := [place for place, label in owned if not label]:
                raise UserError(f"{empty[0]}: a label in its list is empty; remove it")
            at, flat = zip(*owned, strict=True)
            self.classes, each, remarks = numbered(where, flat, at)
            left = iter(each)
            found = [sorted(itertools.islice(left, len(labels))) for labels in lists]
            for place, labels in zip(places, found, strict=True):
                if twice := [a for a, b in itertools.pairwise(labels) if a == b]:
                    raise UserError(
                        f"{place}: has the label {self.classes[twice[0]]} twice; remove one"
                    )
            self.sets = sorted(map(list, set(map(tuple, found))))
            order = {tuple(labels): number for number, labels in enumerate(self.sets)}
            numbers = [order[tuple(labels)] for labels in found]
            several = sum(len(labels) > 1 for labels in found)
            self.remarks.append(
                f"{where}: lists of labels: {several:,} of {len(found):,} images have several, {found.count([]):,} none"
            )
        self.remarks += remarks
        self._labels = np.array(numbers, np.int64)

    def by_class(self, histogram: np.ndarray) -> np.ndarray:
        """Images of each class, of how many have each label."""
        return (
            histogram if self.sets is None else histogram @ multi_hot(self.sets, len(self.classes))
        )

    def check_classes(self) -> None:
        kinds = len(self.classes if self.sets is None else self.sets)
        counts = self.by_class(np.bincount(self.labels(), minlength=kinds))
        if self.classes and not counts.all():
            raise UserError(
                f"{self.name}: class {self.classes[int(counts.argmin())]} has no images; add some, or --against "
                "TRAIN.lmdb for held-out images"
            )

    def fill_classes(self, classes: Sequence[str]) -> None:
        """Take these classes where they are the source's and others."""
        if self.sets is None and set(self.classes) < set(classes):
            places = [classes.index(name) for name in self.classes]
            self.classes, self._labels = list(classes), np.array(places)[self._labels]

    def item_name(self, index: int) -> str:
        """Name of an image, also where it cannot be read."""
        return f"record {index}"

    def stored_name(self, index: int) -> str:
        """Name of an image within the source, which is kept in the packed file; "" if it has none
        but its number.
        """
        return ""

    def place(self, index: int) -> tuple[int, int] | None:
        """Where an image's bytes lie in tar files: the tar's number, and the first byte in it."""
        return None

    def __exit__(self, *error: object) -> None:
        """Leave the source; one that holds files open closes them."""


class ArraySource(Source):
    def __init__(
        self,
        name: str,
        images: np.ndarray,  # [n, H, W, C], of any numbers
        labels: np.ndarray | None = None,  # integers [n]
        classes: Sequence[str] = (),
    ) -> None:
        _, height, width, channels = images.shape
        depth: Any = images.dtype.name if images.dtype.name in RANGES else "float32"
        super().__init__(
            name, list(classes), ImageSpec(channels, height, width, False, depth, *RANGES[depth])
        )
        self.images, self._labels = (
            images,
            np.array([0] * len(images) if labels is None else labels, np.int64),
        )

    def content(self, index: int) -> np.ndarray:
        return np.asarray(self.images[index])


# --- labels

NO_LABELS = "none"  # asked for: pack without labels
MOST_VALUES = 1000  # different ones, of a column that is taken for labels
# Words before numbers in files' names that are no classes.
NUMBERED = {
    "dsc",
    "dscf",
    "dscn",
    "frame",
    "image",
    "img",
    "mvi",
    "photo",
    "picture",
    "pxl",
    "screenshot",
}
NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
SHOWN = 4  # classes in a message


def looks_like_labels(where: str, columns: Mapping[str, Counter[str]]) -> list[str]:
    """A warning if a column of an unlabelled set has the values of labels: few different ones, most
    several times.
    """
    return [
        f"warning: {where}: packed without labels, although the column {name} has {len(counts):,} values for"
        f" {counts.total():,} images; if they are labels, pass --label-column {name}"
        for name, counts in columns.items()
        if 2 <= len(counts) <= min(MOST_VALUES, counts.total() // 2)
    ][:1]


def class_of_name(name: str) -> str:
    """The class in a file's name, what stands before its number: `cat` of `cat.12.jpg`, "" of
    `12.jpg`.
    """
    return re.sub(r"[\W\d_]+$", "", unicodedata.normalize("NFC", PurePosixPath(name).stem))


def names_look_like_labels(where: str, names: Sequence[str]) -> list[str]:
    """A warning if the names of unlabelled images begin with one of a few words, as in `cat.0.jpg`,
    `dog.0.jpg`.
    """
    counts = Counter(map(class_of_name, names))
    few = 2 <= len(counts) <= min(MOST_VALUES, len(names) // 2)
    if not few or "" in counts or all(word.lower() in NUMBERED for word in counts):
        return []
    return [
        f"warning: {where}: packed without labels, although all names begin with one of {len(counts):,} words; for the"
        f" classes {listed(sorted(counts), SHOWN)} pass --classes-from name"
    ]


def numbered(
    where: str, labels: Sequence[str], places: Sequence[str] = (), *, whole: bool = True
) -> tuple[list[str], list[int], list[str]]:
    """The classes of labels, the number of each label, and remarks.

    Classes are in text order, with `whole` in that of numbers if all are whole numbers: UserError
    for one below 0, with its one of `places`. Labels are compared in Unicode's form NFC: "é" may be
    one character or two, as macOS writes it, and looks the same.
    """
    spelled = {label: unicodedata.normalize("NFC", label) for label in labels}
    counts = Counter(spelled.values())
    numeric = whole and all(map(NUMBER.fullmatch, counts))
    if numeric and (odd := next((label for label in labels if label.startswith("-")), None)):
        place = places[labels.index(odd)] if places else where
        raise UserError(f"{place}: label {odd}; labels are names, or whole numbers from 0")
    order = {
        name: number for number, name in enumerate(sorted(counts, key=int if numeric else None))
    }
    alike = defaultdict(list)
    for name in order:
        alike[" ".join(name.casefold().replace("_", " ").split())].append(printable(name))
    remarks = [
        f"{where}: the classes {' and '.join(map(repr, names))} differ only by case or spaces; are they one?"
        for names in alike.values()
        if len(names) > 1
    ]
    twice = sorted(name for name, count in counts.items() if count > 1)
    remark = f"{where}: written in two ways that look the same, and taken as one class each: {listed(twice, SHOWN)}"
    return (
        list(map(printable, order)),
        [order[spelled[label]] for label in labels],
        remarks + [remark] * bool(twice),
    )


def with_slashes(name: str) -> str:
    """Return a path as this system has it: tools for Windows write backslashes."""
    return name.replace("\\", "/")


# --- splits

TRAIN = ("train", "training", "trainval", "trn")
TEST = ("test", "testing", "tst", "privatetest")
VAL = (
    "val",
    "valid",
    "validation",
    "dev",
    "eval",
    "evaluation",
    "holdout",
    "heldout",
    "publictest",
)
SPLITS = {"train": TRAIN, "test": TEST + VAL, "val": VAL + TEST}  # the first name that is there
SPLIT_NAMES = frozenset(TRAIN + TEST + VAL)
SHARDED = {".parquet": "Parquet", ".arrow": "Arrow", ".tar": "tar"}  # what a folder of shards holds
NAMES = "|".join(sorted(SPLIT_NAMES, key=len, reverse=True))
SPLIT_PREFIX = re.compile(rf"({NAMES})(?=[-_.]|$)")
SPLIT_INSIDE = re.compile(rf"(?:^|[-_.])({NAMES})(?=[-_.]|$)")
SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})")


def split_name(text: str) -> str:
    """The name of SPLIT_NAMES that a folder's name, or another text, stands for, or ""."""
    name = re.sub(r"[\W_]", "", text.lower())
    name = re.sub(r"(set|images?|imgs|data|split|20[0-9]{2})$", "", name)
    return name if name in SPLIT_NAMES else ""


def side_of(text: str) -> str:
    """Return the split that a text stands for: train, test, val, or "" for none."""
    name = split_name(text)
    return next(
        (side for side, names in (("train", TRAIN), ("test", TEST), ("val", VAL)) if name in names),
        "",
    )


def first_of(split: str, names: Iterable[str]) -> str | None:
    """Which of the names stands for the split: the first by SPLITS."""
    ranks = {
        name: SPLITS[split].index(split_name(name))
        for name in names
        if split_name(name) in SPLITS[split]
    }
    return min(sorted(ranks), key=lambda name: ranks[name], default=None)


def choose_split(where: str | Path, split: str | None, names: Iterable[str]) -> str:
    """The name that stands for the split; None: for train. Raises UserError if there is none."""
    names = sorted(names)
    if (name := first_of(split or "train", names)) is None:
        raise UserError(
            f"{where} has no {split or 'train'} split, only {', '.join(names)}: pass another --split"
        )
    return name


def refuse_split(where: str | Path, split: str | None, what: str = "splits") -> None:
    """Raise UserError for held-out images of what has no splits."""
    if split in ("test", "val"):
        raise UserError(
            f"{where} has no {what}: leave --split out to take all of it, or add --val-share 0.1"
        )


def sharded(folder: Path, shards: Iterable[str] = SHARDED) -> str:
    """The suffix of `shards` of a folder that holds such files and neither images nor visible
    sub-folders; else "".
    """
    with bounded.reading(folder, "check its permissions"):
        visible = _visible(folder)
        suffixes = {entry.suffix.lower() for entry in visible}
        if suffixes & SUFFIXES or any(entry.is_dir() for entry in visible):
            return ""
    return next((suffix for suffix in shards if suffix in suffixes), "")


def _visible(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def shards_by_split(where: Path, suffix: str) -> tuple[dict[str, list[Path]], list[str]]:
    """The shards of each split, under "" those of none, and the names of other files, for a file of
    the suffix or a folder of such files. Raises UserError if only some name a split.
    """
    # A split's name may stand anywhere in a tar's: `imagenet1k-train-0000.tar`.
    split_of = SPLIT_INSIDE.search if suffix == ".tar" else SPLIT_PREFIX.match
    groups: dict[str, list[Path]] = defaultdict(list)
    ignored = []
    for path in _visible(where) if where.is_dir() else [where]:
        if path.suffix.lower() == suffix:
            match = split_of(path.stem.lower())
            groups[match[1] if match else ""].append(path)
        else:
            ignored.append(path.name)
    if "" in groups and len(groups) > 1:
        first = next(iter(groups[name] for name in groups if name))[0]
        raise UserError(
            f"{where}: {first.name} names a split, {groups[''][0].name} does not: rename or remove one"
        )
    return groups, ignored


def choose_shards(
    where: Path, suffix: str, split: str | None
) -> tuple[list[Path], tuple[str, ...], list[str]]:
    """The files of a split (None: train, if there are splits), the splits that there are, and the
    names of other files; arguments as above. Raises UserError if it has none, or if a shard is
    missing.
    """
    groups, ignored = shards_by_split(where, suffix)
    # A file that is named is meant, whatever its split.
    single = "" in groups or (where.is_file() and split in (None, "train"))
    chosen = groups[next(iter(groups)) if single else choose_split(where, split, groups)]
    if where.is_file():
        return chosen, (), []
    check_complete(where, chosen)
    return chosen, tuple(sorted(filter(None, groups))), ignored


def check_complete(where: Path, paths: Sequence[Path]) -> None:
    """Raise UserError if the files' names say that there are more."""
    names, suffix = {path.stem for path in paths}, paths[0].suffix
    for match in filter(None, map(SHARD.fullmatch, sorted(names))):
        for number in range(int(match[3])):
            wanted = f"{match[1]}-{number:05d}-of-{match[3]}"
            if wanted not in names:
                raise UserError(
                    f"{where}: {wanted}{suffix} is missing beside {match[0]}{suffix}: add it"
                )
