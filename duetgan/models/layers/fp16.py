"""Precision of layers under fp16 autocast (2006.06676, appendix on mixed precision).

As in NVIDIA's networks, styles and weights are divided by their largest magnitude, and the outputs
of convolutions are clamped. Two tensors are not clamped: the sum of ToRGB's outputs over the
resolutions, and the output of the discriminator's skip connection.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from duetgan.models.layers.convolution import compute_dtype
from duetgan.utils.config.model import Config, NonNegativeInt, PositiveFloat

Output = TypeVar("Output")


class Fp16Config(Config):
    """Options of precision fp16."""

    # precision fp16: number of the largest resolutions (8 px and up) that run in fp16; the others
    # run in fp32
    fp16_resolutions: NonNegativeInt = 4
    # precision fp16: convolutions' outputs are clamped to +- this value, times sqrt(0.5) on
    # residual branches; null: no clamp
    conv_clamp: PositiveFloat | None = 256.0
    # apply conv_clamp in every precision, for converted networks that were trained with it
    clamp_always: bool = False


class LayerPrecision:
    """Precision of the layers of `size` px in a network of `resolution` px under fp16 autocast.

    The `fp16_resolutions` largest resolutions run in fp16 if they have at least 8 px; the others
    run in fp32.
    """

    def __init__(self, config: Fp16Config, size: int, resolution: int) -> None:
        self.config = config
        self.is_half = size >= max(8, 2 * resolution >> config.fp16_resolutions)

    def clamp(self, x: Tensor) -> float | None:
        """Return the limit to which outputs of convolutions of `x` are clamped; None for no clamp.

        Resolutions in fp32 are clamped, too, because their output enters the first fp16 resolution.
        """
        config = self.config
        uses_fp16 = config.fp16_resolutions > 0 and compute_dtype(x) == torch.float16
        return config.conv_clamp if config.clamp_always or uses_fp16 else None

    def dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which convolutions of `x` run at this resolution."""
        dtype = compute_dtype(x)
        return x.dtype if dtype == torch.float16 and not self.is_half else dtype

    def call(self, layers: Callable[..., Output], x: Tensor, *arguments: object) -> Output:
        """Return `layers(x, *arguments, clamp)`, run in the precision of this resolution."""
        clamp = self.clamp(x)
        if compute_dtype(x) != torch.float16 or self.is_half:
            return layers(x, *arguments, clamp)
        with torch.autocast(x.device.type, enabled=False):
            if x.dtype == torch.float16:
                x = x.float()
            return layers(x, *arguments, clamp)


def normalised_for_fp16(
    style: Tensor, weight: Tensor, scale: Tensor | None, weight_gain: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide each sample's style [N, I] and each filter by its norm, the largest magnitude in it.

    With inputs within +-256 no product exceeds fp16's range. The scaled output does not depend on
    the norms, so gradients treat them as constants.

    Returns:
        The divided style [N, I]; the divided weight [O, I, k, k], times `weight_gain`; and the
        factor [N, O] of the convolution's output. The factor is the product of both norms, and if
        `scale` is given it is also multiplied by scale / weight_gain.
    """
    style_norm = style.detach().abs().amax(dim=1, keepdim=True).clamp_min(1e-8)  # [N, 1]
    weight_norm = weight.detach().abs().amax(dim=(1, 2, 3)).clamp_min(1e-8)  # [O]
    weight = weight * (weight_gain / weight_norm)[:, None, None, None]
    norms = style_norm * weight_norm
    if scale is not None:
        # The scale must be finite, since 0 * inf is NaN. It overflows where all large styles of a
        # sample meet small weights.
        norms = (scale * norms / weight_gain).clamp(max=torch.finfo(torch.float16).max)
    return style / style_norm, weight, norms
