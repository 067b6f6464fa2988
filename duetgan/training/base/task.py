"""The interface between the training loop and a task."""

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
    """An object whose state a checkpoint can hold."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State, /) -> object: ...


# name -> network and example inputs
Networks = dict[str, tuple[torch.nn.Module, tuple[Tensor, ...]]]
# section of the config -> its network, and the least number of copies of its size that training
# needs (weights, gradients, Adam's moments, moving average)
Outline = Mapping[str, tuple[torch.nn.Module, int]]


class Task(ABC):
    """Base class of a training: its models, optimizers, losses and evaluation.

    A new task is one file and one line in `training.engine.tasks`. It is constructed with the
    arguments `(config, dataset, val_dataset, device)`. Methods that are not abstract have a
    default.
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
        """Return the networks that the config describes, each with its least number of copies.

        A copy is a tensor for each weight: the weights themselves, their gradients, the optimizer's
        moments and the moving average. The preflight adds up the memory of all copies before the
        task is constructed.
        """
        return {}

    @abstractmethod
    def registry(self) -> dict[str, Stateful]:
        """Return every object whose state a checkpoint must hold, by name."""

    def begin(self) -> None:  # noqa: B027  # most tasks need no preparation
        """Prepare a new run before its first step; not called when a run is resumed."""

    @abstractmethod
    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        """Make update number `step` from the next batch or batches.

        Returns metrics, 0-d on the device, whose sum over the ranks is the value.
        """

    def source(self, step: int) -> CachedFeatures | None:
        """Return features that the loader reads in place of images for update number `step`.

        Return None for images. Computing the features may take an epoch.
        """
        return None

    def as_read(self, batch: Batch, step: int) -> Batch:
        """Return a batch of images as update `step` reads it: with features if `source` has any."""
        return batch

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Compute metrics on the validation images, the same on all ranks."""

    @abstractmethod
    def networks(self) -> Networks:
        """Return the networks, by name, for summaries and for TensorBoard's graph."""

    @abstractmethod
    def images_at(self, step: int) -> int:
        """Return the number of training images before update number `step`.

        A step counts one global batch, also if it reads several.
        """

    def typical_steps(self, first: int) -> dict[int, float]:
        """Return one step number for each kind of step -> the fraction of all steps of that kind.

        The most frequent kind comes first. The steps are measured to predict the duration of a
        training. Their numbers are `first` or later, except for kinds that only occur earlier.
        """
        return {first: 1.0}

    def sample_grid(self, step: int) -> np.ndarray | None:
        """Return a uint8 image of samples that the run saves at `step`, or None."""
        return None

    def describe(self) -> dict[str, str]:
        """Return additional rows of the printed plan for this task: label -> text."""
        return {}

    def provenance(self) -> dict[str, object]:
        """Return plain data about the models, for checkpoints to record besides the state."""
        return {}

    def lineage(self) -> Lineage:
        """Return the data behind the weights of teachers and of pretrained networks."""
        return Lineage.of()

    def warnings(self, step: int, row: Mapping[str, float]) -> list[str]:
        """Return the problems in a row of metrics, each with a remedy; the same on all ranks."""
        return []
