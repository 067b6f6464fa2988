"""A folder or zip of images as data.path: its packed copy in the user's cache."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from duetgan.data.opening import open_dataset
from duetgan.data.packing import packed_files
from duetgan.data.packing.pack import pack
from duetgan.data.packing.sources import open_source
from duetgan.utils.errors import UserError
from tests.end_to_end.recipes import image_folders
from tests.faults.conftest import Command, command  # noqa: F401  # the second is a fixture

SAME = ("count", "classes", "histogram", "fingerprint", "content_hash", "resize_filter")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(packed_files.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "folders"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return image_folders(tmp_path / "photos", 20, 0)


@pytest.mark.parametrize("zipped", [False, True])
def test_the_images_are_those_of_the_packed_file(photos: Path, tmp_path: Path, zipped: bool) -> None:
    place = Path(shutil.make_archive(str(photos), "zip", photos)) if zipped else photos
    with open_source(str(place)) as source:
        pack(source, tmp_path / "packed.lmdb", encoding="source", workers=0)
    with open_dataset(tmp_path / "packed.lmdb", resolution=16) as packed, open_dataset(place, resolution=16) as direct:
        np.testing.assert_array_equal(direct.read(np.arange(20))[0], packed.read(np.arange(20))[0])
        assert [getattr(direct.meta, name) for name in SAME] == [getattr(packed.meta, name) for name in SAME]


def test_the_copy_is_made_anew_when_the_folder_has_changed(
    photos: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_dataset(photos)
    (first,) = own_cache.glob("*.lmdb")
    assert f"photos: packed once into {first}" in capsys.readouterr().err
    open_dataset(Path(os.path.relpath(photos)))
    assert "packed once" not in capsys.readouterr().err
    image = next(photos.rglob("*.png"))
    (photos / "notes.txt").symlink_to("nowhere")
    (photos / "linked").symlink_to(image.parent.rename(photos.parent / "elsewhere"))
    image = photos.parent / "elsewhere" / image.name
    os.utime(image, ns=(0, 0))
    open_dataset(photos)
    (second,) = own_cache.glob("*.lmdb")
    image.unlink()
    with open_dataset(photos) as fewer:
        assert len(fewer) == 19
    (third,) = own_cache.glob("*.lmdb")
    assert len({first, second, third}) == 3


def test_a_broken_image_is_refused_and_nothing_is_left(photos: Path, own_cache: Path) -> None:
    broken = next(photos.rglob("*.png"))
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(UserError, match=rf"{broken.name} is truncated or damaged .*duet pack --on-error skip"):
        open_dataset(photos)
    assert list(own_cache.glob("*.lmdb")) == []


def test_train_and_evaluate_take_folders(command: Command, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    run = tmp_path / "run"
    train = ["train.py", "--config", "classifier_64_cpu", "--data.path", photos, "--data.val-path", photos]
    train += ["--data.resolution", "16", "--model.input-size", "null", "--steps", "1", "--batch-size", "4"]
    command(*train, "--precision", "fp32", "--run-dir", run, "--log.samples-every", "0").success()
    evaluated = command("evaluate.py", "--checkpoint", run, "--data", photos, "--out", tmp_path / "eval").success()
    assert "accuracy" in evaluated.out
