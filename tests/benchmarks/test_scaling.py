"""The benchmarks of several processes and of saving: every figure is there, and they fit together."""

import functools
import json
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import checkpoint, distributed, scaling
from benchmarks.gan.convolutions import Recorder, flops
from benchmarks.gan_step import random_images
from benchmarks.scaling import OUTSIDE, PRESETS, Link, Work
from duetgan.training.base.data import make_loader
from duetgan.training.engine.tasks import TASKS
from duetgan.utils.config.recipes import recipes
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.distributed import collectives, gradients
from duetgan.utils.errors import UserError
from tests.conftest import REPOSITORY, assert_raises
from tests.end_to_end.helpers import write_config

DOCS = (REPOSITORY / "docs" / "measurements" / "scaling.md").read_text()
WORK = functools.cache(scaling.work)
SPEED = scaling.PEAK * 1e12 * scaling.EFFICIENCY
STEP = Work(batch=64, smallest=4, parameters=10**7, gradient_bytes=4 * 10**7, messages=10, waits=0, flop=1e12)


def test_docs_hold_every_recipe_what_is_printed_and_the_assumptions() -> None:
    assert set(PRESETS) == {recipe.name for recipe in recipes()}
    check_docs(["quickstart_gan"])
    assert f"{scaling.PEAK:g} TFLOP/s" in DOCS
    assert f"{100 * scaling.EFFICIENCY:g} %" in DOCS
    for link in (*scaling.INSIDE, *OUTSIDE):
        assert re.search(rf"{link.name}\b.*{link.bandwidth / 1e9:g} GB/s.*{1e6 * link.latency:g} µs", DOCS), link
    assert Path("benchmarks/scaling.py").as_posix() in DOCS


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def check_docs(names: list[str]) -> None:
    table = {name: scaling.figures(WORK(name), SPEED) for name in names}
    printed = rows_of(scaling.markdown(table))
    assert len(printed) == 2 * (len(names) + 1)
    assert [row for row in printed if row not in rows_of(DOCS)] == []


@pytest.mark.slow
def test_docs_hold_every_recipe() -> None:
    check_docs(list(PRESETS))


def test_arithmetic_is_that_of_real_steps() -> None:
    """Of the dense convolutions, which are nearly all of it: as `benchmarks/gan_step.py` records them."""
    name, batch = "quickstart_gan", 4
    config = scaling.recipe(name)
    with random_images(32, 1, 10) as reader:
        config.batch_size, config.compile = batch, "off"  # type: ignore[attr-defined]
        task = TASKS["gan"].task(config, reader, None, torch.device("cpu"))
        loader, counted = make_loader(config, reader, torch.device("cpu")), 0.0
        for step, share in scaling.kinds_of_steps(config).items():
            with Recorder(channels_last=True) as recorder:
                task.step(loader, step)
            counted += share * flops(recorder.calls)
    assert WORK(name).flop / WORK(name).batch == pytest.approx(counted / batch, rel=0.1)


