"""What both halves of a GAN's step share: networks, draws, augmentation, and this process's part of
the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.data.augment.transforms import draw_and_apply
from duetgan.data.reading.loader import Batch
from duetgan.models.gan import Alpha, StyledGenerator, asked, label_loss, told
from duetgan.models.layers import upsample_fir
from duetgan.training.base.compiled import Compiled
from duetgan.training.base.phases import phase
from duetgan.training.gan.ada import Ada
from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.stages import Stage
from duetgan.training.optim.updater import Precision
from duetgan.utils.distributed import collectives
from duetgan.utils.seeding import generator as keyed_generator


@dataclass
class Latents:
    """One phase's draws for the global batch of B samples."""

    z: Tensor  # [B, z_dim]
    z_mixed: Tensor | None  # [B, z_dim], the second style
    # [B] int64: the first layer that takes the second style; num_ws where nothing is mixed
    crossover: Tensor | None
    labels: Tensor  # [B] int64: of classes or of sets of them; then for the networks [B, classes]


class GanDraws:
    """Draws on the device, outside compiled and checkpointed regions; equal for every split over
    ranks and passes.
    """

    def __init__(self, seed: int, device: torch.device, label_shares: Sequence[float]) -> None:
        self.seed, self.device = seed, device
        # labels as frequent as in the data; one class of weight 1 when there are no labels
        self.class_weights = torch.tensor(
            [float(share) for share in label_shares] or [1.0], device=device
        )

    def _keyed(self, *key: str | int) -> torch.Generator:
        return keyed_generator(self.seed, *key, device=self.device)

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
        """z, labels and (with probability `mixing` a sample) a second z with a uniform crossover
        layer.
        """
        keyed, shape = self._keyed("latent", step, phase), (batch_size, z_dim)
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

    def label_offsets(self, step: int, batch_size: int) -> Tensor:
        """[B] int64 in 1..labels-1: added to the true labels (modulo the labels) they give wrong
        ones.
        """
        keyed = self._keyed("latent", step, "mismatch")
        return torch.randint(
            1, len(self.class_weights), [batch_size], generator=keyed, device=self.device
        )

    def shares(self, step: int, batch_size: int) -> Tensor:
        """[B] uniform in [0, 1): where images lie between a sample and a real image (1704.00028)."""
        return torch.rand(
            [batch_size], generator=self._keyed("latent", step, "between"), device=self.device
        )

    def noise(
        self, step: int, phase: str, batch_size: int, shapes: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """One map of N(0, 1) per layer: [B, *shape]."""
        return [
            torch.randn(
                (batch_size, *shape),
                generator=self._keyed("noise", step, phase, layer),
                device=self.device,
            )
            for layer, shape in enumerate(shapes)
        ]

    def path_noise(self, step: int, batch_size: int, shape: Sequence[int]) -> Tensor:
        """N(0, 1) [B, *shape] by which path-length regularisation multiplies images."""
        return torch.randn(
            (batch_size, *shape), generator=self._keyed("path", step), device=self.device
        )


def mix_styles(
    model: StyledGenerator, latents: Latents, rows: slice, num_ws: int
) -> tuple[Tensor, Tensor]:
    """ws [n, num_ws, w_dim] of the samples `rows` with their styles mixed, and the first style's w
    [n, w_dim].
    """
    labels = latents.labels[rows] if model.classes else None
    z = latents.z[rows]
    if latents.z_mixed is None or latents.crossover is None:
        w = model.mapping(z, labels)
        return w[:, None].expand(-1, num_ws, -1), w
    # both styles in one pass: its layers are small and cost by the call
    both = None if labels is None else torch.cat([labels, labels])
    w, other = model.mapping(torch.cat([z, latents.z_mixed[rows]]), both).chunk(2)
    first = (
        torch.arange(num_ws, device=w.device)[None, :, None]
        < latents.crossover[rows][:, None, None]
    )
    return torch.where(first, w[:, None], other[:, None]), w


class StepShare(NamedTuple):
    """A step and the part of its global batch that this rank does, in micro-batches. Rows are of
    the global batch.
    """

    step: int
    images_seen: int  # before this step
    stage: Stage
    batch_size: int  # of all ranks
    size: int  # samples of this rank
    micro: int  # samples a forward pass
    first: int  # this rank's first row
    metrics: dict[str, Tensor]  # what the step reports: 0-d, adding up over the ranks

    def micro_batches(self) -> list[slice]:
        stop = self.first + self.size
        return [
            slice(start, min(start + self.micro, stop))
            for start in range(self.first, stop, self.micro)
        ]

    def is_last(self, rows: slice) -> bool:
        return rows.stop == self.first + self.size

    def half(self) -> "StepShare":
        """The same step over half the batch: every rank's half share, in micro-batches that are no
        larger.
        """
        size = self.size // 2
        first, micro = collectives.rank() * size, min(self.micro, size)
        return self._replace(batch_size=self.batch_size // 2, size=size, micro=micro, first=first)

    def add(self, name: str, value: Tensor) -> None:
        """Add a micro-batch's share to a metric."""
        self.metrics[name] = (
            self.metrics[name] + value.detach() if name in self.metrics else value.detach()
        )


class Images(NamedTuple):
    """A micro-batch for the discriminator, before adaptive augmentation."""

    images: Tensor  # [n, C, H, W], floats about [-1, 1]
    labels: Tensor  # int64 [n]


class DiscriminatorOutput(NamedTuple):
    """What the discriminator makes of a micro-batch."""

    name: str  # of the images: that of their draws
    images: Tensor  # [n, C, H, W] before adaptive augmentation
    labels: Tensor  # int64 [n]
    hidden: Tensor  # [n, H], the last activations
    features: Tensor  # [n, F], which the label's embedding is multiplied by
    logits: Tensor  # [n]


@dataclass
class Context:
    """The networks in training and what both halves of a step do with them."""

    config: GanConfig
    device: torch.device
    generator: Any  # a models.gan.ImageGenerator
    discriminator: Any  # a models.gan.ImageDiscriminator
    precision: Precision
    draws: GanDraws
    ada: Ada
    schedule_images: int  # over which scheduled settings reach their ends
    # float [labels, classes]: what each label stands for, of several an image
    sets: Tensor | None = None

    def __post_init__(self) -> None:
        how: Any = {"setting": self.config.compile, "device": self.device}
        self.synthesis = self.generator.synthesis if self.generator.has_styles else self.generator
        self._compiled_synthesis = Compiled(self.synthesis, "the generator", **how)
        self._compiled_hidden = Compiled(self.discriminator.hidden, "the discriminator", **how)

    def reals(self, batch: Batch, share: StepShare, name: str | None = None) -> list[Images]:
        """This rank's real images in micro-batches, as the data set's own augmentation leaves them."""
        config, spec, micro_batches = self.config, self.generator.spec, []
        for rows in share.micro_batches():
            here = slice(rows.start - share.first, rows.stop - share.first)
            draw: Any = {
                "seed": config.seed,
                "step": share.step,
                "start": rows.start,
                "phase": name,
            }
            images = (
                spec.to_float(batch.images[here], config.channels_last)
                if spec.deep
                else batch.images[here]
            )
            images = draw_and_apply(images, config.augment, global_batch=share.batch_size, **draw)
            # a quarter of the memory
            images = images if spec.deep else spec.to_float(images, config.channels_last)
            # the loader is where the stages are
            assert min(images.shape[2:]) == share.stage.resolution
            # fading in, as samples do (1710.10196, appendix A.1)
            if (alpha := share.stage.alpha) < 1:
                images = upsample_fir(F.avg_pool2d(images, 2)).lerp(images, alpha)
            micro_batches.append(Images(images, batch.labels[here]))
        return micro_batches

    def latents(
        self, share: StepShare, name: str, partners: Sequence[Images] = ()
    ) -> tuple[Latents, list[Tensor]]:
        """The draws from which samples are made, of the global batch: latents and noise maps. This
        rank's samples have the labels of their `partners`, where these are given.
        """
        generator, side, mixed = self.generator, share.stage.resolution, {}
        if generator.has_styles:
            mixed = {"mixing": self.config.loss.style_mixing, "num_ws": generator.num_ws_at(side)}
        key = (share.step, name, share.batch_size)
        latents = self.draws.latents(*key, generator.z_dim, **mixed)
        if partners:
            latents.labels[share.first : share.first + share.size] = torch.cat(
                [images.labels for images in partners]
            )
        return latents, self.draws.noise(*key, generator.noise_shapes(side))

    def _alpha(self, stage: Stage, run: Any) -> Alpha:
        """The stage's alpha, for `run`: in a compiled network a number would need a graph for every
        step of a fade.
        """
        fading = stage.alpha < 1 and isinstance(run, Compiled) and run.on
        return torch.full((), stage.alpha, device=self.device) if fading else stage.alpha

    def sample(
        self,
        latents: Latents,
        noise: list[Tensor],
        rows: slice,
        stage: Stage,
        *,
        compiled: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Samples [n, C, H, W] of the rows of a global batch, and with styles their ws and the
        first style's w.

        `compiled`: through the compiled network, where there is one: for a single backward pass.
        """
        generator, maps = self.generator, [layer[rows] for layer in noise]
        run = self._compiled_synthesis if compiled else self.synthesis
        grown = (
            {"resolution": stage.resolution, "alpha": self._alpha(stage, run)}
            if generator.can_grow
            else {}
        )
        latents = replace(latents, labels=asked(latents.labels, self.sets))
        if not generator.has_styles:
            named = latents.labels[rows] if generator.classes else None
            return run(latents.z[rows], named, noise=maps, **grown), None, None
        ws, w = mix_styles(generator, latents, rows, generator.num_ws_at(stage.resolution))
        return run(ws, maps, **grown), ws, w

    def discriminate(
        self, batch: Images, share: StepShare, rows: slice, name: str, *, compiled: bool = False
    ) -> DiscriminatorOutput:
        """What the discriminator makes of a micro-batch after adaptive augmentation;
        differentiable. `name` is that of the draws; `compiled` as in `sample`.
        """
        images, run = batch.images, self._compiled_hidden if compiled else self.discriminator.hidden
        if self.ada.active:
            with phase("augment"):
                draws = self.ada.draw(share.step, name, images.shape[2:], share.batch_size)
                images = self.ada.apply(images, draws, rows)
        with self.precision.autocast():
            hidden = (
                run(images, alpha=self._alpha(share.stage, run))
                if self.generator.can_grow
                else run(images)
            )
        features = self.discriminator.output(hidden)
        logits = self.discriminator.project(features, asked(batch.labels, self.sets))
        return DiscriminatorOutput(name, *batch, hidden, features, logits)

    def auxiliary_loss(self, output: DiscriminatorOutput, share: StepShare) -> Tensor | float:
        """The auxiliary head's loss on a micro-batch, weighted, as its share of the mean; 0 without
        a head.
        """
        if not self.config.loss.auxiliary_weight:
            return 0.0
        class_logits = self.discriminator.auxiliary(output.hidden)
        loss = label_loss(class_logits, output.labels, self.sets) / share.batch_size
        if output.name == "real":
            share.add("loss/auxiliary_real", loss)
            share.add(
                "accuracy/auxiliary",
                told(class_logits, output.labels, self.sets) / share.batch_size,
            )
        elif output.name == "generator":
            share.add("loss/auxiliary", loss)
        return loss * self.config.loss.auxiliary_weight
