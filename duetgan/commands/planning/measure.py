"""Look at the images, measure this machine, and make the plan of a quickstart: `duet
quickstart-plan SOURCE --out F`.

A process of its own, so that the memory of the networks that are measured is free again before
anything is trained.
"""

import functools
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from duetgan.commands.planning.given import Machine, Speed, Survey, Weights
from duetgan.commands.planning.plan import FEW_LABELS, HEAD_ALONE, Plan, choose
from duetgan.data.errors import ImageError
from duetgan.data.sources import open_source
from duetgan.data.sources.base import first_of
from duetgan.data.values import decode_image, kind
from duetgan.utils import threads
from duetgan.utils.config.cli import TABLE_OPTIONS, Parser, add_table_options, number, table_words
from duetgan.utils.errors import UserError, require_same_classes
from duetgan.utils.files import as_json, write_atomic
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.memory import cores
from duetgan.utils.text import columns, duration

LOOKED_AT = 200  # images that are decoded, evenly spaced
SQUARE = 0.8  # shorter side over the longer: below, a square crop takes more than a fifth
FEWEST = 10  # images; with fewer nothing can be learnt and held out
NOISE = 64  # images of the files that speeds are measured on
# of torch's cache: compared at most; bytes of a file, such as ResNet-50's
NETWORKS, SMALL = 3, 125_000_000
# its features are those of the Frechet distance, too
DEFAULT_NETWORK, DEFAULT_WEIGHTS = "resnet50", "IMAGENET1K_V1"
# seconds that a command takes after its work: the last checkpoint, curves, the report
CLOSING = 4.0


# --- the images


def survey(spec: str, options: Namespace | None = None) -> Survey:
    """Look at what `spec` names (see `data.sources.open_source`). Raises UserError where nothing
    can be made of it.
    """
    chosen = {name: getattr(options, name, None) for name in TABLE_OPTIONS}
    with open_source(spec, **chosen) as source:
        count = len(source)
        if count < FEWEST:
            raise UserError(f"{spec}: holds {count} images; give {FEWEST} or more")
        if source.sets is not None:
            raise UserError(
                f"{spec}: its images have several labels; pack them, and train with --loss.kind bce"
            )
        sizes = np.bincount(source.labels(), minlength=max(1, len(source.classes)))
        started = time.perf_counter()
        rows = np.unique(np.linspace(0, count - 1, LOOKED_AT).astype(int)).tolist()
        # what an image is, its sides, whether all of it is grey
        seen: list[tuple[ImageSpec, list[int], bool]] = []
        unreadable = ""
        for row in rows:
            try:
                content = source.content(row)
                what, pixels = kind(content), decode_image(content, ImageSpec(3, 0, 0))
                seen.append(
                    (what, sorted(pixels.shape[:2]), bool((pixels == pixels[..., :1]).all()))
                )
            except ImageError as error:
                unreadable = unreadable or f"{source.item_name(row)} {error}"
        if not seen:
            raise UserError(
                f"{source.name}: none of its images can be read; the first: {unreadable}: give image files"
            )
        seconds = (time.perf_counter() - started) / len(rows)
        held_out = 0
        if first_of("test", source.splits):
            with open_source(spec, split="test", **chosen) as test:
                # else a part that is to be named: nothing to evaluate with
                if test.classes or not source.classes:
                    require_same_classes(
                        f"{spec}, its test part", test.classes, "the training part", source.classes
                    )
                    held_out = len(test)
        if source.classes and not held_out and sizes.max() < 2:
            raise UserError(
                f"{spec}: each class has one image; give two or more of some, for one to be held out"
            )
    kinds, sides, grey = zip(*seen, strict=True)
    return Survey(
        source=spec,
        options=table_words(options) if options else [],
        count=count,
        held_out=held_out,
        unlabelled=source.unlabelled,
        classes=len(source.classes),
        smallest_class=int(sizes.min()),
        largest_class=int(sizes.max()),
        side=int(median(shorter for shorter, _ in sides)),
        oblong=sum(shorter < SQUARE * longer for shorter, longer in sides) / len(sides),
        channels=1 if all(grey) else 3,
        transparent=any(each.alpha for each in kinds),
        deep=any(each.deep for each in kinds),
        unreadable=unreadable,
        seconds=seconds,
    )


