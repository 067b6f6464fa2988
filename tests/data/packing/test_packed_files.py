"""A folder, a zip or tars of images as data.path: the packed copy in the user's cache."""

import os
import shutil
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.commands import train
from duetgan.data.images.decode import RandomCrop
from duetgan.data.opening import open_dataset
from duetgan.data.packing import packed_files
from duetgan.data.packing.pack import pack
from duetgan.data.packing.packed_files import shard_paths
from duetgan.data.packing.sources import open_source
from duetgan.data.reading.sampler import GlobalSampler, Position
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.data.packing.sources.source_files import content_of
from tests.data.packing.sources.test_tars import samples, tar
from tests.end_to_end.recipes import image_folders, write_recipe
from tests.faults.conftest import Command, command  # noqa: F401  # the second is a fixture

SAME = ("count", "classes", "histogram", "fingerprint", "content_hash", "resize_filter")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(packed_files.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "folders"


@pytest.fixture
def photos(tmp_path):
    return image_folders(tmp_path / "photos", 20, 0)


@pytest.fixture
def shards(photos, tmp_path):
    """Three tars of files of sizes of their own, labelled by `cls`; returns their folder."""
    files = sorted(photos.rglob("*.*"), key=lambda file: file.name)
    for number, start in enumerate(range(0, len(files), 7)):
        members: dict[str, bytes | str] = {}
        for file in files[start : start + 7]:
            members |= {file.name: file.read_bytes(), f"{file.stem}.cls": file.parent.name}
        tar(tmp_path / "shards" / f"train-{number:03d}.tar", members)
    return tmp_path / "shards"


@pytest.mark.parametrize("kind", ["folder", "zip", "tars"])
def test_the_images_are_those_of_the_packed_file(photos, shards, tmp_path, kind):
    """Hash and fingerprint too: a run may go on with the one where the other was."""
    place = {"folder": photos, "zip": tmp_path / "photos.zip", "tars": shards}[kind]
    forms: list[Any] = [place]
    if kind == "zip":
        shutil.make_archive(str(photos), "zip", photos)
    if kind == "tars":
        forms += [f"{shards}/train-*.tar", f"{shards}/*-00[012].tar", sorted(shards.iterdir())]
        with open_dataset(shards / "train-001.tar") as one:
            assert len(one) == 7
    with open_source(str(place)) as source:
        pack(source, tmp_path / "packed.lmdb", encoding="source", workers=0)
    indices, keys = GlobalSampler(20, batch_size=20, seed=1).batch(Position())
    options: dict[str, Any] = {"resolution": 16, "crop": RandomCrop(area=(0.08, 1.0), aspect=(3 / 4, 4 / 3))}
    for form in forms:
        with open_dataset(tmp_path / "packed.lmdb", **options) as packed, open_dataset(form, **options) as direct:
            np.testing.assert_array_equal(direct.read(indices, keys=keys)[0], packed.read(indices, keys=keys)[0])
            assert [getattr(direct.meta, name) for name in SAME] == [getattr(packed.meta, name) for name in SAME]


def test_the_copy_is_made_anew_when_the_folder_has_changed(photos, own_cache, capsys):
    open_dataset(photos)
    (first,) = own_cache.glob("*.lmdb")
    assert f"photos: packed once into {first}" in capsys.readouterr().err
    open_dataset(Path(os.path.relpath(photos)))
    assert "packed once" not in capsys.readouterr().err
    image = next(photos.rglob("*.png"))
    copies = [first]
    for more, time in ((b"", 1), (b"more", 1)):  # of another time, and then of another size
        image.write_bytes(image.read_bytes() + more)
        os.utime(image, ns=(time, time))
        open_dataset(photos)
        copies += own_cache.glob("*.lmdb")
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
    assert len({*copies, second, third}) == 5
    shutil.copytree(photos, photos.parent / "more", ignore_dangling_symlinks=True)
    next((photos.parent / "more").rglob("*.png")).unlink()
    with open_dataset([photos, photos.parent / "more"]) as both:
        assert [len(shard) for shard in both.shards] == [19, 18]
    assert third.exists()  # beside the copy of the other folder


def test_the_copy_of_tars_is_made_once_and_anew_when_a_tar_has_changed(shards, own_cache, monkeypatch, tmp_path):
    made: list[Path] = []
    original = packed_files._pack

    def counted(source: Any, path: Path) -> None:
        made.append(path)
        original(source, path)

    monkeypatch.setattr(packed_files, "_pack", counted)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(open_dataset, [shards] * 3))
    (copy,) = own_cache.glob("*.lmdb")
    assert made == [copy]
    copy.write_bytes(copy.read_bytes()[:5000])
    open_dataset(shards)
    assert made == [copy] * 2
    tar(shards / "train-002.tar", samples(*["dot", "cross", "stripe"]))
    with open_dataset(shards) as changed:
        assert len(changed) == 17
    assert len(list(own_cache.glob("*.lmdb"))) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(packed_files.CACHE, str(tmp_path / "file"))
    assert_raises(UserError, "file/folders: Not a directory; it is kept there: set", open_dataset, shards)


