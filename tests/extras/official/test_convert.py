"""Networks of other programs come over with their images: against their formulas in float64 (`reference`)."""

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch

from duetgan.extras.official.convert import main, read
from duetgan.extras.official.names import Converted
from duetgan.models.registry import architecture_of
from duetgan.models.restore import generator_from
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.config.build import build
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.extras.official import layouts, r3gan_program
from tests.models import reference

LABELS = np.array([0, 2, 1, 1])


def discriminator_of(converted: Converted):
    architecture = architecture_of(converted.architecture)
    config = build(architecture.discriminator_config, converted.discriminator, source="test")
    network = architecture.discriminator(config, **converted.shape)
    network.load_state_dict(converted.state["discriminator"])
    return network.double()


def expected_images(state, z, labels, multiplier=0.01):
    network = layouts.nvidia_network(state, "G")
    w = reference.mapping(network.mapping, z, labels, lr_multiplier=multiplier)
    ws = np.repeat(w[:, None], 6, axis=1)
    return reference.synthesis(network, ws, [noise[None, None] for noise in network.noise])


def apart(x, group):
    """The order in which NVIDIA's groups are consecutive."""
    return np.arange(len(x)).reshape(group, -1).T.flatten()


def expected_logits(state, images, labels, *, group, multiplier):
    """`reference` has the multiplier 0.01 of the label mapping and consecutive groups."""
    state = {n: t * (multiplier / 0.01 if n.startswith("mapping.fc") else 1) for n, t in state.items()}
    order = apart(images, group)
    network = layouts.nvidia_network(state, "D")
    given = None if labels is None else labels[order]
    found = reference.discriminator(network, images[order], given, residual="b8.skip.weight" in state, group=group)
    logits = np.empty_like(found)
    logits[order] = found
    return logits


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory):
    path = tmp_path_factory.mktemp("nvidia") / "network.pkl"
    return path, *layouts.write_nvidia(path)


