"""One data set in many threads, processes and loaders."""

import gc
import threading
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
from tests.data.conftest import images as sample_images
from tests.data.reading.test_several_files import COUNT, LABELS, pack_shards, small_blocks

__all__ = ["small_blocks"]  # a fixture


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
    for method, workers in (("fork", 2), ("spawn", 2), ("forkserver", 2)):
        found = batches(dataset, num_workers=workers, multiprocessing_context=method)
        assert len(found) == len(expected) == 5
        for (images, labels), (others, other_labels) in zip(found, expected, strict=True):
            assert torch.equal(images, others)
            assert torch.equal(labels, other_labels)


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

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    loaders = [
        InfiniteLoader(Dataset(whole), GlobalSampler(COUNT, batch_size=4, seed=1), device="cpu", prefetch=prefetch)
        for prefetch in (0, 2)
    ]
    for thread in threads:
        thread.start()
    for _ in range(12):
        first, second = (next(loader) for loader in loaders)
        assert torch.equal(first.images, second.images)
    for thread in threads:
        thread.join()
    for loader in loaders:
        loader.close()
    assert wrong == []
