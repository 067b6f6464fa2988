"""The parts that both halves of a GAN step share: real images, samples, the discriminator's output.

An image takes this way from the packed file to the discriminator:

1. `LMDBReader.gather` (data/lmdb/reader.py) copies the raw uint8 images of a batch out of the
   mapped file. `Dataset.read` (data/reading/dataset.py) calls it, and decodes images that are not
   stored raw.
2. `InfiniteLoader` (data/reading/loader.py) copies the `Batch` to the device, for `GanTask.update`.
3. `Context.reals` flips and shifts the images and converts them to floats in [-1, 1]
   (`ImageSpec.to_float`, utils/image_spec.py). Without CUDA graphs, `value` only calls its
   function.
4. `JointStep` or `DiscriminatorStep.run` passes the images to `DiscriminatorStep.discriminate`,
   which calls `Context.discriminate`.
5. `Context.discriminate` applies ADA, then the network's `hidden` (models/stylegan2.py) under
   autocast. The first layer of the network, `FromRGB`, casts the images to the dtype of autocast.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from duetgan.data.augment.transforms import draw_and_apply
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch
from duetgan.models import layers
from duetgan.models.gan import (
    ImageDiscriminator,
    ImageGenerator,
    StyledGenerator,
    conditioning_vectors,
)
from duetgan.training.base import data, graphs
from duetgan.training.base.compiled import Compiled
from duetgan.training.gan import ada, draws
from duetgan.training.gan.batch import DiscriminatorOutput, Images, StepSlice
from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.growth import Growth
from duetgan.training.optim.updater import Precision


class Context:
    """The networks in training, with the operations that both halves of a GAN step use."""

    def __init__(
        self,
        config: GanConfig,
        dataset: Dataset,
        generator: ImageGenerator,
        discriminator: ImageDiscriminator,
        device: torch.device,
        growth: Growth | None,
    ) -> None:
        self.config = config
        self.device = device
        self.generator = generator
        self.discriminator = discriminator
        self.growth = growth
        self.precision = Precision(config.precision, device)
        self.draws = draws.GanDraws(
            config.seed, device, data.label_frequencies(config.data, dataset)
        )
        # number of images seen before each step
        self.images_at = config.stages(dataset.resolution).images_at
        # images after which scheduled settings reach their final values
        self.schedule_images = config.schedule_images(dataset.resolution)
        self.ada = ada.Ada(
            config.ada,
            seed=config.seed,
            channels=generator.spec.channels,
            alpha=generator.spec.alpha,
            device=device,
            schedule_images=self.schedule_images,
            transfer=config.init_from is not None,
        )
        # float [labels, classes]: classes of each label set; None: one class per image
        self.label_sets: Tensor | None = None
        if generator.label_sets is not None:
            self.label_sets = torch.tensor(
                dataset.meta.multi_hot, dtype=torch.float32, device=device
            )
        self.styled = generator if isinstance(generator, StyledGenerator) else None
        self.synthesis = self.styled.synthesis if self.styled else generator
        self._compiled_synthesis = Compiled(
            self.synthesis, "the generator", setting=config.compile, device=device
        )
        self._compiled_hidden = Compiled(
            discriminator.hidden, "the discriminator", setting=config.compile, device=device
        )

    @contextmanager
    def scaled(self, *networks: nn.Module) -> Iterator[None]:
        """Multiply the networks' parameters by their gains once, for all passes inside the block.

        The gains are those of the equalised learning rate. A block inside another block does not
        multiply again. If the networks are compiled, this does nothing, because their graphs
        multiply.
        """
        with ExitStack() as stack:
            if not self._compiled_hidden.on:
                with self.precision.autocast():
                    for network in networks:
                        stack.enter_context(layers.scaled_together(network))
            yield

    def reals(self, batch: Batch, step_slice: StepSlice, phase: str | None) -> list[Images]:
        """Return this rank's real images, as micro-batches of augmented images in [-1, 1].

        The augmentation is that of the config's section `augment`, not ADA. `phase` is part of the
        seed key. A step that reads two batches gives each a different phase.
        """
        config, spec = self.config, self.generator.spec
        micro_batches: list[Images] = []
        for rows in step_slice.micro_batches():
            local_rows = slice(rows.start - step_slice.first, rows.stop - step_slice.first)
            images = batch.images[local_rows]
            # Images of 8 bits are augmented as uint8, in a quarter of the memory.
            if spec.deep:
                images = spec.to_float(images, config.channels_last)
            augmented = partial(self._augmented, images, rows.start, step_slice.batch_size, phase)
            images = graphs.value(augmented, step_slice.step)
            if not spec.deep:
                images = spec.to_float(images, config.channels_last)
            if self.growth is not None:
                images = self.growth.fade_in(images)
            micro_batches.append(Images(images, batch.labels[local_rows]))
        return micro_batches

    def _augmented(
        self, images: Tensor, start: int, global_batch: int, phase: str | None, step: int
    ) -> Tensor:
        return draw_and_apply(
            images,
            self.config.augment,
            seed=self.config.seed,
            step=step,
            start=start,
            global_batch=global_batch,
            phase=phase,
        )

    def latents(
        self, step_slice: StepSlice, name: str, partners: Sequence[Images] = ()
    ) -> tuple[draws.Latents, list[Tensor]]:
        """Draw the latents and the noise maps for the samples of a global batch.

        `name`, part of the seed key, names the use of the samples, such as "generator". If real
        images are given as `partners`, this rank's samples get the labels of these images.
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
        self, latents: draws.Latents, noise: list[Tensor], rows: slice, *, compiled: bool = False
    ) -> Images:
        """Generate the samples `rows` of a global batch from its latents and noise maps.

        If `compiled` is True, the generator runs compiled if the config allows it. Only one
        backward pass through the samples is then possible.
        """
        network = self._compiled_synthesis if compiled else self.synthesis
        labels = latents.labels[rows]
        conditions = None
        if self.generator.classes:
            conditions = conditioning_vectors(labels, self.label_sets)
        maps = [layer[rows] for layer in noise]
        with self.scaled(self.generator), self.precision.autocast():
            if self.styled is None:
                return Images(network(latents.z[rows], conditions, noise=maps), labels)
            ws, w = draws.mix_styles(self.styled, latents, rows, conditions)
            return Images(network(ws, maps), labels, ws, w)

    def discriminate(
        self,
        batch: Images,
        step_slice: StepSlice,
        rows: slice,
        *names: str,
        compiled: bool = False,
    ) -> DiscriminatorOutput:
        """Return the discriminator's output for a micro-batch, after adaptive augmentation.

        `names` are the kinds of images in `batch`, which holds one kind after another. The images
        of each kind are the rows `rows` of a global batch. The names are part of the seed keys of
        the augmentation. Augmentation and discriminator are differentiable.
        """
        network = self._compiled_hidden if compiled else self.discriminator.hidden
        images = batch.images
        if self.ada.active:
            parts = [
                self.ada.augmented(part, step_slice.step, name, step_slice.batch_size, rows)
                for name, part in zip(names, images.chunk(len(names)), strict=True)
            ]
            images = parts[0] if len(parts) == 1 else torch.cat(parts)
        with self.scaled(self.discriminator):
            with self.precision.autocast():
                hidden = network(images)
            features = self.discriminator.output(hidden)
            conditions = conditioning_vectors(batch.labels, self.label_sets)
            logits = self.discriminator.project(features, conditions)
        return DiscriminatorOutput(names[0], batch.images, batch.labels, hidden, features, logits)
