"""Survey the images, measure this machine, and write the plan of a quickstart.

The command is `duet quickstart-plan SOURCE --out F`. The quickstart runs it in a separate process,
whose end frees the memory of the measured networks before training begins.
"""

import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from duetgan.commands.planning.plan import SAMPLE, Machine, Plan, Speed, Survey, Weights, choose
from duetgan.data.errors import ImageError
from duetgan.data.images.values import bring, native
from duetgan.data.packing.sources import open_source
from duetgan.data.packing.sources.base import first_of
from duetgan.utils.config.cli import (
    TABLE_OPTIONS,
    Parser,
    add_table_options,
    number,
    table_words,
)
from duetgan.utils.errors import UserError, refuse, require_same_classes
from duetgan.utils.files import as_json, write_atomic
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.machine import cores
from duetgan.utils.text import duration

WEEK = 7 * 24 * 60  # largest --minutes
DECODED = 200  # images that a survey decodes, evenly spaced
FEWEST = 10  # fewer images cannot be split into training and held-out images
NOISE = 64  # images per file of random pixels, on which speeds are measured
# Weights to download. The Frechet distance uses ResNet-50's features, too.
DEFAULT_NETWORK, DEFAULT_WEIGHTS = "resnet50", "IMAGENET1K_V1"
# Seconds that a command takes to import its modules, and at its end: the last checkpoint, curves,
# the report.
START = 9.0


def add_request_options(parser: ArgumentParser) -> None:
    """Add the arguments that determine a plan: the images and the options."""
    add = parser.add_argument
    add(
        "source",
        nargs="?",
        default=SAMPLE,
        metavar="FOLDER",
        help="images: a folder, zip or table (default: the sample images)",
    )
    add(
        "--minutes",
        type=number(float, 1, WEEK),
        default=15.0,
        help="time limit in minutes, for everything",
    )
    add_table_options(parser)
    weights = "ImageNet weights for the classifier (default: see docs/your-data.md)"
    add("--weights", metavar="FILE", help=weights)
    add(
        "--seed",
        type=number(int, 0),
        default=0,
        help="seed of the split and of both trainings (default: 0)",
    )
    add(
        "--quick",
        action="store_true",
        help="train only a few steps, to check that everything works",
    )


def request_words(options: Namespace) -> list[str]:
    """Return the command-line words for the options of `add_request_options`, without --minutes.

    A parser with these options turns the words into the same values.
    """
    words = [options.source, *table_words(options)]
    if options.weights:
        words += ["--weights", options.weights]
    if options.seed:
        words += ["--seed", str(options.seed)]
    if options.quick:
        words.append("--quick")
    return words


# --- the images


def survey(spec: str, options: Namespace | None = None) -> Survey:
    """Return the properties of the images in `spec`, a source for `open_source`.

    At most DECODED of the images are decoded. Raises UserError if the images are unsuitable, for
    example too few.

    Args:
        options: the user's options, which may name the columns of a table.
    """
    chosen = {name: getattr(options, name, None) for name in TABLE_OPTIONS}
    with open_source(spec, **chosen) as source:
        count = len(source)
        sizes = np.bincount(source.labels(), minlength=max(1, len(source.classes)))
        groups = len(set(source.grouping.names)) if source.grouping else 0
        held_out = 0
        if first_of("test", source.splits):
            with open_source(spec, split="test", **chosen) as test:
                # A test part without labels cannot evaluate a classifier.
                if test.classes or not source.classes:
                    require_same_classes(
                        f"{spec}, its test part", test.classes, "the training part", source.classes
                    )
                    held_out = len(test)
        refuse(
            (count < FEWEST, f"{spec}: holds {count} images; give {FEWEST} or more"),
            (
                source.label_sets is not None,
                f"{spec}: its images have several labels; pack them, and train with --loss.kind bce",
            ),
            (
                source.classes and not held_out and sizes.max() < 2,
                f"{spec}: each class has one image; give two or more of some, for one to be held out",
            ),
            (
                groups and held_out,
                f"{spec}: has a held-out part of its own; leave out --group-column and --group-from",
            ),
        )
        started = time.perf_counter()
        rows = np.unique(np.linspace(0, count - 1, DECODED).astype(int)).tolist()
        sides = []
        is_grey = True
        unreadable = ""
        for row in rows:
            try:
                pixels = bring(native(source.content(row)), ImageSpec(3, 0, 0))
                sides.append(min(pixels.shape[:2]))
                is_grey = is_grey and bool((pixels == pixels[..., :1]).all())
            except ImageError as error:
                unreadable = unreadable or f"{source.item_name(row)} {error}"
        if not sides:
            raise UserError(
                f"{source.name}: none of its images can be read; the first: {unreadable}: give image files"
            )
    return Survey(
        source=spec,
        options=table_words(options) if options else [],
        count=count,
        held_out=held_out,
        groups=groups,
        classes=len(source.classes),
        smallest_class=int(sizes.min()),
        side=int(median(sides)),
        channels=1 if is_grey else 3,
        unreadable=unreadable,
        seconds=(time.perf_counter() - started) / len(rows),
    )


