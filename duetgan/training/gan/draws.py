"""The random draws of a GAN step: latents, labels, noise and style mixing (docs/randomness.md)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from duetgan.models.gan import StyledGenerator
from duetgan.training.base.graphs import per_step
from duetgan.utils.seeding import generator as keyed_generator


class Latents(NamedTuple):
    """The random numbers from which a global batch of B samples is generated."""

    z: Tensor  # [B, z_dim]
    z_mixed: Tensor | None  # [B, z_dim]: latents of the second style
    # int64 [B]: the first layer that uses the second style; num_ws where styles are not mixed
    crossover: Tensor | None
    # int64 [B]: numbers of classes or label sets; or [B, classes]: conditioning vectors
    labels: Tensor


class GanDraws:
    """The source of the random numbers of a GAN step, always for the whole global batch.

    Each draw is seeded by its own key, so it does not depend on the number of processes or
    micro-batches. Draws are made on the device, outside regions that are compiled or use activation
    checkpointing.
    """

    def __init__(self, seed: int, device: torch.device, label_frequencies: Sequence[float]) -> None:
        self.seed = seed
        self.device = device
        # Without labels there is one class of weight 1.
        self.class_weights = torch.tensor(
            [float(frequency) for frequency in label_frequencies] or [1.0], device=device
        )

    def _keyed(self, *key: str | int) -> torch.Generator:
        return keyed_generator(self.seed, *key, device=self.device)

    @per_step
    def latents(
        self,
        step: int,
        phase: str,
        batch_size: int,
        z_dim: int,
        *,
        mixing: float = 0.0,
        num_ws: int = 0,
    ) -> Latents:
        """Draw the latents z and the labels of a global batch, and second latents for style mixing.

        Labels are as frequent as in training. A sample uses its second z with probability `mixing`;
        the first layer that uses it is uniform in 1..num_ws-1. `phase`, part of the seed key, names
        the use of the samples, such as "generator".
        """
        keyed = self._keyed("latent", step, phase)
        shape = (batch_size, z_dim)
        labels = torch.multinomial(
            self.class_weights, batch_size, replacement=True, generator=keyed
        )
        z = torch.randn(shape, generator=keyed, device=self.device)
        if mixing == 0:
            return Latents(z, None, None, labels)
        z_mixed = torch.randn(shape, generator=keyed, device=self.device)
        crossover = torch.randint(1, num_ws, [batch_size], generator=keyed, device=self.device)
        mixed = torch.rand([batch_size], generator=keyed, device=self.device) < mixing
        return Latents(z, z_mixed, torch.where(mixed, crossover, num_ws), labels)

    @per_step
    def label_offsets(self, step: int, batch_size: int) -> Tensor:
        """Draw offsets, int64 [B] in 1..K-1, that turn the labels of K classes into wrong labels.

        A wrong label is the true label plus its offset, modulo K.
        """
        keyed = self._keyed("latent", step, "mismatch")
        return torch.randint(
            1, len(self.class_weights), [batch_size], generator=keyed, device=self.device
        )

    @per_step
    def interpolation_weights(self, step: int, batch_size: int) -> Tensor:
        """Draw the weights [B] of real images in interpolations with samples, uniform in [0, 1).

        Source: WGAN-GP, 1704.00028.
        """
        return torch.rand(
            [batch_size], generator=self._keyed("latent", step, "between"), device=self.device
        )

    @per_step
    def noise(
        self, step: int, phase: str, batch_size: int, shapes: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Draw noise maps from N(0, 1), one tensor [B, *shape] for each shape in `shapes`.

        `shapes` has one shape for each layer of the generator that adds noise. `phase` is that of
        `latents`.
        """
        return [
            torch.randn(
                (batch_size, *shape),
                generator=self._keyed("noise", step, phase, layer),
                device=self.device,
            )
            for layer, shape in enumerate(shapes)
        ]

    @per_step
    def path_noise(self, step: int, batch_size: int, shape: Sequence[int]) -> Tensor:
        """Draw the N(0, 1) noise images [B, *shape] for path-length regularisation."""
        return torch.randn(
            (batch_size, *shape), generator=self._keyed("path", step), device=self.device
        )


def mix_styles(
    model: StyledGenerator, latents: Latents, rows: slice, labels: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the styles ws [n, num_ws, w_dim] of the samples `rows`, after style mixing.

    Also returns w [n, w_dim], the style of the first z. `labels` are label numbers [n],
    conditioning vectors [n, classes], or None for an unconditional generator.
    """
    z = latents.z[rows]
    if latents.z_mixed is None or latents.crossover is None:
        w = model.mapping(z, labels)
        return w[:, None].expand(-1, model.num_ws, -1), w
    # Both styles go through one pass, since a second call would cost more than twice the rows.
    if labels is not None:
        labels = torch.cat([labels, labels])
    w, w_mixed = model.mapping(torch.cat([z, latents.z_mixed[rows]]), labels).chunk(2)
    is_first_style = (
        torch.arange(model.num_ws, device=w.device)[None, :, None]
        < latents.crossover[rows][:, None, None]
    )
    return torch.where(is_first_style, w[:, None], w_mixed[:, None]), w
