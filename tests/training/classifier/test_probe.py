"""The probe: against scikit-learn, on features that hold nothing, and as the beginning of a run."""

import json
import time
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from duetgan.commands import evaluate
from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading.dataset import Dataset
from duetgan.metrics.intervals import wilson
from duetgan.training.classifier import probe
from duetgan.training.classifier.frozen import image_features
from duetgan.training.engine.lr_find import Sweep
from duetgan.training.engine.run import _find_rate, prepare
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from duetgan.utils.runlog.run_folder import RunFolder
from tests.conftest import assert_raises
from tests.faults.conftest import run_command
from tests.training.classifier.test_frozen import TREE, train


def clusters(n: int = 300, classes: int = 3, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [n, 2, 12], the second view a little off the first, of scales of their own; labels [n]."""
    draws = torch.Generator().manual_seed(3)
    labels = torch.arange(n) % classes
    images = torch.randn(classes, 12, generator=draws)[labels] + spread * torch.randn(n, 12, generator=draws)
    views = torch.stack([images, images + 0.1 * torch.randn(n, 12, generator=draws)], 1)
    return views * torch.logspace(-2, 2, 12) + 5, labels


@pytest.mark.parametrize("few", [False, True])
def test_it_is_scikit_learns_regression_on_standardised_features(few):
    """Also of fewer images than features, standardised as others are."""
    features, labels = clusters()
    others = features[:, 1] if few else None
    if few:
        features, labels = features[:9, :1], labels[:9]
    found = probe.fit(features, labels, 3, scale=None if others is None else probe.scale_of(others))
    scale = probe.scale_of(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    assert torch.stack(scale).tolist() == [[2.0, 5.0], [1.0, pytest.approx(1e-6)]]
    x, y = features.flatten(0, 1).double().numpy(), labels.repeat_interleave(features.shape[1]).numpy()
    like = x if others is None else others.double().numpy()
    mean, deviation = like.mean(0), like.std(0)
    theirs = LogisticRegression(C=1 / (found.strength * len(y)), max_iter=5000, tol=1e-8).fit((x - mean) / deviation, y)
    ours = (torch.from_numpy(x) @ found.weight.double().T + found.bias).softmax(1).numpy()
    assert np.abs(ours - theirs.predict_proba((x - mean) / deviation)).max() < 2e-3


def test_its_accuracy_is_of_images_that_it_has_not_seen():
    """300 images in 500 dimensions of noise are told apart without a fault, and not one that is new."""
    features = torch.randn(300, 1, 500, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(300) % 3
    found = probe.fit(features, labels, 3)
    assert torch.nn.functional.linear(features[:, 0], found.weight, found.bias).argmax(1).eq(labels).all()
    assert found.interval[0] < 1 / 3 < found.interval[1]
    twins = features[:30, :, :100].repeat_interleave(2, 0), labels[:30].repeat_interleave(2)
    assert probe.fit(*twins, 3).accuracy > 0.5
    assert probe.fit(*twins, 3, groups=np.arange(60) // 2).accuracy < 0.5
    easy, of_easy = clusters(spread=0.1)
    assert probe.fit(easy, of_easy, 3).accuracy == 1


def test_its_accuracy_is_of_first_views(monkeypatch):
    monkeypatch.setattr(probe, "_path", lambda *given: ((torch.eye(3), torch.zeros(3)) for _ in given[3]))
    labels = torch.arange(33) % 3
    first, second = (torch.nn.functional.one_hot((labels + shift) % 3).float() for shift in (0, 1))
    first[:3] = second[:3]  # the regression is wrong for three images
    found = probe.fit(torch.stack([first, second], 1), labels, 3)
    assert found[2:] == (30 / 33, wilson(30, 33), 33, probe.STRENGTHS[0])


def test_its_accuracy_is_not_that_of_the_luckiest_of_many_strengths(monkeypatch):
    """The answers of 100 strengths are chance: the best over all folds has 0.61 on average."""

    def path(features, _labels, _classes, strengths, _scale):
        return ((torch.randn(2, 8, generator=draws), torch.zeros(2)) for _ in strengths)

    monkeypatch.setattr(probe, "STRENGTHS", tuple(range(100, 0, -1)))
    monkeypatch.setattr(probe, "_path", path)
    found = []
    for seed in range(4):
        draws = torch.Generator().manual_seed(seed)
        found.append(probe.fit(torch.randn(120, 1, 8, generator=draws), torch.arange(120) % 2, 2).accuracy)
    assert np.mean(found) == pytest.approx(0.5, abs=0.06)


def test_classes_are_spread_over_the_folds(monkeypatch):
    labels = torch.tensor([0] * 50 + [1] * 11 + [2] * 5)
    folds = probe._folds(labels.numpy(), 1, np.arange(len(labels)))
    for label in range(3):
        counts = np.bincount(folds[labels.numpy() == label], minlength=probe.FOLDS)
        assert counts.max() - counts.min() <= 1
    assert set(folds.tolist()) == set(range(probe.FOLDS))
    features, of_features = clusters()
    for images, expected in ((20, 20), (0, 5 * 3)):  # images beyond are not cross-validated, but fitted to
        monkeypatch.setattr(probe, "WORK", 12 * 3 * images)
        found = probe.fit(features, of_features, 3)
        assert found.images == expected
        assert found.interval == wilson(round(found.accuracy * expected), expected)


def test_the_seed_chooses_the_folds_and_the_images_that_are_cross_validated(monkeypatch):
    labels = torch.arange(60) % 3
    folds = [probe._folds(labels.numpy(), seed, np.arange(60)).tolist() for seed in (0, 1)]
    assert folds[0] != folds[1]
    seen: list[list[float]] = []

    def path(features: Any, _labels: Any, _classes: int, strengths: Any, _scale: Any) -> Any:
        seen.append(features.flatten().tolist())
        return ((torch.zeros(3, 1), torch.zeros(3)) for _ in strengths)

    monkeypatch.setattr(probe, "_path", path)
    monkeypatch.setattr(probe, "_folds", lambda *_: np.arange(60) % probe.FOLDS)
    monkeypatch.setattr(probe, "WORK", 3 * 20)
    for seed in (0, 1):
        probe.fit(torch.arange(60.0)[:, None, None], labels, 3, seed=seed)
    cross_validated = [{value for part in parts for value in part} for parts in (seen[:5], seen[6:11])]
    assert [len(images) for images in cross_validated] == [20, 20]
    assert cross_validated[0] != cross_validated[1]
    assert seen[5] == seen[11] == torch.arange(60.0).tolist()


def config_of(packed: Any, **more: Any) -> Any:
    data = {"path": str(packed / "train.lmdb"), "val_path": str(packed / "test.lmdb")}
    return build_run_config(TREE | {"data": data, "augment": {"flip": True}} | more, [], "x")


@pytest.fixture
def donor(packed, tmp_path, slim):
    train(config_of(packed, finetune={}), tmp_path / "donor")
    return {"model": TREE["model"] | {"weights": str(tmp_path / "donor")}}


def test_a_run_begins_at_its_probe(packed, tmp_path, donor, capsys, monkeypatch):
    pairs = np.arange(200) // 2
    monkeypatch.setattr("duetgan.training.classifier.task.look_alike_groups", lambda _: pairs)
    frozen = {"finetune": {"freeze": ["backbone"], "probe": True}, "seed": 4} | donor
    began = time.perf_counter()
    task, state = train(config_of(packed, **frozen, steps=1, optimizer={"name": "sgd", "lr": 1e-12}), tmp_path / "one")
    assert 0 < state["probe"]["seconds"] < time.perf_counter() - began
    assert not list((tmp_path / "one").rglob("*.png"))  # log.samples_every is 0
    assert task.frozen.begin == 5  # the regression needs all outputs, however few steps follow
    expected = probe.fit(*image_features(task.model, task.dataset, mirror=True), 10, seed=4, groups=pairs)
    for head in (task.model.head, task.ema.model.head):
        torch.testing.assert_close(head.weight.detach(), expected.weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(head.bias.detach(), expected.bias, rtol=1e-4, atol=1e-5)
    summary = {name: getattr(expected, name) for name in ("accuracy", "interval", "images", "strength")}
    assert state["probe"] == summary | {"seconds": state["probe"]["seconds"]}
    low, high = expected.interval
    assert (
        f"probe: a logistic regression of strength {expected.strength:g} on frozen features: accuracy "
        f"{expected.accuracy:.3f} ({low:.3f} to {high:.3f}) by cross-validation on 200 images, "
    ) in capsys.readouterr().err
    free = {"name": "schedulefree-sgd", "lr": 1e-12, "schedule": "constant"}  # which holds weights of its own
    task, _ = train(config_of(packed, **frozen, steps=1, optimizer=free), tmp_path / "free")
    torch.testing.assert_close(task.ema.model.head.weight, expected.weight, rtol=1e-4, atol=1e-5)
    search = prepare(config_of(packed, **frozen), RunFolder(tmp_path / "search"), torch.device("cpu"))
    capsys.readouterr()
    with pytest.raises(UserError, match="the loss falls at no rate"):  # the head's best is where it begins
        _find_rate(search, Sweep(steps=12))
    assert "training begins there" in capsys.readouterr().err
    options = ["--checkpoint", str(tmp_path / "one"), "--data", str(packed / "test.lmdb"), "--device", "cpu"]
    assert run_cli(evaluate.main, options) == 0
    document = json.loads((tmp_path / "one" / "eval" / "metrics.json").read_text())
    assert document["probe"]["accuracy"] == expected.accuracy
    assert f"{expected.accuracy:.3f}" in document["notes"]["probe"]
    whole = {"finetune": {"probe": True, "unfreeze": {"head": 0, "layer4": 0}}} | donor
    other, _ = train(config_of(packed, **whole), tmp_path / "straight")
    kept, _ = other.frozen.features(other.source(0))
    assert other.frozen.begin == 4
    torch.testing.assert_close(kept, other.frozen.features(None)[0], rtol=1e-4, atol=1e-5)


def test_two_ranks_begin_at_the_same_probe(packed, tmp_path, donor):
    """They compare what they hold after every step, the seconds that it took included."""
    tree = TREE | {"finetune": {"freeze": ["backbone"], "probe": True}, "augment": {"flip": True}} | donor
    data = {"data": {"path": str(packed / "train.lmdb"), "val_path": None}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree | data | {"distributed": {"check_every": 1}}))
    options = ["--device", "cpu", "--procs", "2", "--max-steps", "2", "--precision", "fp32"]
    run = run_command("train.py", "--config", tmp_path / "recipe.yaml", "--run-dir", tmp_path / "run", *options)
    assert run.success().err.count("training begins there") == 1


def test_look_alikes_share_a_fold(tmp_path, monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), np.uint8)
    images = images.repeat(2, 0)
    images[1::2, :, 0, 0] ^= 1  # a pixel
    pack_arrays(tmp_path / "twins.lmdb", images, np.arange(24) // 2 % 3, ["a", "b", "c"], source="twins")
    with Dataset(tmp_path / "twins.lmdb") as dataset:
        for compared, groups in ((24, np.arange(24) // 2 * 2), (23, np.arange(24))):
            monkeypatch.setattr(probe, "COMPARED", compared)
            assert probe.look_alike_groups(dataset).tolist() == groups.tolist()
    with Dataset([tmp_path / "twins.lmdb"] * 2) as several:
        assert probe.look_alike_groups(several).tolist() == list(range(48))


@pytest.mark.parametrize("model", [{"head": "hidden"}, {"name": "airbench", "stem": None}])
def test_its_head_must_be_linear_with_a_bias(packed, model):
    given = {"finetune": {"probe": True}, "model": TREE["model"] | model}
    assert_raises(UserError, "finetune.probe fits a linear head with a bias", config_of, packed, **given)
