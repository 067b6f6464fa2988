"""The benchmarks of several processes and of saving: every figure is there, and they fit together."""

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import checkpoint, scaling
from benchmarks.scaling import OUTSIDE, PRESETS, Link, Work
from duetgan.utils.config.recipes import recipes
from duetgan.utils.distributed import gradients
from tests.conftest import REPOSITORY
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
