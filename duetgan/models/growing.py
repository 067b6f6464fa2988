"""Progressive growing (1710.10196, 1812.04948) of StyleGAN2's networks.

A network grows in stages of rising resolution. At a stage, only the blocks up to its resolution
run, and the weight `alpha` fades in the newest block. Parameters and their names are those of the
full networks; in addition, the discriminator has a from_rgb layer for each smaller resolution.
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
    """Return True if `alpha` is the number 1. Return False for every tensor, without reading it."""
    return not isinstance(alpha, Tensor) and alpha == 1


class GrowingBlock(SynthesisBlock):
    """Synthesis block whose RGB output is multiplied by `alpha`, except in the first block."""

    alpha: Alpha = 1.0

    def add_rgb(self, image: Tensor | None, rgb: Tensor) -> Tensor:
        if image is not None and not is_one(self.alpha):
            rgb = rgb * self.alpha
        return super().add_rgb(image, rgb)


class GrowingGenerator(Generator):
    """StyleGAN2's generator for progressive growing; `enter` selects the stage.

    Until `enter` is called, the full network runs. With alpha 0 the image is that of the previous
    stage, upsampled by `upsample_fir`.
    """

    block_class = GrowingBlock

    def enter(self, side: int, alpha: Alpha) -> None:
        """Select the stage whose images have a shorter side of `side` px, and set its `alpha`.

        Raises ValueError if there is no such stage.
        """
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
    """StyleGAN2's discriminator for progressive growing; the size of the images selects the stage.

    With alpha 1, all blocks of the stage are applied to the images. With alpha 0, the blocks of the
    previous stage are applied to the images at half the size (means of 2x2 pixels, as in a packed
    pyramid). Values in between interpolate the input of the second block.
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
        """Set `alpha`. `side` is not used, because the size of the images selects the stage."""
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
    """Wrapper that makes a growing generator return images of the full resolution.

    Images of the current stage are enlarged by repeating pixels, so that stages can be compared.
    The wrapper shares the parameters of `generator`.
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
