"""Moving pixels: exact copies, and one resampled affine warp. Pure functions, differentiable twice
in the images.

A transformation is given by its inverse, [n, 3, 3]: it leads from a place in the result to the
place that is shown there, (x, y, 1) in pixels, x to the right and y down from the image's centre.
Images go on beyond their edges as in a mirror that stands on the centre of the last pixel (NumPy's
"reflect"), without end: it is the coordinates that are reflected, so there is no margin whose width
would depend on the draws.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Low-pass filters of the 2x oversampling (2006.06676, appendix B: sym6 both ways): the right halves
# of symmetric filters of 13 and 11 taps, each of sum 1 with six zeros at the Nyquist frequency.
# They are two factors of the very polynomial of which sym6, forth and back, is another
# factorisation, Lagrange's half-band filter of order 12: up and down again is the identity, and by
# up and down together the same frequencies pass. Symmetric taps, unlike sym6, leave an oversampled
# image mirrored at the same places, which is what makes reflected coordinates exact.
UP_TAPS = (
    0.5425242550391501, 0.27101229370282987, -0.04870418161951369, -0.023670456809666306,
    0.033433248051649433, 0.002658163106836118, -0.005991193951711113,
)  # fmt: skip
DOWN_TAPS = (
    0.5889121645077915, 0.31686062971595647, -0.0489054213312996,
    -0.07688892831851366, 0.004449339077403858, 0.01002829860255719,
)  # fmt: skip
UP_MARGIN = len(UP_TAPS) // 2  # px of the image
DOWN_MARGIN = len(DOWN_TAPS) - 1  # px of the oversampled one
# largest number of pixels that one dense matrix resamples; measured: matrices beat convolutions
# below it
BLOCK = 64


def reflect(index: Tensor, size: int) -> Tensor:
    """Indices into 0..size-1 of pixels anywhere, the line of pixels being mirrored at the centres
    of its ends.
    """
    period = 2 * (size - 1)
    wrapped = index.remainder(period)
    return torch.minimum(wrapped, period - wrapped)


def copy_pixels(images: Tensor, inverse: Tensor) -> Tensor:
    """Every pixel is a copy of one of `images` [n, C, H, W]: the nearest to where it comes from.

    For flips, turns by 90 degrees and shifts by whole pixels nothing is rounded.
    """
    n, channels, height, width = images.shape
    middles = (width - 1) / 2, (height - 1) / 2
    lines = (
        torch.arange(side, device=images.device, dtype=inverse.dtype) - middle
        for side, middle in zip((width, height), middles, strict=True)
    )
    x, y = (
        reflect((places + middle).round().long(), side)
        for places, middle, side in zip(
            _follow(inverse, *lines), middles, (width, height), strict=True
        )
    )
    index = (y * width + x).reshape(n, 1, -1).expand(n, channels, -1)
    return images.reshape(n, channels, -1).gather(2, index).reshape(images.shape)


def warp(images: Tensor, inverse: Tensor) -> Tensor:
    """Warp images [n, C, H, W], each side at least 4: 2x oversampling, bilinear sampling, 2x
    decimation.

    The identity, flips, turns by 90 degrees and shifts by whole pixels come out as exact as
    rounding allows.
    """
    height, width = images.shape[2:]
    across, down = (
        (
            torch.arange(2 * side + 2 * DOWN_MARGIN - 1, device=images.device, dtype=images.dtype)
            - DOWN_MARGIN
        )
        / 2
        - (side - 1) / 2
        for side in (width, height)
    )
    # grid_sample has the centres of the outermost pixels at -1 and 1
    inverse = torch.stack(
        [inverse[:, 0] / ((width - 1) / 2), inverse[:, 1] / ((height - 1) / 2)], dim=1
    )
    # [n, 2 H + margins, 2 W + margins, 2]
    grid = torch.stack(_follow(inverse, across, down), dim=-1)
    block = _block(math.gcd(height, width))
    up, down = _matrices(block, images.dtype, images.device)
    padded = F.pad(images, [UP_MARGIN] * 4, mode="reflect")
    # pixel i becomes pixel 2i; the last lies beyond
    oversampled = _both_ways(padded, up, block)[..., :-1, :-1]
    # pixel 2i + DOWN_MARGIN becomes pixel i
    return _both_ways(Sample.apply(oversampled, grid), down, 2 * block)


def _follow(inverse: Tensor, across: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """x and y [n, h, w] of the places that a grid of columns at `across` [w] and lines at `down`
    [h] comes from.
    """
    across, down = across[None, None, :], down[None, :, None]
    x, y = (
        (inverse[:, row, 0, None, None] * across + inverse[:, row, 2, None, None])
        + inverse[:, row, 1, None, None] * down
        for row in (0, 1)
    )
    return x, y


class Sample(torch.autograd.Function):
    """Bilinear sampling at given places, in reflected coordinates; `grid` as `F.grid_sample` has
    it. With the `shape` of images the transpose: every value is handed back to the pixels it was
    mixed from.

    torch's own cannot be differentiated twice. Sampling is linear in the images: its gradient is
    the transpose, and the gradient of that is sampling again. There is none for the grid.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, grid: Tensor, shape: torch.Size | None = None) -> Tensor:
        """images [n, C, h, w], grid [n, H, W, 2] -> [n, C, H, W]; the transpose the other way
        round.
        """
        ctx.save_for_backward(grid)
        ctx.shape = values.shape if shape is None else None
        if shape is None:
            return F.grid_sample(
                values, grid, mode="bilinear", padding_mode="reflection", align_corners=True
            )
        images = values.new_zeros(1).expand(shape)  # only its shape counts
        # as the operator numbers them; images' gradient, not grid's
        bilinear, reflection, wanted = 0, 2, [True, False]
        return torch.ops.aten.grid_sampler_2d_backward(
            values, images, grid, bilinear, reflection, True, wanted
        )[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grid,) = ctx.saved_tensors
        return Sample.apply(gradients[0], grid, ctx.shape), None, None


