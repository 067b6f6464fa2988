"""A classifier's training, ours against timm's on the same images: medians of alternating repeats of one run.

`python benchmarks/classifier.py [--json] [--repeats N] [--steps N] [--threads N] [--work DIR]`

Everyone trains the same ResNet-18 (3x3 stem of stride 1, no pooling, 10 classes, 11.2M parameters) on RGB images of
32 px in batches of 64, with reading and augmentation (mirrored at random; padded by 4 black pixels and cropped at a
random place) in the time. The images are the embedded sample's, made RGB of 32 px by this script.

Ours: `training.classifier.task.ClassifierTask` (configs/bench_classifier.yaml) on a packed file, channels_last, in bf16
and in fp32, with everything that its step does: the average of the weights, the non-finite guard, metrics.

timm: its pieces as its train.py puts them together, with their defaults: `create_model("resnet18")`, stem and pooling
replaced; `create_dataset` on a folder of PNG files and `create_loader`, whose transforms are replaced by the same
augmentation from torchvision (its own default, a random resized crop with colour jitter, costs more);
`create_optimizer_v2("sgd", momentum=0.9)`; `LabelSmoothingCrossEntropy`; forward, backward, step, zero_grad, the loss
read at log ticks. fp32, NCHW, no AMP and no compilation: its defaults on a CPU. Loader workers are the best of 0, 1 and
2, each with its prefetcher off and on, searched for at the beginning.

Each contender lives in a process of its own, with memory settings of its own, and waits while the others train.
`_data_share` is the share of time that reading, decoding and augmenting take (with workers: that the step waits).
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.classifying import images as sample_images
from benchmarks.classifying.contenders import Measured, Ours, Timm, import_timm
from benchmarks.harness import parser_of, show
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.cli import positive
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.machine import cores

Result = dict[str, float | int | str | bool]
Contender = Ours | Timm

WARM_UP = 2  # steps before the first repeat
LOADERS = [(workers, prefetcher) for workers in (0, 1, 2) for prefetcher in (False, True)]  # tried for timm


class Remote:
    """A contender in a process of its own, which computes only while it is asked to."""

    def __init__(self, build: Callable[[], Contender], threads: int) -> None:
        context = multiprocessing.get_context("spawn")  # not forked: its memory settings must be its own
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, build, threads))
        self._process.start()
        other.close()
        self.parameters: int = self._receive()

    def measure(self, steps: int) -> Measured:
        """Train so many steps there. Raises RuntimeError if its process has died."""
        self._connection.send(steps)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError("a contender's process died; what it printed says why") from None

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, build: Callable[[], Contender], threads: int) -> None:
    torch.set_num_threads(threads)
    contender = build()
    contender.measure(WARM_UP)
    connection.send(contender.parameters)
    while True:
        try:
            steps = connection.recv()
        except EOFError:  # the other end was closed
            return
        connection.send(contender.measure(steps))


def best_loader(config: ClassifierConfig, folder: Path, threads: int, steps: int) -> tuple[int, bool]:
    """timm's workers and prefetcher: those with the highest rate; each is tried once and printed."""
    rates: dict[tuple[int, bool], float] = {}
    for workers, prefetcher in LOADERS:
        remote = Remote(partial(Timm, config, folder, workers, prefetcher), threads)
        try:
            rates[workers, prefetcher] = steps * config.batch_size / remote.measure(steps).seconds
        finally:
            remote.close()
        print(f"  timm: {workers} workers, prefetcher {prefetcher}: {rates[workers, prefetcher]:,.1f}/s", flush=True)
    return max(rates, key=rates.__getitem__)


def alternate(remotes: dict[str, Remote], repeats: int, steps: int) -> dict[str, list[Measured]]:
    """Every contender once in each repeat; each repeat begins with another one."""
    names = list(remotes)
    measured: dict[str, list[Measured]] = {name: [] for name in names}
    for repeat in range(repeats):
        for place in range(len(names)):
            name = names[(repeat + place) % len(names)]
            measured[name].append(remotes[name].measure(steps))
    return measured


def summary(measured: dict[str, list[Measured]], images: int) -> Result:
    """Ratios (medians over the repeats), images per second, and the share of time that data takes."""
    found: Result = {}
    for name in ("bf16", "fp32"):
        pairs = zip(measured[name], measured["timm"], strict=True)
        found[f"{name}_vs_timm_ratio"] = statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs)
    for name, turns in measured.items():
        found[f"{name}_images_per_second"] = images / statistics.median(turn.seconds for turn in turns)
        found[f"{name}_data_share"] = statistics.median(turn.data_seconds / turn.seconds for turn in turns)
    return found


def run(config: ClassifierConfig, work: Path, *, count: int, repeats: int, steps: int, threads: int) -> Result:
    """Measure everyone on `count` images; files are made in `work`. Raises RuntimeError if their networks differ in
    size.
    """
    before = os.getloadavg()[0]
    packed, folder = sample_images.make(work, count)
    workers, prefetcher = best_loader(config, folder, threads, steps)
    remotes: dict[str, Remote] = {}
    try:
        remotes["bf16"] = Remote(partial(Ours, config, "bf16", packed), threads)
        remotes["fp32"] = Remote(partial(Ours, config, "fp32", packed), threads)
        remotes["timm"] = Remote(partial(Timm, config, folder, workers, prefetcher), threads)
        sizes = {name: remote.parameters for name, remote in remotes.items()}
        if len(set(sizes.values())) > 1:
            raise RuntimeError(f"the networks are not the same: {sizes} parameters")
        measured = alternate(remotes, repeats, steps)
    finally:
        for remote in remotes.values():
            remote.close()
    return {
        **summary(measured, steps * config.batch_size),
        "timm_workers": workers,
        "timm_prefetcher": prefetcher,
        "timm_version": import_timm().__version__,
        "parameters": sizes["timm"],
        "batch_size": config.batch_size,
        "repeats": repeats,
        "steps": steps,
        "cores": cores(),
        "threads": threads,
        "load_1min_before": before,
        "load_1min_after": os.getloadavg()[0],
    }


def main(argv: list[str]) -> None:
    """The command line."""
    parser = parser_of("classifier", __doc__)
    parser.add_argument("--config", default=str(Path(__file__).parents[1] / "configs" / "bench_classifier.yaml"))
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--steps", type=positive, default=10, help="in a repeat")
    parser.add_argument("--images", type=positive, default=2560, help="that everyone trains on, of the sample")
    parser.add_argument("--threads", type=positive, default=cores(), help="of each contender; default: the cores")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where files are made; default: the system's folder")
    options = parser.parse_args(argv)
    import_timm()
    config = build_run_config(read_yaml(options.config), [], options.config)
    if not isinstance(config, ClassifierConfig):
        raise UserError(f"{options.config}: not a recipe of task classifier")
    if options.images < config.batch_size:
        raise UserError(f"--images {options.images}: fewer than a batch of {config.batch_size}")
    if options.work is not None and not options.work.is_dir():
        raise UserError(f"--work {options.work}: no such folder; make it first")
    sizes = {"count": options.images, "repeats": options.repeats, "steps": options.steps, "threads": options.threads}
    with tempfile.TemporaryDirectory(prefix="classifier-", dir=options.work) as work:
        result = run(config, Path(work), **sizes)
    show(result, as_json=options.json)


if __name__ == "__main__":
    sys.exit(run_cli(main))
