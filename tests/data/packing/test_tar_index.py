"""Tar files read where they lie: the images of the packed file, an index that is kept, and what is refused."""

import os
import pickle
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duetgan.commands import train
from duetgan.data.errors import DamageError
from duetgan.data.images.decode import RandomCrop
from duetgan.data.opening import open_dataset
from duetgan.data.packing import packed_files as shard_index
from duetgan.data.packing.pack import pack
from duetgan.data.packing.packed_files import MOST_FILES, expand_braces, shard_paths
from duetgan.data.packing.records import pack_arrays
from duetgan.data.packing.sources import open_source
from duetgan.data.reading.sampler import GlobalSampler, Position
from duetgan.data.tar_files import OPEN, TarFiles
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.data.conftest import sample_images
from tests.data.packing.sources.source_files import content_of
from tests.data.packing.sources.test_tars import samples, tar
from tests.end_to_end.recipes import image_folders, write_recipe

COUNT = 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(shard_index.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "shards"


def write_shards(folder: Path, name: str = "train") -> Path:
    """COUNT JPEG and PNG files of sizes of their own in three tars, labelled by `cls`; returns the tars' folder."""
    files = sorted(image_folders(folder / "images", COUNT, 0).rglob("*.*"), key=lambda file: file.name)
    for number, start in enumerate(range(0, COUNT, 7)):
        members: dict[str, bytes | str] = {}
        for file in files[start : start + 7]:
            members |= {file.name: file.read_bytes(), f"{file.stem}.cls": file.parent.name}
        tar(folder / "shards" / f"{name}-{number:03d}.tar", members)
    return folder / "shards"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path)


def test_the_images_are_those_of_the_packed_file(shards: Path, tmp_path: Path) -> None:
    """Hash, fingerprint and signatures too: a run may go on with the one where the other was."""
    with open_source(str(shards)) as source:
        pack(source, tmp_path / "packed.lmdb", encoding="source", workers=0, duplicates=False)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(COUNT), 2))
    indices, keys = GlobalSampler(COUNT, batch_size=COUNT, seed=1).batch(Position())
    three = [shards / f"train-{number:03d}.tar" for number in range(3)]
    for spec in (shards, f"{shards}/train-{{000..002}}.tar", f"{shards}/*-00[012].tar", three):
        for workers in (0, 2):
            with (
                open_dataset(tmp_path / "packed.lmdb", resolution=16, crop=RandomCrop()) as packed,
                open_dataset(spec, resolution=16, crop=RandomCrop(), workers=workers) as direct,
            ):
                np.testing.assert_array_equal(direct.read(indices, keys=keys)[0], packed.read(indices, keys=keys)[0])
                np.testing.assert_array_equal(direct.read(order)[0], packed.read(order)[0])
                np.testing.assert_array_equal(direct.read(order)[1], packed.labels()[order])
                np.testing.assert_array_equal(direct.signatures(), packed.signatures())
                np.testing.assert_array_equal(direct.image(3)[0], packed.image(3)[0])
                copy = pickle.loads(pickle.dumps(direct))
                np.testing.assert_array_equal(copy.read([5])[0], packed.read([5])[0])
                for name in (
                    "count",
                    "classes",
                    "histogram",
                    "mean",
                    "std",
                    "fingerprint",
                    "content_hash",
                    "resize_filter",
                ):
                    assert getattr(direct.meta, name) == getattr(packed.meta, name)
    with open_dataset(three[1]) as one:
        assert one.meta.count == 7


def test_the_index_is_kept_as_long_as_it_fits(shards, own_cache, monkeypatch, tmp_path):
    made: list[Path] = []
    original = shard_index._pack

    def counted(source: Any, path: Path, *more: Any) -> None:
        made.append(path)
        original(source, path, *more)

    monkeypatch.setattr(shard_index, "_pack", counted)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(open_dataset, [shards] * 3))
    with open_dataset(shards) as before:
        hash_before = before.meta.content_hash
    (index,) = own_cache.glob("*.lmdb")
    assert made == [index]
    assert index.stat().st_size < 1 << 20
    index.write_bytes(index.read_bytes()[:5000])
    open_dataset(shards)
    os.utime(shards / "train-000.tar", ns=(0, 0))
    with open_dataset(shards) as touched:
        assert touched.meta.content_hash == hash_before
    tar(shards / "train-002.tar", samples(*["dot", "cross", "stripe"]))
    with open_dataset(shards) as changed:
        assert changed.meta.content_hash != hash_before
        assert changed.meta.count == 17
    assert made[:2] == [index] * 2
    assert len(made) == 4
    assert len(list(own_cache.glob("*.lmdb"))) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(shard_index.CACHE, str(tmp_path / "file"))
    assert_raises(UserError, "file/shards: Not a directory; it is kept there: set", open_dataset, shards)


