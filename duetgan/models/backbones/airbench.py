"""airbench94 (Keller Jordan, 2404.00498, as in its airbench94_muon.py): 94 % on CIFAR-10 in eight
epochs.

Its first convolution whitens patches of 2x2 px: its filters are made of training images before the
first step (`whitening`) and never train, its bias does. The other convolutions begin as identities
of what comes in, BatchNorms have no weights that train, and logits are scaled down.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.models.backbones.base import Backbone

SIDE = 2  # px of a patch
EPS = 5e-4  # added to the second moments, of images normalised to a deviation of about 1
WIDTHS = (64, 256, 256)  # channels of the three layers
SCALE = 1 / 9  # of the logits, which have no bias


def whitening(images: Iterable[Tensor], eps: float = EPS) -> Tensor:
    """Filters [2 K, C, 2, 2], K = 4 C, for images in parts [n, C, H, W]: of their patches as
    vectors the eigenvectors of the second moments, E[x x^T], each divided by the root of its
    eigenvalue + `eps`, the largest first; then the negatives. So the first K outputs have the
    identity as second moments. In float64.
    """
    moments, count = torch.zeros((), dtype=torch.float64), 0
    for part in images:
        patches = F.unfold(part.double(), SIDE)  # [n, K, patches of an image]
        moments = moments + torch.bmm(patches, patches.mT).sum(0)
        count += len(patches) * patches.shape[2]
    values, vectors = torch.linalg.eigh(moments / count)  # ascending
    filters = (vectors / (values + eps).sqrt()).T.flip(0)
    return torch.cat([filters, -filters]).unflatten(1, (-1, SIDE, SIDE))


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    parts: list[tuple[str, nn.Module]] = []
    for number, channels in ((1, inputs), (2, outputs)):
        conv = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        nn.init.dirac_(conv.weight.data[:channels])
        norm = nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4)
        pool = [("pool", nn.MaxPool2d(2))] if number == 1 else []
        parts += [
            (f"conv{number}", conv),
            *pool,
            (f"norm{number}", norm),
            (f"act{number}", nn.GELU()),
        ]
    return nn.Sequential(OrderedDict(parts))


class ScaledPool(nn.Module):
    """Largest values over the maps, [N, C, 1, 1], times SCALE, which stands for that of the logits.
    On CUDA adaptive pooling has no deterministic gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, x.shape[-2:]) * SCALE


class Airbench(nn.Module):
    """The network's layers, which `Backbone.features` calls in turn."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(channels, 2 * channels * SIDE**2, SIDE)
        self.act = nn.GELU()
        for number, (before, width) in enumerate(pairwise([self.whiten.out_channels, *WIDTHS]), 1):
            self.add_module(f"layer{number}", _layer(before, width))
        self.pool = ScaledPool()  # at 32 px over 3x3
        self.head = nn.Linear(WIDTHS[-1], 2, bias=False)


AIRBENCH = Backbone(
    names=("airbench",),
    network=lambda _, channels: Airbench(channels),
    stems=False,
    stages={"stem": ("whiten", "act")} | {f"layer{n}": (f"layer{n}",) for n in (1, 2, 3)},
    pool=("pool",),
    first="whiten",
    head="head",
    head_bias=False,
    frozen=("whiten.weight", "layer?.norm?.weight"),
    maps="layer3",
    smallest=9,
    first_filters=whitening,
)
