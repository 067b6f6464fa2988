"""Frechet and kernel distances and diversity against scipy, scikit-learn, closed forms and numeric derivatives."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from duetgan.metrics.protocol import PER_CLASS
from duetgan.metrics.samples import kernel
from duetgan.metrics.samples.frechet import frechet_distance
from duetgan.metrics.samples.intra_class import intra_class_frechet
from duetgan.metrics.samples.judged import diversity_by_class, diversity_ratio, mean_distances
from duetgan.metrics.samples.kernel import kernel_distance, squared_mmd
from duetgan.utils.seeding import numpy_generator


def normal(n, dim, seed, *, scale=1.0, shift=0.0, dtype=torch.float64):
    features = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    mixing = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed + 100), dtype=dtype) / dim**0.5
    return features @ mixing * scale + shift


def distance(first, second):
    return frechet_distance(first, second)[0]


def of_gaussians(mean1, covariance1, mean2, covariance2):
    root = scipy.linalg.sqrtm(covariance1 @ covariance2).real
    return ((mean1 - mean2) ** 2).sum() + np.trace(covariance1 + covariance2 - 2 * root)


def test_agrees_with_scipys_matrix_square_root_and_for_one_image_only():
    first, second = normal(300, 12, 0), normal(200, 12, 1, scale=1.7, shift=0.4)
    means, covariances = zip(*((x.mean(0).numpy(), x.T.cov().numpy()) for x in (first, second)), strict=True)
    expected = of_gaussians(means[0], covariances[0], means[1], covariances[1])
    assert distance(first, second) == pytest.approx(expected, rel=1e-9)
    one, real = torch.ones(50, 6, dtype=torch.float64), normal(50, 6, 8)
    expected = float((real.mean(0) - 1).square().sum() + torch.cov(real.T).trace())
    assert distance(one, real) == pytest.approx(expected, rel=1e-9)
    assert distance(real, one) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(one, one) == (0.0, 0.0)


def test_half_precision_and_far_means():
    half = torch.full((4096, 1), 1.0009765625, dtype=torch.bfloat16)  # a bfloat16 sum would stop at 256
    assert distance(half, torch.zeros(9, 1)) == pytest.approx(half[0].double().item() ** 2, rel=1e-12)
    first, second = normal(80, 5, 1), normal(80, 5, 2)
    assert distance(first + 1000, second + 1000) == pytest.approx(distance(first, second), rel=1e-6)


@pytest.mark.parametrize(("n", "m", "dim"), [(20, 30, 128), (300, 5, 128), (5, 300, 128), (65, 64, 64)])
def test_fewer_vectors_than_dimensions(n, m, dim):
    """The trace of the root is then the nuclear norm of X Y' / sqrt((n - 1)(m - 1)), X and Y centred."""
    first, second = normal(n, dim, 6), normal(m, dim, 7, shift=0.1)
    x, y = first - first.mean(0), second - second.mean(0)
    trace = torch.linalg.svdvals(x @ y.T).sum() / math.sqrt((n - 1) * (m - 1))
    spread = x.square().sum() / (n - 1) + y.square().sum() / (m - 1)
    expected = float((first.mean(0) - second.mean(0)).square().sum() + spread - 2 * trace)
    assert distance(first, second) == pytest.approx(expected, rel=1e-9)
    assert distance(first, first) == pytest.approx(0, abs=1e-9 * float(spread))


@pytest.mark.parametrize(("n", "dim"), [(60, 5), (30, 20), (12, 20)])
def test_variance_is_that_of_the_numeric_derivatives(n, dim):
    """The distance between weighted Gaussians, moved by the weight of each image of two sets of different sizes.

    A row of a set is scaled by the root of its weight, and the trace of the root is the nuclear norm of X Y'.
    """
    sets = [normal(n, dim, 0), normal(n + 7, dim, 1, scale=1.3, shift=0.4)]

    def weighted(weights):
        means, rows = [], []
        for part, weight in zip(sets, weights, strict=True):
            means.append((weight[:, None] * part).sum(0) / weight.sum())
            scale = weight / weight.sum() * len(part) / (len(part) - 1)
            rows.append(scale.sqrt()[:, None] * (part - means[-1]))
        trace = torch.linalg.svdvals(rows[0] @ rows[1].T).sum()
        return float((means[0] - means[1]).square().sum() + sum(x.square().sum() for x in rows) - 2 * trace)

    assert distance(*sets) == pytest.approx(weighted([torch.ones(len(part)).double() for part in sets]), rel=1e-9)
    step, expected = 1e-5, 0.0
    for side, count in enumerate(map(len, sets)):
        answers = []
        for i in range(count):
            weights = [torch.ones(len(part), dtype=torch.float64) for part in sets]
            weights[side][i] += step
            up = weighted(weights)
            weights[side][i] -= 2 * step
            answers.append((up - weighted(weights)) / (2 * step))
        moved = torch.tensor(answers, dtype=torch.float64)
        expected += float((moved - moved.mean()).square().sum()) * count / (count - 1)
    assert frechet_distance(*sets)[1] == pytest.approx(expected, rel=1e-4)


