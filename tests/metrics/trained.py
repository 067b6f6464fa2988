"""A classifier and a GAN whose last and best checkpoints differ, and what they give without the program's passes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.utils import images as drawing
from duetgan.utils.checkpoint import point
from duetgan.utils.seeding import forked
from duetgan.utils.seeding import generator as keyed_generator
from tests.inference.conftest import styled
from tests.metrics.conftest import SIDE, TINY, make_run

NAMES = ["owl", "ant", "cat", "bee", "elk", "fox", "dog"]  # in no order; more than five
SETS = [[], [0], [2], [0, 2], [1], [1, 2]]
BEST, LAST = 7, 9  # steps
COUNT = 71  # test images
PROBE = {"accuracy": 0.613, "interval": [0.504, 0.711], "images": 97, "strength": 0.1, "seconds": 3.0}


@dataclass(frozen=True)
class Trained:
    """Run folders, networks of their best checkpoints, and images with labels by the name of their file."""

    folder: Path
    network: Classifier
    judge: Classifier  # of the classifier's last checkpoint
    generator: Any
    images: dict[str, torch.Tensor]  # uint8 [n, 1, SIDE, SIDE]
    labels: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> Path:
        """The run folder or packed file of a name."""
        return self.folder / name

    def data(self, test: str = "test.lmdb") -> dict[str, str]:
        return {"path": str(self["train.lmdb"]), "val_path": str(self[test])}


def to_float(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 127.5 - 1


def clothes(count: int, key: int) -> tuple[torch.Tensor, np.ndarray]:
    """Images whose brightness and gradient tell their class now and then; labels."""
    draw = np.random.default_rng(key)
    labels = np.sort(draw.choice(len(NAMES), count, p=[0.25, 0.2, 0.15, 0.12, 0.1, 0.09, 0.09]))
    slopes = np.linspace(-1, 1, SIDE) * (labels[:, None] % 3 - 1) * 40
    values = 60 + 20 * labels[:, None] + draw.normal(0, 12, (count, 1)) + slopes
    values = values[:, None, :, None] + draw.normal(0, 25, (count, 1, SIDE, SIDE))
    return torch.from_numpy(values.clip(0, 255).astype(np.uint8)), labels


@torch.no_grad()
def fitted(images: torch.Tensor, hot: torch.Tensor, seed: int, *, several: bool = False) -> Classifier:
    """An untrained network with a head of the classes' means; `hot` bool [n, K]."""
    with forked(seed, "init", "fitted"):
        network = Classifier(ModelConfig(stem="small-stride2"), channels=1, classes=hot.shape[1], resolution=SIDE)
    network.eval().requires_grad_(False)
    if several:
        network.add_thresholds()
        network.thresholds.copy_(torch.linspace(0.3, 0.6, hot.shape[1]))
    features = network.features(to_float(images))
    means = torch.stack([features[row].mean(0) for row in hot.T]) - features.mean(0)
    network.head.weight.copy_((0.15 if several else 0.05) * means / features.var(0).clamp(min=1e-6))
    network.head.bias.copy_(-network.head.weight @ features.mean(0))
    return network