# --- the machine


class ThisMachine(Machine):
    """What was measured once is known."""

    def __init__(
        self, folder: Path, weights: Sequence[str], *, tuning: bool, side: int = 64
    ) -> None:
        """Args: `folder` for files of noise; `weights` as given by the user; `tuning`: whether they
        may be used; `side` of the images in px.
        """
        started = time.perf_counter()
        import duetgan.metrics.features.extractors
        import duetgan.training.engine.speed  # noqa: F401

        self.start = 2 * (time.perf_counter() - started) + CLOSING
        self.folder, self.cores = folder, cores()
        self.weights = weights_at_hand(weights) if tuning else ()
        self.side, self._known, self._labels = side, dict[tuple[Any, ...], Speed](), list[str]()

    @functools.cached_property
    def features_per_second(self) -> float:  # type: ignore[override]
        import torch

        from duetgan.metrics.features.extractors import find_weights, resnet50_features
        from duetgan.utils.distributed.collectives import choose_device

        if (weights := find_weights(None)) is None:
            return 0.0
        extractor = resnet50_features(weights, device=choose_device(None))
        images = torch.zeros(16, 3, self.side, self.side, dtype=torch.uint8)
        extractor(images)
        started = time.perf_counter()
        extractor(images)
        return len(images) / (time.perf_counter() - started)

    def speed(self, config: str, overrides: Sequence[str], side: int, images: Survey) -> Speed:
        """Train a few steps on noise of that shape."""
        from duetgan.training.engine.speed import measure_recipe, times

        key = (config, *overrides, side, images.channels, images.classes)
        if key not in self._known:
            noise = str(self._noise(side, images.channels, images.classes))
            data = ["--data.path", noise, "--data.val-path", "null"]
            data += ["--unlabelled.path", noise] if config == FEW_LABELS else []
            if "--model.weights" in overrides:  # as fast without them
                data += ["--model.weights", "null", "--model.normalise", "imagenet"]
            measured = measure_recipe(config, [*overrides, *data])
            self._known[key] = Speed(measured.precision, measured.images_per_second)
            compared = (
                f" ({times(measured.ratio)} the speed of the other precision)"
                if measured.ratio
                else ""
            )
            text = f"{measured.images_per_second:,.0f} images/s of training in {measured.precision}{compared}"
            base, name = map(
                dict(pairwise(overrides)).get, ("--generator.channel-base", "--model.name")
            )
            what = f", {int(base) // side} channels" if base else f", {name}" if name else ""
            what += ", head alone" if HEAD_ALONE in overrides else ""
            label = f"{Path(config).stem}, {side} px{what}"
            again = sum(each == label for each in self._labels)
            self._labels.append(label)
            what += f", variant {again + 1}" if again else ""
            print(f"  {Path(config).stem}, {side} px{what}: {text}", flush=True)
        return self._known[key]

    def _noise(self, side: int, channels: int, classes: int) -> Path:
        from duetgan.data.records import pack_arrays

        file = self.folder / f"{side}-{channels}-{classes}.lmdb"
        if not file.exists():
            count = max(NOISE, classes)
            images = np.random.default_rng(0).integers(
                0, 256, (count, channels, side, side), np.uint8
            )
            names = [f"{label:05}" for label in range(classes)]
            pack_arrays(file, images, np.arange(count) % max(1, classes), names, source="noise")
        return file


