"""The registry of loss games: another one is one entry in `OBJECTIVES`, with its formulas.

A game is what each player makes smaller: functions of logits that return one value a sample [N] and know nothing of
networks. Penalties are in penalties.py; any game may be played with any of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from utils.config.cli import did_you_mean
from utils.errors import UserError

Loss = Callable[[Tensor], Tensor]  # of logits [N]; a value a sample [N]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss game. In a paired one each logit is compared with its partner's: the losses are of the difference between
    the own logit and that of a sample or an image of the same label, and `fake` is not asked for.
    """

    generator: Loss  # of samples' logits
    real: Loss  # the discriminator's, of images' logits
    fake: Loss  # the discriminator's, of samples' logits
    guessing: float  # the discriminator's loss where all logits are 0: it tells nothing apart
    paired: bool = False
    signed: bool = True  # the sign of D(x) alone tells whether an image is judged real
    # false: D's loss falls without end unless a gradient penalty bounds its slope; its size says nothing of the game
    bounded: bool = True

    def generator_loss(self, fake: Tensor, real: Tensor | None = None) -> Tensor:
        """[N] of samples' logits and, if paired, their partners'."""
        return self.generator(fake - real if self.paired and real is not None else fake)

    def pair_loss(self, real: Tensor, fake: Tensor) -> Tensor:
        """The discriminator's of a paired game, [N]."""
        return self.real(real - fake)


def _low(logits: Tensor) -> Tensor:
    """softplus(-D): small where D is sure that an image is real."""
    return F.softplus(-logits)


OBJECTIVES = {
    # Goodfellow et al. (1406.2661), as in StyleGAN2
    "nonsaturating": Objective(generator=_low, real=_low, fake=F.softplus, guessing=2 * math.log(2)),
    # RpGAN (1807.00734), as in R3GAN (2501.05441, eq. 2)
    "relativistic": Objective(
        generator=_low, real=_low, fake=F.softplus, guessing=math.log(2), paired=True, signed=False
    ),
    # geometric GAN (1705.02894, eqs. 15 and 16), as in SNGAN (1802.05957, eqs. 16 and 17)
    "hinge": Objective(
        generator=lambda d: -d, real=lambda d: F.relu(1 - d), fake=lambda d: F.relu(1 + d), guessing=2.0
    ),
    # WGAN (1701.07875) with a gradient penalty (1704.00028): D(x) - D(G(z)) estimates a distance, zero means nothing
    "wasserstein": Objective(
        generator=lambda d: -d, real=lambda d: -d, fake=lambda d: d, guessing=0.0, signed=False, bounded=False
    ),
}


def objective_of(name: str) -> Objective:
    """The game of that name; UserError, with the near one, for a name that is not in the registry."""
    if name not in OBJECTIVES:
        near = did_you_mean(name, list(OBJECTIVES))
        raise UserError(f"loss.objective {name!r} is unknown{near}; there are {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
