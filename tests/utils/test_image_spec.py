"""What images are, and the one place where their values become those of networks: `utils/image_spec.py`."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec

FORMATS = {
    "RGB": (3, None),
    "five channels": (5, None),
    "RGBA": (4, {"alpha": True}),
    "grey and alpha": (2, {"alpha": True}),
    "16 bits": (1, {"depth": "uint16"}),
    "12 bits": (1, {"depth": "uint16", "high": 4095.0}),
    "a window": (3, {"depth": "uint16", "low": 100.0, "high": 1100.0}),
    "RGBA of 16 bits": (4, {"depth": "uint16", "alpha": True}),
    "floats": (2, {"depth": "float32", "low": -1000.0, "high": 2000.0}),
    "floats of RANGES": (7, {"depth": "float32"}),
}


def values(spec: ImageSpec) -> torch.Tensor:
    """Images [8, C, 6, 4] of every kind of value that `spec` allows, both ends among them."""
    rng = np.random.default_rng(3)
    numbers = rng.random((8, spec.channels, 6, 4)) * (spec.high - spec.low) + spec.low
    numbers[0], numbers[1] = spec.low, spec.high
    if spec.depth != "float32":
        numbers = numbers.round()
    return torch.from_numpy(numbers.astype(spec.depth))


def in_fractions(spec: ImageSpec, pixel: list[float]) -> list[Fraction]:
    """The slow, exact way to the network."""
    low, high = Fraction(spec.low), Fraction(spec.high)
    shares = [(Fraction(value) - low) / (high - low) for value in pixel]
    if spec.alpha:
        shares = [share * shares[-1] for share in shares[:-1]] + shares[-1:]
    return [2 * share - 1 for share in shares]


@pytest.mark.parametrize("name", FORMATS)
def test_values_go_to_the_network_and_come_back(name):
    channels, document = FORMATS[name]
    spec = ImageSpec.of(channels, "4x6", document)
    assert spec.pixel_format == document
    assert ImageSpec.of(channels, "4x6", spec.pixel_format) == spec
    stored = values(spec)
    floats = spec.to_float(stored)
    assert floats.dtype == torch.float32
    assert floats.is_contiguous(memory_format=torch.channels_last)
    for n, y, x in ((0, 0, 0), (1, 2, 3), (2, 5, 1), (7, 3, 2)):
        wanted = in_fractions(spec, stored[n, :, y, x].double().tolist())
        torch.testing.assert_close(
            floats[n, :, y, x].double(), torch.tensor(list(map(float, wanted))).double(), atol=3e-7, rtol=0
        )
    assert torch.equal(stored, values(spec))  # nothing was written into
    back = spec.from_float(floats)
    assert back.dtype == stored.dtype
    if spec.alpha and spec.depth == "uint16":  # float32 has no 16 bits left where little is seen
        seen = (stored[:, -1:].int() > 6000).expand_as(stored)
        assert (back.int() - stored.int()).abs()[seen].max() == 0
    elif spec.alpha:
        assert torch.equal(back, torch.where(stored[:, -1:] > 0, stored, 0))
    elif spec.depth == "float32":
        torch.testing.assert_close(back, stored, atol=(spec.high - spec.low) * 2e-7, rtol=0)
    else:
        assert torch.equal(back, stored)


def test_8_bits_are_to_the_bit_what_they_were():
    images = torch.arange(256).to(torch.uint8).reshape(1, 1, 16, 16)
    spec = ImageSpec(1, 16, 16)
    assert torch.equal(spec.to_float(images), images.float().div_(127.5).sub_(1))
    outside = torch.linspace(-1.5, 1.5, 10_000).reshape(1, 1, 100, 100)
    assert torch.equal(spec.from_float(outside), (outside * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8))
    assert spec.to_uint8(images) is images
    assert spec.plain
    assert spec.pixel_format is None


def test_values_are_clipped_and_transparent_pixels_have_no_colour():
    spec = ImageSpec(4, 1, 1, alpha=True)
    for pixel, wanted in (
        ((-1.2, -1, 0, -1.5), (0, 0, 0, 0)),  # less than transparent
        ((0.0, 0.9, -1, 0), (255, 255, 0, 128)),  # more colour than alpha allows
        ((1.5, 0, -2, 1.3), (255, 128, 0, 255)),
    ):
        assert spec.from_float(torch.tensor(pixel).reshape(1, 4, 1, 1)).flatten().tolist() == list(wanted)


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ({"depth": "uint16", "low": 5.0, "high": 5.0}, "values from 5 to 5 do not fit uint16"),
        ({"high": 4095.0}, "values from 0 to 4095 do not fit uint8"),
        ({"depth": "uint16", "alpha": True, "high": 4095.0}, "do not fit uint16 with alpha"),
        ({"depth": "float32", "high": float("nan")}, "high"),
        ({"depth": "uint32"}, "depth"),
    ],
)
def test_what_contradicts_itself_is_refused(document, error):
    with pytest.raises(ValueError, match=error):
        ImageSpec.of(3, 8, document)


def test_an_image_holds_what_is_neither_higher_nor_wider():
    spec = ImageSpec(3, 6, 9)
    assert [spec.holds(size) for size in ((6, 9), (6, 10), (7, 6), (4, 4))] == [True, False, False, True]


def test_a_document_holds_what_differs():
    assert ImageSpec.of(3, 8, {}).pixel_format is None
    assert ImageSpec.of(3, 8, {"depth": "uint16", "high": 65535.0}).pixel_format == {"depth": "uint16"}


def test_what_takes_plain_images_refuses_others():
    ImageSpec.of(3, 8).need_plain("it")
    for channels, document in ((2, None), (4, {"alpha": True}), (3, {"depth": "uint16"})):
        with pytest.raises(UserError, match="it is for 8-bit grey or RGB, the images are"):
            ImageSpec.of(channels, 8, document).need_plain("it")
