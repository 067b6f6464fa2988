"""The audit's statistics against loops and enumeration."""

import itertools

import numpy as np
import pytest
import torch

from duetgan.extras.audit import membership_inference as audit
from duetgan.utils.seeding import generator


def audited(*shape, key=0):
    return torch.randn(shape, generator=generator(0, "test", "audit", key), dtype=torch.float64)


def test_interval_is_delongs_also_of_equal_scores_and_where_all_are_told_apart():
    """Against loops over pairs, with ties."""
    members, held_out = (audited(23) + 0.5).round(decimals=1), audited(31, key=1).round(decimals=1)
    won = np.array([[1.0 if a > b else 0.5 if a == b else 0.0 for b in held_out] for a in members])
    variance = won.mean(1).var(ddof=1) / 23 + won.mean(0).var(ddof=1) / 31
    _, (low, high) = audit.auc(members, held_out)
    assert (low + high) / 2 == pytest.approx(won.mean(), abs=1e-12)
    assert (high - low) / 2 == pytest.approx(1.959964 * variance**0.5, abs=1e-12)
    assert audit.top_p_value(torch.ones(50), torch.ones(50), 1) == 1.0
    found = audit.attack(torch.zeros(50), torch.zeros(40))
    assert (found["auc"], found["p_value"]) == (0.5, 1.0)
    _, (low, high) = audit.auc(torch.arange(4.0), torch.tensor([0.5, 3.5, 4.5, 5.5]))
    assert low == 0.0 < high  # the normal interval reaches below 0
    _, (low, high) = audit.auc(torch.ones(50), torch.zeros(40))
    assert 0.85 < low < 0.95 < high == 1.0
    _, (low, high) = audit.auc(torch.ones(9), torch.ones(5))
    assert low < 0.5 < high


@pytest.mark.parametrize(("m", "n", "rank"), [(3, 4, 1), (4, 3, 2), (5, 2, 2), (2, 5, 5)])
def test_top_p_value_against_all_orders(m, n, rank):
    """Each set of places that members can have in the order is equally likely."""
    orders = list(itertools.combinations(range(m + n), m))
    above = [sum(place < sorted(set(range(m + n)) - set(order))[rank - 1] for place in order) for order in orders]
    for order, count in zip(orders, above, strict=True):
        scores = -torch.arange(m + n).double()
        other = [place for place in range(m + n) if place not in order]
        expected = np.mean([each >= count for each in above])
        assert audit.top_p_value(scores[list(order)], scores[other], rank) == pytest.approx(expected, abs=1e-12)


def test_the_top_shows_what_the_whole_hides():
    """Thirty of 2,000 members score above all: the AUC hardly moves."""
    members, held_out = audited(2000), audited(1500, key=1)
    plain = audit.attack(members, held_out)
    members = torch.cat([members[30:], torch.full((30,), 50.0)])
    found = audit.attack(members, held_out)
    assert found["p_value"] < 1e-6
    assert plain["p_value"] > audit.LEVEL
    assert found["interval"][0] < 0.5 < found["interval"][1]
    assert list(found["top"]) == ["0.0006667", "0.01", "0.1"]
    assert found["top"]["0.01"] > plain["top"]["0.01"] + 0.01


def test_halves_are_disjoint():
    one, other = audit.halves(41, generator(0, "test"))
    assert sorted(torch.cat([one, other]).tolist()) == list(range(41))
    assert (len(one), len(other)) == (20, 21)
