"""Parameters and normalisations of several layers at once: their formulas, and derivatives of both orders."""

from typing import Any

import pytest
import torch

from duetgan.models.layers import scaling
from tests.models.helpers import draw


def of(function):
    """The function of tensors that require gradients, in a tuple."""
    return lambda *tensors: tuple(function(*tensors))


CASES: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "scaled": (of(lambda *t: scaling.scaled(t, [2.0, -0.5, 3.0], torch.float64)), [(3, 4), (4,), (2, 3, 1, 1)]),
    "std of groups": (of(lambda x: [scaling.group_std(x)]), [(2, 3, 2, 2, 1)]),
    "demodulated": (
        of(lambda s, *w: scaling.demodulated(s, w, 1.4, [0.1, 0.2])),
        [(2, 2, 3), (4, 3, 3, 3), (2, 3, 1, 1)],
    ),
    "noise": (of(lambda *t: scaling.scaled_noise([draw(2, 1, 3, 2), draw(1, 1, 2, 2)], t)), [(), ()]),
    "stacked": (of(lambda *t: [scaling.stacked(t)]), [(2, 3), (4, 1)]),
    "corners": (of(lambda x: scaling.corners(x, [(2, 3), (4, 1)])), [(2, 4, 3)]),
    "twice": (of(lambda *t: map(torch.mul, *scaling.twice(t))), [(2, 3), (4,)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_formulas_and_derivatives_are_right(monkeypatch, name):
    function, shapes = CASES[name]
    tensors = [draw(*shape, key=str(number)).requires_grad_() for number, shape in enumerate(shapes)]
    results = function(*tensors)
    with monkeypatch.context() as patch:
        patch.setattr(scaling, "is_plain", lambda: True)
        expected = [value.detach() for value in function(*tensors)]
    for result, plain in zip(results, expected, strict=True):
        torch.testing.assert_close(result.detach(), plain, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_casts_round_the_products_once_and_gradients_are_scaled_in_full_precision():
    x, y = (draw(5, 3, key=key).float().requires_grad_() for key in "xy")
    scaled = scaling.scaled([x, y], [0.3, 3.0], torch.bfloat16)
    for result, tensor, gain in zip(scaled, (x, y), (0.3, 3.0), strict=True):
        assert result.equal((tensor * gain).bfloat16())
    grad = draw(5, 3, key="grad").bfloat16()
    torch.autograd.backward(scaled, [grad, grad])
    assert x.grad is not None
    assert x.grad.equal(grad.float() * 0.3)
    assert scaling.scaled([x], None, torch.float32)[0] is x
    assert scaling.scaled([x, y], None, torch.bfloat16)[1].equal(y.bfloat16())
    assert scaling.scaled([], None, torch.bfloat16) == []
