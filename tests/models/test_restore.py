from typing import Any

import pytest
import torch

from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.growing import GrowingGenerator, StageGenerator
from duetgan.models.r3gan import R3Generator, R3GeneratorConfig
from duetgan.models.registry import ARCHITECTURES, architecture_of
from duetgan.models.restore import (
    classifier_from,
    discriminator_from,
    fingerprint,
    generator_from,
    inherited_lineage,
)
from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig, Generator, GeneratorConfig
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises
from tests.models.helpers import draw

SIZES: dict[str, Any] = {"z_dim": 4, "w_dim": 4, "mapping_layers": 1, "channel_base": 64, "channel_max": 4}
SHAPE: dict[str, Any] = {"channels": 1, "classes": 3, "resolution": 8}
INPUTS = draw(2, 4).float(), torch.tensor([0, 2])


def gan_content(state, *, config=SIZES, shape=SHAPE, **more):
    content = {"schema": 1, "task": "gan", "step": 3, "config": {"generator": config, **more}, "classes": list("bca")}
    return content | {"shape": shape, "state": state}


def same_network(found, expected, *inputs, tolerance=1e-5):
    """It is the expected one, ready to be used and not to be trained."""
    assert not found.training
    assert not any(p.requires_grad for p in found.parameters())
    outputs = found(*inputs), expected.eval()(*inputs).detach()
    torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)


def two(build):
    """A live network and its average, of other weights."""
    with forked(0, "init", "two"):
        return [build(), build()]


def test_generator_is_the_average_one():
    live, average = two(lambda: Generator(GeneratorConfig(**SIZES), **SHAPE))
    content = gan_content({"generator": live.state_dict(), "generator_ema": average.state_dict()})
    for more in ({}, {"architecture": "stylegan2"}):
        content["config"] |= more
        found = generator_from(content)
        assert isinstance(found, Generator)
        assert (found.resolution, found.channels, found.classes, found.z_dim) == (8, 1, 3, 4)
        same_network(found, average, *INPUTS)
    sets = [[0], [1, 2]]
    assert generator_from(content | {"sets": sets}, several=True).label_sets == sets
    assert_raises(UserError, "is of several labels an image", generator_from, content | {"sets": sets})


def test_architecture_is_the_one_that_the_config_names():
    sizes: dict[str, Any] = {"z_dim": 4, "width": 8, "cardinality": 2, "blocks": 1}
    with forked(0, "init", "r3gan"):
        expected = R3Generator(R3GeneratorConfig(**sizes), **SHAPE)
    found = generator_from(gan_content({"generator_ema": expected.state_dict()}, config=sizes, architecture="r3gan"))
    assert isinstance(found, R3Generator)
    same_network(found, expected, *INPUTS)


