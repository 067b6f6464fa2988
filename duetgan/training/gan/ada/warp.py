"""Affine transformations of images: exact copies of pixels, and a resampled warp.

The functions are pure, and twice differentiable with respect to the images. A transformation is
given by its inverse, a matrix [n, 3, 3], which maps a position in the result to a position in the
image. A position is (x, y, 1) in pixels from the centre; x points to the right and y down.

Beyond its edges an image is mirrored at the centre of the last pixel (NumPy's "reflect"), any
number of times. Coordinates are reflected instead of padding the images, because the width of a
padding would depend on the random draws.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Low-pass filters of the 2x oversampling: the right halves of symmetric filters of 13 and 11 taps.
# Each has the sum 1 and six zeros at the Nyquist frequency. The paper (2006.06676, appendix B) uses
# sym6 forwards and backwards. Both pairs are factors of the same polynomial, Lagrange's half-band
# filter of order 12. So up- and downsampling together is the identity, and passes the same
# frequencies as in the paper. Unlike sym6, symmetric taps keep the mirror positions of an
# oversampled image, which makes reflected coordinates exact.
UP_TAPS = (
    0.5425242550391501, 0.27101229370282987, -0.04870418161951369, -0.023670456809666306,
    0.033433248051649433, 0.002658163106836118, -0.005991193951711113,
)  # fmt: skip
DOWN_TAPS = (
    0.5889121645077915, 0.31686062971595647, -0.0489054213312996,
    -0.07688892831851366, 0.004449339077403858, 0.01002829860255719,
)  # fmt: skip
UP_MARGIN = len(UP_TAPS) // 2  # px of the image
DOWN_MARGIN = len(DOWN_TAPS) - 1  # px of the oversampled image
# Largest number of pixels that one dense matrix resamples: up to this size matrices were measured
# to be faster than convolutions.
BLOCK = 64


def reflect(index: Tensor, size: int) -> Tensor:
    """Map integer positions to 0..size-1 by reflecting them at the pixels 0 and size-1."""
    period = 2 * (size - 1)
    wrapped = index.remainder(period)
    return torch.minimum(wrapped, period - wrapped)


def copy_pixels(images: Tensor, inverse: Tensor) -> Tensor:
    """Transform images [n, C, H, W] with nearest-neighbour interpolation.

    `inverse` [n, 3, 3] maps positions in the result to positions in the image. The result is exact
    for flips, turns by 90 degrees and shifts by whole pixels.
    """
    n, channels, height, width = images.shape
    middle_x, middle_y = (width - 1) / 2, (height - 1) / 2
    across = torch.arange(width, device=images.device, dtype=inverse.dtype) - middle_x
    down = torch.arange(height, device=images.device, dtype=inverse.dtype) - middle_y
    x, y = _follow(inverse, across, down)
    x = reflect((x + middle_x).round().long(), width)
    y = reflect((y + middle_y).round().long(), height)
    index = (y * width + x).reshape(n, 1, -1).expand(n, channels, -1)
    return images.reshape(n, channels, -1).gather(2, index).reshape(images.shape)


def warp(images: Tensor, inverse: Tensor) -> Tensor:
    """Transform images [n, C, H, W] by 2x oversampling, bilinear sampling and 2x decimation.

    `inverse` [n, 3, 3] maps positions in the result to positions in the image. Both sides must be
    at least 4 px. The result is exact up to rounding for the identity, flips, turns by 90 degrees
    and shifts by whole pixels.
    """
    height, width = images.shape[2:]

    def positions(side: int) -> Tensor:
        """Return the positions of the oversampled pixels of a side, in px from its middle.

        They include margins at both ends.
        """
        count = 2 * side + 2 * DOWN_MARGIN - 1
        steps = torch.arange(count, device=images.device, dtype=images.dtype) - DOWN_MARGIN
        return steps / 2 - (side - 1) / 2

    # In the coordinates of grid_sample the centres of the outermost pixels are at -1 and 1.
    inverse = torch.stack(
        [inverse[:, 0] / ((width - 1) / 2), inverse[:, 1] / ((height - 1) / 2)], dim=1
    )
    # [n, 2 H + margins, 2 W + margins, 2]
    grid = torch.stack(_follow(inverse, positions(width), positions(height)), dim=-1)
    block = _block(math.gcd(height, width))
    up, down = _matrices(block, images.dtype, images.device)
    padded = F.pad(images, [UP_MARGIN] * 4, mode="reflect")
    # Pixel i becomes pixel 2i. The last pixel lies beyond the image and is dropped.
    oversampled = _both_ways(padded, up, block)[..., :-1, :-1]
    # Pixel 2i + DOWN_MARGIN becomes pixel i.
    return _both_ways(Sample.apply(oversampled, grid), down, 2 * block)


def _follow(inverse: Tensor, across: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions x and y in the image, each [n, h, w], for the pixels of the result.

    `inverse` [n, 3, 3] maps positions in the result to positions in the image. `across` [w] holds
    the x positions of the result's columns, and `down` [h] the y positions of its rows.
    """
    across, down = across[None, None, :], down[None, :, None]

    def coordinate(row: int) -> Tensor:
        a, b, c = inverse[:, row, :, None, None].unbind(1)
        return (a * across + c) + b * down

    return coordinate(0), coordinate(1)


