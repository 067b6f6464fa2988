"""Weights files: how they are read, what of them is taken, what is refused."""

import argparse
import io
import re
import socket
import urllib.error
import urllib.request
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn

from duetgan.inference.export.weights import write_weights
from duetgan.models import weights as module
from duetgan.models.backbones.base import Backbone
from duetgan.models.backbones.torchvision import CONVNEXT, RESNET
from duetgan.models.by_class import describe_match
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.restore import fingerprint
from duetgan.models.weights import (
    TIMEOUT,
    file_hash,
    find_weights,
    fit_first,
    fit_state,
    load_pretrained,
    read_state_dict,
)
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils import files
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises
from tests.models.helpers import draw, same

WEIGHTS = Path(__file__).resolve().parents[3] / "shared" / "weights" / "resnet50-imagenet.safetensors"


@pytest.fixture(scope="module")
def donor():
    """torchvision's ResNet-18 for 5 classes with statistics of its own."""
    with forked(0, "init", "donor"):
        network = torchvision.models.resnet18(num_classes=5)
        for norm in network.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.get_buffer("running_var").uniform_(0.5, 2)
                norm.get_buffer("running_mean").uniform_(-0.2, 0.2)
    return network.eval()


@pytest.fixture
def file(donor, tmp_path):
    torch.save(donor.state_dict(), tmp_path / "donor.pth")
    return tmp_path / "donor.pth"


def build(weights, *, channels=3, classes=5, **config):
    with forked(1, "init", "test weights"):
        model = Classifier(
            ModelConfig(weights=str(weights), **config), channels=channels, classes=classes, resolution=32
        )
    return model.eval()


def loaded(weights, **options):
    model = build(weights, **options)
    told = load_pretrained(model, None)
    return model, told


def test_a_plain_file_gives_torchvisions_outputs_and_none_nothing(file, donor):
    model, told = loaded(file, normalise="symmetric")
    x = draw(2, 3, 32, 32).float()
    torch.testing.assert_close(model(x), donor(x), rtol=0, atol=0)
    assert told == f"weights from {file}: 122 of 122 tensors; head taken"
    assert load_pretrained(Classifier(ModelConfig(), channels=3, classes=5, resolution=32), None) == ""


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3, "best_acc1": torch.ones(1)},
        lambda state: {"model": state, "optimizer": {"state": {}}, "args": argparse.Namespace(lr=0.1)},
        lambda state: {"state_dict": {k: v + 1 for k, v in state.items()}, "state_dict_ema": state},
        lambda state: {
            "model": {},
            "model_ema": {"n_averaged": torch.tensor(4)} | {f"module.{k}": v for k, v in state.items()},
        },
        lambda state: {f"module.{k}": v for k, v in state.items()},
        lambda state: {f"module._orig_mod.{k}": v for k, v in state.items()},
        lambda state: {f"_orig_mod.module.{k}": v for k, v in state.items()},
        lambda state: {"state_dict": {f"model.{k}": v for k, v in state.items()}},
        lambda state: {f"network.{k}": v for k, v in state.items()},
        # of a classifier of Duet that is calibrated, and of one for several labels
        lambda state: {f"network.{k}": v for k, v in state.items()} | {"temperature": torch.ones(())},
        lambda state: {f"network.{k}": v for k, v in state.items()} | {"thresholds": torch.ones(5)},
        lambda state: {
            "model": {"state_dict": {k: nn.Parameter(v) if v.is_floating_point() else v for k, v in state.items()}}
        },
    ],
)
def test_wrappers_and_prefixes_are_taken_off(wrap, donor, tmp_path):
    torch.save(wrap(donor.state_dict()), tmp_path / "wrapped.pth")
    state, about = read_state_dict(tmp_path / "wrapped.pth")
    same(state, dict(donor.state_dict()))
    assert about == {}