def _block(size: int) -> int:
    return next(block for block in range(min(size, BLOCK), 0, -1) if size % block == 0)


def _both_ways(images: Tensor, matrix: Tensor, step: int) -> Tensor:
    """Apply a [outputs, inputs] matrix to pieces of `inputs` pixels that start `step` apart: to
    columns, then rows.
    """
    inputs = matrix.shape[1]
    if images.shape[-2:] == (inputs, inputs):  # one piece; the gradient of unfold is slow
        return matrix @ images @ matrix.T
    columns = images.unfold(-2, inputs, step).mT  # [n, C, pieces, inputs, W]
    rows = (matrix @ columns).flatten(2, 3).unfold(-1, inputs, step)  # [n, C, H, pieces, inputs]
    return (rows @ matrix.T).flatten(-2)


# kept: making them anew in each call would copy from the host, and wait for the device, every step
@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _matrices(block: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """[2 block, block + 2 UP_MARGIN]: zero insertion and twice the filter. [block, 2 block + 2
    DOWN_MARGIN - 1]: the filter at every other pixel.
    """
    up = torch.arange(2 * block)[:, None] - 2 * (torch.arange(block + 2 * UP_MARGIN) - UP_MARGIN)
    down = (
        2 * torch.arange(block)[:, None]
        - torch.arange(2 * block + 2 * DOWN_MARGIN - 1)
        + DOWN_MARGIN
    )
    return 2 * _taps(UP_TAPS, up).to(device, dtype), _taps(DOWN_TAPS, down).to(device, dtype)


def _taps(half: tuple[float, ...], distance: Tensor) -> Tensor:
    """A symmetric filter's taps, given its right half, at distances from its middle; 0 beyond its
    ends.
    """
    return torch.tensor([*half, 0.0], dtype=torch.float64)[distance.abs().clamp(max=len(half))]
