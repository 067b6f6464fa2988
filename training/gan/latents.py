"""The GAN's random draws of a step: global batches, keyed by (seed, purpose, step, phase), sliced by the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.gan import StyledGenerator
from utils.seeding import generator as keyed_generator


@dataclass
class Latents:
    """One phase's draws for the global batch of B samples."""

    z: Tensor  # [B, z_dim]
    z_mixed: Tensor | None  # [B, z_dim], the second style
    crossover: Tensor | None  # [B] int64: the first layer that takes the second style; num_ws where nothing is mixed
    labels: Tensor  # [B] int64


class GanDraws:
    """Draws on the device, outside compiled and checkpointed regions; equal for every split over ranks and
    micro-batches.
    """

    def __init__(self, seed: int, device: torch.device, label_shares: Sequence[float]) -> None:
        self.seed, self.device = seed, device
        # labels as frequent as in the data; one class of weight 1 when there are no labels
        self.class_weights = torch.tensor([float(share) for share in label_shares] or [1.0], device=device)

    def _keyed(self, *key: str | int) -> torch.Generator:
        return keyed_generator(self.seed, *key, device=self.device)

    def latents(
        self, step: int, phase: str, batch_size: int, z_dim: int, *, mixing: float = 0.0, num_ws: int = 0
    ) -> Latents:
        """z, labels and (with probability `mixing` a sample) a second z with a uniform crossover layer."""
        keyed, shape = self._keyed("latent", step, phase), (batch_size, z_dim)
        labels = torch.multinomial(self.class_weights, batch_size, replacement=True, generator=keyed)
        z = torch.randn(shape, generator=keyed, device=self.device)
        if mixing == 0:
            return Latents(z, None, None, labels)
        z_mixed = torch.randn(shape, generator=keyed, device=self.device)
        crossover = torch.randint(1, num_ws, [batch_size], generator=keyed, device=self.device)
        mixed = torch.rand([batch_size], generator=keyed, device=self.device) < mixing
        return Latents(z, z_mixed, torch.where(mixed, crossover, num_ws), labels)

    def label_offsets(self, step: int, batch_size: int) -> Tensor:
        """[B] int64 in 1..classes-1: added to the true labels (modulo the classes) they give wrong ones."""
        keyed = self._keyed("latent", step, "mismatch")
        return torch.randint(1, len(self.class_weights), [batch_size], generator=keyed, device=self.device)

    def shares(self, step: int, batch_size: int) -> Tensor:
        """[B] uniform in [0, 1): where images lie between a sample and a real image (1704.00028)."""
        return torch.rand([batch_size], generator=self._keyed("latent", step, "between"), device=self.device)

    def noise(self, step: int, phase: str, batch_size: int, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """One map of N(0, 1) per layer: [B, *shape]."""
        return [
            torch.randn((batch_size, *shape), generator=self._keyed("noise", step, phase, layer), device=self.device)
            for layer, shape in enumerate(shapes)
        ]

    def path_noise(self, step: int, batch_size: int, shape: Sequence[int]) -> Tensor:
        """N(0, 1) [B, *shape] by which path-length regularisation multiplies images."""
        return torch.randn((batch_size, *shape), generator=self._keyed("path", step), device=self.device)


def mix_styles(model: StyledGenerator, latents: Latents, rows: slice, num_ws: int) -> tuple[Tensor, Tensor]:
    """ws [n, num_ws, w_dim] of the samples `rows` with their styles mixed, and the first style's w [n, w_dim]."""
    labels = latents.labels[rows] if model.classes else None
    z = latents.z[rows]
    if latents.z_mixed is None or latents.crossover is None:
        w = model.mapping(z, labels)
        return w[:, None].expand(-1, num_ws, -1), w
    # both styles in one pass: its layers are small and cost by the call
    both = None if labels is None else labels.repeat(2)
    w, other = model.mapping(torch.cat([z, latents.z_mixed[rows]]), both).chunk(2)
    first = torch.arange(num_ws, device=w.device)[None, :, None] < latents.crossover[rows][:, None, None]
    return torch.where(first, w[:, None], other[:, None]), w
