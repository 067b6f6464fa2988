"""Properties of the order: for any size, batch, world size, resume point and number of readers it is the same order.

Seeds are fixed (`derandomize`); an example that fails is printed.
"""

import contextlib
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duetgan.data.images.decode import RandomCrop
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import InfiniteLoader, evaluation_batches
from duetgan.data.reading.sampler import GlobalSampler, Position, SampleKeys
from duetgan.data.reading.weighted_sampling import balanced_weights
from duetgan.utils.seeding import numpy_generator
from tests.data.conftest import sample_images
from tests.data.reading.test_sampler import batches_of, take, weighted

sizes = st.integers(1, 40)
worlds = st.sampled_from([1, 2, 3, 4])
shares = st.integers(1, 9)  # a rank's part of the batch
starts = st.integers(0, 9)  # batches before the one that is looked at
plain_weights = st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 2.0, 1 / 3, 0.1])
extreme_weights = st.floats(0, allow_infinity=False)  # from denormal numbers to ones whose sum overflows
weight_lists = st.lists(plain_weights, min_size=1, max_size=40) | st.lists(extreme_weights, min_size=1, max_size=10)
labelled = st.lists(st.tuples(plain_weights, st.integers(-2, 3)), min_size=1, max_size=40)


def shares_of(weights: list[float]) -> list[Fraction]:
    """The expected number of draws of each sample in an epoch, exactly."""
    total = sum(map(Fraction, weights))
    return [len(weights) * Fraction(weight) / total for weight in weights]


