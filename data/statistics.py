"""Mean and standard deviation of pixels, exact for whole data sets."""

import cv2
import numpy as np


def pixel_sums(image: np.ndarray) -> tuple[np.ndarray, int]:
    """Sums of an image's values and of their squares, int64 [2, C], and its number of pixels; uint8 [H, W, C]."""
    channels = image.shape[2]
    squares = cv2.multiply(image, image, dtype=cv2.CV_32F)  # at most 255**2: exact, as are the float64 sums
    sums = [cv2.sumElems(values)[:channels] for values in (image, squares)]
    return np.array(sums).astype(np.int64), image.shape[0] * image.shape[1]


class PixelStatistics:
    """Adds up images' sums; exact in int64 for up to 10**14 pixels."""

    def __init__(self, channels: int) -> None:
        self._sums = np.zeros((2, channels), np.int64)
        self._pixels = 0

    def add(self, sums: np.ndarray, pixels: int) -> None:
        """Count what `pixel_sums` returned."""
        self._sums += sums
        self._pixels += pixels

    def mean_and_std(self) -> tuple[list[float], list[float]]:
        """Per channel, in units of [0, 1], over all pixels so far; the population's standard deviation."""
        mean, square = self._sums / self._pixels
        return (mean / 255).tolist(), (np.sqrt(np.maximum(square - mean**2, 0)) / 255).tolist()
