"""Real and synthetic images in one batch: counts, orders, ranks, resume, what is read."""

from collections import deque
from fractions import Fraction
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from duetgan.data.images.decode import RandomCrop
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import InfiniteLoader
from duetgan.data.reading.mixture import MixedDataset, MixedSampler
from duetgan.data.reading.sampler import GlobalSampler, Position, SampleKeys
from duetgan.utils.errors import DamageError, UserError
from duetgan.utils.seeding import numpy_generator
from tests.conftest import assert_raises
from tests.data.conftest import CLASSES, flip, sample_images
from tests.data.reading.test_sampler import batches_of

REAL, DRAWN = 20, 7  # images
SHARES = ["1/4", "1/3", "0.37", "1/100", "1"]
RISING = np.arange(1.0, REAL + 1)  # weights


def sampler_of(share: str = "1/4", *, batch: int = 12, rank: int = 0, world: int = 1, **more: Any) -> MixedSampler:
    order: dict[str, Any] = {"batch_size": batch, "seed": 3, "rank": rank, "world_size": world}
    second = GlobalSampler(DRAWN, stream="synthetic", weights=more.pop("second_weights", None), **order)
    until, content = more.pop("until", None), more.pop("content", "abc")
    return MixedSampler(REAL, synthetic=second, content=content, fraction=Fraction(share), until=until, **order | more)


def batches(sampler: GlobalSampler, count: int) -> list[np.ndarray]:
    return [indices for indices, _ in batches_of(sampler, count)]


@pytest.mark.parametrize("share", SHARES)
def test_the_share_is_exact_and_both_orders_are_their_own_and_whole(share):
    """Real images come as without a mixture, synthetic ones in whole epochs of another order."""
    wanted, seen, mixed_batches = Fraction(share), 0, batches(sampler_of(share), 100)
    for number, indices in enumerate(mixed_batches, 1):
        drawn_now = int((indices >= REAL).sum())
        assert abs(drawn_now - wanted * 12) < 1  # rounded down or up
        seen += drawn_now
        assert seen == wanted * 12 * number // 1
    both = np.concatenate(mixed_batches[:60])
    real, drawn = both[both < REAL], both[both >= REAL] - REAL
    alone = GlobalSampler(REAL, batch_size=12, seed=3)
    np.testing.assert_array_equal(real, np.concatenate([alone.order(epoch) for epoch in range(40)])[: len(real)])
    for start in range(0, len(drawn) - DRAWN + 1, DRAWN):
        assert sorted(drawn[start : start + DRAWN]) == list(range(DRAWN))
    epochs = GlobalSampler(DRAWN, batch_size=12, seed=3, stream="synthetic")
    assert not np.array_equal(epochs.order(0), GlobalSampler(DRAWN, batch_size=12, seed=3).order(0))
    assert not np.array_equal(epochs.order(0), epochs.order(1))


def test_places_are_drawn_anew_and_keys_are_those_of_the_epochs():
    masks = np.stack([indices >= REAL for indices in batches(sampler_of("1/4"), 200)])
    assert len(np.unique(masks, axis=0)) > 100
    assert (masks.mean(0) > 0.12).all()
    assert (masks.mean(0) < 0.38).all()
    seen: dict[str, list[tuple[int, int]]] = {"real": [], "drawn": []}
    for indices, keys in batches_of(sampler_of("1/2", weights=RISING[:REAL], second_weights=RISING[:DRAWN]), 10):
        for index, epoch, repeat in zip(indices.tolist(), keys.epochs.tolist(), keys.repeats.tolist(), strict=True):
            kind, length = ("real", REAL) if index < REAL else ("drawn", DRAWN)
            assert (epoch, repeat) == (len(seen[kind]) // length, seen[kind].count((index, epoch)))
            seen[kind].append((index, epoch))
    for start, mask in zip(range(0, 2400, 12), masks, strict=True):  # the key of docs/randomness.md
        places = numpy_generator(3, "synthetic", "places", start).permutation(12)[: mask.sum()]
        np.testing.assert_array_equal(np.flatnonzero(mask), sorted(places))
    weights: dict[str, Any] = {"weights": RISING, "second_weights": RISING[:DRAWN]}
    ranks = [batches_of(sampler_of("1/2", rank=rank, world=3, **weights), 10) for rank in range(3)]
    for (indices, keys), *parts in zip(batches_of(sampler_of("1/2", **weights), 10), *ranks, strict=True):
        assert len({len(part) for part, _ in parts}) == 1
        np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), indices)
        for name in ("epochs", "repeats"):
            np.testing.assert_array_equal(np.concatenate([getattr(k, name) for _, k in parts]), getattr(keys, name))
    keys = SampleKeys(3, np.array([4, 5]), np.array([0, 2]))
    assert keys.of(0, 9) == (3, "augment", 4, 9)
    assert keys.of(1, 9) == (3, "augment", 5, 9, 2)
    assert keys._replace(synthetic=True).of(0, 9) == (3, "synthetic", "augment", 4, 9)


