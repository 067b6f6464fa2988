"""Define the interface between the training loop and a task."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.cached_features import CachedFeatures
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch
from duetgan.training.base.config import Shape
from duetgan.training.base.monitors import State
from duetgan.utils.checkpoint.provenance import Lineage


class Stateful(Protocol):
    """The protocol of objects whose state a checkpoint can hold."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State, /) -> object: ...


# name -> network and example inputs
Networks = dict[str, tuple[torch.nn.Module, tuple[Tensor, ...]]]
# section of the config -> its network, and the least number of copies of its size that training
# needs (weights, gradients, Adam's moments, moving average)
Outline = Mapping[str, tuple[torch.nn.Module, int]]


class Task(ABC):
    """Base class of the tasks, such as training a GAN or a classifier.

    A task has the models, optimizers, losses and evaluation, and the training loop calls its
    methods. To add a task, write a subclass and add a line to `training.engine.tasks`. The
    constructor of a subclass takes the arguments `(config, dataset, val_dataset, device)`. Methods
    that are not abstract have a default.
    """

    val_dataset: Dataset | None  # the validation images
    # channels, classes, resolution: the arguments from which a checkpoint's models are built
    shape: Shape
    best_metric: str  # key of `evaluate()` that chooses the best checkpoint
    best_is_lower: bool
    best_interval: Sequence[float] | None = None  # 95 % interval of best_metric, last evaluation
    loss_metric: str  # key of every step's metrics: the loss in which spikes are detected
    # reason why `--lr-find` does not work for this task, and an alternative; empty if it works
    lr_find_unsupported_reason: ClassVar[str] = ""

    @staticmethod
    def outline(config: Any, shape: Shape) -> Outline:
        """Return a dict from config section to (network, least number of copies in memory).

        Copies are tensors of the size of the weights: the weights, their gradients, the optimizer's
        moments and the moving average. `preflight.check_memory` adds up the memory of all copies
        before the task is constructed.
        """
        return {}

    @abstractmethod
    def registry(self) -> dict[str, Stateful]:
        """Return a dict from name to object, for all objects whose state a checkpoint must hold."""

    def begin(self) -> None:  # noqa: B027  # most tasks need no preparation
        """Prepare a new run before its first step; not called when a run is resumed."""

    @abstractmethod
    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        """Make update number `step` (from 0) from the next batch or batches of `batches`.

        Returns a dict from the name of a metric to a 0-d tensor on the device. The value of the
        metric is the sum of this tensor over the ranks.
        """

    def source(self, step: int) -> CachedFeatures | None:
        """Return the features that the loader reads instead of images for update number `step`.

        Return None if the loader reads images. A call that computes features may take as long as
        an epoch.
        """
        return None

    def as_read(self, batch: Batch, step: int) -> Batch:
        """Return `batch`, a batch of images, in the form that update number `step` reads.

        For example, cached features are added if the update reads features instead of images.
        """
        return batch

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return a dict from name to metric on the validation images, the same on all ranks."""

    @abstractmethod
    def networks(self) -> Networks:
        """Return a dict from name to (network, example inputs), for summaries and TensorBoard."""

    @abstractmethod
    def images_at(self, step: int) -> int:
        """Return the number of training images that were used before update number `step`.

        A step counts one global batch, even if it reads several.
        """

    def typical_steps(self, first: int) -> dict[int, float]:
        """Return a dict from step number to fraction, with one step for each kind of step.

        Steps are of one kind if they take about the same time, for example because the same
        penalties are due in them. Each value is the fraction of steps that are of this kind. The
        most frequent kind comes first. The steps are timed to predict the duration of a training.
        Their numbers are `first` or later, except for kinds that only occur earlier.
        """
        return {first: 1.0}

    def sample_grid(self, step: int) -> np.ndarray | None:
        """Return a uint8 image of samples that the run saves at `step`; None to save no image."""
        return None

    def describe(self) -> dict[str, str]:
        """Return this task's additional rows of the printed plan, as a dict from label to text."""
        return {}

    def provenance(self) -> dict[str, object]:
        """Return additional entries for checkpoints that describe the models, of plain types."""
        return {}

    def lineage(self) -> Lineage:
        """Return the lineage that the run inherits from its teachers and pretrained networks.

        A lineage records the data and the networks from which weights have learnt.
        """
        return Lineage.of()

    def warnings(self, step: int, row: Mapping[str, float]) -> list[str]:
        """Return a line for each problem in a row of metrics, with a remedy.

        The lines must be the same on all ranks.
        """
        return []
