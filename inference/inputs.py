"""What predict.py is given: images, folders, patterns, archives, packed files and lists, as one row of images."""

import glob
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from duetgan.data.errors import ImageError
from duetgan.data.sources import is_source, open_images
from duetgan.data.sources.base import Source
from duetgan.data.sources.files import LocalSource, read_file
from duetgan.utils import bounded
from duetgan.utils.errors import UserError


class Input(NamedTuple):
    """An image that is read when its turn comes."""

    name: str
    content: Callable[[], bytes | np.ndarray]  # a file's bytes or pixels uint8 [H, W, C]; raises ImageError


def file_input(path: str | Path) -> Input:
    return Input(str(path), partial(read_file, Path(path)))


class Inputs(AbstractContextManager["Inputs"]):
    """The images that `given` names, in order: image files; folders (with all that lies below) and patterns like
    `a/**/*.jpg`; zip, tar, CSV, Parquet, Arrow and LMDB files; .txt files, which name an image in each line.

    A file that is not there is an image that cannot be read. Raises UserError for a pattern that nothing matches, and
    for sources without images, before any image is read.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self._sources = ExitStack()
        self._parts: list[tuple[str, Source | list[str]]] = []
        with ExitStack() as opened:
            for name in given:
                part = _part(name)
                if isinstance(part, Source):
                    opened.enter_context(part)
                self._parts.append((name, part))
            self._sources = opened.pop_all()

    def __exit__(self, *error: object) -> None:
        self._sources.close()

    def __len__(self) -> int:
        return sum(len(part) for _, part in self._parts)

    @property
    def are_files(self) -> bool:
        """Whether all have a file of their own."""
        return all(isinstance(part, list | LocalSource) for _, part in self._parts)

    def names(self) -> Iterator[str]:
        """A name for each image; a file's is its path."""
        for given, part in self._parts:
            if isinstance(part, list):
                yield from part
                continue
            for index in range(len(part)):
                own = part.item_name(index)
                yield own if own.startswith(given) else f"{given}: {own}"

    def __iter__(self) -> Iterator[Input]:
        names = self.names()
        for _, part in self._parts:
            if isinstance(part, list):
                yield from (file_input(next(names)) for _ in part)
                continue
            for index in range(len(part)):
                yield Input(next(names), _content(part, index))


def _part(name: str) -> Source | list[str]:
    path = Path(name)
    if glob.has_magic(name) and not path.exists():
        if not (files := sorted(found for found in glob.glob(name, recursive=True) if Path(found).is_file())):
            raise UserError(f"{name}: no file matches; quote the pattern, or give a folder")
        return files
    if path.suffix.lower() == ".txt":
        with bounded.reading(path, "give a list of images, a line each"):
            lines = bounded.read_file(path, bounded.TABLE).decode().splitlines()
        return [str(path.parent / line.strip()) for line in lines if line.strip()]
    return open_images(name) if is_source(path) else [name]


def _content(source: Source, index: int) -> Callable[[], bytes | np.ndarray]:
    """What reads an image of a source; it is read at once where the source must be read in order."""
    if not source.in_order:
        return lambda: source.item(index).content
    try:
        content = source.item(index).content
    except ImageError as error:
        return partial(_again, error)
    return lambda: content


def _again(error: ImageError) -> bytes:
    raise error
