"""Others' programs on the same device: timm's training step, and stylegan2-ada-pytorch by its own command."""

import importlib
import json
import shutil
import statistics
import subprocess
import sys
import time
import traceback
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import scaling
from benchmarks.classifying.contenders import import_timm, small_resnet18
from benchmarks.gpu.book import Book, Missed, NotThere, Setting, first_line
from benchmarks.gpu.steps import BLOCK, REPEATS, mean_seconds, measured, precision_of, trial_seconds
from benchmarks.gpu.wheels import last_line
from duetgan.training.engine.speed import Trial
from duetgan.utils.errors import UserError

OURS = {"timm": "cifar10_classifier_gpu", "stylegan2-ada-pytorch": "stylegan2_256"}
SIDE, BATCH = 256, 32  # of its configuration paper256, on one GPU
THEIRS = ("--gpus=1", "--cfg=paper256", f"--batch={BATCH}", "--aug=noaug", "--metrics=none", "--snap=999", "--kimg=8")


class TimmStep:
    """timm's pieces as its train.py puts them together with `--amp --channels-last`; images lie on the device."""

    def __init__(self, config: Any, setting: Setting, samples: int) -> None:
        timm, device = import_timm(), setting.torch_device
        precision = precision_of(config, device)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        self.setting = setting
        self.autocast = torch.autocast(device.type, dtype, enabled=precision != "fp32")
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self.model = small_resnet18(timm, 10).to(device).to(memory_format=torch.channels_last)
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


def against_timm(setting: Setting, book: Book) -> None:
    """A ResNet-18 at 32 px: our whole step, with augmentation, average and guard, against timm's."""
    peers = setting.bundle / "peers" / "timm"
    if peers.is_dir() and str(peers) not in sys.path:
        sys.path.append(str(peers))
    try:
        timm = import_timm()
    except UserError:
        raise NotThere("timm") from None
    config, samples = scaling.recipe(OURS["timm"]).changed(compile="off"), 8 if setting.small else 256
    reader: Any = scaling.Reader(scaling.PRESETS[OURS["timm"]])
    trial = Trial(config, samples, reader, setting.torch_device)
    trial.precision.switch(precision_of(config, setting.torch_device))
    ours, theirs, turns = trial_seconds(setting, trial), TimmStep(config, setting, samples).seconds, []
    block = 0.0 if setting.small else BLOCK
    for _ in range(1 if setting.small else REPEATS):
        turns.append((mean_seconds(ours, trial.step_fractions, block), mean_seconds(theirs, {0: 1.0}, block)))
    ratio = statistics.median(b / a for a, b in turns)
    rates = [samples / statistics.median(column) for column in zip(*turns, strict=True)]
    figures = dict(zip(("images_per_second", "their_images_per_second"), rates, strict=True))
    book.row("timm", version=str(timm.__version__), samples=samples, **figures, vs_peer_ratio=ratio)


def random_zip(path: Path, side: int, count: int) -> None:
    """A data set of theirs: PNG files of random pixels."""
    random = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(count):
            content = BytesIO()
            Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(content, "PNG")
            archive.writestr(f"{number:05}.png", content.getvalue())


def seconds_of_kimg(folder: Path) -> float:
    """Of the last tick that stylegan2-ada-pytorch has written. Raises Missed for none but the first, which warms up."""
    files = sorted(folder.glob("*/stats.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    if len(rows) < 2:
        raise Missed("stylegan2-ada-pytorch: not one tick after the first in this time")
    return float(rows[-1]["Timing/sec_per_kimg"]["mean"])


def against_stylegan(setting: Setting, book: Book) -> None:
    """StyleGAN2 at 256 px by its own command, as long as there is time, against our preset of the same size."""
    name = "stylegan2-ada-pytorch"
    script = setting.bundle / "peers" / name / "train.py"
    if not script.is_file():
        raise NotThere(name)
    work = setting.out / "peers"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    random_zip(work / "random.zip", SIDE, 8 if setting.small else 512)
    command = [sys.executable, str(script), f"--outdir={work}", f"--data={work}/random.zip", *THEIRS]
    log = work / "log"
    with log.open("w") as file:
        try:
            done = subprocess.run(command, cwd=script.parent, stdout=file, stderr=file, timeout=0.7 * setting.seconds)
            if done.returncode:
                raise Missed(f"{name} ended with {done.returncode}: {last_line(log.read_text(errors='replace'))[:200]}")
        except subprocess.TimeoutExpired:
            pass  # its ticks are on the disk
    theirs = 1000 / seconds_of_kimg(work)
    book.row(name, their_images_per_second=theirs)
    if not setting.small:
        config = scaling.recipe(OURS[name])
        reader: Any = scaling.Reader(scaling.PRESETS[OURS[name]])
        found = measured(config, reader, config.micro(1), setting)
        book.row(name, **found, vs_peer_ratio=float(found["images_per_second"]) / theirs)


def peers(setting: Setting, book: Book) -> None:
    """Both, one's fault not the other's; NotThere where neither is there."""
    absent, missed = [], []
    for each in (against_timm, against_stylegan):
        try:
            each(setting, book)
        except NotThere as error:
            absent.append(str(error))
            book.row(str(error), there=False)
        except Exception as error:
            traceback.print_exc()
            missed.append(f"{each.__name__}: {first_line(error)}")
    if missed:
        raise Missed("; ".join(missed))
    if len(absent) == 2:
        raise NotThere(" and ".join(absent))
