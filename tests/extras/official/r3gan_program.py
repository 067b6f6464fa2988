"""R3GAN's networks as its authors' program builds them: torch modules whose pickles have its names and attributes."""

import math
import pickle

import torch
import torch.nn.functional as F
from torch import nn

from tests.extras.official.layouts import FIR, drawn, programs

WIDTHS = {4: 16, 8: 16, 16: 8}  # whole up to 8 px
GROUPS = {4: 4, 8: 4, 16: 2}
BLOCKS = 2


class Convolution(nn.Module):
    def __init__(self, inputs, outputs, size, groups=1):
        super().__init__()
        self.Layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, groups=groups, bias=False)

    def forward(self, x):
        return self.Layer(x)


class BiasedActivation(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.Bias = nn.Parameter(torch.empty(units))

    def forward(self, x):
        return F.leaky_relu(x + self.Bias.view(1, -1, 1, 1), 0.2)


class ResidualBlock(nn.Module):
    def __init__(self, width, groups):
        super().__init__()
        self.LinearLayer1 = Convolution(width, 2 * width, 1)
        self.LinearLayer2 = Convolution(2 * width, 2 * width, 3, groups)
        self.LinearLayer3 = Convolution(2 * width, width, 1)
        self.NonLinearity1 = BiasedActivation(2 * width)
        self.NonLinearity2 = BiasedActivation(2 * width)

    def forward(self, x):
        y = self.NonLinearity1(self.LinearLayer1(x))
        return x + self.LinearLayer3(self.NonLinearity2(self.LinearLayer2(y)))


class Resampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("Kernel", FIR.clone())


class UpsampleLayer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.Resampler = Resampler()
        if inputs != outputs:
            self.LinearLayer = Convolution(inputs, outputs, 1)

    def forward(self, x):
        x = self.LinearLayer(x) if hasattr(self, "LinearLayer") else x
        n, c, h, w = x.shape
        spread = torch.zeros(n * c, 1, 2 * h, 2 * w, dtype=x.dtype)
        spread[:, :, ::2, ::2] = x.reshape(n * c, 1, h, w)
        return F.conv2d(F.pad(spread, (2, 1, 2, 1)), 4 * self.Resampler.get_buffer("Kernel")[None, None]).view(
            n, c, 2 * h, 2 * w
        )


class DownsampleLayer(UpsampleLayer):
    def forward(self, x):
        n, c, h, w = x.shape
        x = F.conv2d(x.reshape(n * c, 1, h, w), self.Resampler.get_buffer("Kernel")[None, None], stride=2, padding=1)
        x = x.view(n, c, h // 2, w // 2)
        return self.LinearLayer(x) if hasattr(self, "LinearLayer") else x


class GenerativeBasis(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.Basis = nn.Parameter(torch.empty(outputs, 4, 4))
        self.LinearLayer = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x):
        return self.Basis.view(1, -1, 4, 4) * self.LinearLayer(x).view(x.shape[0], -1, 1, 1)


class DiscriminativeBasis(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.Basis = nn.Conv2d(inputs, inputs, 4, groups=inputs, bias=False)
        self.LinearLayer = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x):
        return self.LinearLayer(self.Basis(x).flatten(1))


class Stage(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.Layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.Layers:
            x = layer(x)
        return x


class GeneratorModel(nn.Module):
    def __init__(self, z_dim, classes, embed_dim):
        super().__init__()
        first = GenerativeBasis(z_dim + (embed_dim if classes else 0), WIDTHS[4])
        ways = {8: UpsampleLayer(WIDTHS[4], WIDTHS[8]), 16: UpsampleLayer(WIDTHS[8], WIDTHS[16])}
        layers = {side: [ways.get(side, first), *blocks_of(side)] for side in WIDTHS}
        self.MainLayers = nn.ModuleList([Stage(each) for each in layers.values()])
        self.AggregationLayer = Convolution(WIDTHS[16], 3, 1)
        if classes:
            self.EmbeddingLayer = nn.Linear(classes, embed_dim, bias=False)

    def forward(self, x, y=None):
        x = x if y is None else torch.cat([x, self.EmbeddingLayer(y)], dim=1)
        for layer in self.MainLayers:
            x = layer(x)
        return self.AggregationLayer(x)


class DiscriminatorModel(nn.Module):
    def __init__(self, classes, embed_dim):
        super().__init__()
        last = DiscriminativeBasis(WIDTHS[4], embed_dim if classes else 1)
        ways = {16: DownsampleLayer(WIDTHS[16], WIDTHS[8]), 8: DownsampleLayer(WIDTHS[8], WIDTHS[4]), 4: last}
        self.ExtractionLayer = Convolution(3, WIDTHS[16], 1)
        self.MainLayers = nn.ModuleList([Stage([*blocks_of(side), way]) for side, way in ways.items()])
        if classes:
            self.EmbeddingLayer = nn.Linear(classes, embed_dim, bias=False)

    def forward(self, x, y=None):
        x = self.ExtractionLayer(x)
        for layer in self.MainLayers:
            x = layer(x)
        return x.squeeze(1) if y is None else (x * self.EmbeddingLayer(y)).sum(dim=1)


class Generator(nn.Module):
    def __init__(self, z_dim, classes, embed_dim=5):
        super().__init__()
        self.z_dim, self.c_dim, self.img_resolution = z_dim, classes, 16
        self.Model = GeneratorModel(z_dim, classes, embed_dim)


class Discriminator(nn.Module):
    def __init__(self, classes, embed_dim=5):
        super().__init__()
        self.c_dim, self.img_resolution = classes, 16
        self.Model = DiscriminatorModel(classes, embed_dim)


def blocks_of(side):
    return [ResidualBlock(WIDTHS[side], GROUPS[side]) for _ in range(BLOCKS)]


def build(classes):
    """Random networks (G_ema, D) with weights of about unit variance."""
    made = Generator(6, classes), Discriminator(classes)
    for network in made:
        for name, parameter in network.named_parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 and "Basis" not in name else 1
            parameter.data = drawn(*parameter.shape, key=name) / math.sqrt(fan_in)
    return made


PARTS = [Convolution, BiasedActivation, ResidualBlock, Resampler, UpsampleLayer, DownsampleLayer, GenerativeBasis]
PARTS += [DiscriminativeBasis, Stage, GeneratorModel, DiscriminatorModel]


def write(path, average, discriminator):
    """A .pkl as the authors' training loop writes it."""
    names = {f"R3GAN__Networks__{part.__name__}": part for part in PARTS}
    names |= {f"training__networks__{part.__name__}": part for part in (Generator, Discriminator)}
    with programs(**names), open(path, "wb") as file:
        pickle.dump({"G": average, "D": discriminator, "G_ema": average, "cur_nimg": 10, "G_opt_state": {}}, file)
