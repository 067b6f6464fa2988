"""Images from a generator: sample i depends on (seed, i), its label and nothing else."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.gan import ImageGenerator, NoiseMode
from utils.seeding import generator as keyed_generator


def to_uint8(images: Tensor) -> Tensor:
    """[-1, 1] floats to uint8, rounded; values outside are clipped."""
    return (images.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)


def draw(
    model: ImageGenerator,
    indices: Sequence[int],
    seed: int,
    stream: tuple[str | int, ...] = ("eval",),
    numpy_seeds: Sequence[int] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """z [N, z_dim] and each layer's noise maps [N, 1, H, W], drawn on the CPU with the key (seed, *stream, index).

    `numpy_seeds`: z is NumPy's RandomState(seed).randn(z_dim) for each of these, as in NVIDIA's generate.py.
    """
    shapes = model.noise_shapes()
    sizes = [model.z_dim, *(h * w for _, h, w in shapes)]
    rows = torch.stack([torch.randn(sum(sizes), generator=keyed_generator(seed, *stream, int(i))) for i in indices])
    z, *maps = rows.split(sizes, dim=1)
    if numpy_seeds is not None:
        z = torch.from_numpy(np.stack([np.random.RandomState(s).randn(model.z_dim) for s in numpy_seeds])).to(z)
    return z, [m.reshape(-1, *shape) for m, shape in zip(maps, shapes, strict=True)]


@torch.no_grad()
def generate(
    model: ImageGenerator,
    *,
    labels: Tensor | None,
    indices: Sequence[int],
    seed: int,
    truncation_psi: float = 1.0,
    truncation_cutoff: int | None = None,
    noise_mode: NoiseMode = "random",
    batch_size: int = 64,
    stream: tuple[str | int, ...] = ("eval",),  # of the draws' keys
    numpy_seeds: Sequence[int] | None = None,  # see `draw`
) -> Tensor:
    """uint8 [N, channels, H, W] on the CPU for labels [N] (None when unconditional) and sample indices (N of them).

    `truncation_psi` draws the styles of the first `truncation_cutoff` layers (None: of all) towards their mean.
    """
    device = next(model.parameters()).device
    drawn = []
    for start in range(0, len(indices), batch_size):
        part = slice(start, start + batch_size)
        z, maps = draw(model, indices[part], seed, stream, None if numpy_seeds is None else numpy_seeds[part])
        batch_labels = None if labels is None else labels[part].to(device)
        noise = [m.to(device) for m in maps] if noise_mode == "random" else noise_mode
        options = {"truncation_psi": truncation_psi, "truncation_cutoff": truncation_cutoff}
        drawn.append(to_uint8(model(z.to(device), batch_labels, noise=noise, **options)).cpu())
    return torch.cat(drawn)
