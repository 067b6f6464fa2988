"""A GAN's discriminator as a classifier's backbone: which part of it is taken, and what it is refused for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from duetgan.extras.few_labels.discriminator import Trunk, load_discriminator
from duetgan.metrics.grad_cam import image_heat
from duetgan.models.backbones.base import in_turn
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.fast import fold_batchnorm
from duetgan.models.registry import architecture_of
from duetgan.utils.checkpoint import resolve
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises
from tests.metrics.conftest import gan_run
from tests.models.helpers import draw

SIZES: dict[str, dict[str, Any]] = {
    "stylegan2": {"channel_base": 64, "channel_max": 8},
    "r3gan": {"width": 8, "cardinality": 2, "blocks": 1},
    "dcgan": {"width": 4},
}


def form(name, **other):
    return {"architecture": name, "resolution": 16, "channels": 1, "config": SIZES[name]} | other


def classifier(name, *, channels=1, side=16, **config) -> Any:
    with forked(0, "init", "test discriminator"):
        model = ModelConfig(**{"name": "discriminator", "weights": "runs/gan", "discriminator": form(name)} | config)
        return Classifier(model, channels=channels, classes=3, resolution=side)


@pytest.mark.parametrize(("name", "last"), [("stylegan2", "blocks.1"), ("r3gan", "stages.2"), ("dcgan", "layers.9")])
def test_features_are_the_means_of_the_discriminators_last_maps(name, last):
    entry = architecture_of(name)
    with forked(0, "init", "test discriminator"):
        config = entry.discriminator_config(**SIZES[name])
        discriminator = entry.discriminator(config, resolution=16, channels=1, classes=3)
    maps = []
    discriminator.get_submodule(last).register_forward_hook(lambda *call: maps.append(call[-1].clone()))
    images = draw(4, 1, 16, 16).float()
    discriminator.hidden(images)
    assert maps[0].shape[2:] == (4, 4)
    model = classifier(name)
    taken = Trunk(discriminator).state_dict() | {f"fc.{name}": value for name, value in model.head.state_dict().items()}
    model.network.load_state_dict(taken)
    torch.testing.assert_close(model.features(images), maps[0].mean(dim=(2, 3)))
    torch.testing.assert_close(model.features(images[:1]), model.features(images)[:1])  # of each image alone
    assert model.config.imagenet_normalised is False


@pytest.mark.parametrize("name", SIZES)
def test_blocks_hold_each_parameter_once_in_the_order_of_the_forward_pass(name):
    model = classifier(name, activation_checkpointing=True).train()
    assert sorted(model.block_of) == sorted(name for name, _ in model.named_parameters())
    assert (model.stages[:2], model.stages[-1]) == (["stem", "stage1"], "head")
    modules = [model.network.get_submodule(stage) for stage in model.stages[:-1]]
    images = draw(2, 1, 16, 16).float()
    expected = model.head(in_turn(modules, images).mean(dim=(2, 3)))
    torch.testing.assert_close(model(images), expected)
    expected.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", SIZES)
def test_what_is_made_of_a_trained_classifier_takes_it(name):
    """Found by trying: folding could not trace R3GAN's layers. Export and Grad-CAM are tried along."""
    model, images = classifier(name).eval(), draw(2, 1, 16, 16).float()
    expected = model(images)
    torch.testing.assert_close(fold_batchnorm(model)(images), expected)
    torch.testing.assert_close(torch.export.export(model, (images,)).module()(images), expected)
    assert image_heat(model, torch.zeros(2, 1, 16, 16, dtype=torch.uint8), torch.tensor([0, 1])).shape == (2, 4, 4)


def run_of(folder: Path) -> Path:
    """A GAN's run with a discriminator that starts from another run."""
    config = SIZES["stylegan2"]
    network = architecture_of("stylegan2").build("discriminator", config, classes=3, resolution=16, channels=1)
    lineage = {"trained_on": ["earlier"], "synthetic": []}
    return gan_run(folder, side=16, discriminator=network, sizes=config, content_hash="f00d", lineage=lineage)


def test_it_has_seen_all_that_the_gan_has(tmp_path):
    """The images of its run and of the runs before, and its generator's samples."""
    run = run_of(tmp_path / "gan")
    model = classifier("stylegan2", weights=str(run))
    assert f"weights from {resolve(run)}" in load_discriminator(model)
    assert model.lineage.trained_on == ["f00d", "earlier"]
    assert [passport.trained_on for passport in model.lineage.synthetic] == ["f00d"]
    other = form("stylegan2", config=SIZES["stylegan2"] | {"minibatch_std_group": 2})
    model = classifier("stylegan2", weights=str(run), discriminator=other)
    assert_raises(UserError, r"its discriminator is not model\.discriminator", load_discriminator, model)


def test_what_does_not_go_together_is_refused():
    odd = form("stylegan2", channels=2)
    unknown = form("stylegan2", config={"width": 8})
    for config, told in (
        ({"name": "discriminator"}, "belong together"),
        ({"name": "resnet18", "discriminator": form("dcgan")}, "belong together"),
        ({"name": "discriminatr"}, "did you mean"),
        (
            {"name": "discriminator", "discriminator": {"architecture": "dcgan"}},
            r"model\.discriminator\.\w+ is missing",
        ),
        ({"name": "discriminator", "discriminator": odd}, r"model\.discriminator\.channels 2: must be 1 or 3"),
        ({"name": "discriminator", "discriminator": unknown}, "width"),
        ({"name": "discriminator", "discriminator": form("stylegan2", architecture="stylegan9")}, "unknown"),
    ):
        assert_raises(UserError, told, ModelConfig, **config)
    assert_raises(UserError, "images of 1 channels, these have 3", classifier, "stylegan2", channels=3)
    assert_raises(UserError, r"model\.stem", classifier, "stylegan2", stem="small")
