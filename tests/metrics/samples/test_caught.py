"""Each way in which a generator fails is caught by the figure meant for it, and by that of the failure's kind alone.

Samples and real images are features of ten classes: what the figures see, whatever drew it.
"""

from typing import Any

import pytest
import torch

from duetgan.metrics.figures import GAN, Samples, measured
from duetgan.metrics.samples.judged import recognised
from duetgan.metrics.samples.memorisation import RealSet, memorisation

CLASSES, DIM, N = 10, 16, 1000
LABELS = torch.arange(N) % CLASSES
CENTRES = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0)) * 6


def real(seed, labels=LABELS, spread=1.0):
    return CENTRES[labels] + torch.randn(len(labels), DIM, generator=torch.Generator().manual_seed(seed)) * spread


TEST, TRAIN = real(1), real(2)


def collapsed():
    """Good images, but of each class always the same few."""
    return real(3, LABELS[:50]).repeat(N // 50, 1) + real(4, spread=0.01) - CENTRES[LABELS]


def memorising():
    """Training images, returned."""
    return TRAIN + real(5, spread=0.01) - CENTRES[LABELS]


def noisy():
    """Noise in place of every other image."""
    noise = torch.randn(N, DIM, generator=torch.Generator().manual_seed(6)) * 20
    return torch.where((torch.arange(N) // CLASSES % 2 == 0)[:, None], real(7), noise)


def ignoring_labels():
    """Good images of all classes, whichever is asked for."""
    return real(8)[torch.randperm(N, generator=torch.Generator().manual_seed(9))]


def figures(samples):
    record = Samples(
        fake=samples,
        real=TEST,
        training=None,
        labels=LABELS,
        n=N,
        names=[str(label) for label in range(CLASSES)],
        probabilities=(-torch.cdist(samples, CENTRES)).softmax(1),
        thresholds=None,
        seed=0,
        per_class=100,
        extractor="",
    )
    copies, _ = memorisation(samples, RealSet(TRAIN, LABELS), RealSet(TEST, LABELS))
    return measured(GAN, record, {}) | {"copies": copies["copies"]}


FAILS = {  # the figures that a generator fails; those of them that are meant for it come first
    real: [],
    collapsed: ["clipped_coverage", "diversity_ratio", "intra_class_frechet"],
    memorising: ["no copies"],
    noisy: ["clipped_density", "clipped_coverage", "recognised", "intra_class_frechet"],
    ignoring_labels: ["recognised", "intra_class_frechet"],
}


def passed(found, best):
    return {
        "clipped_density": found["clipped_density"] > 0.9,
        "clipped_coverage": found["clipped_coverage"] > 0.85,
        "no copies": not found["copies"],
        "diversity_ratio": found["diversity_ratio"] > 0.9,
        "recognised": found["recognised"] > 0.95,
        "intra_class_frechet": found["intra_class_frechet"] < 2 * best["intra_class_frechet"],
    }


@pytest.fixture(scope="module")
def best():
    """A perfect generator."""
    return figures(real(10))


@pytest.mark.parametrize("generator", FAILS, ids=lambda generator: generator.__name__)
def test_caught(generator, best):
    found = figures(generator(11) if generator is real else generator())
    assert {name for name, good in passed(found, best).items() if not good} == set(FAILS[generator])


def test_the_distance_over_all_classes_misses_what_that_within_them_finds(best):
    found, good = figures(ignoring_labels()), best
    assert found["frechet_interval"][0] < good["frechet_interval"][1]  # the same, within chance
    assert found["intra_class_frechet_interval"][0] > 3 * good["intra_class_frechet_interval"][1]


def test_recognised_is_by_class():
    answers = torch.eye(3)[[0, 0, 1, 2]]
    share: Any = recognised(answers, torch.tensor([0, 1, 1, 1]), thresholds=None)
    assert share.value == 0.5
    assert share.by_class == [1.0, pytest.approx(1 / 3), None]
    assert share.interval[0] < 0.5 < share.interval[1]
