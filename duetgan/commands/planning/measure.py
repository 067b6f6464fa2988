"""Survey the images, measure this machine, and write the plan of a quickstart.

The command is `duet quickstart-plan SOURCE --out F`. It runs in a separate process, whose end frees
the memory of the measured networks before training begins.
"""

import functools
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from duetgan.commands.planning.given import (
    SAMPLE,
    Machine,
    Speed,
    Survey,
    Weights,
    add_request_options,
    request_words,
)
from duetgan.commands.planning.plan import Plan, choose
from duetgan.data.errors import ImageError
from duetgan.data.images.values import bring, kind, native
from duetgan.data.packing.sources import open_source
from duetgan.data.packing.sources.base import first_of
from duetgan.utils import machine
from duetgan.utils.config.cli import TABLE_OPTIONS, Parser, table_words
from duetgan.utils.errors import UserError, refuse, require_same_classes
from duetgan.utils.files import as_json, write_atomic
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.machine import cores
from duetgan.utils.text import columns, duration

DECODED = 200  # images that a survey decodes, evenly spaced
SQUARE = 0.8  # shorter side / longer side; below it a square crop removes more than a fifth
FEWEST = 10  # fewer images cannot be split into training and held-out images
NOISE = 64  # images per file of random pixels, on which speeds are measured
# Weights to download. The Frechet distance uses ResNet-50's features, too.
DEFAULT_NETWORK, DEFAULT_WEIGHTS = "resnet50", "IMAGENET1K_V1"
# Seconds that a command takes at its end: the last checkpoint, curves, the report.
CLOSING = 4.0


# --- the images


def survey(spec: str, options: Namespace | None = None) -> Survey:
    """Return a survey of the images in `spec`, a folder, zip or table.

    `options` may name the columns of a table. Raises UserError if the images are unsuitable.
    """
    chosen = {name: getattr(options, name, None) for name in TABLE_OPTIONS}
    with open_source(spec, **chosen) as source:
        count = len(source)
        refuse(
            (count < FEWEST, f"{spec}: holds {count} images; give {FEWEST} or more"),
            (
                source.label_sets is not None,
                f"{spec}: its images have several labels; pack them, and train with --loss.kind bce",
            ),
        )
        sizes = np.bincount(source.labels(), minlength=max(1, len(source.classes)))
        started = time.perf_counter()
        rows = np.unique(np.linspace(0, count - 1, DECODED).astype(int)).tolist()
        # of each image: its format, its sides in ascending order, and True if it is grey
        decoded: list[tuple[ImageSpec, list[int], bool]] = []
        unreadable = ""
        for row in rows:
            try:
                values = native(source.content(row))
                image_spec = kind(values)
                pixels = bring(values, ImageSpec(3, 0, 0))
                is_grey = bool((pixels == pixels[..., :1]).all())
                decoded.append((image_spec, sorted(pixels.shape[:2]), is_grey))
            except ImageError as error:
                unreadable = unreadable or f"{source.item_name(row)} {error}"
        if not decoded:
            raise UserError(
                f"{source.name}: none of its images can be read; the first: {unreadable}: give image files"
            )
        seconds = (time.perf_counter() - started) / len(rows)
        held_out = 0
        if first_of("test", source.splits):
            with open_source(spec, split="test", **chosen) as test:
                # A test part without labels cannot evaluate a classifier.
                if test.classes or not source.classes:
                    require_same_classes(
                        f"{spec}, its test part", test.classes, "the training part", source.classes
                    )
                    held_out = len(test)
        if source.classes and not held_out and sizes.max() < 2:
            raise UserError(
                f"{spec}: each class has one image; give two or more of some, for one to be held out"
            )
        groups = len(set(source.grouping.names)) if source.grouping else 0
        if groups and held_out:
            raise UserError(
                f"{spec}: has a held-out part of its own; leave out --group-column and --group-from"
            )
    specs, sides, grey = zip(*decoded, strict=True)
    return Survey(
        source=spec,
        options=table_words(options) if options else [],
        count=count,
        held_out=held_out,
        groups=groups,
        unlabelled=source.unlabelled,
        classes=len(source.classes),
        smallest_class=int(sizes.min()),
        largest_class=int(sizes.max()),
        side=int(median(shorter for shorter, _ in sides)),
        oblong=sum(shorter < SQUARE * longer for shorter, longer in sides) / len(sides),
        channels=1 if all(grey) else 3,
        transparent=any(image_spec.alpha for image_spec in specs),
        deep=any(image_spec.deep for image_spec in specs),
        unreadable=unreadable,
        seconds=seconds,
    )


# --- the machine


