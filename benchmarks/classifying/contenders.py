"""Who trains: our task on a packed file, and timm's model, loader, optimizer and loop on a folder of PNG files."""

import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torchvision import transforms

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, InfiniteLoader
from duetgan.data.reading.sampler import GlobalSampler
from duetgan.training.base.config import PrecisionName
from duetgan.training.base.monitors import MetricWindow
from duetgan.training.base.phases import PhaseClock, listening, phase
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.task import ClassifierTask
from duetgan.utils.errors import UserError
from duetgan.utils.machine import tune_malloc

LOG_EVERY = 50  # steps; what both log by default
DATA_PHASES = ("data", "augment")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a repeat of steps took."""

    seconds: float
    data_seconds: float  # of them: reading, decoding, augmenting


class Ours:
    """ClassifierTask with its loader, and what the loop does in each step: the metrics' window."""

    def __init__(self, config: ClassifierConfig, precision: PrecisionName, packed: Path) -> None:
        tune_malloc()  # as training does
        self.config = config.changed(precision=precision, channels_last=True)
        self.reader = Dataset(packed)
        device = torch.device("cpu")
        self.task = ClassifierTask(self.config, self.reader, None, device)
        sampler = GlobalSampler(len(self.reader), batch_size=config.batch_size, seed=0)
        self.loader = InfiniteLoader(self.reader, sampler, device=device, prefetch=0)  # as training does on the CPU
        self.window, self.at = MetricWindow(watched=None), 0

    @property
    def parameters(self) -> int:
        """Numbers that train."""
        return sum(p.numel() for p in self.task.ema.model.parameters())

    def measure(self, count: int) -> Measured:
        """Train `count` steps."""
        clock = PhaseClock(lambda: None, time.perf_counter)
        started = time.perf_counter()
        with listening(clock), phase("other"):
            for _ in range(count):
                self.window.add(self.task.step(self._batches(), self.at))
                self.at += 1
                if self.at % LOG_EVERY == 0:
                    self.window.take()
        seconds = time.perf_counter() - started
        return Measured(seconds=seconds, data_seconds=sum(clock.seconds.get(name, 0.0) for name in DATA_PHASES))

    def _batches(self) -> Iterator[Batch]:
        while True:
            with phase("data"):
                batch = next(self.loader)
            yield batch


def import_timm() -> ModuleType:
    """timm. Raises UserError, with what to install, where it is missing."""
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise UserError(f"the benchmark measures against timm ({error}); `pip install timm`") from error


class Timm:
    """timm's pieces put together as its train.py does with its defaults, for the CPU."""

    def __init__(self, config: ClassifierConfig, folder: Path, workers: int, prefetcher: bool) -> None:
        timm = import_timm()
        self.config, self.at = config, 0
        self.model = small_resnet18(timm, len(list(folder.iterdir())))
        self.optimizer = importlib.import_module("timm.optim").create_optimizer_v2(
            self.model, opt="sgd", lr=config.optimizer.lr, momentum=0.9, weight_decay=config.optimizer.weight_decay
        )
        self.loss = importlib.import_module("timm.loss").LabelSmoothingCrossEntropy(
            smoothing=config.loss.label_smoothing
        )
        self.meter = importlib.import_module("timm.utils").AverageMeter()
        self.loader = self._loader(folder, workers, prefetcher)
        self._batches = self._endless()
        self.model.train()

    def _loader(self, folder: Path, workers: int, prefetcher: bool) -> Any:
        data = importlib.import_module("timm.data")
        side, shift = 32, self.config.augment.shift
        dataset = data.create_dataset("", root=str(folder), split="train", is_training=True)
        loader = data.create_loader(
            dataset,
            input_size=(3, side, side),
            batch_size=self.config.batch_size,
            is_training=True,
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
            num_workers=workers,
            use_prefetcher=prefetcher,
            device=torch.device("cpu"),
        )
        last: list[Any] = [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
        if prefetcher:  # which normalises whole batches itself, and wants uint8
            last = [importlib.import_module("timm.data.transforms").ToNumpy()]
        dataset.transform = transforms.Compose(
            [transforms.RandomCrop(side, padding=shift), transforms.RandomHorizontalFlip(), *last]
        )
        return loader

    @property
    def parameters(self) -> int:
        """Numbers that train."""
        return sum(p.numel() for p in self.model.parameters())

    def _endless(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from self.loader

    def measure(self, count: int) -> Measured:
        """Train `count` steps as timm's `train_one_epoch` does."""
        data, started = 0.0, time.perf_counter()
        for _ in range(count):
            waiting = time.perf_counter()
            images, labels = next(self._batches)
            data += time.perf_counter() - waiting
            loss = self.loss(self.model(images), labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.at += 1
            if self.at % LOG_EVERY == 0:
                self.meter.update(loss.item(), len(images))
        return Measured(seconds=time.perf_counter() - started, data_seconds=data)


def small_resnet18(timm: ModuleType, classes: int) -> nn.Module:
    """timm's ResNet-18 with a stem for small images: 3x3 with stride 1, no pooling."""
    model = timm.create_model("resnet18", num_classes=classes)
    model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model
