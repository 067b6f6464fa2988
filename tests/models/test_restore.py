from typing import Any

import pytest
import torch

from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.gan import draw as draws
from duetgan.models.gan import generate, to_uint8
from duetgan.models.r3gan import R3Generator, R3GeneratorConfig
from duetgan.models.restore import classifier_from, generator_from
from duetgan.models.stylegan2 import Generator, GeneratorConfig
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.models.test_layers import draw

SIZES: dict[str, Any] = {"z_dim": 4, "w_dim": 4, "mapping_layers": 1, "channel_base": 64, "channel_max": 4}
SHAPE: dict[str, Any] = {"channels": 1, "classes": 3, "resolution": 8}


def checkpoint(task):
    """What a training run saves, with weights that differ between the live network and its average."""
    with forked(0, "init", task):
        networks: list[Any]
        config: dict[str, Any]
        if task == "gan":
            networks = [Generator(GeneratorConfig(**SIZES), **SHAPE) for _ in range(2)]
            config, names = {"generator": SIZES}, ("generator", "generator_ema")
        else:
            networks = [Classifier(ModelConfig(stem="small-stride2"), **SHAPE) for _ in range(2)]
            config, names = {"model": {"stem": "small-stride2"}}, ("model", "model_ema")
    state = {name: network.state_dict() for name, network in zip(names, networks, strict=True)}
    content = {"schema": 1, "task": task, "step": 3, "config": config, "classes": ["a", "b", "c"]}
    return {**content, "shape": SHAPE, "state": state}, networks[1].eval()


def test_generator_is_the_average_one():
    content, expected = checkpoint("gan")
    found = generator_from(content)
    assert (found.resolution, found.channels, found.classes, found.z_dim) == (8, 1, 3, 4)
    assert not found.training
    assert not any(p.requires_grad for p in found.parameters())
    z, labels = draw(2, 4).float(), torch.tensor([0, 2])
    torch.testing.assert_close(found(z, labels), expected(z, labels).detach(), rtol=1e-5, atol=1e-5)


def test_architecture_is_the_one_that_the_config_names():
    content, _ = checkpoint("gan")
    content["config"]["architecture"] = "stylegan2"
    assert isinstance(generator_from(content), Generator)
    sizes: dict[str, Any] = {"z_dim": 4, "width": 8, "cardinality": 2, "blocks": 1}
    with forked(0, "init", "r3gan"):
        expected = R3Generator(R3GeneratorConfig(**sizes), **SHAPE).eval()
    content["config"] = {"architecture": "r3gan", "generator": sizes}
    content["state"]["generator_ema"] = expected.state_dict()
    found = generator_from(content)
    assert isinstance(found, R3Generator)
    assert not found.training
    assert not any(p.requires_grad for p in found.parameters())
    z, labels = draw(2, 4).float(), torch.tensor([0, 2])
    torch.testing.assert_close(found(z, labels), expected(z, labels).detach(), rtol=1e-5, atol=1e-5)
    images = generate(found, labels=labels, indices=[0, 1], seed=0)
    drawn, maps = draws(found, [0, 1], 0)
    assert (drawn.shape, maps) == ((2, 4), [])
    assert images.equal(to_uint8(found(drawn, labels)))


def test_classifier_is_the_average_one():
    content, expected = checkpoint("classifier")
    found = classifier_from(content)
    assert (found.resolution, found.channels, found.classes) == (8, 1, 3)
    assert not found.training
    assert not any(p.requires_grad for p in found.parameters())
    x = draw(2, 1, 8, 8).float()
    torch.testing.assert_close(found(x), expected(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("task", "restore", "needed"), [("gan", classifier_from, "classifier"), ("classifier", generator_from, "gan")]
)
def test_another_tasks_checkpoint_is_refused(task, restore, needed):
    with pytest.raises(UserError, match=f"of task '{task}', but a '{needed}' checkpoint is needed"):
        restore({"task": task})


def test_a_config_that_this_version_does_not_know_is_refused():
    content, _ = checkpoint("gan")
    content["config"] = {"generator": SIZES | {"z_dims": 4}}
    with pytest.raises(UserError, match=r"checkpoint's generator: unknown key 'z_dims' \(did you mean 'z_dim'\?\)"):
        generator_from(content)


def test_a_generator_saved_while_it_grew_is_restored_at_its_stage():
    shape: dict[str, Any] = {"channels": 1, "classes": 0, "resolution": 16}
    model = Generator(GeneratorConfig(**SIZES), **shape)
    saved = {"task": "gan", "config": {"generator": SIZES}, "shape": shape}
    saved["state"] = {"generator_ema": model.state_dict()}
    z = torch.ones(2, 4)
    grown = generator_from(saved | {"stage": [16, 1.0]})(z, noise="none")
    torch.testing.assert_close(grown, model(z, noise="none"))
    small = generator_from(saved | {"stage": [8, 0.5]})
    assert not small.training
    expected = model(z, noise="none", resolution=8, alpha=0.5).repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(small(z, noise="none"), expected)
