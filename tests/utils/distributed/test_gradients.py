"""Buckets and their order, and when they are sent. Two processes are tried in tests/distributed."""


import pytest
import torch
from torch import Tensor

from duetgan.utils.distributed import gradients
from duetgan.utils.distributed.gradients import GradientExchange, buckets_of


@pytest.fixture
def sent(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(gradients, "BUCKET_ELEMENTS", 4)
    return sent


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
    exchange.overlap()
    first.sum().backward()
    assert sent == [5, 4, 4]  # a bucket waits for those before it
    exchange.finish()
    assert sent == [5, 4, 4] * 2


def test_without_a_gradient_parameters_are_left_out(sent: list[int]):
    first, second, third = parameters(1, 1, 5)
    exchange = GradientExchange([first, second, third], missing="skip")
    exchange.overlap()
    first.sum().backward()
    exchange.finish()
    assert sent == [1]
    assert [p.grad if p.grad is None else p.grad.item() for p in (first, second, third)] == [2, None, None]
