"""Progressive growing (1710.10196, 1812.04948): StyleGAN2's networks at a stage of lower resolution.

A stage runs the blocks up to its resolution, and `alpha` fades in the newest of them. Parameters
and their names are those of the full networks; the discriminator has a further from_rgb for each
smaller resolution.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.models.gan import ImageGenerator, run, sizes_up_to
from duetgan.models.layers.fp16 import LayerPrecision
from duetgan.models.stylegan2 import (
    Discriminator,
    DiscriminatorConfig,
    FromRGB,
    Generator,
    SynthesisBlock,
)

# Weight (0 to 1) of the newest block: a number or, for compiled networks, a 0-d tensor.
Alpha = float | Tensor


def is_one(alpha: Alpha) -> bool:
    """Return True if `alpha` is the number 1; False for any tensor, whose value is not read."""
    return not isinstance(alpha, Tensor) and alpha == 1


class GrowingBlock(SynthesisBlock):
    """A block whose contribution to the image is scaled by `alpha`, except in the first block."""

    alpha: Alpha = 1.0

    def add_rgb(self, image: Tensor | None, rgb: Tensor) -> Tensor:
        if image is not None and not is_one(self.alpha):
            rgb = rgb * self.alpha
        return super().add_rgb(image, rgb)


class GrowingGenerator(Generator):
    """StyleGAN2's generator at the stage that `enter` set last; before, the full network.

    With alpha 0 the image is that of the previous stage, upsampled by `upsample_fir`.
    """

    block_class = GrowingBlock

    def enter(self, side: int, alpha: Alpha) -> None:
        """Change to the stage of `side` px (shorter side); raise ValueError if there is none."""
        sizes = sizes_up_to(self.resolution)
        if side not in sizes:
            raise ValueError(
                f"a network of {self.resolution} px has no stage of {side} px; its stages are {sizes}"
            )
        count = sizes.index(side) + 1
        self.num_ws = 2 * count
        for number, block in enumerate(self.blocks, 1):
            assert isinstance(block, GrowingBlock)
            block.alpha = alpha if number == count else 1.0

    def used_blocks(self) -> Sequence[SynthesisBlock]:
        return super().used_blocks()[: self.num_ws // 2]


class GrowingDiscriminator(Discriminator):
    """StyleGAN2's discriminator at the stage of the images' size.

    `alpha` fades in the stage's newest block: with 0 the previous stage is applied to the images'
    2x2 means (as in a packed pyramid), with 1 all of this stage's blocks to the images.
    """

    alpha: Alpha = 1.0

    def __init__(
        self, config: DiscriminatorConfig, *, resolution: int | str, channels: int, classes: int
    ) -> None:
        super().__init__(config, resolution=resolution, channels=channels, classes=classes)
        full = self.spec.side
        _, *sizes = sizes_up_to(resolution)[::-1]
        self.from_rgbs = nn.ModuleDict()
        for size, width in zip(sizes, config.widths(sizes), strict=True):
            precision = LayerPrecision(config, size, full)
            self.from_rgbs[str(size)] = FromRGB(channels, width, precision)

    def enter(self, side: int, alpha: Alpha) -> None:
        """Set alpha of the stage of `side` px."""
        self.alpha = alpha

    def hidden(self, images: Tensor) -> Tensor:
        side = min(map(int, images.shape[2:]))  # tensors while a graph is traced
        sizes = sizes_up_to(self.resolution)[:0:-1]  # The smallest maps have no block.
        if side not in sizes or self.spec.at(side).size != images.shape[2:]:
            raise ValueError(f"images of shape {tuple(images.shape[1:])} are of no stage")
        start = sizes.index(side)
        from_rgb = self.from_rgb if start == 0 else self.from_rgbs[str(side)]
        first, *blocks = self.blocks[start:]
        recompute = self.config.activation_checkpointing
        x = run(lambda images: first(from_rgb(images)), images, recompute=recompute)
        if not is_one(self.alpha):
            previous = self.from_rgbs[str(side // 2)](F.avg_pool2d(images, 2))
            alpha = self.alpha
            if isinstance(alpha, Tensor):
                alpha = alpha.to(previous.dtype)
            x = torch.lerp(previous, x.to(previous.dtype), alpha)
        for block in blocks:
            x = run(block, x, recompute=recompute)
        return self.last_layers(x)


class StageGenerator(ImageGenerator):
    """A growing generator at its stage, with the interface of any other generator.

    Images are enlarged to the full resolution by repeating pixels, to compare stages. The
    parameters are shared with `generator`, not copied.
    """

    def __init__(self, generator: GrowingGenerator) -> None:
        super().__init__()
        self.generator = generator
        self.z_dim = generator.z_dim
        self.set_shape(generator.resolution, generator.channels, generator.classes)
        self.label_sets = generator.label_sets
        self.pixel_format = generator.pixel_format

    def noise_shapes(self) -> list[tuple[int, int, int]]:
        return self.generator.noise_shapes()

    def forward(self, z: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        """Return images; `options` are noise and truncation arguments."""
        images = self.generator(z, labels, **options)
        factor = self.spec.height // images.shape[2]
        return images if factor == 1 else F.interpolate(images, scale_factor=factor)
