"""What is cheap: neighbours against a slow obvious version, and both learners on classes that lie apart."""

import numpy as np
import torch
from sklearn.decomposition import PCA

from duetgan.data.reading.dataset import Dataset
from duetgan.extras.few_labels import spreading
from duetgan.extras.few_labels.discriminator import load_discriminator
from duetgan.extras.few_labels.spreading import UNKNOWN
from duetgan.extras.studies import baselines as baselines_of
from duetgan.extras.studies.baselines import baselines, before_training, hits_of, pixels
from duetgan.models.classifier import ModelConfig
from duetgan.training.classifier.probe import scale_of
from tests.extras.few_labels.test_discriminator import classifier, run_of
from tests.metrics.conftest import pack


def clusters(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three bent bands in 6 dimensions, of scales of their own: [n, 6] and labels."""
    draws = torch.Generator().manual_seed(1)
    labels = torch.arange(n) % 3
    along = torch.rand(n, generator=draws) * 3
    bent = torch.stack([along.cos(), along.sin(), labels * 1.0], 1)
    return torch.cat([bent, torch.zeros(n, 3)], 1) + 0.08 * torch.randn(n, 6, generator=draws), labels


def test_labels_spread_as_zhous_limit_says(monkeypatch):
    monkeypatch.setattr(spreading, "NEIGHBOURS", 4)
    monkeypatch.setattr(spreading, "COMPONENTS", 3)
    monkeypatch.setattr(spreading, "ITERATIONS", 3000)
    every, labels = clusters(90)
    known = torch.where(torch.arange(60) < 9, labels[:60], torch.full((60,), UNKNOWN))
    whole = every.double().numpy()
    x = (whole - whole[:60].mean(0)) / whole[:60].std(0)
    points = PCA(3, whiten=True, svd_solver="full").fit(x[:60]).transform(x) * (60 / 59) ** 0.5
    squares = ((points[:, None] - points[None, :60]) ** 2).sum(-1)
    graph = np.zeros((60, 60))
    for row in range(60):
        for column in [place for place in squares[row].argsort() if place != row][:4]:
            graph[row, column] += 1
            graph[column, row] += 1
    root = np.diag(graph.sum(1) ** -0.5)
    given = np.eye(3)[known.numpy()] * (known.numpy() >= 0)[:, None]
    limit = (1 - spreading.ALPHA) * np.linalg.solve(np.eye(60) - spreading.ALPHA * root @ graph @ root, given)
    limit /= limit.sum(0)
    found, asked = spreading.spreading(every[:60], known, every[60:], 3)
    assert np.abs(found.numpy() - limit).max() < 1e-5
    expected = limit[squares[60:].argsort(1)[:, :4]].mean(1)
    assert np.abs(asked.numpy() - expected).max() < 1e-5


def test_features_before_training_are_those_of_the_discriminator(tmp_path):
    run = run_of(tmp_path / "gan")
    model = classifier("stylegan2", weights=str(run)).eval()
    load_discriminator(model)
    with Dataset(pack(tmp_path / "x.lmdb", count=5, side=16)) as reader:
        images = model.spec.to_float(torch.from_numpy(reader.read(range(5))[0]))
        found = before_training(reader, name="discriminator", weights=run)
    torch.testing.assert_close(found, model.features(images).detach(), rtol=1e-4, atol=1e-5)


def test_all_ways_answer_for_every_image_of_every_file(tmp_path, monkeypatch):
    scales, regression = [], baselines_of.fit

    def fit(*arguments, scale):
        scales.append(scale)
        return regression(*arguments, scale=scale)

    monkeypatch.setattr(baselines_of, "fit", fit)
    for name, seed in (("train", 1), ("test", 2)):
        pack(tmp_path / f"{name}.lmdb", seed=seed, count=45)
    with Dataset(tmp_path / "train.lmdb") as reader:
        assert torch.equal(pixels(reader)[3], torch.from_numpy(reader.read([3])[0][0]).flatten().float())
    files = {name: tmp_path / f"{name}.lmdb" for name in ("test", "train")}
    for _, features in baselines(ModelConfig(name="resnet18", stem="small")).values():
        hits = hits_of(files["train"], files, features, lambda labels: np.arange(30))
        assert {name: len(of) for name, of in hits.items()} == {"test": 45, "train": 45}
        assert hits["train"].mean() > 0.5
    with Dataset(tmp_path / "train.lmdb") as reader:  # scaled by all images, with and without labels
        torch.testing.assert_close(scales[0], scale_of(pixels(reader)))
