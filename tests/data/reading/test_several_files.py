"""One data set of several files, and in many threads, processes and loaders; what does not fit together is refused."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.decode import decode_crop
from duetgan.data.lmdb import environment
from duetgan.data.reading import dataset as dataset_module
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import InfiniteLoader
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.data.records import pack_arrays
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.data.conftest import CLASSES, sample_images

pytestmark = pytest.mark.usefixtures("small_blocks")
COUNT, PARTS = 22, [(0, 9), (9, 10), (10, 22)]
LABELS = np.arange(COUNT) % 3


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
    for name in "ab":
        pack_arrays(tmp_path / f"unlabelled-{name}.lmdb", sample_images(3))
    dataset = Dataset(tmp_path / "unlabelled-*.lmdb")
    assert (dataset.classes, dataset.meta.histogram, dataset.labels().tolist()) == ([], [], [0] * 6)


def test_shards_that_do_not_fit_and_patterns_without_files_are_named(tmp_path: Path) -> None:
    first = tmp_path / "first.lmdb"
    how: dict[str, Any] = {"images": sample_images(4), "labels": [0, 1, 1, 0], "classes": CLASSES}
    pack_arrays(first, **how)
    others: dict[str, dict[str, Any]] = {
        "classes": {"classes": ["cat", "dog"]},
        "channels": {"images": sample_images(4, 1)},
        "resolutions": {"images": sample_images(4, side=16)},
        "encoding": {"encoding": "png"},
    }
    for name, options in others.items():
        other = tmp_path / f"other {name}.lmdb"
        pack_arrays(other, **how | options)
        with pytest.raises(UserError, match=rf"other {name}\.lmdb does not belong to .*first\.lmdb: {name} "):
            Dataset([first, other])
    assert_raises(UserError, r"train-\*\.lmdb: no file matches this pattern", Dataset, tmp_path / "train-*.lmdb")
    assert_raises(UserError, "name at least one", Dataset, [])
    odd = tmp_path / "a[1].lmdb"  # a file of this name wins over the pattern
    pack_arrays(odd, sample_images(3))
    assert len(Dataset(odd)) == 3


def batches(dataset: Dataset, **options: object) -> list[list[torch.Tensor]]:
    return list(torch.utils.data.DataLoader(dataset, batch_size=5, **options))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
def test_torch_data_loader(tmp_path: Path) -> None:
    """Its workers are processes, however they are started; also with decoding threads in them."""
    dataset = Dataset(pack_shards(tmp_path, "png"), workers=2)
    image, label = dataset[4]
    np.testing.assert_array_equal(image, sample_images(COUNT)[4])
    assert label == 1
    expected = batches(dataset)
    np.testing.assert_array_equal(torch.cat([images for images, _ in expected]), sample_images(COUNT))
    np.testing.assert_array_equal(torch.cat([labels for _, labels in expected]), LABELS)
    assert len(expected) == 5
    for method in ("fork", "spawn", "forkserver"):
        found = batches(dataset, num_workers=2, multiprocessing_context=method)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_threads_decode_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_shards(tmp_path, "png")
    together, before = threading.Barrier(3), set(threading.enumerate())

    def decode(*arguments: Any) -> None:
        together.wait(timeout=10)  # raises unless three images are decoded at once
        decode_crop(*arguments)

    monkeypatch.setattr(dataset_module, "decode_crop", decode)
    with Dataset(tmp_path / "whole.lmdb", workers=3) as dataset:
        for _ in range(2):
            np.testing.assert_array_equal(dataset.read(range(12))[0], sample_images(COUNT)[:12])
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("encoding", ["raw", "png"])
def test_what_is_being_read_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """Where another thread closes the data set meanwhile: reading an unmapped file would end the process."""
    pack_shards(tmp_path, encoding)
    dataset = Dataset(tmp_path / "whole.lmdb")
    dataset.read([0])
    owner, name = (environment.RawBlocks, "copy") if encoding == "raw" else (dataset_module, "decode_crop")
    real = getattr(owner, name)

    def closing(*arguments: Any) -> None:
        dataset.close()
        gc.collect()
        if not environment._handles:
            pytest.fail("the file was closed")
        real(*arguments)

    monkeypatch.setattr(owner, name, closing)
    np.testing.assert_array_equal(dataset.read([2, 9])[0], sample_images(COUNT)[[2, 9]])


@pytest.mark.parametrize("encoding", ["raw", "png"])
def test_many_readers_of_one_file(tmp_path: Path, encoding: str) -> None:
    pack_shards(tmp_path, encoding)
    whole = tmp_path / "whole.lmdb"
    shared = Dataset(whole, workers=2)
    wrong: list[int] = []

    def work(number: int) -> None:
        dataset = shared if number % 2 else Dataset([whole, whole], workers=number)
        for order in np.random.default_rng(number).integers(0, COUNT, (40, 8)):
            if not np.array_equal(dataset.read(order)[0], sample_images(COUNT)[order]):
                wrong.append(number)

    samplers = [GlobalSampler(COUNT, batch_size=4, seed=1) for _ in range(2)]
    loaders = [InfiniteLoader(Dataset(whole), samplers[n], device="cpu", prefetch=2 * n) for n in (0, 1)]
    with ThreadPoolExecutor(4) as pool:
        work_done = pool.map(work, range(4))
        for _ in range(12):
            first, second = (next(loader) for loader in loaders)
            assert torch.equal(first.images, second.images)
    for loader in loaders:
        loader.close()
    assert (list(work_done), wrong) == ([None] * 4, [])
