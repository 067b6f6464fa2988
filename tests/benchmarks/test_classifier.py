"""The classifier's benchmark: timm gets what it says, everyone the same network and images, every figure is there."""

import json
import statistics
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from benchmarks import classifier as benchmark
from benchmarks.classifying import contenders
from benchmarks.classifying import images as sample_images
from benchmarks.classifying.contenders import Measured, Ours, Timm
from duetgan.data.reading.dataset import Dataset
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises

RECIPE = "configs/bench_classifier.yaml"
# timm leaves the files that it reads to the garbage collector
leaves_files_open = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def config():
    config = build_run_config(read_yaml(RECIPE), ["--batch_size", "4"], RECIPE)
    assert isinstance(config, ClassifierConfig)
    return config


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return sample_images.make(tmp_path_factory.mktemp("images"), 40)


def test_both_read_the_same_images_and_labels(files):
    packed, folder = files
    with Dataset(packed) as reader:
        assert (len(reader), reader.resolution, reader.meta.channels, len(reader.classes)) == (40, 32, 3, 10)
        stored, labels = reader.read(range(40))
    found = sorted(folder.glob("*/*.png"), key=lambda path: path.name)
    assert [int(path.parent.name) for path in found] == labels.tolist()
    for path, image in zip(found, stored, strict=True):
        read = cv2.imread(str(path))
        assert np.array_equal(read[:, :, ::-1], image.transpose(1, 2, 0))
    assert len({image.tobytes() for image in stored}) == 40
    assert stored[:, 0].std() > 30


def check_training(contender):
    """Two steps change the network, a ResNet-18 for ten classes, and reading is a part of their time."""
    before = [p.detach().clone() for p in contender.model.parameters()]
    measured = contender.measure(2)
    assert contender.at == 2
    assert any(not p.equal(q) for p, q in zip(contender.model.parameters(), before, strict=True))
    assert 0 < measured.data_seconds < measured.seconds
    assert contender.parameters == 11_173_962


def test_ours_takes_as_many_steps_and_counts_reading_and_augmenting(files, config):
    ours: Any = Ours(config, "bf16", files[0])
    assert ours.config.precision == "bf16"
    assert ours.config.channels_last
    ours.model = ours.task.model
    check_training(ours)
    ours.reader.close()


@leaves_files_open
@pytest.mark.parametrize(("workers", "prefetcher"), [(0, False), (0, True)])
def test_timm_trains_the_same_network_on_the_same_augmentation(files, config, workers, prefetcher):
    pytest.importorskip("timm")
    timm: Any = Timm(config, files[1], workers, prefetcher)
    assert timm.model.conv1.stride == (1, 1)
    assert timm.model.layer1(timm.model.maxpool(torch.zeros(1, 64, 32, 32))).shape == (1, 64, 32, 32)
    assert timm.model.training
    assert {p.dtype for p in timm.model.parameters()} == {torch.float32}
    assert timm.optimizer.defaults["momentum"] == 0.9
    images, labels = next(iter(timm.loader))
    assert (images.shape, images.dtype, labels.dtype) == ((4, 3, 32, 32), torch.float32, torch.int64)
    assert images.min() == pytest.approx(-1, abs=1e-5)  # black, where it was padded or is background
    assert 0.2 < images.max() <= 1 + 1e-5
    check_training(timm)


def test_the_networks_are_the_same_function():
    timm = pytest.importorskip("timm")
    from duetgan.models.classifier import Classifier, ModelConfig

    ours = Classifier(ModelConfig(stem="small"), channels=3, classes=10, resolution=32).eval()
    theirs: Any = contenders.small_resnet18(timm, 10).eval()
    theirs.load_state_dict(ours.network.state_dict())
    x = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-4, atol=1e-5)


def test_figures_are_medians_of_the_repeats():
    def turns(*seconds):
        return [Measured(seconds=s, data_seconds=s / 10) for s in seconds]

    measured = {"bf16": turns(1, 2, 4), "fp32": turns(2, 2, 5), "timm": turns(3, 4, 10)}
    found = benchmark.summary(measured, images=8)
    assert found["bf16_vs_timm_ratio"] == statistics.median([3 / 1, 4 / 2, 10 / 4])
    assert found["fp32_vs_timm_ratio"] == statistics.median([3 / 2, 4 / 2, 10 / 5])
    assert (found["bf16_images_per_second"], found["timm_images_per_second"]) == (4, 2)
    assert found["timm_data_share"] == pytest.approx(0.1)


def test_contenders_alternate_and_each_repeat_begins_with_another():
    calls: list[tuple[str, int]] = []

    def measure(name, steps):
        calls.append((name, steps))
        return Measured(seconds=1.0, data_seconds=0.0)

    fakes: Any = {name: SimpleNamespace(measure=partial(measure, name)) for name in "abc"}
    measured = benchmark.alternate(fakes, repeats=3, steps=5)
    assert calls == [(name, 5) for name in "abcbcacab"]
    assert all(len(turns) == 3 for turns in measured.values())


class Here:
    """A contender in this process, in the place of one in a process of its own."""

    def __init__(self, build, threads):
        self.contender = build()
        self.parameters = self.contender.parameters

    def measure(self, steps):
        return self.contender.measure(steps)

    def close(self):
        """There is nothing to end."""


@leaves_files_open
def test_every_figure_is_there_and_the_last_line_is_flat(tmp_path, last_line, monkeypatch):
    pytest.importorskip("timm")
    monkeypatch.setattr(benchmark, "Remote", Here)
    monkeypatch.setattr(benchmark, "LOADERS", [(0, False)])
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(read_yaml(RECIPE) | {"batch_size": 4}))
    sizes = ["--images", "40", "--repeats", "1", "--steps", "1", "--work", str(tmp_path)]
    result = last_line(benchmark, ["--config", str(recipe), *sizes, "--json"])
    for name in ("bf16", "fp32"):
        rates = result[f"{name}_images_per_second"] / result["timm_images_per_second"]
        assert result[f"{name}_vs_timm_ratio"] == pytest.approx(rates)
        assert 0 < result[f"{name}_data_share"] < 1
    assert result["parameters"] == 11_173_962
    assert (result["timm_workers"], result["timm_prefetcher"]) == (0, False)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


class Sleeper:
    """What a process of its own is tried with."""

    parameters = 7

    def measure(self, steps):
        if steps > 5:
            sys.exit(1)
        return Measured(seconds=float(steps), data_seconds=float(torch.get_num_threads()))


@pytest.mark.slow
def test_a_contender_in_a_process_of_its_own_answers_and_ends():
    sleeper: Any = Sleeper
    remote = benchmark.Remote(sleeper, threads=1)
    assert remote.parameters == 7
    assert remote.measure(3) == Measured(seconds=3.0, data_seconds=1.0)
    remote.close()
    assert remote._process.exitcode == 0
    remote = benchmark.Remote(sleeper, threads=1)
    assert_raises(RuntimeError, "a contender's process died", remote.measure, 6)
    remote.close()


def test_bad_input_is_refused(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="not a recipe of task classifier"):
        benchmark.main(["--config", "configs/bench_gan_step.yaml"])
    assert_raises(UserError, "fewer than a batch of 64", benchmark.main, ["--images", "10"])
    assert_raises(UserError, "no such folder; make it first", benchmark.main, ["--work", str(tmp_path / "none")])
    monkeypatch.setitem(sys.modules, "timm", None)
    assert_raises(UserError, r"measures against timm .*`pip install timm`", benchmark.main, [])
