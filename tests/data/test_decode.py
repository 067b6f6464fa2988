"""Stored files are decoded as the rules say, only faster: crops, scaled decoding, random boxes."""

import itertools

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from duetgan.data.decode import RandomCrop, centre_box, decode, decode_crop, first_rows
from duetgan.data.errors import ImageError
from duetgan.data.images import decode_file, encode
from duetgan.data.lmdb.format import CODEC_JPEG, CODEC_PNG, CODEC_RULES
from duetgan.data.records import plain_codec
from tests.conftest import assert_raises
from tests.data.conftest import as_file


def photograph(height: int = 150, width: int = 200, channels: int = 3) -> np.ndarray:
    """Smooth coloured noise, uint8 [height, width, channels]."""
    noise = np.random.default_rng(0).integers(0, 256, (12, 16, channels), dtype=np.uint8)
    return cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC).reshape(height, width, channels)


PHOTO, GREY = (Image.fromarray(photograph(channels=channels).squeeze()) for channels in (3, 1))
ROTATED = Image.Exif()
ROTATED[0x0112] = 6


def jpeg(progressive: bool = False, subsampling: int = 2, **options: object) -> bytes:
    return as_file(PHOTO, "JPEG", quality=90, progressive=progressive, subsampling=subsampling, **options)


KINDS = {
    "jpeg": (jpeg(), CODEC_JPEG),
    "progressive": (jpeg(progressive=True), CODEC_JPEG),
    "444": (jpeg(subsampling=0), CODEC_JPEG),
    "grey jpeg": (as_file(GREY, "JPEG"), CODEC_JPEG),
    "rotated jpeg": (jpeg(exif=ROTATED), CODEC_RULES),
    "cmyk jpeg": (as_file(PHOTO.convert("CMYK"), "JPEG"), CODEC_RULES),
    "png": (as_file(PHOTO), CODEC_PNG),
    "grey png": (as_file(GREY), CODEC_PNG),
    "rgba png": (as_file(PHOTO.convert("RGBA")), CODEC_RULES),
    "palette png": (as_file(PHOTO.quantize(16)), CODEC_RULES),
    "transparent png": (as_file(PHOTO, transparency=(1, 2, 3)), CODEC_RULES),
    "rotated png": (as_file(PHOTO, exif=ROTATED), CODEC_RULES),
    "16-bit png": (cv2.imencode(".png", photograph().astype(np.uint16) * 257)[1].tobytes(), CODEC_RULES),
    "webp": (as_file(PHOTO, "WEBP"), CODEC_RULES),
}


@pytest.mark.parametrize("kind", KINDS)
def test_fast_decoding_gives_the_pixels_of_the_rules(kind: str) -> None:
    content, expected = KINDS[kind]
    codec = plain_codec(content, 3)
    assert codec == expected
    np.testing.assert_array_equal(decode(content, codec, 3), decode_file(content, 3))


def test_colour_to_grey_is_left_to_the_rules_and_rows_below_the_crop_are_not_decoded(capfd):
    assert plain_codec(jpeg(), 1) == CODEC_RULES
    content, _ = KINDS["grey jpeg"]
    assert plain_codec(content, 1) == CODEC_JPEG
    np.testing.assert_array_equal(decode(content, CODEC_JPEG, 1), decode_file(content, 1))
    content = jpeg()
    assert decode(bytes(first_rows(content, 50, 150)), CODEC_JPEG, 3).shape == (66, 200, 3)
    assert first_rows(content, 150, 150) is content
    progressive = jpeg(progressive=True)
    assert first_rows(progressive, 50, 150) is progressive
    assert first_rows(b"\xff\xd8\xff", 5, 10) == b"\xff\xd8\xff"
    assert capfd.readouterr().err == ""  # libjpeg's remarks about the rest of the file


@pytest.mark.parametrize("kind", ["jpeg", "progressive", "444", "png", "rotated jpeg"])
@pytest.mark.parametrize("box", [(0, 0, 64, 64), (10, 30, 64, 64), (80, 80, 64, 64)])
def test_crop_without_scaling_is_part_of_the_image(kind: str, box: tuple[int, int, int, int]) -> None:
    content, codec = KINDS[kind]
    whole = decode_file(content, 3)
    top, left, height, width = box
    out = np.empty((3, 64, 64), np.uint8)
    decode_crop(content, codec, box, whole.shape[:2], out)
    np.testing.assert_array_equal(out.transpose(1, 2, 0), whole[top : top + height, left : left + width])