def test_classifier_is_the_average_one_and_an_unknown_config_is_refused():
    live, average = two(lambda: Classifier(ModelConfig(stem="small-stride2"), **SHAPE))
    content = gan_content({"model": live.state_dict(), "model_ema": average.state_dict()})
    found = classifier_from(content | {"task": "classifier", "config": {"model": {"stem": "small-stride2"}}})
    assert (found.resolution, found.channels, found.classes) == (8, 1, 3)
    assert found.class_names == ("b", "c", "a")
    same_network(found, average, draw(2, 1, 8, 8).float(), tolerance=1e-4)
    assert ModelConfig.model_validate({"split": {"layer3": 1}}).split == "auto"  # a checkpoint of an older version
    with pytest.raises(UserError, match=r"checkpoint's generator: unknown key 'z_dims' \(did you mean 'z_dim'\?\)"):
        generator_from(gan_content({"generator_ema": {}}, config=SIZES | {"z_dims": 4}))
    content |= {"task": "classifier", "config": {"model": {"stems": "small"}}}
    assert_raises(UserError, "checkpoint's model: unknown key 'stems'", classifier_from, content)
    average.add_thresholds()  # several labels an image: it teaches like any other
    content |= {"config": {"model": {"stem": "small-stride2"}}, "state": {"model_ema": average.state_dict()}}
    content["data"] = {"content_hash": "cafe"}
    teacher = fingerprint(average)
    assert inherited_lineage(content) == Lineage.of(trained_on=["cafe"], teachers=[teacher])
    assert inherited_lineage(content | {"task": "gan"}) == Lineage.of(trained_on=["cafe"])
    average.add_temperature()
    assert fingerprint(average) == teacher  # a calibrated copy has learnt from the same images


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_networks_go_to_the_device_with_channels_last(device):
    shape: dict[str, Any] = {**SHAPE, "channels": 3}
    sizes = {key: SIZES[key] for key in ("channel_base", "channel_max")}
    generator = Generator(GeneratorConfig(**SIZES), **shape)
    discriminator = Discriminator(DiscriminatorConfig(**sizes), **shape)
    state = {"generator_ema": generator.state_dict(), "discriminator": discriminator.state_dict()}
    gan = gan_content(state, shape=shape, discriminator=sizes)
    with forked(0, "init", "device"):
        classifier = Classifier(ModelConfig(stem="small-stride2"), **shape)
    config = {"model": {"stem": "small-stride2"}}
    judge = gan_content({"model_ema": classifier.state_dict()}, shape=shape) | {"task": "classifier", "config": config}
    for network in (
        generator_from(gan, device),
        generator_from(gan | {"stage": [4, 0.5]}, device),
        discriminator_from(gan, device),
        classifier_from(judge, device),
    ):
        tensors = [*network.parameters(), *network.buffers()]
        assert {tensor.device.type for tensor in tensors} == {device}
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors if t.ndim == 4)
        assert not network.training
        assert not any(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize(
    ("task", "restore", "needed"), [("gan", classifier_from, "classifier"), ("classifier", generator_from, "gan")]
)
def test_another_tasks_checkpoint_is_refused(task, restore, needed):
    with pytest.raises(UserError, match=f"of task '{task}', but a '{needed}' checkpoint is needed"):
        restore({"task": task})


def test_a_generator_saved_while_it_grew_is_restored_at_its_stage():
    shape: dict[str, Any] = {"channels": 1, "classes": 0, "resolution": 16}
    model, z = Generator(GeneratorConfig(**SIZES), **shape), torch.ones(2, 4)
    saved = gan_content({"generator_ema": model.state_dict()}, shape=shape)
    grown = generator_from(saved | {"stage": [16, 1.0]})(z, noise="none")
    torch.testing.assert_close(grown, model(z, noise="none"))
    small = generator_from(saved | {"stage": [8, 0.5]})
    assert not small.training
    growing = GrowingGenerator(model.config, **shape)
    growing.load_state_dict(model.state_dict())
    growing.enter(8, 0.5)
    expected = growing(z, noise="none").repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(small(z, noise="none"), expected)
    wide = Generator(GeneratorConfig(**SIZES), **shape | {"resolution": "24x16"})
    saved = gan_content({"generator_ema": wide.state_dict()}, shape=shape | {"resolution": "24x16"})
    for side, kind in ((8, StageGenerator), (16, Generator)):  # the shorter one, of a network that has grown
        assert isinstance(generator_from(saved | {"stage": [side, 1.0]}), kind)


SMALL: dict[str, dict[str, int]] = {
    "stylegan2": {"channel_base": 64, "channel_max": 4},
    "r3gan": {"width": 8, "cardinality": 2},
    "dcgan": {"width": 2},
}


def test_an_unknown_name_is_refused_with_the_near_one():
    with pytest.raises(UserError, match=r"'r3-gan' is unknown \(did you mean 'r3gan'\?\); there are stylegan2, r3gan"):
        architecture_of("r3-gan")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["generator", "discriminator"])
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_both_networks_can_be_traced_in_training(architecture, name):
    """TensorBoard's graph of a run is a trace of networks whose parameters train."""
    parts = ARCHITECTURES[architecture]
    config = getattr(parts, f"{name}_config")(**SMALL.get(architecture, SMALL["stylegan2"]))
    network = getattr(parts, name)(config, resolution=8, channels=1, classes=2)
    z = torch.zeros(4, network.z_dim) if name == "generator" else torch.zeros(4, 1, 8, 8)
    labels = torch.zeros(4, dtype=torch.int64)
    traced = torch.jit.trace(network, (z, labels), check_trace=False, strict=False)
    torch.testing.assert_close(traced(z, labels), network(z, labels))
