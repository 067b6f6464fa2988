"""The plan's time: how long a training takes here, what to take instead, and no trace of the measurement in the run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from data.reading.dataset import Dataset
from tests.end_to_end.helpers import TASKS, differing, state_of, train_in_process, write_config
from training.base.config import RunConfig
from training.classifier.resizing import side_at
from training.engine import speed
from training.engine.speed import FORECAST, LONG, Trial, forecast
from training.engine.tasks import build_run_config
from utils.config.yaml_files import read_yaml

pytestmark = pytest.mark.usefixtures("slim")
CPU = torch.device("cpu")


@pytest.fixture
def reader(packed: Path):
    with Dataset(packed / "train.lmdb") as opened:
        yield opened


def config_of(packed: Path, task: str, tmp_path: Path, *options: str) -> RunConfig:
    recipe = write_config(tmp_path / f"{task}.yaml", task, packed)
    return build_run_config(read_yaml(recipe), ["--precision", "fp32", *options], str(recipe))


@pytest.fixture
def steps_take(monkeypatch: pytest.MonkeyPatch):
    """`steps_take(0.1)`: so many seconds for each sample of a step; beyond a limit it is given up."""

    def fix(of_a_sample: float) -> None:
        def seconds(trial: Trial, precision: str, step: int | None = None, *, limit: float = float("inf")) -> float:
            if of_a_sample * trial.samples > limit:
                raise speed.TooSlow
            return of_a_sample * trial.samples

        monkeypatch.setattr(Trial, "seconds", seconds)

    return fix


@pytest.mark.parametrize("task", TASKS)
def test_time_is_images_by_speed(packed, tmp_path, reader, steps_take, task):
    """U1: a month on a CPU was printed without a comment."""
    config = config_of(packed, task, tmp_path)
    steps_take(0.01)
    assert forecast(config, reader, CPU, 360_000) == "about 60 min here, 100 images/s"
    steps_take(0.1)
    text = forecast(config, reader, CPU, 8_640_000)
    assert text.startswith("about 10.0 days here, 10 images/s; that is long: recipes named cpu are smaller")
    assert "quickstart.py FOLDER --minutes N" in text


@pytest.mark.parametrize("task", TASKS)
def test_time_counts_every_step_as_what_it_is(packed, tmp_path, reader, monkeypatch, task):
    """A classifier's smaller images, a GAN's lazy penalties: R1 every third step takes twice as long here."""
    more = ["--resizing.initial_scale", "0.5"] if task == "classifier" else []
    config: Any = config_of(packed, task, tmp_path, "--steps", "900", *more)

    def of_a_sample(config, step):
        if task == "gan":
            return 0.01 * (1 + config.loss.penalty_due(step))
        return 0.01 * (side_at(config.resizing, step, config.steps, 16) / 16) ** 2

    def seconds(trial, _precision, step=None, **_):
        return trial.samples * of_a_sample(trial.task.config, next(iter(trial.shares)) if step is None else step)

    monkeypatch.setattr(Trial, "seconds", seconds)
    expected = sum(of_a_sample(config, step) for step in range(900)) / 900
    told = re.fullmatch(r"about (\d+) min here, (\d+) images/s", forecast(config, reader, CPU, 360_000))
    assert told is not None
    assert int(told[1]) == pytest.approx(360_000 * expected / 60, rel=0.02)
    assert int(told[2]) == pytest.approx(1 / expected, rel=0.02)
    assert not 0.008 < expected < 0.012  # neither is what a step of one kind says


def test_what_comes_once_a_step_counts_once(packed, tmp_path, reader, monkeypatch):
    """airbench: Muon takes longer than the first small batches, and was counted for each of them."""
    tried = []

    def seconds(trial, *_, **__):
        tried.append(trial.samples)
        return 0.2 + 0.002 * trial.samples

    monkeypatch.setattr(Trial, "seconds", seconds)
    config = config_of(packed, "classifier", tmp_path, "--batch-size", "2000")
    assert forecast(config, reader, CPU, 1_000_000) == "about 35 min here, 476 images/s"  # 4.2 s a step
    assert max(tried) < 600
    config = config_of(packed, "classifier", tmp_path, "--batch-size", "2000", "--micro-batch", "10")
    assert forecast(config, reader, CPU, 1_000_000) == "about 35 min here, 476 images/s"
    monkeypatch.setattr(Trial, "seconds", lambda trial, *_, **__: 2.0 + 0.002 * trial.samples)  # a slow machine
    config = config_of(packed, "classifier", tmp_path, "--batch-size", "2000")
    assert forecast(config, reader, CPU, 1_000_000) == "about 50 min here, 333 images/s"
    tried.clear()
    monkeypatch.setattr(Trial, "seconds", lambda trial, *_, **__: 2.6 + 0 * seconds(trial))
    forecast(config, reader, CPU, 1_000_000)
    assert max(tried) < 8  # a larger batch might take four times as long: the plan would be waited for


def test_what_is_just_not_long_gets_no_advice(packed, tmp_path, reader, steps_take):
    steps_take(0.01)
    images = round(LONG / 0.01)
    assert ";" not in forecast(config_of(packed, "gan", tmp_path), reader, CPU, images)
    assert ";" in forecast(config_of(packed, "gan", tmp_path), reader, CPU, images + 100)


def test_steps_that_are_given_up_are_a_lower_bound(packed, tmp_path, reader, steps_take):
    steps_take(100.0)
    assert forecast(config_of(packed, "gan", tmp_path), reader, CPU, 3_200_000).startswith(
        "more than 27.8 days here, at most 1.33 images/s; that is long"
    )


def test_short_trainings_and_accelerators_are_not_measured(packed, tmp_path, reader, monkeypatch):
    monkeypatch.setattr(speed, "Trial", lambda *_: pytest.fail("measured"))
    config = config_of(packed, "gan", tmp_path)
    assert forecast(config, reader, CPU, FORECAST - 1) == ""
    assert forecast(config, reader, torch.device("cuda"), 10**9) == ""


def test_a_measurement_without_memory_is_no_failure(packed, tmp_path, reader, monkeypatch):
    def short(*_, **__):
        raise MemoryError

    monkeypatch.setattr(Trial, "seconds", short)
    assert forecast(config_of(packed, "gan", tmp_path), reader, CPU, FORECAST) == ""


@pytest.mark.parametrize("task", TASKS)
def test_plan_has_the_time_and_the_run_no_trace_of_it(packed, tmp_path, monkeypatch, capfd, task):
    recipe = write_config(tmp_path / f"{task}.yaml", task, packed)
    states = []
    for name, least in (("without", FORECAST), ("with", 1)):
        monkeypatch.setattr(speed, "FORECAST", least)
        assert train_in_process(recipe, tmp_path / name, "--max-steps", "4", "--precision", "fp32") == 0
        told = re.search(r"^ *time +about \d+ s here, [\d,.e+]+ images/s$", capfd.readouterr().err, re.MULTILINE)
        assert (told is not None) is (name == "with")
        states.append(state_of(tmp_path / name, 4))
    assert differing(states[0], states[1]) == []
