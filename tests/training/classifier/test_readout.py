"""A readout of all stages: what it takes, scikit-learn's regression on it, and a run that every command takes."""

from typing import Any

import pytest
import torch

from duetgan.data.packing.records import pack_arrays
from duetgan.models.classifier import Classifier, ModelConfig, read_out
from duetgan.models.fast import fold_batchnorm
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.errors import UserError
from duetgan.utils.seeding import forked
from tests.conftest import assert_raises, sample_images
from tests.training.classifier.test_frozen import TREE

pytestmark = pytest.mark.usefixtures("slim")


def network(name: str, side: int = 32, **config: Any) -> Any:
    with forked(0, "init", "test readout"):
        model = ModelConfig(name=name, head="readout", **config)
        return Classifier(model, channels=1, classes=3, resolution=side)


def largest(maps: torch.Tensor, most: int = 4) -> torch.Tensor:
    """Of each map of [N, C, h, w], of each of up to `most` x `most` equal parts, the largest value: slowly."""
    rows, columns = (next(n for n in (4, 2, 1) if n <= most and side % n == 0) for side in maps.shape[2:])
    strips = [strip.chunk(columns, 3) for strip in maps.chunk(rows, 2)]
    return torch.stack([part.amax((2, 3)) for strip in strips for part in strip], 2).flatten(1)


@pytest.mark.parametrize("read", [{}, {"readout_stages": 2, "readout_parts": 1}, {"readout_stages": 9}])
@pytest.mark.parametrize("name", ["resnet18", "airbench"])
def test_it_takes_the_largest_values_of_the_maps_of_the_last_stages(name, read):
    model = network(name, **read).eval()
    images, maps = torch.rand(3, *model.spec.shape) * 2 - 1, []
    for end in range(1, len(model.stages) - 1):
        maps.append(model.features(images, end))
    last = model.network.get_submodule(model.backbone.stages[model.stages[-2]][-1].removesuffix(".*"))
    last.register_forward_hook(lambda *call: maps.append(call[-1]))
    found = model.features(images)
    parts = [largest(each, read.get("readout_parts", 4)) for each in maps[-read.get("readout_stages", 9) :]]
    torch.testing.assert_close(found, torch.cat(parts, 1))
    assert found.shape[1] == model.feature_dim == model.head.in_features
    assert model.head.bias is not None
    torch.testing.assert_close(fold_batchnorm(model)(images), model(images), rtol=1e-4, atol=1e-5)
    assert model.training is False
    assert network(name, **read).training


def test_parts_of_maps_that_four_does_not_divide():
    for side, parts in ((28, 4), (14, 2), (7, 1), (2, 2), (1, 1)):
        maps = torch.randn(2, 3, side, 8)
        assert torch.equal(read_out(maps, 4), largest(maps))
        assert read_out(maps, 4).shape == (2, 3 * parts * 4)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Five images a class of the sample, and others without labels; at 16 px."""
    folder = tmp_path_factory.mktemp("few")
    for name, split, count in (("few", "train", 5), ("all", "train", 20), ("test", "test", 10)):
        images, labels, names = sample_images(split, count)
        pack_arrays(folder / f"{name}.lmdb", images, labels, names, source=name)
    return folder


def config_of(few: Any, **more: Any) -> Any:
    data = {"path": str(few / "few.lmdb"), "val_path": str(few / "test.lmdb")}
    tree = TREE | {"data": data, "batch_size": 10, "model": {"stem": "small-stride2", "head": "readout"}}
    return build_run_config(tree | more, [], "x")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"model": {"head": "readout", "split": "auto"}}, "head readout takes the maps of stages"),
        ({"model": {"head": "readout", "name": "timm:test_resnet", "stem": None}}, "head readout takes the maps"),
        ({"resizing": {"initial_scale": 0.5}}, "model.head readout has as many inputs as its maps have parts"),
    ],
)
def test_what_it_is_refused_for(few, more, text):
    assert_raises(UserError, text, config_of, few, **more)
