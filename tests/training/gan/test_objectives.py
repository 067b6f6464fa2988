import math

import pytest
import torch

from training.engine.tasks import build_run_config
from training.gan.config import GanConfig
from training.gan.objectives import OBJECTIVES, objective_of
from utils.errors import UserError

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
    "hinge": (
        (lambda d: -d, lambda d: -1.0),
        (lambda d: max(0.0, 1 - d), lambda d: -1.0 if d < 1 else 0.0),
        (lambda d: max(0.0, 1 + d), lambda d: 1.0 if d > -1 else 0.0),
    ),
    "wasserstein": ((lambda d: -d, lambda d: -1.0), (lambda d: -d, lambda d: -1.0), (lambda d: d, lambda d: 1.0)),
}


def test_every_game_that_does_not_pair_has_its_formulas_here():
    assert set(FORMULAS) == {name for name, game in OBJECTIVES.items() if not game.paired}


@pytest.mark.parametrize("name", FORMULAS)
def test_losses_and_their_slopes_are_the_formulas(name):
    game = OBJECTIVES[name]
    for loss, (value, slope) in zip((game.generator_loss, game.real, game.fake), FORMULAS[name], strict=True):
        logits = LOGITS.clone().requires_grad_()
        found = loss(logits)
        expected = torch.tensor([value(x) for x in LOGITS.tolist()], dtype=torch.float64)
        # torch's softplus is the identity above 20: 1e-9 off
        torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-9)
        found.sum().backward()
        slopes = torch.tensor([slope(x) for x in LOGITS.tolist()], dtype=torch.float64)
        torch.testing.assert_close(logits.grad, slopes, rtol=1e-9, atol=1e-9)


def test_relativistic_losses_are_softplus_of_the_pairs_difference():
    game, first, second = OBJECTIVES["relativistic"], LOGITS, LOGITS.flip(0)
    expected = [softplus(-(a - b)) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    for loss in (game.generator_loss, game.pair_loss):
        # torch's softplus is the identity above 20: 1e-9 off
        torch.testing.assert_close(
            loss(first, second), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9
        )
        # the first argument is the one that is to be judged the more real
        assert loss(torch.tensor([2.0]), torch.tensor([-2.0])) < loss(torch.tensor([-2.0]), torch.tensor([2.0]))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_guessing_is_the_discriminators_loss_where_it_tells_nothing_apart(name):
    game, zero = OBJECTIVES[name], torch.zeros(1, dtype=torch.float64)
    loss = game.pair_loss(zero, zero) if game.paired else game.real(zero) + game.fake(zero)
    assert float(loss) == pytest.approx(game.guessing)


def test_an_unknown_game_is_refused_with_the_near_one():
    """A1: it trained the non-saturating one without a word."""
    with pytest.raises(UserError, match=r"'hinged' is unknown \(did you mean 'hinge'\?\); there are nonsaturating, "):
        objective_of("hinged")
    with pytest.raises(UserError, match=r"loss.objective 'non-saturating' is unknown \(did you mean 'nonsaturating'"):
        build_run_config({"task": "gan", "loss": {"objective": "non-saturating"}}, [], "test")


@pytest.mark.parametrize("more", [{}, {"gradient_penalty_weight": 10.0, "r1_interval": 0}])
def test_wasserstein_without_a_bound_is_refused(more):
    with pytest.raises(UserError, match=r"wasserstein needs a bound .* loss.gradient_penalty_weight"):
        build_run_config({"task": "gan", "loss": {"objective": "wasserstein"} | more}, [], "test")
    bound = {"objective": "wasserstein", "gradient_penalty_weight": 10.0}
    config = build_run_config({"task": "gan", "loss": bound}, [], "test")
    assert isinstance(config, GanConfig)
    assert config.loss.game is OBJECTIVES["wasserstein"]
