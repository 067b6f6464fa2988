"""Decode the images of a packed file."""

import numpy as np

from duetgan.data.errors import ImageError
from duetgan.data.images.decode import decode
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.utils.images import visible


def stored_image(reader: LMDBReader, index: int) -> tuple[np.ndarray, int]:
    """Return the image [H, W, C] of a record, and its label, which is 0 if the file has no labels.

    Raises IndexError for a number without a record, and DamageError for a damaged record.
    """
    if not 0 <= index < len(reader):
        raise IndexError(f"record {index} of {len(reader)}")
    if reader.meta.encoding == "raw":
        return reader.raw_image(index), int(reader.labels()[index])
    # The label of the record itself: the index of another block may be damaged.
    with reader.encoded(index) as (entry, payload, size):
        label = int(entry["label"])
        if not 0 <= label < max(1, reader.meta.labels):
            raise ImageError(
                f"label {label} has no class, the file has {len(reader.classes)} classes"
            )
        return decode(payload, entry["codec"], reader.meta.spec, size), label


def visible_image(reader: LMDBReader, index: int) -> np.ndarray:
    """Return a record's image for display, uint8 [H, W, 1 or 3].

    Raises IndexError and DamageError, as `stored_image` does.
    """
    pixels, _ = stored_image(reader, index)
    return np.asarray(visible(pixels.transpose(2, 0, 1), reader.spec)).transpose(1, 2, 0)
