"""Batches: the sampler's, whatever is read ahead; the state counts what was handed out."""

import gc
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, InfiniteLoader, mirror_in_turn
from duetgan.data.reading.sampler import GlobalSampler, SampleKeys
from tests.data.conftest import sample_images


def make(path: Path, prefetch: int, *, rank: int = 0, world_size: int = 1, device: str = "cpu") -> InfiniteLoader:
    sampler = GlobalSampler(20, batch_size=6, seed=1, rank=rank, world_size=world_size)
    return InfiniteLoader(Dataset(path), sampler, device=device, prefetch=prefetch)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data-loader"]


def test_thread_ends_with_close_and_with_the_loader(packed: Path) -> None:
    straight, loader = make(packed, 0), make(packed, 2)
    for _ in range(4):  # it goes on where it was closed
        torch.testing.assert_close(next(straight).images, next(loader).images, rtol=0, atol=0)
        assert len(loader_threads()) == 1
        loader.close()
        assert loader_threads() == []
    next(loader)
    del loader
    gc.collect()
    assert loader_threads() == []


def test_waiting_is_measured(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make(packed, 0)
    read = loader.reader.read

    def slow(indices: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(0.05)
        return read(indices, **options)

    monkeypatch.setattr(loader.reader, "read", slow)
    next(loader)
    next(loader)
    assert 0.1 <= loader.wait_seconds < 5
    loader.wait_seconds = 0.0
    next(loader)
    assert 0.05 <= loader.wait_seconds < 2.5


def test_batch_to_device() -> None:
    batch = Batch(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)).to("meta")
    assert batch.images.device.type == batch.labels.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_on_an_accelerator(packed: Path, prefetch: int) -> None:
    device = str(torch.accelerator.current_accelerator())
    here, there = make(packed, 0), make(packed, prefetch, device=device)
    for _ in range(50):
        expected, batch = next(here), next(there)
        assert batch.images.device.type == torch.device(device).type
        busy = torch.randn(512, 512, device=device) @ torch.randn(512, 512, device=device)
        torch.testing.assert_close(batch.images.cpu(), expected.images, rtol=0, atol=0)
        torch.testing.assert_close(batch.labels.cpu(), expected.labels, rtol=0, atol=0)
        del batch, busy  # its memory may be used again while the next copy runs
    there.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_alternating_flips_show_each_image_once_each_way_in_two_epochs(packed: Path, prefetch: int) -> None:
    """On any number of ranks; half of the images, by the seed, are mirrored first; a resume goes on alike."""
    samplers = [GlobalSampler(20, batch_size=4, seed=1, rank=rank, world_size=2) for rank in (0, 1)]
    how: dict[str, Any] = {"device": "cpu", "prefetch": prefetch, "alternating": True}
    loaders = [InfiniteLoader(Dataset(packed), sampler, **how) for sampler in samplers]
    sampler, originals = GlobalSampler(20, batch_size=4, seed=1), sample_images(20)
    seen: list[dict[int, bool]] = [{} for _ in range(4)]  # of each epoch: image -> whether it is mirrored
    for number in range(20):
        images = torch.cat([next(loader).images for loader in loaders]).numpy()
        for image, index in zip(images, sampler.next_batch()[0].tolist(), strict=True):
            mirrored = np.array_equal(image, originals[index][:, :, ::-1])
            assert mirrored != np.array_equal(image, originals[index])
            seen[number // 5][index] = mirrored
    assert all(len(epoch) == 20 for epoch in seen)
    assert 4 <= sum(seen[0].values()) <= 16
    for first, second in pairwise(seen):
        assert {index: not way for index, way in first.items()} == second
    state = loaders[0].state_dict()
    loaders[1].load_state_dict(state)
    found = sampler.next_batch()[0][2:]
    sides = [seen[0][index] for index in found]
    for image, index, side in zip(next(loaders[1]).images.numpy(), found, sides, strict=True):
        assert np.array_equal(image, originals[index][:, :, :: -1 if side else 1])
    for loader in loaders:
        loader.close()


def test_repeats_within_an_epoch_alternate_too() -> None:
    images = torch.arange(6, dtype=torch.uint8).view(3, 1, 1, 2)
    keys = SampleKeys(0, np.array([4, 4, 4]), np.array([0, 1, 2]))
    mirror_in_turn(images, np.array([1, 1, 1]), keys)
    assert images.flatten().tolist() == [1, 0, 2, 3, 5, 4]
