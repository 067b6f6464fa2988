import sys
from typing import Any

import pytest
import torch
from torch import nn

from duetgan.data.augment.transforms import to_float
from duetgan.metrics.features.extractors import (
    Extractor,
    build,
    classifier_features,
    classifier_input,
    extract,
    inception_features,
    pixel_features,
)
from duetgan.metrics.features.precision import evaluating, full_float32
from duetgan.models.classifier import Classifier, ModelConfig
from duetgan.utils.errors import UserError
from tests.metrics.conftest import classifier_run

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"device": CPU, "channels": 1}


def classifier(channels=1, resolution=8):
    model = Classifier(ModelConfig(stem="small-stride2"), channels=channels, classes=3, resolution=resolution)
    return model.eval().requires_grad_(False)


def sample_images(n=4, channels=1, side=8):
    return torch.randint(256, (n, channels, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_pixels_are_averages_in_0_to_1():
    features = extract(pixel_features(3), sample_images(channels=3, side=16))
    expected = sample_images(channels=3, side=16).float().view(4, 3, 8, 2, 8, 2).mean((3, 5)) / 255
    torch.testing.assert_close(features, expected.flatten(1))
    assert features.shape[1] == pixel_features(3).dim


def test_classifier_features_are_its_pooled_ones_whatever_mode_it_is_in():
    """And their fingerprint tells weights apart."""
    model = classifier()
    expected = model.features(to_float(sample_images()))
    extractor = classifier_features(model.train(), name="classifier:x")
    torch.testing.assert_close(extract(extractor, sample_images()), expected)
    assert expected.shape == (4, extractor.dim)
    assert model.training  # put back
    assert extractor.source == classifier_features(model, name="classifier:x").source
    model.network.fc.bias += 1e-3
    assert classifier_features(model, name="classifier:x").source != extractor.source


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


def test_names_stand_in_the_extractors_and_the_judge_is_not_loaded_again(tmp_path):
    run, judge = classifier_run(tmp_path / "a"), classifier()
    built = build([f"classifier:{run}", "pixels", "classifier"], **SETTINGS, classifier="runs/b", judge=judge)
    assert [extractor.name for extractor in built] == [f"classifier:{run}", "pixels", "classifier:runs/b"]
    assert built[2].source == classifier_features(judge, name="b").source != built[0].source


@pytest.mark.parametrize(
    ("specs", "changes", "told"),
    [
        (["resnet"], {}, "did you mean 'resnet50'"),
        (["pixels:x"], {}, "no extractor"),
        (["pixels", "pixels"], {}, "named twice"),
        (["classifier:a", "classifier"], {"classifier": "a"}, "named twice"),
        (["classifier"], {}, "--classifier"),
        (["pixels"], {"weights": "file"}, "--weights is for one"),
        (["resnet50", "inception"], {"weights": "file"}, "resnet50 and inception"),
        (["resnet50"], {"weights": "absent.safetensors"}, "no such file"),
    ],
)
def test_bad_names_are_told(specs, changes, told):
    with pytest.raises(UserError, match=told):
        build(specs, **SETTINGS, **changes, judge=classifier())


def test_what_is_missing_or_not_finite_is_told(no_weights, monkeypatch):
    with pytest.raises(UserError, match="resnet50 needs a weights file"):
        build(["resnet50"], **SETTINGS)
    with pytest.raises(UserError, match="extractor two gives features that are not finite"):
        extract(Extractor("two", 2, lambda images: torch.full((len(images), 2), torch.nan), CPU), sample_images())
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", None)
    with pytest.raises(UserError, match="pip install torch-fidelity"):
        inception_features()


class FakeLibrary:
    """Stands in for torch-fidelity's module: the same call, no weights."""

    asked: tuple[object, ...] = ()

    class FeatureExtractorInceptionV3(nn.Module):
        def __init__(self, name, features_list, feature_extractor_weights_path=None):
            super().__init__()
            if feature_extractor_weights_path is None:
                raise OSError("<urlopen error no network>\nmore lines")
            FakeLibrary.asked = (name, features_list, feature_extractor_weights_path)

        def forward(self, images):
            assert images.dtype == torch.uint8
            assert images.shape[1] == 3
            return (images.double().mean((2, 3)),)


@pytest.fixture
def fake_library(monkeypatch):
    monkeypatch.setattr("duetgan.metrics.features.extractors.importlib.import_module", lambda name: FakeLibrary)


def test_inception_takes_grey_images_and_a_weights_file(fake_library, tmp_path):
    file = tmp_path / "weights.pth"
    for given, told in (
        ((), r"could not be downloaded \(<urlopen error no network>\)"),
        ((file,), "no such file"),
        ((file,), "not a plain state dict"),
    ):
        with pytest.raises(UserError, match=told):
            inception_features(*given)
        if given:
            file.write_text("not weights")
    torch.save({"a": torch.zeros(1)}, file)
    extractor = inception_features(file)
    assert FakeLibrary.asked == ("inception", ["2048"], str(file))
    features = extract(extractor, sample_images())
    torch.testing.assert_close(features, sample_images().float().mean((2, 3)).expand(-1, 3))


def test_precision_and_modes_come_back():
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16), full_float32("cpu"):
            inside = [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert inside == ["highest", False]
        assert [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32] == ["high", True]
    finally:
        torch.set_float32_matmul_precision("highest")
    on, off = nn.Linear(1, 1).train(), nn.Linear(1, 1).eval()
    with evaluating(on, off):
        modes = [on.training, off.training, torch.is_grad_enabled()]
    assert modes == [False, False, False]
    assert [on.training, off.training, torch.is_grad_enabled()] == [True, False, True]
