import math

import pytest

from training.optim import OptimizerConfig
from training.schedules import cosine

PAPER = [(2e-4, 5e-5), (0.9, 0.99), (0.05, 0.005), (150.0, 15.0), (0.0, 0.55), (0.0, 5e6)]  # start, end


@pytest.mark.parametrize(("start", "end"), PAPER)
def test_ends_are_met_exactly(start, end):
    for images in (-5, 0):
        assert cosine(start, end, images, 20_000_000) == start
    for images in (20_000_000, 20_000_001, 250_000_000):
        assert cosine(start, end, images, 20_000_000) == end


@pytest.mark.parametrize(("start", "end"), PAPER)
@pytest.mark.parametrize(
    ("progress", "left"),
    [(1 / 4, (2 + math.sqrt(2)) / 4), (1 / 3, 3 / 4), (1 / 2, 1 / 2), (2 / 3, 1 / 4), (3 / 4, (2 - math.sqrt(2)) / 4)],
)
def test_half_a_cosine_between(start, end, progress, left):
    images = round(12_000_000 * progress)
    assert cosine(start, end, images, 12_000_000) == pytest.approx(left * start + (1 - left) * end, rel=1e-12)


def test_it_moves_one_way_and_stays_within_its_ends():
    for start, end in PAPER:
        values = [cosine(start, end, images, 1000) for images in range(0, 1001, 10)]
        assert values == sorted(values, reverse=start > end)
        assert (min(values), max(values)) == (min(start, end), max(start, end))


def test_a_constant_stays_and_no_length_is_the_end_at_once():
    assert {cosine(0.3, 0.3, images, 50) for images in range(60)} == {0.3}
    for over in (0, -1):
        assert cosine(1.0, 2.0, 0, over) == 2.0


def test_rates_and_beta2_of_an_optimizer_follow_it():
    config = OptimizerConfig(lr=2e-4, betas=[0.0, 0.9], beta2_final=0.99, schedule="cosine", final_lr=0.25)
    for step in (0, 1, 17, 50, 99, 100, 140):
        assert config.lr_at(step, 100) == pytest.approx(cosine(2e-4, 5e-5, step, 100), rel=1e-12)
        beta1, beta2 = config.betas_at(step, 100)
        assert beta1 == 0
        assert beta2 == pytest.approx(cosine(0.9, 0.99, step, 100), rel=1e-12)
