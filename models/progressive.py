"""A growing generator as it is at one stage, to sample from and to evaluate like any other."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from models.gan import Alpha, ImageGenerator


class StageGenerator(ImageGenerator):
    """`generator` at a stage of progressive growing: `forward` gives images [N, channels, resolution, resolution].

    The parameters are the generator's own, not a copy. With `shown` its pixels are repeated up to that side, so that
    its images compare with those of other stages. Raises ValueError for a resolution that is no stage of it.
    """

    def __init__(
        self,
        generator: Any,  # an ImageGenerator that can grow
        resolution: int,
        alpha: Alpha = 1.0,
        *,
        shown: int | None = None,  # px of the images that forward gives; None: the stage's
    ) -> None:
        super().__init__()
        self.generator = generator
        self.z_dim, self.classes, self.channels = generator.z_dim, generator.classes, generator.channels
        self.stage, self.alpha = resolution, alpha
        self.resolution = shown or resolution
        self.num_ws = generator.num_ws_at(resolution)

    def noise_shapes(self, resolution: int | None = None) -> list[tuple[int, int, int]]:
        """(1, H, W) of each noise map of the stage."""
        return self.generator.noise_shapes(resolution or self.stage)

    def forward(self, z: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        """`options`: noise and truncation, as the generator has them."""
        images = self.generator(z, labels, resolution=self.stage, alpha=self.alpha, **options)
        factor = self.resolution // self.stage
        return images if factor == 1 else F.interpolate(images, scale_factor=factor)
