"""Several losses told apart: the same gradients as their sum, each one's norm, and the cosines between them."""

import math

import pytest
import torch
from torch import nn

from duetgan.training.gan.generator_step import PerLossGradients
from duetgan.training.optim.updater import Precision

CPU = torch.device("cpu")


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def losses(network, rows):
    """Three losses over one graph; the last does not see the last bias."""
    torch.manual_seed(1)
    out = network(torch.randn(8, 4, dtype=torch.float64)[rows])
    inner = network[0].weight.square().sum() * len(out) / 8
    return {"square": out.square().sum() / 8, "sum": out.sum() * 0.3, "inner": inner}


def gathered(network, *, apart, pieces=(slice(0, 8),), precision="fp32"):
    for parameter in network.parameters():
        parameter.grad = None
    mixed = Precision(precision, CPU)
    gradients = PerLossGradients(list(network.parameters()), mixed, apart=apart)
    for rows in pieces:
        gradients.backward(losses(network, rows))
    figures = gradients.finish("g")
    return [p.grad / mixed.scale() for p in network.parameters()], figures


def own_gradient(network, name):
    gradients = torch.autograd.grad(losses(network, slice(0, 8))[name], list(network.parameters()), allow_unused=True)
    parts = zip(gradients, network.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in parts])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("size", [8, 4, 1])
def test_the_sum_is_the_same_apart_or_not(network, size, precision):
    pieces = [slice(start, start + size) for start in range(0, 8, size)]
    whole, nothing = gathered(network, apart=False)
    assert nothing == {}
    for apart in (False, True):
        found, _ = gathered(network, apart=apart, pieces=pieces, precision=precision)
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_norms_and_cosines_are_of_each_loss_alone(network, precision):
    _, figures = gathered(network, apart=True, pieces=[slice(0, 4), slice(4, 8)], precision=precision)
    own = {name: own_gradient(network, name) for name in ("square", "sum", "inner")}
    expected = {f"gradient_norm/g/{name}": float(gradient.norm()) for name, gradient in own.items()}
    for a, b in (("square", "sum"), ("square", "inner"), ("sum", "inner")):
        expected[f"gradient_cosine/g/{a}~{b}"] = float(own[a] @ own[b] / (own[a].norm() * own[b].norm()))
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        assert math.isclose(float(figures[name]), value, rel_tol=1e-6), name
    assert all(abs(float(v)) <= 1 for name, v in figures.items() if "cosine" in name)


def test_a_loss_without_gradient_has_no_direction(network):
    gradients = PerLossGradients(list(network.parameters()), Precision("fp32", CPU), apart=True)
    out = network(torch.ones(1, 4, dtype=torch.float64)).sum()
    gradients.backward({"one": out, "nothing": out * 0})
    figures = gradients.finish("g")
    assert float(figures["gradient_norm/g/nothing"]) == 0
    assert float(figures["gradient_cosine/g/one~nothing"]) == 0


def test_only_the_given_parameters_get_gradients(network):
    for apart in (False, True):
        inputs = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        gradients = PerLossGradients([network[0].weight], Precision("fp32", CPU), apart=apart)
        gradients.backward({"one": network(inputs).sum()})
        gradients.finish("g")
        assert network[0].weight.grad is not None
        assert network[2].weight.grad is None
        assert inputs.grad is None
