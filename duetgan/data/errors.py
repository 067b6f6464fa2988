"""Errors of images and packed files, and the size limits of images in reading and packing."""

import math
from collections.abc import Sequence
from pathlib import Path

from duetgan.utils import files
from duetgan.utils.errors import UserError

MOST_PIXELS = 89_478_485  # in an image: Pillow's limit for untrusted files
MOST_SIDE = math.isqrt(MOST_PIXELS)  # px, of square images


class ImageError(ValueError):
    """An image that cannot be read or is refused. The message is the reason, without the file."""


def read_error(error: Exception) -> ImageError:
    """Convert an error in reading a file to an ImageError."""
    if isinstance(error, files.Refused):
        return ImageError(str(error))
    return ImageError(f"cannot be read ({getattr(error, 'strerror', None) or error})")


class DamageError(UserError):
    """Records whose bytes differ from those that were written.

    The message has the records' numbers in the file. `records` has their numbers in the data set,
    in which the file's first record has the number `first`.
    """

    def __init__(self, path: Path, records: Sequence[int], reason: str, first: int = 0) -> None:
        self.records = [record + first for record in records]
        self.reason = reason
        self._arguments = (path, records, reason, first)
        name = f"record {records[0]}"
        if len(records) > 1:
            is_range = records[-1] - records[0] == len(records) - 1
            name += f" to {records[-1]}" if is_range else f" and {len(records) - 1} more"
        # Other ranks may not read the same record, so every rank prints the message.
        super().__init__(
            f"{path}: {name} is damaged: {reason}; copy or pack the file again", rank_specific=True
        )

    def __reduce__(self) -> tuple[type["DamageError"], tuple[Path, Sequence[int], str, int]]:
        """Pickle the constructor's arguments. `Exception` would pickle the message instead."""
        return type(self), self._arguments