@settings(derandomize=True, deadline=None)
@given(count=sizes, batch=st.integers(1, 50), seed=st.integers(0, 5), shuffle=st.booleans())
def test_every_epoch_holds_every_sample_once(count, batch, seed, shuffle):
    batches = -(-3 * count // batch)
    sequence = take(GlobalSampler(count, batch_size=batch, seed=seed, shuffle=shuffle), batches).reshape(-1)
    for epoch in range(3):
        part = sequence[epoch * count : (epoch + 1) * count]
        assert sorted(part) == list(range(count))
        expected = numpy_generator(seed, "order", epoch).permutation(count) if shuffle else np.arange(count)
        np.testing.assert_array_equal(part, expected)


@settings(derandomize=True, deadline=None)
@given(count=sizes, share=shares, world=worlds, seed=st.integers(0, 9), before=st.integers(0, 9))
def test_no_two_draws_of_an_epoch_have_one_key(count, share, world, seed, before):
    """With weights a sample may come several times in an epoch: each time it is augmented anew."""
    weights = 0.1 + np.random.default_rng(seed).random(count) ** 4
    options: dict[str, Any] = {"batch_size": share * world, "seed": seed, "weights": weights}
    one = GlobalSampler(count, **options)
    keys = []
    for indices, batch in batches_of(one, -(-3 * count // (share * world))):
        keys += [batch.of(place, int(index)) for place, index in enumerate(indices)]
    assert len(set(keys)) == len(keys)
    assert {key[:2] for key in keys} == {(seed, "augment")}
    rank = GlobalSampler(count, rank=world - 1, world_size=world, **options)
    first = (before * world + world - 1) * share
    indices, batch = rank.batch(Position(before * world * share))
    there = [batch.of(place, int(index)) for place, index in enumerate(indices)]
    assert there == keys[first : first + share][: len(there)] or first + share > len(keys)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    weights=weight_lists.filter(any),
    seed=st.integers(0, 3),
    groups=st.none() | st.just(np.arange(40) % 3),
    bits=st.sampled_from([40, 1, 3]),  # coarse lengths show what rounding may do
)
def test_weighted_epochs_round_every_share_down_or_up(weights, seed, groups, bits):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duetgan.data.reading.weighted_sampling.FRACTION_BITS", bits)
        sampler = weighted(weights, seed, None if groups is None else groups[: len(weights)])
    line = sampler._weighted
    if line is not None:
        assert line._lengths.sum() == line._marks * line._unit
        assert ((line._lengths >= 0) & (line._lengths <= line._unit)).all()
    for epoch in range(3):
        order = sampler.order(epoch)
        assert order.dtype == np.int64
        copies = np.bincount(order, minlength=len(weights))
        assert copies.sum() == len(weights)
        for share, number in zip(shares_of(weights), copies.tolist(), strict=True):
            assert math.floor(share) <= number <= math.ceil(share)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(samples=labelled.filter(lambda samples: any(weight for weight, _ in samples)), seed=st.integers(0, 3))
def test_groups_keep_class_totals_within_one(samples, seed):
    weights, labels = [weight for weight, _ in samples], np.array([label for _, label in samples])
    shares = shares_of(weights)
    sampler = weighted(weights, seed, labels)
    for epoch, label in itertools.product(range(3), set(labels.tolist())):
        expected = sum(share for share, other in zip(shares, labels, strict=True) if other == label)
        drawn = np.sum(labels[sampler.order(epoch)] == label)
        assert abs(drawn - expected) <= 1 + Fraction(1, 10**9)  # lengths are rounded


COUNTS = (1, 5, 16, 37)  # sizes of the packed sets
# How batches are read: the file's encoding, decoding threads, batches read ahead.
READERS = [("raw", 0, 0), ("raw", 0, 2), ("png", 0, 0), ("png", 1, 2), ("png", 3, 0), ("png", 3, 2)]


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Files by encoding and size, 4 px, one channel: label and every pixel of record i are i."""
    folder = tmp_path_factory.mktemp("order")
    files = {(encoding, count): folder / f"{encoding}-{count}.lmdb" for encoding in ("raw", "png") for count in COUNTS}
    for (encoding, count), path in files.items():
        images = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 1, 4, 4))
        pack_arrays(path, images, np.arange(count), [f"class {i}" for i in range(count)], encoding=encoding)
    return files


@st.composite
def samplers(draw: st.DrawFn, count: int, size: int) -> Callable[[int, int], GlobalSampler]:
    """(rank, world size) -> its sampler: uniform, or balanced by labels other than the file's."""
    names, labels = np.unique(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), return_inverse=True)
    weights = balanced_weights(labels, [str(name) for name in names]) if draw(st.booleans()) else None
    seed = draw(st.integers(0, 3))
    return lambda rank, world_size: GlobalSampler(
        count, batch_size=size, seed=seed, rank=rank, world_size=world_size, weights=weights, groups=labels
    )


def read_on(
    open_dataset: Callable[[], Dataset],
    samplers_of_ranks: list[GlobalSampler],
    batches: int,
    prefetch: int,
    state: dict[str, Any],
):
    """Labels and images of the next global batches, all ranks' shares together, and the loaders' state after them."""
    with contextlib.ExitStack() as opened:
        loaders = []
        for sampler in samplers_of_ranks:
            dataset = opened.enter_context(open_dataset())
            loaders.append(InfiniteLoader(dataset, sampler, device="cpu", prefetch=prefetch))
            loaders[-1].load_state_dict(state)
            opened.callback(loaders[-1].close)
        labels, images = [], []
        for _ in range(batches):
            parts = [next(loader) for loader in loaders]
            assert len({len(part) for part in parts}) == 1
            labels.append(torch.cat([part.labels for part in parts]).numpy())
            images.append(torch.cat([part.images for part in parts]))
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        return labels, images, states[0]


@pytest.mark.parametrize(("encoding", "workers", "prefetch"), READERS)
@settings(derandomize=True, max_examples=50, deadline=None)
@given(data=st.data(), count=st.sampled_from(COUNTS), share=st.integers(1, 4), before=st.integers(0, 30))
def test_loaders_read_one_order_whatever_reads_it(packs, encoding, workers, prefetch, data, count, share, before):
    """A run that is resumed with 1, 2, 4 and 1 ranks, at the same global batch, after any number of steps."""
    size = 4 * share
    make = data.draw(samplers(count, size))
    steps = data.draw(st.lists(st.integers(0, 3), min_size=4, max_size=4))
    state, seen = make(0, 1).state_at(Position(before * size)), [np.empty(0, np.int64)]
    open_dataset = partial(Dataset, packs[encoding, count], workers=workers)
    for world_size, batches in zip((1, 2, 4, 1), steps, strict=True):
        ranks = [make(rank, world_size) for rank in range(world_size)]
        labels, images, state = read_on(open_dataset, ranks, batches, prefetch, state)
        for batch, pixels in zip(labels, images, strict=True):
            assert (pixels.numpy() == batch[:, None, None, None]).all()
            seen.append(batch)
    assert state["consumed"] == size * (before + sum(steps))
    straight = make(0, 1)
    epochs = [straight.order(epoch) for epoch in range(state["consumed"] // count + 1)]
    expected = np.concatenate(epochs)[size * before : state["consumed"]]
    np.testing.assert_array_equal(np.concatenate(seen), expected)


@pytest.fixture(scope="module")
def crops(tmp_path_factory):
    """Seven random images of 8 px."""
    path = tmp_path_factory.mktemp("crops") / "crops.lmdb"
    pack_arrays(path, sample_images(7), encoding="png")
    return path


@settings(derandomize=True, max_examples=50, deadline=None)
@given(workers=st.sampled_from([0, 1, 3]), prefetch=st.sampled_from([0, 2]), world_size=worlds, before=starts)
def test_random_crops_follow_seed_epoch_and_sample(crops, workers, prefetch, world_size, before):
    open_dataset = partial(
        Dataset, crops, resolution=4, crop=RandomCrop(area=(0.08, 1.0), aspect=(3 / 4, 4 / 3)), workers=workers
    )
    ranks = [GlobalSampler(7, batch_size=12, seed=1, rank=rank, world_size=world_size) for rank in range(world_size)]
    state = ranks[0].state_at(Position(12 * before))
    images = torch.cat(read_on(open_dataset, ranks, 3, prefetch, state)[1])
    with Dataset(crops, resolution=4, crop=RandomCrop(area=(0.08, 1.0), aspect=(3 / 4, 4 / 3))) as alone:
        for place, image in enumerate(images.numpy(), start=12 * before):
            epoch, offset = divmod(place, 7)
            record = ranks[0].order(epoch)[offset]
            keys = SampleKeys(1, np.array([epoch]), np.zeros(1, np.int64))
            np.testing.assert_array_equal(image, alone.read([record], keys=keys)[0][0])


@pytest.mark.parametrize(("encoding", "workers"), [("raw", 0), ("png", 0), ("png", 3)])
@settings(derandomize=True, max_examples=60, deadline=None)
@given(count=st.sampled_from(COUNTS), batch_size=st.integers(1, 40))
def test_evaluation_sees_every_sample_once(packs, encoding, workers, count, batch_size):
    with Dataset(packs[encoding, count], workers=workers) as dataset:
        batches = list(evaluation_batches(dataset, batch_size))
    assert all(len(batch) == batch_size for batch in batches[:-1])  # only the last is smaller
    assert all(0 < len(batch) <= batch_size for batch in batches)
    for batch in batches:
        assert (batch.images == batch.labels[:, None, None, None]).all()
    assert [label for batch in batches for label in batch.labels.tolist()] == list(range(count))
