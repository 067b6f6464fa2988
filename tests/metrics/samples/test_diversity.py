import pytest
import torch
from scipy.spatial.distance import pdist

from duetgan.metrics.samples.diversity import diversity_by_class, diversity_ratio, mean_distances


def normal(n, seed, scale=1.0):
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(seed)) * scale


def by_class(samples, sample_labels, real, real_labels, classes, **options):
    return diversity_by_class(
        samples, torch.tensor(sample_labels), real, torch.tensor(real_labels), classes=classes, **options
    )


def test_mean_distance_is_scipys_and_the_ratio_of_equal_distributions_about_one():
    features = normal(30, 0)
    assert mean_distances(features).mean().item() == pytest.approx(pdist(features.double().numpy()).mean(), rel=1e-9)
    assert mean_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).tolist() == [5, 5]
    assert diversity_ratio(normal(200, 1), normal(200, 2)).value == pytest.approx(1, abs=0.05)
    assert diversity_ratio(normal(200, 1, scale=0.25), normal(200, 2)).value == pytest.approx(0.25, abs=0.02)


def test_a_collapsed_generator_fails():
    """One image of a class over and over, with a little noise: its ratio is the figure of the whole generator."""
    real = normal(400, 3)
    labels = [0] * 200 + [1] * 200
    samples = normal(400, 4)
    samples[200:] = samples[200] + 0.01 * samples[200:]
    found = by_class(samples, labels, real, labels, 2)
    assert found.by_class[0] > 0.9
    assert found.value == found.by_class[1] < 0.05
    assert found.images == 200


def test_only_the_first_images_count_and_as_many_on_both_sides():
    samples, real = normal(50, 5), normal(30, 6)
    found = by_class(samples, [0] * 50, real, [0] * 30, 1, images=40)
    assert found.images == 30
    assert found.value == diversity_ratio(samples[:30], real).value
    assert by_class(real, [0] * 30, samples, [0] * 50, 1).value == diversity_ratio(real, samples[:30]).value
    fewer = by_class(samples, [0] * 50, real, [0] * 30, 1, images=10)
    assert fewer.value == diversity_ratio(samples[:10], real[:10]).value


def test_undefined_classes_are_none_and_do_not_count():
    """Class 1 has one real image, class 2 only equal ones, class 3 no sample."""
    real = torch.cat([normal(4, 7), torch.ones(3, 16), normal(3, 8)])
    samples = normal(8, 9)
    found = by_class(samples, [0, 0, 0, 1, 1, 2, 2, 2], real, [0, 0, 0, 1, 2, 2, 2, 3, 3, 3], 4)
    assert found.by_class[1:] == [None, None, None]
    assert found.value == found.by_class[0] is not None
    assert found.images == 3
    nothing = by_class(samples[:1], [0], real, [0] * 10, 1)
    assert (nothing.value, nothing.images) == (None, 0)
