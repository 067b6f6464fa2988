"""What a source of images is. A new kind of source is one new file and one line in data/sources/__init__.py."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from duetgan.utils.errors import UserError
from duetgan.utils.provenance import Provenance
from duetgan.utils.text import printable


class SourceOptions(NamedTuple):
    """What may be asked of a source; a reader takes those that apply to it."""

    split: str | None = None  # "train", "test" or "val"; None: train, if there are splits
    size: int | None = None  # px: among the resolutions of a source that has several; else the largest
    label_column: str | None = None  # of a CSV, Parquet, Arrow or tar file; "none": unlabelled; None: by its name
    classes_from: str | None = None  # "top", "parent", "name" or "none"; None: see data/sources/files.py


@dataclass(frozen=True)
class Item:
    """An image as it was found."""

    name: str  # file or record, for messages
    label: int  # 0 if the source is unlabelled
    content: bytes | np.ndarray  # a file's bytes, or pixels uint8 [H, W, 1 or 3]


@dataclass(frozen=True)
class Problem:
    """Something that could not be used."""

    name: str  # file, folder or record
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.name} {self.reason}")

    def error(self, remedy: str, count: int = 1) -> UserError:
        """That this must not be skipped; it is the first of `count`."""
        more = f" (and {count - 1} more)" if count > 1 else ""
        return UserError(f"{self}{more}: fix it, or {remedy}")


@dataclass
class Source(AbstractContextManager["Source"]):
    """Images by index, always in the same order. Several threads may read it at once, unless it is `in_order`.

    `shape` is the (height, width) in px of all images where that is known beforehand, else None; then `channels` is
    known too. `problems` were found while listing, for example an empty class folder; `ignored` names files that are no
    images by their name. `splits` names those that the source itself has; one of them is open. `remarks` are lines for
    people, for example a warning that something looks like labels but is not used.
    """

    in_order: ClassVar[bool] = False  # one thread alone reads it, fastest in ascending order

    name: str  # for people and the metadata
    classes: list[str]  # names by label; empty: unlabelled
    shape: tuple[int, int] | None = None
    channels: int | None = None
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    splits: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list)
    passport: Provenance | None = None  # of generated images, which a packed file goes on telling
    _labels: np.ndarray = field(init=False)  # int64 [n]; a subclass sets it, or has `labels` of its own

    def __len__(self) -> int:
        return len(self.labels())

    @abstractmethod
    def content(self, index: int) -> bytes | np.ndarray:
        """What Item has of an image. Raises data.errors.ImageError if it cannot be had."""

    def item(self, index: int) -> Item:
        """One image. Raises as `content`."""
        return Item(self.item_name(index), int(self.labels()[index]), self.content(index))

    def labels(self) -> np.ndarray:
        """A label for each image, int64 [n]; zeros if the source is unlabelled."""
        return self._labels

    def check_classes(self) -> None:
        counts = np.bincount(self.labels(), minlength=len(self.classes))
        if self.classes and not counts.all():
            raise UserError(f"{self.name}: class {self.classes[int(counts.argmin())]} has no images; add some")

    def item_name(self, index: int) -> str:
        """Name of an image, also where it cannot be read."""
        return f"record {index}"

    def stored_name(self, index: int) -> str:
        """Name of an image within the source, which is kept in the packed file; "" if it has none but its number."""
        return ""

    def __exit__(self, *error: object) -> None:
        """Leave the source; one that holds files open closes them."""


class ArraySource(Source):
    def __init__(
        self,
        name: str,
        images: np.ndarray,  # uint8 [n, H, W, C]
        labels: np.ndarray,  # integers [n]
        classes: Sequence[str],
    ) -> None:
        super().__init__(name, list(classes), images.shape[1:3], images.shape[3])
        self.images, self._labels = images, labels.astype(np.int64)

    def content(self, index: int) -> np.ndarray:
        return np.asarray(self.images[index])
