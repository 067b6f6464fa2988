import sys

import pytest
import torch
from torch import nn

from duetgan.extras.inception.extractor import inception_features
from duetgan.metrics.features.extractors import build
from duetgan.utils.errors import UserError
from duetgan.utils.image_spec import ImageSpec
from tests.conftest import assert_raises
from tests.metrics.features.test_extractors import sample_images


def test_a_missing_library_and_weights_for_two_extractors_are_refused(monkeypatch):
    with pytest.raises(UserError, match="--weights is for one extractor of resnet50, inception"):
        build(["resnet50", "inception"], device=torch.device("cpu"), spec=ImageSpec(1, 8, 8), weights="file")
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", None)
    assert_raises(UserError, "pip install torch-fidelity", inception_features)


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
    monkeypatch.setattr("duetgan.extras.inception.extractor.importlib.import_module", lambda name: FakeLibrary)


def test_inception_takes_grey_images_and_a_weights_file(fake_library, tmp_path):
    file = tmp_path / "weights.pth"
    for given, told in (
        ((), r"could not be downloaded \(<urlopen error no network>\)"),
        ((file,), "no such file"),
        ((file,), "not a plain state dict"),
    ):
        assert_raises(UserError, told, inception_features, *given)
        if given:
            file.write_text("not weights")
    torch.save({"a": torch.zeros(1)}, file)
    extractor = inception_features(file)
    assert FakeLibrary.asked == ("inception", ["2048"], str(file))
    features = extractor(sample_images())
    torch.testing.assert_close(features, sample_images().float().mean((2, 3)).expand(-1, 3))
