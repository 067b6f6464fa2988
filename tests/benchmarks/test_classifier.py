"""The classifier's benchmark: the same network for everyone, and every figure is there."""

import json
from typing import Any

import pytest
import torch

from benchmarks import classifier as benchmark
from benchmarks.classifying import contenders
from duetgan.utils.config.yaml_files import read_yaml

RECIPE = "configs/bench_classifier.yaml"
# timm leaves the files that it reads to the garbage collector
leaves_files_open = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def test_the_networks_are_the_same_function():
    timm = pytest.importorskip("timm")
    from duetgan.models.classifier import Classifier, ModelConfig

    ours = Classifier(ModelConfig(stem="small"), channels=3, classes=10, resolution=32).eval()
    theirs: Any = contenders.small_resnet18(timm, 10).eval()
    theirs.load_state_dict(ours.network.state_dict())
    x = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-4, atol=1e-5)


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