def test_python_2_files_with_latin_1_names(donor, tmp_path):
    """Python 2 pickled str as bytes; its `\\xe9` is no UTF-8."""
    buffer = io.BytesIO()
    name = "fc.weight"
    torch.save({name: donor.fc.weight.detach(), "café": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    content = buffer.getvalue()
    for key in (name, "café"):
        as_unicode = b"X" + len(key.encode()).to_bytes(4, "little") + key.encode()
        assert content.count(as_unicode) == 1
        content = content.replace(as_unicode, b"U" + bytes([len(key)]) + key.encode("latin1"))
    (tmp_path / "old.pth").write_bytes(content)
    state, _ = read_state_dict(tmp_path / "old.pth")
    assert list(state) == [name, "café"]
    assert torch.equal(state[name], donor.fc.weight)


@pytest.mark.parametrize("told", ["{", "3", '{"lineage": 3}', '{"lineage": {"trained_on": [], "synthetic": [{}]}}'])
def test_an_export_that_is_damaged_in_what_it_has_seen_is_refused(donor, tmp_path, told):
    save_file(dict(donor.state_dict()), tmp_path / "a.safetensors", metadata={"duet": told})
    assert_raises(UserError, r"its metadata cannot be read .*export it again", loaded, tmp_path / "a.safetensors")


def test_safetensors_and_their_metadata(donor, tmp_path):
    about = {"stride": "conv1 of all", "other": "3"}
    save_file(dict(donor.state_dict()), tmp_path / "a.safetensors", metadata=about)
    state, found = read_state_dict(tmp_path / "a.safetensors")
    same(state, dict(donor.state_dict()))
    assert found == about
    save_file(dict(donor.state_dict()), tmp_path / "b.safetensors", metadata={"other": "3"})
    model, _ = loaded(tmp_path / "b.safetensors")
    assert model.lineage == Lineage.of(pretrained=[file_hash(tmp_path / "b.safetensors")])


class Trap:
    """Unpickling it creates the file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_nothing_in_a_file_is_run(donor, tmp_path):
    torch.save({"state_dict": donor.state_dict(), "args": Trap(tmp_path / "sprung")}, tmp_path / "trap.pth")
    told = r"trap\.pth is damaged or not a plain state dict .*give another with --model\.weights"
    assert_raises(UserError, told, loaded, tmp_path / "trap.pth")
    assert not (tmp_path / "sprung").exists()


OTHER = [[1, 2], {}, {"epoch": 3}, {"state_dict": {"a": 1}}, torch.ones(2), {"a": torch.ones(2, device="meta")}]


@pytest.mark.parametrize("content", OTHER)
def test_files_of_other_things(content, tmp_path):
    torch.save(content, tmp_path / "x.pth")
    assert_raises(UserError, r"x\.pth is not a plain state dict", read_state_dict, tmp_path / "x.pth")


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
def test_damaged_and_missing_files(name, file, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(file.read_bytes()[:5000])
    for given, told in (
        (name, r"x\.\w+ (is damaged|cannot be read) .*; fetch the file again, or give another with --m"),
        ("dono.pth", r"--model\.weights .*dono\.pth: no such file \(did you mean '.*donor\.pth'\?\)"),
    ):
        assert_raises(UserError, told, loaded, tmp_path / given)
    monkeypatch.chdir(tmp_path)  # neither a file nor a name of published weights
    assert_raises(UserError, r"did you mean 'donor\.pth'\?\); resnet18 has IMAGENET1K_V1", loaded, "donor.pt_")


def own_checkpoint(folder, **config):
    shape = {"channels": 3, "classes": 5, "resolution": 32}
    with forked(2, "init", "own"):
        average = Classifier(ModelConfig(**config), **shape)
    content = {"schema": 1, "task": "classifier", "step": 7, "config": {"model": config}, "classes": list("abcde")}
    content |= {"shape": shape, "state": {"model": {}, "model_ema": average.state_dict()}}
    path = checkpoints.save(folder / "checkpoints", content)
    checkpoints.point(folder / "checkpoints", "last", path)
    return path, average


def test_our_own_runs_give_their_average(tmp_path):
    path, average = own_checkpoint(tmp_path / "run", stem="small")
    for given in (path, tmp_path / "run"):
        model, _ = loaded(given, stem="small", normalise="symmetric")
        same(dict(model.state_dict()), dict(average.state_dict()))


@pytest.mark.usefixtures("slim")
@pytest.mark.parametrize(("kind", "head"), [("run", "linear"), ("export", "hidden")])
@pytest.mark.parametrize("classes", ["edcba", "xecy"])
def test_rows_of_a_head_follow_the_names_of_their_classes(tmp_path, kind, head, classes):
    """K2: they went to the class of the same number, with the words "head taken"."""
    path, average = own_checkpoint(tmp_path / "run", stem="small", head=head)
    if kind == "export":
        path = tmp_path / "x.safetensors"
        write_weights(path, checkpoints.load(checkpoints.resolve(tmp_path / "run")))
        assert read_state_dict(path)[1].items() >= {"stride": "conv2", "normalise": "symmetric"}.items()
    model = build(path, stem="small", normalise="symmetric", head=head, classes=len(classes))
    before = {name: value.clone() for name, value in model.head.state_dict().items()}
    told = load_pretrained(model, list(classes)).partition("; ")[2]
    assert model.lineage == Lineage.of(teachers=[fingerprint(average)])
    assert (
        told
        == {
            "edcba": "head: all 5 classes taken by name: e, d, c, b, a",
            "xecy": "head: 2 of 4 classes taken by name: e, c; new: x, y; dropped: a, b, d",
        }[classes]
    )
    last = "2." * (head == "hidden")
    for part in ("weight", "bias"):
        for place, name in enumerate(classes):
            source = average.head.state_dict() if name in "abcde" else before
            row = "abcde".find(name) if name in "abcde" else place
            assert torch.equal(model.head.state_dict()[last + part][place], source[last + part][row])
    if head == "hidden":
        assert torch.equal(model.head[0].weight, average.head[0].weight)


def test_at_most_six_classes_of_each_kind_are_named():
    listed = "a, b, c, d, e, f and 1 more; dropped: h, i, j, k, l, m and 2 more"
    assert describe_match("abcdefg", "hijklmnoabcdefg") == f"all 7 classes taken by name: {listed}"


@pytest.mark.parametrize(
    ("config", "right", "wrong", "told"),
    [
        ({}, {"normalise": "symmetric"}, {}, r"was trained on images normalised symmetric; set --model\.normalise"),
        ({"normalise": "auto", "weights": "x.pth"}, {}, {"normalise": "symmetric"}, r"set --model\.normalise imagenet"),
        (
            {"name": "resnet50", "he_strides": True},
            {"name": "resnet50", "normalise": "symmetric", "he_strides": True},
            {"name": "resnet50", "normalise": "symmetric"},
            r"stride of 2 in conv1 .*set --model\.he-strides true",
        ),
    ],
    ids=["symmetric", "imagenet", "strides"],
)
def test_our_own_runs_images_and_strides_must_be_the_same(tmp_path, config, right, wrong, told):
    path, _ = own_checkpoint(tmp_path / "run", **config)
    assert_raises(UserError, told, loaded, path, **wrong)
    loaded(path, **right)


def test_our_own_damaged_runs_and_those_of_a_gan(tmp_path):
    path, _ = own_checkpoint(tmp_path / "run")
    path.with_name(path.name + ".sha256").write_text("0" * 64)
    assert_raises(UserError, "damaged", loaded, path, normalise="symmetric")
    gan = {"schema": 1, "task": "gan", "step": 1, "config": {}, "classes": [], "shape": {}, "state": {}}
    torch.save(gan, tmp_path / "gan.pt")
    assert_raises(UserError, r"checkpoint of task 'gan'; give one of a classifier", loaded, tmp_path / "gan.pt")


@pytest.mark.parametrize(("classes", "head"), [(5, "hidden"), (7, "linear"), (7, "hidden")])
def test_a_head_that_does_not_fit_stays_new(classes, head, file, donor):
    before = build(file, classes=classes, head=head).network.fc.state_dict()
    model, told = loaded(file, classes=classes, head=head)
    same(dict(model.network.fc.state_dict()), dict(before))
    body = {k: v for k, v in model.network.state_dict().items() if not k.startswith("fc.")}
    same(body, {k: v for k, v in donor.state_dict().items() if not k.startswith("fc.")})
    assert told == f"weights from {file}: 120 of {122 if head == 'linear' else 124} tensors; head new"


def test_a_file_without_head_and_counters_and_one_of_fewer_channels(donor, tmp_path):
    kept = {k: v for k, v in donor.state_dict().items() if not k.startswith("fc.") and "num_batches" not in k}
    torch.save(kept, tmp_path / "body.pth")
    model, told = loaded(tmp_path / "body.pth")
    assert "head new" in told
    assert torch.equal(model.network.layer4[1].bn2.running_var, donor.layer4[1].bn2.running_var)
    assert model.network.bn1.num_batches_tracked == 0
    filters = draw(2, 3, 5, 5)
    found, _ = fit_first(filters, torch.empty(2, 5, 5, 5, dtype=torch.float64), alpha=False)
    torch.testing.assert_close(found, torch.stack([filters[:, c % 3] * 3 / 5 for c in range(5)], dim=1))
    back, _ = fit_first(filters[:, :1], filters, alpha=False)
    torch.testing.assert_close(back.sum(1), filters[:, 0])
    whole, none = fit_first(filters.half(), torch.empty(2, 3, 5, 5), alpha=False)
    assert (whole.dtype, none) == (torch.float16, [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_cast(dtype, donor, tmp_path):
    torch.save(
        {k: v.to(dtype) if v.is_floating_point() else v for k, v in donor.state_dict().items()}, tmp_path / "h.pth"
    )
    model, _ = loaded(tmp_path / "h.pth")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.network.conv1.weight, donor.conv1.weight.to(dtype).float())


def test_grey_images_and_a_small_stem_take_what_fits_of_the_filters(file, donor):
    model, told = loaded(file, channels=1, normalise="symmetric")
    grey = draw(2, 1, 32, 32).float()
    torch.testing.assert_close(model(grey), donor(grey.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)
    assert "first filters from 3 to 1 channels" in told
    model = build(file, channels=4)
    model.pixel_format = {"alpha": True}
    load_pretrained(model, None)  # transparency has no weight at first
    assert torch.equal(model.network.conv1.weight, torch.nn.functional.pad(donor.conv1.weight, (0, 0, 0, 0, 0, 1)))
    model, told = loaded(file, stem="small")
    assert torch.equal(model.network.conv1.weight, donor.conv1.weight[:, :, 2:5, 2:5])
    assert "middle 3x3 taken (model.stem imagenet with model.input_size keeps them whole)" in told


@pytest.mark.skipif(not WEIGHTS.is_file(), reason="the ImageNet weights file is not on this machine")
def test_hes_imagenet_file():
    strides = r"stride of 2 in conv1 of each stage's first block; set --model\.he-strides true"
    assert_raises(UserError, strides, loaded, WEIGHTS, name="resnet50")
    model, told = loaded(WEIGHTS, name="resnet50", he_strides=True)
    assert "head new" in told
    assert model.config.imagenet_normalised
    assert torch.equal(model.network.layer4[2].conv3.weight, load_file(WEIGHTS)["layer4.2.conv3.weight"].float())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layer3.1.conv1.weight", None, r"is absent, resnet18 has it \[256, 256, 3, 3\]; "),
        ("layer9.x", torch.zeros(2), r"is \[2\], resnet18 has it absent; "),
        ("bn1.bias", torch.zeros(3), r"is \[3\], resnet18 has it \[64\]; "),
        ("conv1.weight", torch.zeros(64, 3, 5, 5), r"is \[64, 3, 5, 5\], .*\[64, 3, 7, 7\]; "),
        ("conv1.weight", torch.zeros(64, 0, 7, 7), r"is \[64, 0, 7, 7\], .*\[64, 3, 7, 7\]; "),
        ("bn1.bias", torch.full((64,), torch.nan), "holds numbers that are not finite; "),
        ("bn1.bias", torch.zeros(64, dtype=torch.int8), r"holds torch\.int8.*unquantised"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(key, value, message, donor, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BACKBONES", dict.fromkeys(("resnet18", "resnet50"), RESNET))  # to build fewer networks
    state = dict(donor.state_dict()) | {key: value}
    torch.save({name: tensor for name, tensor in state.items() if tensor is not None}, tmp_path / "changed.pth")
    model = build(tmp_path / "changed.pth")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert_raises(UserError, rf"changed\.pth: {re.escape(key)} {message}", load_pretrained, model, None)
    same(dict(model.state_dict()), before)


def test_another_networks_file_is_recognised(file):
    with pytest.raises(UserError, match=r"the file is a resnet18's: set --model\.name resnet18, or give a resnet50's"):
        loaded(file, name="resnet50")


def test_r1_only_networks_that_begin_alike_are_built_to_word_it(file, monkeypatch):
    """A RegNet cannot be built on the meta device; another family's file is none of its networks."""
    built: list[str] = []

    def make(name, **_):
        built.append(name)
        return torchvision.models.get_model(name)

    monkeypatch.setattr("duetgan.models.backbones.base.make", make)
    stages: dict[str, tuple[str, ...]] = {"stem": ("stem",), "body": ("trunk_output.*",)}
    parts: dict[str, Any] = {"pool": ("avgpool",), "first": "stem.0", "head": "fc", "maps": "trunk_output"}
    regnet = Backbone(names=("regnet_y_400mf",), stages=stages, **parts)
    monkeypatch.setattr(module, "BACKBONES", {"regnet_y_400mf": regnet, "convnext_tiny": CONVNEXT, "resnet18": RESNET})
    with pytest.raises(UserError, match=r"the file is a resnet18's: set --model\.name resnet18"):
        fit_state(torch.load(file), {}, file, "regnet_y_400mf")
    assert built == ["resnet18"]
    stem = {"stem.0.weight": torch.zeros(32, 3, 3, 3)}
    assert_raises(UserError, r"give a resnet50's weights file, by its own names", fit_state, stem, {}, file, "resnet50")
    assert built == ["resnet18", "regnet_y_400mf"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of downloads, and no network."""
    asked: list[tuple[str, float]] = []

    def head(request: urllib.request.Request, timeout: float) -> None:
        asked.append((request.full_url, timeout))
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.delenv("DUET_OFFLINE")
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr("urllib.request.urlopen", head)
    return tmp_path / "hub", asked


def test_without_a_network_there_is_a_remedy(hub, monkeypatch):
    url = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.url
    told = (
        r"^model\.weights IMAGENET1K_V2: is not at .*/hub/checkpoints/resnet50-11ad3fa6\.pth and cannot be downloaded "
        rf"\(.*Name or service not known.*\); fetch {url} on a machine with a network and put it there"
    )
    socket.setdefaulttimeout(77.0)  # by the user's program
    try:
        assert_raises(UserError, told, find_weights, "IMAGENET1K_V2", "resnet50")
        assert socket.getdefaulttimeout() == 77.0
    finally:
        socket.setdefaulttimeout(None)
    assert hub[1] == [(url, TIMEOUT)]
    monkeypatch.setattr("duetgan.utils.distributed.collectives.from_main_process", lambda _: "elsewhere.pth")
    assert find_weights("IMAGENET1K_V2", "resnet50") == Path("elsewhere.pth")  # one rank alone downloads
    assert module.missing_published(url, "weights") == "elsewhere.pth"
    assert len(hub[1]) == 1


def test_a_download_is_made_once_and_said_with_its_size_and_place(hub, monkeypatch, donor, capsys):
    folder, _ = hub
    url = torchvision.models.ResNet18_Weights.DEFAULT.url
    name = Path(url).name
    fetched: list[tuple[str, str | None, float | None]] = []

    def fetch(url: str, path: str, hash_prefix: str | None, progress: bool) -> None:
        print("a library's line")
        fetched.append((url, hash_prefix, socket.getdefaulttimeout()))
        torch.save(donor.state_dict(), path)

    answer = SimpleNamespace(headers={"Content-Length": "46830571"})
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: nullcontext(answer))
    monkeypatch.setattr("torch.hub.download_url_to_file", fetch)
    for _ in range(2):
        model, told = loaded("DEFAULT")
    assert fetched == [(url, url.rpartition("-")[2].removesuffix(".pth"), files.TIMEOUT)]
    said = f"downloading model.weights DEFAULT (47 MB) into {folder / 'checkpoints'}\na library's line\n"
    assert capsys.readouterr() == ("", said)
    assert str(folder / "checkpoints" / name) in told
    assert torch.equal(model.network.conv1.weight, donor.conv1.weight)
