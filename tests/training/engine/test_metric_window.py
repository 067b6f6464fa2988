import math

import pytest
import torch

from duetgan.training.base.monitors import MetricWindow

VALUES = [0.1, 0.7, 1e-9, 3.3, 1e8, 0.2, 5.5]


def filled(folds: list[int]) -> MetricWindow:
    window = MetricWindow("loss")
    for step, value in enumerate(VALUES):
        metrics = {"loss": torch.tensor(value)} | ({"lazy": torch.tensor(2 * value)} if step % 3 == 0 else {})
        window.add(metrics)
        if step in folds:
            window.fold()
    return window


def test_means_are_of_the_steps_that_had_the_metric():
    means = filled([]).take()
    expected = [float(torch.tensor(value)) for value in VALUES]
    assert means["loss"] == pytest.approx(math.fsum(expected) / 7, rel=1e-12)
    assert means["lazy"] == pytest.approx(2 * math.fsum(expected[::3]) / 3, rel=1e-6)


def test_when_it_is_folded_does_not_matter_to_the_bit():
    one, two = filled([]), filled([0, 3, 4])
    assert one.take() == two.take()


def test_every_value_of_the_watched_metric_is_kept():
    window = filled([2])
    window.fold()
    assert window.values == [float(torch.tensor(value)) for value in VALUES]
    assert window.total("lo") == 0
    window.take()
    assert window.values == []


def test_its_state_goes_on():
    one, two = filled([3]), MetricWindow("loss")
    one.fold()
    two.load_state_dict(one.state_dict())
    one.add({"loss": torch.tensor(4.0)})
    two.add({"loss": torch.tensor(4.0)})
    assert one.take() == two.take()
