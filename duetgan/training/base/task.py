"""What the training loop asks of a task."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, Source
from duetgan.utils.provenance import Lineage

# name -> network and example inputs
Networks = dict[str, tuple[torch.nn.Module, tuple[Tensor, ...]]]
# section of the config -> its network, least copies of its weights
Outline = Mapping[str, tuple[torch.nn.Module, int]]


class Task(ABC):
    """A training: its models, optimizers, losses and evaluation. What is not abstract here has a
    default.

    A new one is one file and one line in `training.engine.tasks`; it is made as `(config, reader,
    val_reader, device)`.
    """

    val_reader: Dataset | None  # the held-out images
    # channels, classes, resolution: what a checkpoint's models are built from
    shape: dict[str, Any]
    best_metric: str  # key of `evaluate()` that chooses the best checkpoint
    best_is_lower: bool
    best_interval: Sequence[float] | None = None  # 95 %, of that figure at the last evaluation
    loss_metric: str  # key of what every step returns: the loss that must not jump
    # why `--lr-find` tells nothing about this task, and what to do instead
    no_rate_search: ClassVar[str] = ""

    @staticmethod
    def outline(config: Any, shape: Mapping[str, Any]) -> Outline:
        """The networks whose size the config says: what the preflight weighs before the task is
        made.
        """
        return {}

    @abstractmethod
    def registry(self) -> dict[str, Any]:
        """Name -> object with state_dict and load_state_dict: all that a checkpoint must hold."""

    def begin(self, folder: Path) -> None:  # noqa: B027  # most do nothing
        """What a run does before its first step, and a resumed one does not again."""

    @abstractmethod
    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        """One update from the next batch, or batches; 0-d values on the device that add up over the
        ranks.
        """

    def source(self, step: int, folder: Path) -> Source | None:
        """What the loader reads for update number `step` in place of images; None: them. It may
        take an epoch.
        """
        return None

    def as_read(self, batch: Batch, step: int) -> Batch:
        """What update number `step` gets for a batch of images where the loader reads something
        else.
        """
        return batch

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data, the same on all ranks."""

    @abstractmethod
    def networks(self) -> Networks:
        """For summaries and TensorBoard's graph."""

    @abstractmethod
    def images_at(self, step: int) -> int:
        """Training images seen before update number `step`; a step counts its batch once."""

    def typical_steps(self, first: int) -> dict[int, float]:
        """A step of each kind, at or after `first` unless it only comes earlier: number -> share of
        all steps, the largest first. They are measured to know what training takes.
        """
        return {first: 1.0}

    def sample_grid(self, step: int) -> np.ndarray | None:
        """A uint8 image to save, if there is something to show."""
        return None

    def describe(self) -> dict[str, str]:
        """Rows of the plan about what is special to this training: label -> text."""
        return {}

    def layer_table(self, name: str) -> str | None:
        """The layers of one of `networks()`, where the task can tell more of them than shapes and
        parameters.
        """
        return None

    def trains(self, name: str, parameter: str) -> bool:
        """Whether a parameter of one of `networks()` is ever changed."""
        return True

    def provenance(self) -> dict[str, Any]:
        """What a checkpoint records besides the state: plain data."""
        return {}

    def lineage(self) -> Lineage:
        """What the weights have seen besides the training images: other files, or what a file of
        weights had seen.
        """
        return Lineage.of()

    def warnings(self, step: int, row: Mapping[str, float]) -> list[str]:
        """What a row of metrics says is going wrong, in words, each with what to try; the same on
        all ranks.
        """
        return []
