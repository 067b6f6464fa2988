"""What limits training on many GPUs, calculated: gradient bytes a step against link speed, for each recipe of configs/.

`python benchmarks/scaling.py [--json] [--markdown] [--only NAME...] [--peak TFLOPS] [--efficiency SHARE]`. Nothing here
is measured on a GPU: the arithmetic of a step is counted by running the task's own step without data (fake tensors,
torch's formulas), its messages are counted from the networks' parameters, and times are those of a simple
model (`seconds`). docs/scaling.md holds the tables that `--markdown` prints.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from duetgan.data.augment.transforms import Augment, MixingAugment
from duetgan.data.reading.loader import Batch
from duetgan.extras.paper.predictions import Ledger, fakes
from duetgan.models.registry import architecture_of
from duetgan.training.base.config import RunConfig
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.training.gan.config import GanConfig
from duetgan.training.gan.task import GanTask
from duetgan.training.optim.optimizers import Muon
from duetgan.training.optim.updater import Updater
from duetgan.utils.config.cli import Parser
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.gradients import buckets_of
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
PEAK = 790.0  # TFLOP/s of an H200 in dense bf16 matrix products
EFFICIENCY = 0.1  # assumed share of it that a step reaches, all in all: these nets are narrow
NODE = 8  # GPUs of a node
NETWORK_MESSAGE = 60e-6  # s a hop of a message over gloo, between processes' CPUs; assumed
COUNTS = (1, 8, 64, 512)  # GPUs


class Link(NamedTuple):
    """What gradients pass through: of a GPU inside a node, of a whole node outside."""

    name: str
    bandwidth: float  # bytes/s, one way
    latency: float  # s a hop; assumed


INSIDE = (Link("NVLink", 450e9, 3e-6), Link("PCIe", 64e9, 6e-6))  # 900 GB/s both ways; 5.0 x16
OUTSIDE = (Link("400G", 50e9, 6e-6), Link("100G", 12.5e9, 30e-6))  # InfiniBand; Ethernet


class Images(NamedTuple):
    """What a recipe trains on, as far as its arithmetic goes."""

    resolution: int  # px
    classes: int = 0
    channels: int = 3
    number: int = 50_000


SAMPLE = Images(32, 10, 1, 5_000)
PRESETS = {  # recipe -> its images
    "ada_500": SAMPLE,
    "bench_classifier": Images(224, 10),
    "bench_gan_step": Images(32),
    "cifar10_airbench": Images(32, 10),
    "cifar10_classifier": Images(32, 10),
    "cifar10_classifier_gpu": Images(32, 10),
    "cifar10_gan": Images(32, 10),
    "cifar10_gan_gpu": Images(32, 10),
    "classifier": Images(224, 1000),
    "classifier_64_cpu": Images(64, 10),
    "dcgan_small": SAMPLE,
    "fashion_mnist_airbench": Images(32, 10, 1),
    "fashion_mnist_classifier": Images(32, 10, 1),
    "fashion_mnist_classifier_gpu": Images(32, 10, 1),
    "fashion_mnist_gan": Images(32, 10, 1),
    "fashion_mnist_gan_short": Images(32, 10, 1),
    "few_labels": Images(64, 10, 1, 5_000),  # of 32 px a ResNet leaves one value a channel
    **{f"finetune_resnet50{kind}": Images(96, 10) for kind in ("", "_gradual", "_head", "_last")},
    "gan_128": Images(128),
    "gan_256": Images(256),
    "gan_32_cpu": Images(32),
    "gan_32_pairs": SAMPLE,
    "gan_64": Images(64),
    "gan_64_cpu": Images(64),
    "progressive_64": Images(64),
    "progressive_small": SAMPLE,
    "quickstart_classifier": SAMPLE,
    "quickstart_gan": SAMPLE,
    "r3gan_256": Images(256),
    "r3gan_cifar10": Images(32, 10),
    "r3gan_small": SAMPLE,
    **{f"stylegan2_{side}": Images(side) for side in (32, 64, 128, 256, 512, 1024)},
}


class Work(NamedTuple):
    """A step of a recipe at its end (everything trains, full resolution), whatever the number of GPUs."""

    batch: int  # global
    smallest: int  # samples that a process must hold: a group of the minibatch statistics
    parameters: int  # whose gradients are added up
    gradient_bytes: int
    messages: int  # all-reduces of gradients (buckets) and of the step's other values
    waits: int  # collectives in the middle of the networks: synchronised BatchNorm, forward and backward
    flop: float  # of the whole batch; penalties by their share of the steps


def recipe(name: str) -> RunConfig:
    """Raises UserError for a name that is none."""
    if name not in PRESETS:
        raise UserError(f"--only {name}: no recipe of configs/; there are {', '.join(PRESETS)}")
    path = CONFIGS / f"{name}.yaml"
    return build_run_config(read_yaml(path), [], str(path))


def work(name: str) -> Work:
    """Count a recipe's step."""
    config, images = recipe(name), PRESETS[name]
    smallest = config.discriminator.group if isinstance(config, GanConfig) else 1
    with fakes(), mock.patch.object(Muon, "step"):  # its products do not grow with the batch; under 1 % of a step
        task = build_task(config, images, smallest)
        feed = batches(images, smallest)
        flop = sum(share * step_flop(task, feed, step) for step, share in kinds_of_steps(config).items())
    found = list(updaters(task))
    return Work(
        batch=config.batch_size,
        smallest=smallest,
        parameters=sum(p.numel() for updater in found for p in updater.parameters),
        gradient_bytes=sum(p.numel() * p.element_size() for updater in found for p in updater.parameters),
        messages=sum(buckets(updater) for updater in found) + small_messages(config),
        waits=batchnorm_waits(task),
        flop=flop * config.batch_size / smallest,
    )


