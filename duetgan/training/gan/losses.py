"""Losses and penalties of a GAN, as functions of logits and images only.

To add a loss, add an entry to `OBJECTIVES`, and its name to the comment of `loss.objective`
(config.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.utils.errors import UserError

Loss = Callable[[Tensor], Tensor]  # logits [N] -> one value per sample [N]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The adversarial losses of both networks, as functions of logits.

    A `paired` objective compares the logit of each sample with that of a real image with the same
    label: `generator` gets the difference sample - image, `real` gets image - sample, and `fake` is
    not used. Raises UserError for a loss that returns a mean instead of one value per sample.
    """

    generator: Loss  # the generator's loss, from the logits of samples
    real: Loss  # the discriminator's loss, from the logits of real images
    fake: Loss  # the discriminator's loss, from the logits of samples
    chance_level: float  # the discriminator's loss where all logits are 0
    paired: bool = False
    signed: bool = True  # True if D(x) > 0 means that D judges x to be real
    # False if D's loss has no lower bound, so that it needs a gradient penalty
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
    # WGAN (1701.07875) with a gradient penalty (1704.00028): D(x) - D(G(z)) estimates a distance;
    # the sign of D(x) means nothing
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
    """Return ||grad_x D(x)||^2 for each image [N], with a graph for the double backward.

    This is R1 for real images (Mescheder et al. 1801.04406) and R2 for generated ones.

    Args:
        logits: [N]. The logit of an image may depend on another image only through the minibatch
            statistics; these cross terms are part of the gradient, as in the reference code.
        images: [N, C, H, W] that require gradients.
        scale: Loss scale of fp16. The inner gradient is taken of `scale` times the logits, and
            unscaled before it is squared.
    """
    (gradient,) = torch.autograd.grad(
        outputs=(logits * scale).sum(), inputs=images, create_graph=True
    )
    gradient = gradient.to(logits.dtype) / scale
    return gradient.square().sum(dim=(1, 2, 3))


def gradient_penalty(logits: Tensor, images: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Return (||grad_x D(x)|| - 1)^2 for each image [N], with a graph for the double backward.

    Source: WGAN-GP, Gulrajani et al. 1704.00028, eq. 3. `images` are from `interpolate` and require
    gradients; `scale` is the loss scale of fp16.
    """
    square = squared_gradient_norm(logits, images, scale)
    # The square root has an infinite slope at 0.
    return ((square + torch.finfo(square.dtype).tiny).sqrt() - 1).square()


def interpolate(real: Tensor, fake: Tensor, weights: Tensor) -> Tensor:
    """Return weights * real + (1 - weights) * fake, images [N, C, H, W], for weights [N] in [0, 1]."""
    return torch.lerp(fake, real, weights[:, None, None, None].to(real.dtype))


def path_lengths(
    images: Tensor,  # [N, C, H, W], generated from `ws`
    ws: Tensor,  # [N, L, w_dim], part of the graph of `images`
    noise: Tensor,  # [N, C, H, W] of N(0, 1)
    scale: Tensor | float = 1.0,
    *,
    create_graph: bool = True,
) -> Tensor:
    """Return the path length |J_w^T y| of each sample [N] with y = noise / sqrt(H W).

    Source: StyleGAN2, 1912.04958, eq. 4. The norm is the square root of the mean over the L layers
    of the sum of squares over the dimensions of w. `scale` is the loss scale of fp16. Without
    `create_graph` the lengths have no graph, and the graph of `images` is freed.
    """
    y = noise.to(ws.dtype) / (images.shape[2] * images.shape[3]) ** 0.5
    outputs = (images.to(ws.dtype) * y).sum() * scale
    (gradient,) = torch.autograd.grad(outputs=outputs, inputs=ws, create_graph=create_graph)
    return (gradient / scale).square().sum(dim=2).mean(dim=1).sqrt()


def path_length_penalty(
    lengths: Tensor, mean: Tensor, batch_mean: Tensor, decay: float, batch: int
) -> Tensor:
    """Return the penalty sum (length - mean)^2 / batch over `lengths` [n], 0-d.

    The lengths are a part of a batch of `batch` samples. `mean` is the moving mean after it moved
    by `decay` towards `batch_mean`; both are 0-d and have no graph. Source: StyleGAN2 (1912.04958,
    eq. 4).

    As in the official code, the gradient includes the contribution of the batch to `mean`:
    d/d length_i = 2 / batch * (length_i - mean - decay (batch_mean - mean)). This contribution has
    the value 0, so the penalties of micro-batches and ranks add up to that of the batch.
    """
    batch_term = 2 * decay * (batch_mean - mean) * (lengths - lengths.detach()).sum()
    return ((lengths - mean).square().sum() - batch_term) / batch


def feature_matching(fake: Tensor, real: Tensor, group: int) -> Tensor:
    """Return unbiased estimates [N / group] of the squared distance ||E f(G(z)) - E f(x)||^2.

    `fake` and `real` are features [N, F]; each estimate is from `group` consecutive samples.
    Salimans et al. (1606.03498, section 3.1) take the means over the minibatch, which also
    penalises the variance of the features by 1/N and depends on how a batch is split. Here the
    estimate of a group is (|sum d|^2 - sum |d|^2) / (group (group - 1)) with d = f(G(z)) - f(x).
    Its expectation is the same for every group size from 2. The estimates of ranks and
    micro-batches, which hold whole groups, add up to the result of one process.
    """
    difference = (fake - real).unflatten(0, (-1, group))
    square_of_sum = difference.sum(dim=1).square().sum(dim=1)
    sum_of_squares = difference.square().sum(dim=(1, 2))
    return (square_of_sum - sum_of_squares) / (group * (group - 1))