class Sample(torch.autograd.Function):
    """Bilinear sampling with reflected coordinates, and its transpose, both differentiable twice.

    `grid` has the format of `F.grid_sample`. If `shape` is given, the transpose is computed, and
    the result has this shape: each value is added to the pixels from which sampling would
    interpolate it.

    torch's own function cannot be differentiated twice. This one can, because sampling is linear
    in the images: its gradient is the transpose, and the gradient of the transpose is sampling. The
    grid has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, grid: Tensor, shape: torch.Size | None = None) -> Tensor:
        """Sample the images `values` [n, C, h, w] at `grid` [n, H, W, 2].

        If `shape` is given, apply the transpose to `values` [n, C, H, W].
        """
        ctx.save_for_backward(grid)
        ctx.shape = values.shape if shape is None else None
        if shape is None:
            return F.grid_sample(
                values, grid, mode="bilinear", padding_mode="reflection", align_corners=True
            )
        images = values.new_zeros(1).expand(shape)  # The operator uses only its shape.
        bilinear, reflection = 0, 2  # numbers of the operator's modes
        has_gradient = [True, False]  # of images and grid
        return torch.ops.aten.grid_sampler_2d_backward(
            values, images, grid, bilinear, reflection, True, has_gradient
        )[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grid,) = ctx.saved_tensors
        return Sample.apply(gradients[0], grid, ctx.shape), None, None


def _block(size: int) -> int:
    return next(block for block in range(min(size, BLOCK), 0, -1) if size % block == 0)


def _both_ways(images: Tensor, matrix: Tensor, step: int) -> Tensor:
    """Multiply the columns, then the rows of images by `matrix` [outputs, inputs], piece by piece.

    Pieces have `inputs` pixels and start every `step` px; their results are concatenated.
    """
    inputs = matrix.shape[1]
    # One piece is a special case because the gradient of unfold is slow.
    if images.shape[-2:] == (inputs, inputs):
        return matrix @ images @ matrix.T
    columns = images.unfold(-2, inputs, step).mT  # [n, C, pieces, inputs, W]
    rows = (matrix @ columns).flatten(2, 3).unfold(-1, inputs, step)  # [n, C, H, pieces, inputs]
    return (rows @ matrix.T).flatten(-2)


# Cached, because a copy from the host would wait for the device in every step.
@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _matrices(block: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the matrices that upsample and downsample a line of `block` pixels with margins.

    The first, [2 block, block + 2 UP_MARGIN], inserts zeros between pixels and applies the filter
    times two. The second, [block, 2 block + 2 DOWN_MARGIN - 1], applies the filter at every other
    pixel.
    """
    up = torch.arange(2 * block)[:, None] - 2 * (torch.arange(block + 2 * UP_MARGIN) - UP_MARGIN)
    down = (
        2 * torch.arange(block)[:, None]
        - torch.arange(2 * block + 2 * DOWN_MARGIN - 1)
        + DOWN_MARGIN
    )
    return 2 * _taps(UP_TAPS, up).to(device, dtype), _taps(DOWN_TAPS, down).to(device, dtype)


def _taps(half: tuple[float, ...], distance: Tensor) -> Tensor:
    """Return the values of a symmetric filter at integer distances from its middle.

    `half` is the right half of the filter, with the middle. Beyond it the filter is 0.
    """
    return torch.tensor([*half, 0.0], dtype=torch.float64)[distance.abs().clamp(max=len(half))]
