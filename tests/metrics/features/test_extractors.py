from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import save_file
from torch import nn

from duetgan.data.augment.transforms import to_float
from duetgan.metrics.features import extractors
from duetgan.metrics.features.extractors import (
    Extractor,
    build,
    chunk_size,
    classifier_features,
    classifier_input,
    find_weights,
    load_resnet50,
    pixel_features,
    resnet50_features,
    shared_pass,
)
from duetgan.metrics.features.precision import evaluating, full_float32
from duetgan.models.backbones.base import MEAN, STD
from duetgan.models.backbones.torchvision import RESNET
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.models.weights import file_hash
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises
from tests.metrics.conftest import classifier_run

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"device": CPU, "spec": ImageSpec(1, 16, 16)}


def classifier(channels=1, resolution=8):
    model = Classifier(ModelConfig(stem="small-stride2"), channels=channels, classes=3, resolution=resolution)
    return model.eval().requires_grad_(False)


def sample_images(n=4, channels=1, side=8):
    return torch.randint(256, (n, channels, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_classifier_features_are_its_pooled_ones_whatever_mode_it_is_in():
    """And their fingerprint tells weights apart."""
    model = classifier()
    expected = model.features(to_float(sample_images()))
    extractor = classifier_features(model.train(), name="classifier:x")
    torch.testing.assert_close(extractor(sample_images()), expected)
    assert expected.shape == (4, extractor.dim)
    assert model.training  # put back
    assert extractor.source == classifier_features(model, name="classifier:x").source
    model.network.fc.bias += 1e-3
    assert classifier_features(model, name="classifier:x").source != extractor.source


@pytest.mark.parametrize(
    ("spec", "values", "expected"),
    [
        (ImageSpec(1, 8, 8), [0, 51, 255], [0, 0.2, 1]),
        (ImageSpec(1, 8, 8, depth="uint16", high=65535.0), [0, 13107, 65535], [0, 0.2, 1]),
        (ImageSpec(1, 8, 8, depth="float32", low=-4.0, high=6.0), [-4, -2, 6], [0, 0.2, 1]),
    ],
)
def test_pixels_are_from_0_to_1_at_every_depth(spec, values, expected):
    images = torch.tensor(values, dtype=getattr(torch, spec.depth)).reshape(3, 1, 1, 1).expand(3, 1, 8, 8)
    torch.testing.assert_close(pixel_features(spec)(images), torch.tensor(expected)[:, None].expand(3, 64).float())


def test_images_are_fitted_to_the_classifier():
    grey, colour = sample_images(side=16), sample_images(channels=3, side=8)
    assert classifier_input(classifier(), grey).shape == (4, 1, 8, 8)
    stripes = torch.tensor([0, 255, 255, 0], dtype=torch.uint8).repeat(1, 1, 32, 8)
    assert classifier_input(classifier(), stripes).abs().max() < 0.2  # their mean, not every fourth of them
    repeated = classifier_input(classifier(channels=3, resolution=16), grey)
    assert torch.equal(repeated, to_float(grey).expand(-1, 3, -1, -1))
    white = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    torch.testing.assert_close(classifier_input(classifier(), white), torch.ones(1, 1, 8, 8))
    luma = to_float(colour).mul(torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    torch.testing.assert_close(classifier_input(classifier(), colour), luma)


def test_names_stand_in_the_extractors_and_the_judge_is_not_loaded_again(tmp_path, monkeypatch):
    run, judge = classifier_run(tmp_path / "a"), classifier()
    built = build([f"classifier:{run}", "pixels", "classifier"], **SETTINGS, classifier="runs/b", judge=judge)
    assert [extractor.name for extractor in built] == [f"classifier:{run}", "pixels", "classifier:runs/b"]
    assert built[2].source == classifier_features(judge, name="b").source != built[0].source
    several = classifier_run(tmp_path / "several", sets=[[0], [0, 1]])  # features of one of several labels will do
    assert build([f"classifier:{several}"], **SETTINGS)[0].source == built[0].source
    devices: list[Any] = []

    def restored(_checkpoint: Any, device: Any, **_options: Any) -> Any:
        devices.append(device)
        return judge

    monkeypatch.setattr(extractors, "classifier_from", restored)
    build([f"classifier:{run}"], **SETTINGS | {"device": torch.device("meta")})
    assert devices == [torch.device("meta")]


@pytest.mark.parametrize(
    ("specs", "changes", "told"),
    [
        (["resnet"], {}, "did you mean 'resnet50'"),
        (["pixels:x"], {}, "no extractor"),
        (["pixels", "pixels"], {}, "named twice"),
        (["classifier:a", "classifier"], {"classifier": "a"}, "named twice"),
        (["classifier"], {}, "--classifier"),
        (["pixels"], {"weights": "file"}, "--weights is for one"),
        (["resnet50"], {"weights": "absent.safetensors"}, "no such file"),
    ],
)
def test_bad_names_are_told(specs, changes, told):
    with pytest.raises(UserError, match=told):
        build(specs, **SETTINGS, **changes, judge=classifier())


def test_what_is_missing_or_not_finite_is_told(no_weights):
    assert_raises(UserError, "resnet50 needs a weights file", build, ["resnet50"], **SETTINGS)
    with pytest.raises(UserError, match="extractor two gives features that are not finite"):
        Extractor("two", 2, lambda images: torch.full((len(images), 2), torch.nan), CPU)(sample_images())


def precision_flags():
    cudnn = torch.backends.cudnn
    return [torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic]


def test_precision_and_modes_come_back(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16), full_float32("cpu"):
            inside = precision_flags()
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert inside == ["highest", False, False, True]
        assert precision_flags() == ["high", True, True, False]
        first, second = full_float32("cpu"), full_float32("cpu")  # of two threads: the first to come is the first to go
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.get_float32_matmul_precision() == "highest"
        second.__exit__(None, None, None)
        assert precision_flags() == ["high", True, True, False]
    finally:
        torch.set_float32_matmul_precision("highest")
    on, off = nn.Linear(1, 1).train(), nn.Linear(1, 1).eval()
    with evaluating(on), evaluating(off):
        modes = [on.training, off.training, torch.is_grad_enabled()]
    assert modes == [False, False, False]
    assert [on.training, off.training, torch.is_grad_enabled()] == [True, False, True]


@pytest.mark.parametrize(("side", "size"), [(8, 64), (32, 64), (128, 64), (256, 16), (300, 11), (512, 4), (1024, 4)])
def test_a_chunk_is_as_many_images_as_memory_allows(side, size):
    assert chunk_size(side) == size


@pytest.mark.parametrize("batch_size", [1, 64, 100, 1000])
def test_chunks_begin_at_the_same_images_whatever_the_batch_size(batch_size):
    chunks = list(shared_pass(150, lambda rows: rows, side=32, batch_size=batch_size))
    assert chunks == [range(64), range(64, 128), range(128, 150)]
    assert list(shared_pass(0, lambda rows: rows, side=32, batch_size=batch_size)) == []


@pytest.mark.parametrize(("multiple", "size"), [(1, 64), (6, 60), (64, 64), (100, 100)])
def test_chunks_of_whole_groups(multiple, size):
    chunks = list(shared_pass(300, lambda rows: rows, side=32, batch_size=64, multiple=multiple))
    assert {len(rows) for rows in chunks[:-1]} == {size}
    assert [i for rows in chunks for i in rows] == list(range(300))


def test_work_is_done_as_the_results_are_taken_and_its_errors_are_raised():
    """A pass over many images does not hold what it has not been asked for."""

    def work(rows):
        done.append(rows)
        if len(done) == 2:
            raise UserError("broken")

    done: list[range] = []
    results = shared_pass(1000, work, side=32, batch_size=64)
    next(results)
    assert done == [range(64)]
    assert_raises(UserError, "broken", next, results)


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
    return torch.randint(256, (2, 3, 20, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


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
    digest = file_hash(he_file)
    assert (extractor.source, extractor.lineage) == (f"he.safetensors {digest}", Lineage.of(pretrained=[digest]))
    features = extractor(images)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, reference(state, images, 64, he_strides=True), rtol=1e-3, atol=1e-4)
    larger = images[:1].repeat(1, 1, 4, 1)[..., :65, :60]  # its longer side has more than 64 px
    expected = reference(state, larger, 224, he_strides=True)
    torch.testing.assert_close(extractor(larger), expected, rtol=1e-3, atol=1e-4)
    grey = images[:, :1]
    assert torch.equal(extractor(grey), extractor(grey.expand(-1, 3, -1, -1)))


def test_stride_placement_is_the_files(state, he_file, images, tmp_path):
    """Only a file that says so is He's; the placement changes the features."""
    torch.save(state, tmp_path / "plain.pth")
    he, plain = load_resnet50(he_file), load_resnet50(tmp_path / "plain.pth")
    for stage in ("layer2", "layer3", "layer4"):
        assert he.get_submodule(f"{stage}.0.conv1").stride == (2, 2) == plain.get_submodule(f"{stage}.0.conv2").stride
        assert he.get_submodule(f"{stage}.0.conv2").stride == (1, 1) == plain.get_submodule(f"{stage}.0.conv1").stride
    found = resnet50_features(tmp_path / "plain.pth")(images)
    torch.testing.assert_close(found, reference(state, images, 64, he_strides=False), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found, resnet50_features(he_file)(images), rtol=1e-2)


def test_a_file_without_batch_counters_loads_and_damaged_ones_are_told(state, tmp_path, he_file):
    torch.save({key: value for key, value in state.items() if "num_batches" not in key}, tmp_path / "old.pth")
    assert not load_resnet50(tmp_path / "old.pth").training
    for name in ("broken.safetensors", "broken.pth"):
        (tmp_path / name).write_bytes(he_file.read_bytes()[:1000])
        assert_raises(UserError, r"broken.*--weights", load_resnet50, tmp_path / name)
    torch.save([1, 2], tmp_path / "list.pth")
    assert_raises(UserError, "is not a plain state dict", load_resnet50, tmp_path / "list.pth")


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
    assert_raises(UserError, told, load_resnet50, tmp_path / "changed.safetensors")


def test_search_order(tmp_path, monkeypatch, no_weights):
    given, named, lying = (tmp_path / name for name in ("given", "named", "lying"))
    for path in (given, named, lying):
        path.touch()
    assert find_weights(None) is None
    assert_raises(UserError, r"--weights|weights/", resnet50_features)
    monkeypatch.setattr("duetgan.metrics.features.extractors.PLACES", (tmp_path / "absent", lying))
    assert find_weights(None) == lying
    monkeypatch.setenv("DUET_WEIGHTS", str(named))
    assert find_weights(None) == named
    assert find_weights(given) == given
    assert_raises(UserError, "no such file", find_weights, tmp_path / "absent")
    monkeypatch.setenv("DUET_WEIGHTS", str(tmp_path / "absent"))
    assert_raises(UserError, r"\$DUET_WEIGHTS", find_weights, None)