class ThisMachine(Machine):
    """The machine that runs this process. Each speed is measured once and then cached.

    Args:
        folder: folder for files of random images.
        weights: the user's file of ImageNet weights, if there is one.
        tuning: True if the classifier may be fine-tuned.
        side: side in px of the images that measure `features_per_second`.
    """

    def __init__(self, folder: Path, weights: str | None, *, tuning: bool, side: int = 64) -> None:
        started = time.perf_counter()
        import duetgan.metrics.features.extractors
        import duetgan.training.engine.speed  # noqa: F401

        self.start = 2 * (time.perf_counter() - started) + CLOSING
        self.folder = folder
        self.cores = cores()
        self.weights = weights_at_hand(weights) if tuning else None
        self.side = side
        self._speeds: dict[tuple[object, ...], Speed] = {}

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
        """Measure and print the speed of a few training steps on noise of `side` px."""
        from duetgan.training.engine.speed import measure_recipe

        key = (config, *overrides, side, images.channels, images.classes)
        if key not in self._speeds:
            noise = str(self._noise(side, images.channels, images.classes))
            data = ["--data.path", noise, "--data.val-path", "null"]
            if "--model.weights" in overrides:  # The speed does not depend on the weights.
                data += ["--model.weights", "null", "--model.normalise", "imagenet"]
            measured = measure_recipe(config, [*overrides, *data])
            self._speeds[key] = Speed(measured.precision, measured.images_per_second)
            options = dict(pairwise(overrides))
            label = f"{Path(config).stem}, {side} px"
            if base := options.get("--generator.channel-base"):
                label += f", {int(base) // side} channels"
            text = f"training at {measured.images_per_second:,.0f} images/s in {measured.precision}"
            print(f"  {label}: {text}", flush=True)
        return self._speeds[key]

    def _noise(self, side: int, channels: int, classes: int) -> Path:
        from duetgan.data.packing.records import pack_arrays

        file = self.folder / f"{side}-{channels}-{classes}.lmdb"
        if not file.exists():
            count = max(NOISE, classes)
            images = np.random.default_rng(0).integers(
                0, 256, (count, channels, side, side), np.uint8
            )
            names = [f"{label:05}" for label in range(classes)]
            pack_arrays(file, images, np.arange(count) % max(1, classes), names, source="noise")
        return file


def weights_at_hand(requested: str | None) -> Weights | None:
    """Return the ImageNet weights from which the classifier is fine-tuned, or None.

    This is the `requested` file, else ResNet-50's weights for the Frechet distance, else
    torchvision's weights of DEFAULT_NETWORK, which are downloaded if necessary; if that fails, the
    reason is printed.

    Raises UserError for a requested file that is missing or of an unknown network.
    """
    from torchvision.models import get_model_weights

    from duetgan.metrics.features.extractors import find_weights
    from duetgan.models.weights import (
        cached_weights,
        missing_published,
        network_of,
        read_state_dict,
    )

    file = find_weights(requested)
    if file is None:
        url = get_model_weights(DEFAULT_NETWORK)[DEFAULT_WEIGHTS].url
        if reason := missing_published(url, f"torchvision's {DEFAULT_NETWORK} {DEFAULT_WEIGHTS}"):
            print(
                f"training the classifier from scratch, because {reason}, or give --weights FILE",
                flush=True,
            )
        file = cached_weights(DEFAULT_NETWORK)
    if file is None:
        return None
    state, metadata = read_state_dict(file)
    name = network_of(state)
    if name is None:
        raise UserError(
            f"--weights {file}: is no ResNet, ConvNeXt or EfficientNet; give another file, or none"
        )
    return Weights(str(file), name, metadata.get("stride", "").startswith("conv1"))


# --- the plan


def plan_lines(plan: Plan) -> list[str]:
    """Return the lines that print a plan: settings with reasons, lengths and expected times, but
    not the survey.
    """
    if plan.quick:
        return [*plan.notes, "only a few training steps of each (--quick)"]
    lines = list(plan.notes)
    for task, training in plan.trainings.items():
        epochs = training.steps * training.batch_size / plan.training_images
        lines.append(
            f"{'GAN' if task == 'gan' else task}: {training.steps:,} steps of "
            f"{training.batch_size} images, each image seen {epochs:,.1f} times, "
            f"at {training.images_per_second:,.0f} images/s in {training.precision}"
        )
    rows = [(name, duration(seconds)) for name, seconds in plan.seconds.items()]
    end = time.strftime("%H:%M", time.localtime(time.time() + plan.total))
    rows.append(
        ("in total", f"{duration(plan.total)} of --minutes {plan.minutes:g}, until about {end}")
    )
    return [
        *lines,
        "expected time on this machine:",
        *(f"  {line}" for line in columns(rows, "<").splitlines()),
    ]


def make_plan(options: Namespace) -> Plan:
    """Survey the images, measure this machine unless `options.quick`, and plan.

    Raises UserError.
    """
    images = survey(options.source, options)
    print(f"images: {images.text()}", flush=True)
    request = {"request": request_words(options), "seed": options.seed}
    if options.quick:
        unmeasured = Machine()
        if options.weights:
            unmeasured.weights = weights_at_hand(options.weights)
        plan = choose(images, unmeasured, minutes=options.minutes, quick=True)
        return plan.model_copy(update=request)
    print("measuring this machine:", flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tuning = images.classes > 1 and (bool(options.weights) or options.source != SAMPLE)
        side = min(64, images.side)
        this_machine = ThisMachine(Path(folder), options.weights, tuning=tuning, side=side)
        busy_cores = machine.busy_since_start()
        # Planning measures speeds; the second call uses them, and counts the time spent.
        choose(images, this_machine, minutes=options.minutes)
        spent = time.perf_counter() - start
        plan = choose(images, this_machine, minutes=options.minutes, spent=spent)
    if busy_cores > machine.TOLERATED_LOAD:
        plan.notes.append(
            f"{machine.load_text(busy_cores)}: the plan uses the remaining cores; for more training steps "
            "stop these programs, remove this folder and start again"
        )
    return plan.model_copy(update=request)


def main(argv: list[str]) -> None:
    parser = Parser(
        prog="duet quickstart-plan",
        description="Survey images, measure this machine, and make a plan.",
    )
    add_request_options(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="plan.json")
    options = parser.parse_args(argv)
    plan = make_plan(options)
    print("\n".join(plan_lines(plan)), flush=True)
    write_atomic(options.out, as_json(plan.model_dump()))
