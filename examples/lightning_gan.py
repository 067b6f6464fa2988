"""The loop of docs/library.md as a Lightning module: `python examples/lightning_gan.py photos/ --size 64`."""

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytorch_lightning as lightning
import torch

from duetgan.data import Batch, Dataset, GlobalSampler, InfiniteLoader, open_dataset, to_float
from duetgan.models import stylegan2
from duetgan.training import EMA, OBJECTIVES, half_life_beta, squared_gradient_norm


class GAN(lightning.LightningModule):
    """StyleGAN2 with R1 every `r1_every` steps; `average` is the generator to sample from."""

    automatic_optimization = False  # two optimizers

    def __init__(self, *, gamma: float, r1_every: int = 16, channel_base: int = 4096, **shape: Any) -> None:
        super().__init__()
        self.gamma, self.r1_every, self.loss = gamma, r1_every, OBJECTIVES["nonsaturating"]
        self.g = stylegan2.Generator(stylegan2.GeneratorConfig(channel_base=channel_base), **shape)
        self.d = stylegan2.Discriminator(stylegan2.DiscriminatorConfig(channel_base=channel_base), **shape)
        self.average = EMA(self.g, buffers="copy")

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), lr=0.002, betas=(0.0, 0.99)) for net in (self.g, self.d)]

    def training_step(self, batch: Batch, step: int) -> None:
        optimizers: Any = self.optimizers()
        g_optimizer, d_optimizer = optimizers
        labels, size = batch.labels, len(batch.labels)

        fake = self.g(torch.randn(size, self.g.z_dim, device=self.device), labels)
        g_optimizer.zero_grad()
        self.manual_backward(self.loss.generator(self.d(fake, labels)).mean())
        g_optimizer.step()

        real = to_float(batch.images).requires_grad_(step % self.r1_every == 0)
        with torch.no_grad():
            fake = self.g(torch.randn(size, self.g.z_dim, device=self.device), labels)
        logits = self.d(real, labels)
        total = self.loss.real(logits).mean() + self.loss.fake(self.d(fake, labels)).mean()
        if real.requires_grad:
            total = total + self.r1_every * self.gamma / 2 * squared_gradient_norm(logits, real).mean()
        d_optimizer.zero_grad()
        self.manual_backward(total)
        d_optimizer.step()
        self.average.update(self.g, half_life_beta(size, step * size, half_life_images=10_000))
        self.log("discriminator", total.detach(), prog_bar=True)


class Steps(torch.utils.data.IterableDataset[Batch]):
    """So many batches of the infinite loader, which is a DataLoader of its own: shuffled, seeded, read by threads."""

    def __init__(self, images: Dataset, steps: int, batch_size: int) -> None:
        self.images, self.steps, self.batch_size = images, steps, batch_size

    def __iter__(self) -> Iterator[Batch]:
        sampler = GlobalSampler(len(self.images), batch_size=self.batch_size, seed=0)
        return islice(InfiniteLoader(self.images, sampler, device="cpu"), self.steps)


def train(images: Dataset, steps: int, batch_size: int, **options: Any) -> GAN:
    shape: dict[str, Any] = {
        "resolution": images.resolution,
        "channels": images.meta.channels,
        "classes": len(images.classes),
    }
    gan = GAN(**shape, **options)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, **quiet)
    batches = Steps(images, steps, batch_size)
    trainer.fit(gan, torch.utils.data.DataLoader(batches, batch_size=None, generator=torch.Generator()))
    return gan


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    asked = parser.parse_args()
    images = open_dataset(asked.images, resolution=asked.size)
    gan = train(images, asked.steps, 16, gamma=0.0002 * asked.size**2 / 16)
    torch.save(gan.average.model.state_dict(), "lightning_generator.pt")
