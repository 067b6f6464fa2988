"""Define the error of images that cannot be read, and the largest size of an image."""

import math

from duetgan.utils import files

MOST_PIXELS = 89_478_485  # in an image: Pillow's limit for untrusted files
MOST_SIDE = math.isqrt(MOST_PIXELS)  # px, of square images


class ImageError(ValueError):
    """The error for an image that cannot be read or is refused.

    The message states the reason. It does not name the file.
    """


def read_error(error: Exception) -> ImageError:
    """Convert an error in reading a file to an ImageError."""
    if isinstance(error, files.Refused):
        return ImageError(str(error))
    return ImageError(f"cannot be read ({getattr(error, 'strerror', None) or error})")
