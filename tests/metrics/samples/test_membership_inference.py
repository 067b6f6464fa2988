"""The audit's statistics against libraries, loops and enumeration, and its verdicts with and without copies."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from duetgan.data.sources import open_source
from duetgan.data.sources.base import ArraySource
from duetgan.metrics.features.extractors import pixel_features
from duetgan.metrics.samples import membership_inference as audit
from duetgan.metrics.samples.memorisation import nearest
from duetgan.utils.seeding import generator

SPLITS = 20


def normal(*shape, key=0):
    return torch.randn(shape, generator=generator(0, "test", "audit", key), dtype=torch.float64)


def perfect(split, *, members=600, held_out=500, samples=400, dim=6, copies=0):
    """Features of members, held-out images and samples, all of one distribution, but for some copies of members."""
    drawn = normal(members + held_out + samples, dim, key=f"split {split}")
    one, other, drawn = drawn.split([members, held_out, samples])
    return one, other, torch.cat([drawn[copies:], one[:copies]])


def found_in(members, held_out, samples):
    distances = nearest(torch.cat([members, held_out]), samples).distances
    return audit.attack(-distances[: len(members)], -distances[len(members) :])


@pytest.mark.parametrize(("m", "n", "digits"), [(1, 1, 3), (5, 9, 0), (400, 300, 1), (300, 1000, 9)])
def test_auc_is_scikit_learns(m, n, digits):
    members, held_out = (normal(m) + 0.3).round(decimals=digits), normal(n, key=1).round(decimals=digits)
    expected = roc_auc_score(np.r_[np.ones(m), np.zeros(n)], torch.cat([members, held_out]).numpy())
    assert abs(audit.auc(members, held_out)[0] - expected) < 1e-9
    assert abs(audit.auc(held_out, members)[0] + expected - 1) < 1e-9
    assert audit.attack(members.float(), held_out.float())["auc"] == audit.auc(members.float(), held_out.float())[0]


def test_interval_is_delongs():
    """Against loops over pairs, with ties."""
    members, held_out = (normal(23) + 0.5).round(decimals=1), normal(31, key=1).round(decimals=1)
    won = np.array([[1.0 if a > b else 0.5 if a == b else 0.0 for b in held_out] for a in members])
    variance = won.mean(1).var(ddof=1) / 23 + won.mean(0).var(ddof=1) / 31
    _, (low, high) = audit.auc(members, held_out)
    assert (low + high) / 2 == pytest.approx(won.mean(), abs=1e-12)
    assert (high - low) / 2 == pytest.approx(1.959964 * variance**0.5, abs=1e-12)


@pytest.mark.parametrize(("m", "n", "rank"), [(3, 4, 1), (4, 3, 2), (5, 2, 2), (2, 5, 5)])
def test_crowding_against_all_orders(m, n, rank):
    """Each set of places that members can have in the order is equally likely."""
    orders = list(itertools.combinations(range(m + n), m))
    above = [sum(place < sorted(set(range(m + n)) - set(order))[rank - 1] for place in order) for order in orders]
    for order, count in zip(orders, above, strict=True):
        scores = -torch.arange(m + n).double()
        other = [place for place in range(m + n) if place not in order]
        expected = np.mean([each >= count for each in above])
        assert audit.crowding(scores[list(order)], scores[other], rank) == pytest.approx(expected, abs=1e-12)


def test_equal_scores_are_no_evidence_and_the_interval_where_all_are_told_apart_is_no_point():
    assert audit.crowding(torch.ones(50), torch.ones(50), 1) == 1.0
    found = audit.attack(torch.zeros(50), torch.zeros(40))
    assert (found["auc"], found["p_value"]) == (0.5, 1.0)
    with pytest.raises(ValueError, match="members and held-out"):
        audit.attack(torch.zeros(0), torch.zeros(4))
    _, (low, high) = audit.auc(torch.ones(50), torch.zeros(40))
    assert 0.85 < low < 0.95 < high == 1.0
    _, (low, high) = audit.auc(torch.ones(9), torch.ones(5))
    assert low < 0.5 < high


def test_p_values_are_no_smaller_than_chance():
    found = [audit.attack(normal(90, key=f"c{i}"), normal(60, key=f"d{i}"))["p_value"] for i in range(600)]
    for level in (0.01, 0.05, 0.2):
        assert np.mean(np.array(found) < level) <= level + 2 * (level / 600) ** 0.5


def test_the_top_shows_what_the_whole_hides():
    """Thirty of 2,000 members score above all: the AUC hardly moves."""
    members, held_out = normal(2000), normal(1500, key=1)
    plain = audit.attack(members, held_out)
    members = torch.cat([members[30:], torch.full((30,), 50.0)])
    found = audit.attack(members, held_out)
    assert found["p_value"] < 1e-6
    assert plain["p_value"] > audit.LEVEL
    assert found["interval"][0] < 0.5 < found["interval"][1]
    assert list(found["top"]) == ["0.0006667", "0.01", "0.1"]
    assert found["top"]["0.01"] > plain["top"]["0.01"] + 0.01


def test_copies_are_added_exactly():
    members, held_out, samples = perfect(0, members=50, held_out=30, samples=40)
    real = torch.cat([members, held_out])
    draws = torch.stack([torch.randperm(50, generator=generator(0, "test", i))[:7] for i in range(5)])
    found = audit.distances_with_copies(real.float(), nearest(real, samples).distances, draws)
    for row, draw in zip(found, draws, strict=True):
        expected = nearest(real, torch.cat([samples, members[draw]])).distances
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-5)
        assert (row[draw] == 0).all()


def test_too_few_copies_are_not_found():
    """Four of 400 samples beside 600 members and 500 held-out images are no evidence: (600 / 1100)^4 is 9 %."""
    assert sum(found_in(*perfect(split, copies=4))["p_value"] < audit.LEVEL / 2 for split in range(SPLITS)) <= 1


def test_halves_are_disjoint_and_all():
    one, other = audit.halves(41, generator(0, "test"))
    assert sorted(torch.cat([one, other]).tolist()) == list(range(41))
    assert (len(one), len(other)) == (20, 21)


@pytest.fixture(scope="module")
def clothes():
    """Features of the embedded sample's 10,000 training images: 8x8 pixels."""
    source = open_source("sample", split="train", root=None)
    assert isinstance(source, ArraySource)
    images = torch.from_numpy(source.images.transpose(0, 3, 1, 2).copy())
    return torch.cat([pixel_features(1)(part) for part in images.split(1000)])


def test_real_images_no_false_alarms_and_copies_are_found(clothes):
    """Other images of the same set stand for a perfect generator's samples."""
    alarms, found = 0, {0.01: 0, 0.05: 0}
    for split in range(SPLITS):
        draws = generator(split, "test", "audit", "real")
        order = torch.randperm(len(clothes), generator=draws)
        members, held_out, samples = clothes[order[:5000]].split([2000, 1500, 1500])
        real = torch.cat([members, held_out])
        distances = nearest(real, samples).distances
        alarms += audit.attack(-distances[:2000], -distances[2000:])["p_value"] < audit.LEVEL
        for share in found:
            how: dict[str, Any] = {"members": 2000, "samples": 1500, "share": share, "repeats": 1, "generator": draws}
            told = audit.detection(real, distances, **how)
            assert told["copies"] == round(share * 1500 / (1 - share))
            found[share] += told["found"]
    assert alarms <= 1
    assert found[0.05] >= 19
    assert found[0.01] <= found[0.05]
