import pytest
import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import save_file

from duetgan.metrics.features.extractors import extract, find_weights, load_resnet50, resnet50_features
from duetgan.models.backbones.base import MEAN, STD
from duetgan.models.backbones.torchvision import RESNET
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked


@pytest.fixture(scope="module")
def network():
    """A ResNet-50 with random weights and statistics that make its features neither vanish nor explode."""
    with forked(0, "init", "test resnet50"):
        network = torchvision.models.resnet50()
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.get_buffer("running_var").uniform_(0.5, 2)
    return network.eval()


@pytest.fixture(scope="module")
def state(network):
    return {key: value.half() if value.is_floating_point() else value for key, value in network.state_dict().items()}


@pytest.fixture(scope="module")
def he_file(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "he.safetensors"
    save_file(state, path, metadata={"stride": "conv1 of layer{2,3,4}.0"})
    return path


@pytest.fixture
def images():
    return torch.randint(256, (2, 3, 20, 20), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def reference(state, images, side, *, he_strides):
    """The protocol, spelled out: scale, normalise, run torchvision's network up to its pooling."""
    network = RESNET.build("resnet50", he_strides=he_strides)
    network.load_state_dict(state)  # copies fp16 into fp32
    network.fc = torch.nn.Identity()
    x = F.interpolate(images.float() / 255, size=(side, side), mode="bilinear", align_corners=False, antialias=True)
    with torch.no_grad():
        return network.eval()((x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1))


def test_features_follow_the_protocol(he_file, state, images):
    extractor = resnet50_features(he_file)
    assert (extractor.name, extractor.dim) == ("resnet50", 2048)
    features = extract(extractor, images)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, reference(state, images, 64, he_strides=True), rtol=1e-3, atol=1e-4)
    larger = images[:1].repeat(1, 1, 4, 4)[..., :65, :65]  # is scaled to 224 px
    expected = reference(state, larger, 224, he_strides=True)
    torch.testing.assert_close(extract(extractor, larger), expected, rtol=1e-3, atol=1e-4)
    grey = images[:, :1]
    assert torch.equal(extract(extractor, grey), extract(extractor, grey.expand(-1, 3, -1, -1)))


def test_stride_placement_is_the_files(state, he_file, images, tmp_path):
    """Only a file that says so is He's; the placement changes the features."""
    torch.save(state, tmp_path / "plain.pth")
    he, plain = load_resnet50(he_file), load_resnet50(tmp_path / "plain.pth")
    for stage in ("layer2", "layer3", "layer4"):
        assert he.get_submodule(f"{stage}.0.conv1").stride == (2, 2) == plain.get_submodule(f"{stage}.0.conv2").stride
        assert he.get_submodule(f"{stage}.0.conv2").stride == (1, 1) == plain.get_submodule(f"{stage}.0.conv1").stride
    found = extract(resnet50_features(tmp_path / "plain.pth"), images)
    torch.testing.assert_close(found, reference(state, images, 64, he_strides=False), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found, extract(resnet50_features(he_file), images), rtol=1e-2)


def test_a_file_without_batch_counters_loads(state, tmp_path):
    torch.save({key: value for key, value in state.items() if "num_batches" not in key}, tmp_path / "old.pth")
    assert not load_resnet50(tmp_path / "old.pth").training


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.pop("layer3.2.conv1.weight"), "layer3.2.conv1.weight is absent"),
        (lambda state: state.update(extra=torch.zeros(2)), "extra is"),
        (lambda state: state.update({"conv1.weight": torch.zeros(64, 1, 7, 7)}), "conv1.weight is"),
    ],
)
def test_keys_and_shapes_are_checked(state, tmp_path, change, told):
    changed = dict(state)
    change(changed)
    save_file(changed, tmp_path / "changed.safetensors")
    with pytest.raises(UserError, match=told):
        load_resnet50(tmp_path / "changed.safetensors")


def test_a_damaged_file_and_one_of_other_things_are_told(he_file, tmp_path):
    for name in ("broken.safetensors", "broken.pth"):
        (tmp_path / name).write_bytes(he_file.read_bytes()[:1000])
        with pytest.raises(UserError, match=r"broken.*--weights"):
            load_resnet50(tmp_path / name)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(UserError, match="is not a plain state dict"):
        load_resnet50(tmp_path / "list.pth")


def test_search_order(tmp_path, monkeypatch, no_weights):
    given, named, lying = (tmp_path / name for name in ("given", "named", "lying"))
    for path in (given, named, lying):
        path.touch()
    assert find_weights() is None
    with pytest.raises(UserError, match=r"--weights|weights/"):
        resnet50_features()
    monkeypatch.setattr("duetgan.metrics.features.extractors.PLACES", (tmp_path / "absent", lying))
    assert find_weights() == lying
    monkeypatch.setenv("DUET_WEIGHTS", str(named))
    assert find_weights() == named
    assert find_weights(given) == given
    with pytest.raises(UserError, match="no such file"):
        find_weights(tmp_path / "absent")
    monkeypatch.setenv("DUET_WEIGHTS", str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"\$DUET_WEIGHTS"):
        find_weights()
