import numpy as np
import pytest
import torch
from PIL import Image

from utils.errors import UserError
from utils.files import write_atomic
from utils.images import grid, save_png


def sample_images(n, channels=1, height=2, width=3):
    return torch.arange(n * channels * height * width, dtype=torch.uint8).view(n, channels, height, width)


def test_rows_run_left_to_right_and_empty_places_are_white():
    found = grid(sample_images(3), columns=2)
    assert found.shape == (4, 6, 1)
    first, second, third = (sample_image[0].numpy() for sample_image in sample_images(3))
    np.testing.assert_array_equal(found[:2, :3, 0], first)
    np.testing.assert_array_equal(found[:2, 3:, 0], second)
    np.testing.assert_array_equal(found[2:, :3, 0], third)
    assert (found[2:, 3:] == 255).all()


def test_scale_and_padding():
    found = grid(sample_images(2, channels=3), columns=2, scale=2, padding=1, background=7)
    assert found.shape == (4, 13, 3)
    np.testing.assert_array_equal(found[::2, :6:2].transpose(2, 0, 1), sample_images(2, channels=3)[0].numpy())
    np.testing.assert_array_equal(found[1::2, 1:6:2], found[::2, :6:2])
    assert (found[:, 6] == 7).all()


def test_default_is_about_square():
    assert grid(sample_images(10, height=2, width=2)).shape == (6, 8, 1)


@pytest.mark.parametrize("channels", [1, 3])
def test_saved_file_holds_the_grid_and_nothing_else_is_left(tmp_path, channels):
    path = tmp_path / "new" / "grid.png"
    save_png(grid(sample_images(4, channels=channels), columns=2), path)
    with Image.open(path) as image:
        pixels = np.asarray(image).reshape(4, 6, channels)
    np.testing.assert_array_equal(pixels, grid(sample_images(4, channels=channels), columns=2))
    assert [file.name for file in path.parent.iterdir()] == ["grid.png"]


@pytest.mark.parametrize(
    ("images", "options"),
    [
        (torch.zeros(1, 1, 2, 2), {}),
        (torch.zeros(1, 2, 2, 2, dtype=torch.uint8), {}),
        (torch.zeros(0, 1, 2, 2, dtype=torch.uint8), {}),
        (sample_images(1), {"columns": 0}),
        (sample_images(1), {"scale": 0}),
    ],
)
def test_what_is_no_grid_is_refused(images, options):
    with pytest.raises(ValueError, match=r"expected uint8|is empty"):
        grid(images, **options)


def test_a_place_that_cannot_be_written_is_told_and_the_old_file_stays(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(UserError, match="cannot write"):
        write_atomic(tmp_path / "file" / "below.png", b"new")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        write_atomic(tmp_path / "taken", b"new")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "taken"]
    assert (tmp_path / "file").read_bytes() == b"old"
