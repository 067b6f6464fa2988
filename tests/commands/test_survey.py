"""The look at images: every kind of source, what it finds, and one line for what cannot be used."""

import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from duetgan.commands.planning import measure, steps
from duetgan.commands.planning.measure import FEWEST, survey
from duetgan.commands.planning.plan import choose
from duetgan.commands.planning.steps import Quickstart
from duetgan.commands.quickstart import main as quickstart
from duetgan.utils.config.cli import Parser, add_table_options
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from tests.commands.machines import SAMPLE, Fast
from tests.commands.test_measure import write_weights
from tests.conftest import assert_raises


def images(place: Path, count: int = FEWEST, mode: str = "RGB") -> str:
    """A folder of image files of noise, grey noise for mode L."""
    place.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 255, (20, 24, 4), np.uint8)
        Image.fromarray(noise[..., 0] if mode == "L" else noise[..., : len(mode)], mode).save(place / f"{number}.png")
    return str(place)


@pytest.fixture
def folder(tmp_path):
    for label, count in (("cats", 12), ("dogs", 8)):
        images(tmp_path / "photos" / label, count)
    return tmp_path / "photos"


def test_class_folders(folder, monkeypatch):
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=itertools.count(100.0, 5.0).__next__))
    Image.new("RGB", (300, 400)).save(folder / "cats" / "2.png")
    found = survey(str(folder))
    assert found.text() == "images: 20; 2 classes with at least 8 images each; about 20 px, colour"
    assert (found.held_out, found.unreadable, found.seconds) == (0, "", 0.25)
    monkeypatch.setattr(measure, "DECODED", 3)  # evenly spaced: the first, one in the middle, the last
    (folder / "dogs" / "7.png").write_bytes(b"no image")
    assert re.search(r"\b7.png is not an image", survey(str(folder)).unreadable)
    for number in (1, 0):
        (folder / "cats" / f"{number}.png").write_bytes(b"no image")
    assert re.search(r"\b0.png is not an image", survey(str(folder)).unreadable)


def test_flat_folder_zip_and_csv(tmp_path, folder):
    flat = survey(images(tmp_path / "flat"))
    assert (flat.classes, flat.text()) == (0, "images: 10; no labels; about 20 px, colour")
    images(tmp_path / "single" / "cats")
    assert survey(str(tmp_path / "single")).text() == "images: 10; one class; about 20 px, colour"
    archive, table = shutil.make_archive(str(tmp_path / "a"), "zip", folder), tmp_path / "photos.csv"
    rows = [f"{image},{image.parent.name}" for image in sorted(folder.rglob("*.png"))]
    table.write_text("\n".join(["path,label", *rows]))
    for found in (survey(archive), survey(str(table))):
        assert (found.count, found.classes) == (20, 2)
    table.write_text("\n".join(["path,kind,label", *(f"{row},x" for row in rows)]))
    parser = Parser(prog="x")
    add_table_options(parser)
    words = ["--label-column=kind", f"--root={folder}"]
    found = survey(str(table), parser.parse_args(words))
    assert (found.classes, found.options) == (2, words)
    rows = [f"{row},{('train', 'test')[number % 5 == 0]}" for number, row in enumerate(rows)]
    table.write_text("\n".join(["path,kind,part", *rows]))
    found = survey(str(table), parser.parse_args([*words, "--split-column=part"]))
    assert (found.count, found.held_out, found.classes) == (16, 4, 2)


def test_relative_names_give_the_plan_of_absolute_ones(tmp_path, folder, monkeypatch):
    rows = [f"{image.relative_to(folder)},{image.parent.name}" for image in sorted(folder.rglob("*.png"))]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]))
    write_weights(tmp_path / "w.safetensors", "resnet18")
    started = []

    def start(self):
        started.append((self.folder, self.plan.request, [step.command for step in self.packing()]))
        return 0

    monkeypatch.setattr(steps, "call", lambda command: run_cli(measure.main, command[1:]))
    monkeypatch.setattr(Quickstart, "run", start)
    monkeypatch.chdir(tmp_path)
    for parent in ("", f"{tmp_path}/"):
        words = [f"{parent}table.csv", "--root", f"{parent}photos", "--dir", f"{parent}results", "--quick"]
        words += ["--weights", f"{parent}w.safetensors"]
        assert run_cli(quickstart, words) == 0
        shutil.rmtree(tmp_path / "results")
    assert started[0] == started[1]
    assert f"--root={folder}" in started[0][1]