def test_a_broken_image_is_refused_and_nothing_is_left(photos, own_cache):
    broken = next(photos.rglob("*.png"))
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(UserError, match=rf"{broken.name} is truncated or damaged .*duet pack --on-error skip"):
        open_dataset(photos)
    assert list(own_cache.glob("*.lmdb")) == []


def test_train_and_evaluate_take_folders(command, photos, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    train = ["train.py", "--config", "classifier_64_cpu", "--data.path", photos, "--data.val-path", photos]
    train += ["--data.resolution", "16", "--model.input-size", "null", "--steps", "1", "--batch-size", "4"]
    command(*train, "--precision", "fp32", "--run-dir", run, "--log.samples-every", "0").success()
    evaluated = command("evaluate.py", "--checkpoint", run, "--data", photos, "--out", tmp_path / "eval").success()
    assert "accuracy" in evaluated.out


def add_link(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "a") as archive:
        info = tarfile.TarInfo("../../\x1b[31mevil\n.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)


WHOLE = samples(0, 1, 0, 1)
SHARDS: dict[str, dict[str, dict[str, bytes | str]]] = {  # else: one whole tar
    "broken image": {"a.tar": WHOLE | {"000002.jpg": content_of(2)[:60]}},
    "compressed": {"a.tar.gz": WHOLE},
    "splits": {"val-0.tar": WHOLE, "train-0.tar": WHOLE},
}
SPOIL: dict[str, Callable[[Path], Any]] = {
    "link": add_link,
    "truncated": lambda folder: os.truncate(folder / "a.tar", 2048),
    "pipe": lambda folder: os.mkfifo(folder / "b.tar"),
}
GIVEN = {"compressed": "a.tar.gz", "missing": "*b.tar"}  # else: the folder


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("link", r"a.tar:../../\x1b[31mevil\n.jpg is not a regular file; put the file itself into the tar: fix it, or"),
        ("broken image", "a.tar:000002.jpg is truncated or damaged ("),
        ("compressed", "a.tar.gz is not an LMDB file: give a file made by duet pack"),
        ("splits", "shards of val and train: give a pattern, "),
        ("truncated", "is damaged or was cut off ("),
        ("pipe", "b.tar cannot be read (is a named pipe, not a regular file); give a folder, a zip file or tar"),
        ("missing", "b.tar: no file matches this pattern; check it"),
    ],
)
def test_what_cannot_be_read_is_one_line(how, said, tmp_path, own_cache, refused):
    recipe = write_recipe(tmp_path / "recipe.yaml", "classifier", tmp_path)
    folder = tmp_path / "set"
    for name, members in SHARDS.get(how, {"a.tar": WHOLE}).items():
        tar(folder / name, members, "w:gz" if how == "compressed" else "w")
    if how in SPOIL:
        SPOIL[how](folder)
    options = ["--config", str(recipe), "--run-dir", str(tmp_path / "run"), "--device", "cpu"]
    options += ["--data.path", str(folder / GIVEN.get(how, ""))]
    assert said in refused(train.main, *options, alone=True)
    assert [*own_cache.glob("*.lmdb*"), *own_cache.glob(".*")] == []


def test_patterns_that_name_nothing(tmp_path: Path) -> None:
    assert_raises(UserError, "no file matches this pattern", shard_paths, str(tmp_path / "*.tar"))
