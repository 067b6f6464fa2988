"""Copies of training images: neighbours and statistics against libraries, loops and enumeration."""

import itertools
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import binom

from duetgan.metrics.samples import memorisation as module
from duetgan.metrics.samples import neighbours
from duetgan.metrics.samples.memorisation import (
    Nearest,
    RealSet,
    chance_bound,
    fraction_below,
    memorisation,
    nearest,
    neighbour_images,
    training_bound,
)
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.seeding import generator


def normal(*shape, key=0):
    return torch.randn(shape, generator=generator(0, "test", "memorisation", key), dtype=torch.float64)


def unlabelled(features):
    return RealSet(features, torch.zeros(len(features), dtype=torch.int64))


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize(("queries", "references"), [(1, 1), (7, 13), (21, 40)])
def test_nearest_is_that_of_brute_force_over_block_borders(queries, references, offset, monkeypatch):
    monkeypatch.setattr(neighbours, "QUERY_BLOCK", 8)
    monkeypatch.setattr(neighbours, "REFERENCE_BLOCK", 5)
    first, second = normal(queries, 3) + offset, normal(references, 3, key=1) + offset
    found = nearest(first, second)
    for i in range(queries):
        distances = [math.dist(first[i].tolist(), row.tolist()) for row in second]
        assert int(found.indices[i]) == int(np.argmin(distances))
        assert float(found.distances[i]) == pytest.approx(min(distances), abs=1e-10 * max(1.0, offset))


def test_a_copy_is_at_distance_zero_even_in_float32_and_the_first_of_equals_is_named():
    references = (normal(9000, 6, key=2) * 100 + 1000).float()
    references[8000] = references[17]  # beyond the first block
    found = nearest(references[[17, 8000, 5000]], references)
    assert found.distances.tolist() == [0.0, 0.0, 0.0]
    assert found.indices.tolist() == [17, 17, 5000]


def test_fraction_below_by_hand():
    held_out = torch.arange(1.0, 201.0).double()[torch.randperm(200, generator=generator(0, "test"))]
    share, expected, bound = fraction_below(torch.tensor([0.5, 1.5, 2.0, 300.0]).double(), held_out)
    assert (share, bound) == (0.5, 2.0)  # the 2nd of 200; as near as the bound is not nearer
    assert expected == pytest.approx(2 / 201)
    assert fraction_below(torch.ones(2).double(), held_out[:5], tail=0.4)[1] == pytest.approx(2 / 6)


def test_chance_bound_against_every_outcome():
    """And of many images it is the binomial's."""
    counts, shares = np.array([3, 1, 1, 4, 2]), np.array([0.5, 0.9, 0.9, 0.25, 0.5])
    for observed in range(13):
        expected = 0.0
        for outcome in itertools.product((0, 1), repeat=5):
            if (counts * outcome).sum() >= observed:
                expected += np.prod(np.where(outcome, shares, 1 - shares))
        assert chance_bound(counts, shares, observed) == pytest.approx(expected, abs=1e-12)
    assert chance_bound(np.zeros(0, dtype=np.int64), np.zeros(0), 0) == 1.0  # nothing seen, nothing proved
    many = chance_bound(np.ones(400, dtype=np.int64), np.full(400, 0.8), 340)
    assert many == pytest.approx(binom.sf(339, 400, 0.8), rel=1e-9)


def test_training_bound_by_hand():
    """Two classes with their own shares of training images; ties and far samples do not count for training."""
    train = RealSet(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1]))
    held_out = RealSet(torch.zeros(3, 1), torch.tensor([0, 1, 1]))
    to_train = Nearest(torch.tensor([0.1, 0.1, 0.2, 0.5, 9.0]).double(), torch.tensor([0, 0, 3, 1, 2]))
    other = Nearest(torch.tensor([0.3, 0.3, 0.4, 0.5, 9.5]).double(), torch.tensor([0, 0, 1, 2, 0]))
    near, of_train, chance = training_bound(to_train, other, train, held_out, bound=1.0)
    assert (near, of_train) == (4, 3)  # the fourth is equally near to both
    # image 0 twice (class 0: 3 of 4 are training images), 3 once (class 1: 1 of 3), held-out 2 once (class 1)
    expected = chance_bound(np.array([2, 1, 1]), np.array([3 / 4, 1 / 3, 1 / 3]), 3)
    assert chance == pytest.approx(expected, abs=1e-15)
    assert training_bound(to_train, other, train, held_out, bound=0.05) == (0, 0, 1.0)


