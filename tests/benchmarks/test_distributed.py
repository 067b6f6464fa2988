"""The benchmark of several processes: what it compares is the same training, and every figure is there."""

import json
import statistics
import sys

import pytest
import torch

from benchmarks import distributed as benchmark
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError

TINY = {
    "classifier": {"batch_size": 8, "model": {"name": "resnet18", "stem": "small-stride2"}},
    "gan": {
        "batch_size": 8,
        "generator": {"z_dim": 8, "w_dim": 8, "channel_base": 128, "channel_max": 8},
        "discriminator": {"channel_base": 128, "channel_max": 8},
    },
}


def test_by_hand_adds_up_in_buckets_after_the_last_pass(sent, monkeypatch):
    monkeypatch.setattr(benchmark, "BUCKET_ELEMENTS", 4)
    parameters: list[torch.Tensor] = [torch.nn.Parameter(torch.ones(size)) for size in (3, 2, 1, 5)]
    exchange = benchmark.ByHand(parameters)
    exchange.overlap()
    torch.cat(parameters[:3]).sum().backward()
    assert sent == []
    exchange.finish()
    assert sent == [5, 6]
    assert [p.grad[0].item() for p in parameters] == [2, 2, 2, 0]  # type: ignore[index]


def test_figures_are_medians_of_the_repeats():
    found = benchmark.summary("classifier", {"ranks": [1, 2, 4], "by_hand": [2, 3, 4], "process": [3, 3, 3]}, 8)
    assert found["ddp_vs_by_hand_ratio"] == statistics.median([2, 1.5, 1])
    assert found["classifier_ranks_vs_process_ratio"] == statistics.median([3, 1.5, 0.75])
    assert (found["classifier_ranks_images_per_second"], found["classifier_process_images_per_second"]) == (4, 8 / 3)
    assert "exchange_vs_by_hand_ratio" in benchmark.summary("gan", {"ranks": [1], "by_hand": [1], "process": [1]}, 8)


@pytest.mark.slow  # ten processes, for a script that only developers run
@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tested on Linux")
def test_every_figure_is_there_and_the_last_line_is_flat(tmp_path, last_line):
    files = []
    for task, recipe in (("classifier", "configs/bench_classifier.yaml"), ("gan", "configs/bench_gan_step.yaml")):
        path = tmp_path / f"{task}.yaml"
        path.write_text(json.dumps(read_yaml(recipe) | TINY[task] | {"precision": "fp32"}))
        files += [f"--{task}", str(path)]
    result = last_line(benchmark, [*files, "--repeats", "1", "--steps", "1", "--threads", "2", "--json"])
    for task, way in (("classifier", "ddp"), ("gan", "exchange")):
        rates = {name: result[f"{task}_{name}_images_per_second"] for name in benchmark.CONTENDERS}
        assert result[f"{way}_vs_by_hand_ratio"] == pytest.approx(rates["ranks"] / rates["by_hand"])
        assert result[f"{task}_ranks_vs_process_ratio"] == pytest.approx(rates["ranks"] / rates["process"])
    assert {"load_1min_before", "load_1min_after", "threads", "repeats"} <= result.keys()
    assert collectives.world_size() == 1


def test_bad_input_is_refused():
    with pytest.raises(UserError, match="not a recipe of task gan"):
        benchmark.main(["--gan", "configs/bench_classifier.yaml"])
