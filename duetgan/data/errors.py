"""What images and packed files are refused by, and the limits that both reading and packing keep
to.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from duetgan.utils import bounded
from duetgan.utils.errors import UserError

MOST_PIXELS = 89_478_485  # of an image: Pillow's limit for files of others
MOST_SIDE = math.isqrt(MOST_PIXELS)  # px, of square images


class ImageError(ValueError):
    """An image that cannot be read or is refused; the message is the reason, without the file's
    name.
    """


def unread(error: Exception) -> ImageError:
    """That a file cannot be read, where `error` was raised."""
    refused = isinstance(error, bounded.Refused)
    return ImageError(
        str(error) if refused else f"cannot be read ({getattr(error, 'strerror', None) or error})"
    )


class DamageError(UserError):
    """Records whose bytes are not those that were written.

    The text names the records of the file; `records` counts from `first`, the number of the file's
    first record in a data set of several files.
    """

    def __init__(self, path: Path, records: Sequence[int], reason: str, first: int = 0) -> None:
        self.records, self.reason = [record + first for record in records], reason
        self._arguments = (path, records, reason, first)
        name = f"record {records[0]}"
        if len(records) > 1:
            whole = records[-1] - records[0] == len(records) - 1
            name += f" to {records[-1]}" if whole else f" and {len(records) - 1} more"
        # Other ranks may not meet the same record: every rank says it.
        super().__init__(
            f"{path}: {name} is damaged: {reason}; copy or pack the file again", rank_specific=True
        )

    def __reduce__(self) -> tuple[type["DamageError"], tuple[Path, Sequence[int], str, int]]:
        """So that it travels between processes."""
        return type(self), self._arguments
