"""Errors of images and packed files, and the size limits of images in reading and packing."""

import math

from duetgan.utils import files

MOST_PIXELS = 89_478_485  # in an image: Pillow's limit for untrusted files
MOST_SIDE = math.isqrt(MOST_PIXELS)  # px, of square images


class ImageError(ValueError):
    """An image that cannot be read or is refused. The message is the reason, without the file."""


def read_error(error: Exception) -> ImageError:
    """Convert an error in reading a file to an ImageError."""
    if isinstance(error, files.Refused):
        return ImageError(str(error))
    return ImageError(f"cannot be read ({getattr(error, 'strerror', None) or error})")
