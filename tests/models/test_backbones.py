"""Every backbone by its description: blocks, stem, head, small images, freezing, checkpointing, splits, weights."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from duetgan.metrics.grad_cam import grad_cam, image_heat
from duetgan.models.backbones.base import Backbone
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.fast import fold_batchnorm
from duetgan.models.registry import BACKBONES, backbone_of
from duetgan.models.weights import cached_weights, find_weights, load_pretrained
from duetgan.training.classifier.finetune import FineTuneConfig, FineTuning
from duetgan.utils.config.build import build as from_keys
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises
from tests.models.helpers import draw

OURS = ["resnet18", "convnext_tiny", "efficientnet_b0"]
TIMM = ["timm:test_resnet", "timm:test_convnext", "timm:test_efficientnet"]
CPU = torch.device("cpu")


def build(name, *, channels=1, side=32, **config) -> Any:
    with forked(0, "init", "test backbones"):
        return Classifier(ModelConfig(name=name, **config), channels=channels, classes=3, resolution=side)


def images(side=32, channels=1, count=4):
    return draw(count, channels, side, side).float()


@pytest.mark.parametrize("name", [*OURS, *TIMM, "timm:test_vit"])
def test_blocks_hold_each_parameter_once_in_the_order_of_the_forward_pass(name):
    model = build(name, **({"input_size": 160} if "vit" in name else {})).eval()
    assert sorted(model.block_of) == sorted(name for name, _ in model.named_parameters())
    assert (model.stages[0], model.stages[-1]) == ("stem", "head")
    first, head = model.backbone.first, model.backbone.head
    assert model.stage_of(f"network.{first}.weight") == "stem"
    assert {name for name in model.block_of if model.stage_of(name) == "head"} == {
        f"network.{head}.weight",
        f"network.{head}.bias",
    }
    called: list[str] = []
    for module_name, module in model.named_modules():
        for own, _ in module.named_parameters(recurse=False):
            block = model.block_of[f"{module_name}.{own}"]
            module.register_forward_pre_hook(lambda _module, _inputs, block=block: called.append(block))
    model(images())
    assert list(dict.fromkeys(called)) == list(dict.fromkeys(model.block_of.values()))


@pytest.mark.parametrize("name", OURS)
def test_logits_are_torchvisions(name):
    model = build(name, channels=3, side=64).eval()
    theirs = torchvision.models.get_model(name, num_classes=3).eval()
    theirs.load_state_dict({key.removeprefix("network."): value for key, value in model.state_dict().items()})
    torch.testing.assert_close(model(images(64, 3)), theirs(images(64, 3)), rtol=0, atol=0)


@pytest.mark.parametrize("name", [*TIMM, "timm:test_vit"])
def test_logits_are_timms(name):
    timm = pytest.importorskip("timm")
    model = build(name, side=160).eval()
    theirs = timm.create_model(name.removeprefix("timm:"), num_classes=3, in_chans=1).eval()
    theirs.load_state_dict({key.removeprefix("network."): value for key, value in model.state_dict().items()})
    torch.testing.assert_close(model(images(160)), theirs(images(160)))
    stated, colour = theirs.pretrained_cfg, images(160, 3)
    sides = stated["input_size"][1], int(stated["input_size"][1] / stated["crop_pct"])
    assert model.backbone.images_of(name, "x.safetensors") == (*sides, stated["interpolation"])
    wide = build(name, side="192x160", input_size=160).prepare(torch.zeros(1, 1, 160, 192))
    assert wide.shape[2:] == ((160, 160) if model.backbone.side else (160, 192))
    prepared = build(name, channels=3, side=160, normalise="imagenet").prepare(colour)
    expected = torchvision.transforms.functional.normalize((colour + 1) / 2, stated["mean"], stated["std"])
    torch.testing.assert_close(prepared, expected)


@pytest.mark.parametrize(
    "name", sorted(name for name in BACKBONES if backbone_of(name).network is None and name != "convnext_large")
)
def test_every_name_is_described_as_torchvision_builds_it(name):
    with torch.device("meta"):
        backbone, network = backbone_of(name), backbone_of(name).build(name)
        theirs = torchvision.models.get_model(name)
    assert {k: v.shape for k, v in network.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert set(backbone.block_of(network)) == {name for name, _ in network.named_parameters()}
    assert isinstance(network.get_submodule(backbone.head), nn.Linear)
    assert network.get_submodule(backbone.first).in_channels == 3
    network.get_submodule(backbone.maps)
    depths = [module.p for module in network.modules() if isinstance(module, torchvision.ops.StochasticDepth)]
    assert not any(depths)  # their draws would depend on how a batch is divided


def test_no_stem_is_the_networks_own():
    """J10: a recipe's `model.stem: small` could not be taken back for a network that has no other."""
    pytest.importorskip("timm")
    config = from_keys(ModelConfig, {"name": "timm:test_resnet", "stem": "small"}, ["--stem", "null"])
    model = Classifier(config, channels=1, classes=3, resolution=32)
    theirs = build("timm:test_resnet").state_dict()
    assert {name: value.shape for name, value in model.state_dict().items()} == {n: v.shape for n, v in theirs.items()}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("stem", "stride"), [("small", 1), ("small-stride2", 2)])
