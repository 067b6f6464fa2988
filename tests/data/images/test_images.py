"""Every kind of image is converted by its rule or refused with its reason."""

import io
import itertools
import struct
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from duetgan.data.errors import ImageError
from duetgan.data.images import FORMATS, centre_box, encode, fit, has_16_bits, thumbnail
from duetgan.data.images.decode import CODEC_JPEG, CODEC_PNG, CODEC_RULES, RandomCrop, decode, decode_crop, first_rows
from duetgan.data.images.values import decode_image
from duetgan.data.packing.records import plain_codec
from duetgan.utils.image_spec import ImageSpec
from tests.conftest import assert_raises
from tests.data.conftest import as_file, decode_file
from tests.data.images.values_files import png

COLOUR, PLAIN = ImageSpec(3, 0, 0), ImageSpec(1, 0, 0)
GRADIENT = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)


def test_files_of_one_or_more_frames_exact_or_near():
    for kind in ("PNG", "BMP", "TIFF", "PPM"):
        np.testing.assert_array_equal(decode_file(as_file(Image.fromarray(GRADIENT), kind), 3), GRADIENT)
    for kind in ("JPEG", "WEBP", "GIF", "AVIF"):
        decoded = decode_file(as_file(Image.new("RGB", (16, 16), (200, 100, 50)), kind), 3)
        assert decoded.shape == (16, 16, 3)
        assert np.abs(decoded.astype(int) - (200, 100, 50)).max() <= 4
    for kind in ("MPO", "GIF", "PNG", "WEBP", "TIFF"):
        first, second = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
        content = as_file(first, kind, save_all=True, append_images=[second])
        if kind == "MPO":
            assert decode_file(content, 3)[0, 0, 0] > 250
            continue
        assert_raises(ImageError, r"animated or has several pages", decode_file, content, 3)
    assert_raises(ImageError, "only 2000x3 px", decode_file, as_file(Image.new("L", (2000, 3))), 1)


def test_d6_heic_needs_a_package_that_is_named(monkeypatch):
    content = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + as_file(Image.fromarray(GRADIENT))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert_raises(ImageError, "is a HEIC image, .* pip install pillow-heif", decode_file, content, 3)

    def register() -> None:
        monkeypatch.setattr(Image, "OPEN", Image.OPEN | {"HEIF": (lambda file, _: behind(file), None)})

    def behind(file: io.BytesIO) -> Image.Image:
        return Image.open(io.BytesIO(file.read()[24:]), formats=["PNG"])

    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(register_heif_opener=register))
    np.testing.assert_array_equal(decode_file(content, 3), GRADIENT)


def test_grey_to_rgb_and_back_and_other_modes():
    grey = GRADIENT[:, :, 0]
    np.testing.assert_array_equal(decode_file(as_file(Image.fromarray(grey)), 1), grey[:, :, None])
    luma = np.round(GRADIENT @ (0.299, 0.587, 0.114))
    assert np.abs(decode_file(as_file(Image.fromarray(GRADIENT)), 1)[:, :, 0] - luma).max() <= 1

    for count in (2, 4, 7):
        assert_raises(ImageError, f"has {count} channels", decode_image, np.zeros((4, 4, count), np.uint8), COLOUR)
    cmyk = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    np.testing.assert_allclose(decode_file(as_file(cmyk, "JPEG", quality=100), 3)[0, 0], (0, 255, 255), atol=3)
    assert (decode_file(as_file(Image.new("1", (8, 8), 1)), 1) == 255).all()
    palette = Image.fromarray(GRADIENT).quantize(8)
    np.testing.assert_array_equal(decode_file(as_file(palette), 3), np.asarray(palette.convert("RGB")))


