"""The classifier task: one step of a ResNet, what is saved, how it is evaluated."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.dataset import Dataset
from data.loader import Batch, read_batch
from data.transforms import Augment, draw_and_apply, to_float
from metrics.evaluate_classifier import evaluate_classifier
from models.batchnorm import synchronise_batchnorm
from models.resnet import Classifier, ResNetConfig
from training.config import RunConfig
from training.data import check_same_classes
from training.ema import EMA
from training.optim import Mixed, OptimizerConfig, Updater, restore_where_
from training.profile import phase
from utils import distributed
from utils.errors import UserError
from utils.images import grid
from utils.seeding import forked


@dataclass(kw_only=True)
class ClassifierLossConfig:
    """Cross entropy."""

    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"loss.label_smoothing {self.label_smoothing} must lie in [0, 1)")


@dataclass(kw_only=True)
class ClassifierEmaConfig:
    """The moving average of the classifier: the network that is evaluated and used."""

    decay: float = 0.999  # per step; ramps up as (1 + step) / (10 + step)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise UserError(f"ema.decay {self.decay} must lie in [0, 1)")


def _sgd() -> OptimizerConfig:
    return OptimizerConfig(name="sgd", lr=0.1, weight_decay=5e-4, warmup_steps=200, schedule="cosine")


@dataclass(kw_only=True)
class ClassifierConfig(RunConfig):
    """Everything a classifier's training can be told."""

    task: Literal["classifier"] = "classifier"
    sync_bn: Literal["auto", "off"] = "auto"  # auto: BatchNorm over all processes' samples where there are several
    model: ResNetConfig = field(default_factory=ResNetConfig)
    loss: ClassifierLossConfig = field(default_factory=ClassifierLossConfig)
    optimizer: OptimizerConfig = field(default_factory=_sgd)
    ema: ClassifierEmaConfig = field(default_factory=ClassifierEmaConfig)
    augment: Augment = field(default_factory=Augment)


def check_classes(config: ClassifierConfig, reader: Dataset, val_reader: Dataset | None) -> None:
    """Raise UserError unless class lists and head fit one another. The labels were checked by training.data."""
    classes, path = reader.classes, config.data.path
    if len(classes) < 2:
        raise UserError(
            f"{path}: a classifier needs two classes or more, this file has {len(classes)}; pack a folder of class "
            "folders"
        )
    if config.model.classes is not None and config.model.classes != len(classes):
        raise UserError(
            f"{path}: has {len(classes)} classes, labels 0 to {len(classes) - 1}, but the head has model.classes "
            f"{config.model.classes}; make it {len(classes)} or leave it out"
        )
    empty = [name for name, count in zip(classes, reader.meta.histogram, strict=True) if count == 0]
    if empty:
        raise UserError(f"{path}: class {empty[0]!r} has no picture; remove it or add pictures, and pack again")
    if val_reader is not None:
        check_same_classes(config.data, reader, val_reader)


