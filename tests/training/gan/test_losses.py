"""Objectives and penalties against the papers' formulas, written out."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.training.gan import losses
from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.losses import OBJECTIVES
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked, generator

LOGITS = torch.tensor([-700.0, -3.0, 0.0, 0.5, 1.0, 20.0, 700.0], dtype=torch.float64)


def softplus(x):
    """log(1 + e^x), without overflow."""
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def sigmoid(x):
    return math.exp(min(x, 0)) / (1 + math.exp(-abs(x)))


# (loss of one logit, its slope) of the generator, and of the discriminator of an image and of a sample
FORMULAS = {
    "nonsaturating": (
        (lambda d: softplus(-d), lambda d: -sigmoid(-d)),
        (lambda d: softplus(-d), lambda d: -sigmoid(-d)),
        (softplus, sigmoid),
    ),
    "relativistic": (  # of the pair's difference
        (lambda d: softplus(-d), lambda d: -sigmoid(-d)),
        (lambda d: softplus(-d), lambda d: -sigmoid(-d)),
        (softplus, sigmoid),
    ),
    "hinge": (
        (lambda d: -d, lambda d: -1.0),
        (lambda d: max(0.0, 1 - d), lambda d: -1.0 if d < 1 else 0.0),
        (lambda d: max(0.0, 1 + d), lambda d: 1.0 if d > -1 else 0.0),
    ),
    "wasserstein": ((lambda d: -d, lambda d: -1.0), (lambda d: -d, lambda d: -1.0), (lambda d: d, lambda d: 1.0)),
}


def test_every_objective_has_its_formulas_here():
    assert set(FORMULAS) == set(OBJECTIVES)
    assert [name for name, objective in OBJECTIVES.items() if objective.paired] == ["relativistic"]


@pytest.mark.parametrize("name", FORMULAS)
def test_losses_and_their_slopes_are_the_formulas(name):
    objective = OBJECTIVES[name]
    for loss, (value, slope) in zip((objective.generator, objective.real, objective.fake), FORMULAS[name], strict=True):
        logits = LOGITS.clone().requires_grad_()
        found = loss(logits)
        expected = torch.tensor([value(x) for x in LOGITS.tolist()], dtype=torch.float64)
        # torch's softplus is the identity above 20: 1e-9 off
        torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-9)
        found.sum().backward()
        slopes = torch.tensor([slope(x) for x in LOGITS.tolist()], dtype=torch.float64)
        torch.testing.assert_close(logits.grad, slopes, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_chance_level_is_the_discriminators_loss_where_it_tells_nothing_apart(name):
    objective, zero = OBJECTIVES[name], torch.zeros(1, dtype=torch.float64)
    loss = objective.real(zero) if objective.paired else objective.real(zero) + objective.fake(zero)
    assert float(loss) == pytest.approx(objective.chance_level)


@pytest.mark.parametrize("name", ["generator", "real", "fake"])
def test_an_objective_that_gives_a_mean_is_refused(name):
    """It would train with a batch-th of its gradient, without a word."""
    mean: Any = {name: lambda logits: F.softplus(logits).mean()}
    with pytest.raises(UserError, match=rf"objective's {name}: gives \[\] of 3 logits; a value a sample is needed"):
        replace(OBJECTIVES["hinge"], **mean)


def test_an_unknown_objective_is_refused_with_the_near_one():
    """A1: it trained the non-saturating one without a word."""
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


# --- penalties


def draw(*shape):
    return torch.randn(shape, generator=generator(0, "test"), dtype=torch.float64)


@pytest.mark.parametrize("scale", [2.0**10, torch.tensor(2.0**16, dtype=torch.float64)])
def test_the_scale_leaves_value_and_gradient_alone(scale):
    def penalty_and_gradient(scale):
        factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        images = draw(3, 1, 2, 2).requires_grad_()
        penalty = losses.squared_gradient_norm((factor * images.pow(3)).sum(dim=(1, 2, 3)), images, scale)
        penalty.sum().backward()
        return penalty.detach(), factor.grad

    for found, expected in zip(penalty_and_gradient(scale), penalty_and_gradient(1.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_scale_keeps_tiny_gradients_of_fp16():
    images = torch.full((2, 1, 1, 1), 0.5, dtype=torch.float16, requires_grad=True)

    def logits():
        return (images.square() * 1e-4).float().mul(1e-4).sum(dim=(1, 2, 3))  # its gradient underflows in fp16

    assert losses.squared_gradient_norm(logits(), images).eq(0).all()
    scaled = losses.squared_gradient_norm(logits(), images, 2.0**14)
    torch.testing.assert_close(scaled, torch.full((2,), 1e-16), rtol=0.02, atol=0)


def test_the_gradient_penalty_is_the_slopes_distance_from_one():
    weights, images = draw(2, 3, 3), draw(4, 2, 3, 3).requires_grad_()
    factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for scale in (1.0, 2.0**10):
        found = losses.gradient_penalty((factor * images * weights).sum(dim=(1, 2, 3)), images, scale)
        length = float(weights.square().sum().sqrt())
        torch.testing.assert_close(found.detach(), found.new_full((4,), (0.7 * length - 1) ** 2), rtol=1e-12, atol=0)
        (gradient,) = torch.autograd.grad(found.sum(), factor)
        torch.testing.assert_close(float(gradient), 4 * 2 * (0.7 * length - 1) * length, rtol=1e-12, atol=0)
    flat = losses.gradient_penalty((factor * 0 * images).sum(dim=(1, 2, 3)), images)
    assert flat.tolist() == pytest.approx([1.0] * 4)
    (gradient,) = torch.autograd.grad(flat.sum(), factor)
    assert bool(gradient.isfinite())  # the root's own slope at 0 is not


def test_images_between_lie_on_the_way_from_sample_to_image():
    real, fake = draw(3, 1, 2, 2), draw(3, 1, 2, 2).flip(0)
    found = losses.between(real, fake, torch.tensor([0.0, 0.25, 1.0]))
    torch.testing.assert_close(found, torch.stack([fake[0], 0.25 * real[1] + 0.75 * fake[1], real[2]]))


def test_feature_matching_is_an_unbiased_estimate_of_the_means_distance():
    fake, real = draw(6, 5) + 0.3, draw(6, 5).flip(0)
    (alone,) = losses.feature_matching(fake, real, 6)
    d = fake - real
    pairs = [float(d[i] @ d[j]) for i in range(6) for j in range(6) if i != j]
    torch.testing.assert_close(float(alone), sum(pairs) / len(pairs), rtol=1e-12, atol=1e-12)
    # its mean over many draws is the distance of the true means (0.5 in each of 3 dimensions)
    many = torch.randn(40_000, 3, generator=generator(1, "test"), dtype=torch.float64)
    real = torch.randn(40_000, 3, generator=generator(2, "test"), dtype=torch.float64)
    estimates = losses.feature_matching(many + 0.5, real, 4)
    assert abs(float(estimates.mean()) - 0.75) < 5 * float(estimates.std()) / math.sqrt(len(estimates))


def jacobian_lengths(function, ws, noise):
    """|J^T y| from the full Jacobian, sample by sample and layer by layer."""
    lengths = []
    for sample in range(len(ws)):
        one = ws[sample : sample + 1].detach()
        jacobian = torch.autograd.functional.jacobian(lambda w: function(w)[0], one)  # [C, H, W, 1, L, w_dim]
        size = jacobian.shape[1] * jacobian.shape[2]
        total = 0.0
        for layer in range(ws.shape[1]):
            for k in range(ws.shape[2]):
                total += float((jacobian[:, :, :, 0, layer, k] * noise[sample]).sum()) ** 2 / size
        lengths.append(math.sqrt(total / ws.shape[1]))
    return torch.tensor(lengths, dtype=torch.float64)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_path_lengths_are_those_of_the_jacobian(channels, scale):
    weights = draw(channels * 4 * 2, 6)

    def function(ws):
        return torch.tanh(ws.flatten(1) @ weights.t()).reshape(len(ws), channels, 4, 2)

    ws, noise = draw(3, 2, 3).requires_grad_(), draw(3, channels, 4, 2)
    lengths = losses.path_lengths(function(ws), ws, noise, scale)
    torch.testing.assert_close(lengths.detach(), jacobian_lengths(function, ws, noise), rtol=1e-10, atol=1e-10)
    plain = losses.path_lengths(function(ws), ws, noise, scale, create_graph=False)
    assert not plain.requires_grad
    torch.testing.assert_close(plain, lengths.detach())


@pytest.mark.parametrize(("channels", "classes"), [(1, 0), (3, 0), (1, 2), (3, 2)])
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
        check_gradient(network, penalty)


def check_gradient(network, penalty):
    """Autograd's derivative of `penalty(network)` along random directions of all parameters against differences."""
    parameters = list(network.parameters())
    gradients = torch.autograd.grad(penalty(network), parameters, allow_unused=True)
    assert sum(g is not None and float(g.abs().sum()) > 0 for g in gradients) > len(parameters) / 2
    numbers = generator(3, "directions")
    for _ in range(3):
        directions = [torch.randn(p.shape, generator=numbers, dtype=p.dtype) for p in parameters]
        expected = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
        eps, values = 1e-6, []
        for sign in (1, -1):
            with torch.no_grad():
                for parameter, direction in zip(parameters, directions, strict=True):
                    parameter += sign * eps * direction
            values.append(float(penalty(network).detach()))
            with torch.no_grad():
                for parameter, direction in zip(parameters, directions, strict=True):
                    parameter -= sign * eps * direction
        difference = (values[0] - values[1]) / (2 * eps)
        assert abs(difference - expected) < 1e-4 * max(1.0, abs(expected))
