"""Directions in a latent space that raise one class against another while the rest stays: pure functions.

How steeply each class's logit rises is known from gradients. The direction n from class a to b maximises
(g n)^2 / n A n with g = slope_b - slope_a and

    A = 1 + pixel_weight * mean change of pixels + keep_weight * change of the other classes

each term scaled to a trace of `size`. Without the weights it is g itself (InterFaceGAN's normal, 1907.10786, is that of
a linear model); with keep_weight towards infinity it is g without its part along the other classes, InterFaceGAN's
conditional manipulation (section 2.3).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def gradient_slopes(logits: Tensor, offsets: Tensor) -> Tensor:
    """The sum over images of each logit's gradient, float64 [k, size], of logits [n, k] made with offsets [n, size]."""
    rows = [
        torch.autograd.grad(logits[:, k].sum(), offsets, retain_graph=k + 1 < logits.shape[1])[0].double().sum(0)
        for k in range(logits.shape[1])
    ]
    return torch.stack(rows).cpu()


def pixel_rows(images: Tensor, offsets: Tensor, draws: Iterator[Tensor]) -> Tensor:
    """Rows r [n * draws, size] whose mean r r^T estimates how the mean square of the pixels changes with the offsets.

    r = J^T v with v of N(0, 1 / pixels), so that E[r r^T] = J^T J / pixels: one backward pass for each draw, images [n,
    C, H, H] and draws of their shape.
    """
    pixels = images[0].numel()
    rows = [torch.autograd.grad(images, offsets, draw.to(images) / pixels**0.5, retain_graph=True)[0] for draw in draws]
    return torch.cat(rows).double().cpu()


def steer(
    slopes: Tensor,  # float64 [2 + others, size]: of the source's logit, the target's, and of others that shall stay
    pixels: Tensor,  # float64 [m, size], of `pixel_rows`
    *,
    pixel_weight: float,
    keep_weight: float,
) -> Tensor:
    """The direction, float64 [size], of length 1; zeros where no dimension moves the two classes apart."""
    size = slopes.shape[1]
    gain = slopes[1] - slopes[0]
    others = slopes[2:] - (slopes[0] + slopes[1]) / 2  # a softmax does not see what is added to all logits
    penalties = [
        weight**0.5 * rows / (rows.square().sum() / size).sqrt()
        for rows, weight in ((pixels, pixel_weight), (others, keep_weight))
        if len(rows) and rows.any()
    ]
    stacked = torch.cat([*penalties, gain.new_zeros(0, size)])  # A = 1 + stacked^T stacked
    direction = torch.linalg.solve(torch.eye(size, dtype=gain.dtype) + stacked.T @ stacked, gain)
    return direction / direction.norm().clamp_min(torch.finfo(direction.dtype).tiny)


def first_reached(
    height: Callable[[Tensor, float], Tensor],  # rows and a step -> how high each of them is there
    wanted: Tensor,  # [n], the height that each row shall reach
    steps: list[float],  # ascending
) -> tuple[Tensor, Tensor]:
    """The first of `steps` at which each row is as high as wanted, float64 [n], and whether it ever is, bool.

    A row that never is has the step at which it is highest.
    """
    count = len(wanted)
    found, best = torch.zeros(count, dtype=torch.float64), torch.full([count], -torch.inf, dtype=torch.float64)
    for step in steps:
        rows = (best < wanted).nonzero()[:, 0]
        if not len(rows):
            break
        heights = height(rows, step).double()
        higher = rows[heights > best[rows]]
        found[higher] = step
        best[rows] = best[rows].maximum(heights)
    return found, best >= wanted
