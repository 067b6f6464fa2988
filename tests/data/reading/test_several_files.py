"""Several files are one data set: order, labels, metadata; what does not fit together is refused."""

from pathlib import Path

import numpy as np
import pytest

from duetgan.data.lmdb import format as record_format
from duetgan.data.reading.dataset import Dataset
from duetgan.data.records import pack_arrays
from duetgan.utils.errors import UserError
from tests.data.conftest import CLASSES
from tests.data.conftest import images as sample_images

COUNT, PARTS = 22, [(0, 9), (9, 10), (10, 22)]
LABELS = np.arange(COUNT) % 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_format, "BLOCK_IMAGES", 4)


def pack_shards(folder: Path, encoding: str = "raw") -> list[Path]:
    """whole.lmdb and, in three files of different length, the same images."""
    images = sample_images(COUNT)
    pack_arrays(folder / "whole.lmdb", images, LABELS, CLASSES, encoding=encoding)
    paths = [folder / f"part-{number}.lmdb" for number in range(len(PARTS))]
    for path, (start, end) in zip(paths, PARTS, strict=True):
        pack_arrays(path, images[start:end], LABELS[start:end], CLASSES, encoding=encoding)
    return paths


@pytest.mark.parametrize("encoding", ["raw", "png"])
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_one_data_set(tmp_path: Path, encoding: str, workers: int) -> None:
    paths = pack_shards(tmp_path, encoding)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(COUNT), 2))
    patterns: list[str | Path] = [str(tmp_path / "part-[01].lmdb"), paths[2]]
    for given in (str(tmp_path / "part-*.lmdb"), paths, patterns):
        with Dataset(given, workers=workers) as parts:
            assert len(parts) == COUNT
            images, labels = parts.read(order)
            np.testing.assert_array_equal(images, sample_images(COUNT)[order])
            np.testing.assert_array_equal(labels, LABELS[order])
            np.testing.assert_array_equal(parts.labels(), LABELS)
            np.testing.assert_array_equal(parts.image(9)[0], sample_images(COUNT)[9].transpose(1, 2, 0))
            assert parts.image(10)[1] == 1
    with Dataset([paths[2], paths[0]]) as parts:  # in the order given
        np.testing.assert_array_equal(parts.read([0, 12])[0], sample_images(COUNT)[[10, 0]])


def test_shards_pool_their_metadata(tmp_path: Path) -> None:
    paths = pack_shards(tmp_path)
    whole, parts = Dataset(tmp_path / "whole.lmdb"), Dataset(paths)
    for name in ("classes", "histogram", "channels", "resolutions", "encoding", "count"):
        assert getattr(parts.meta, name) == getattr(whole.meta, name)
    np.testing.assert_allclose(parts.meta.mean, whole.meta.mean, rtol=1e-13)
    np.testing.assert_allclose(parts.meta.std, whole.meta.std, rtol=1e-13)
    np.testing.assert_array_equal(parts.signatures(), whole.signatures())
    hashes = {dataset.meta.content_hash for dataset in (whole, parts, Dataset(paths[0]), Dataset(paths[::-1]))}
    assert len(hashes) == 4  # a run resumed on other files, or in another order, is noticed


def test_unlabelled_shards(tmp_path: Path) -> None:
    for name in "ab":
        pack_arrays(tmp_path / f"{name}.lmdb", sample_images(3))
    dataset = Dataset(tmp_path / "*.lmdb")
    assert (dataset.classes, dataset.meta.histogram, dataset.labels().tolist()) == ([], [], [0] * 6)


def test_shards_that_do_not_fit_are_named(tmp_path: Path) -> None:
    first = tmp_path / "first.lmdb"
    pack_arrays(first, sample_images(4), [0, 1, 2, 0], CLASSES)
    others = {
        "classes": (sample_images(4), [0, 1, 1, 0], ["cat", "dog"], "raw"),
        "channels": (sample_images(4, 1), [0, 1, 2, 0], CLASSES, "raw"),
        "resolutions": (sample_images(4, side=16), [0, 1, 2, 0], CLASSES, "raw"),
        "encoding": (sample_images(4), [0, 1, 2, 0], CLASSES, "png"),
    }
    for name, (images, labels, classes, encoding) in others.items():
        other = tmp_path / f"other {name}.lmdb"
        pack_arrays(other, images, labels, classes, encoding=encoding)
        with pytest.raises(UserError, match=rf"other {name}\.lmdb does not belong to .*first\.lmdb: {name} "):
            Dataset([first, other])


def test_patterns_and_lists_without_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train-\*\.lmdb: no file matches this pattern"):
        Dataset(tmp_path / "train-*.lmdb")
    with pytest.raises(UserError, match="name at least one"):
        Dataset([])
    odd = tmp_path / "a[1].lmdb"  # a file of this name wins over the pattern
    pack_arrays(odd, sample_images(3))
    assert len(Dataset(odd)) == 3
