"""Duplicates by name, counted once, told in a few lines (U4)."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from duetgan.commands.duplicates import main as duplicates_main
from duetgan.commands.pack import main
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.packing.inspect import verify
from duetgan.data.packing.pack import pack
from duetgan.data.packing.records import pack_arrays
from duetgan.utils.errors import UserError
from tests.data.conftest import change, sample_images, source_at, succeed
from tests.data.packing.test_duplicates import photos as photo_like
from tests.data.packing.test_duplicates import saved


def write(folder: Path, **pictures: np.ndarray) -> Path:
    """Images, uint8 [3, H, W], as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        Image.fromarray(picture.transpose(1, 2, 0)).save(folder / f"{name}.png")
    return folder


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
    count = "8 exact duplicates of other images, in 8 groups"
    assert any(line.endswith(count) for line in packed)
    assert {count, "30 pairs of near duplicates"} <= set(later)
    assert "first07.png, third07.png" in later
    pairs = [re.fullmatch(r"(\S+) ~ (\S+), correlation [01]\.\d{3}", line) for line in later if " ~ " in line]
    found = {(match[1], match[2]) for match in pairs if match}
    assert found == {(f"first{n:02d}.png", f"second{n:02d}.png") for n in range(30)}


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
    assert printed(capsys, duplicates_main, *files[::-1]) == [f"no image of {files[0]} is also in {files[1]}"]
    assert printed(capsys, duplicates_main, files[0]) == ["no exact duplicates"]
    printed(capsys, main, tmp_path / "a", files[1], "--overwrite")
    assert "a0.png = a0.png" in printed(capsys, duplicates_main, *files)


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
