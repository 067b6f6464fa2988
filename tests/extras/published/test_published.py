"""Rows J4 and J5: classifiers that others trained are checkpoints, and what does not fit wholly is refused."""

import importlib.util
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file

from duetgan.commands import predict
from duetgan.data.images import fit, trained_mode
from duetgan.library import load_classifier
from duetgan.models.restore import classifier_from, open_checkpoint
from duetgan.utils.checkpoint import load, resolve
from duetgan.utils.distributed.process import run_cli
from duetgan.utils.errors import UserError
from tests.conftest import REPOSITORY, assert_raises
from tests.models.test_weights import WEIGHTS

RESNET18 = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
FAMILIES = (
    *("resnet10t", "convnext_atto", "mobilenetv3_small_050", "regnetx_002", "vit_tiny_patch16_224"),
    *("efficientvit_b0", "ghostnet_050", "mobilevit_xxs", "edgenext_xx_small", "tinynet_e"),
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """torch's cache of downloads, empty, and no network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)

    def refused(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.delenv("DUET_OFFLINE", raising=False)
    monkeypatch.setattr(urllib.request, "urlopen", refused)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def resnet18():
    torch.manual_seed(0)
    return torchvision.models.resnet18().eval()


def logits(given: str | Path, images: torch.Tensor) -> torch.Tensor:
    """Those of the classifier, of images in [0, 1]."""
    with torch.no_grad():
        return classifier_from(open_checkpoint(given, "last")[1])(images * 2 - 1)


def normalised(images: torch.Tensor, about: dict) -> torch.Tensor:
    mean, std = (torch.tensor(about[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (images - mean) / std


@pytest.mark.parametrize("form", ["name", "member", "file", "pth", "said"])
def test_torchvisions_network(form, cache, resnet18, tmp_path):
    published = cache / Path(RESNET18.url).name
    own = tmp_path / ("own.pth" if form == "pth" else "own.safetensors")
    torch.save(resnet18.state_dict(), published)
    if form == "pth":
        torch.save({"state_dict": {f"module.{k}": v for k, v in resnet18.state_dict().items()}}, own)
    else:
        save_file(resnet18.state_dict(), own)
    if form == "file":
        published = published.rename(tmp_path / "x.pt")
    given = {"name": "torchvision:resnet18", "member": "torchvision:resnet18.IMAGENET1K_V1", "file": published}
    given |= {"said": f"torchvision:resnet18={own}", "pth": own}
    images = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    about = {"mean": RESNET18.transforms().mean, "std": RESNET18.transforms().std}
    torch.testing.assert_close(
        logits(given[form], images), resnet18(normalised(images, about)).detach(), atol=1e-5, rtol=1e-5
    )
    content = open_checkpoint(given[form], "last")[1]
    assert content["classes"] == RESNET18.meta["categories"]
    assert content["lineage"]["pretrained"][0].startswith("sha256:")


@pytest.mark.parametrize(
    "name", [*FAMILIES[-4:], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[:-4])]
)
def test_timms_networks(name, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    network: Any = timm.create_model(name, num_classes=7).eval()
    timm.models.save_for_hf(network, tmp_path / "folder", safe_serialization=True)
    side = network.pretrained_cfg["input_size"][-1]
    images = torch.rand(2, 3, side, side)
    wanted = network(normalised(images, network.pretrained_cfg)).detach()
    timm.models.save_for_hf(network, tmp_path / "pickled", safe_serialization=False)  # timm's own default
    forms = [tmp_path / "folder", f"timm:{name}={tmp_path}/pickled"]
    if name == FAMILIES[0]:
        forms += [tmp_path / "pickled", f"timm:{name}={tmp_path}/folder/model.safetensors"]
    for given in forms:
        torch.testing.assert_close(logits(given, images), wanted, atol=1e-5, rtol=1e-5)


def test_outputs_without_names_are_numbered_and_hes_strides_are_those_that_the_file_says(tmp_path, capsys):
    save_file(torchvision.models.resnet18(num_classes=3).state_dict(), tmp_path / "x.safetensors")
    assert open_checkpoint(tmp_path / "x.safetensors", "last")[1]["classes"] == ["0", "1", "2"]
    assert "names no classes; they are called 0 to 2" in capsys.readouterr().err
    about = {"stride": "conv1 of layer{2,3,4}.0"}
    save_file(torchvision.models.resnet50().state_dict(), tmp_path / "he.safetensors", about)
    assert classifier_from(open_checkpoint(tmp_path / "he.safetensors", "last")[1]).config.he_strides


def test_names_of_the_hubs_config(tmp_path):
    timm = pytest.importorskip("timm")
    network = timm.create_model("resnet10t", num_classes=2)
    timm.models.save_for_hf(network, tmp_path, model_config={"label_names": ["cat", "dog"]}, safe_serialization=True)
    assert open_checkpoint(tmp_path, "last")[1]["classes"] == ["cat", "dog"]
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"]["mean"] = [0.1, 0.1, 0.1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_raises(UserError, r"config\.json: its images have mean \[0\.1, ", open_checkpoint, tmp_path, "last")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("torchvision:resnet18", r"is not at .*/checkpoints/resnet18-f37072fd\.pth and cannot be downloaded \(no net"),
        ("timm:resnet10t", r"is not at .*/hub/checkpoints/resnet10t\..*safetensors and cannot be downloaded"),
        ("torchvision:resnet18.V9", r"resnet18 has IMAGENET1K_V1, DEFAULT"),
        ("torchvision:resnet19", "model 'resnet19' is unknown"),
        ("torchvision:airbench", "no such file"),
        ("timm:resnet10tt", "timm has no such network"),
    ],
)
def test_names_without_weights_are_refused(given, told, cache):
    if given.startswith("timm:"):
        pytest.importorskip("timm")
    with pytest.raises(UserError, match=told) as caught:
        open_checkpoint(given, "last")
    assert "\n" not in str(caught.value)


def test_part_of_a_network_is_refused_with_its_share(tmp_path, resnet18):
    state = resnet18.state_dict()
    part = {name: value for name, value in state.items() if not name.startswith("layer4.")}
    save_file(part, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"92 tensors are no known network's \(nearest: resnet18, 75% match\)"):
        open_checkpoint(tmp_path / "x.safetensors", "last")
    with pytest.raises(UserError, match=r"layer4.* is absent, .* \(77 of 102 tensors match\)"):
        open_checkpoint(f"torchvision:resnet18={tmp_path}/x.safetensors", "last")


def test_pixels_are_those_of_torchvisions_transform():
    pixels = np.random.default_rng(0).integers(0, 256, (301, 433, 3), np.uint8)
    for weights in (torchvision.models.ResNet50_Weights.IMAGENET1K_V2, RESNET18):
        how = weights.transforms()
        mode = f"shorter-side-{how.resize_size[0]}+bilinear+centre-crop"
        image = Image.fromarray(pixels)
        image = torchvision.transforms.functional.resize(image, how.resize_size, how.interpolation)
        wanted = np.asarray(torchvision.transforms.functional.center_crop(image, how.crop_size))
        assert np.array_equal(fit(pixels, 224, trained_mode({"data": {"resize_filter": mode}})), wanted)


def test_our_own_checkpoint_is_read_as_before(tmp_path):
    assert_raises(UserError, "no such run folder or checkpoint", open_checkpoint, tmp_path / "none.safetensors", "last")
    (tmp_path / "x.pt").write_bytes(b"no checkpoint")
    told = []
    for read in (lambda path: load(resolve(path)), lambda path: open_checkpoint(path, "last")):
        with pytest.raises(UserError) as error:
            read(tmp_path / "x.pt")
        told.append(str(error.value))
    assert told[0] == told[1]


FOUND = importlib.util.find_spec("foolbox")
PICTURES = sorted(Path(FOUND.origin or "").parent.glob("data/imagenet_*.jpg")) if FOUND else []
LABELS = [int(re.findall(r"_(\d+)\.jpg", path.name)[0]) for path in PICTURES]

needs_pictures = pytest.mark.skipif(
    not WEIGHTS.exists() or len(PICTURES) != 20, reason=f"{WEIGHTS.name} or foolbox's pictures are not there"
)


def right(labels):
    return sum(int(label) == wanted for label, wanted in zip(labels, LABELS, strict=True))


@needs_pictures
def test_predict_the_library_and_torch_hub(capsys):
    files = list(map(str, PICTURES))
    assert run_cli(predict.main, ["--checkpoint", str(WEIGHTS), "--device", "cpu", "--json", *files]) == 0
    names = load_classifier(WEIGHTS, device="cpu").class_names
    answers = json.loads(capsys.readouterr().out)
    assert [answer["file"] for answer in answers] == files
    assert right([names.index(answer["label"]) for answer in answers]) >= 18
    classifier = load_classifier(WEIGHTS, device="cpu")
    assert right([classifier.class_names.index(name) for name in classifier.predict(PICTURES).labels]) >= 18
    model = torch.hub.load(str(REPOSITORY), "resnet_classifier", source="local", checkpoint=str(WEIGHTS))
    with torch.no_grad():
        images = torch.stack([classifier.transform(path) for path in PICTURES])
        assert right(model(images).argmax(1)) >= 18