def test_a_shard_that_changes_while_it_is_read(shards: Path) -> None:
    path = shards / "train-001.tar"
    status, content = path.stat(), bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        start = archive.getmembers()[2].offset_data
    content[start + 60] ^= 1
    with open_dataset(shards, resolution=16) as dataset:
        expected = dataset.read([8, 9])[0]
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a disk does it
    with open_dataset(shards, resolution=16) as dataset:
        np.testing.assert_array_equal(dataset.read([7, 9])[0][1], expected[1])
        with pytest.raises(DamageError, match=r"record 8 is damaged: train-001\.tar:008\.jpg its checksum does not"):
            dataset.read([8])
    path.write_bytes(content)
    with open_dataset(shards, resolution=16) as dataset:  # indexed anew: the file may have been repaired by hand
        path.write_bytes(content + bytes(512))
        assert_raises(UserError, r"train-001\.tar was changed since it was indexed: start again", dataset.read, [10])


def test_more_tars_than_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duetgan.data.tar_files.OPEN", 2)
    for number in range(5):
        tar(tmp_path / "set" / f"{number}.tar", samples(0, 1, first=2 * number))
    with open_dataset(tmp_path / "set", workers=3, resolution=8) as dataset:
        images, _ = dataset.read(np.random.default_rng(0).permutation(np.repeat(np.arange(10), 8)))
        assert sorted(images[:, 0, 0, 0].tolist()) == sorted(list(range(10)) * 8)
        files = dataset.shards[0].handle().tars
        assert isinstance(files, TarFiles)
        assert files._file.cache_info().currsize == 2
    assert OPEN > 2


def add_link(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "a") as archive:
        info = tarfile.TarInfo("../../\x1b[31mevil\n.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)


WHOLE = samples(0, 1, 0, 1)
SPLIT: dict[str, bytes | str] = {
    f"{part}/{n % 2}/{n}.jpg": content_of(n) for part in ("train", "val") for n in range(4)
}
SHARDS: dict[str, dict[str, dict[str, bytes | str]]] = {  # else: one whole tar
    "broken image": {"a.tar": WHOLE | {"000002.jpg": content_of(2)[:60]}},
    "unclear": {"a.tar": {f"{name}.{n}.jpg": content_of(n) for name in ("cat", "dog") for n in range(2)}},
    "split inside": {"a.tar": SPLIT},
    "compressed": {"a.tar.gz": WHOLE},
    "splits": {"val-0.tar": WHOLE, "train-0.tar": WHOLE},
}
SPOIL: dict[str, Callable[[Path], Any]] = {
    "link": add_link,
    "truncated": lambda folder: os.truncate(folder / "a.tar", 2048),
    "pipe": lambda folder: os.mkfifo(folder / "b.tar"),
    "mixed": lambda folder: pack_arrays(folder / "b.lmdb", sample_images(4)),
}
GIVEN = {"compressed": "a.tar.gz", "missing": "{a,b}.tar", "mixed": "*"}  # else: the folder


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("link", r"a.tar:../../\x1b[31mevil\n.jpg is not a regular file; put the file itself into the tar: fix it, or"),
        ("broken image", "a.tar:000002.jpg is truncated or damaged ("),
        ("unclear", "pass --classes-from name: to go on, pack the images with duet pack, and train from"),
        ("split inside", "a.tar holds the splits train and val: pack one of them, with --split"),
        ("compressed", "a.tar.gz is compressed, so that no image can be found in it: make it a .tar, as gunzip does"),
        ("splits", "shards of val and train: give a pattern, "),
        ("truncated", "is damaged or was cut off ("),
        ("pipe", "b.tar cannot be read (is a named pipe, not a regular file); give tar files"),
        ("missing", "b.tar cannot be read (No such file or directory); give tar files"),
        ("mixed", "b.lmdb is no tar file, as others of this data set are: give one kind"),
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


def test_braces_and_patterns_that_name_nothing_or_too_much(tmp_path: Path) -> None:
    names = {"a-{08..10}.tar": ["a-08.tar", "a-09.tar", "a-10.tar"], "{x,y}/{1..2}": ["x/1", "x/2", "y/1", "y/2"]}
    names |= {"plain": ["plain"], "{2..1}": [], "{}{": ["{"]}
    assert {pattern: expand_braces(pattern) for pattern in names} == names
    assert len(expand_braces(f"{{1..{MOST_FILES}}}")) == MOST_FILES
    for pattern in (f"{{0..{MOST_FILES}}}", "{a,b}" * 40):
        assert_raises(UserError, "names more than 100,000 files", expand_braces, pattern)
    assert_raises(UserError, "no file matches this pattern", shard_paths, str(tmp_path / "{2..1}.tar"))
