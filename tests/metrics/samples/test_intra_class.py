import pytest
import torch

from metrics.samples.frechet import Moments, frechet_distance
from metrics.samples.intra_class import intra_class_frechet


def moments_of(features):
    moments = Moments(features.shape[1])
    moments.update(features)
    return moments


def test_mean_of_each_class_on_its_own():
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 4
    labels[labels == 3] = torch.where(torch.arange(30) == 0, 3, 0)  # one image of class 3
    samples, real = torch.randn(120, 6, generator=draw), torch.randn(120, 6, generator=draw) + labels[:, None]
    found = intra_class_frechet(samples, labels, real, labels, classes=5)
    expected = [
        frechet_distance(moments_of(samples[labels == label]), moments_of(real[labels == label])) for label in range(3)
    ]
    assert found.by_class[:3] == pytest.approx(expected, rel=1e-6)
    assert found.by_class[3:] == [None, None]
    assert found.mean == pytest.approx(sum(expected) / 3, rel=1e-6)
    assert found.interval is not None
    assert found.mean is not None
    assert found.interval[0] < found.mean < found.interval[1]
    assert found.images == 30


def test_no_class_with_two_images():
    one = torch.zeros(1, dtype=torch.int64)
    found = intra_class_frechet(torch.zeros(1, 3), one, torch.zeros(1, 3), one, classes=2)
    assert (found.mean, found.interval, found.by_class, found.images) == (None, None, [None, None], 0)
