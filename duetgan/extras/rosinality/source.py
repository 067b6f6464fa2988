"""Read LMDB files that `prepare_data.py` of rosinality's stylegan2-pytorch writes.

The record `length` is the number of images as text. A record `{resolution}-{index:05d}` is an image
file, usually a JPEG. An image may be stored at several resolutions. There are no labels and no
checksums.
"""

import re
from pathlib import Path

import lmdb
import numpy as np

from duetgan.data.errors import ImageError, read_error
from duetgan.data.lmdb.environment import Handle
from duetgan.data.packing.sources.base import Source, SourceOptions
from duetgan.data.packing.sources.lmdb_files import FORMATS
from duetgan.utils.errors import UserError, explained

LENGTH_KEY = b"length"
KEY = re.compile(rb"([1-9][0-9]{0,5})-[0-9]{5,}")


def open_rosinality(path: Path, handle: Handle, options: SourceOptions) -> Source | None:
    """Open an LMDB file with `length` and records like 256-00000 as a source of images.

    The source has the images of `options.size` px, or the largest ones if the file stores none of
    this size. Returns None for other files. Raises UserError if `length` is more than twice the
    number of records.
    """
    with handle.environment.begin() as transaction:
        length = bytes(transaction.get(LENGTH_KEY, b""))
        sides = resolutions(transaction)
    if not re.fullmatch(rb"[1-9][0-9]{0,11}", length) or not sides:
        return None
    # Missing records can be skipped, but not if most are missing or the number is damaged.
    if int(length) > 2 * handle.environment.stat()["entries"]:
        raise UserError(f"{path} holds fewer records than its `length` of {int(length):,}")
    side = options.size if options.size in sides else sides[-1]
    return RosinalitySource(path, handle, int(length), side)


def resolutions(transaction: lmdb.Transaction) -> list[int]:
    """Return the resolutions in px at which the file stores images, ascending.

    The cursor jumps from one resolution to the next, and does not visit all records.
    """
    sides = []
    cursor = transaction.cursor()
    has_record = cursor.first()
    while has_record and (match := KEY.fullmatch(bytes(cursor.key()))):
        sides.append(int(match[1]))
        has_record = cursor.set_range(match[1] + b"-:")  # ":" sorts after all digits
    return sorted(sides)


class RosinalitySource(Source):
    """A source of unlabelled images, which are the file's images of one resolution.

    Reading a missing record raises ImageError.
    """

    def __init__(self, path: Path, handle: Handle, length: int, side: int | str) -> None:
        super().__init__(path.parent.name if path.name == "data.mdb" else path.name, [])
        self.path = path
        self._handle = handle
        self._labels = np.zeros(length, np.int64)
        self._side = side

    def content(self, index: int) -> bytes:
        with explained(lmdb.Error, read_error), self._handle.environment.begin() as transaction:
            content: bytes | None = transaction.get(self._key(index).encode())
        if content is None:
            raise ImageError("is missing")
        return content

    def item_name(self, index: int) -> str:
        return f"{self.path}: record {self._key(index)}"

    def _key(self, index: int) -> str:
        return f"{self._side}-{index:05d}"

    def __exit__(self, *error: object) -> None:
        del self._handle


FORMATS.append(open_rosinality)
