import math
from pathlib import Path
from typing import Any

import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.data import make_loader
from duetgan.training.base.monitors import EarlyStopping, EarlyStoppingConfig, MetricWindow
from duetgan.training.base.task import Task
from duetgan.training.classifier.task import ClassifierTask
from duetgan.training.engine.checkpoints import CheckpointManager
from duetgan.training.engine.loop import Loop
from duetgan.training.engine.run import callbacks
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.errors import DamageError, UserError
from duetgan.utils.runlog.run_folder import RunFolder
from tests.end_to_end.helpers import last, log_of, status, train_in_process, write_config


def watch(figures, *, lower=False, **config):
    stopping = EarlyStopping(EarlyStoppingConfig(**config), "x", lower_is_better=lower)
    for number, figure in enumerate(figures, 1):
        stopping.see(figure)
        if stopping.reached:
            return number, stopping.reason.partition("without x better than ")[2]
    return None, ""


@pytest.mark.parametrize(
    ("figures", "config", "stops", "best"),
    [
        ([0.5, 0.6, 0.6, 0.59], {"patience": 2}, 4, "0.6"),
        ([0.5, 0.6, 0.6, 0.61, 0.5, 0.5], {"patience": 2}, 6, "0.61"),
        ([0.5, 0.4, 0.3], {"patience": 1}, 2, "0.5"),
        ([0.5, 0.4, 0.3, 0.2], {"patience": None}, None, ""),
        ([0.50, 0.52, 0.54, 0.56], {"patience": 2, "min_delta": 0.03}, None, ""),  # small steps add up
        ([0.50, 0.51, 0.52, 0.56], {"patience": 2, "min_delta": 0.03}, 3, "0.5 by more than 0.03"),
        ([0.5, 0.75, 0.75], {"patience": 2, "min_delta": 0.25}, 3, "0.5 by more than 0.25"),
        ([math.nan, 0.1, math.nan, math.nan], {"patience": 2}, 4, "0.1"),
        ([math.nan, math.nan], {"patience": 2}, 2, "nothing"),
    ],
)
def test_when_it_stops(figures, config, stops, best):
    assert watch(figures, **config) == (stops, best)
    found, other = watch([-figure for figure in figures], lower=True, **config)
    assert (found, other.lstrip("-")) == (stops, best)


def test_a_window_of_metrics_goes_on_where_it_was_saved():
    def added(window, values):
        for value in values:
            window.add({"loss/x": torch.tensor(value), "nonfinite_updates/x": torch.tensor(float(value > 4))})
        return window

    saved = added(MetricWindow("loss/x"), [1.0, 5.0])
    saved.fold()
    other = added(MetricWindow("loss/x"), [7.0])
    other.fold()
    added(other, [8.0]).load_state_dict(saved.state_dict())  # what it has seen since is dropped
    windows = [added(window, [2.0, 6.0]).take() for window in (saved, other)]
    assert [window.values for window in windows] == [[1.0, 5.0, 2.0, 6.0]] * 2
    assert windows[0].state_dict() == windows[1].state_dict()
    assert windows[1].means() == {"loss/x": 3.5}
    assert (saved.failed, other.failed) == ([False, True, False, True], [False, True])
    assert other.values == []


def test_it_needs_images_to_evaluate_with(packed):
    tree = {"task": "classifier", "early_stopping": {"patience": 1}}
    config: Any = build_run_config(tree | {"data": {"path": str(packed / "train.lmdb")}}, [], "x")
    with Dataset(packed / "train.lmdb") as reader, pytest.raises(UserError, match=r"give data\.val_path"):
        ClassifierTask(config, reader, None, torch.device("cpu"))


class Judged(Task):
    """A task without networks whose evaluations are given."""

    best_metric, best_is_lower, loss_metric = "accuracy", False, "loss/x"

    def __init__(self, figures, size):
        self.shape = {"channels": 1, "classes": 10, "resolution": 16}
        self.figures, self.size = figures, size
        self.evaluations = 0

    def registry(self):
        return {"task": self}

    def state_dict(self):
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state):
        self.evaluations = state["evaluations"]

    def step(self, batches, step):
        next(batches)
        return {"loss/x": torch.tensor(1.0)}

    def evaluate(self):
        self.evaluations += 1
        return {"accuracy": self.figures[self.evaluations - 1]}

    def warnings(self, step, row):
        return ["it is low"] if row.get("val/accuracy") == 0.5 else []

    def networks(self):
        return {}

    def images_at(self, step):
        return self.size * step


