"""What the training loop asks of a task."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data.loader import Batch


class Task(Protocol):
    """What the loop asks of a task."""

    shape: dict[str, int]  # channels, classes, resolution: what a checkpoint's models are built from
    best_metric: str  # key of `evaluate()` that chooses the best checkpoint
    best_is_lower: bool
    loss_metric: str  # key of what every step returns: the loss that must not jump

    def registry(self) -> dict[str, Any]:
        """Name -> object with state_dict and load_state_dict."""

    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        """One update from the next batch, or batches; 0-d values on the device that add up over the ranks."""

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data, the same on all ranks."""

    def sample_grid(self, step: int) -> np.ndarray | None:
        """A uint8 image to save, if there is something to show."""

    def networks(self) -> dict[str, tuple[torch.nn.Module, tuple[Tensor, ...]]]:
        """Name -> network and example inputs."""

    def images_at(self, step: int) -> int:
        """Training images seen before update number `step`; a step counts its batch once, whatever it does with
        it.
        """

    def describe(self) -> list[str]:
        """What the plan says of a training that changes on its way, a row each."""

    def provenance(self) -> dict[str, Any]:
        """What a checkpoint tells about this training besides its state: plain data."""

    def warnings(self, step: int, row: Mapping[str, float]) -> list[str]:
        """What a row of metrics says is going wrong, in words, each with what to try; the same on all ranks."""
