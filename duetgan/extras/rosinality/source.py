"""LMDB files of rosinality's StyleGAN2 (stylegan2-pytorch, `prepare_data.py`).

The record `length` has the number of images as text, and `{resolution}-{index:05d}` is an image
file, usually a JPEG. An image may be stored at several resolutions. There are no labels and no
checksums.
"""

import re
from pathlib import Path

import lmdb
import numpy as np

from duetgan.data.errors import ImageError, read_error
from duetgan.data.lmdb.environment import Handle, acquire
from duetgan.data.packing.sources.base import Source, SourceOptions
from duetgan.data.packing.sources.lmdb_files import FORMATS
from duetgan.utils.errors import UserError, explained

LENGTH_KEY = b"length"
KEY = re.compile(rb"([1-9][0-9]{0,5})-[0-9]{5,}")


def open_rosinality(path: Path, handle: Handle, options: SourceOptions) -> Source | None:
    with handle.environment.begin() as transaction:
        length = transaction.get(LENGTH_KEY)
        sides = resolutions(transaction)
    if length is None and not sides:
        return None
    return RosinalitySource(path, handle, length, sides, options.size)


def resolutions(transaction: lmdb.Transaction) -> list[int]:
    """Return the ascending resolutions of the records in px, found with one cursor step each."""
    sides = []
    cursor = transaction.cursor()
    has_record = cursor.first()
    while has_record and (match := KEY.fullmatch(bytes(cursor.key()))):
        sides.append(int(match[1]))
        has_record = cursor.set_range(match[1] + b"-:")  # ":" sorts after all digits
    return sorted(sides)


class RosinalitySource(Source):
    """Unlabelled images of one resolution: `size` px if the file has it, else the largest.

    Raises UserError for a file that is truncated, or without `length` or records. Reading a missing
    record raises ImageError.
    """

    def __init__(
        self, path: Path, handle: Handle, length: bytes | None, sides: list[int], size: object
    ) -> None:
        super().__init__(path.parent.name if path.name == "data.mdb" else path.name, [])
        self.path = path
        self._handle: Handle | None = handle
        entries = handle.environment.stat()["entries"]
        if length is None:
            raise UserError(f"{path} has no record `length`: it was not finished, make it again")
        if not length.isdigit() or len(length) > 12 or not int(length):
            text = bytes(length[:20])
            raise UserError(
                f"{path}: its record `length` is {text!r}, not a number of images; make it again"
            )
        # Missing records can be skipped, but not if most are missing or the number is damaged.
        if int(length) > 2 * entries:
            raise UserError(
                f"{path} holds {entries:,} records, but `length` is {int(length):,}: copy or make"
                " it again"
            )
        if not sides:
            raise UserError(f"{path} holds no records like 256-00000, only `length`: make it again")
        self._labels = np.zeros(int(length), np.int64)
        self.resolution = size if isinstance(size, int) and size in sides else sides[-1]

    def content(self, index: int) -> bytes:
        with (
            explained(lmdb.Error, read_error),
            (self._handle or acquire(self.path)).environment.begin() as transaction,
        ):
            content: bytes | None = transaction.get(self._key(index).encode())
        if content is None:
            raise ImageError("is missing")
        return content

    def item_name(self, index: int) -> str:
        return f"{self.path}: record {self._key(index)}"

    def _key(self, index: int) -> str:
        return f"{self.resolution}-{index:05d}"

    def __exit__(self, *error: object) -> None:
        self._handle = None


FORMATS.append(open_rosinality)