def test_small_stems_keep_more_of_small_images(name, stem, stride, slim):
    model = build(name, channels=2, stem=stem, side=16).eval()
    first = model.network.get_submodule(model.backbone.first)
    assert (first.in_channels, first.kernel_size, first.stride) == (2, (3, 3), (stride, stride))
    shapes: list[torch.Size] = []
    last = model.backbone.stages["stem"][-1]
    model.network.get_submodule(last).register_forward_hook(lambda _m, _i, output: shapes.append(output.shape[2:]))
    assert model(images(16, 2)).shape == (4, 3)
    assert shapes == [(16 // stride, 16 // stride)]
    assert model.features(images(16, 2)).shape == (4, model.feature_dim)


@pytest.mark.parametrize("name", OURS)
def test_checkpointing_changes_no_gradient(name, slim, monkeypatch):
    found = []
    for compiles in (None, False, True):
        config = {} if compiles is None else {"activation_checkpointing": True}
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiles=compiles: compiles is True)
        model = build(name, stem="small", **config).train()
        model(images(16)).square().sum().backward()
        # only a graph that is really compiled updates statistics once
        found.append([p.grad for p in model.parameters()] + list(model.buffers()) * (not compiles))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0][: len(other)], other, strict=True))


@pytest.mark.parametrize("name", [*OURS, *TIMM])
def test_folding_and_gradcam(name, slim):
    model = build(name, side=64).eval()
    norms: list[Any] = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        nn.init.normal_(norm.running_mean, std=0.1)
    folded = fold_batchnorm(model)
    torch.testing.assert_close(folded(images(64)), model(images(64)), rtol=1e-4, atol=1e-5)
    if name in OURS:
        assert not any(isinstance(module, _BatchNorm) for module in folded.modules())
    heat = image_heat(model, torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8), torch.tensor([0, 2]))
    side = 4 if "resnet" in name else 2  # a ResNet's last stage is too small at 64 px: the one before it
    assert heat.shape == (2, side, side)


def test_a_transformer_is_not_folded_and_has_no_maps():
    model = build("timm:test_vit", input_size=160).eval()
    assert torch.equal(fold_batchnorm(model)(images()), model(images()))
    with pytest.raises(UserError, match=r"gives no maps .*; choose a stage or a convolution"):
        grad_cam(model, images(), torch.zeros(4, dtype=torch.int64), model.backbone.maps)


@pytest.mark.parametrize("name", [*OURS, "timm:test_resnet"])
def test_weights_of_another_head_and_of_colour_are_fitted(name, tmp_path):
    donor = build(name, channels=3)
    state = {key.removeprefix("network."): value for key, value in donor.state_dict().items()}
    head, first = f"{donor.backbone.head}.weight", f"{donor.backbone.first}.weight"
    state[head], state[head.replace("weight", "bias")] = torch.zeros(7, donor.feature_dim), torch.zeros(7)
    torch.save(state, tmp_path / "w.pth")
    model = build(name, weights=str(tmp_path / "w.pth"))
    told = load_pretrained(model, None)
    assert "head new, first filters from 3 to 1 channels" in told
    found = model.network.state_dict()
    for key, value in state.items():
        expected = value.sum(1, keepdim=True) if key == first else value
        assert torch.equal(found[key], expected) == (not key.startswith(donor.backbone.head)), key


@pytest.mark.parametrize("name", OURS)
def test_torchvisions_names_mean_torchvisions_files(name, monkeypatch, tmp_path):
    monkeypatch.setattr("duetgan.models.weights._download", lambda url, what: f"{tmp_path}/{Path(url).name}")
    found = find_weights("IMAGENET1K_V1", name)
    assert found.name == Path(torchvision.models.get_model_weights(name).IMAGENET1K_V1.url).name
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert cached_weights(name) is None
    (tmp_path / "checkpoints").mkdir()
    for member in torchvision.models.get_model_weights(name):  # the newest file is the last
        (tmp_path / "checkpoints" / Path(member.url).name).touch()
        assert cached_weights(name) == tmp_path / "checkpoints" / Path(member.url).name
        stated, images_of = member.transforms(), partial(backbone_of(name).images_of, name)
        sizes = stated.crop_size[0], stated.resize_size[0], stated.interpolation.value
        assert images_of(Path(member.url).name) == sizes
    assert images_of("x.pth") == images_of(found.name)
    told = rf"'IMAGENET1K': no such file \(did you mean 'IMAGENET1K_V1'\?\); {name} has IMAGENET1K_V1"
    assert_raises(UserError, told, find_weights, "IMAGENET1K", name)


