import tracemalloc

import av
import numpy as np
import pytest
from PIL import Image, ImageSequence

from duetgan.commands import generate
from duetgan.inference.interpolate import check_film, enlargement, film
from duetgan.utils.errors import UserError
from duetgan.utils.files import building
from tests.conftest import assert_raises

COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [200, 120, 40]], np.uint8)


def quarters(number, side=16):
    """A frame of four colours, uint8 [H, W, 3], which `number` turns round."""
    places = np.arange(side) * 2 // side
    return COLOURS[(places[:, None] * 2 + places + number) % 4]


def ramp(number):
    """A grey frame uint8 [16, 16, 1] of all 256 values."""
    return ((np.arange(256) + number) % 256).astype(np.uint8).reshape(16, 16, 1)


def write(path, frames, *, fps=30, scale=1):
    with film(path, fps=fps, scale=scale) as add:
        for frame in frames:
            add(frame)
    return path


def gif_frames(path):
    """Frames uint8 [n, H, W, 3] and delays in ms."""
    with Image.open(path) as image:
        parts = [(np.asarray(f.convert("RGB")), f.info["duration"]) for f in ImageSequence.Iterator(image)]
    return np.stack([frame for frame, _ in parts]), [delay for _, delay in parts]


def mp4_frames(path):
    with av.open(str(path)) as container:
        planes = [frame.to_ndarray(format="yuv420p") for frame in container.decode(video=0)]
    return np.stack(planes)


def test_a_gif_is_lossless_in_few_colours_and_films_have_even_sides(tmp_path):
    for name, frames in (("grey.gif", [ramp(i) for i in (0, 1, 100)]), ("rgb.gif", [quarters(i) for i in range(3)])):
        found, _ = gif_frames(write(tmp_path / name, frames, scale=3))
        expected = np.stack([np.broadcast_to(frame, (16, 16, 3)) for frame in frames])
        np.testing.assert_array_equal(found, expected.repeat(3, axis=1).repeat(3, axis=2))
    assert len(gif_frames(write(tmp_path / "x.gif", [ramp(0)] * 4))[1]) == 4
    red, green = np.meshgrid(np.arange(0, 256, 4), np.arange(0, 256, 4))
    frame = np.stack([red, green, 255 - red], axis=2).astype(np.uint8)  # 4096 colours
    found, _ = gif_frames(write(tmp_path / "x.gif", [frame, frame[::-1]]))
    assert np.abs(found[0].astype(int) - frame).mean() < 8
    assert np.abs(found[1].astype(int) - frame[::-1]).mean() < 8
    sides = {8: 32, 32: 8, 100: 3, 256: 1, 1024: 1, 25: 12, 257: 2}  # of 25 px: 11 times would do, but 275 is odd
    assert {side: enlargement((side, side), None) for side in sides} == sides
    assert (enlargement((25, 25), 2), enlargement((32, 32), 1), enlargement((64, 25), None)) == (2, 1, 12)
    assert_raises(UserError, r"--scale 3: 75 px is an odd size.*take 4", enlargement, (25, 25), 3)


@pytest.mark.parametrize("fps", [1, 24, 30, 50])
def test_a_gif_keeps_its_speed_and_repeats(tmp_path, fps):
    frames = [np.full((8, 8, 1), number, np.uint8) for number in range(2 * fps)]
    path = write(tmp_path / "x.gif", frames, fps=fps)
    _, delays = gif_frames(path)
    assert len(delays) == 2 * fps
    assert sum(delays) == 2000
    assert max(delays) - min(delays) <= 10
    with Image.open(path) as image:
        assert image.info["loop"] == 0


def test_an_mp4_is_what_browsers_play(tmp_path):
    path = write(tmp_path / "x.mp4", [quarters(i // 8) for i in range(40)], fps=24, scale=4)
    with av.open(str(path)) as container:
        (stream,) = container.streams.video
        assert len(container.streams) == 1
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.frames, stream.width, stream.height) == (40, 64, 64)
        assert stream.average_rate == 24
        frame = next(container.decode(video=0))
        assert (int(frame.colorspace), int(frame.color_range)) == (1, 1)  # BT.709, 16 to 235
    content = path.read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat")
    assert content[4:8] == b"ftyp"


def test_an_mp4_shows_the_colours_in_bt709(tmp_path):
    """Y, U and V in the middle of each quarter, by the standard's formula (ITU-R BT.709, items 3.2 to 3.5)."""
    found = mp4_frames(write(tmp_path / "x.mp4", [quarters(i // 10) for i in range(30)], scale=4))
    assert found.shape == (30, 96, 64)
    for number in (5, 15, 25):
        luma, chroma = found[number, :64], found[number, 64:].reshape(2, 32, 32)
        for quarter in range(4):
            r, g, b = COLOURS[(quarter + number // 10) % 4] / 255
            y = 0.2126 * r + 0.7152 * g + 0.0722 * b
            u, v = (b - y) / 1.8556, (r - y) / 1.5748
            row, column = 16 + 32 * (quarter // 2), 16 + 32 * (quarter % 2)
            assert luma[row, column] == pytest.approx(16 + 219 * y, abs=4)
            assert chroma[0, row // 2, column // 2] == pytest.approx(128 + 224 * u, abs=4)
            assert chroma[1, row // 2, column // 2] == pytest.approx(128 + 224 * v, abs=4)


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_the_same_frames_give_the_same_bytes_and_memory_does_not_grow_with_the_film(tmp_path, suffix):
    a, b = (write(tmp_path / f"{name}{suffix}", map(quarters, range(9))).read_bytes() for name in "ab")
    assert a == b

    def peak(count):
        tracemalloc.start()
        write(tmp_path / f"x{suffix}", (quarters(number, 128) for number in range(count)))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(2)
    assert peak(120) < peak(12) + 2 * 128 * 128 * 3


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_a_film_appears_whole_or_not_at_all(tmp_path, suffix):
    path = tmp_path / "new" / f"x{suffix}"
    write(path, [quarters(0)])
    before = path.read_bytes()

    def stopped():
        with film(path, fps=30, scale=1) as add:
            add(quarters(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    write(path, [quarters(1)])
    assert path.read_bytes() != before
    assert path.stat().st_mode & 0o777 == 0o644


def test_names_and_speeds_are_checked(tmp_path):
    for name in ("x.avi", "x"):
        assert_raises(UserError, "end in .mp4 or .gif", generate.parser().parse_args, ["interpolate", "--out", name])
    assert_raises(UserError, "at most 50", check_film, tmp_path / "x.gif", fps=51)
    check_film(tmp_path / "x.GIF", fps=50)
    check_film(tmp_path / "x.mp4", fps=120)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/x.gif"), building(tmp_path / "file" / "x.gif"):
        pass
    (tmp_path / "x.gif").mkdir()
    assert_raises(UserError, r"cannot write .*x.gif", write, tmp_path / "x.gif", [quarters(0)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "x.gif"]
