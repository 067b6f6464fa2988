"""Duplicates by name, counted once, told in a few lines (U4)."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from duetgan.commands.duplicates import main as duplicates_main
from duetgan.commands.pack import main
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.duplicates import find
from duetgan.data.packing.inspect import verify
from duetgan.data.packing.pack import pack
from duetgan.data.packing.records import pack_arrays
from duetgan.utils.errors import UserError
from tests.data.conftest import change, sample_images, source_at, succeed
from tests.data.packing.test_duplicates import photos as photo_like
from tests.data.packing.test_duplicates import saved


def heart(colour: str, side: int = 64) -> Image.Image:
    """A heart on white."""
    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)
    middle = side // 2
    draw.polygon([(4, middle - 4), (side - 4, middle - 4), (middle, side - 4)], fill=colour)
    for left in (3, middle - 2):
        draw.ellipse([left, 8, left + middle - 1, middle + 10], fill=colour)
    return image


def write(folder: Path, **pictures: Image.Image | np.ndarray) -> Path:
    """Images, or their pixels uint8 [3, H, W], as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        image = Image.fromarray(picture.transpose(1, 2, 0)) if isinstance(picture, np.ndarray) else picture
        image.save(folder / f"{name}.png")
    return folder


def test_colours_count_also_in_a_crowd_and_move_with_the_image(tmp_path):
    def searched(pictures: Sequence[np.ndarray]) -> tuple[set[tuple[int, int]], int]:
        """The near duplicates among images uint8 [H, W, 3], and how many pairs were compared."""
        pack_arrays(tmp_path / "x.lmdb", np.stack(pictures).transpose(0, 3, 1, 2), overwrite=True)
        report = find(LMDBReader(tmp_path / "x.lmdb"), similar=True)
        return {(pair.record, pair.other_record) for pair in report.near or []}, report.candidates

    hearts = [np.array(heart(colour)) for colour in ("#00b050", "#a04bd0", "#00b858", "#08a850")]
    grey = [np.array(Image.fromarray(one).convert("L")).astype(int) for one in hearts[:2]]
    assert np.corrcoef(grey[0].ravel(), grey[1].ravel())[0, 1] > 0.999  # by their greys they are one
    assert searched(hearts)[0] == {(0, 2), (0, 3), (2, 3)}
    shades = [(0, 170 + number, 80) for number in range(7)] + [(160 + number, 75, 208) for number in range(7)]
    pairs, candidates = searched([np.array(heart("#{:02x}{:02x}{:02x}".format(*shade))) for shade in shades])
    assert candidates == 14 * 13 // 2  # each has 13, a crowd
    assert len(pairs) == 2 * 7 * 6 // 2
    wide = np.zeros((68, 68, 3), np.uint8) + 255
    wide[2:66, 2:66] = np.array(heart("#e00010"))
    assert searched([wide[2:66, 2:66], wide[2:66, 4:68]])[0] == {(0, 1)}  # by 2 px of 64


def printed(capsys: pytest.CaptureFixture[str], main: Any, *arguments: str | Path) -> list[str]:
    """The lines of a command that succeeds."""
    capsys.readouterr()
    succeed(main, *arguments)
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_one_count_from_both_commands(tmp_path, capsys):
    arrays = photo_like(40)
    folder = tmp_path / "photos"
    for kind, some in (("first", arrays), ("second", saved(arrays[:30], 70)), ("third", arrays[:8])):
        write(folder, **{f"{kind}{number:02d}": one for number, one in enumerate(some)})
    (folder / "broken.png").write_text("no image")  # records are not numbers of files
    dest = tmp_path / "x.lmdb"
    packed = printed(capsys, main, folder, dest, "--on-error", "skip")
    later = printed(capsys, duplicates_main, dest, "--similar")
    assert any(line.endswith("8 exact duplicates in 8 groups") for line in packed)
    assert {"8 exact duplicates in 8 groups", "30 pairs of near duplicates"} <= set(later)
    # A handful, by name; all of them from the other command.
    assert sum("/first" in line for line in packed) == 5
    assert f"{folder}/first03.png, {folder}/third03.png" in packed
    assert "and 3 groups more, see duet duplicates" in packed
    assert "first07.png, third07.png" in later
    pairs = [re.fullmatch(r"(\S+) ~ (\S+), correlation [01]\.\d{3}", line) for line in later if " ~ " in line]
    found = {(match[1], match[2]) for match in pairs if match}
    assert found == {(f"first{n:02d}.png", f"second{n:02d}.png") for n in range(30)}
    document = json.loads("".join(printed(capsys, duplicates_main, dest, "--json")))
    assert document["names"][str(document["exact"][0]["records"][0])] == "first00.png"


def test_leaks_go_by_the_names_of_both(tmp_path, capsys):
    arrays = photo_like(3)
    train = write(tmp_path / "train", a=arrays[0], b=arrays[1])
    val = write(tmp_path / "val", c=arrays[1], d=arrays[2])
    files = tmp_path / "train.lmdb", tmp_path / "val.lmdb"
    printed(capsys, main, train, files[0])
    printed(capsys, main, val, files[1])
    assert "b.png = c.png" in printed(capsys, duplicates_main, *files)


def test_similar_images_of_two_files_go_by_the_names_of_both(tmp_path, capsys):
    arrays = photo_like(5)
    files = tmp_path / "a.lmdb", tmp_path / "b.lmdb"
    printed(capsys, main, write(tmp_path / "a", **{f"a{n}": image for n, image in enumerate(arrays)}), files[0])
    copies = {f"b{n}": image for n, image in enumerate(saved(arrays[1:4], 70))}
    printed(capsys, main, write(tmp_path / "b", **copies), files[1])
    lines = printed(capsys, duplicates_main, *files[::-1], "--similar")
    assert sorted(line.split(",")[0] for line in lines if " ~ " in line) == [
        f"b{n}.png ~ a{n + 1}.png" for n in range(3)
    ]
    assert not any(" ~ " in line for line in printed(capsys, duplicates_main, *files[::-1]))


def test_names_survive_packing_anew_and_are_checked(tmp_path):
    arrays = sample_images(3)
    pack(source_at(write(tmp_path / "x", a=arrays[0], b=arrays[1], c=arrays[2])), tmp_path / "x.lmdb")
    pack(source_at(tmp_path / "x.lmdb"), tmp_path / "y.lmdb", encoding="png")
    assert LMDBReader(tmp_path / "y.lmdb").names() == ["a.png", "b.png", "c.png"]
    pack_arrays(tmp_path / "z.lmdb", sample_images(2))
    assert LMDBReader(tmp_path / "z.lmdb").names() == ["", ""]
    change(tmp_path / "y.lmdb", b"name/00000000", b'\0\0\0\0["a.png", "b.png", "d.png"]')
    with pytest.raises(UserError, match="record 0 to 2 is damaged: the checksum of its names does not match"):
        LMDBReader(tmp_path / "y.lmdb").names()
    assert sorted(verify(LMDBReader(tmp_path / "y.lmdb")).records) == [0, 1, 2]
