import pytest
import torch

from duetgan.data.reading.dataset import Dataset
from duetgan.training.base.data import make_loader
from duetgan.training.base.task import Task
from duetgan.training.engine.checkpoints import CheckpointManager
from duetgan.training.engine.loop import Loop
from duetgan.training.engine.run import callbacks
from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.runlog.run_folder import RunFolder
from tests.end_to_end.helpers import log_of


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

    def networks(self):
        return {}

    def images_at(self, step):
        return self.size * step


def ran(packed, folder, *, size=8, max_steps=None):
    """A run with batches of this size, or its continuation."""
    tree = {
        "task": "classifier",
        "steps": 12,
        "batch_size": size,
        "data": {"path": str(packed / "train.lmdb")},
        "evaluation": {"every": 2},
        "log": {"tensorboard": False, "every": 2},
    }
    config = build_run_config(tree, [], "x")
    loader = make_loader(config, Dataset(packed / "train.lmdb"), torch.device("cpu"))
    run = RunFolder(folder)
    run.open()
    task = Judged([0.5, 0.7, 0.6, 0.6, 0.6, 0.9], size)
    loop = Loop(config, task, loader, run, callbacks(config, task, loader, run))
    loop.resume()
    loop.run(max_steps)
    run.close()
    return loop


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
