"""Sums over pixels are exact."""

import numpy as np
import pytest

from duetgan.data.lmdb.record import mean_and_std
from duetgan.data.records import pixel_sums


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (7, 5), (1000, 1200)])
def test_sums_are_exact(channels: int, size: tuple[int, int]) -> None:
    for low in (0, 255):  # the largest sums there are
        image = np.random.default_rng(0).integers(low, 256, (*size, channels), dtype=np.uint8)
        sums = pixel_sums(image)
        values = image.reshape(-1, channels).astype(np.int64)
        np.testing.assert_array_equal(sums, [values.sum(0), (values**2).sum(0)])
        assert sums.dtype == np.int64


def test_mean_and_std_of_images_of_different_sizes() -> None:
    draws = np.random.default_rng(0)
    parts = [draws.integers(0, 256, (side, 2 * side, 3), dtype=np.uint8) for side in (2, 5, 9)]
    sums = np.sum([pixel_sums(part) for part in parts], axis=0)
    values = np.concatenate([part.reshape(-1, 3) for part in parts]) / 255
    mean, std = mean_and_std(sums, len(values))
    np.testing.assert_allclose(mean, values.mean(0), rtol=1e-12)
    np.testing.assert_allclose(std, values.std(0), rtol=1e-10)
