"""airbench: the whitening, the paper's network by hand, what never trains, and filters made of the run's own images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from duetgan.data.augment.transforms import to_float
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.loader import Batch, read_batch
from duetgan.models.backbones.airbench import EPS, SCALE, ScaledPool, whitening
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.fast import fold_batchnorm
from duetgan.training.base.config import DataConfig
from duetgan.training.classifier import network as fitting
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.finetune import FineTuneConfig, FineTuning
from duetgan.training.classifier.task import ClassifierTask
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises

CPU = torch.device("cpu")


def network(channels=3, side=32, **config):
    with forked(0, "init", "airbench"):
        return Classifier(ModelConfig(name="airbench", **config), channels=channels, classes=5, resolution=side)


def images(count=8, channels=3, side=32):
    """Smooth ones, whose neighbouring pixels are alike: float64."""
    with forked(0, "test"):
        return F.avg_pool2d(torch.randn(count, channels, side + 2, side + 2, dtype=torch.float64), 3, stride=1) + 0.3


@pytest.mark.parametrize("channels", [1, 3])
def test_whitening_makes_the_patches_second_moments_the_identity(channels):
    x, patch = images(300, channels, 9), 4 * channels
    filters = whitening(x.split(256), eps=0.0)
    assert filters.shape == (2 * patch, channels, 2, 2)
    whitened = F.conv2d(x, filters).transpose(0, 1).flatten(1)
    moments = whitened @ whitened.T / whitened.shape[1]
    identity = torch.eye(patch, dtype=torch.float64)
    torch.testing.assert_close(moments[:patch, :patch], identity, rtol=0, atol=1e-9)
    assert torch.equal(filters[patch:], -filters[:patch])
    before = F.unfold(x, 2).transpose(0, 1).flatten(1)
    assert (before @ before.T / before.shape[1] - identity).abs().max() > 0.1


def test_whitening_has_the_largest_variance_first_and_spares_the_smallest():
    x = images(300, 3, 9)
    norms = whitening([x])[:12].flatten(1).norm(dim=1)
    values = torch.linalg.eigvalsh(torch.cov(F.unfold(x - 0.3, 2).transpose(0, 1).flatten(1)))
    assert (norms.diff() > 0).all()  # 1 / sqrt(eigenvalue + eps)
    assert norms[-1].item() == pytest.approx((values[0].item() + EPS) ** -0.5, rel=0.05)


def by_hand(model, x):
    """airbench94_muon.py's forward pass in training, its head's scale of 1/9 included."""
    state = {name.removeprefix("network."): value for name, value in model.named_parameters()}
    x = F.gelu(F.conv2d(x, state["whiten.weight"], state["whiten.bias"]))
    for layer in ("layer1", "layer2", "layer3"):
        for number in (1, 2):
            x = F.conv2d(x, state[f"{layer}.conv{number}.weight"], padding=1)
            x = F.max_pool2d(x, 2) if number == 1 else x
            x = (x - x.mean((0, 2, 3), keepdim=True)) / x.var((0, 2, 3), unbiased=False, keepdim=True).sqrt()
            x = F.gelu(x + state[f"{layer}.norm{number}.bias"][:, None, None])
    return F.max_pool2d(x, 3).flatten(1) @ state["head.weight"].T / 9


def test_logits_are_the_papers_also_folded_and_what_is_refused():
    model, x = network().double().train(), images()
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("bias"):
            nn.init.normal_(parameter)
    torch.testing.assert_close(model(x), by_hand(model, x), rtol=1e-6, atol=1e-8)
    assert model(x).shape == (8, 5)
    model = network(channels=1, side=28).eval()
    x = images(2, 1, 28).float()
    torch.testing.assert_close(fold_batchnorm(model)(x), model(x), rtol=1e-4, atol=1e-5)
    assert [layer.bias is None for layer in network(head="hidden").head[::2]] == [True, False]
    assert network(side=9).eval()(images(2, side=9).float()).shape == (2, 5)
    assert_raises(UserError, r"cannot take images of 8 px: set model\.input_size 9", network, side=8)
    ModelConfig(name="airbench", activation_checkpointing=True).check()
    ModelConfig(name="airbench", head="readout").check()
    assert_raises(UserError, r"model\.stem is not for airbench: set --model.stem null", network, stem="small")


def test_its_pooling_has_a_deterministic_gradient_on_cuda():
    """Which adaptive pooling has not; the same values and the same gradient."""
    x = torch.randn(2, 5, 3, 3, dtype=torch.float64, requires_grad=True)
    pooled, expected = ScaledPool()(x), F.adaptive_max_pool2d(x, 1) * SCALE
    assert pooled.equal(expected)
    assert "Adaptive" not in type(pooled.grad_fn.next_functions[0][0]).__name__
    assert torch.autograd.grad(pooled.sum(), x)[0].equal(torch.autograd.grad(expected.sum(), x)[0])


def test_convolutions_begin_as_identities_and_what_never_trains():
    model = network()
    for layer, inputs in (("layer1", 24), ("layer2", 64), ("layer3", 256)):
        for conv, channels in ((f"{layer}.conv1", inputs), (f"{layer}.conv2", None)):
            weight = model.network.get_submodule(conv).weight
            assert model.network.get_submodule(conv).bias is None
            channels = channels or weight.shape[0]
            x = torch.randn(1, channels, 5, 5)
            torch.testing.assert_close(F.conv2d(x, weight, padding=1)[:, :channels], x)
    kept = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    norms = {f"network.layer{n}.norm{k}.weight" for n in (1, 2, 3) for k in (1, 2)}
    assert kept == {"network.whiten.weight"} | norms
    tuning = FineTuning(model, FineTuneConfig(stage_lr={"head": 2.0}, freeze_at={"stem": 3}), steps_per_epoch=1.0)
    for step in (0, 3, 0):
        tuning.at(step)
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        assert frozen == kept | ({"network.whiten.bias"} if step == 3 else set())
    groups = tuning.groups(0.1)
    assert groups is not None
    assert {name for group in groups for name, _ in group["params"]} == set(tuning.parameters) - kept


def task_of(path: Path, **model: Any) -> tuple[ClassifierTask, torch.Tensor]:
    """A task, and all images of its data as its first convolution takes them."""
    config = ClassifierConfig(data=DataConfig(path=str(path)), batch_size=8, steps=10)
    config.model = ModelConfig(name="airbench", **model)
    with Dataset(path) as reader:
        task = ClassifierTask(config, reader, None, CPU)
        every = to_float(torch.from_numpy(reader.read(np.arange(len(reader)))[0]))
    return task, task.model.prepare(every)


def test_a_run_begins_with_filters_of_its_own_images(packed):
    task, every = task_of(packed / "train.lmdb", normalise="imagenet")
    expected = whitening([every]).float()
    for model in (task.model, task.ema.model):
        torch.testing.assert_close(model.network.whiten.weight.detach(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("limit", "value", "most"), [("PART", 5, 5), ("PIXELS", 3 * 16**2, 3), ("IMAGES", 67, 67)])
def test_images_are_whitened_in_parts_and_once_for_each_data_size_and_normalisation(
    packed, monkeypatch, limit, value, most
):
    read: list[int] = []

    def noted(reader: Dataset, indices: np.ndarray) -> Batch:
        read.extend(indices.tolist())
        assert len(indices) <= most
        return read_batch(reader, indices)

    monkeypatch.setattr(fitting, "read_batch", noted)
    monkeypatch.setattr(fitting, limit, value)
    for path in (packed / "train.lmdb", packed / "test.lmdb"):
        for model in ({}, {"normalise": "imagenet"}, {"input_size": 32}):
            read.clear()
            task, every = task_of(path, **model)
            count = min(fitting.IMAGES, len(every))
            assert read == [number * (len(every) - 1) // (count - 1) for number in range(count)]
            weight = task.model.network.whiten.weight.detach()
            torch.testing.assert_close(weight, whitening([every[read]]).float(), rtol=1e-6, atol=1e-7)
