"""An image's signature: what duplicates and near duplicates are found by (data/duplicates.py)."""

import hashlib

import cv2
import numpy as np

# `digest` is the same for equal pixels only; `dhash` is nearly the same for images that look alike.
SIGNATURE = np.dtype([("digest", "<u8"), ("dhash", "<u8")])


def signature(pixels: np.ndarray) -> np.ndarray:
    """The signature of an image uint8 [H, W, C], as an array of shape [1] and type SIGNATURE."""
    pixels = np.ascontiguousarray(pixels)
    digest = hashlib.blake2b(pixels.data, digest_size=8, person=b"%dx%d" % pixels.shape[:2])
    grey = pixels if pixels.shape[2] == 1 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(grey, (9, 8), interpolation=cv2.INTER_AREA)
    bits = np.packbits(small[:, :-1] < small[:, 1:])
    result = np.zeros(1, SIGNATURE)
    result[0] = (int.from_bytes(digest.digest(), "little"), int.from_bytes(bits.tobytes(), "big"))
    return result