def ran(packed, folder, patience=None, *, size=8, max_steps=None, every=2):
    """A run with batches of this size, or its continuation."""
    tree = {
        "task": "classifier",
        "steps": 12,
        "batch_size": size,
        "data": {"path": str(packed / "train.lmdb")},
        "evaluation": {"every": 2},
        "early_stopping": {"patience": patience},
        "log": {"tensorboard": False, "every": every},
    }
    config = build_run_config(tree, [], "x")
    loader = make_loader(config, Dataset(packed / "train.lmdb"), torch.device("cpu"))
    run = RunFolder(folder)
    run.open()
    task = Judged([0.5, 0.7, 0.7, 0.6, 0.6, 0.9], size)  # an equal one is no better
    loop = Loop(config, task, loader, run, callbacks(config, task, loader, run))
    loop.resume()
    loop.run(max_steps)
    run.close()
    return loop


def test_a_run_stops_early_and_a_resume_knows(packed, tmp_path, capsys):
    loop = ran(packed, tmp_path / "run", 2, max_steps=6)  # stopped on the way it counts on
    assert (loop.step, loop.finished) == (6, False)
    assert capsys.readouterr().err.splitlines()[0] == "warning: step 2: it is low"
    loop = ran(packed, tmp_path / "run", 2)
    assert (loop.step, loop.finished, loop.best) == (8, True, {"accuracy": 0.7, "step": 4})
    assert "early stopping: 2 evaluations without accuracy better than 0.7" in capsys.readouterr().err
    again = ran(packed, tmp_path / "run", 2)
    assert (again.step, again.finished) == (8, True)
    patient = ran(packed, tmp_path / "run", 4)  # asked to wait longer, it goes on
    assert (patient.step, patient.best["accuracy"]) == (12, 0.9)
    straight = ran(packed, tmp_path / "straight", 2, every=3)
    assert straight.step == 8
    rows = log_of(tmp_path / "straight")
    assert rows[-1]["partial"]
    ran(packed, tmp_path / "straight", 2, every=3)  # there is nothing left to do
    assert log_of(tmp_path / "straight") == rows


def test_damaged_held_out_images_cost_no_step(packed, tmp_path, monkeypatch):
    def evaluate(self):
        raise DamageError(Path("x.lmdb"), [3], "another checksum", first=0)

    monkeypatch.setattr(Judged, "evaluate", evaluate)
    with pytest.raises(DamageError, match="record 3 is damaged"):
        ran(packed, tmp_path / "run")
    assert last(tmp_path / "run") == 2


@pytest.mark.usefixtures("slim")
def test_the_status_has_the_reason_of_an_early_stop(packed, tmp_path):
    config, run = write_config(tmp_path / "recipe.yaml", "classifier", packed), tmp_path / "run"
    options = ["--evaluation.every", "2", "--early_stopping.patience", "1", "--early_stopping.min_delta", "1"]
    assert train_in_process(config, run, *options) == 0
    state, step, reason, code = status(run, "state", "step", "reason", "exit_code")
    assert (state, step, code) == ("finished", 4, 0)
    assert reason.startswith("early stopping: 1 evaluation")


def test_what_was_saved_is_on_the_disk_before_a_failing_run_ends(packed, tmp_path, monkeypatch):
    waits = []

    def step(self, loader, number):
        raise RuntimeError("a fault")

    monkeypatch.setattr(Judged, "step", step)
    monkeypatch.setattr(CheckpointManager, "wait", lambda self: waits.append(self))
    with pytest.raises(RuntimeError, match="a fault"):
        ran(packed, tmp_path / "run")
    assert waits


def test_images_are_counted_over_a_resume_with_another_batch_size(packed, tmp_path):
    """U6: they ran backwards."""
    ran(packed, tmp_path / "run", size=8, max_steps=6)
    loop = ran(packed, tmp_path / "run", size=4)
    counts = {row["step"]: row["images"] for row in log_of(tmp_path / "run") if "images" in row}
    assert counts == {2: 16, 4: 32, 6: 48, 8: 56, 10: 64, 12: 72}
    assert loop.images == loop.state_dict()["images"] == 72