def test_mean_of_each_class_on_its_own():
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 4
    labels[labels == 3] = torch.where(torch.arange(30) == 0, 3, 0)  # one image of class 3
    samples, real = torch.randn(120, 6, generator=draw), torch.randn(120, 6, generator=draw) + labels[:, None]
    result = intra_class_frechet(samples, real, labels, 5)
    results = [frechet_distance(samples[labels == label], real[labels == label]) for label in range(3)]
    values, variances = zip(*results, strict=True)
    assert result.by_class == [*(pytest.approx(value, rel=1e-6) for value in values), None, None]
    mean, half = sum(values) / 3, 1.959964 * sum(variances) ** 0.5 / 3
    assert [result.value, *(result.interval or ())] == pytest.approx([mean, mean - half, mean + half])
    assert result.images == 30
    assert "the smallest class has only 30 samples and 30 real images" in result.note
    for n in (499, 500):
        one = intra_class_frechet(standard(n, 2, 0), standard(n, 2, 1), torch.zeros(n, dtype=torch.int64), 1)
        assert bool(one.note) == (n == 499)
    none = intra_class_frechet(samples[:1], real[:1], labels[:1], 2)  # no class with two images
    assert (none.value, none.interval, none.by_class, none.images) == (None, None, [None, None], 0)


def standard(n, dim, seed, shift=0.0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)).double() + shift


def test_subsets_are_drawn_by_their_keys_and_average_near_the_whole(monkeypatch):
    first, second = standard(400, 6, 6), standard(300, 6, 7, shift=0.3)
    monkeypatch.setattr(kernel, "SUBSET_SIZE", 100)
    found = [kernel_distance(first, second, seed=seed)[0] for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    values = []
    for index in range(kernel.SUBSETS):
        draw = numpy_generator(0, "eval", "kernel", index)
        subsets = [part[torch.from_numpy(draw.permutation(len(part))[:100])] for part in (first, second)]
        values.append(squared_mmd(*subsets)[0])
    assert found[0] == pytest.approx(np.mean(values))
    assert found[0] == pytest.approx(squared_mmd(first, second)[0], rel=0.2)


@pytest.mark.parametrize(("n", "size", "shift"), [(150, 1000, 0.3), (150, 50, 0.3), (150, 1000, 0.0)])
def test_told_spread_is_that_of_other_draws(n, size, shift, monkeypatch):
    monkeypatch.setattr(kernel, "SUBSET_SIZE", size)
    results = [kernel_distance(standard(n, 8, 2 * i), standard(n, 8, 2 * i + 1, shift), seed=0) for i in range(80)]
    values, variances = torch.tensor(results, dtype=torch.float64).T
    assert 0.75 < float(variances.mean().sqrt() / values.std()) < 1.7


def of_16(n, seed, scale=1.0):
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(seed)) * scale


def by_class(samples, sample_labels, real, real_labels, classes, images=PER_CLASS):
    return diversity_by_class(
        samples, torch.tensor(sample_labels), real, torch.tensor(real_labels), classes=classes, images=images
    )


def test_an_images_own_distance_does_not_count():
    assert mean_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).tolist() == [5, 5]


def test_the_interval_of_the_ratio_is_the_jackknifes():
    sides = of_16(40, 1, scale=0.5), of_16(60, 2)
    ratio = diversity_ratio(*sides)
    variance = 0.0
    for side in (0, 1):
        kept = [[*sides] for _ in sides[side]]
        for row, pair in enumerate(kept):
            pair[side] = torch.cat([pair[side][:row], pair[side][row + 1 :]])
        values = torch.tensor([diversity_ratio(*pair).value for pair in kept], dtype=torch.float64)
        variance += float(values.var()) * (len(values) - 1) ** 2 / len(values)
    half = 1.96 * variance**0.5
    assert ratio.interval == pytest.approx([ratio.value - half, ratio.value + half], rel=0.01)


def test_only_the_first_images_count_and_as_many_on_both_sides():
    samples, real = of_16(50, 5), of_16(30, 6)
    found = by_class(samples, [0] * 50, real, [0] * 30, 1, images=40)
    assert found.images == 30
    assert found.value == diversity_ratio(samples[:30], real).value
    assert by_class(real, [0] * 30, samples, [0] * 50, 1).value == diversity_ratio(real, samples[:30]).value
    fewer = by_class(samples, [0] * 50, real, [0] * 30, 1, images=10)
    assert fewer.value == diversity_ratio(samples[:10], real[:10]).value


def test_undefined_classes_are_none_and_do_not_count():
    """Class 1 has one real image, class 2 only equal ones, class 3 no sample."""
    real = torch.cat([of_16(4, 7), torch.ones(3, 16), of_16(3, 8)])
    samples = of_16(8, 9)
    found = by_class(samples, [0, 0, 0, 1, 1, 2, 2, 2], real, [0, 0, 0, 1, 2, 2, 2, 3, 3, 3], 4)
    assert found.by_class[1:] == [None, None, None]
    assert found.value == found.by_class[0] is not None
    assert found.images == 3
    nothing = by_class(samples[:1], [0], real, [0] * 10, 1)
    assert (nothing.value, nothing.images, nothing.by_class) == (None, 0, [None])


def test_no_interval_is_below_zero(monkeypatch):
    alone = torch.zeros(10, 16)
    alone[0] = 1  # one sample differs
    ratio = diversity_ratio(alone, of_16(10, 2))
    assert ratio.value is not None
    assert ratio.interval is not None
    assert ratio.interval[0] == 0 < ratio.value < ratio.interval[1]
    monkeypatch.setattr("duetgan.metrics.samples.intra_class.frechet_distance", lambda *_: (0.5, 1.0))
    within = intra_class_frechet(alone, alone, torch.zeros(10, dtype=torch.int64), 1)
    assert within.interval == [0, pytest.approx(0.5 + 1.959964)]
