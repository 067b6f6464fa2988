"""What is cheap: neighbours against a slow obvious version, and both learners on classes that lie apart."""

import numpy as np
import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.models.classifier import ModelConfig
from duetgan.studies import baselines
from duetgan.studies.baselines import UNKNOWN, hits_of, pixels, readout, spread, ways
from tests.metrics.conftest import pack


def clusters(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three bent bands in 6 dimensions, of scales of their own: [n, 6] and labels."""
    draws = torch.Generator().manual_seed(1)
    labels = torch.arange(n) % 3
    along = torch.rand(n, generator=draws) * 3
    bent = torch.stack([along.cos(), along.sin(), labels * 1.0], 1)
    return torch.cat([bent, torch.zeros(n, 3)], 1) + 0.08 * torch.randn(n, 6, generator=draws), labels


def test_labels_spread_as_zhous_iteration_says(monkeypatch):
    monkeypatch.setattr(baselines, "NEIGHBOURS", 4)
    x, labels = clusters(60)
    known = torch.where(torch.arange(60) < 9, labels, torch.full_like(labels, UNKNOWN))
    squares = torch.cdist(x.double(), x.double())
    graph = torch.zeros(60, 60, dtype=torch.float64)
    for row in range(60):
        for column in squares[row].argsort()[1:5]:
            graph[row, column] = 1 / 4
    given = torch.zeros(60, 3, dtype=torch.float64)
    given[torch.arange(9), labels[:9]] = 1
    limit = torch.linalg.inv(torch.eye(60, dtype=torch.float64) - baselines.KEPT * graph) @ given
    limit /= limit.sum(0)
    monkeypatch.setattr(baselines, "ROUNDS", 3000)
    asked = clusters(90)[0][60:]
    near = torch.cdist(asked.double(), x.double()).argsort(1)[:, :4]
    assert torch.equal(spread(x, known, asked, 3), limit[near].mean(1).argmax(1))


@pytest.mark.parametrize(("learn", "least"), [(readout, 0.75), (spread, 0.9)])  # three of six dimensions are noise
def test_few_labels_are_enough_where_classes_lie_apart(learn, least):
    x, labels = clusters(300)
    known = torch.full_like(labels, UNKNOWN)
    known[:12] = labels[:12]
    assert (learn(x[:200], known[:200], x[200:], 3) == labels[200:]).float().mean() > least


def test_all_ways_answer_for_every_image_of_every_file(tmp_path):
    for name, seed in (("train", 1), ("test", 2)):
        pack(tmp_path / f"{name}.lmdb", seed=seed, count=45)
    with Dataset(tmp_path / "train.lmdb") as reader:
        assert torch.equal(pixels(reader)[3], torch.from_numpy(reader.read([3])[0][0]).flatten().float())
    files = {name: tmp_path / f"{name}.lmdb" for name in ("test", "train")}
    for _, features, learn in ways(ModelConfig(name="resnet18", stem="small")).values():
        hits = hits_of(features, learn, files["train"], lambda labels: np.arange(30), files)
        assert {name: len(of) for name, of in hits.items()} == {"test": 45, "train": 45}
        assert hits["train"].mean() > 0.5
