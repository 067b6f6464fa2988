"""What a source of pictures is. A new kind of source is one new file and one line in data/sources/__init__.py."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Item:
    """A picture as it was found."""

    name: str  # file or record, for messages
    label: int  # 0 if the source is unlabelled
    content: bytes | np.ndarray  # a file's bytes, or pixels uint8 [H, W, C]


@dataclass(frozen=True)
class Problem:
    """Something that could not be used."""

    name: str  # file, folder or record
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


@dataclass
class Source(ABC):
    """Pictures by index, always in the same order.

    `shape` is the (height, width) in px of all pictures where that is known beforehand, else None; then `channels` is
    known too. `problems` were found while listing, for example an empty class folder; `ignored` names files that are no
    pictures by their name.
    """

    name: str  # for people and the metadata
    classes: list[str]  # names by label; empty: unlabelled
    shape: tuple[int, int] | None = None
    channels: int | None = None
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def item(self, index: int) -> Item:
        """One picture. Raises data.pictures.PictureError if its bytes cannot be had."""

    @abstractmethod
    def labels(self) -> np.ndarray:
        """int64 [len]; zeros if the source is unlabelled."""

    def item_name(self, index: int) -> str:
        """Name of a picture, also where it cannot be read."""
        return f"record {index}"

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the source; one that holds files open closes them."""
        return None


class ArraySource(Source):
    """Pictures in memory."""

    def __init__(
        self,
        name: str,
        images: np.ndarray,  # uint8 [n, H, W, C]
        labels: np.ndarray,  # integers [n]
        classes: Sequence[str],
    ) -> None:
        super().__init__(name, list(classes), images.shape[1:3], images.shape[3])
        self.images, self._labels = images, labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def item(self, index: int) -> Item:
        return Item(self.item_name(index), int(self._labels[index]), self.images[index])

    def labels(self) -> np.ndarray:
        return self._labels
