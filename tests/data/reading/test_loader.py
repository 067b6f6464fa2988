"""Batches: the sampler's, of one size or changing with the stages of growth, whatever is read ahead or interrupts."""

import copy
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duetgan.data.images.decode import RandomCrop
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.cached_features import CachedFeatures
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, InfiniteLoader, alternating_flip_
from duetgan.data.reading.sampler import GlobalSampler, SampleKeys
from duetgan.data.reading.stages import StagedLoader, at_resolution
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.data.conftest import CLASSES, sample_images
from tests.data.reading.test_sampler import batches_of


def unstaged(path: Path, prefetch: int, device: str = "cpu") -> InfiniteLoader:
    return InfiniteLoader(Dataset(path), GlobalSampler(20, batch_size=6, seed=1), device=device, prefetch=prefetch)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("data-loader")]


def test_thread_ends_with_close_and_with_the_loader(packed, monkeypatch):
    straight, loader = unstaged(packed, 0), unstaged(packed, 2)
    for _ in range(4):  # it goes on where it was closed
        torch.testing.assert_close(next(straight).images, next(loader).images, rtol=0, atol=0)
        assert len(loader_threads()) == 1
        loader.close()
        assert loader_threads() == []
    for prefetch in (1, 3):  # as many batches are read ahead
        loader = unstaged(packed, prefetch)
        read = Mock(wraps=loader.dataset.read)
        monkeypatch.setattr(loader.dataset, "read", read)
        for number in (1, 2):
            next(loader)
            deadline = time.monotonic() + 20
            while read.call_count < number + prefetch and time.monotonic() < deadline:
                time.sleep(0.002)
            assert read.call_count == number + prefetch
        loader.close()
    loader = unstaged(packed, 2)
    next(loader)
    del loader
    deadline = time.monotonic() + 20
    while loader_threads() and time.monotonic() < deadline:  # what is being read ends first
        gc.collect()
        time.sleep(0.002)
    assert loader_threads() == []


