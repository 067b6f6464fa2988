"""Hooks as tools: what they read, that they see values before in-place layers, and that they are always removed."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from duetgan.models.hooks import LayerStatistics, find_layer, matching_layers, output_gradient
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked, generator
from tests.conftest import assert_raises


class Refused(torch.autograd.Function):
    """Passes values on; nobody may differentiate it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("an earlier layer was differentiated")


class Barrier(nn.Module):
    def forward(self, x):
        return Refused.apply(x)


class Net(nn.Module):
    """Two blocks and a head; the activations work in place, as torchvision's do."""

    def __init__(self, *, barrier: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3)
        self.barrier = Barrier() if barrier else nn.Identity()
        self.layer1 = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))
        self.layer2 = nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(inplace=True))
        self.fc = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(self.barrier(self.stem(x)))).mean((2, 3)))


def net(**options) -> Net:
    with forked(0, "init", "hooks"):
        return Net(**options).double()


def images(count=4):
    return torch.randn(count, 1, 9, 9, dtype=torch.float64, generator=generator(0, "test", "hooks"))


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def objective(logits):
    return (logits[:, 1] ** 2).sum()


def test_patterns_fit_names_in_order_and_a_layer_is_found_by_a_clear_end():
    model = nn.ModuleDict({"model": net()})
    assert list(matching_layers(model, ["layer*.0"])) == ["model.layer1.0", "model.layer2.0"]
    assert list(matching_layers(model, ["fc", "model.stem"])) == ["model.stem", "model.fc"]
    assert list(matching_layers(model, ["layer2"])) == ["model.layer2"]
    with pytest.raises(UserError, match=r"no layer fits 'layer7.0' \(did you mean '.*layer[12].0'\?\)"):
        matching_layers(model, ["stem", "layer7.0"])
    with pytest.raises(UserError, match="there are stem, barrier"):
        matching_layers(net(), ["stem", "xyz"])
    model = nn.ModuleDict({"network": net(), "deeper": nn.ModuleDict({"more": nn.ModuleDict({"fc": nn.Identity()})})})
    assert find_layer(model, "fc") is model["network"].fc
    assert find_layer(model, "network.layer1.0") is model.get_submodule("network.layer1.0")
    with pytest.raises(UserError, match=r"'0' could be network.layer1.0, network.layer2.0; give the whole name"):
        find_layer(model, "0")
    assert_raises(UserError, r"no layer is called 'laier1' \(did you mean 'layer1'\?\)", find_layer, model, "laier1")


@contextmanager
def outputs(model, names):
    """The layers' outputs of a forward pass inside the block, in the graph, as they are before what works in place."""
    found = {}

    def keep(name):
        def hook(_module, _inputs, output):
            found[name] = output
            return output.clone()

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    yield found
    for handle in handles:
        handle.remove()


def test_hooks_go_also_after_an_error_and_unknown_names_are_refused_before_any_hook():
    """As are layers that give no tensor or have no part in the output."""
    model, bad = net(), torch.zeros(1, 2, 9, 9, dtype=torch.float64)
    with pytest.raises(RuntimeError), LayerStatistics({"fc": model.fc}).watching(scale=1.0):
        model(bad)
    with pytest.raises(RuntimeError):
        output_gradient(model, "layer1", (bad,), objective)
    recurrent = nn.Sequential(nn.LSTM(2, 2), nn.Flatten())
    for network, name, x, told in (
        (model, "fcc", images(), "did you mean"),
        (model, "unused", images(), "'unused' does not contribute"),
        (recurrent, "0", torch.zeros(3, 1, 2), "layer '0' gives a tuple"),
    ):
        assert_raises(UserError, told, output_gradient, network, name, (x,), objective)
        assert hooks_of(network) == 0