@pytest.mark.parametrize("side", [16, 30, 60])
def test_scaled_decoding_is_close_to_scaling_the_whole(side: int) -> None:
    smooth = cv2.resize(np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8), (200, 150))
    content, codec = as_file(Image.fromarray(smooth), "JPEG", quality=95, subsampling=0), CODEC_JPEG
    whole = decode_file(content, 3)
    box = (5, 20, 130, 140)
    out = np.empty((3, side, side), np.uint8)
    decode_crop(content, codec, box, (150, 200), out)
    top, left, height, width = box
    part = Image.fromarray(whole[top : top + height, left : left + width])
    expected = np.asarray(part.resize((side, side), Image.Resampling.BOX)).astype(int)
    assert np.abs(out.transpose(1, 2, 0) - expected).mean() < 1.5
    shifted = np.abs(out.transpose(1, 2, 0)[:, 1:] - expected[:, :-1]).mean()
    assert shifted > 3  # what one pixel of displacement would give


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32), st.sampled_from([(0.08, 1.0), (0.9, 1.0)]))
def test_random_boxes_lie_inside(height: int, width: int, seed: int, area: tuple[float, float]) -> None:
    top, left, h, w = RandomCrop(area=area).box(height, width, np.random.default_rng(seed))
    assert 0 <= top < top + h <= height
    assert 0 <= left < left + w <= width


def test_random_boxes_have_the_area_and_aspect_asked_for() -> None:
    draws = np.random.default_rng(0)
    boxes = np.array([RandomCrop(area=(0.2, 0.5)).box(400, 400, draws) for _ in range(2000)])
    shares = boxes[:, 2] * boxes[:, 3] / 400**2
    aspects = boxes[:, 3] / boxes[:, 2]
    assert 0.195 < shares.min() < 0.21
    assert 0.49 < shares.max() < 0.505
    assert abs(shares.mean() - 0.35) < 0.01
    assert 0.74 < aspects.min() < 0.77
    assert 1.30 < aspects.max() < 1.35
    assert abs(np.log(aspects).mean()) < 0.02
    assert abs((boxes[:, 0] / (400 - boxes[:, 2])).mean() - 0.5) < 0.02
    top, left, height, width = RandomCrop().box(10, 1000, np.random.default_rng(0))
    assert (top, height, width) == (0, 10, 13)
    assert left == (1000 - 13) // 2
    assert centre_box(10, 1001) == (0, 495, 10, 10)


def test_a_header_that_promises_too_much_is_not_decoded() -> None:
    """H11: 12 GiB were asked for; OpenCV has no limit of its own that fits into memory. Its own error came through."""
    for codec, payload in itertools.product((CODEC_RULES, CODEC_JPEG, CODEC_PNG), (b"nothing of the kind", b"")):
        assert_raises(ImageError, "cannot be decoded", decode, payload, codec, 3)
    png, jpeg_file = (bytearray(encode(np.zeros((8, 8, 3), np.uint8), kind)) for kind in ("png", "jpeg"))
    png[16:24] = (30000).to_bytes(4, "big") * 2
    assert_raises(ImageError, "too many pixels", decode, bytes(png), CODEC_PNG, 3)
    at = jpeg_file.index(b"\xff\xc0")
    jpeg_file[at + 5 : at + 9] = (65500).to_bytes(2, "big") * 2
    assert_raises(ImageError, "65500x65500 px, more than", decode, bytes(jpeg_file), CODEC_JPEG, 3)


@pytest.mark.parametrize("codec", [CODEC_RULES, CODEC_JPEG, CODEC_PNG])
def test_h11_a_header_is_compared_with_the_record_before_anything_is_decoded(codec, monkeypatch):
    """Within the limit of pixels, but not what the record says: it was decoded first."""
    content = encode(np.zeros((40, 60, 3), np.uint8), "png" if codec == CODEC_PNG else "jpeg")
    out = np.empty((3, 8, 8), np.uint8)
    assert decode(content, codec, 3, (40, 60)).shape == (40, 60, 3)
    for box in ((0, 0, 40, 60), (4, 4, 9, 9)):  # scaled while decoding, and the first rows alone
        decode_crop(content, codec, box, (40, 60), out)
    for name in ("cv2.imdecode", "simplejpeg.decode_jpeg", "PIL.ImageFile.ImageFile.load"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("it was decoded"))
    for height, width in ((40, 61), (39, 60), (8, 8)):
        with pytest.raises(ImageError, match=f"60x40 px by its header, {width}x{height} px by its record"):
            decode(content, codec, 3, (height, width))
        for box in ((0, 0, 8, 8), (0, 0, height, width)):
            assert_raises(ImageError, "by its record", decode_crop, content, codec, box, (height, width), out)
