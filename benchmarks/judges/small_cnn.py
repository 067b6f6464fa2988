"""An independent judge of a conditional generator: a small CNN of its own, trained on the real images.

`python benchmarks/judges/small_cnn.py --data TRAIN.lmdb --test TEST.lmdb --checkpoint RUN...`. It shares no code with
our classifier, has never seen a sample, and prints its accuracy on real test images, then for each generator the
share of samples whose class it predicts and the least diverse class in its own features (docs/evaluation.md).
"""

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duetgan.data.augment.transforms import to_float
from duetgan.data.reading.dataset import Dataset
from duetgan.models.gan import generate
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.cli import Parser
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.seeding import forked, numpy_generator

PER_CLASS = 200  # images of a class for the diversity


class SmallCNN(nn.Module):
    """Three 3x3 convolutions with pooling, then two linear layers; `features` [N, 128]."""

    def __init__(self, channels: int, classes: int, side: int) -> None:
        super().__init__()
        widths = [channels, 32, 64, 128]
        self.convolutions = nn.Sequential(
            *(
                layer
                for a, b in pairwise(widths)
                for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            )
        )
        self.hidden = nn.Linear(128 * (side // 8) ** 2, 128)
        self.head = nn.Linear(128, classes)

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.hidden(self.convolutions(x).flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.features(x), 0.3, self.training))


def train(data: Dataset, epochs: int, seed: int) -> SmallCNN:
    """A CNN trained on the real images with AdamW and a one-cycle rate."""
    with forked(seed, "init", "judge"):
        network = SmallCNN(data.meta.channels, len(data.classes), data.spec.side)
        network = network.to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.003, weight_decay=0.01)
        steps = len(data) // 128
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.003, total_steps=epochs * steps)
        for epoch in range(epochs):
            order = numpy_generator(seed, "judge", epoch).permutation(len(data))
            for start in range(0, steps * 128, 128):
                images, labels = data.read(np.sort(order[start : start + 128]))
                loss = F.cross_entropy(network(to_float(torch.from_numpy(images))), torch.from_numpy(labels))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return network.eval()


@torch.no_grad()
def judge(network: SmallCNN, images: Tensor) -> tuple[Tensor, Tensor]:
    """Named classes [N] and features [N, 128] of uint8 images."""
    parts = [network.features(to_float(part)) for part in images.split(500)]
    features = torch.cat(parts)
    return network.head(features).argmax(dim=1), features


def spread(features: Tensor) -> float:
    """Mean distance of the pairs among features [n, F]."""
    return float(torch.pdist(features.double()).mean())


def judge_generator(network: SmallCNN, run: Path, test: Dataset, n: int) -> dict[str, object]:
    """Share of n samples whose class is predicted, and the smallest ratio of a class's spread to the real images'."""
    path = resolve(run)
    generator = generator_from(load(path))
    classes = len(test.classes)
    labels = torch.arange(n) % classes
    named, _ = judge(network, generate(generator, labels=labels, indices=range(n), seed=0))
    ratios = []
    for label in range(classes):
        rows = np.flatnonzero(test.labels() == label)[:PER_CLASS]
        _, real = judge(network, torch.from_numpy(test.read(rows)[0]))
        wanted = torch.full([len(rows)], label)
        indices = range(1_000_000 + label * PER_CLASS, 1_000_000 + label * PER_CLASS + len(rows))
        _, fake = judge(network, generate(generator, labels=wanted, indices=indices, seed=0))
        ratios.append(spread(fake) / spread(real))
    share = float((named == labels).double().mean())
    return {"checkpoint": path.name, "recognised": share, "diversity": min(ratios), "n": n}


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    with Dataset(options.data) as data, Dataset(options.test) as test:
        network = train(data, options.epochs, options.seed)
        named, _ = judge(network, torch.from_numpy(test.read(np.arange(len(test)))[0]))
        accuracy = float((named.numpy() == test.labels()).mean())
        print(json.dumps({"accuracy_on_real": accuracy}))
        for run in options.checkpoint:
            print(json.dumps({"run": str(run)} | judge_generator(network, run, test, options.n)))
    return 0


def parser() -> argparse.ArgumentParser:
    options = Parser(prog="benchmarks/judges/small_cnn.py", description=__doc__)
    options.add_argument("--data", required=True, metavar="TRAIN.lmdb")
    options.add_argument("--test", required=True, metavar="TEST.lmdb")
    options.add_argument("--checkpoint", required=True, nargs="+", type=Path, metavar="RUN_OR_FILE")
    options.add_argument("--n", type=int, default=5000, help="samples (default: 5000)")
    options.add_argument("--epochs", type=int, default=6)
    options.add_argument("--seed", type=int, default=0)
    return options


if __name__ == "__main__":
    sys.exit(run_cli(main))