@pytest.mark.parametrize("name", ["layer1", "layer1.0", "layer2", "fc"])
def test_output_gradient_is_that_of_a_full_backward(name):
    """Also where the model is frozen and nothing else has a graph."""
    model, x = net(), images()
    with outputs(model, [name]) as found:
        value = objective(model(x))
    found[name].retain_grad()
    value.backward()
    model.zero_grad()
    output, gradient = output_gradient(model, name, (x,), objective)
    torch.testing.assert_close(gradient, found[name].grad, rtol=1e-12, atol=0)
    torch.testing.assert_close(output, found[name].detach(), rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    model.requires_grad_(False)
    with torch.no_grad():
        frozen = output_gradient(model, name, (x,), objective)
    torch.testing.assert_close(frozen, (output, gradient), rtol=0, atol=0)


def test_the_last_call_of_a_layer_counts():
    layer, x = nn.Linear(3, 3).double(), torch.ones(2, 3, dtype=torch.float64)
    output, gradient = output_gradient(nn.Sequential(layer, layer), "0", (x,), objective)
    assert torch.equal(output, layer(layer(x)))
    assert torch.equal(gradient[:, 1], 2 * output[:, 1])


def test_earlier_layers_are_not_differentiated():
    model, x = net(barrier=True), images()
    with pytest.raises(AssertionError, match="an earlier layer"):
        objective(model(x)).backward()
    model.zero_grad()
    output_gradient(model, "layer1", (x,), objective)
    assert all(p.grad is None for p in model.parameters())


def figures(values):
    """What LayerStatistics says, by NumPy."""
    array = torch.cat([v.detach().reshape(-1) for v in values]).double().numpy()
    known = array[np.isfinite(array)]
    figures = (known.mean(), known.std(), np.abs(known).max(), (array == 0).mean(), 1 - np.isfinite(array).mean())
    return dict(zip(("mean", "std", "max_abs", "zeros", "nonfinite"), figures, strict=True))


def test_statistics_of_activations_and_gradients_over_several_passes():
    model = net()
    statistics = LayerStatistics(matching_layers(model, ["layer1", "layer2.0"]))
    seen: dict[str, list[torch.Tensor]] = {"layer1": [], "layer2.0": []}
    parts = [images(4), 30 + images(3)]
    for x in parts:
        with outputs(model, list(seen)) as found:
            value = objective(model(x))
        for name, tensor in found.items():
            seen[name].append(tensor)
            tensor.retain_grad()
        value.backward()
    with statistics.watching(scale=torch.tensor(0.25, dtype=torch.float64)):
        for x in parts:
            objective(model(x)).backward()
    assert hooks_of(model) == 0
    collected = statistics.collect(statistics.packed())
    assert len(collected) == 2 * 2 * 5
    for name, tensors in seen.items():
        grads = [4 * t.grad for t in tensors if t.grad is not None]
        for kind, values in (("activation", tensors), ("gradient", grads)):
            for what, expected in figures(values).items():
                assert collected[f"{name}/{kind}_{what}"] == pytest.approx(expected, rel=1e-9), (name, kind, what)
    assert collected["layer1/activation_zeros"] > 0
    assert statistics.collect(statistics.packed()) == {}


NOT_FINITE = torch.tensor([1.0, float("nan"), 0.0, float("-inf"), -3.0])
LARGE_MEAN = (1000 + torch.randn(5000, generator=generator(0, "test"))).bfloat16()


@pytest.mark.parametrize("values", [NOT_FINITE, LARGE_MEAN])
def test_statistics_of_values_that_are_not_finite_or_of_low_precision(values):
    layer = nn.Identity()
    statistics = LayerStatistics({"layer": layer})
    with statistics.watching(scale=1.0):
        layer([values[:2], values[2:]])  # as layers with several outputs
    found = statistics.collect(statistics.packed())
    assert found == {f"layer/activation_{name}": pytest.approx(v, rel=1e-4) for name, v in figures([values]).items()}
    with statistics.watching(scale=1.0):
        layer(torch.full((2,), float("inf")))
    assert statistics.collect(statistics.packed())["layer/activation_nonfinite"] == 1