class ClassifierTask:
    """A ResNet, its optimizer and average, and one step."""

    best_metric, best_is_lower = "accuracy", False

    def __init__(
        self, config: ClassifierConfig, reader: Dataset, val_reader: Dataset | None, device: torch.device
    ) -> None:
        world = distributed.world_size()
        check_classes(config, reader, val_reader)
        self.config, self.reader, self.val_reader, self.device = config, reader, val_reader, device
        self.share, self.micro = config.share(world), config.micro(world)
        self.first = distributed.rank() * self.share
        meta = reader.meta
        self.shape = {"channels": meta.channels, "classes": len(meta.classes), "resolution": reader.resolution}
        with forked(config.seed, "init", "classifier"):
            model = Classifier(config.model, **self.shape)
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        model = model.to(device, memory_format=layout)  # type: ignore[call-overload]
        self.ema = EMA(model, buffers="average")
        synced = world > 1 and config.sync_bn == "auto"
        self.model = synchronise_batchnorm(model, device) if synced else model
        self.model.train()  # and it stays so: only the average is evaluated
        self.statistics = [b for b in self.model.buffers() if b.is_floating_point()]  # BatchNorm's running ones
        self.mixed = Mixed(config.precision, device)
        self.updater = Updater(self.model, config.optimizer, self.mixed, config.steps)

    def registry(self) -> dict[str, Any]:
        """Name -> object with a state dict: all that a checkpoint must hold."""
        return {"model": self.model, "model_ema": self.ema, "optimizer": self.updater, "scaler": self.mixed}

    def networks(self) -> dict[str, tuple[torch.nn.Module, tuple[Tensor, ...]]]:
        """Name -> network and example inputs, for summaries and TensorBoard's graph."""
        size = self.shape["resolution"]
        return {
            "classifier": (self.ema.model, (torch.zeros(1, self.shape["channels"], size, size, device=self.device),))
        }

    def step(self, batches: Iterator[Batch], step: int) -> dict[str, Tensor]:
        """One update at the global batch; the returned values add up over the ranks."""
        batch = next(batches)
        self.updater.zero_grad()
        before = [b.clone() for b in self.statistics]
        loss_sum, correct = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for start in range(0, self.share, self.micro):
            with phase("augment"):
                images = self._augmented(batch.images[start : start + self.micro], step, start)
            labels = batch.labels[start : start + self.micro]
            with phase("forward"):
                with self.mixed.autocast():
                    logits = self.model(images)
                logits = logits.to(loss_sum.dtype)
                smoothing = self.config.loss.label_smoothing
                loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
                loss = loss / self.config.batch_size
            with phase("backward"):
                self.mixed.backward(loss)
            loss_sum += loss.detach()
            correct += (logits.detach().argmax(1) == labels).sum()
        with phase("optimizer"):
            update = self.updater.step(step)
            restore_where_(self.statistics, before, update.skipped)
            self.mixed.update_scale()
        with phase("ema"):
            self.ema.update(self.model, min(self.config.ema.decay, (1 + step) / (10 + step)), update.skipped)
        figures = {"loss/classifier": loss_sum, "accuracy/train": correct / self.config.batch_size}
        return figures | update.metrics("classifier")

    def _augmented(self, images: Tensor, step: int, start: int) -> Tensor:
        augmented = draw_and_apply(  # in uint8: a quarter of the memory
            images,
            self.config.augment,
            seed=self.config.seed,
            step=step,
            start=self.first + start,
            global_batch=self.config.batch_size,
        )
        return to_float(augmented, channels_last=self.config.channels_last)

    def sample_grid(self, step: int) -> np.ndarray | None:
        """At the start, the first training pictures as the network will see them; later there is nothing new to
        show.
        """
        if step:
            return None
        count = min(64, len(self.reader), self.config.batch_size)
        images = read_batch(self.reader, np.arange(count)).images.to(self.device)
        shown = draw_and_apply(
            images, self.config.augment, seed=self.config.seed, step=0, start=0, global_batch=self.config.batch_size
        )
        return grid(shown.cpu())

    def images_at(self, step: int) -> int:
        """Training pictures seen before update number `step`."""
        return step * self.config.batch_size

    def describe(self) -> list[str]:
        """Nothing: the training is the same from the first step to the last."""
        return []

    def provenance(self) -> dict[str, Any]:
        """Nothing besides the state."""
        return {}

    def warnings(self, step: int, row: Mapping[str, float]) -> list[str]:
        """Nothing is watched."""
        return []

    def evaluate(self) -> dict[str, float]:
        """Figures of the average model on the held-out pictures; every rank takes its share. Empty without a
        val_path.
        """
        if self.val_reader is None:
            return {}
        found = evaluate_classifier(
            self.ema.model,
            self.val_reader,
            batch_size=self.config.evaluation.batch_size,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            reduce=distributed.all_reduce_sum_,
        )
        return {"accuracy": found["accuracy"], "ece": found["ece"]}
