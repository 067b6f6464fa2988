"""Perceptual path length (Karras et al. 2019, 1812.04948, section 4.1) of generators with a w.

How far images move for a small step between two points of w, per squared step: 0 where nothing changes, large where
images jump. The paper measures in LPIPS; here it is the squared distance of an extractor's features, so figures
compare with those of the same extractor alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from metrics.bootstrap import normal_interval
from metrics.extractors import Extractor
from metrics.precision import evaluating, exact_float32
from models.gan import StyledGenerator
from models.sampling import draw
from utils.seeding import generator as keyed_generator

EPSILON = 1e-4  # the step, as a share of the way between the two points
TRIM = (0.01, 0.99)  # quantiles beyond which steps are left out, as in the paper's code


def steps(
    image_of: Callable[[Tensor], Tensor],  # w [n, ...] -> images
    features_of: Callable[[Tensor], Tensor],  # images -> [n, F]
    start: Tensor,  # w [n, ...]
    end: Tensor,
    positions: Tensor,  # [n], 0 to 1: where on the way from start to end
    *,
    epsilon: float = EPSILON,
) -> Tensor:
    """Squared distance of features over one step, divided by epsilon^2, [n]."""
    places = positions.to(start.dtype).view(-1, *[1] * (start.ndim - 1))
    near, far = (features_of(image_of(start.lerp(end, place))) for place in (places, places + epsilon))
    return (near.double() - far.double()).square().sum(1) / epsilon**2


def trimmed(lengths: Tensor) -> Tensor:
    """The lengths [n] without those beyond the quantiles `TRIM`."""
    low, high = (torch.quantile(lengths, quantile, interpolation="lower") for quantile in TRIM)
    return lengths[(lengths >= low) & (lengths <= high)]


@torch.no_grad()
def path_length(
    generator: StyledGenerator,
    extractor: Extractor,  # of images as float32 0 to 255, not rounded
    *,
    labels: Tensor | None,  # int64 [n], of both ends of each way; None without classes
    n: int,
    seed: int,
    batch_size: int = 64,
) -> tuple[float, list[float]]:
    """Mean over n ways, each between two random points of w at a uniform position, and its 95 % interval.

    Way i has the latents of samples 2 i and 2 i + 1, the noise of the first, and its position by the key (seed,
    "eval", "path length", i).
    """
    device = next(generator.parameters()).device
    found = []
    for begin in range(0, n, batch_size):
        ways = range(begin, min(begin + batch_size, n))
        z, maps = draw(generator, [i for way in ways for i in (2 * way, 2 * way + 1)], seed)
        positions = torch.cat([torch.rand(1, generator=keyed_generator(seed, "eval", "path length", i)) for i in ways])
        classes = None if labels is None else labels[begin : ways.stop].repeat_interleave(2).to(device)
        noise = [each[::2].to(device) for each in maps]
        with evaluating(generator), exact_float32(device):
            w = generator.mapping(z.to(device), classes)  # [2 n, w_dim]

            def image_of(w: Tensor, noise: list[Tensor] = noise) -> Tensor:
                styles = w[:, None].expand(-1, generator.num_ws, -1)
                return ((generator.synthesis(styles, noise).float() + 1) * 127.5).clamp(0, 255)

            def features_of(images: Tensor) -> Tensor:
                with exact_float32(extractor.device):
                    return extractor(images).cpu()

            found.append(steps(image_of, features_of, w[::2], w[1::2], positions.to(device)))
    kept = trimmed(torch.cat(found))
    variance = float(kept.var()) / len(kept) if len(kept) > 1 else 0.0
    return float(kept.mean()), normal_interval(float(kept.mean()), variance, low=0.0)
