"""Images and words: grids, letters that a font has (H15: never boxes), aligned columns and shortened lines."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.inspect import save_grid
from duetgan.data.packing.records import pack_arrays
from duetgan.metrics.images import save_confusion
from duetgan.utils import images as fonts
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.images import PADDING, grid, save_captioned, save_png, save_rows, save_table
from duetgan.utils.text import columns
from tests.data.conftest import sample_images


def numbered(n, channels=1, height=2, width=3):
    return torch.arange(n * channels * height * width, dtype=torch.uint8).view(n, channels, height, width)


def test_a_grid_of_rows_shows_the_visible_images(tmp_path):
    """Of 16 bits: their range is black to white."""
    spec = ImageSpec(1, 8, 8, depth="uint16", low=1000, high=3000)
    values = torch.tensor([1000, 2000, 3000], dtype=torch.uint16)
    rows = [value.expand(1, 8, 8) for value in values]
    save_rows([rows], tmp_path / "x.png", columns=3, captions=(), spec=spec)
    save_captioned(rows, [""] * 3, tmp_path / "y.png", spec=spec)
    for name in ("x", "y"):
        shown = np.asarray(Image.open(tmp_path / f"{name}.png").convert("L"))
        assert np.unique(shown).tolist() == [0, 128, 255]


def test_rows_run_left_to_right_and_empty_places_are_white():
    images = numbered(3)
    found = grid(images, columns=2, spec=None)
    assert found.shape == (4, 6, 1)
    np.testing.assert_array_equal(found[:2, :, 0], torch.cat([images[0, 0], images[1, 0]], 1).numpy())
    np.testing.assert_array_equal(found[2:, :3, 0], images[2, 0].numpy())
    assert (found[2:, 3:] == 255).all()
    np.testing.assert_array_equal(grid(images[:1], spec=None), images[0].permute(1, 2, 0).numpy())
    assert grid(numbered(10, height=2, width=2), spec=None).shape == (6, 8, 1)  # about square by default


@pytest.mark.parametrize("channels", [1, 3])
def test_saved_file_holds_the_grid_and_nothing_else_is_left(tmp_path, channels):
    path = tmp_path / "new" / "grid.png"
    save_png(grid(numbered(4, channels=channels), columns=2, spec=None), path)
    with Image.open(path) as image:
        pixels = np.asarray(image).reshape(4, 6, channels)
    np.testing.assert_array_equal(pixels, grid(numbered(4, channels=channels), columns=2, spec=None))
    assert [file.name for file in path.parent.iterdir()] == ["grid.png"]


def shade(value, channels=1, side=8):
    return torch.full((channels, side, side), value, dtype=torch.uint8)


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("L"))


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 64), (3, 128)])
def test_captioned_images_are_drawn_as_they_are(tmp_path, channels, side):
    images = torch.randint(0, 256, (7, channels, side, side + 3), dtype=torch.uint8)
    save_captioned(list(images), ["a\nb"] * 7, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as written:
        assert written.mode == ("RGB" if channels == 3 else "L")
        found = np.asarray(written.convert("RGB"))
    scale = max(1, round(112 / side))
    height, width = side * scale, (side + 3) * scale
    cell = (height + 2 * 14 + 14, max(width, 112) + 12)
    assert found.shape == (2 * cell[0], 6 * cell[1], 3)
    for index, image in enumerate(images):
        top, left = index // 6 * cell[0] + 6, index % 6 * cell[1] + 6
        drawn = found[top : top + height : scale, left : left + width : scale]
        np.testing.assert_array_equal(drawn, image.permute(1, 2, 0).expand(-1, -1, 3).numpy())


@pytest.mark.parametrize("margin", [PADDING, 20])
def test_a_table_holds_the_images_pixel_by_pixel(tmp_path, margin):
    ramp = torch.arange(64, dtype=torch.uint8).reshape(1, 8, 8)
    rows = [[None, shade(50), shade(100)], [shade(150), ramp, shade(0)]]
    save_table(rows, tmp_path / "x.png", row_heads=["", "$a_b"], column_heads=["", "i\nMMMM", "one"], margin=margin)
    found = pixels(tmp_path / "x.png")
    height, width = found.shape
    last, left = 96 + PADDING, 3 * 96 + PADDING + margin + PADDING  # of the images, from the right and from below
    x = [width - left, width - left + 96 + margin, width - last]
    y = [height - last - 96 - margin, height - last]
    larger = ramp[0].numpy().repeat(12, 0).repeat(12, 1)
    for row, column, expected in ((0, 0, 255), (0, 1, 50), (0, 2, 100), (1, 0, 150), (1, 1, larger)):
        assert (found[y[row] : y[row] + 96, x[column] : x[column] + 96] == expected).all()
    assert (found[y[0] : y[0] + 96, x[1] + 96 : x[2]] == 255).all()
    above, beside = found[: y[0]], found[:, : x[0]]
    assert above[:14, x[2] : x[2] + 96].min() == 255  # one line stands next to its image, the first is free
    assert above[14:, x[2] : x[2] + 96].min() < 100
    assert beside[y[1] :].min() < 100
    save_table([[shade(9, 3, 128)]], tmp_path / "x.png", row_heads=["x" * 200], column_heads=["y" * 200])
    assert pixels(tmp_path / "x.png").shape[1] < 150 + 128 + 4 * PADDING


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2029", "\0"])
def test_what_cannot_be_drawn_in_a_class_name_is_a_space(tmp_path, end):
    rows = [[shade(0)], [shade(100)]]
    for name, head in (("odd", f"a{end}b"), ("plain", "a b")):
        save_rows(rows, tmp_path / f"{name}.png", columns=1, captions=[head, "c"], spec=None)
    np.testing.assert_array_equal(pixels(tmp_path / "odd.png"), pixels(tmp_path / "plain.png"))
    save_table([[shade(0)]], tmp_path / "x.png", row_heads=(), column_heads=[f"a{end}b"])


CAT = "\u732b"


def test_what_the_font_lacks_is_written_as_its_number():
    assert fonts.drawable("cat") == "cat"
    assert fonts.drawable("café Ж") == "café Ж"
    assert fonts.drawable(f"{CAT} a\nb\u2029") == "\\u732b a\\nb\\u2029"
    assert fonts.drawable("\U0001f40e") == "\\U0001f40e"


def test_class_names_of_all_scripts_are_drawn_without_a_warning(tmp_path):
    names = ["plain", CAT, "a\nb", "\u0634\u062c\u0631\u0629"]
    pack_arrays(tmp_path / "x.lmdb", sample_images(8), np.arange(8) % 4, names)
    drawn: list[str] = []
    text = ImageDraw.ImageDraw.text

    def draw(*arguments: Any, **options: Any) -> None:
        drawn.append(arguments[2])
        text(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(ImageDraw.ImageDraw, "text", draw)
        with LMDBReader(tmp_path / "x.lmdb") as reader:
            save_grid(reader, tmp_path / "x.png")
        save_confusion(np.eye(4).astype(int).tolist(), names, tmp_path / "c.png")
    assert drawn == ["plain", "\\u732b", "a b", names[3]]
    with Image.open(tmp_path / "c.png") as image:
        image.verify()


@pytest.mark.parametrize(
    ("align", "expected"),
    [
        ("<>", "name     n   share\na       12  0.5000\nlonger   3       -"),
        ("<", "name    n   share\na       12  0.5000\nlonger  3   -"),
        ("<><", "name     n  share\na       12  0.5000\nlonger   3  -"),
    ],
)
def test_columns_are_aligned_and_lines_end_without_spaces(align, expected):
    assert columns([("name", "n", "share"), ("a", "12", "0.5000"), ["longer", "3", "-"]], align) == expected
