"""The look at images: every kind of source, what it finds, and one line for what cannot be used."""

import csv
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from duetgan.planning.measure import FEWEST, survey
from duetgan.utils.errors import UserError
from duetgan.utils.script import run_cli


def draw(file: Path, side: int = 20, mode: str = "RGB", seed: int = 0) -> Path:
    """An image file of noise, grey noise for mode L."""
    shape = {"L": (side, side + 4), "RGB": (side, side + 4, 3), "RGBA": (side, side + 4, 4)}[mode]
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, shape, np.uint8), mode).save(file)
    return file


@pytest.fixture
def folder(tmp_path):
    for label, count in (("cats", 12), ("dogs", 8)):
        for number in range(count):
            draw(tmp_path / "photos" / label / f"{number}.png", seed=number)
    return tmp_path / "photos"


def test_class_folders(folder):
    found = survey(str(folder))
    assert found.text() == "20 images, 2 classes of 8 to 12, about 20 px, colour"
    assert (found.held_out, found.unreadable) == (0, "")
    assert found.seconds > 0
    (folder / "cats" / "0.png").write_bytes(b"no image")
    assert "0.png is not an image" in survey(str(folder)).unreadable


def test_flat_folder_zip_and_csv(tmp_path, folder):
    flat = tmp_path / "flat"
    for number in range(FEWEST):
        draw(flat / f"{number}.png", seed=number)
    assert survey(str(flat)).classes == 0
    assert "no labels" in survey(str(flat)).text()
    archive = tmp_path / "photos.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for image in sorted(folder.rglob("*.png")):
            file.write(image, image.relative_to(folder))
    assert (survey(str(archive)).count, survey(str(archive)).classes) == (20, 2)
    table = tmp_path / "photos.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        rows.writerows([image, image.parent.name] for image in sorted(folder.rglob("*.png")))
    assert (survey(str(table)).count, survey(str(table)).classes) == (20, 2)


def test_the_embedded_sample_has_its_own_held_out_part():
    found = survey("sample")
    assert (found.count, found.held_out, found.classes, found.side, found.channels) == (10_000, 2000, 10, 28, 1)


def test_grey_and_transparent_images_are_seen(tmp_path):
    for number in range(FEWEST):
        draw(tmp_path / "grey" / f"{number}.png", mode="L", seed=number)
        draw(tmp_path / "clear" / f"{number}.png", mode="RGBA", seed=number)
    assert survey(str(tmp_path / "grey")).channels == 1
    assert survey(str(tmp_path / "clear")).transparent
    assert "transparent" in survey(str(tmp_path / "clear")).text()
    draw(tmp_path / "grey" / "0.png", seed=1)  # one of them in colour
    assert survey(str(tmp_path / "grey")).channels == 3


@pytest.mark.parametrize(
    ("count", "name", "told"),
    [
        (0, "", "holds no images (it is empty); supported are"),
        (20, "words.txt", "holds no images (only 20 .txt); supported are"),
        (20, "words.png", "none of its images can be read; the first: "),
        (FEWEST - 1, "image.png", f"holds {FEWEST - 1} images; give {FEWEST} or more"),
    ],
)
def test_what_cannot_be_used_is_one_line_with_the_remedy(tmp_path, capsys, count, name, told):
    (tmp_path / "images").mkdir()
    for number in range(count):
        file = draw(tmp_path / "images" / f"{number}.png", seed=number)
        if name.startswith("words"):
            file.write_text("words")
            file.rename(file.with_suffix(Path(name).suffix))
    with pytest.raises(UserError) as error:
        survey(str(tmp_path / "images"))
    assert told in str(error.value)
    assert run_cli(lambda _: print(survey(str(tmp_path / "images"))), []) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
