"""The network of airbench94, which reaches 94 % on CIFAR-10 in eight epochs.

Source: Keller Jordan, 2404.00498, in airbench94_muon.py. The first convolution whitens patches of
2x2 px. `whitening` computes its filters from training images before the first step; only the bias
of this convolution is trained. The other convolutions start as identities of their input. The
weights of BatchNorms are not trained. Logits are scaled down.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.models.backbones.base import Backbone

SIDE = 2  # side of a patch in px
EPS = 5e-4  # added to the second moments' eigenvalues; images have a deviation of about 1
WIDTHS = (64, 256, 256)  # channels of the three layers
SCALE = 1 / 9  # factor of the logits, which have no bias


def whitening(images: Iterable[Tensor], eps: float = EPS) -> Tensor:
    """Compute filters, float64 [2 K, C, 2, 2] with K = 4 C, that whiten patches of 2x2 pixels.

    The first K filters are the eigenvectors of the second moments E[x x^T] of the patches x, the
    one with the largest eigenvalue first. Each is divided by sqrt(its eigenvalue + `eps`), so that
    the second moments of the K outputs are the identity, apart from `eps`. The other K filters are
    the negatives of the first K.

    Args:
        images: Batches of training images [n, C, H, W].
    """
    moments = torch.zeros((), dtype=torch.float64)
    count = 0
    for part in images:
        patches = F.unfold(part.double(), SIDE)  # [n, K, patches of an image]
        moments = moments + torch.bmm(patches, patches.mT).sum(0)
        count += len(patches) * patches.shape[2]
    values, vectors = torch.linalg.eigh(moments / count)  # ascending
    filters = (vectors / (values + eps).sqrt()).T.flip(0)
    return torch.cat([filters, -filters]).unflatten(1, (-1, SIDE, SIDE))


def _layer(inputs: int, outputs: int) -> nn.Sequential:
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for number, channels in ((1, inputs), (2, outputs)):
        conv = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        nn.init.dirac_(conv.weight.data[:channels])
        modules[f"conv{number}"] = conv
        if number == 1:
            modules["pool"] = nn.MaxPool2d(2)
        modules[f"norm{number}"] = nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.4)
        modules[f"act{number}"] = nn.GELU()
    return nn.Sequential(modules)


class ScaledPool(nn.Module):
    """Global max pooling of maps [N, C, H, W] to [N, C, 1, 1], times SCALE.

    Adaptive pooling is not used, because its gradient is not deterministic on CUDA.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, x.shape[-2:]) * SCALE


class Airbench(nn.Module):
    """The layers of airbench94's network. `Backbone.features` calls them one after another."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(channels, 2 * channels * SIDE**2, SIDE)
        self.act = nn.GELU()
        widths = [self.whiten.out_channels, *WIDTHS]
        for number, (inputs, outputs) in enumerate(pairwise(widths), 1):
            self.add_module(f"layer{number}", _layer(inputs, outputs))
        self.pool = ScaledPool()  # of 3x3 maps for images of 32 px
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