def test_buckets_are_those_that_are_sent(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_ELEMENTS", 1000)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (300, 800, 2000, 10, 20)]
    gradients.GradientExchange(parameters).finish()
    assert sent == [2030, 1100]
    updater: Any = SimpleNamespace(parameters=parameters)
    assert scaling.buckets(updater) == 2


def test_the_model_of_time_and_where_messages_pass_arithmetic() -> None:
    link = Link("a link", 1e9, 0.0)
    control = scaling.NETWORK_MESSAGE
    assert scaling.seconds(STEP, 1, link) == 0
    assert scaling.seconds(STEP, 2, link) == pytest.approx(4e7 / 1e9 + 2 * control)
    assert scaling.seconds(STEP, 8, link) == pytest.approx(2 * 7 / 8 * 4e7 / 1e9 + 6 * control)
    slow = link._replace(latency=1e-3)
    assert scaling.seconds(STEP, 8, slow) - scaling.seconds(STEP, 8, link) == pytest.approx(6 * 10 * 1e-3)
    assert scaling.arithmetic_seconds(STEP, 8, 1e12) == pytest.approx(1 / 8)
    assert scaling.arithmetic_seconds(STEP, 512, 1e12) == pytest.approx(4 / 64)  # no less than the smallest share
    link = OUTSIDE[0]
    gpus = scaling.crossing(STEP, link, 1e12)
    assert gpus is not None
    for count, passed in ((gpus // 2, False), (gpus, True)):
        assert (scaling.seconds(STEP, count, link) > 1 / count) == passed


TINY = {
    "classifier": {"batch_size": 8, "model": {"name": "resnet18", "stem": "small-stride2"}},
    "gan": {
        "batch_size": 8,
        "generator": {"z_dim": 8, "w_dim": 8, "channel_base": 128, "channel_max": 8},
        "discriminator": {"channel_base": 128, "channel_max": 8},
    },
}


def test_figures_are_medians_of_the_repeats_and_bad_input_is_refused():
    found = distributed.summary("classifier", {"ranks": [1, 2, 4], "by_hand": [2, 3, 4], "process": [3, 3, 3]}, 8)
    assert found["ddp_vs_by_hand_ratio"] == statistics.median([2, 1.5, 1])
    assert found["classifier_ranks_vs_process_ratio"] == statistics.median([3, 1.5, 0.75])
    assert (found["classifier_ranks_images_per_second"], found["classifier_process_images_per_second"]) == (4, 8 / 3)
    assert "exchange_vs_by_hand_ratio" in distributed.summary("gan", {"ranks": [1], "by_hand": [1], "process": [1]}, 8)
    assert_raises(UserError, "not a recipe of task gan", distributed.main, ["--gan", "configs/bench_classifier.yaml"])


@pytest.mark.slow  # ten processes, for a script that only developers run
@pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tested on Linux")
def test_every_figure_is_there_and_the_last_line_is_flat(tmp_path, last_line):
    files = []
    for task, recipe in (("classifier", "configs/bench_classifier.yaml"), ("gan", "configs/bench_gan_step.yaml")):
        path = tmp_path / f"{task}.yaml"
        path.write_text(json.dumps(read_yaml(recipe) | TINY[task] | {"precision": "fp32"}))
        files += [f"--{task}", str(path)]
    result = last_line(distributed, [*files, "--repeats", "1", "--steps", "1", "--threads", "2", "--json"])
    for task, way in (("classifier", "ddp"), ("gan", "exchange")):
        rates = {name: result[f"{task}_{name}_images_per_second"] for name in distributed.CONTENDERS}
        assert result[f"{way}_vs_by_hand_ratio"] == pytest.approx(rates["ranks"] / rates["by_hand"])
        assert result[f"{task}_ranks_vs_process_ratio"] == pytest.approx(rates["ranks"] / rates["process"])
    assert {"load_1min_before", "load_1min_after", "threads", "repeats"} <= result.keys()
    assert collectives.world_size() == 1


@pytest.fixture
def options(tmp_path: Path, packed: Path) -> list[str]:
    config = write_config(tmp_path / "gan.yaml", "gan", packed)
    counts = ["--every", "10", "--repeats", "2", "--steps", "2"]
    return ["--config", str(config), "--folder", str(tmp_path / "runs"), *counts, "--json"]


def test_every_figure_is_there_and_nothing_is_left(options, tmp_path, last_line):
    result = last_line(checkpoint, options)
    assert (result["every"], result["repeats"], result["steps"]) == (10, 2, 2)
    for mode in ("asynchronous", "synchronous"):
        assert result[f"{mode}_blocked_ms"] > 0
        assert result[f"{mode}_extra_min_ms"] <= result[f"{mode}_extra_ms"] <= result[f"{mode}_extra_max_ms"]
        cost = result[f"{mode}_extra_ms"] / (10 * result["step_ms"])
        assert result[f"{mode}_cost_ratio"] == pytest.approx(cost)
    assert result["checkpoint_cost_ratio"] == result["asynchronous_cost_ratio"]  # what the recipe does
    assert 0.05 < result["checkpoint_mib"] < 10
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_cost_is_the_median_of_what_neighbours_differ_by():
    timed = checkpoint.Timed(SimpleNamespace(), torch.device("cpu"))  # type: ignore[arg-type]
    timed.seconds = {"plain": [10.0, 30.0, 20.0], "asynchronous": [11.0, 30.5, 29.0], "synchronous": [12.0, 32.0, 22.0]}
    timed.blocked = {"plain": [0.0] * 3, "asynchronous": [0.1, 0.3, 0.2], "synchronous": [1.0, 2.0, 3.0]}
    found = timed.result(steps=10, every=500)
    assert found["step_ms"] == 2000
    assert (found["asynchronous_extra_ms"], found["synchronous_extra_ms"]) == (1000, 2000)
    assert (found["asynchronous_blocked_ms"], found["synchronous_blocked_ms"]) == (200, 2000)
    assert found["asynchronous_cost_ratio"] == pytest.approx(1 / 1000)
