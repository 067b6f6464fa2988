"""The parts that both halves of a GAN step share: networks, random draws and augmentation.

`StepSlice` is the part of the global batch that this process computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from duetgan.data.augment.transforms import draw_and_apply
from duetgan.data.reading.loader import Batch
from duetgan.models.gan import (
    Alpha,
    ImageDiscriminator,
    ImageGenerator,
    StyledGenerator,
    conditioning_vectors,
    count_correct,
    label_loss,
)
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
    """The random draws for the samples of one phase, for a global batch of B samples."""

    z: Tensor  # [B, z_dim]
    z_mixed: Tensor | None  # [B, z_dim]: latents of the second style
    # int64 [B]: the first layer that uses the second style; num_ws where styles are not mixed
    crossover: Tensor | None
    # int64 [B]: numbers of classes or label sets; or [B, classes]: conditioning vectors
    labels: Tensor


class GanDraws:
    """Random draws of a GAN step, always for the whole global batch.

    Each draw is a function of its seed key, so that it does not depend on the number of processes
    or micro-batches. Draws are made on the device, outside compiled and checkpointed regions.
    """

    def __init__(self, seed: int, device: torch.device, label_frequencies: Sequence[float]) -> None:
        self.seed, self.device = seed, device
        # Without labels there is one class of weight 1.
        self.class_weights = torch.tensor(
            [float(frequency) for frequency in label_frequencies] or [1.0], device=device
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
        """Draw z and labels, and with probability `mixing` per sample a second z.

        Labels are as frequent as in the training data. The first layer that uses the second z is
        uniform in 1..num_ws-1.
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
        """Draw int64 [B] in 1..K-1 for K labels.

        Added to true labels modulo K, these offsets give wrong labels.
        """
        keyed = self._keyed("latent", step, "mismatch")
        return torch.randint(
            1, len(self.class_weights), [batch_size], generator=keyed, device=self.device
        )

    def interpolation_weights(self, step: int, batch_size: int) -> Tensor:
        """Draw [B] uniform in [0, 1), to interpolate between samples and real images (1704.00028).

        Each is the weight of the real image.
        """
        return torch.rand(
            [batch_size], generator=self._keyed("latent", step, "between"), device=self.device
        )

    def noise(
        self, step: int, phase: str, batch_size: int, shapes: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Draw one noise map [B, *shape] from N(0, 1) for each layer's shape in `shapes`."""
        return [
            torch.randn(
                (batch_size, *shape),
                generator=self._keyed("noise", step, phase, layer),
                device=self.device,
            )
            for layer, shape in enumerate(shapes)
        ]

    def path_noise(self, step: int, batch_size: int, shape: Sequence[int]) -> Tensor:
        """Draw the N(0, 1) noise images [B, *shape] for path-length regularisation."""
        return torch.randn(
            (batch_size, *shape), generator=self._keyed("path", step), device=self.device
        )


def mix_styles(
    model: StyledGenerator, latents: Latents, rows: slice, num_ws: int
) -> tuple[Tensor, Tensor]:
    """Return the styles ws [n, num_ws, w_dim] of the samples `rows`, after style mixing.

    Also returns the w [n, w_dim] of the first style.
    """
    labels = latents.labels[rows] if model.classes else None
    z = latents.z[rows]
    if latents.z_mixed is None or latents.crossover is None:
        w = model.mapping(z, labels)
        return w[:, None].expand(-1, num_ws, -1), w
    # Both styles go through one pass, since a second call would cost more than twice the rows.
    if labels is not None:
        labels = torch.cat([labels, labels])
    w, w_mixed = model.mapping(torch.cat([z, latents.z_mixed[rows]]), labels).chunk(2)
    is_first_style = (
        torch.arange(num_ws, device=w.device)[None, :, None]
        < latents.crossover[rows][:, None, None]
    )
    return torch.where(is_first_style, w[:, None], w_mixed[:, None]), w


class StepSlice(NamedTuple):
    """A step, and the slice of its global batch that this rank computes, in micro-batches.

    `first` and the slices from `micro_batches` are row numbers of the global batch.
    """

    step: int
    images_seen: int  # training images before this step
    stage: Stage
    batch_size: int  # samples of all ranks
    size: int  # samples of this rank
    micro: int  # samples per forward pass
    first: int  # this rank's first row
    metrics: dict[str, Tensor]  # 0-d values that the step reports; they add up over the ranks

    def micro_batches(self) -> list[slice]:
        stop = self.first + self.size
        return [
            slice(start, min(start + self.micro, stop))
            for start in range(self.first, stop, self.micro)
        ]

    def is_last(self, rows: slice) -> bool:
        return rows.stop == self.first + self.size

    def half(self) -> "StepSlice":
        """Return the step with half the global batch, on every rank; micro-batches do not grow."""
        size = self.size // 2
        first, micro = collectives.rank() * size, min(self.micro, size)
        return self._replace(batch_size=self.batch_size // 2, size=size, micro=micro, first=first)

    def add(self, name: str, value: Tensor) -> None:
        """Add a micro-batch's contribution, 0-d, to the metric `name`."""
        value = value.detach()
        self.metrics[name] = self.metrics[name] + value if name in self.metrics else value


class Images(NamedTuple):
    """A micro-batch for the discriminator, before adaptive augmentation."""

    images: Tensor  # float [n, C, H, W], mostly in [-1, 1]
    labels: Tensor  # int64 [n]


class DiscriminatorOutput(NamedTuple):
    """Inputs and outputs of the discriminator for one micro-batch."""

    name: str  # kind of the images, part of the seed keys of their draws: "real", "fake", ...
    images: Tensor  # [n, C, H, W] before adaptive augmentation
    labels: Tensor  # int64 [n]
    hidden: Tensor  # [n, H]: the last activations
    features: Tensor  # [n, F]: multiplied by the label's embedding for the logits
    logits: Tensor  # [n]


@dataclass
class Context:
    """The networks in training, and the operations that both halves of a GAN step need."""

    config: GanConfig
    device: torch.device
    generator: ImageGenerator
    discriminator: ImageDiscriminator
    precision: Precision
    draws: GanDraws
    ada: Ada
    schedule_images: int  # images after which scheduled settings reach their final values
    # float [labels, classes]: classes of each label set; None unless images have several classes
    label_sets: Tensor | None = None

    def __post_init__(self) -> None:
        setting, device = self.config.compile, self.device
        self.styled = self.generator if isinstance(self.generator, StyledGenerator) else None
        self.synthesis = self.styled.synthesis if self.styled else self.generator
        self._compiled_synthesis = Compiled(
            self.synthesis, "the generator", setting=setting, device=device
        )
        self._compiled_hidden = Compiled(
            self.discriminator.hidden, "the discriminator", setting=setting, device=device
        )

    def reals(self, batch: Batch, step_slice: StepSlice, phase: str | None = None) -> list[Images]:
        """Return this rank's real images in micro-batches, after the augmentation of the data set.

        `phase` is part of the seed key of the augmentation: a step that reads two batches needs
        two.
        """
        config, spec = self.config, self.generator.spec
        micro_batches: list[Images] = []
        for rows in step_slice.micro_batches():
            local_rows = slice(rows.start - step_slice.first, rows.stop - step_slice.first)
            images = batch.images[local_rows]
            # Images of 8 bits are augmented as uint8, in a quarter of the memory.
            if spec.deep:
                images = spec.to_float(images, config.channels_last)
            images = draw_and_apply(
                images,
                config.augment,
                seed=config.seed,
                step=step_slice.step,
                start=rows.start,
                global_batch=step_slice.batch_size,
                phase=phase,
            )
            if not spec.deep:
                images = spec.to_float(images, config.channels_last)
            assert min(images.shape[2:]) == step_slice.stage.resolution
            # Real images fade in like the samples (1710.10196, appendix A.1).
            alpha = step_slice.stage.alpha
            if alpha < 1:
                images = upsample_fir(F.avg_pool2d(images, 2)).lerp(images, alpha)
            micro_batches.append(Images(images, batch.labels[local_rows]))
        return micro_batches

    def latents(
        self, step_slice: StepSlice, name: str, partners: Sequence[Images] = ()
    ) -> tuple[Latents, list[Tensor]]:
        """Draw the latents and noise maps of the global batch for the phase `name`.

        If `partners` are given, this rank's samples get the labels of these real images.
        """
        generator, side = self.generator, step_slice.stage.resolution
        key = (step_slice.step, name, step_slice.batch_size)
        mixing, num_ws = 0.0, 0
        if self.styled:
            mixing, num_ws = self.config.loss.style_mixing, self.styled.num_ws_at(side)
        latents = self.draws.latents(*key, generator.z_dim, mixing=mixing, num_ws=num_ws)
        if partners:
            latents.labels[step_slice.first : step_slice.first + step_slice.size] = torch.cat(
                [images.labels for images in partners]
            )
        return latents, self.draws.noise(*key, generator.noise_shapes(side))

    def _alpha(self, stage: Stage, network: Callable[..., Tensor]) -> Alpha:
        """Return the stage's alpha for `network`.

        It is a tensor for a compiled network while the stage fades in, because every other number
        would compile another graph.
        """
        if stage.alpha < 1 and isinstance(network, Compiled) and network.on:
            return torch.full((), stage.alpha, device=self.device)
        return stage.alpha

    def sample(
        self,
        latents: Latents,
        noise: list[Tensor],
        rows: slice,
        stage: Stage,
        *,
        compiled: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Generate the samples `rows` of a global batch.

        Args:
            latents, noise: Draws for the global batch.
            compiled: Use the compiled network if there is one; allows a single backward pass.

        Returns:
            Samples [n, C, H, W], their styles ws [n, num_ws, w_dim], and the w [n, w_dim] of the
            first style; both are None for a generator without styles.
        """
        generator, maps = self.generator, [layer[rows] for layer in noise]
        network = self._compiled_synthesis if compiled else self.synthesis
        growth: dict[str, Alpha] = {}
        if generator.can_grow:
            growth = {"resolution": stage.resolution, "alpha": self._alpha(stage, network)}
        latents = replace(latents, labels=conditioning_vectors(latents.labels, self.label_sets))
        if self.styled is None:
            labels = latents.labels[rows] if generator.classes else None
            return network(latents.z[rows], labels, noise=maps, **growth), None, None
        ws, w = mix_styles(self.styled, latents, rows, self.styled.num_ws_at(stage.resolution))
        return network(ws, maps, **growth), ws, w

    def discriminate(
        self,
        batch: Images,
        step_slice: StepSlice,
        rows: slice,
        name: str,
        *,
        compiled: bool = False,
    ) -> DiscriminatorOutput:
        """Apply adaptive augmentation and the discriminator to a micro-batch, differentiably.

        Args:
            rows: Rows of the global batch that these images are.
            name: Kind of the images, part of the seed key of the augmentation.
            compiled: Use the compiled network if there is one; allows a single backward pass.
        """
        images = batch.images
        network = self._compiled_hidden if compiled else self.discriminator.hidden
        if self.ada.active:
            with phase("augment"):
                draws = self.ada.draw(
                    step_slice.step, name, images.shape[2:], step_slice.batch_size
                )
                images = self.ada.apply(images, draws, rows)
        with self.precision.autocast():
            if self.generator.can_grow:
                hidden = network(images, alpha=self._alpha(step_slice.stage, network))
            else:
                hidden = network(images)
        features = self.discriminator.output(hidden)
        conditions = conditioning_vectors(batch.labels, self.label_sets)
        logits = self.discriminator.project(features, conditions)
        return DiscriminatorOutput(name, *batch, hidden, features, logits)

    def auxiliary_loss(self, output: DiscriminatorOutput, step_slice: StepSlice) -> Tensor | float:
        """Return the weighted loss of D's classification head on a micro-batch, 0-d.

        It is divided by the global batch size. Return 0 without such a head.
        """
        if not self.config.loss.auxiliary_weight:
            return 0.0
        class_logits = self.discriminator.auxiliary(output.hidden)
        loss = label_loss(class_logits, output.labels, self.label_sets) / step_slice.batch_size
        if output.name == "real":
            correct = count_correct(class_logits, output.labels, self.label_sets)
            step_slice.add("loss/auxiliary_real", loss)
            step_slice.add("accuracy/auxiliary", correct / step_slice.batch_size)
        elif output.name == "generator":
            step_slice.add("loss/auxiliary", loss)
        return loss * self.config.loss.auxiliary_weight
