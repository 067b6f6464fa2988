"""Open LMDB files as sources: packed files (to pack them again), and formats that extras add."""

import functools
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np

from duetgan.data.errors import ImageError
from duetgan.data.images import MEANS
from duetgan.data.images.values import Values
from duetgan.data.lmdb.environment import Handle, acquire
from duetgan.data.lmdb.format import FORMAT_KEY
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.lmdb.stored_image import stored_image
from duetgan.data.packing.sources.base import Source, SourceOptions, refuse_split
from duetgan.utils import extras, files
from duetgan.utils.errors import DamageError, UserError

# Functions that open another program's file, and return None for a file of another format
FORMATS: list[Callable[[Path, Handle, SourceOptions], Source | None]] = []


def open_lmdb(path: Path, options: SourceOptions) -> Source:
    """Open an LMDB file as a source.

    A packed file is read at the resolution `options.size`, or at its largest one if it lacks this
    resolution. The functions in FORMATS open other files. Raises UserError if the file is damaged,
    truncated or of an unknown format, and for the test or validation split.
    """
    refuse_split(path, options.split)
    handle = acquire(path)
    with files.reading(path, "copy or make it again", lmdb.Error):
        with handle.environment.begin() as transaction:
            is_packed = transaction.get(FORMAT_KEY) is not None
        if is_packed:
            return PackedSource(path, options.size)
        for open_format in FORMATS:
            if source := open_format(path, handle, options):
                return source
    raise UserError(f"{path} is an LMDB file of another program; give the images themselves")


class PackedSource(Source):
    """A source of the decoded images, labels and classes of a file made by duet pack."""

    def __init__(self, path: Path, size: int | str | None) -> None:
        self.path = path
        self.reader = reader = LMDBReader(path)
        levels = (
            side for side in reader.meta.resolutions if reader.meta.spec.at(side).resolution == size
        )
        reader.resolution = next(levels, reader.resolution)
        super().__init__(path.name, list(reader.classes), reader.spec)
        self.ranged = True
        self.passport = reader.meta.passport
        self.resize_filter = reader.meta.resize_filter
        if reader.resolution == reader.meta.resolutions[-1]:  # only smaller images are means
            self.resize_filter = self.resize_filter.removesuffix(MEANS)
        self.label_sets = reader.meta.sets
        self.split = reader.meta.split
        self._labels = reader.labels()
        self._names = functools.cache(reader.names)

    def content(self, index: int) -> np.ndarray | Values:
        try:
            pixels = stored_image(self.reader, index)[0]
        except DamageError as error:
            if index in error.records:
                raise ImageError(f"is damaged: {error.reason}") from None
            # Other images of its block are damaged.
            block, row = divmod(index, self.reader.block)
            with self.reader.handle().environment.begin(buffers=True) as transaction:
                image = self.reader.raw_block(transaction, block)[row]
                pixels = image.transpose(1, 2, 0).copy()
        return Values(pixels, True) if self.reader.spec.alpha else pixels

    def item_name(self, index: int) -> str:
        return f"{self.path}: record {index}"

    def stored_name(self, index: int) -> str:
        return self._names()[index]

    def __exit__(self, *error: object) -> None:
        self.reader.close()


extras.attach(__name__)