def small_messages(config: RunConfig) -> int:
    """All-reduces of a GAN's step besides the gradients'."""
    if not isinstance(config, GanConfig):
        return 0
    styles = architecture_of(config.architecture).generator.has_styles  # the sum of w
    lengths = config.loss.path_length_weight > 0  # not every step
    return styles + lengths + (config.ada.mode == "adaptive")  # the signs of D's logits


def batchnorm_waits(task: Any) -> int:
    """Collectives in the middle of a classifier's passes: a BatchNorm that trains has one in each."""
    if not isinstance(task, ClassifierTask):
        return 0
    return 2 * sum(isinstance(module, _BatchNorm) and module.training for module in task.model.modules())


def kinds_of_steps(config: RunConfig) -> dict[int, float]:
    """One step of every kind, late enough that all parts train, and the share of steps that are like it."""
    if not isinstance(config, GanConfig):
        return {config.steps - 1: 1.0}
    loss = config.loss
    period = math.lcm(max(1, loss.r1_interval), loss.path_length_interval)
    kinds: dict[tuple[bool, bool], list[int]] = {}
    first = config.steps // period * period - period
    for step in range(first, first + period):
        kinds.setdefault((loss.penalty_due(step), loss.path_length_due(step)), []).append(step)
    return {steps[0]: len(steps) / period for steps in kinds.values()}


def build_task(config: RunConfig, images: Images, batch: int) -> Any:
    """The task at another batch size and without data; under a FakeTensorMode nothing is computed."""
    config = config.changed(batch_size=batch, micro_batch=None)
    if isinstance(config, GanConfig):  # images are moved about without arithmetic to speak of
        config = config.changed(augment=Augment())
    if isinstance(config, ClassifierConfig):
        model = config.model.changed(weights=None)
        config = config.changed(model=model, augment=MixingAugment())
        if unlabelled := getattr(config, "unlabelled", None):  # of the extra few_labels; there are no images
            config = config.changed(unlabelled=unlabelled.changed(path=None))
    reader: Any = Reader(images)
    return TASKS[config.task].task(config, reader, None, torch.device("cpu"))


class Reader:
    """What a task asks of its data before the first step."""

    def __init__(self, images: Images) -> None:
        self.resolution, self.synthetic, self.workers = images.resolution, None, 0
        self.spec = ImageSpec.of(images.channels, images.resolution)
        self.classes = [str(index) for index in range(images.classes)]
        per_class = images.number // max(1, images.classes)
        self.meta = SimpleNamespace(
            channels=images.channels,
            classes=self.classes,
            count=images.number,
            histogram=[per_class] * images.classes,
            sets=None,
            labels=images.classes,
            by_class=[per_class] * images.classes,
        )

    def __len__(self) -> int:
        return self.meta.count


def step_flop(task: Any, feed: Iterator[Batch], step: int) -> float:
    """Multiplications and additions of update number `step`, counting those of convolutions and matrix products."""
    with Ledger() as ledger:
        task.step(feed, step)
    return sum(operation.flop for operation in ledger.operations)


def batches(images: Images, batch: int) -> Iterator[Batch]:
    shape = (batch, images.channels, images.resolution, images.resolution)
    while True:
        yield Batch(torch.zeros(shape, dtype=torch.uint8), torch.zeros(batch, dtype=torch.int64))


def updaters(task: Any) -> Iterator[Updater]:
    """What reduces gradients: one a network and step, whatever the penalties."""
    if isinstance(task, GanTask):
        yield task.generator_step.updater
        yield task.discriminator_step.updater
    else:
        yield task.updater


def buckets(updater: Updater) -> int:
    """Collectives of a step's gradients. (DDP's buckets are of the same size, but for a small first one.)"""
    return len(buckets_of(updater.parameters))


# --- the model of time


def arithmetic_seconds(step: Work, gpus: int, speed: float) -> float:
    """At `speed` FLOP/s a GPU; where the batch has not a smallest share for each, it is grown until it has."""
    return step.flop / step.batch * share(step, gpus) / speed


def share(step: Work, gpus: int) -> float:
    """Samples a GPU holds."""
    return max(step.batch / gpus, step.smallest)


