"""This machine, measured: `python -m planning.here SOURCE --out plan.json` looks, measures, chooses and says so.

A process of its own, so that the memory of the networks that are measured is free again before anything is trained.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planning.choice import choose
from planning.plan import Plan, Speed
from planning.survey import survey
from utils.config.cli import Parser
from utils.errors import UserError
from utils.files import write_atomic
from utils.memory import cores
from utils.script import run_cli
from utils.text import columns, duration

BUSY = 1.5  # processes that want a core, for each core, before anything is measured
NOISE = 64  # images of the files that speeds are measured on
CLOSING = 4.0  # seconds that a command takes after its work: the last checkpoint, curves, the report


class Here:
    """This machine (`planning.choice.Machine`); what was measured once is known."""

    def __init__(self, folder: Path, weights: str | None, *, tuning: bool) -> None:
        """Args: `folder` for files of noise; `weights` as given by the user; `tuning`: whether they may be used."""
        from metrics.features.extractors import find_weights

        self.folder, self.cores = folder, cores()
        self.features_file = find_weights(None)
        self.weights = weights_at_hand(weights) if tuning else None
        self.features_per_second = 0.0
        self.start = 0.0
        self._known: dict[tuple[Any, ...], Speed] = {}

    def look(self, side: int, start: float) -> None:
        """Measure what is the same for all recipes; `start`: seconds that this process needed for its imports."""
        self.start = start + CLOSING
        if self.features_file is not None:
            self.features_per_second = _features_per_second(self.features_file, side)

    def speed(self, config: str, overrides: Sequence[str], *, side: int, channels: int, classes: int) -> Speed:
        """Train a few steps on noise of that shape."""
        from training.engine.speed import measure_recipe

        key = (config, *overrides, side, channels, classes)
        if key not in self._known:
            data = ["--data.path", str(self._noise(side, channels, classes)), "--data.val-path", "null"]
            if "--model.weights" in overrides:  # as fast without them
                data += ["--model.weights", "null", "--model.normalise", "imagenet"]
            found = measure_recipe(config, [*overrides, *data])
            self._known[key] = Speed(found.precision, found.images_per_second, found.ratio)
            print(f"  {Path(config).stem}, {side} px: {_told(self._known[key])}", flush=True)
        return self._known[key]

    def _noise(self, side: int, channels: int, classes: int) -> Path:
        """A packed file of noise."""
        from data.pack import pack
        from data.sources.base import ArraySource

        file = self.folder / f"{side}-{channels}-{classes}.lmdb"
        if not file.exists():
            count = max(NOISE, classes)
            images = np.random.default_rng(0).integers(0, 256, (count, side, side, channels), np.uint8)
            names = [f"{label:05}" for label in range(classes)]
            labels = np.arange(count) % max(1, classes)
            pack(ArraySource("noise", images, labels, names), file, workers=0, duplicates=False)
        return file


class Unmeasured:
    """A machine for `--quick`, where lengths do not matter."""

    start, cores, features_per_second = 0.0, 1, 0.0
    weights: tuple[str, str, bool] | None = None

    def speed(self, config: str, overrides: Sequence[str], *, side: int, channels: int, classes: int) -> Speed:
        """A guess."""
        return Speed("auto", 1000.0, None)


def _told(speed: Speed) -> str:
    ratio = f" ({speed.ratio:.2f} times the slower precision)" if speed.ratio and math.isfinite(speed.ratio) else ""
    return f"{speed.images_per_second:,.0f} images/s of training in {speed.precision}{ratio}"


def _features_per_second(file: Path, side: int) -> float:
    import torch

    from metrics.features.extractors import ResNet50Features

    extractor = ResNet50Features(file)
    images = torch.zeros(16, 3, side, side, dtype=torch.uint8)
    extractor(images)
    started = time.perf_counter()
    extractor(images)
    return len(images) / (time.perf_counter() - started)


def weights_at_hand(given: str | None) -> tuple[str, str, bool] | None:
    """ImageNet weights for fine-tuning that need no download: file, name of its network, whether it strides as He's.

    The given file, else what `metrics.features.extractors.find_weights` finds, else torchvision's own in torch's
    cache. Raises UserError for a given file that is no known network's.
    """
    from metrics.features.extractors import find_weights
    from models.weights import published_at_hand, read_state_dict

    file = find_weights(given) or published_at_hand("resnet50")
    if file is None:
        return None
    state, about = read_state_dict(file)
    name = _network_of({key: tuple(value.shape) for key, value in state.items()})
    if name is None:
        raise UserError(f"--weights {file}: is no ResNet, ConvNeXt or EfficientNet; give another file, or none")
    return str(file), name, about.get("stride", "").startswith("conv1")


def _network_of(given: dict[str, tuple[int, ...]]) -> str | None:
    """The network that has parameters of these names and shapes, but for the head."""
    import torch

    from models.backbones.registry import BACKBONES

    for name, backbone in BACKBONES.items():
        with torch.device("meta"):
            network = backbone.build(name, channels=3, stem="imagenet", he_strides=False)
        own = {key: tuple(value.shape) for key, value in network.named_parameters()}
        if all(given.get(key) == shape for key, shape in own.items() if not key.startswith(f"{backbone.head}.")):
            return name
    return None


def plan_lines(plan: Plan) -> list[str]:
    """The plan for a person, but for the images: what and why, the lengths, and how long each part takes."""
    lines = list(plan.notes)
    for name, training in (("classifier", plan.classifier), ("GAN", plan.gan)):
        if training is not None and not plan.quick:
            seen = training.steps * training.batch_size / plan.training_images
            lines.append(
                f"{name}: {training.steps:,} steps of {training.batch_size} images, each image seen {seen:,.1f} times, "
                f"at {training.images_per_second:,.0f} images/s in {training.precision}"
            )
    if plan.quick:
        return [*lines, "a few steps of each only (--quick)"]
    rows = [(name, duration(seconds)) for name, seconds in plan.seconds.items()]
    end = time.strftime("%H:%M", time.localtime(time.time() + plan.total))
    rows.append(("in all", f"{duration(plan.total)} of --minutes {plan.minutes:g}, until about {end}"))
    return [*lines, "this will take here:", *(f"  {line}" for line in columns(rows, "<").splitlines())]


def make_plan(source: str, minutes: float, weights: str | None, quick: bool) -> Plan:
    """Look at the images, measure, choose. Raises UserError."""
    found = survey(source)
    print(f"images: {found.text()}", flush=True)
    if quick:
        return choose(found, Unmeasured(), minutes=minutes, quick=True)
    print("measuring this machine:", flush=True)
    started = time.perf_counter()
    import training.engine.speed  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        here = Here(Path(folder), weights, tuning=source != "sample")
        here.look(min(64, found.side), 2 * (time.perf_counter() - started))
        busy = os.getloadavg()[0]  # before this process itself counts
        plan = choose(found, here, minutes=minutes)
    if busy > BUSY * here.cores:
        plan.notes.append(
            f"other programs keep this machine busy (load {busy:.1f} on {here.cores} cores), which makes it many times "
            "slower: stop them, remove plan.json and start again"
        )
    return plan


def main(argv: list[str]) -> None:
    """The command line; quickstart.py calls it."""
    parser = Parser(prog="python -m planning.here", description="Look at images, measure this machine, make a plan.")
    parser.add_argument("source")
    parser.add_argument("--out", type=Path, required=True, metavar="plan.json")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--weights", metavar="FILE")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    plan = make_plan(options.source, options.minutes, options.weights, options.quick)
    print("\n".join(plan_lines(plan)), flush=True)
    write_atomic(options.out, f"{json.dumps(plan.tree(), indent=1)}\n".encode())


if __name__ == "__main__":
    sys.exit(run_cli(main))
