"""Make films in which StyleGAN3's images move and turn."""

import math

import torch
from torch import Tensor

from duetgan.extras.stylegan3.networks import Stylegan3Generator
from duetgan.inference.interpolate import Journey
from duetgan.inference.samples import Sampler
from duetgan.models.gan import NoiseMode
from duetgan.utils.errors import UserError


def transforms(shifts: Tensor, angles: Tensor) -> Tensor:
    """Return the matrices [n, 3, 3] with which `FourierFeatures` shifts and turns the image.

    Args:
        shifts: [n, 2], to the right and down, in widths of the image.
        angles: [n], clockwise, in radians. The image turns about its centre before it is shifted.
    """
    cosine = angles.cos()
    sine = angles.sin()
    # The inverse of the motion maps a point of the image to the point that is shown there.
    result = torch.eye(3).repeat(len(angles), 1, 1)
    result[:, :2, :2] = torch.stack([cosine, sine, -sine, cosine], dim=1).unflatten(1, (2, 2))
    result[:, :2, 2:] = -result[:, :2, :2] @ shifts[:, :, None]
    return result


class Motion(Journey):
    """The frames of a film from sample to sample, in which the image moves and turns.

    After the fraction t of the film, the image is shifted by sin(2 pi t) * `translate` and turned
    by t * `rotate`. Raises UserError if the generator is not StyleGAN3's.
    """

    def __init__(
        self,
        sampler: Sampler,
        keyframes: int,
        frames: int,
        translate: tuple[float, float],  # to the right and down, in widths of the image
        rotate: float,  # degrees, clockwise
    ) -> None:
        if not isinstance(sampler.generator, Stylegan3Generator):
            raise UserError(
                "move needs a generator of StyleGAN3 (architecture stylegan3-t or stylegan3-r); "
                "for other generators use interpolate"
            )
        super().__init__(sampler, "w", keyframes, frames)
        self.input = sampler.generator.input
        self.translate = translate
        self.rotate = math.radians(rotate)

    def _images(self, numbers: range, noise: list[Tensor] | NoiseMode) -> Tensor:
        times = torch.tensor([number / len(self) for number in numbers])
        shifts = torch.sin(2 * math.pi * times)[:, None] * torch.tensor(self.translate)
        previous = self.input.transform
        self.input.transform = torch.nn.Buffer(transforms(shifts, self.rotate * times).to(previous))
        try:
            return super()._images(numbers, noise)
        finally:
            self.input.transform = previous