# --- the machine


class ThisMachine(Machine):
    """The machine that runs this process. Each speed is measured once and then cached.

    Args:
        folder: folder for files of random images.
        weights: the weights from which the classifier is fine-tuned.
    """

    start = START

    def __init__(self, folder: Path, weights: Weights | None) -> None:
        self.folder = folder
        self.cores = cores()
        self.weights = weights
        self._speeds: dict[tuple[object, ...], Speed] = {}

    def speed(self, config: str, overrides: Sequence[str], side: int, images: Survey) -> Speed:
        """Measure, print and return the speed of a few training steps on images of noise.

        The arguments are those of `Machine.speed`.
        """
        from duetgan.data.packing.records import pack_arrays
        from duetgan.training.engine.speed import measure_recipe

        key = (config, *overrides, side)
        if key not in self._speeds:
            noise = self.folder / f"{side}.lmdb"
            if not noise.exists():
                count = max(NOISE, images.classes)
                shape = (count, images.channels, side, side)
                pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
                names = [f"{label:05}" for label in range(images.classes)]
                labels = np.arange(count) % max(1, images.classes)
                pack_arrays(noise, pixels, labels, names, source="noise")
            data = ["--data.path", str(noise), "--data.val-path", "null"]
            if "--model.weights" in overrides:  # The speed does not depend on the weights.
                data += ["--model.weights", "null", "--model.normalise", "imagenet"]
            speed = Speed(*measure_recipe(config, [*overrides, *data]))
            self._speeds[key] = speed
            text = f"training at {speed.images_per_second:,.0f} images/s in {speed.precision}"
            print(f"  {Path(config).stem}, {side} px: {text}", flush=True)
        return self._speeds[key]


def weights_at_hand(requested: str | None) -> Weights | None:
    """Return the ImageNet weights from which the classifier is fine-tuned, or None.

    The first choice is the file `requested`. The second is the file of ResNet-50's weights for the
    Frechet distance (`find_weights`). The third is a file in torch's cache with published weights
    of DEFAULT_NETWORK. If there is none, DEFAULT_WEIGHTS are downloaded. If the download fails,
    print the reason and return None.

    Raises UserError if the file `requested`, or that of $DUET_WEIGHTS, is missing, and for weights
    of an unknown network.
    """
    from torchvision.models import get_model_weights

    from duetgan.metrics.features.extractors import find_weights
    from duetgan.models.weights import (
        cached_weights,
        missing_published,
        network_of,
        read_state_dict,
    )

    file = find_weights(requested) or cached_weights(DEFAULT_NETWORK)
    if file is None:
        url = get_model_weights(DEFAULT_NETWORK)[DEFAULT_WEIGHTS].url
        if reason := missing_published(url, f"torchvision's {DEFAULT_NETWORK} {DEFAULT_WEIGHTS}"):
            print(
                f"training the classifier from scratch, because {reason}, or give --weights FILE",
                flush=True,
            )
            return None
        file = cached_weights(DEFAULT_NETWORK)
    if file is None:
        return None
    state, metadata = read_state_dict(file)
    name = network_of(state)
    if name is None:
        raise UserError(
            f"{file}: is no ResNet, ConvNeXt or EfficientNet; give another file with --weights"
        )
    return Weights(str(file), name, metadata.get("stride", "").startswith("conv1"))


# --- the plan


def plan_lines(plan: Plan) -> list[str]:
    """Return a plan as lines for the user: settings with reasons, lengths, and expected time."""
    if plan.quick:
        return [*plan.notes, "only a few training steps for each network (--quick)"]
    lines = list(plan.notes)
    for task, training in plan.trainings.items():
        epochs = training.steps * training.batch_size / plan.training_images
        lines.append(
            f"train {task}: {training.steps:,} steps of {training.batch_size} images, each image "
            f"seen {epochs:,.1f} times, about {duration(training.seconds)}"
        )
    end = time.strftime("%H:%M", time.localtime(time.time() + plan.seconds))
    return [*lines, f"expected time: {duration(plan.seconds)}, until about {end}"]


def make_plan(options: Namespace) -> Plan:
    """Survey the images, measure this machine unless `options.quick`, and return the plan.

    Raises UserError for unsuitable images or weights.
    """
    start = time.perf_counter()
    images = survey(options.source, options)
    print(images.text(), flush=True)
    weights = None
    wants_weights = images.classes > 1 and options.source != SAMPLE and not options.quick
    if options.weights or wants_weights:
        weights = weights_at_hand(options.weights)
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine()
        machine.weights = weights
        if not options.quick:
            print("measuring this machine:", flush=True)
            machine = ThisMachine(Path(folder), weights)
            # Planning measures speeds; the second call uses them, and counts the time spent.
            choose(images, machine, minutes=options.minutes)
        spent = 0.0 if options.quick else time.perf_counter() - start
        plan = choose(images, machine, minutes=options.minutes, quick=options.quick, spent=spent)
    return plan.model_copy(update={"request": request_words(options), "seed": options.seed})


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