def test_the_order_goes_on_from_its_state_with_other_batches():
    straight, larger = sampler_of("0.37"), sampler_of("0.37", batch=24)
    position = Position()
    for _ in range(8):
        position = straight.next_position(position)
    there = larger.position_of(straight.state_at(position))
    assert there == position._replace(batches=0)
    assert there.consumed + there.synthetic == 8 * 12
    drawn = int((larger.batch(there)[0] >= REAL).sum())
    assert drawn == 10 * 12 * 37 // 100 - 8 * 12 * 37 // 100


def test_another_order_is_refused():
    plain, state = GlobalSampler(REAL, batch_size=12, seed=3), sampler_of().state_at(Position())
    for sampler, other, message in (
        (plain, state, r"trained with data\.synthetic; use the same, or a new run folder"),
        (sampler_of(), plain.state_at(Position()), "on real images alone"),
        (sampler_of(content="xyz"), state, r"data\.synthetic has other images now"),
        (sampler_of(second_weights=RISING[:DRAWN]), state, r"data\.synthetic\.balance changed"),
    ):
        assert_raises(UserError, message, sampler.position_of, other)


@pytest.fixture
def second(tmp_path):
    """7 images of another seed; record i has label i % 3."""
    path = tmp_path / "second.lmdb"
    pack_arrays(path, sample_images(DRAWN, seed=1), np.arange(DRAWN) % 3, CLASSES)
    return path


def mixed(packed: Path, second: Path, **options: Any) -> MixedDataset:
    dataset = MixedDataset(packed, **options)
    dataset.synthetic = Dataset(second, **options)
    return dataset


def loader_of(packed: Path, second: Path, sampler: MixedSampler, prefetch: int = 0, **more: Any) -> InfiniteLoader:
    return InfiniteLoader(mixed(packed, second), sampler, device="cpu", prefetch=prefetch, **more)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_hold_the_images_and_say_which_are_synthetic(packed, second, prefetch):
    pixels = np.concatenate([sample_images(REAL), sample_images(DRAWN, seed=1)])
    labels = np.concatenate([np.arange(REAL) % 3, np.arange(DRAWN) % 3])
    loader = loader_of(packed, second, sampler_of("1/3", until=6), prefetch, alternating=True)
    phases = numpy_generator(3, "flip").integers(2, size=REAL + DRAWN)
    for indices, keys in batches_of(sampler_of("1/3", until=6), 9):
        batch = next(loader)
        is_flipped = ((phases[indices] + keys.epochs) % 2)[:, None, None, None]
        expected = np.where(is_flipped, pixels[indices][..., ::-1], pixels[indices])
        np.testing.assert_array_equal(batch.images, expected)
        np.testing.assert_array_equal(batch.labels, labels[indices])
        assert batch.synthetic is not None
        np.testing.assert_array_equal(batch.synthetic, indices >= REAL)
    assert batch.to("cpu").synthetic is not None
    loader.close()


def test_the_real_images_are_what_the_data_set_is_and_all_crops_are_keyed(packed, second):
    dataset = mixed(packed, second)
    assert (len(dataset), dataset.meta.count, len(dataset.labels())) == (REAL, REAL, REAL)
    images, labels = dataset.read([REAL, REAL + 4])  # no real one
    np.testing.assert_array_equal(images, sample_images(DRAWN, seed=1)[[0, 4]])
    np.testing.assert_array_equal(labels, [0, 1])
    with pytest.raises(IndexError):
        dataset.read([0, REAL + DRAWN])
    dataset.close()
    for path in (packed, second):
        lmdb.open(str(path), subdir=False, readonly=True, lock=False).close()  # raises while it is open in the process
    crop = RandomCrop(area=(0.3, 0.6), aspect=(0.8, 1.25))
    dataset = mixed(packed, second, crop=crop)
    keys = SampleKeys(3, np.array([0, 0, 1]), np.array([2, 1, 0]))
    images, _ = dataset.read([0, REAL, REAL], keys=keys)
    assert not np.array_equal(images[1], images[2])
    own = SampleKeys(3, np.array([0, 1]), np.array([1, 0]), synthetic=True)
    np.testing.assert_array_equal(images[1:], Dataset(second, crop=crop).read([0, 0], keys=own)[0])
    np.testing.assert_array_equal(images[0], Dataset(packed, crop=crop).read([0], keys=keys)[0][0])


def test_a_roll_back_does_not_move_the_end_of_the_mixture(packed, second):
    """The loop goes back in steps and on in samples (`training.engine.loop`)."""
    loader = loader_of(packed, second, sampler_of("1/4", until=8), batches_per_step=2)
    then = loader.state_dict()
    for _ in range(6):
        next(loader)
    loader.load_state_dict(loader.state_dict() | {key: then[key] for key in ("step", "batch")})
    counts = [int(batch.synthetic.sum()) for batch in (next(loader) for _ in range(10)) if batch.synthetic is not None]
    assert counts == [3] * 8 + [0] * 2


def test_damage_of_the_second_file_is_named(packed, second):
    flip(second, sample_images(DRAWN, seed=1)[2].tobytes())
    loader = loader_of(packed, second, sampler_of("1/2"))
    assert_raises(DamageError, r"second\.lmdb: record 2 is damaged", deque, loader, maxlen=0)