def test_sixteen_bits_keep_their_high_byte_and_h26_32_bits_or_signs_are_refused():
    values = np.arange(256, dtype=np.uint16).reshape(16, 16) * 256 + 77
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(decode_file(as_file(Image.fromarray(values), kind), 1)[:, :, 0], values >> 8)
        assert has_16_bits(as_file(Image.fromarray(values), kind))
        assert not has_16_bits(as_file(Image.fromarray(values.astype(np.uint8)), kind))
    rows = np.tile(np.array([0x1234, 0xFF01, 0x00FF], np.uint16), (4, 4, 1))
    assert (decode_file(png(rows), 3) == (0x12, 0xFF, 0x00)).all()
    assert has_16_bits(png(rows))
    # small values too: nothing says whether 255 or 65,535 is white
    small = np.arange(256).reshape(16, 16)
    with pytest.raises(ImageError, match="has 32-bit or signed pixels; save it with 8 or 16 bits"):
        decode_file(as_file(Image.fromarray(small.astype(np.int32)), "TIFF"), 1)
    signed = bytearray(as_file(Image.fromarray(small.astype(np.uint16)), "TIFF", tiffinfo={339: 2}))
    assert_raises(ImageError, "has 32-bit or signed pixels", decode_file, bytes(signed), 1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    upright = np.zeros((16, 24, 3), np.uint8)
    upright[:8, :8] = 255  # white at the top left
    turned = [upright, upright[:, ::-1], upright[::-1, ::-1], upright[::-1], upright.transpose(1, 0, 2)]
    turned += [np.rot90(upright, 1), upright[::-1, ::-1].transpose(1, 0, 2), np.rot90(upright, -1)]
    stored = Image.fromarray(np.ascontiguousarray(turned[orientation - 1]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode_file(as_file(stored, "JPEG", quality=100, exif=exif), 3)
    assert decoded.shape == upright.shape
    assert np.abs(decoded.astype(int) - upright).max() <= 8


@pytest.mark.parametrize("filters", ["ours", "reset"])
@pytest.mark.parametrize("side", [9_500, 20_000])  # Pillow warns above the limit and raises above twice the limit
def test_huge_images_are_refused_before_they_are_decoded(side, filters):
    content = bytearray(as_file(Image.new("RGB", (8, 8)), "BMP"))
    content[18:26] = struct.pack("<ii", side, side)
    with warnings.catch_warnings():
        if filters == "reset":  # as a program may do that embeds us
            warnings.resetwarnings()
            warnings.simplefilter("ignore")
        assert_raises(ImageError, "more than 89,478,485 pixels", decode_file, bytes(content), 3)
        assert_raises(ImageError, "pixels", decode, bytes(content), CODEC_RULES, COLOUR)


def test_remarks_about_exif_data_are_not_shown():
    code = "import warnings, data.images; warnings.warn_explicit('odd', UserWarning, 'x', 1, module='PIL.Image')"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", FORMATS)
def test_any_damage_is_an_image_error_or_an_image(kind):
    noise, random = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), np.random.default_rng(1)
    content = as_file(Image.fromarray(noise), kind)
    for share in (0.1, 0.5, 0.95):
        assert_raises(ImageError, r"truncated|not an image", decode_file, content[: int(share * len(content))], 3)
    for position in range(60, len(content), 997) if kind == "PNG" else ():  # its checksums notice any bit
        with pytest.raises(ImageError):
            decode_file(content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :], 3)
    for _ in range(60):
        damaged = bytearray(content)
        for position in random.integers(0, min(len(content), 400), 3):
            damaged[position] = random.integers(256)
        try:
            decoded = decode_file(bytes(damaged), 3)
        except ImageError:
            continue
        assert decoded.ndim == 3


def test_crop_takes_the_middle_pad_keeps_pixels_exact_takes_no_other_size():
    wide = np.zeros((8, 20, 3), np.uint8)
    wide[:, 6:14] = 200
    for image, size in ((wide, 8), (wide.transpose(1, 0, 2), 8), (wide, 4), (wide, 16)):
        assert (fit(image, size, "crop") == 200).all()
    stripes = np.zeros((64, 64, 1), np.uint8)
    stripes[:, ::2] = 255
    assert np.abs(fit(stripes, 16, "crop").astype(int)[:, 2:-2] - 127).max() < 12  # not stripes of black and white
    sample_image = GRADIENT[:13, :12]
    padded = fit(sample_image, 16, "pad")
    np.testing.assert_array_equal(padded[1:14, 2:14], sample_image)
    assert padded.sum(dtype=int) == sample_image.sum(dtype=int)
    larger = fit(np.full((40, 20, 1), 99, np.uint8), 10, "pad")
    assert larger.shape == (10, 10, 1)
    assert (larger[:, 2:7] == 99).all()  # 5 columns, 2 before and 3 after
    assert larger.sum(dtype=int) == 99 * 50
    hidden = np.zeros((32, 32, 4), np.uint8)
    hidden[:, :16] = (10, 20, 30, 255)
    hidden[:, 16:] = (255, 255, 255, 0)  # white, but transparent
    for how in ("pad", "crop", "shorter-side-12+bilinear+centre-crop"):
        scaled = fit(hidden, 9, how, alpha=True)
        shown = scaled[scaled[..., 3] > 0]
        assert np.abs(shown[:, :3].astype(int) - (10, 20, 30)).max() <= 8
    photo = photograph()
    for how in ("pad", "crop", "shorter-side-20+bilinear+centre-crop"):  # of 16 bits by the same filter
        scaled, deep = (fit(image, 16, how).astype(int) for image in (photo, photo.astype(np.uint16) * 257))
        assert np.abs(deep - 257 * scaled).mean() <= 257
    assert fit(GRADIENT, 16, "exact") is GRADIENT
    assert_raises(ImageError, "is 12x16 px where 16x16 was expected; pass --size", fit, GRADIENT[:, :12], 16, "exact")


def test_thumbnails_repeat_the_pixels_of_small_images_and_jpegs_keep_all_colours():
    small = thumbnail(GRADIENT[:5, :4, :1], 8)
    assert small.shape == (3, 8, 8)
    assert small.dtype == np.uint8
    np.testing.assert_array_equal(small, GRADIENT[:4, :4, 0].repeat(2, 0).repeat(2, 1)[None].repeat(3, 0))
    assert thumbnail(GRADIENT, 8).shape == (3, 8, 8)
    expected: Any = Image.open(io.BytesIO(as_file(Image.fromarray(GRADIENT), "JPEG", quality=95, subsampling=0)))
    found: Any = Image.open(io.BytesIO(encode(GRADIENT, "jpeg")))
    assert (found.quantization, found.layer) == (expected.quantization, expected.layer)  # the sampling of each colour


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
def test_fast_decoding_gives_the_pixels_of_the_rules(kind):
    content, expected = KINDS[kind]
    codec = plain_codec(content, 3)
    assert codec == expected
    np.testing.assert_array_equal(decode(content, codec, COLOUR), decode_file(content, 3))


def test_colour_to_grey_is_left_to_the_rules_and_rows_below_the_crop_are_not_decoded(capfd):
    assert plain_codec(jpeg(), 1) == CODEC_RULES
    content, _ = KINDS["grey jpeg"]
    assert plain_codec(content, 1) == CODEC_JPEG
    np.testing.assert_array_equal(decode(content, CODEC_JPEG, PLAIN), decode_file(content, 1))
    content = jpeg()
    assert decode(bytes(first_rows(content, 50, 150)), CODEC_JPEG, COLOUR).shape == (66, 200, 3)
    assert first_rows(content, 150, 150) is content
    progressive = jpeg(progressive=True)
    assert first_rows(progressive, 50, 150) is progressive
    assert first_rows(b"\xff\xd8\xff", 5, 10) == b"\xff\xd8\xff"
    assert capfd.readouterr().err == ""  # libjpeg's remarks about the rest of the file


@pytest.mark.parametrize("kind", ["jpeg", "progressive", "444", "png", "rotated jpeg"])
@pytest.mark.parametrize("box", [(0, 0, 64, 64), (10, 30, 64, 64), (80, 80, 64, 64)])
def test_crop_without_scaling_is_part_of_the_image(kind, box):
    content, codec = KINDS[kind]
    whole = decode_file(content, 3)
    top, left, height, width = box
    out = np.empty((3, 64, 64), np.uint8)
    decode_crop(content, codec, box, whole.shape[:2], out, COLOUR)
    np.testing.assert_array_equal(out.transpose(1, 2, 0), whole[top : top + height, left : left + width])


@pytest.mark.parametrize("side", [16, 30, 60])
def test_scaled_decoding_is_close_to_scaling_the_whole(side):
    smooth = cv2.resize(np.random.default_rng(0).integers(0, 256, (3, 4, 3), dtype=np.uint8), (200, 150))
    content, codec = as_file(Image.fromarray(smooth), "JPEG", quality=95, subsampling=0), CODEC_JPEG
    whole = decode_file(content, 3)
    box = (5, 20, 130, 140)
    out = np.empty((3, side, side), np.uint8)
    decode_crop(content, codec, box, (150, 200), out, COLOUR)
    top, left, height, width = box
    part = Image.fromarray(whole[top : top + height, left : left + width])
    expected = np.asarray(part.resize((side, side), Image.Resampling.BOX)).astype(int)
    assert np.abs(out.transpose(1, 2, 0) - expected).mean() < 1.5
    shifted = np.abs(out.transpose(1, 2, 0)[:, 1:] - expected[:, :-1]).mean()
    assert shifted > 3  # what one pixel of displacement would give


def test_random_boxes_have_the_area_and_aspect_asked_for():
    draws = np.random.default_rng(0)
    boxes = np.array(
        [RandomCrop(area=(0.2, 0.5), aspect=(3 / 4, 4 / 3)).box(400, 400, draws, (1, 1)) for _ in range(2000)]
    )
    shares = boxes[:, 2] * boxes[:, 3] / 400**2
    aspects = boxes[:, 3] / boxes[:, 2]
    assert 0.195 < shares.min() < 0.21
    assert 0.49 < shares.max() < 0.505
    assert abs(shares.mean() - 0.35) < 0.01
    assert 0.74 < aspects.min() < 0.77
    assert 1.30 < aspects.max() < 1.35
    assert abs(np.log(aspects).mean()) < 0.02
    assert abs((boxes[:, 0] / (400 - boxes[:, 2])).mean() - 0.5) < 0.02
    assert boxes[:, :2].min() >= 0
    assert (boxes[:, :2] + boxes[:, 2:]).max() <= 400
    crop = RandomCrop(area=(0.08, 1.0), aspect=(3 / 4, 4 / 3))
    top, left, height, width = crop.box(10, 1000, np.random.default_rng(0), (1, 1))
    assert (top, height, width) == (0, 10, 13)
    assert left == (1000 - 13) // 2
    # no crop that is at least 1.5 times and at most 8/3 times as wide as high fits: the nearest in the middle
    for size, expected in (((10, 1000), (0, 486, 10, 27)), ((1000, 10), (496, 0, 7, 10))):
        assert crop.box(*size, np.random.default_rng(0), (12, 24)) == expected
    assert centre_box(10, 1001) == (0, 495, 10, 10)


def test_a_header_that_promises_too_much_is_not_decoded():
    """H11: 12 GiB were asked for; OpenCV has no limit of its own that fits into memory. Its own error came through."""
    for codec, payload in itertools.product((CODEC_RULES, CODEC_JPEG, CODEC_PNG), (b"nothing of the kind", b"")):
        told = "is not an image|is an empty file" if codec == CODEC_RULES else "cannot be decoded"
        assert_raises(ImageError, told, decode, payload, codec, COLOUR)
    png, jpeg_file = (bytearray(encode(np.zeros((8, 8, 3), np.uint8), kind)) for kind in ("png", "jpeg"))
    png[16:24] = (30000).to_bytes(4, "big") * 2
    assert_raises(ImageError, "more than 89,478,485 pixels", decode, bytes(png), CODEC_PNG, COLOUR)
    at = jpeg_file.index(b"\xff\xc0")
    jpeg_file[at + 5 : at + 9] = (65500).to_bytes(2, "big") * 2
    assert_raises(ImageError, "more than 89,478,485 pixels", decode, bytes(jpeg_file), CODEC_JPEG, COLOUR)


@pytest.mark.parametrize("codec", [CODEC_RULES, CODEC_JPEG, CODEC_PNG])
def test_h11_a_header_is_compared_with_the_record_before_anything_is_decoded(codec, monkeypatch):
    """Within the limit of pixels, but not what the record says: it was decoded first."""
    content = encode(np.zeros((40, 60, 3), np.uint8), "png" if codec == CODEC_PNG else "jpeg")
    out = np.empty((3, 8, 8), np.uint8)
    assert decode(content, codec, COLOUR, (40, 60)).shape == (40, 60, 3)
    for box in ((0, 0, 40, 60), (4, 4, 9, 9)):  # scaled while decoding, and the first rows alone
        decode_crop(content, codec, box, (40, 60), out, COLOUR)
    for name in ("cv2.imdecode", "simplejpeg.decode_jpeg", "PIL.ImageFile.ImageFile.load"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("it was decoded"))
    for height, width in ((40, 61), (39, 60), (8, 8)):
        with pytest.raises(ImageError, match=f"60x40 px by its header, {width}x{height} px by its record"):
            decode(content, codec, COLOUR, (height, width))
        for box in ((0, 0, 8, 8), (0, 0, height, width)):
            assert_raises(ImageError, "by its record", decode_crop, content, codec, box, (height, width), out, COLOUR)