def test_nvidias_networks_draw_and_judge_as_they_did(nvidia, tmp_path):
    path, average, _ = nvidia
    assert main([str(path), str(tmp_path / "run"), "--classes", "a,b,c"]) == 0
    assert_raises(UserError, "cannot write /proc/x", main, [str(path), "/proc/x"])
    checkpoint = load(resolve(tmp_path / "run"))
    assert checkpoint["classes"] == ["a", "b", "c"]
    generator = generator_from(checkpoint).double()
    z = layouts.drawn(4, 5, key="z").double()
    found = generator(z, torch.from_numpy(LABELS), noise="const").numpy()
    np.testing.assert_allclose(found, expected_images(average, z.numpy(), LABELS), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(generator.w_avg.float(), average["mapping.w_avg"], rtol=0, atol=0)
    path, _, state = nvidia
    images = layouts.drawn(4, 3, 16, 16, key="images").double()
    found = discriminator_of(read(path))(images, torch.from_numpy(LABELS)).detach().numpy()
    expected = expected_logits(state, images.numpy(), LABELS, group=2, multiplier=0.1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_unconditional_plain_and_without_noise_with_stylegan3s_arguments(tmp_path):
    g = {**layouts.G_ARGUMENTS, "c_dim": 0, **layouts.CHANNELS, "use_noise": False, "synthesis_kwargs": {}}
    d = {**layouts.D_ARGUMENTS, "c_dim": 0, "architecture": "orig"}
    generator = layouts.nvidia_generator(classes=0)
    quiet = {name: tensor for name, tensor in generator.items() if "noise" not in name}
    plain = layouts.nvidia_discriminator(classes=0, residual=False)
    path = tmp_path / "network.pkl"
    layouts.write_nvidia(path, generator=quiet, average=quiet, discriminator=plain, g=g, d=d)
    converted = read(path)
    assert (converted.generator["conv_clamp"], converted.discriminator["clamp_always"]) == (None, True)
    images = layouts.drawn(2, 3, 16, 16, key="images").double()
    found = discriminator_of(converted)(images).detach().numpy()
    np.testing.assert_allclose(found, expected_logits(plain, images.numpy(), None, group=2, multiplier=1), rtol=1e-5)
    assert all(not t.any() for n, t in converted.state["generator"].items() if "noise" in n)


def test_tensorflows_networks_are_those_of_pytorch(tmp_path):
    generator, discriminator = layouts.nvidia_generator(), layouts.nvidia_discriminator()
    average = {n: t + 1 if "filter" not in n else t for n, t in generator.items()}
    layouts.write_tensorflow(tmp_path / "network.pkl", generator, average, discriminator)
    layouts.write_nvidia(tmp_path / "torch.pkl", generator=generator, average=average, discriminator=discriminator)
    found, expected = read(tmp_path / "network.pkl"), read(tmp_path / "torch.pkl")
    assert found.shape == expected.shape
    for part, state in expected.state.items():
        torch.testing.assert_close(found.state[part], state, rtol=1e-6, atol=1e-6)
        exact = [name for name in state if "affine.bias" not in name]  # of which 1 is taken off and put back
        assert all(found.state[part][name].equal(state[name]) for name in exact)
    assert found.generator["channel_base"] == 64


def test_rosinalitys_networks(tmp_path):
    (state, named), (theirs, ours) = layouts.rosinality_generator(), layouts.rosinality_discriminator()
    content = {"g_ema": state, "g": state, "d": theirs, "args": Namespace(lr=0.002), "d_optim": {"state": {}}}
    torch.save(content, tmp_path / "network.pt")
    converted = read(tmp_path / "network.pt")
    assert main([str(tmp_path / "network.pt"), str(tmp_path / "run")]) == 0
    generator: Any = generator_from(load(resolve(tmp_path / "run"))).double()
    z = layouts.drawn(2, 7, key="z").double()
    expected = expected_images(named, z.numpy(), None)
    np.testing.assert_allclose(generator(z, noise="const").numpy(), expected, rtol=1e-5, atol=1e-5)
    images = layouts.drawn(4, 3, 16, 16, key="images").double()
    found = discriminator_of(converted)(images).detach().numpy()
    np.testing.assert_allclose(found, expected_logits(ours, images.numpy(), None, group=4, multiplier=1), rtol=1e-5)
    draws = generator.mapping(torch.randn(4096, 7, generator=torch.Generator().manual_seed(1)).double(), None)
    spread = draws.std(0)
    assert ((generator.w_avg - draws.mean(0)).abs() < 0.1 * spread + 1e-6).all()
    torch.save(content | {"latent_avg": torch.arange(7.0)}, tmp_path / "converted.pt")
    assert read(tmp_path / "converted.pt").state["generator_ema"]["w_avg"].tolist() == list(range(7))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"average": {"synthesis.b16.conv1.extra": torch.ones(1)}}, "has 1 tensors that Duet's network lacks"),
        ({"average": {"synthesis.b8.resample_filter": torch.eye(4)}}, "another filter"),
        ({"average": {"mapping.fc0.bias": torch.full((7,), torch.nan)}}, "not finite"),
        (
            {"average": {"mapping.fc0.bias": torch.zeros(8)}},
            "fc0.bias is .8., Duet.s mapping.layers.0.bias .7.",
        ),
        ({"discriminator": {"b8.skip.weight": None}}, "has no b8.skip.weight"),
        ({"g": {"synthesis_kwargs": {"architecture": "resnet", **layouts.CHANNELS}}}, "architecture is 'resnet'"),
        ({"g": {"mapping_kwargs": {"num_layers": 2, "activation": "relu"}}}, "activation is 'relu'"),
        ({"g": {"img_resolution": 24}}, "a resolution of 24"),
        ({"g": {"magic": 1}}, "magic, which Duet does not know"),
        ({"d": {"epilogue_kwargs": {"mbstd_num_channels": 4}}}, "4 maps of minibatch"),
        ({"d": {"architecture": "skip"}}, "architecture 'skip'"),
        ({"d": {"img_channels": 1}}, "looks at"),
    ],
)
def test_what_is_another_network_is_refused_by_name(tmp_path, change, told):
    given = {"average": layouts.nvidia_generator(), "discriminator": layouts.nvidia_discriminator()}
    given |= {"g": layouts.G_ARGUMENTS, "d": layouts.D_ARGUMENTS}
    ((part, values),) = change.items()
    given[part] = {name: value for name, value in {**given[part], **values}.items() if value is not None}
    layouts.write_nvidia(tmp_path / "network.pkl", **given)
    assert_raises(UserError, told, main, [str(tmp_path / "network.pkl"), str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_written_over_and_classes_are_counted(nvidia, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    for source, out, more, told in (
        (nvidia[0], "run", [], "give a new folder"),
        (nvidia[0], "other", ["--classes", "a,b"], "2 different names, the networks have 3"),
        (tmp_path / "absent.pkl", "other", [], r"[Nn]o such file"),
    ):
        assert_raises(UserError, told, main, [str(source), str(tmp_path / out), *more])


@pytest.mark.parametrize("classes", [0, 3])
def test_r3gans_networks(tmp_path, classes):
    average, discriminator = r3gan_program.build(classes)
    r3gan_program.write(tmp_path / "network.pkl", average, discriminator)
    converted = read(tmp_path / "network.pkl")
    assert converted.generator["full_width_up_to"] == 8
    assert main([str(tmp_path / "network.pkl"), str(tmp_path / "run")]) == 0
    generator = generator_from(load(resolve(tmp_path / "run"))).double()
    z, images = layouts.drawn(2, 6, key="z").double(), layouts.drawn(2, 3, 16, 16, key="images").double()
    labels = torch.tensor([2, 0]) if classes else None
    one_hot = None if labels is None else torch.eye(3).double()[labels]
    with torch.no_grad():
        expected = average.double().Model(z, one_hot), discriminator.double().Model(images, one_hot)
        found = generator(z, labels), discriminator_of(converted)(images, labels)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.pt", {"GAN": {"a": torch.zeros(1)}, "version": "1"}, "cannot be read .*; give a network of NVIDIA's"),
        ("c.pkl", b"\x80\x04 training.networks_stylegan3", "cannot be read .*; give a network's file"),
    ],
)
def test_other_files_are_refused_with_the_programs_that_are_read(tmp_path, name, content, told):
    """G5: they were refused in words of Duet's inside."""
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        torch.save(content, tmp_path / name)
    assert_raises(UserError, f"{name}:? {told}", read, tmp_path / name)
    if name == "c.pkl":
        assert_raises(UserError, r"duet convert .*c\.pkl RUN", resolve, tmp_path / name)
