"""How far figures can be trusted."""

import numpy as np
import pytest

from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.intervals import Measured, balanced_interval, influence_interval, normal_interval, wilson
from duetgan.metrics.lineage import leaks
from duetgan.metrics.tables import few_images
from tests.metrics.conftest import pack


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [  # solved by hand: (p - x)^2 = z^2 x (1 - x) / n
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_interval_is_wilsons(hits, count, low, high):
    assert wilson(hits, count) == pytest.approx([low, high], abs=5e-5)


def test_both_ends_solve_the_score_equation_and_no_share_has_none():
    for hits, count in ((1, 3), (40, 41), (700, 1000)):
        for end in wilson(hits, count) or pytest.fail("no interval"):
            assert (hits / count - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / count)
    assert wilson(0, 0) is None


def test_balanced_interval_covers_and_is_wilsons_of_one_class():
    assert balanced_interval([81], [263]) == pytest.approx(wilson(81, 263))
    draw = np.random.default_rng(0)
    shares, counts, inside = np.array([0.99, 0.8, 0.3]), np.array([40, 60, 20]), 0
    for hits in draw.binomial(counts, shares, (500, 3)):
        low, high = balanced_interval(hits.tolist(), counts.tolist())
        inside += low <= shares.mean() <= high
    assert 0.93 <= inside / 500 <= 0.98


def test_influence_interval_of_a_mean_is_the_normal_one_within_its_range():
    values = np.random.default_rng(0).random(400)
    found = influence_interval(values.mean(), values - values.mean())
    half = 1.959964 * values.std() / 20
    assert found == pytest.approx([values.mean() - half, values.mean() + half])
    assert influence_interval(0.5, np.array([3.0, -3.0])) == [0, 1]
    assert influence_interval(1.0, np.zeros(4)) is None


def test_normal_interval_stays_within_what_is_possible():
    assert normal_interval(0.5, 0.01) == pytest.approx([0.5 - 0.1959964, 0.5 + 0.1959964])
    assert normal_interval(0.9, 0.01, low=0, high=1) == pytest.approx([0.9 - 0.1959964, 1.0])
    assert Measured.normal(0.9, 0.01, high=1.0).interval == normal_interval(0.9, 0.01, high=1.0)


def test_few_images_are_told_and_many_are_not():
    assert "30 points" in few_images(40, interval=[0.3, 0.6])["n"]
    assert "same n" in few_images(999, distances=True)["n"]
    assert few_images(1000, interval=[0.5, 0.55], distances=True) == {}
    assert few_images(40, interval=[0.95, 1.0]) == {}


def test_leaks_are_counted_pixel_for_pixel(tmp_path):
    first = pack(tmp_path / "a.lmdb", seed=1, count=30)
    with Dataset(first) as reader, Dataset(first) as same:
        assert "30 of 30" in leaks(reader, same)["leaks"]
        assert leaks(reader, None) == {}
        with Dataset(pack(tmp_path / "b.lmdb", seed=2, count=30)) as other:
            assert not np.isin(other.signatures()["digest"], reader.signatures()["digest"]).any()
            assert leaks(reader, other) == {}
        with Dataset(pack(tmp_path / "c.lmdb", seed=1, count=30, side=32)) as larger:
            assert leaks(reader, larger) == {}
