"""timm's training step on the same device, against ours with and without CUDA graphs."""

import importlib
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks import scaling
from benchmarks.classifying.contenders import import_timm, small_resnet18
from benchmarks.gpu.book import Book, NotThere, Setting
from benchmarks.gpu.steps import BLOCK, REPEATS, mean_seconds, precision_of, trial_seconds
from benchmarks.gpu.switches import WARM_UP, options
from duetgan.training.engine.speed import Trial
from duetgan.utils.errors import UserError

OURS = "cifar10_classifier_gpu"


class TimmStep:
    """timm's pieces as its train.py puts them together with `--amp --channels-last`; images lie on the device."""

    def __init__(self, config: Any, setting: Setting, samples: int) -> None:
        package, device = import_timm(), setting.torch_device
        precision = precision_of(config, device)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        self.setting = setting
        self.autocast = torch.autocast(device.type, dtype, enabled=precision != "fp32")
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self.model = small_resnet18(package, 10).to(device).to(memory_format=torch.channels_last)
        optim, loss = (importlib.import_module(f"timm.{name}") for name in ("optim", "loss"))
        self.optimizer = optim.create_optimizer_v2(self.model, opt="sgd", lr=0.1, momentum=0.9)
        self.loss = loss.LabelSmoothingCrossEntropy()
        images = torch.randn(samples, 3, 32, 32).to(memory_format=torch.channels_last)
        self.images, self.labels = images.to(device), (torch.arange(samples) % 10).to(device)

    def seconds(self, _step: int, count: int) -> float:
        """What so many steps take."""
        self.setting.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            with self.autocast:
                loss = self.loss(self.model(self.images), self.labels)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        self.setting.synchronize()
        return time.perf_counter() - begun


def timm(setting: Setting, book: Book) -> None:
    """A ResNet-18 at 32 px: our whole step, with augmentation, average and guard, against timm's."""
    peers = setting.bundle / "peers" / "timm"
    if peers.is_dir() and str(peers) not in sys.path:
        sys.path.append(str(peers))
    try:
        package = import_timm()
    except UserError:
        raise NotThere("timm") from None
    samples, block, repeats = (8, 0.0, 1) if setting.small else (256, BLOCK / 2, REPEATS)
    config = scaling.recipe(OURS)
    reader: Any = scaling.Reader(scaling.PRESETS[OURS])
    ours = {}
    for variant, graphs in (("eager", "off"), ("graphs", "auto")):
        trial = Trial(options(config, graphs=graphs), samples, reader, setting.torch_device)
        trial.precision.switch(precision_of(config, setting.torch_device))
        ours[variant] = trial_seconds(setting, trial)
        ours[variant](0, 1 if setting.small else WARM_UP)
    theirs = TimmStep(config, setting, samples).seconds
    turns = [
        (mean_seconds(theirs, {0: 1.0}, block), *(mean_seconds(run, {0: 1.0}, block) for run in ours.values()))
        for _ in range(repeats)
    ]
    peer, *seconds = (statistics.median(column) for column in zip(*turns, strict=True))
    book.row("timm", version=str(package.__version__), samples=samples, images_per_second=samples / peer)
    for number, (variant, mine) in enumerate(zip(ours, seconds, strict=True), 1):
        ratio = statistics.median(turn[0] / turn[number] for turn in turns)
        book.row(f"{OURS}, {variant}", samples=samples, images_per_second=samples / mine, vs_peer_ratio=ratio)
