"""The order: one permutation per epoch, the same for every number of ranks, resumable anywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sampler import GlobalSampler
from utils.errors import UserError
from utils.seeding import numpy_generator


def take(sampler: GlobalSampler, batches: int) -> np.ndarray:
    return np.stack([sampler.next_batch()[0] for _ in range(batches)])


sizes = st.integers(1, 40)
worlds = st.sampled_from([1, 2, 3, 4])
shares = st.integers(1, 9)  # a rank's part of the batch


@settings(deadline=None)
@given(count=sizes, batch=st.integers(1, 50), seed=st.integers(0, 5), shuffle=st.booleans())
def test_every_epoch_holds_every_sample_once(count: int, batch: int, seed: int, shuffle: bool) -> None:
    batches = -(-3 * count // batch)
    sequence = take(GlobalSampler(count, batch_size=batch, seed=seed, shuffle=shuffle), batches).reshape(-1)
    for epoch in range(3):
        part = sequence[epoch * count : (epoch + 1) * count]
        assert sorted(part) == list(range(count))
        expected = numpy_generator(seed, "order", epoch).permutation(count) if shuffle else np.arange(count)
        np.testing.assert_array_equal(part, expected)


@settings(deadline=None)
@given(count=sizes, share=shares, world=worlds, batches=st.integers(1, 8))
def test_ranks_make_the_global_batch(count: int, share: int, world: int, batches: int) -> None:
    size = share * world
    single = GlobalSampler(count, batch_size=size, seed=7)
    ranks = [GlobalSampler(count, batch_size=size, seed=7, rank=rank, world_size=world) for rank in range(world)]
    for number in range(batches):
        expected, start = single.next_batch()
        parts = [sampler.next_batch() for sampler in ranks]
        assert start == number * size
        assert {part[1] for part in parts} == {start}
        assert {len(part[0]) for part in parts} == {share}
        np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), expected)
    assert {sampler.consumed for sampler in [single, *ranks]} == {batches * size}


@settings(deadline=None)
@given(count=sizes, share=shares, before=st.integers(0, 9), first=worlds, then=worlds)
def test_resume_at_any_point_with_any_ranks(count: int, share: int, before: int, first: int, then: int) -> None:
    size = share * 12  # divisible by every number of ranks
    straight = take(GlobalSampler(count, batch_size=size, seed=3), before + 3)
    one = GlobalSampler(count, batch_size=size, seed=3, rank=first - 1, world_size=first)
    one.advance(before)
    ranks = [GlobalSampler(count, batch_size=size, seed=3, rank=rank, world_size=then) for rank in range(then)]
    for sampler in ranks:
        sampler.load_state_dict(one.state_dict())
    resumed = np.concatenate([take(sampler, 3) for sampler in ranks], axis=1)
    np.testing.assert_array_equal(resumed, straight[before:])


def test_advance_is_next_batch_without_indices() -> None:
    read, skipped = (GlobalSampler(10, batch_size=4, seed=0) for _ in range(2))
    take(read, 7)
    skipped.advance(7)
    np.testing.assert_array_equal(read.next_batch()[0], skipped.next_batch()[0])
    assert read.epoch == skipped.epoch == 3


def test_epochs_and_seeds_differ() -> None:
    first, second = take(GlobalSampler(50, batch_size=50, seed=0), 2)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, GlobalSampler(50, batch_size=50, seed=1).next_batch()[0])


def test_indivisible_batch_names_the_divisor() -> None:
    with pytest.raises(UserError, match="batch_size 10 is not divisible by 4 processes: try 8"):
        GlobalSampler(100, batch_size=10, seed=0, world_size=4)
    with pytest.raises(UserError, match="empty"):
        GlobalSampler(0, batch_size=10, seed=0)
    with pytest.raises(UserError, match="batch_size 0"):
        GlobalSampler(10, batch_size=0, seed=0)


@pytest.mark.parametrize(
    ("name", "options"), [("count", (9, 0, True)), ("seed", (8, 1, True)), ("shuffle", (8, 0, False))]
)
def test_another_order_cannot_be_resumed(name: str, options: tuple[int, int, bool]) -> None:
    state = GlobalSampler(8, batch_size=2, seed=0).state_dict()
    count, seed, shuffle = options
    with pytest.raises(UserError, match=f"{name} was"):
        GlobalSampler(count, batch_size=2, seed=seed, shuffle=shuffle).load_state_dict(state)