def test_waiting_is_measured_and_batches_go_to_a_device(packed, monkeypatch):
    loader = unstaged(packed, 0)
    read = loader.dataset.read

    def slow(indices: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(0.05)
        return read(indices, **options)

    monkeypatch.setattr(loader.dataset, "read", slow)
    for count in (2, 1):
        loader.wait_seconds = 0.0
        batches = [next(loader) for _ in range(count)]
        assert 0.05 * count <= loader.wait_seconds < 2.5 * count
    batch = batches[0].to("meta")
    assert batch.images.device.type == batch.labels.device.type == "meta"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_features_take_the_place_of_images_from_the_next_batch_on(packed, prefetch):
    """Images take the place of features in the same way, whatever was read ahead."""
    loader = unstaged(packed, prefetch)
    rows, labels = np.arange(60, dtype=np.uint8).reshape(20, 3), np.arange(20) % 3
    features = CachedFeatures(rows, torch.uint8, views=1, labels=labels, real_images=None)
    for number, (indices, _) in enumerate(batches_of(loader.sampler, 6)):
        loader.read_from(features if number in (2, 3) else None)
        batch = next(loader)
        found, expected = batch.images, sample_images(20)
        if batch.features is not None:
            found, expected = batch.features.flatten(1), rows
        assert (batch.features is not None) == (number in (2, 3))
        np.testing.assert_array_equal(found, expected[indices])
        np.testing.assert_array_equal(batch.labels, labels[indices])
    loader.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_on_an_accelerator(packed, prefetch):
    device = str(torch.accelerator.current_accelerator())
    here, there = unstaged(packed, 0), unstaged(packed, prefetch, device=device)
    for _ in range(50):
        expected, batch = next(here), next(there)
        assert batch.images.device.type == torch.device(device).type
        busy = torch.randn(512, 512, device=device) @ torch.randn(512, 512, device=device)
        torch.testing.assert_close(batch.images.cpu(), expected.images, rtol=0, atol=0)
        torch.testing.assert_close(batch.labels.cpu(), expected.labels, rtol=0, atol=0)
        del batch, busy  # its memory may be used again while the next copy runs
    there.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_alternating_flips_show_each_image_once_each_way_in_two_epochs(packed, prefetch):
    """On any number of ranks; half of the images, by the seed, are mirrored first."""
    samplers = [GlobalSampler(20, batch_size=4, seed=1, rank=rank, world_size=2) for rank in (0, 1)]
    how: dict[str, Any] = {"device": "cpu", "prefetch": prefetch, "alternating": True}
    loaders = [InfiniteLoader(Dataset(packed), sampler, **how) for sampler in samplers]
    indices = [indices for indices, _ in batches_of(GlobalSampler(20, batch_size=4, seed=1), 20)]
    originals = sample_images(20)
    seen: list[dict[int, bool]] = [{} for _ in range(4)]  # of each epoch: image -> whether it is mirrored
    for number in range(20):
        images = torch.cat([next(loader).images for loader in loaders]).numpy()
        for image, index in zip(images, indices[number].tolist(), strict=True):
            mirrored = np.array_equal(image, originals[index][:, :, ::-1])
            assert mirrored != np.array_equal(image, originals[index])
            seen[number // 5][index] = mirrored
    assert all(len(epoch) == 20 for epoch in seen)
    assert 4 <= sum(seen[0].values()) <= 16
    for first, second in pairwise(seen):
        assert {index: not way for index, way in first.items()} == second
    for loader in loaders:
        loader.close()
    for dtype in (torch.uint8, torch.uint16):
        repeats = torch.arange(6).to(dtype).view(3, 1, 1, 2)  # within an epoch they alternate, too
        alternating_flip_(repeats, np.array([1, 1, 1]), SampleKeys(0, np.array([4, 4, 4]), np.array([0, 1, 2])))
        assert repeats.flatten().tolist() == [1, 0, 2, 3, 5, 4]


COUNT, SIDE = 20, 32
Spans = Sequence[tuple[int, int, int]]
SPANS = [(0, 8, 8), (3, 16, 12), (5, 32, 4)]  # first step, px, batch


def halved(images: np.ndarray, side: int) -> np.ndarray:
    """uint8 [n, C, S, S] brought to `side` px by means of 2x2 pixels, rounded half up after each halving."""
    while images.shape[2] > side:
        corners = [images[:, :, y::2, x::2].astype(int) for y in (0, 1) for x in (0, 1)]
        images = ((np.sum(corners, axis=0) + 2) // 4).astype(np.uint8)
    return images


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """20 raw RGB images at 8, 16 and 32 px; record i has label i % 3."""
    path = tmp_path_factory.mktemp("staged") / "grown.lmdb"
    pack_arrays(path, sample_images(COUNT, side=SIDE), np.arange(COUNT) % 3, CLASSES, smallest=8)
    return path


def make(path: Path | Dataset, stages: Spans = SPANS, *, world_size: int = 1, rank: int = 0, **how: Any):
    reader = path if isinstance(path, Dataset) else Dataset(path)
    sampler = GlobalSampler(len(reader), batch_size=world_size, seed=1, rank=rank, world_size=world_size)
    return StagedLoader(reader, sampler, device="cpu", stages=stages, **{"prefetch": 0} | how)


def expected(batches: int, stages: Spans = SPANS, per_step: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Records and images of the global batches: the epochs one after the other, cut by the stages."""
    sampler = GlobalSampler(COUNT, batch_size=1, seed=1)
    order = np.concatenate([sampler.order(epoch) for epoch in range(60)])
    whole, position = sample_images(COUNT, side=SIDE), 0
    for number in range(batches):
        _, side, size = [stage for stage in stages if number // per_step >= stage[0]][-1]
        records = order[position : position + size]
        position += size
        yield records, halved(whole[records], side)


def same(batch: Batch, records: np.ndarray, images: np.ndarray) -> None:
    assert (batch.images.dtype, batch.labels.dtype) == (torch.uint8, torch.int64)
    np.testing.assert_array_equal(batch.images.numpy(), images)
    np.testing.assert_array_equal(batch.labels.numpy(), records % 3)


@pytest.mark.parametrize("prefetch", [0, 2])
@settings(derandomize=True, deadline=None, max_examples=40)
@given(data=st.data())
def test_interrupted_is_straight(grown, prefetch, data):
    """Stopped after any numbers of batches and gone on with 1, 2 and 4 ranks, anew or in the same process."""
    per_step = data.draw(st.sampled_from([1, 2]))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    sizes = data.draw(st.lists(st.sampled_from([4, 8, 12]), min_size=3, max_size=3))
    stages = [(0, 8, sizes[0]), (lengths[0], 16, sizes[1]), (sum(lengths), 32, sizes[2])]
    parts = data.draw(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 2, 4])), min_size=2, max_size=4))
    straight = expected(sum(batches for batches, _ in parts), stages, per_step)
    options: dict[str, Any] = {"prefetch": prefetch, "batches_per_step": per_step}
    state = make(grown, stages, batches_per_step=per_step).state_dict()
    total = 0
    for batches, world_size in parts:
        ranks = [make(grown, stages, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
        for loader in ranks:
            for _ in range(data.draw(st.integers(0, 2))):  # a position, and things read ahead, that must be dropped
                next(loader)
            loader.load_state_dict(copy.deepcopy(state))
        for _ in range(batches):
            records, images = next(straight)
            shares = [next(loader) for loader in ranks]
            assert {len(share) for share in shares} == {len(records) // world_size}
            joined = Batch(torch.cat([s.images for s in shares]), torch.cat([s.labels for s in shares]))
            same(joined, records, images)
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
        for loader in ranks:
            loader.close()
        total += batches
        assert (state["step"], state["batch"]) == divmod(total, per_step)


def test_growth_may_be_switched_off_and_the_state_is_plain(grown: Path, tmp_path: Path) -> None:
    staged = make(grown, [(0, 32, 6)], prefetch=3)
    plain = InfiniteLoader(Dataset(grown), GlobalSampler(COUNT, batch_size=6, seed=1), device="cpu", prefetch=0)
    next(staged)
    state = staged.state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    plain.load_state_dict(state)  # the order goes on
    torch.testing.assert_close(next(staged).images, next(plain).images, rtol=0, atol=0)
    staged.close()


def test_states_and_spans_that_do_not_fit_are_refused(grown):
    loader = make(grown)
    next(loader)
    state = loader.state_dict()
    plain = {key: value for key, value in state.items() if key not in ("step", "batch")}
    for other, message in (
        (plain, r"without progressive growing; set progressive\.start to null"),
        (state | {"batch": 1}, r"more than 1 batches; use the same loss\.objective"),
        *((state | {key: 7}, f"{key} was 7 and is ") for key in ("seed", "count", "shuffle")),
    ):
        assert_raises(UserError, message, loader.load_state_dict, other)
    assert loader.state_dict() == state
    next(loader)


def test_levels_open_when_needed_and_close_behind(grown, monkeypatch):
    events: list[tuple[str, int]] = []

    def noting(name: str) -> None:
        plain = getattr(Dataset, name)

        def noted(self: Dataset, *values: Any, **options: Any) -> None:
            plain(self, *values, **options)
            events.append((name.strip("_"), self.spec.side))

        monkeypatch.setattr(Dataset, name, noted)

    noting("__init__")
    noting("close")
    loader = make(grown, prefetch=2)
    assert events == [("init", 32)]
    for _ in range(7):
        next(loader)
        assert len(loader_threads()) <= 1
    assert events[1:] == [("init", 8), ("close", 8), ("init", 16), ("close", 16)]  # the full resolution is the reader
    loader.close()
    assert loader_threads() == []
    assert events[5:] == []
    records, images = list(expected(8))[7]
    same(next(loader), records, images)  # it can still be used
    loader.close()


def test_a_file_that_is_replaced_while_training_is_refused(tmp_path):
    path = tmp_path / "p.lmdb"
    pack_arrays(path, sample_images(COUNT, side=SIDE), smallest=8)
    loader = make(path)
    for _ in range(3):
        next(loader)
    pack_arrays(path, sample_images(COUNT, side=SIDE, seed=5), smallest=8, overwrite=True)
    assert_raises(UserError, "was changed during the training", next, loader)


def test_levels_that_are_not_stored_are_scaled(tmp_path: Path) -> None:
    whole = sample_images(COUNT, side=SIDE)
    pack_arrays(tmp_path / "p.lmdb", whole)
    records = next(expected(1))[0]
    means = np.stack([cv2.resize(p.transpose(1, 2, 0), (8, 8), interpolation=cv2.INTER_AREA) for p in whole[records]])
    batch = next(make(tmp_path / "p.lmdb"))
    np.testing.assert_array_equal(batch.images.numpy(), means.transpose(0, 3, 1, 2))
    crop = RandomCrop(area=(0.2, 0.3), aspect=(3 / 4, 4 / 3))
    reader = Dataset(tmp_path / "p.lmdb", name="photos", crop=crop, workers=2)
    assert at_resolution(reader, SIDE) is reader
    smaller = at_resolution(reader, 8)
    assert (smaller.path, smaller.resolution, smaller.crop, smaller.workers) == ("photos", 8, crop, 2)
    cropped = next(make(reader))
    assert (cropped.images != batch.images).flatten(1).any(1).all()  # as those of the last level are
    assert np.abs(batch.images.numpy().astype(int) - halved(whole[records], 8)).max() <= 1
