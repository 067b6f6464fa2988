"""The parts that both halves of a GAN step share: real images, samples, the discriminator's output.

`StepSlice` is the part of the global batch that this process computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from duetgan.data.augment.transforms import draw_and_apply
from duetgan.data.reading.loader import Batch
from duetgan.models.gan import (
    ImageDiscriminator,
    ImageGenerator,
    StyledGenerator,
    conditioning_vectors,
)
from duetgan.training.base.compiled import Compiled
from duetgan.training.gan.ada import Ada
from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.draws import GanDraws, Latents, mix_styles
from duetgan.training.gan.growth import Growth
from duetgan.training.optim.updater import Precision
from duetgan.utils.distributed import collectives


class StepSlice(NamedTuple):
    """A step, and the slice of its global batch that this rank computes, in micro-batches.

    `first` and the slices from `micro_batches` are row numbers of the global batch.
    """

    step: int
    images_seen: int  # training images before this step
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
        first = collectives.rank() * size
        micro = min(self.micro, size)
        return self._replace(batch_size=self.batch_size // 2, size=size, micro=micro, first=first)

    def add(self, name: str, value: Tensor) -> None:
        """Add a micro-batch's contribution, 0-d, to the metric `name`."""
        value = value.detach()
        self.metrics[name] = self.metrics[name] + value if name in self.metrics else value


class Images(NamedTuple):
    """A micro-batch of real images or samples, before adaptive augmentation."""

    images: Tensor  # float [n, C, H, W], mostly in [-1, 1]
    labels: Tensor  # int64 [n]
    ws: Tensor | None = None  # styles of samples [n, num_ws, w_dim]; None without styles
    w: Tensor | None = None  # the first style of samples [n, w_dim]

    def detached(self) -> "Images":
        """Return the micro-batch without graphs, and without `ws`."""
        w = None if self.w is None else self.w.detach()
        return Images(self.images.detach(), self.labels, w=w)


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
    growth: Growth | None = None

    def __post_init__(self) -> None:
        self.styled = self.generator if isinstance(self.generator, StyledGenerator) else None
        self.synthesis = self.styled.synthesis if self.styled else self.generator
        self._compiled_synthesis = Compiled(
            self.synthesis, "the generator", setting=self.config.compile, device=self.device
        )
        self._compiled_hidden = Compiled(
            self.discriminator.hidden,
            "the discriminator",
            setting=self.config.compile,
            device=self.device,
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
            if self.growth is not None:
                images = self.growth.fade_in(images)
            micro_batches.append(Images(images, batch.labels[local_rows]))
        return micro_batches

    def latents(
        self, step_slice: StepSlice, name: str, partners: Sequence[Images] = ()
    ) -> tuple[Latents, list[Tensor]]:
        """Draw the latents and noise maps of the global batch for the phase `name`.

        If `partners` are given, this rank's samples get the labels of these real images.
        """
        key = (step_slice.step, name, step_slice.batch_size)
        latents = self.draws.latents(
            *key,
            self.generator.z_dim,
            mixing=self.config.loss.style_mixing,
            num_ws=self.styled.num_ws if self.styled else 0,
        )
        if partners:
            latents.labels[step_slice.first : step_slice.first + step_slice.size] = torch.cat(
                [images.labels for images in partners]
            )
        return latents, self.draws.noise(*key, self.generator.noise_shapes())

    def sample(
        self, latents: Latents, noise: list[Tensor], rows: slice, *, compiled: bool = False
    ) -> Images:
        """Generate the samples `rows` of a global batch.

        Args:
            latents, noise: Draws for the global batch.
            compiled: Use the compiled network if there is one; allows a single backward pass.
        """
        network = self._compiled_synthesis if compiled else self.synthesis
        labels = latents.labels[rows]
        conditions = None
        if self.generator.classes:
            conditions = conditioning_vectors(labels, self.label_sets)
        maps = [layer[rows] for layer in noise]
        with self.precision.autocast():
            if self.styled is None:
                return Images(network(latents.z[rows], conditions, noise=maps), labels)
            ws, w = mix_styles(self.styled, latents, rows, conditions)
            return Images(network(ws, maps), labels, ws, w)

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
        network = self._compiled_hidden if compiled else self.discriminator.hidden
        images = self.ada.augmented(
            batch.images, step_slice.step, name, step_slice.batch_size, rows
        )
        with self.precision.autocast():
            hidden = network(images)
        features = self.discriminator.output(hidden)
        conditions = conditioning_vectors(batch.labels, self.label_sets)
        logits = self.discriminator.project(features, conditions)
        return DiscriminatorOutput(name, batch.images, batch.labels, hidden, features, logits)
