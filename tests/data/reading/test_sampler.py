"""The sampler: its state, its refusals, weighted epochs. What holds for every size is in test_order_properties.py."""

import math
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest

from duetgan.data.reading import weighted_sampling
from duetgan.data.reading.sampler import GlobalSampler, Position, SampleKeys
from duetgan.data.reading.weighted_sampling import balanced_weights, class_weights
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import numpy_generator
from tests.conftest import assert_raises


def batches_of(sampler: GlobalSampler, count: int) -> Iterator[tuple[np.ndarray, SampleKeys]]:
    """Yield the first `count` batches of a sampler."""
    position = Position()
    for _ in range(count):
        yield sampler.batch(position)
        position = sampler.next_position(position)


def take(sampler: GlobalSampler, batches: int) -> np.ndarray:
    return np.stack([indices for indices, _ in batches_of(sampler, batches)])


def rated(rates: dict[str, float]) -> np.ndarray:
    return class_weights(np.array([0, 1, 1]), ["cat", "dog"], rates)


def weighted(weights: list[float] | np.ndarray, seed: int = 0, groups: np.ndarray | None = None) -> GlobalSampler:
    return GlobalSampler(len(weights), batch_size=1, seed=seed, weights=np.array(weights, np.float64), groups=groups)


def test_an_epoch_is_drawn_once():
    sampler = GlobalSampler(10, batch_size=2, seed=0)
    with patch("duetgan.data.reading.sampler.numpy_generator", side_effect=numpy_generator) as drawn:
        take(sampler, 10)
        for epoch in (2, 3, 0):
            sampler.order(epoch)
    assert [call.args[-1] for call in drawn.call_args_list] == [0, 1, 2, 3, 0]  # two are kept: memory stays flat
    with pytest.raises(ValueError, match="read-only"):  # it is shared
        sampler.order(1)[0] = 0


@pytest.mark.parametrize("weight", [5e-324, 0.1, 1.0, 1e308])
def test_equal_weights_are_no_weights(weight):
    plain, equal = GlobalSampler(9, batch_size=1, seed=2), weighted([weight] * 9, 2, np.arange(9))
    for epoch in range(2):
        np.testing.assert_array_equal(equal.order(epoch), plain.order(epoch))
    assert equal.state_at(Position(4)) == plain.state_at(Position(4))
    assert plain.state_at(Position())["weights"] == ""


def test_weighted_state_names_its_order():
    labels = np.arange(6) % 2
    weights = np.array([1, 2, 3, 4, 5, 6.0])
    states = [
        sampler.state_at(Position())
        for sampler in (
            GlobalSampler(6, batch_size=2, seed=0),
            weighted(weights),
            weighted(weights[::-1]),
            weighted(weights, groups=labels),
            weighted(weights, groups=np.arange(6) % 3),
            weighted(weights, groups=np.zeros(6, np.int64)),
        )
    ]
    assert len({state["weights"] for state in states}) == len(states)
    assert all(int(str(state["weights"]), 16) for state in states[1:])
    for state in states[:1] + states[2:]:
        assert_raises(UserError, "class_rates or the labels have changed", weighted(weights).position_of, state)
    plain = GlobalSampler(6, batch_size=2, seed=0)
    assert_raises(UserError, "class_rates or the labels have changed", plain.position_of, states[1])
    weighted(weights * 2).position_of(states[1])  # weights are relative: the same order
    weighted(weights, groups=labels.astype(np.int32) + 5).position_of(states[3])  # so are the groups' numbers


def test_orders_of_other_versions_go_on():
    old = {"consumed": 6, "count": 4, "seed": 0, "shuffle": True}
    sampler = GlobalSampler(4, batch_size=2, seed=0)
    assert sampler.position_of(old) == Position(6)
    assert_raises(UserError, "class_rates or the labels have changed", weighted([1, 2, 3, 4]).position_of, old)
    # resuming a run with another version of the program must not change its order
    sampler = weighted([0.5, 2, 1, 3, 0, 1.25], 3, np.array([0, 0, 1, 1, 2, 2]))
    assert [sampler.order(epoch).tolist() for epoch in range(2)] == [[3, 5, 1, 2, 3, 1], [3, 5, 1, 3, 1, 2]]
    assert sampler.state_at(Position())["weights"] == "7339c420934bc3244a822af2343d882e"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 10, "world_size": 4}, UserError, "batch_size 10 is not divisible by 4 processes: try 8"),
        ({"count": 0}, UserError, "empty"),
        ({"batch_size": 0}, UserError, "batch_size 0 is not"),
        *(
            ({"weights": weights}, UserError, "weights: give 3 finite weights of at least 0 that are not all 0")
            for weights in ([1, -1, -2], [1, 1, math.nan], [1, math.inf, 1], [1, 2], [[1, 2, 3]], [0, 0, 0])
        ),
    ],
)
def test_what_makes_no_order_is_named(options, error, message):
    if "weights" in options:
        options = options | {"weights": np.array(options["weights"], np.float64)}
    assert_raises(error, message, GlobalSampler, **{"count": 3, "batch_size": 1, "seed": 0} | options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balanced_weights(np.array([0, 2, 0]), ["cat", "dog", "emu"]), "class 'dog' has no images"),
        (lambda: balanced_weights(np.zeros(3, np.int64), []), "no labels"),
        (lambda: rated({"dgo": 2.0}), r"no class 'dgo' \(did you mean 'dog'\?\)"),
        (lambda: rated({"cat": -0.5}), "class_rates: give 3 finite weights"),
        (lambda: rated({"cat": 0.0, "dog": 0.0}), "class_rates: give 3 finite weights"),
    ],
)
def test_classes_that_give_no_weights_are_named(call, message):
    assert_raises(UserError, message, call)


def test_class_rates_and_repeats():
    labels = np.array([0, 1, 2, 1])
    names = ["cat", "dog", "emu"]
    np.testing.assert_array_equal(class_weights(labels, names, {"dog": 3.0, "emu": 0}), [1, 3, 0, 3])
    np.testing.assert_array_equal(class_weights(labels, names, {}), np.ones(4))
    np.testing.assert_array_equal(class_weights(np.zeros(2, np.int64), [], {}), np.ones(2))
    copies = np.bincount(labels[weighted(class_weights(labels, names, {"cat": 6.0}), 0, labels).order(0)], minlength=3)
    assert copies[0] in (2, 3)  # 6/9 of four draws
    assert weighted_sampling.count_repeats(np.array([5, 7, 5, 5, 0, 7])).tolist() == [0, 0, 1, 2, 0, 1]
    assert weighted_sampling.count_repeats(np.array([3])).tolist() == [0]
