"""LMDB files as sources: our own packed files, to pack them anew, and how to recognise them."""

from pathlib import Path

import lmdb
import numpy as np

from data.images import ImageError
from data.lmdb.environment import acquire
from data.lmdb.format import FORMAT_KEY
from data.lmdb.reader import DamageError, LMDBReader
from data.sources.base import Item, Source
from data.sources.rosinality import LENGTH_KEY, RosinalitySource, resolutions
from utils.errors import UserError


def open_lmdb(path: Path, *, size: int | None = None) -> Source:
    """Open an LMDB file of data.pack or of rosinality's StyleGAN2, at `size` px where it holds that resolution.

    Raises UserError if it is damaged, truncated or of another program.
    """
    handle = acquire(path)
    try:
        with handle.environment.begin() as transaction:
            ours = transaction.get(FORMAT_KEY) is not None
            theirs = transaction.get(LENGTH_KEY) is not None or bool(resolutions(transaction))
    except lmdb.Error as error:
        raise UserError(f"{path} is damaged ({error}); copy or make it again") from None
    if ours:
        return PackedSource(path, size=size)
    if theirs:
        return RosinalitySource(path, size=size)
    raise UserError(
        f"{path} is an LMDB file of another program: supported are those of data.pack and of rosinality's StyleGAN2"
        " (records 256-00000, ..., and length); give the images themselves"
    )


class PackedSource(Source):
    """A file made by data.pack: its decoded images, labels and classes."""

    def __init__(self, path: Path, *, size: int | None = None) -> None:
        self.path = path
        # Tolerant: a damaged image does not take the others of its block along when it is skipped.
        reader = LMDBReader(path, tolerant=True)
        if size is not None and size in reader.meta.resolutions and size != reader.resolution:
            reader = LMDBReader(path, resolution=size, tolerant=True)
        self.reader = reader
        side = reader.resolution
        super().__init__(path.name, list(reader.classes), (side, side) if side else None, reader.meta.channels)

    def item(self, index: int) -> Item:
        try:
            pixels, label = self.reader.image(index)
        except DamageError as error:
            raise ImageError(f"is damaged: {error.reason}") from None
        return Item(self.item_name(index), label, pixels)

    def item_name(self, index: int) -> str:
        return f"{self.path}: record {index}"

    def labels(self) -> np.ndarray:
        return self.reader.labels()

    def __exit__(self, *error: object) -> None:
        self.reader.close()