def test_the_embedded_sample_has_its_own_held_out_part():
    found = survey("sample")
    assert found == SAMPLE.model_copy(update={"source": "sample", "seconds": found.seconds})
    counts = "images: 10,000, and 2,000 held out; 10 classes with at least 1,000 images each"
    assert found.text() == f"{counts}; about 28 px, grey"


def test_grey_images_are_seen(tmp_path):
    grey = images(tmp_path / "grey", mode="L")
    assert survey(grey).channels == 1
    images(tmp_path / "grey", 1)  # one of them in colour
    assert survey(grey).channels == 3


def test_images_of_many_channels_are_refused(tmp_path):
    for number in range(FEWEST):
        np.save(tmp_path / f"{number}.npy", np.zeros((20, 20, 6), np.uint16))
    assert_raises(UserError, "has 6 channels where RGB was expected", survey, str(tmp_path))


@pytest.mark.parametrize(("train", "test"), [("train", "test"), ("Training", "Testing"), ("training_set", "val")])
def test_a_held_out_part_of_any_usual_name_is_seen(tmp_path, train, test):
    for name, count in ((f"{train}/cats", 12), (f"{train}/dogs", 8), (f"{test}/cats", 3), (f"{test}/dogs", 2)):
        images(tmp_path / "photos" / name, count)
    found = survey(str(tmp_path / "photos"))
    assert (found.count, found.held_out, found.classes) == (20, 5, 2)
    parser = Parser(prog="x")
    add_table_options(parser)
    groups = parser.parse_args([r"--group-from=(\d)\.png"])
    assert_raises(UserError, "has a held-out part of its own; leave out", survey, str(tmp_path / "photos"), groups)
    shutil.rmtree(tmp_path / "photos" / test / "dogs")
    with pytest.raises(UserError, match="its test part: its classes are not those of the training part: dogs missing"):
        survey(str(tmp_path / "photos"))


def test_a_test_part_without_labels_is_no_held_out_part(tmp_path):
    for name, count in (("train/cats", 12), ("train/dogs", 8), ("test", 3)):
        images(tmp_path / "photos" / name, count)
    assert survey(str(tmp_path / "photos")).held_out == 0


@pytest.mark.parametrize(("more", "told"), [(0, "each class has one image; give two or more"), (1, "")])
def test_classes_of_one_image(tmp_path, more, told):
    for label in range(12):
        images(tmp_path / "photos" / str(label), 1 + more * (label < 3))
    if told:
        assert_raises(UserError, told, survey, str(tmp_path / "photos"))
    else:
        made = choose(survey(str(tmp_path / "photos")), Fast(), minutes=5)
        assert (made.held_out, made.training_images) == (3, 12)


@pytest.mark.parametrize(
    ("count", "words", "told"),
    [
        (0, "", "holds no images; supported are"),
        (20, ".png", "none of its images can be read; the first: "),
        (FEWEST - 1, "", f"holds {FEWEST - 1} images; give {FEWEST} or more"),
    ],
)
def test_what_cannot_be_used_is_one_line_with_the_remedy(tmp_path, capsys, count, words, told):
    source = images(tmp_path / "images", count)
    for file in list((tmp_path / "images").iterdir()) if words else []:
        file.write_text("words")
        file.rename(file.with_suffix(words))
    with pytest.raises(UserError) as error:
        survey(source)
    assert told in str(error.value)
    assert run_cli(lambda _: print(survey(source)), []) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