def two_checkpoints(
    folder: Path, part: str, networks: list[Any], *, state: dict[str, Any] | None = None, **extra: Any
) -> None:
    """The last of the run's networks is its best; the weights that are no average are another's."""
    for step, network, decoy in zip((LAST, BEST), networks, networks[::-1], strict=True):
        states = {part: decoy.state_dict(), f"{part}_ema": network.state_dict()}
        make_run(folder, state=states | (state or {}), step=step, **extra)
    checkpoints = folder / "checkpoints"
    point(checkpoints, "last", checkpoints / f"step-{LAST:08d}.pt")
    (folder / "config.yaml").write_text(f"task: {extra['task']}\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, slim_resnet18):
    folder = tmp_path_factory.mktemp("trained")
    images, labels = {}, {}
    for key, (name, count) in enumerate({"train": 97, "test": COUNT, "others": 61}.items()):
        images[name], labels[name] = clothes(count, key)
        shade = 255 - images[name] if name == "others" else images[name]
        pack_arrays(folder / f"{name}.lmdb", shade.numpy(), labels[name], NAMES)
        images[name] = shade
    hot = torch.from_numpy(np.eye(len(NAMES), dtype=bool)[labels["train"]])
    networks = [fitted(images["train"], hot, seed) for seed in (1, 0)]
    generators = [styled(classes=len(NAMES), seed=seed) for seed in (1, 0)]
    made = Trained(folder, networks[1], networks[0], generators[1], images, labels)
    shape = {"channels": 1, "classes": len(NAMES), "resolution": SIDE}
    extra: dict[str, Any] = {"shape": shape, "classes": NAMES}
    config = {"model": {"stem": "small-stride2"}, "data": made.data(), "seed": 11}
    probe = {"probe": PROBE}
    two_checkpoints(made["classifier"], "model", networks, task="classifier", config=config, state=probe, **extra)
    config = {"generator": TINY, "data": made.data(), "loss": {}, "seed": 11}
    two_checkpoints(made["gan"], "generator", generators, task="gan", config=config, **extra)
    return made


@torch.no_grad()
def samples_of(
    generator: Any,
    labels: list[int],
    indices: list[int],
    seed: int,
    *,
    psi: float = 1.0,
    cutoff: int | None = None,
    noise: str = "random",
    numpy_seeds: list[int] | None = None,
) -> torch.Tensor:
    """Samples uint8 [n, 1, SIDE, SIDE] by the keys of docs/reproducibility.md, from mapping and synthesis alone."""
    ws, maps = styles_of(generator, labels, indices, seed, numpy_seeds=numpy_seeds)
    if psi != 1:
        centre = centres(generator, labels)[:, None]
        ws[:, :cutoff] = centre + psi * (ws[:, :cutoff] - centre)
    return as_bytes(generator.synthesis(ws, maps if noise == "random" else noise))


def as_bytes(images: torch.Tensor) -> torch.Tensor:
    return (images * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)


@torch.no_grad()
def centres(generator: Any, labels: list[int]) -> torch.Tensor:
    """Return the mean w [n, w_dim] of 10,000 latents of each label's class."""
    z = torch.randn(10_000, generator.z_dim, generator=keyed_generator(0, "class mean"))
    means = {label: generator.mapping(z, torch.full((len(z),), label)).mean(0) for label in set(labels)}
    return torch.stack([means[label] for label in labels])


@torch.no_grad()
def styles_of(
    generator: Any, labels: list[int], indices: list[int], seed: int, *, numpy_seeds: list[int] | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Styles [n, num_ws, w_dim] and noise maps of samples."""
    sizes = [generator.z_dim, *(height * width for _, height, width in generator.noise_shapes())]
    draws = [torch.randn(sum(sizes), generator=keyed_generator(seed, "eval", index)) for index in indices]
    z, *maps = torch.stack(draws).split(sizes, dim=1)
    if numpy_seeds is not None:
        rows = [np.random.RandomState(number).randn(generator.z_dim) for number in numpy_seeds]
        z = torch.tensor(np.array(rows), dtype=torch.float32)
    ws = generator.mapping(z, torch.tensor(labels))[:, None].repeat(1, generator.num_ws, 1)
    return ws, [part.view(-1, *shape) for part, shape in zip(maps, generator.noise_shapes(), strict=True)]


@pytest.fixture
def pictures(monkeypatch):
    """Images and lines of each picture that would be drawn, by its file's name, in their order."""
    drawings: dict[str, tuple[list[np.ndarray], list[str]]] = {}

    def record(path: Any, size: Any, places: Any, words: Any, *_: Any) -> None:
        arrays = [np.asarray(image) for *_, image in places if image is not None]
        drawings[Path(path).name] = arrays, [text for *_, text, _ in words]

    monkeypatch.setattr(drawing, "_save", record)
    monkeypatch.setattr(drawing, "_fitting", lambda text, _: text)
    return drawings


def assert_pixels(drawings: Any, expected: Any) -> None:
    """Images agree but for the rounding of another batch."""
    assert np.shape(drawings) == np.shape(expected)
    assert np.abs(np.asarray(drawings).astype(int) - np.asarray(expected).astype(int)).max() <= 1
