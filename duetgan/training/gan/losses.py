"""A GAN's losses and penalties: functions that know nothing of networks. Another loss is one entry
in `OBJECTIVES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.utils.errors import UserError

Loss = Callable[[Tensor], Tensor]  # of logits [N]; a value a sample [N]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What both networks minimise, of logits. Any penalty can be added to any of them.

    A `paired` one compares each logit with that of a partner with the same label: `generator` is of
    the difference sample - image, `real` of image - sample, and `fake` is not used. Raises
    UserError for a loss that is a mean.
    """

    generator: Loss  # of samples' logits
    real: Loss  # the discriminator's, of images' logits
    fake: Loss  # the discriminator's, of samples' logits
    chance_level: float  # the discriminator's loss where all logits are 0: it tells nothing apart
    paired: bool = False
    signed: bool = True  # the sign of D(x) alone tells whether an image is taken for real
    # false: D's loss falls without end unless a gradient penalty bounds its slope
    bounded: bool = True

    def __post_init__(self) -> None:
        for name in ("generator", "real", "fake"):
            shape = list(getattr(self, name)(torch.zeros(3)).shape)
            if shape != [3]:
                raise UserError(
                    f"objective's {name}: gives {shape} of 3 logits; a value a sample is needed, no mean"
                )


NONSATURATING = Objective(  # Goodfellow et al. (1406.2661), as in StyleGAN2
    generator=lambda d: F.softplus(-d),
    real=lambda d: F.softplus(-d),
    fake=F.softplus,
    chance_level=2 * log(2),
)
OBJECTIVES = {
    "nonsaturating": NONSATURATING,
    # RpGAN (1807.00734), as in R3GAN (2501.05441, eq. 2)
    "relativistic": replace(NONSATURATING, chance_level=log(2), paired=True, signed=False),
    # geometric GAN (1705.02894, eqs. 15 and 16), as in SNGAN (1802.05957, eqs. 16 and 17)
    "hinge": Objective(
        generator=lambda d: -d,
        real=lambda d: F.relu(1 - d),
        fake=lambda d: F.relu(1 + d),
        chance_level=2.0,
    ),
    # WGAN (1701.07875) with a gradient penalty (1704.00028): D(x) - D(G(z)) estimates a distance,
    # zero means nothing
    "wasserstein": Objective(
        generator=lambda d: -d,
        real=lambda d: -d,
        fake=lambda d: d,
        chance_level=0.0,
        signed=False,
        bounded=False,
    ),
}


# --- penalties


def squared_gradient_norm(logits: Tensor, images: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """R1's ||grad_x D(x)||^2 for each sample [N] (Mescheder et al. 1801.04406), with a graph for
    the double backward; R2 is the same of generated images.

    logits [N], images [N, C, H, W] that require gradients; no sample's logit may depend on
    another's image but through the minibatch statistics, whose cross terms are part of the gradient
    as in the reference. Under fp16 the inner gradient is taken of `scale` times the logits and
    unscaled before it is squared.
    """
    (gradient,) = torch.autograd.grad(
        outputs=(logits * scale).sum(), inputs=images, create_graph=True
    )
    gradient = gradient.to(logits.dtype) / scale
    return gradient.square().sum(dim=(1, 2, 3))


def gradient_penalty(logits: Tensor, images: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """(||grad_x D(x)|| - 1)^2 for each image [N], with a graph (WGAN-GP, Gulrajani et al.
    1704.00028, eq. 3).

    `images` lie anywhere between a real image and a sample (`between`). Arguments as of
    `squared_gradient_norm`.
    """
    square = squared_gradient_norm(logits, images, scale)
    # the root's slope at 0 is infinite
    return ((square + torch.finfo(square.dtype).tiny).sqrt() - 1).square()


def between(real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    """share * real + (1 - share) * fake for images [N, C, H, W] and shares [N] in [0, 1]."""
    return torch.lerp(fake, real, share[:, None, None, None].to(real.dtype))


def path_lengths(
    images: Tensor,  # [N, C, H, W], made from `ws`
    ws: Tensor,  # [N, L, w_dim], part of the graph of `images`
    noise: Tensor,  # [N, C, H, W] of N(0, 1)
    scale: Tensor | float = 1.0,
    *,
    create_graph: bool = True,
) -> Tensor:
    """|J_w^T y| for each sample [N] with y = noise / sqrt(H W) (StyleGAN2, 1912.04958, eq. 4).

    The norm is the root of the mean over the L layers of the sum over w's dimensions. `scale` as in
    `squared_gradient_norm`. Without `create_graph` the lengths have no graph and the one of
    `images` is used up.
    """
    y = noise.to(ws.dtype) / (images.shape[2] * images.shape[3]) ** 0.5
    outputs = (images.to(ws.dtype) * y).sum() * scale
    (gradient,) = torch.autograd.grad(outputs=outputs, inputs=ws, create_graph=create_graph)
    return (gradient / scale).square().sum(dim=2).mean(dim=1).sqrt()


def path_length_penalty(
    lengths: Tensor, mean: Tensor, batch_mean: Tensor, decay: float, batch: int
) -> Tensor:
    """sum (length - mean)^2 / batch over the given lengths [n] of a batch (StyleGAN2, 1912.04958,
    eq. 4).

    `mean` is the moving mean after it moved by `decay` towards `batch_mean`, both 0-d without a
    graph. The batch's own share in it is differentiated as in the official code: d/d length_i = 2 /
    batch * (length_i - mean - decay (batch_mean - mean)). It is added in a form that leaves the
    penalty's value alone, so that the parts of a batch add up over micro-batches and ranks.
    """
    share = 2 * decay * (batch_mean - mean) * (lengths - lengths.detach()).sum()
    return ((lengths - mean).square().sum() - share) / batch


def feature_matching(fake: Tensor, real: Tensor, group: int) -> Tensor:
    """||E f(G(z)) - E f(x)||^2 estimated without bias in groups of `group` consecutive samples [N /
    group].

    fake, real: features [N, F]. Salimans et al. (1606.03498, section 3.1) take the means over the
    minibatch, which also punishes the features' spread by 1/N of their variance and depends on how
    a batch is split. Here a group's estimate is (|sum d|^2 - sum |d|^2) / (group (group - 1)) with
    d = f(G(z)) - f(x): the same expectation for every group of 2 or more, so that ranks and
    micro-batches of whole groups add up to one process's result.
    """
    difference = (fake - real).unflatten(0, (-1, group))
    together = difference.sum(dim=1).square().sum(dim=1)
    alone = difference.square().sum(dim=(1, 2))
    return (together - alone) / (group * (group - 1))
