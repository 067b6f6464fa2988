"""Mean and standard deviation of pixels, exact for whole data sets."""

import numpy as np


class PixelStatistics:
    """Adds up uint8 pictures; sums of values and squares stay exact in float64 up to 2**53."""

    def __init__(self, channels: int) -> None:
        self._sums = np.zeros((2, channels), np.float64)
        self._pixels = 0

    def add(self, picture: np.ndarray) -> None:
        """Count the pixels of a picture uint8 [H, W, C]."""
        values = picture.reshape(-1, picture.shape[2]).astype(np.int64)
        self._sums += (values.sum(0), (values * values).sum(0))
        self._pixels += len(values)

    def mean_and_std(self) -> tuple[list[float], list[float]]:
        """Per channel, in units of [0, 1], over all pixels so far; the population's standard deviation."""
        mean, square = self._sums / self._pixels
        return (mean / 255).tolist(), (np.sqrt(np.maximum(square - mean**2, 0)) / 255).tolist()
