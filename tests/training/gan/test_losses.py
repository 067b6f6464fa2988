"""Objectives and penalties beside their formulas, which tests/oracle has."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck
from torch.func import functional_call

from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan import losses
from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.diagnostics.loss_gradients import separate_gradients
from duetgan.training.gan.losses import OBJECTIVES
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked, generator


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_chance_level_is_the_discriminators_loss_where_it_tells_nothing_apart(name):
    objective, zero = OBJECTIVES[name], torch.zeros(1, dtype=torch.float64)
    loss = objective.real(zero) if objective.paired else objective.real(zero) + objective.fake(zero)
    assert float(loss) == pytest.approx(objective.chance_level)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_says_what_its_formulas_mean(name):
    """A sign means something if a shift of all logits changes the loss of D; a bound is that of its best logits."""
    objective, at = OBJECTIVES[name], torch.tensor([1.0, -3.0, -1e6], dtype=torch.float64)

    def loss(real, fake):
        if objective.paired:
            return objective.real(real - fake)
        return objective.real(real) + objective.fake(fake)

    values = [loss(at + shift, -at + shift) for shift in (0.0, 0.5)]
    assert torch.allclose(*values) != objective.signed
    assert bool(loss(-at, at)[-1] >= 0) == objective.bounded


@pytest.mark.parametrize("name", ["generator", "real", "fake"])
def test_an_objective_that_gives_a_mean_is_refused(name):
    """It would train with a batch-th of its gradient, without a word."""
    mean: Any = {name: lambda logits: F.softplus(logits).mean()}
    with pytest.raises(UserError, match=rf"objective's {name}: gives \[\] of 3 logits; a value a sample is needed"):
        replace(OBJECTIVES["hinge"], **mean)


def test_the_hinges_margin_is_one_and_unknown_objectives_are_refused():
    """A1: it trained the non-saturating one without a word."""
    d = torch.tensor([-1.5, -0.5, 0.5, 1.5])
    assert OBJECTIVES["hinge"].real(d).tolist() == [2.5, 1.5, 0.5, 0.0]
    assert OBJECTIVES["hinge"].fake(d).tolist() == [0.0, 0.5, 1.5, 2.5]
    with pytest.raises(
        UserError, match=r"loss.objective 'non-saturating' is unknown \(did you mean 'nonsaturating'\?\); there"
    ):
        build_run_config({"task": "gan", "loss": {"objective": "non-saturating"}}, [], "test")


@pytest.mark.parametrize("more", [{}, {"gradient_penalty_weight": 10.0, "r1_interval": 0}])
def test_wasserstein_without_a_bound_is_refused(more):
    with pytest.raises(UserError, match=r"wasserstein needs a bound .* loss.gradient_penalty_weight"):
        build_run_config({"task": "gan", "loss": {"objective": "wasserstein"} | more}, [], "test")
    bound = {"objective": "wasserstein", "gradient_penalty_weight": 10.0}
    config = build_run_config({"task": "gan", "loss": bound}, [], "test")
    assert isinstance(config, GanConfig)
    assert config.loss.functions is OBJECTIVES["wasserstein"]


def draw(*shape):
    return torch.randn(shape, generator=generator(0, "test"), dtype=torch.float64)


def lengths(images, ws, scale):
    return losses.path_lengths(images, ws, draw(3, 1, 2, 3), scale)


def of_logits(penalty):
    return lambda images, ws, scale: penalty(images.sum(dim=(1, 2, 3)), ws, scale)


PENALTIES = [of_logits(losses.squared_gradient_norm), of_logits(losses.gradient_penalty), lengths]


@pytest.mark.parametrize("scale", [2.0**10, torch.tensor(2.0**16, dtype=torch.float64)])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_scale_leaves_value_and_gradient_alone(penalty, scale):
    def penalty_and_gradient(scale):
        factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        given = draw(3, *((2, 3) if penalty is lengths else (1, 2, 3))).requires_grad_()
        found = penalty((factor * given.pow(3)).reshape(3, 1, 2, 3), given, scale)
        found.sum().backward()
        return found.detach(), factor.grad

    for found, expected in zip(penalty_and_gradient(scale), penalty_and_gradient(1.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_tiny_gradients_of_fp16_and_no_slope_at_all():
    images = torch.full((2, 1, 1, 1), 0.5, dtype=torch.float16, requires_grad=True)

    def logits():
        return (images.square() * 1e-4).float().mul(1e-4).sum(dim=(1, 2, 3))  # its gradient underflows in fp16

    assert losses.squared_gradient_norm(logits(), images).eq(0).all()
    scaled = losses.squared_gradient_norm(logits(), images, 2.0**14)
    torch.testing.assert_close(scaled, torch.full((2,), 1e-16), rtol=0.02, atol=0)
    images = torch.full((2, 1, 64, 64), 0.5, dtype=torch.float16, requires_grad=True)
    penalty = losses.gradient_penalty(logits(), images, 2.0**14)  # of a norm of 64e-8
    torch.testing.assert_close(1 - penalty, torch.full((2,), 1.28e-6), rtol=0.1, atol=0)
    images = draw(4, 2, 3, 3).requires_grad_()
    factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    flat = losses.gradient_penalty((factor * 0 * images).sum(dim=(1, 2, 3)), images)
    assert flat.tolist() == pytest.approx([1.0] * 4)
    (gradient,) = torch.autograd.grad(flat.sum(), factor)
    assert bool(gradient.isfinite())  # the root's own slope at 0 is not


class Of(torch.nn.Module):
    """A penalty of a network, as a module whose parameters can be given."""

    def __init__(self, network, penalty):
        super().__init__()
        self.network, self.penalty = network, penalty

    def forward(self):
        return self.penalty(self.network)


@pytest.mark.parametrize(("channels", "classes"), [(1, 0), (3, 2)])
@pytest.mark.parametrize("samples", [1, 3])
def test_both_penalties_pass_gradcheck_by_the_parameters(channels, classes, samples):
    torch.manual_seed(0)
    labels = torch.arange(samples) % 2 if classes else None
    sizes: dict[str, Any] = {"channel_base": 32, "channel_max": 2}
    with forked(0, "init", "penalties"):
        critic = Discriminator(
            DiscriminatorConfig(minibatch_std_group=samples, **sizes), resolution=8, channels=channels, classes=classes
        ).double()
        model = Generator(
            GeneratorConfig(z_dim=3, w_dim=3, mapping_layers=1, **sizes),
            resolution=8,
            channels=channels,
            classes=classes,
        ).double()
    images = draw(samples, channels, 8, 8).requires_grad_()
    z, noise = draw(samples, 3), draw(samples, channels, 8, 8)

    def r1(network):
        return losses.squared_gradient_norm(network(images, labels), images).sum()

    def path(network):
        ws = network.mapping(z, labels)[:, None].expand(-1, network.num_ws, -1)
        lengths = losses.path_lengths(network.synthesis(ws, "const"), ws, noise)
        return (lengths - 0.3).square().sum()

    for network, penalty in ((critic, r1), (model, path)):
        check_gradient(Of(network, penalty))


def check_gradient(module):
    """Autograd's derivative by all parameters, along random directions."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(module(), parameters, allow_unused=True)
    assert sum(g is not None and bool(g.any()) for g in gradients) > len(parameters) / 2
    of_parameters = lambda *values: functional_call(module, dict(zip(names, values, strict=True)), ())  # noqa: E731
    assert gradcheck(of_parameters, parameters, fast_mode=True, atol=1e-4, rtol=1e-4)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def three_losses(network, rows):
    """Three three_losses over one graph; the last does not see the last bias."""
    torch.manual_seed(1)
    out = network(torch.randn(8, 4, dtype=torch.float64)[rows])
    inner = network[0].weight.square().sum() * len(out) / 8
    return {"square": out.square().sum() / 8, "sum": out.sum() * 0.3, "inner": inner}


def test_the_gradients_of_several_losses_of_one_graph_add_up(network):
    """Without `retain_graph` the second loss finds the activations freed."""
    losses, parameters = three_losses(network, slice(0, 8)), list(network.parameters())
    sum(losses.values()).backward(retain_graph=True)
    whole = torch.cat([parameter.grad.flatten() for parameter in parameters])
    network.zero_grad()
    found = separate_gradients(losses, parameters)
    torch.testing.assert_close(sum(found.values()), whole, rtol=1e-12, atol=1e-12)
    assert found["inner"][-3:].eq(0).all()  # of a bias that this loss does not see
    assert all(parameter.grad is None for parameter in parameters)
    with pytest.raises(RuntimeError, match="second time"):
        separate_gradients(losses, parameters)
    losses = three_losses(network, slice(0, 8))
    torch.autograd.grad(losses["square"], parameters)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(losses["sum"], parameters)