def test_timms_weights_are_named_by_their_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    fetched = []
    monkeypatch.delenv("DUET_OFFLINE")
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: nullcontext(SimpleNamespace(headers={})))
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda url, path, *_, **__: fetched.append((url, path)))
    path = find_weights("DEFAULT", "timm:resnet50")
    ((url, place),) = fetched
    hub = pytest.importorskip("timm").get_pretrained_cfg("resnet50").hf_hub_id
    assert url.endswith(f"/{hub}/resolve/main/model.safetensors")
    assert str(path) == place == str(tmp_path / "checkpoints" / f"{hub.partition('/')[2]}.safetensors")


def test_patches_have_no_middle_and_there_may_be_no_timm(tmp_path, monkeypatch):
    torch.save(torchvision.models.convnext_tiny().state_dict(), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"4x4 have no centre of 3 px; set --model\.stem imagenet"):
        load_pretrained(build("convnext_tiny", stem="small", weights=str(tmp_path / "w.pth")), None)
    monkeypatch.setitem(sys.modules, "timm", None)
    assert_raises(UserError, r"timm:resnet10t needs timm .*; `pip install timm`", build, "timm:resnet10t")


class Own(nn.Module):
    """A network that no library has, with as many channels as it is built for."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 5, padding=2)
        self.body = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(2)))
        self.pool, self.out = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 9)


OWN = Backbone(
    names=("own",),
    network=lambda name, channels: Own(channels),
    stages={"stem": ("conv",), "body": ("body.*",)},
    pool=("pool",),
    first="conv",
    head="out",
    maps="body",
)


@pytest.mark.parametrize("config", [{}, {"stem": "small"}, {"activation_checkpointing": True}])
def test_ones_own_module_is_a_description_and_its_name(config, monkeypatch, tmp_path):
    """Its file and one line of the registry, as docs/extending.md says."""
    monkeypatch.setitem(BACKBONES, "own", OWN)
    model = build("own", **config).train()
    assert (model.feature_dim, list(dict.fromkeys(model.block_of.values()))) == (
        4,
        ["stem", "body.0", "body.1", "head"],
    )
    assert model.network.conv.kernel_size == ((3, 3) if "stem" in config else (5, 5))
    model(images()).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert fold_batchnorm(model)(images()).shape == (4, 3)
    assert (
        FineTuning(model, FineTuneConfig(freeze=["body"]), steps_per_epoch=1.0).begins["network.body.1.0.weight"]
        is None
    )
    assert_raises(UserError, "no such file; give a file", find_weights, "DEFAULT", "own")
    torch.save(model.network.state_dict(), tmp_path / "own.pth")
    again = build("own", weights=str(tmp_path / "own.pth"), **config)
    assert "head taken" in load_pretrained(again, None)


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("convnext_tiny", {"side": 28}, r"cannot take images of 28 px: set model\.input_size 32"),
        ("convnext_tiny", {"side": 8, "stem": "small-stride2"}, r"set model\.input_size 16"),
        ("convnext_tiny", {"he_strides": True}, r"he_strides is for bottlenecks .*convnext_tiny has none"),
        ("convnext_tini", {}, r"did you mean 'convnext_tiny'\?\); there are resnet18, .*, timm:NAME"),
        ("timm:test_vit", {}, r"timm:test_vit cannot take images of 32 px: set model\.input_size 160"),
        # 160 px high, as it needs, but wider
        ("timm:test_vit", {"side": "192x160"}, r"cannot take images of .*192.*: set model\.input_size 160"),
        ("timm:test_resnet", {"stem": "small"}, r"model\.stem is not for timm:test_resnet: set --model.stem null"),
        ("timm:test_resnet", {"he_strides": True}, r"he_strides is for bottlenecks"),
        ("timm:test_resnet", {"split": "auto"}, r"and split are not for timm:test_resnet: leave them out"),
        ("timm:test_resnet", {"activation_checkpointing": True}, r"^activation_checkpointing and"),
        ("timm:resnet5o", {}, r"timm has no such network \(did you mean 'resnet\w+'\?\)"),
        ("timm:crossvit_tiny_240", {}, r"timm does not describe its stages, or it has no linear head"),
    ],
)
def test_refused(name, config, told):
    with pytest.raises(UserError, match=told) as error:
        build(name, **config)
    assert "\n" not in str(error.value)
