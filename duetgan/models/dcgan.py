"""DCGAN (Radford et al., 1511.06434) in the form of SNGAN (Miyato et al., 1802.05957, table 3).

The discriminator's weights have a fixed spectral norm. No layer uses statistics of the batch.
Several ranks and micro-batches therefore give the same result as one process. Two details differ
from the papers. Instead of BatchNorm, the generator scales every pixel's channels to unit mean
square (1710.10196, section 4.2). The spectral norms are updated after each update of the
discriminator, not in its forward passes.
"""

import math
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.models.gan import ImageDiscriminator, PlainGenerator, sizes_up_to
from duetgan.models.layers import normalize_second_moment
from duetgan.utils.config.model import Config, PositiveInt

SLOPE = 0.1  # of the discriminator's leaky ReLU
# Gain of the layers before a leaky ReLU. With the paper's gain of 1 the logits of a network of few
# layers start near 0 and learn slowly.
GAIN = math.sqrt(2)
# Steps of the power method for a new layer; each update of the weights adds one.
FIRST_STEPS = 15

_ADAM = {"lr": 2e-4, "betas": [0.5, 0.999]}
RECIPE = {  # defaults of the training config
    "loss": {"objective": "hinge", "r1_gamma": 0.0, "style_mixing": 0.0},
    "generator_optimizer": _ADAM,
    "discriminator_optimizer": _ADAM,
}


class DcganConfig(Config):
    """Widths of a DCGAN network."""

    group: ClassVar[int] = 1  # no layer uses statistics of the batch

    width: PositiveInt = 64  # channels at full resolution; each halving of the size doubles them
    width_max: PositiveInt = 512  # maximum number of channels

    def widths(self, resolution: int | str) -> list[int]:
        """Return the number of channels at each size, from the smallest maps up to `resolution`.

        Raises UserError for a resolution that `sizes_up_to` refuses.
        """
        sizes = sizes_up_to(resolution)
        return [min(self.width * sizes[-1] // size, self.width_max) for size in sizes]


class DcganGeneratorConfig(DcganConfig):
    """Widths and latent size of DCGAN's generator."""

    z_dim: PositiveInt = 128  # dimensions of the latent z


class DcganGenerator(PlainGenerator):
    """DCGAN's generator: a linear layer, transposed 4x4 convolutions that double the side, tanh.

    A conditional generator appends an embedding of the label to z; the embedding has the size and
    the variance of z. The first and the last layer run without autocast.
    """

    title = "DCGAN"

    def __init__(
        self, config: DcganGeneratorConfig, *, resolution: int | str, channels: int, classes: int
    ) -> None:
        super().__init__()
        self.config = config
        self.set_shape(resolution, channels, classes)
        self.z_dim = config.z_dim
        widths = config.widths(resolution)
        self.embed = nn.Linear(classes, config.z_dim, bias=False) if classes else None
        if self.embed is not None:
            nn.init.normal_(self.embed.weight)
        self.smallest = self.spec.at(sizes_up_to(resolution)[0]).size
        self.linear = nn.Linear(
            config.z_dim * (2 if classes else 1), math.prod(self.smallest) * widths[0]
        )
        self.blocks = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 4, stride=2, padding=1) for a, b in pairwise(widths)
        )
        self.to_rgb = nn.Conv2d(widths[-1], channels, 3, padding=1)

    def images(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, *self.smallest))
        for block in self.blocks:
            x = block(F.relu(normalize_second_moment(x)))
        with torch.autocast(x.device.type, enabled=False):
            x = F.relu(normalize_second_moment(x.to(self.to_rgb.weight.dtype)))
            return self.to_rgb(x).tanh()


class Spectral(nn.Module):
    """Layer with spectral normalisation (1802.05957, algorithm 1).

    The weight W is divided by its spectral norm u^T W v and multiplied by `gain`. The layer is a
    convolution with kernels of `size` x `size`, or fully connected if `size` is None. `follow`
    updates the singular vectors u and v by a step of the power method. Forward passes do not change
    u and v, so that all passes between two updates use the same network. Gradients treat u and v as
    constants.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int | None = None,
        *,
        stride: int = 1,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        kernel = () if size is None else (size, size)
        self.stride = stride
        self.padding = (size or 1) // 2 - (stride - 1)
        self.gain = gain
        self.weight = nn.Parameter(torch.empty(outputs, inputs, *kernel))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.orthogonal_(self.weight)
        self.u = nn.Buffer(torch.randn(outputs))
        self.v = nn.Buffer(torch.empty(self.weight[0].numel()))
        for _ in range(FIRST_STEPS):
            self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Update u and v by one step of the power method."""
        matrix = self.weight.flatten(1)
        self.v.copy_(F.normalize(self.u @ matrix, dim=0))
        self.u.copy_(F.normalize(matrix @ self.v, dim=0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight = self.weight * (self.gain / (self.u @ self.weight.flatten(1) @ self.v))
        if weight.ndim == 2:
            return F.linear(x, weight, self.bias)
        return F.conv2d(x, weight, self.bias, stride=self.stride, padding=self.padding)


class DcganDiscriminator(ImageDiscriminator):
    """DCGAN's discriminator: convolutions down to the smallest maps, then a linear output.

    Each size but the smallest has a 3x3 convolution and a 4x4 convolution with stride 2; the
    smallest has one 3x3 convolution. A conditional discriminator's logit is the first output plus
    the inner product of the other outputs and the label's embedding (1802.05637).
    """

    def __init__(
        self, config: DcganConfig, *, resolution: int | str, channels: int, classes: int
    ) -> None:
        super().__init__()
        self.config = config
        self.set_shape(resolution, channels, classes)
        *widths, last = config.widths(resolution)[::-1]
        layers: list[nn.Module] = []
        for inputs, width in pairwise([channels, *widths]):
            layers += [Spectral(inputs, width, 3, gain=GAIN), nn.LeakyReLU(SLOPE)]
            layers += [Spectral(width, width, 4, stride=2, gain=GAIN), nn.LeakyReLU(SLOPE)]
        self.layers = nn.Sequential(
            *layers, Spectral(widths[-1], last, 3, gain=GAIN), nn.LeakyReLU(SLOPE)
        )
        self.trunk_width = last
        smallest = self.spec.at(sizes_up_to(resolution)[0])
        self.output = Spectral(smallest.height * smallest.width * last, last + 1 if classes else 1)
        self.embed = Spectral(classes, last) if classes else None

    def trunk(self) -> dict[str, nn.Module]:
        # each convolution with its leaky ReLU
        pairs = [self.layers[start : start + 2] for start in range(0, len(self.layers), 2)]
        return {f"stage{n}" if n else "stem": pair for n, pair in enumerate(pairs)}

    def hidden(self, images: Tensor) -> Tensor:
        """Return the last hidden activations [N, F h w] in the parameters' precision.

        F, h and w are the channels, height and width of the smallest maps.
        """
        self.check_shape(images)
        return self.layers(images).flatten(1).to(self.output.bias.dtype)

    def project(self, features: Tensor, labels: Tensor | None) -> Tensor:
        if self.embed is None:
            return super().project(features, labels)
        return features[:, 0] + super().project(features[:, 1:], labels)

    def after_update(self) -> None:
        for layer in self.modules():
            if isinstance(layer, Spectral):
                layer.follow()
