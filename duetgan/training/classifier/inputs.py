"""Turn a batch into a network's inputs and targets: augment it, mix it, and split it."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from duetgan.data.augment.transforms import (
    Mixing,
    draw_and_apply,
    draw_mixing,
    mix_images,
    partners,
)
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch
from duetgan.training.base.monitors import Fields, State
from duetgan.training.base.phases import phase
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.frozen import FrozenStages
from duetgan.training.classifier.loss import Targets, sample_weights
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import TrainingHalted
from duetgan.utils.machine import ran_out
from duetgan.utils.runlog.run_log import say_main


class MicroBatchSize(Fields):
    """The largest number of samples per forward pass, `size`, which is saved in checkpoints.

    `count` is the number of samples of the process. If the setting is "auto", `size` begins at
    `count`, and `find` halves it until a step fits into memory.
    """

    STATE = ("size",)
    optional = True  # A run that started with a number has no such state.

    def __init__(self, setting: int | Literal["auto"] | None, count: int) -> None:
        self.auto = setting == "auto"
        self.count = count
        self.size = count
        if isinstance(setting, int):
            self.size = min(setting, count)
        # True if parameters or image sizes have changed since `find`
        self.is_stale = True

    def slices(self) -> list[slice]:
        """Return the rows of each micro-batch, with as few micro-batches as possible.

        The micro-batches have nearly equal sizes, because a much smaller last one would give
        BatchNorm poor statistics.
        """
        parts = -(-self.count // self.size)
        ends = [self.count * number // parts for number in range(parts + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]

    def find(self, attempt: Callable[[], object]) -> None:
        """Halve the size until there is enough memory for `attempt`, which does the work of a step.

        Do nothing if the setting is not "auto", or if neither the trained parameters nor the image
        size have changed since the last call. Raises TrainingHalted if a single sample needs too
        much memory.
        """
        if not (self.auto and self.is_stale):
            return
        while not fits(attempt):
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            self._halve()
        self.is_stale = False

    def _halve(self) -> None:
        if self.size == 1:
            raise TrainingHalted(
                "memory ran out with a single sample per forward pass; take smaller images "
                "(--data.resolution), a smaller model, or model.activation_checkpointing"
            )
        previous = self.size
        self.size = -(-previous // 2)
        say_main(
            f"micro_batch: memory ran out with {previous} samples per forward pass and process; "
            f"going on with {self.size}. The global batch and its mean gradient stay the same, but "
            f"BatchNorm computes its statistics over {self.size} samples instead of {previous}"
        )

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.size = min(self.size, self.count)


def fits(attempt: Callable[[], object]) -> bool:
    """Call `attempt`; return True, or False if it runs out of memory.

    After a failure, its tensors are released before the return.
    """
    try:
        attempt()
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        return False
    return True


class Samples(NamedTuple):
    """The batch of one process after augmentation. Images are mixed later, in each micro-batch."""

    images: Tensor  # [n, C, H, W], uint8 if the data set has 8 bits; or outputs of first stages
    targets: Targets
    begin: int = 0  # number of stages whose outputs `images` holds
    mixing: Mixing | None = None  # of neighbouring images; None if none are mixed


class MicroBatch(NamedTuple):
    """The network's inputs in one forward pass."""

    images: Tensor  # float [m, C, H, W] in [-1, 1]; or outputs of first stages
    targets: Targets
    begin: int  # number of stages whose outputs `images` holds
    is_last: bool  # True for the last one of a step


class Inputs:
    """An object that augments, mixes and splits the samples of this process for the network.

    These samples are the rows of the global batch that begin at `first_row`.
    """

    def __init__(
        self, config: ClassifierConfig, dataset: Dataset, frozen: FrozenStages, device: torch.device
    ) -> None:
        self.config = config
        self.frozen = frozen
        self.spec = dataset.spec
        rank_batch = config.rank_batch(collectives.world_size())
        self.first_row = collectives.rank() * rank_batch
        self.micro = MicroBatchSize(config.micro_batch, rank_batch)
        # float [labels, classes]: the classes of each label set; None: one class per label
        self.label_vectors: Tensor | None = None
        if config.loss.several:
            self.label_vectors = torch.tensor(
                dataset.meta.multi_hot, dtype=torch.float32, device=device
            )

    def augmented(self, batch: Batch, step: int, start: int) -> Samples:
        """Return the samples of `batch` after augmentation, with the draws for their mixing.

        The batch holds the rows [start, start + n) of the global batch of update number `step`.
        8-bit images stay uint8, which takes a quarter of the memory of floats.
        """
        config = self.config
        images, labels = batch.images, batch.labels
        if batch.features is not None:
            images = batch.features
        if self.label_vectors is not None:
            labels = self.label_vectors[labels]
        if self.spec.deep and batch.features is None:
            images = self.spec.to_float(images, config.channels_last)
        images = draw_and_apply(
            images,
            config.augment,
            seed=config.seed,
            step=step,
            start=start,
            global_batch=config.batch_size,
        )
        samples = Samples(images, Targets(labels))
        if batch.features is not None:  # The random flip has chosen the view that comes first.
            outputs = images[..., 0].reshape(-1, *self.frozen.shape)
            samples = Samples(outputs, Targets(labels), self.frozen.begin)
        if config.augment.mixes:
            mixing = draw_mixing(
                config.augment,
                seed=config.seed,
                step=step,
                start=start,
                count=len(images),
                global_batch=config.batch_size,
                size=(images.shape[2], images.shape[3]),
                device=images.device,
            )
            targets = Targets(labels, partners(labels), mixing.label_weights)
            samples = Samples(images, targets, mixing=mixing)
        if batch.synthetic is None or config.data.synthetic.weight == 1:
            return samples
        weights = sample_weights(
            batch.synthetic,
            config.data.synthetic.weight,
            partners(batch.synthetic) if samples.mixing else None,
            samples.targets.fraction,
        )
        return samples._replace(targets=samples.targets._replace(weights=weights))

    def micro_batches(self, samples: Samples) -> Iterator[MicroBatch]:
        for rows in self.micro.slices():
            with phase("augment"):
                images, targets = self.rows(samples, rows)
            yield MicroBatch(images, targets, samples.begin, rows.stop == self.micro.count)

    def rows(self, samples: Samples, rows: slice) -> tuple[Tensor, Targets]:
        """Return the network's inputs and the targets for the rows `rows` of `samples`.

        Here images are mixed and converted to floats.
        """
        mixing = samples.mixing
        if mixing is None:
            return self._float(samples.images[rows]), samples.targets.rows(rows)
        # Whole pairs are read, because an end of `rows` may lie between two partners.
        first = rows.start // 2 * 2
        images = self._float(samples.images[first : -(-rows.stop // 2) * 2])
        chosen = slice(rows.start - first, rows.stop - first)
        images = mix_images(images[chosen], partners(images)[chosen], mixing.rows(rows))
        return images, samples.targets.rows(rows)

    def _float(self, images: Tensor) -> Tensor:
        if images.is_floating_point():
            return images
        return self.spec.to_float(images, self.config.channels_last)
