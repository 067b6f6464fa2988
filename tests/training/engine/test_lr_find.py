"""The learning-rate search: what it measures, what it suggests, and that it leaves nothing behind."""

import contextlib
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from duetgan.training.base.monitors import MetricWindow
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine import lr_find
from duetgan.training.engine.lr_find import Curve, Sweep, search, write
from duetgan.training.optim.config import OptimizerConfig
from duetgan.training.optim.updater import Precision, Updater
from duetgan.utils.errors import UserError
from tests.conftest import assert_raises
from tests.end_to_end.helpers import check_same, differing, state_of, train_in_process, write_config

pytestmark = pytest.mark.usefixtures("slim")
CPU = torch.device("cpu")
SHORT = ["--lr-find-steps", "12", "--lr-find-from", "1e-4"]


class Quadratic(nn.Module):
    """Loss 1/2 sum of curvature * w^2; two groups, the second at a tenth of the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(1.0, dtype=torch.float64)) for _ in range(2))


class QuadraticTask:
    loss_metric = "loss/quadratic"

    def __init__(self, curvature: float = 1.0) -> None:
        self.model, self.curvature = Quadratic(), curvature
        config = OptimizerConfig(name="sgd", lr=0.3, momentum=0.0, schedule="cosine", warmup_steps=5)
        groups: list[dict[str, Any]] = [{"params": [self.model.a]}, {"params": [self.model.b], "lr_scale": 0.1}]
        self.updater = Updater(self.model, config, Precision("fp32", CPU), 100, groups=groups)
        self.steps: list[int] = []

    def registry(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.updater}

    def step(self, batches, step):
        self.steps.append(step)
        self.updater.zero_grad()
        loss = 0.5 * self.curvature * (self.model.a**2 + self.model.b**2)
        loss.backward()
        self.updater.step(step)
        torch.rand(1)
        return {"loss/quadratic": loss.detach(), "other": loss.detach()}


def fake_loop(task) -> Any:
    loader = SimpleNamespace(device=CPU, wait_seconds=3.0)
    config = SimpleNamespace(task="quadratic", optimizer=OptimizerConfig(lr=0.15))
    return SimpleNamespace(
        task=task, registry=task.registry, loader=loader, step=7, config=config, window=MetricWindow(watched=None)
    )


def test_a_rates_loss_is_the_one_after_its_update(tmp_path, monkeypatch):
    task, sweep = QuadraticTask(), Sweep(steps=20, first=1e-3, last=1.5)
    found = search(fake_loop(task), sweep)
    a = b = 1.0
    assert len(found.rates) == 20
    for number, (rate, loss) in enumerate(zip(found.rates, found.losses, strict=True)):
        assert rate == pytest.approx(1e-3 * 1500 ** (number / 19))
        a, b = a * (1 - rate), b * (1 - 0.1 * rate)
        assert loss == pytest.approx((a * a + b * b) / 2, rel=1e-10)
    assert task.steps == list(range(7, 28))
    assert found.stopped == "all rates were tried"
    assert found.scale == 0.5
    steepest, figures = found.steepest(), []
    assert steepest is not None
    monkeypatch.setattr(lr_find, "save_figure", lambda *written: figures.append(written))
    assert write(found, tmp_path).splitlines() == [
        f"--optimizer.lr {float(f'{steepest / 2:.2g}'):g}",
        "  where the loss falls fastest; rates of the curve times 0.5, for optimizer.lr_batch_size",
        f"  20 rates from 0.001 to 1.5: all rates were tried; curve: {tmp_path}/lr_find.png",
    ]
    assert json.loads((tmp_path / "lr_find.json").read_text()) == vars(found) | {"steepest": steepest}
    ((figure, path),) = figures
    (axes,) = figure.axes
    assert path == tmp_path / "lr_find.png"
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn == {
        "loss": (found.rates, found.losses),
        "smoothed": (found.rates, found.smoothed),
        f"steepest {steepest:.2g}": ([steepest] * 2, [0, 1]),
    }
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_title()) == ("log", "log", "all rates were tried")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("learning rate", "loss of the next batch")
    assert {text.get_text() for text in axes.get_legend().get_texts()} == set(drawn)


@pytest.mark.parametrize(
    ("last", "curvature", "stopped"),
    [(100.0, 1.0, "the smoothed loss was 4 times its lowest"), (1e200, 1.0, "4 times"), (10.0, math.nan, "not finite")],
)
def test_a_sweep_stops_where_training_diverges(last, curvature, stopped):
    task = QuadraticTask(curvature)
    found = search(fake_loop(task), Sweep(steps=50, first=1e-2, last=last))
    assert stopped in found.stopped
    assert len(found.rates) < 50
    lowest = [min(found.smoothed[: i + 1]) for i in range(len(found.smoothed))]
    over = [mean > 4 * low for mean, low in zip(found.smoothed, lowest, strict=True)]
    assert over == [False] * (len(over) - 1) + ["finite" not in stopped] if over else "finite" in stopped
    numerator, weight = 0.1 * curvature, 0.1
    for loss, mean in zip(found.losses, found.smoothed, strict=True):
        numerator, weight = 0.9 * numerator + 0.1 * loss, 0.9 * weight + 0.1
        assert mean == pytest.approx(numerator / weight)
    assert task.model.a.item() == 1.0


@pytest.mark.parametrize("broken_at", [None, 15])
def test_everything_is_put_back_after_an_error_too(broken_at):
    task = QuadraticTask()
    real, loop = task.step, fake_loop(task)

    def step(batches, number):
        if number == broken_at:
            raise RuntimeError("broken")
        return real(batches, number)

    task.step = step  # type: ignore[method-assign]
    torch.manual_seed(1)
    expected = torch.rand(1).item()
    torch.manual_seed(1)
    with contextlib.nullcontext() if broken_at is None else pytest.raises(RuntimeError, match="broken"):
        search(loop, Sweep(steps=12, first=1e-3, last=1.0))
    assert torch.rand(1).item() == expected
    assert (task.model.a.item(), task.model.b.item(), task.model.a.grad) == (1.0, 1.0, None)
    assert (task.updater.rate, loop.loader.wait_seconds) == (None, 3.0)


def curve(losses) -> Curve:
    smoothed = [float(loss) for loss in losses]
    rates = np.geomspace(1e-6, 10, len(smoothed)).tolist()
    return Curve(scale=1.0, rates=rates, losses=smoothed[::-1], smoothed=smoothed)


def test_suggestions_ignore_the_beginning_and_what_comes_after_the_lowest_loss():
    losses = 2 - np.tanh((np.arange(100) - 50) / 10)
    losses[75:] = 3  # diverged ...
    losses[80:] = 1.2  # ... and fell more steeply than ever before, though not to the lowest loss
    losses[:5] = [9, 6, 4, 3.4, 3.2]
    found = curve(losses)
    steepest = found.steepest()
    assert steepest is not None
    assert found.rates.index(steepest) == pytest.approx(50, abs=1)


def falling(count):
    return [2.0 - i / count for i in range(count)]


@pytest.mark.parametrize("losses", [[], [2.0] * 5, [2.0 + i for i in range(50)], [2.0] * 50, falling(10)])
def test_a_curve_that_falls_nowhere_suggests_nothing_and_says_what_to_do(losses, tmp_path):
    found = curve(losses)
    assert found.steepest() is None
    assert curve(falling(11)).steepest() is not None  # without its first tenth it has ten losses
    assert_raises(UserError, r"falls at no rate from .* give a lower --lr-find-from", write, found, tmp_path)
    assert json.loads((tmp_path / "lr_find.json").read_text())["steepest"] is None


@pytest.mark.parametrize(
    "rates", [{"first": 0.0}, {"first": 1.0, "last": 1.0}, {"last": math.inf}, {"first": math.nan}]
)
def test_sweeps_that_cannot_be(rates):
    assert_raises(UserError, "must be positive and below the last", Sweep, **rates)
    assert_raises(UserError, "--lr-find-steps 9", Sweep, steps=9)
    assert Sweep(steps=10).rate(9) == 10.0


# --- on real training


def test_the_command_suggests_and_leaves_the_training_as_it_was(tmp_path, packed, capsys, monkeypatch):
    begun: list[str] = []
    monkeypatch.setattr(ClassifierTask, "begin", lambda task: begun.append("a run"))
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    straight, searched = tmp_path / "straight", tmp_path / "searched"
    assert train_in_process(config, straight) == 0
    capsys.readouterr()
    other = ["--lr-find-to", "0.1", "--model.name", "resnet34"]
    assert train_in_process(config, searched, "--lr-find", *SHORT, *other) in (0, 2)
    assert len(begun) == 2  # of the run before, too
    assert {path.name for path in searched.iterdir()} <= {"lr_find.png", "lr_find.json", ".lock"}
    assert train_in_process(config, searched, "--max-steps", "4") == 0  # another network: there was no run to fit to
    before = {path: path.read_bytes() for path in searched.rglob("*") if path.is_file() and "lr_find" not in path.name}
    capsys.readouterr()
    code = train_in_process(config, searched, "--lr-find", "--lr-find-steps", "16", "--lr-find-to", "0.1")
    out = capsys.readouterr()
    document = json.loads((searched / "lr_find.json").read_text())
    if code == 0:
        assert out.out.startswith(f"--optimizer.lr {document['steepest']:.2g}".rstrip("0"))
    else:  # a few steps on random images need not fall
        assert "falls at no rate" in out.err
    assert "searching from step 4 of 8" in out.err
    assert len(begun) == 3  # by the run that began
    assert (searched / "lr_find.png").read_bytes()[:4] == b"\x89PNG"
    after = {path: path.read_bytes() for path in searched.rglob("*") if path.is_file() and "lr_find" not in path.name}
    assert after == before
    assert train_in_process(config, searched) == 0
    check_same(straight, searched, 8)


@pytest.mark.slow
def test_two_processes_find_one_curve_and_train_on_as_if_nothing_had_been(tmp_path, packed):
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    straight, searched = tmp_path / "straight", tmp_path / "searched"
    short = ["--procs", "2", "--steps", "2", "--model.stem", "small-stride2"]
    assert train_in_process(config, straight, *short) == 0
    assert train_in_process(config, searched, *short, "--lr-find", *SHORT) in (0, 2)
    assert train_in_process(config, searched, *short) == 0
    assert differing(state_of(straight, 2), state_of(searched, 2)) == []
