"""Buckets and their order, and when they are sent. Two processes are tried in tests/distributed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from duetgan.utils.distributed import collectives, gradients
from duetgan.utils.distributed.gradients import GradientExchange, buckets_of


class Done:
    def wait(self) -> None: ...


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is sent, in order; the other rank's gradients are the same."""
    sizes: list[int] = []

    def all_reduce(flat: Tensor, *, async_op: bool) -> Any:
        assert async_op
        sizes.append(flat.numel())
        flat.mul_(2)
        return Done()

    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    monkeypatch.setattr(gradients, "BUCKET_ELEMENTS", 4)
    return sizes


def parameters(*sizes: int) -> list[Tensor]:
    return [torch.nn.Parameter(torch.ones(size)) for size in sizes]


def test_one_process_sends_nothing():
    (parameter,) = parameters(2)
    exchange = GradientExchange([parameter])
    exchange.overlap()
    parameter.sum().backward()
    exchange.finish()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1, 1]


def test_buckets_begin_with_the_last_parameter(sent: list[int]):
    """A2: every gradient is sent once, in few pieces."""
    frozen = torch.ones(100)
    found = buckets_of([frozen, *parameters(1, 3, 5, 2, 3)])
    assert [[len(p) for p in bucket] for bucket in found] == [[3, 2], [5], [3, 1]]


def test_complete_buckets_are_sent_while_the_last_backward_pass_goes_on(sent: list[int]):
    first, second, third = parameters(4, 4, 5)
    exchange = GradientExchange([first, second, third])
    (first.sum() + second.sum() + third.sum()).backward()  # a pass before the last
    assert sent == []
    exchange.overlap()
    (second.sum() + third.sum()).backward()
    assert sent == [5, 4]  # the first parameter's gradient may still come
    exchange.finish()
    assert sent == [5, 4, 4]
    grads = [p.grad[0].item() for p in (first, second, third) if p.grad is not None]
    assert grads == [2, 4, 4]
    third.sum().backward()
    assert sent == [5, 4, 4]  # the next pass is not the last


def test_a_bucket_waits_for_those_before_it(sent: list[int]):
    first, second = parameters(4, 5)
    exchange = GradientExchange([first, second])
    exchange.overlap()
    first.sum().backward()
    assert sent == []
    exchange.finish()
    assert sent == [5, 4]  # zeros go for the second


def test_without_a_gradient_parameters_are_left_out(sent: list[int]):
    first, second, third = parameters(1, 1, 5)
    exchange = GradientExchange([first, second, third], missing="skip")
    exchange.overlap()
    first.sum().backward()
    exchange.finish()
    assert sent == [1]
    assert first.grad is not None
    assert first.grad.item() == 2
    assert second.grad is None
    assert third.grad is None
