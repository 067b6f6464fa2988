"""Operators that a training step dispatches: `python -m benchmarks.operators [RECIPE ...]` prints the table's rows.

A GPU waits for the host where a step has many small operators: each takes 10 to 40 microseconds, whatever its size. The
number depends on the code only, so it is counted on the CPU, with narrow networks and small batches. Forward, backward,
update and average are counted, reading images is not. Views and allocations launch nothing and are left out.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch
from duetgan.training.base.data import make_loader
from duetgan.training.engine.tasks import TASKS, build_run_config
from duetgan.training.gan.config import GanConfig
from duetgan.utils.config.yaml_files import read_yaml

UNCOUNTED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
NARROW = {
    "generator": {"channel_base": 256, "channel_max": 8, "z_dim": 8, "w_dim": 8},
    "discriminator": {"channel_base": 256, "channel_max": 8},
}
R3 = {network: {"width": 16} for network in ("generator", "discriminator")}
# (recipe, precision) -> side, channels and classes of its images, and options for smaller networks; precision auto is
# counted as fp32 and as bf16, which a GPU would use
PRESETS: dict[tuple[str, str], tuple[int, int, int, dict[str, Any]]] = {
    ("bench_classifier", "bf16"): (32, 3, 10, {}),
    ("cifar10_classifier_gpu", "fp32"): (32, 3, 10, {}),
    ("cifar10_classifier_gpu", "bf16"): (32, 3, 10, {}),
    ("quickstart_gan", "fp32"): (32, 1, 10, NARROW),
    ("cifar10_gan_gpu", "fp32"): (32, 3, 10, NARROW),
    ("cifar10_gan_gpu", "bf16"): (32, 3, 10, NARROW),
    ("bench_gan_step", "bf16"): (32, 3, 0, NARROW),
    ("r3gan_small", "fp32"): (32, 1, 10, R3),
    ("r3gan_small", "bf16"): (32, 1, 10, R3),
    ("ada_500", "fp32"): (32, 1, 10, NARROW),
    ("stylegan2_64", "fp16"): (64, 3, 0, NARROW),
}


class Operators(TorchDispatchMode):
    """Counts the operators that are dispatched in a block, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = function._schema
        name = schema.name.removeprefix("aten::")
        is_view = any(value.alias_info and not value.alias_info.is_write for value in schema.returns)
        if not is_view and name not in UNCOUNTED:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def operators(configs: Path, recipe: str, precision: str, folder: Path) -> dict[str, Counter[str]]:
    """Return the operators of each kind of step of a recipe, by the names of the penalties that are due."""
    side, channels, classes, sections = PRESETS[recipe, precision]
    data = folder / f"{side}-{channels}-{classes}.lmdb"
    if not data.exists():
        images = np.random.default_rng(0).integers(0, 256, (16, channels, side, side), dtype=np.uint8)
        labels = np.arange(16) % classes if classes else None
        pack_arrays(data, images, labels=labels, classes=[str(number) for number in range(classes)])
    tree: dict[str, Any] = read_yaml(configs / f"{recipe}.yaml")
    for name, options in sections.items():
        tree[name] = {**tree.get(name, {}), **options}
    tree |= {"precision": precision, "batch_size": 8, "data": {"path": str(data)}}
    config = build_run_config(tree, [], recipe)
    dataset = Dataset(data)
    device = torch.device("cpu")
    task = TASKS[config.task].task(config, dataset, None, device)
    loader = make_loader(config, dataset, device)
    batches = [next(loader) for _ in range(2)]

    def again() -> Iterator[Batch]:
        while True:
            yield from batches

    task.step(again(), 0)  # The first step differs: it fills caches.
    kinds: dict[str, Counter[str]] = {}
    for step in sorted(task.typical_steps(1)):
        with Operators() as mode:
            task.step(again(), step)
        kinds[kind_of(config, step)] = mode.counts
    return kinds


def kind_of(config: Any, step: int) -> str:
    """Return the names of the penalties that are due in a step."""
    if config.task != "gan":
        return "every"
    loss = cast(GanConfig, config).loss
    penalties = {"path lengths": loss.path_length_due(step), "R1": loss.penalty_due(step) and loss.r1_gamma > 0}
    penalties["R2"] = loss.penalty_due(step) and loss.r2_gamma > 0
    return " and ".join(name for name, is_due in penalties.items() if is_due) or "plain"


def main(recipes: list[str]) -> None:
    import duetgan

    configs = Path(duetgan.__file__).parent / "configs"
    with tempfile.TemporaryDirectory() as folder:
        for recipe, precision in PRESETS:
            if recipes and recipe not in recipes:
                continue
            for kind, counts in operators(configs, recipe, precision, Path(folder)).items():
                print(f"| {recipe} | {precision} | {kind} | | {counts.total()} |")
                if recipes:
                    print("  ", *(f"{name} {count}" for name, count in counts.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