def weights_at_hand(given: Sequence[str]) -> list[Weights]:
    """Return ImageNet weights for fine-tuning.

    The given files, else what `find_weights` finds, then of torchvision's own in torch's cache the
    SMALL ones, the best on ImageNet first, NETWORKS in all. If there are none, torchvision's of
    DEFAULT_NETWORK are downloaded; without a network the reason is printed. Raises UserError for a
    given file that is no known network's.
    """
    from torchvision.models import get_model_weights

    from duetgan.metrics.features.extractors import find_weights
    from duetgan.models.registry import BACKBONES
    from duetgan.models.weights import (
        missing_published,
        network_of,
        published_at_hand,
        read_state_dict,
    )

    def accuracy(name: str) -> float:
        return max(
            each.meta["_metrics"]["ImageNet-1K"]["acc@1"] for each in get_model_weights(name)
        )

    files = [find_weights(file) for file in given] or [find_weights(None)]
    if not given:
        cached = {name: file for name in BACKBONES if (file := published_at_hand(name))}
        small = [name for name, file in cached.items() if file.stat().st_size < SMALL]
        files += [cached[name] for name in sorted(small, key=accuracy, reverse=True)]
    if not any(files):
        url = get_model_weights(DEFAULT_NETWORK)[DEFAULT_WEIGHTS].url
        if why := missing_published(url, f"torchvision's {DEFAULT_NETWORK} {DEFAULT_WEIGHTS}"):
            print(
                f"training the classifier from scratch, because {why}, or give --weights FILE",
                flush=True,
            )
        files = [published_at_hand(DEFAULT_NETWORK)]
    found: list[Weights] = []
    for file in filter(None, files):
        state, about = read_state_dict(file)
        if (name := network_of(state)) is None:
            raise UserError(
                f"--weights {file}: is no ResNet, ConvNeXt or EfficientNet; give another file, or none"
            )
        if given or name not in [each.network for each in found]:
            found.append(Weights(str(file), name, about.get("stride", "").startswith("conv1")))
    return found[: len(given) or NETWORKS]


# --- the plan


def plan_lines(plan: Plan) -> list[str]:
    """The plan for a person, but for the images: what and why, the lengths, and how long each part
    takes.
    """
    if plan.quick:
        return [*plan.notes, "a few steps of each only (--quick)"]
    lines = list(plan.notes)
    for task, training in plan.trainings.items():
        images = plan.training_images + plan.survey.unlabelled * (task == "gan" and plan.pooled)
        seen = training.steps * training.batch_size / images
        lines.append(
            f"{'GAN' if task == 'gan' else task}: {training.steps:,} steps of {training.batch_size} images, each image "
            f"seen {seen:,.1f} times, at {training.images_per_second:,.0f} images/s in {training.precision}"
        )
    rows = [(name, duration(seconds)) for name, seconds in plan.seconds.items()]
    end = time.strftime("%H:%M", time.localtime(time.time() + plan.total))
    rows.append(
        ("in all", f"{duration(plan.total)} of --minutes {plan.minutes:g}, until about {end}")
    )
    return [
        *lines,
        "this will take here:",
        *(f"  {line}" for line in columns(rows, "<").splitlines()),
    ]


def make_plan(
    source: str,
    minutes: float,
    weights: Sequence[str],
    quick: bool,
    options: Namespace | None = None,
) -> Plan:
    """Look at the images, measure, choose. Raises UserError."""
    images = survey(source, options)
    print(f"images: {images.text()}", flush=True)
    if quick:
        machine = Machine()
        machine.weights = weights_at_hand(weights) if weights else ()
        return choose(images, machine, minutes=minutes, quick=True)
    print("measuring this machine:", flush=True)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tuning = bool(weights) or source != "sample"
        tuning = tuning and images.classes > 1
        here = ThisMachine(Path(folder), weights, tuning=tuning, side=min(64, images.side))
        others = threads.seen()  # since this process began
        choose(images, here, minutes=minutes)  # measures
        plan = choose(images, here, minutes=minutes, spent=time.perf_counter() - begun)
    if others > threads.ROOM:
        plan.notes.append(
            f"{threads.others_text(others)}: the plan reckons with the rest; for a longer training stop them, remove "
            "this folder and start again"
        )
    return plan


def main(argv: list[str]) -> None:
    parser = Parser(
        prog="duet quickstart-plan",
        description="Look at images, measure this machine, make a plan.",
    )
    parser.add_argument("source")
    add_table_options(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="plan.json")
    parser.add_argument("--minutes", type=number(float, 1), default=15.0)
    parser.add_argument("--weights", metavar="FILE", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    plan = make_plan(options.source, options.minutes, options.weights, options.quick, options)
    plan = plan.model_copy(update={"seed": options.seed})
    print("\n".join(plan_lines(plan)), flush=True)
    write_atomic(options.out, as_json(plan.model_dump()))
