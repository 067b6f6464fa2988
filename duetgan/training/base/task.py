"""The protocol between the training loop and a task."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, Source
from duetgan.training.base.config import Shape
from duetgan.training.base.monitors import State
from duetgan.utils.provenance import Lineage


class Stateful(Protocol):
    """An object that a checkpoint can hold."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State, /) -> object: ...


# name -> network and example inputs
Networks = dict[str, tuple[torch.nn.Module, tuple[Tensor, ...]]]
# section of the config -> its network, and the number of tensors of its size that training needs at
# the least (weights, gradients, moments, average)
Outline = Mapping[str, tuple[torch.nn.Module, int]]


class Task(ABC):
    """A training: its models, optimizers, losses and evaluation.

    A new task is one file and one line in `training.engine.tasks`. It is constructed as `(config,
    dataset, val_dataset, device)`. Methods that are not abstract have a default.
    """

    val_dataset: Dataset | None  # the validation images
    # channels, classes, resolution: the arguments from which a checkpoint's models are built
    shape: Shape
    best_metric: str  # key of `evaluate()` that chooses the best checkpoint
    best_is_lower: bool
    best_interval: Sequence[float] | None = None  # 95 %, of that metric at the last evaluation
    loss_metric: str  # key of every step's metrics: the loss that is watched for spikes
    # why `--lr-find` does not work for this task, and what to do instead; empty: it works
    lr_find_unsupported_reason: ClassVar[str] = ""

    @staticmethod
    def outline(config: Any, shape: Shape) -> Outline:
        """Return the networks that the config describes.

        The preflight adds up their sizes before the task is constructed.
        """
        return {}

    @abstractmethod
    def registry(self) -> dict[str, Stateful]:
        """Return by name every object whose state a checkpoint must hold."""

    def begin(self, folder: Path) -> None:  # noqa: B027  # most tasks need no preparation
        """Prepare a new run, before its first step; a resumed run does not repeat this."""

    @abstractmethod
    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        """Make one update from the next batch or batches.

        Returns 0-d metrics on the device; their sum over the ranks is the value of the step.
        """

    def source(self, step: int, folder: Path) -> Source | None:
        """Return what the loader reads for update number `step` instead of images.

        None stands for the images. Computing a source may take an epoch.
        """
        return None

    def as_read(self, batch: Batch, step: int) -> Batch:
        """Convert a batch of images into the batch that `source` gives for update number `step`."""
        return batch

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Compute metrics on the validation images, the same on all ranks."""

    @abstractmethod
    def networks(self) -> Networks:
        """Return the networks for summaries and for TensorBoard's graph."""

    @abstractmethod
    def images_at(self, step: int) -> int:
        """Return the number of training images before update number `step`.

        A step counts its batch once.
        """

    def typical_steps(self, first: int) -> dict[int, float]:
        """Return one step of each kind with that kind's fraction of all steps, the largest first.

        They are measured to predict the duration of a training. Step numbers are `first` or later,
        except for kinds that only occur earlier.
        """
        return {first: 1.0}

    def sample_grid(self, step: int) -> np.ndarray | None:
        """Return a uint8 image of samples to save, or None."""
        return None

    def describe(self) -> dict[str, str]:
        """Return the rows of the plan that are special to this task: label -> text."""
        return {}

    def layer_table(self, name: str) -> str | None:
        """Return a table of the layers of a network, or None for the default table.

        A task overrides this if it has more to report than shapes and parameters.
        """
        return None

    def trains(self, name: str, parameter: str) -> bool:
        """Return True if training ever changes this parameter of the network `name`."""
        return True

    def provenance(self) -> dict[str, object]:
        """Return the plain data that a checkpoint records besides the state."""
        return {}

    def lineage(self) -> Lineage:
        """Return the data that the weights were trained on besides this run's training images.

        It comes from teachers and from files of pretrained weights.
        """
        return Lineage.of()

    def warnings(self, step: int, row: Mapping[str, float]) -> list[str]:
        """Return the problems in a row of metrics, each with a remedy; the same on all ranks."""
        return []
