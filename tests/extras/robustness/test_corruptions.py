import io

import cv2
import numpy as np
import pytest
from PIL import Image

from duetgan.extras.robustness.corruptions import CORRUPTIONS, STRENGTHS
from duetgan.utils.seeding import numpy_generator


def picture(channels=3, side=32, seed=0):
    """Smooth shapes with an edge, as photographs have them."""
    rows, columns = np.mgrid[:side, :side] / side
    shades = np.stack([rows, columns, (rows + columns) / 2])[:channels] * 150 + 50
    shades[:, side // 4 : side // 2, side // 4 : side // 2] = 30 + seed
    return shades.astype(np.uint8)


def distance(a, b):
    return np.sqrt(np.square(a.astype(float) - b).mean())


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize(("channels", "side"), [(1, 16), (3, 32), (3, 128)])
def test_stronger_is_farther_from_the_image(name, channels, side):
    image = picture(channels, side)
    before = image.copy()
    found = [CORRUPTIONS[name](image, strength, seed=0, index=1) for strength in range(1, STRENGTHS + 1)]
    assert all(each.shape == image.shape and each.dtype == np.uint8 for each in found)
    np.testing.assert_array_equal(image, before)
    distances = [distance(each, image) for each in found]
    if name == "jpeg":  # whose table of quality is not strictly monotone in the error
        assert distances[-1] > 1.05 * distances[0] > 0
    else:
        assert distances == sorted(distances)
        assert distances[-1] > distances[0]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_same_for_one_key(name):
    image = picture()
    found, again = (CORRUPTIONS[name](image, 3, seed=5, index=7) for _ in range(2))
    np.testing.assert_array_equal(found, again)
    others = [CORRUPTIONS[name](image, 3, seed=seed, index=index) for seed, index in ((5, 8), (6, 7))]
    assert all((other != found).any() for other in others) == (name == "noise")


def test_noise_is_of_the_deviation_that_it_says_and_one_field_an_image():
    grey = np.full((3, 64, 64), 128, np.uint8)
    corruption = CORRUPTIONS["noise"]
    assert corruption.amount(1, 64) == pytest.approx(0.04 * 2**0.5)
    weak, strong = (corruption(grey, strength, seed=0, index=3).astype(float) - 128 for strength in (1, 3))
    assert weak.std() == pytest.approx(255 * corruption.amount(1, 64), rel=0.05)
    assert np.corrcoef(weak.ravel(), strong.ravel())[0, 1] > 0.99
    field = numpy_generator(0, "eval", "noise", 3).standard_normal((3, 64, 64))
    assert np.corrcoef(weak.ravel(), field.ravel())[0, 1] > 0.999


def test_blur_is_opencvs_brightness_and_contrast_by_hand():
    corruption = CORRUPTIONS["blur"]
    assert (corruption.amount(5, 32), corruption.amount(5, 64)) == (1.0, 2.0)
    image = picture()
    expected = cv2.GaussianBlur(image.transpose(1, 2, 0).astype(float), (9, 9), 1.0, borderType=cv2.BORDER_REFLECT)
    found = corruption(image, 5, seed=0, index=0)
    assert np.abs(found.transpose(1, 2, 0) - expected).max() < 1
    image = np.array([[[0, 100], [200, 250]]], np.uint8)
    found = CORRUPTIONS["brightness"](image, 2, seed=0, index=0)
    assert found.ravel().tolist() == [51, 151, 251, 255]
    mean = 137.5
    found = CORRUPTIONS["contrast"](image, 2, seed=0, index=0)
    assert found.ravel().tolist() == [round(mean + (value - mean) / 2) for value in (0, 100, 200, 250)]


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_pillows(channels):
    image = picture(channels)
    buffer = io.BytesIO()
    pixels = image.transpose(1, 2, 0)
    Image.fromarray(pixels if channels == 3 else pixels[:, :, 0]).save(buffer, "JPEG", quality=40, subsampling=2)
    with Image.open(buffer) as opened:
        expected = np.asarray(opened).reshape(32, 32, channels)
    found = CORRUPTIONS["jpeg"](image, 5, seed=0, index=0).transpose(1, 2, 0)
    assert distance(found, expected) < 2
    assert [round(CORRUPTIONS["jpeg"].amount(strength, 224)) for strength in (1, 5)] == [25, 12]
    assert CORRUPTIONS["jpeg"].amount(1, 16) == 95  # and not 121