def test_a_sample_stands_beside_its_training_image(monkeypatch):
    """With a gap of a 16th of its width; the distance is put beside the usual one if that is not 0."""
    drawn, real = torch.full((2, 1, 5, 34), 7, dtype=torch.uint8), np.full((2, 1, 5, 34), 9, np.uint8)
    draw, read = Mock(return_value=drawn), Mock(return_value=(real, None))
    monkeypatch.setattr(module, "draw_samples", draw)
    generator: Any = SimpleNamespace(classes=3)
    train: Any = SimpleNamespace(spec=ImageSpec(1, 5, 34), read=read)
    copies: dict[str, Any] = {"closest": [{"sample": 3, "label": 1, "train": 8, "distance": 0.25}]}
    copies["first"] = [{"sample": 0, "label": 2, "train": 5, "distance": 4}]
    ratios = [f"{ratio} of the usual distance" for ratio in ("0.50", "8.00")]
    for usual, words in ((0.5, ratios), (0, ["distance 0.25", "distance 4"])):
        copies["usual_distance"] = usual
        images, captions = neighbour_images(generator, train, copies, seed=6)
        read.assert_called_with([8, 5])
        assert (draw.call_args.args[1].tolist(), draw.call_args.args[2]) == ([1, 2], [3, 0])
        assert (draw.call_args.args[0], draw.call_args.kwargs) == (generator, {"seed": 6})
        assert captions == [f"sample 3 | record 8\n{words[0]}", f"sample 0 | record 5\n{words[1]}"]
        assert [image[0, 0].tolist() for image in images] == [[7] * 34 + [255] * 2 + [9] * 34] * 2


def three_sets():
    """Training images, held-out images and a fresh part of the same distribution: a mixture of clusters."""
    centres = normal(40, 8, key=10) * 4
    picked = torch.randint(0, 40, (5000,), generator=generator(0, "test", "clusters"))
    real = (centres[picked] + normal(5000, 8, key=11)).float()
    return unlabelled(real[:3000]), unlabelled(real[3000:4000]), real[4000:]


def test_fresh_real_images_are_no_copies():
    train, held_out, fresh = three_sets()
    found, neighbours = memorisation(fresh, train, held_out)
    assert not found["copies"]
    assert found["share"] == pytest.approx(0.01, abs=0.012)
    assert found["near_train"] <= found["near"]
    assert (found["n"], found["searched"]) == (1000, 3000)
    assert found["expected"] == pytest.approx(10 / 1001)
    reference = nearest(held_out.features, train.features).distances
    assert found["usual_distance"] == pytest.approx(float(reference.median()))
    torch.testing.assert_close(neighbours.distances, nearest(fresh, train.features).distances)


def test_a_generator_that_copies_is_flagged():
    train, held_out, fresh = three_sets()
    copies = train.features[:1000] + 0.02 * normal(1000, 8, key=12).float()
    found, neighbours = memorisation(copies, train, held_out)
    assert found["copies"]
    assert found["share"] > 0.95
    assert neighbours.indices.tolist() == list(range(1000))
    mixed = torch.cat([copies[:80], fresh[80:]])  # 8 % of copies among honest samples
    partly, _ = memorisation(mixed, train, held_out)
    assert partly["copies"]
    assert partly["share"] == pytest.approx(0.09, abs=0.015)


def test_bland_and_collapsed_samples_are_no_copies_though_they_are_near():
    real = normal(5000, 30, key=13).float()
    train, held_out = unlabelled(real[:3000]), unlabelled(real[3000:4000])
    bland, _ = memorisation(0.3 * real[4000:], train, held_out)
    assert bland["share"] > 0.9  # what distances alone would call memorised
    assert not bland["copies"]
    for image in range(5):
        collapsed, _ = memorisation(0.3 * real[4000 + image].expand(500, -1), train, held_out)
        assert not collapsed["copies"]


def test_honest_generators_are_accused_as_seldom_as_the_level_says():
    """p-values of 200 honest generators: never below what chance allows, by a wide margin for a discrete test."""
    chances = []
    for trial in range(200):
        real = normal(420, 4, key=100 + trial)
        found, _ = memorisation(real[320:], unlabelled(real[:220]), unlabelled(real[220:320]))
        chances.append(found["p_value"])
    assert np.mean(np.array(chances) <= 0.1) <= 0.13
    assert min(chances) > 1e-4


def test_more_training_than_held_out_images_of_a_class_is_no_proof():
    """Samples of one class only, which has few held-out images: the other class must not set the odds."""
    real = normal(2200, 5, key=14)
    train = RealSet(real[:1100], torch.tensor([0] * 1000 + [1] * 100))
    held_out = RealSet(real[1100:1700], torch.tensor([0] * 20 + [1] * 580))
    held_out.features[20:] += 50
    train.features[1000:] += 50
    samples = real[1700:] * 0.5  # of class 0, bland
    found, _ = memorisation(samples, train, held_out)
    assert not found["copies"]
    wrong, _ = memorisation(samples, unlabelled(train.features), unlabelled(held_out.features))
    assert wrong["copies"]  # without the classes it would seem so