def seconds(step: Work, gpus: int, link: Link) -> float:
    """What a step's messages take over a link: a ring's 2 (N - 1) / N times the bytes, as each node's link is passed
    once each way; and of every message 2 log2 N hops, as in a tree. One control message a step goes over gloo.
    """
    if gpus == 1:
        return 0.0
    hops = 2 * math.ceil(math.log2(gpus))
    bandwidth = 2 * (gpus - 1) / gpus * step.gradient_bytes / link.bandwidth
    return bandwidth + hops * ((step.messages + step.waits) * link.latency + NETWORK_MESSAGE)


def crossing(step: Work, link: Link, speed: float) -> int | None:
    """The first power of two of GPUs at which the messages take longer than the arithmetic of batch / GPUs samples."""
    for power in range(1, 15):
        gpus = 2**power
        if seconds(step, gpus, link) > step.flop / gpus / speed:
            return gpus
    return None


# --- what is printed


def links_at(gpus: int) -> tuple[Link, ...]:
    """What the gradients of so many GPUs pass through."""
    return () if gpus == 1 else INSIDE if gpus <= NODE else OUTSIDE


def figures(step: Work, speed: float) -> dict[str, float | int]:
    """Everything about a recipe, flat; milliseconds of a step, a ratio above 1 says that messages take longer than
    arithmetic.
    """
    found: dict[str, float | int] = {
        "batch": step.batch,
        "gpus_at_most": step.batch // step.smallest,
        "parameters": step.parameters,
        "gradient_mb": step.gradient_bytes / 1e6,
        "messages": step.messages + step.waits,
        "tflop": step.flop / 1e12,
    }
    for gpus in COUNTS:
        arithmetic = arithmetic_seconds(step, gpus, speed)
        found |= {f"share_{gpus}": share(step, gpus), f"arithmetic_{gpus}_ms": 1000 * arithmetic}
        for link in links_at(gpus):
            messages = seconds(step, gpus, link)
            found[f"{link.name}_{gpus}_ms"] = 1000 * messages
            found[f"{link.name}_{gpus}_ratio"] = messages / arithmetic
            found[f"{link.name}_{gpus}_overlap_ratio"] = (arithmetic + messages) / max(arithmetic, messages)
    for link in (*INSIDE, *OUTSIDE):
        found[f"{link.name}_crossing"] = crossing(step, link, speed) or 0
    return found


def amount(value: float) -> str:
    """Two digits, more where the number has more before its point."""
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def markdown(table: dict[str, dict[str, float | int]]) -> str:
    """Both tables of docs/scaling.md."""
    heads = ["recipe", "batch", "GPUs at most", "M parameters", "MB a step", "messages", "TFLOP a step"]
    columns = ["batch", "gpus_at_most", "parameters", "gradient_mb", "messages", "tflop"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name, row in table.items():
        millions = row | {"parameters": row["parameters"] / 1e6}
        lines.append(_line([name, *(str(v) if isinstance(v := millions[c], int) else amount(v) for c in columns)]))
    heads = ["recipe", "1: arithmetic"]
    for gpus in COUNTS[1:]:
        heads += [f"{gpus}: samples", "arithmetic", *(link.name for link in links_at(gpus))]
    heads += [f"passed at, {link.name}" for link in (*INSIDE, *OUTSIDE)]
    lines += ["", _line(heads), _line(["---"] * len(heads))]
    for name, row in table.items():
        cells = [name, amount(row["arithmetic_1_ms"])]
        for gpus in COUNTS[1:]:
            grown = "*" if row["batch"] < gpus * row[f"share_{gpus}"] else ""
            cells += [f"{amount(row[f'share_{gpus}'])}{grown}", amount(row[f"arithmetic_{gpus}_ms"])]
            cells += [amount(row[f"{link.name}_{gpus}_ms"]) for link in links_at(gpus)]
        cells += [str(row[f"{link.name}_crossing"] or "-") for link in (*INSIDE, *OUTSIDE)]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: list[str]) -> None:
    parser = Parser(prog="benchmarks/scaling.py", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these recipes of configs/; default: all")
    parser.add_argument("--peak", type=float, default=PEAK, metavar="TFLOPS", help="of a GPU")
    parser.add_argument("--efficiency", type=float, default=EFFICIENCY, metavar="SHARE", help="of it that is reached")
    parser.add_argument("--markdown", action="store_true", help="the tables of docs/scaling.md")
    parser.add_argument("--json", action="store_true", help="the last line is one flat JSON object")
    options = parser.parse_args(argv)
    if not (options.peak > 0 and 0 < options.efficiency <= 1):
        raise UserError("--peak must be above 0, --efficiency in (0, 1]")
    speed = options.peak * 1e12 * options.efficiency
    table = {name: figures(work(name), speed) for name in options.only or PRESETS}
    if options.markdown:
        print(markdown(table))
    else:
        for name, row in table.items():
            print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
    if options.json:
        print(json.dumps({f"{name}_{key}": value for name, row in table.items() for key, value in row.items()}))


if __name__ == "__main__":
    sys.exit(run_cli(main))
