"""The keeper of checkpoints: a thread writes what `save` saw, nothing is lost, and what goes wrong is told."""

import json
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duetgan.training.base.config import CheckpointConfig, RunConfig
from duetgan.training.base.monitors import MetricWindow
from duetgan.training.engine.checkpoints import CheckpointManager
from duetgan.training.engine.loop import BrokenWeights
from duetgan.training.engine.rollback import SkippedUpdates, stop_broken
from duetgan.training.optim.config import OptimizerConfig
from duetgan.utils import checkpoint as checkpoints
from duetgan.utils.checkpoint import load, newest_first
from duetgan.utils.checkpoint.provenance import Lineage
from duetgan.utils.config.build import to_tree
from duetgan.utils.errors import TrainingHalted, UserError
from duetgan.utils.runlog import versions
from duetgan.utils.runlog.run_folder import RunFolder
from tests.utils.checkpoint.files import damage, names

META = SimpleNamespace(classes=["a"], content_hash="1234", count=3, resize_filter="area")
ABOUT = {"shape": {"channels": 1, "classes": 1, "resolution": 8}}


class Weights:
    """A part of the training, and what it has been given back."""

    def __init__(self, value=0.0):
        self.weights = torch.full((1000,), value)

    def state_dict(self):
        return {"w": self.weights}

    def load_state_dict(self, state):
        self.weights = state["w"]


class Counter:
    """Stands for the loop's part."""

    def __init__(self, step=0, best=None):
        self.state = {"step": step, "best": {} if best is None else {"metric": 1.0, "step": best}}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def keeper_of(folder, meta=META, **checkpoint):
    config = RunConfig(task="gan")
    for name, value in checkpoint.items():
        setattr(config.checkpoint, name, value)
    loader: Any = SimpleNamespace(dataset=SimpleNamespace(meta=meta))
    return CheckpointManager(config, RunFolder(folder), loader)


def save(manager, step, best=None, *, wait=True, healthy=None):
    """A checkpoint whose weights are its step."""
    registry: dict[str, Any] = {"model": Weights(step), "loop": Counter(step, step if best else None)}
    figure = {"metric": "frechet", "value": best} if best else None
    manager.healthy = healthy
    manager.save(step, registry, ABOUT, figure, bool(best))
    if wait:
        manager.wait()
    return registry["model"].weights


def steps(manager):
    return [checkpoints.step_of(path) for path in newest_first(manager.folder.checkpoints)]


def value(path):
    return load(path)["state"]["model"]["w"].unique().tolist()


def pointed(manager, which="last"):
    return json.loads((manager.folder.checkpoints / f"{which}.json").read_text())["step"]


@pytest.fixture
def held(monkeypatch):
    """Writing begins when the event is set; how many writes have begun."""
    gate, begun, write = threading.Event(), [], checkpoints.save

    def slow(folder, taken):
        begun.append(taken.step)
        assert gate.wait(60)
        return write(folder, taken)

    monkeypatch.setattr(checkpoints, "save", slow)
    yield SimpleNamespace(gate=gate, begun=begun)
    gate.set()


def test_training_goes_on_while_a_thread_writes_what_was_there(tmp_path, held):
    manager = keeper_of(tmp_path)
    weights = save(manager, 1, wait=False)
    weights.fill_(99)  # the next step
    assert manager.saved_step == -1
    held.gate.set()
    manager.wait()
    assert manager.saved_step == 1
    (path,) = newest_first(manager.folder.checkpoints)
    assert value(path) == [1.0]
    assert pointed(manager) == 1


def test_the_next_save_waits_and_both_are_written(tmp_path, held):
    manager = keeper_of(tmp_path)
    save(manager, 1, wait=False)
    threading.Timer(0.05, held.gate.set).start()
    save(manager, 2, wait=False)
    assert manager.saved_step >= 1
    manager.wait()
    save(manager, 2)  # is there already
    assert held.begun == [1, 2]
    assert steps(manager) == [2, 1]


def test_what_is_kept_and_how_many_at_most(tmp_path):
    manager = keeper_of(tmp_path, keep=2, keep_every=4)
    for step in range(1, 12):
        save(manager, step, best=0.1 if step == 3 else None)
        assert len(steps(manager)) < CheckpointConfig(every=1, keep=2, keep_every=4).max_on_disk(11)
    assert steps(manager) == [11, 10, 8, 4, 3]
    assert (pointed(manager), pointed(manager, "best")) == (11, 3)
    assert CheckpointConfig().max_on_disk(10_000) == 4
    assert CheckpointConfig(keep=1, keep_every=1000).max_on_disk(10_999) == 13


def test_the_best_is_kept_where_its_pointer_is_damaged(tmp_path):
    """Also by a run that goes on: it has the step in its state."""
    manager = keeper_of(tmp_path, keep=1)
    save(manager, 1, best=0.1)
    (manager.folder.checkpoints / "best.json").write_text("{")
    manager.save(2, {"loop": Counter(2, best=1)}, ABOUT)
    manager.wait()
    assert steps(manager) == [2, 1]
    again = keeper_of(tmp_path, keep=1)
    assert again.restore({"loop": Counter()}) is not None
    assert pointed(again, "best") == 1
    save(again, 3)
    assert steps(again) == [3, 1]


def test_after_a_roll_back_best_json_names_the_best_that_remains(tmp_path):
    manager = keeper_of(tmp_path, keep=9)
    save(manager, 1, best=0.5)
    best = manager.folder.checkpoints / "best.json"
    pointer = best.read_text()
    manager.save(2, {"loop": Counter(2, best=1)}, ABOUT)
    save(manager, 3, best=0.25)
    assert manager.restore({"loop": Counter()}, up_to=2) is not None
    assert best.read_text() == pointer
    best.unlink()
    damage(newest_first(manager.folder.checkpoints)[-1], flip=0.5)
    assert manager.restore({"loop": Counter()}, up_to=2) is not None
    assert not best.exists()


def test_a_save_after_falling_back_is_not_the_one_that_goes(tmp_path, capsys):
    """Found by reasoning: of a damaged checkpoint 6 and a new one of step 5, keeping one kept the damaged one."""
    manager = keeper_of(tmp_path, keep=1, keep_every=4)
    for step in (4, 6):
        save(manager, step)
    damage(newest_first(manager.folder.checkpoints)[0], flip=0.5)
    again = keeper_of(tmp_path, keep=1)
    weights = Weights()
    assert again.restore({"model": weights})["step"] == again.saved_step == 4
    assert weights.weights.unique().tolist() == [4.0]
    assert "step-00000006.pt: damaged" in capsys.readouterr().err
    save(again, 5)
    assert steps(again) == [6, 5]
    assert value(newest_first(again.folder.checkpoints)[1]) == [5.0]
    save(again, 6)
    assert (steps(again), value(newest_first(again.folder.checkpoints)[0])) == ([6], [6.0])


@pytest.mark.parametrize("behind", [("last", "best"), ("best",)])
def test_pointers_that_a_kill_left_behind_are_renewed_at_a_resume(tmp_path, behind):
    """Found by kill -9 at random moments: after the last step nothing else would renew them."""
    manager = keeper_of(tmp_path)
    pointers, before = [manager.folder.checkpoints / f"{which}.json" for which in behind], []
    for step, figure in ((1, 0.5), (2, 0.25)):
        registry: dict[str, Any] = {"loop": Counter()}
        registry["loop"].state = {"step": step, "best": {"frechet": figure, "step": step}}
        before = [path.read_text() for path in pointers if path.exists()]
        manager.save(step, registry, ABOUT, {"metric": "frechet", "value": figure}, best=True)
        manager.wait()
    wanted = [path.read_text() for path in pointers]
    assert before != wanted
    for path, text in zip(pointers, before, strict=True):
        path.write_text(text)
    assert keeper_of(tmp_path).restore({"loop": Counter()}) is not None
    assert [path.read_text() for path in pointers] == wanted


def test_leftovers_of_a_killed_write_are_gone_before_the_next_begins(tmp_path, held):
    """They may be what fills the disk."""
    manager = keeper_of(tmp_path)
    manager.folder.checkpoints.mkdir()
    (manager.folder.checkpoints / ".step-00000003.pt.tmp").write_text("half")
    (manager.folder.checkpoints / "step-00000003.pt.sha256").write_text("0")
    save(manager, 4, wait=False)
    while not held.begun:
        pass
    assert names(manager.folder.checkpoints) == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_refuses(tmp_path, monkeypatch, capsys, asynchronous):
    manager = keeper_of(tmp_path, asynchronous=asynchronous)
    save(manager, 1, wait=asynchronous)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        save(manager, 2)
    told = capsys.readouterr().err
    assert "checkpoint of step 2 was not written (No space left on device); the previous one is kept" in told
    assert (steps(manager), manager.saved_step, pointed(manager)) == ([1], 1, 1)
    with pytest.raises(TrainingHalted, match=r"checkpoint of step 2 was not written .* make room, then the same"):  # H5
        manager.check(2)
    save(manager, 2)  # there is room again: the last step of a run is tried once more
    assert (steps(manager), manager.saved_step) == ([2, 1], 2)
    manager.check(2)


def test_what_fails_after_the_checkpoint_is_told_apart(tmp_path, monkeypatch, capsys):
    manager = keeper_of(tmp_path)

    def refuse(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoints, "rotate", refuse)
    save(manager, 1)
    assert "step 1 was written, but not all that follows (Input/output error)" in capsys.readouterr().err
    assert manager.saved_step == 1


def test_a_fault_of_ours_is_not_swallowed_by_the_thread(tmp_path, monkeypatch):
    manager = keeper_of(tmp_path)

    def fail(*_):
        raise KeyError("ours")

    monkeypatch.setattr(checkpoints, "point", fail)
    save(manager, 1, wait=False)
    with pytest.raises(KeyError, match="ours"):
        manager.wait()


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("duetgan.utils.distributed.collectives.is_main", lambda: False)
    manager = keeper_of(tmp_path)
    save(manager, 1)
    assert names(tmp_path) == []


def test_a_checkpoint_of_other_images_or_of_another_version_is_refused(tmp_path):
    manager = keeper_of(tmp_path)
    save(manager, 1)
    others = SimpleNamespace(**vars(META) | {"content_hash": "9", "count": 7})
    with pytest.raises(UserError, match=r"trained on other images \(3 then, 7 in"):
        keeper_of(tmp_path, others).restore({"model": Weights()})
    with pytest.raises(UserError, match="the state of 'ada' does not fit"):
        keeper_of(tmp_path).restore({"ada": Weights()})
    optional = Weights(5.0)
    optional.optional = True  # type: ignore[attr-defined]
    assert keeper_of(tmp_path).restore({"ada": optional}) is not None
    assert keeper_of(tmp_path / "empty").restore({"model": Weights()}) is None


def test_it_waits_for_its_own_write_before_it_reads(tmp_path, held):
    manager = keeper_of(tmp_path)
    save(manager, 3, wait=False)
    threading.Timer(0.05, held.gate.set).start()
    weights = Weights()
    assert manager.restore({"model": weights})["step"] == 3
    assert weights.weights[0] == 3


def test_every_entry_of_a_checkpoint(tmp_path, monkeypatch):
    """Where the weights come from stays, also after a resume with other data."""
    monkeypatch.setattr(versions, "commit", lambda _: "0123456789ab-dirty")
    manager = keeper_of(tmp_path)
    manager.origin = {"file": "donor.pt", "step": 7, "sha256": "ab"}
    manager.lineage = Lineage.of(trained_on=["f00d"], teachers=["t"])
    save(manager, 1, best=0.5)
    again = keeper_of(tmp_path)
    again.lineage = Lineage.of(trained_on=["1234"], teachers=["another"])
    again.restore({"model": Weights()})
    save(again, 2)
    second, first = (load(path) for path in newest_first(manager.folder.checkpoints))
    joined = {key: set(values) for key, values in second.pop("lineage").items()}
    assert joined == {"trained_on": {"f00d", "1234"}, "synthetic": set(), "teachers": {"t", "another"}}
    assert first.pop("lineage") == {"trained_on": ["f00d"], "synthetic": [], "teachers": ["t"]}
    found = first["versions"]
    assert found.keys() == {"python", "torch", "torchvision", "git"}
    assert found["git"] == "0123456789ab-dirty"
    history = [{"step": 0, "content_hash": "1234", "count": 3, "path": ""}]
    expected = ABOUT | {
        **{"schema": checkpoints.SCHEMA, "task": "gan", "config": to_tree(manager.config), "classes": ["a"]},
        "data": {"content_hash": "1234", "count": 3, "resize_filter": "area", "history": history},
        **{"versions": found, "origin": {"file": "donor.pt", "step": 7, "sha256": "ab"}},
    }
    for content, entries in (
        (first, {"step": 1, "figure": {"metric": "frechet", "value": 0.5}}),
        (second, {"step": 2, "figure": {}}),
    ):
        assert content.pop("state").keys() == {"model", "loop"}
        assert content.pop("file").endswith(f"step-0000000{entries['step']}.pt")
        assert content == expected | entries
    unconditional = {"shape": ABOUT["shape"] | {"classes": 0}}
    again.save(3, {}, unconditional)
    again.wait()
    assert load(newest_first(again.folder.checkpoints)[0])["classes"] == []


@pytest.mark.parametrize(
    ("failed", "healthy"),  # steps whose updates are skipped; what is sound after some steps
    [
        ([], {20: None}),
        ([14], {20: 12, 78: 12, 79: None}),
        ([14, 15, 16], {20: 12, 80: 12, 81: None}),
        ([3, 14], {20: 1}),
        ([3, 67], {80: 1}),
        ([3, 68], {67: 1, 80: 66}),
        ([3, 50, 100], {120: 1}),  # a series that is longer than the quiet which ends it
        ([1, 2], {20: -1}),
    ],
)
def test_sound_is_what_came_before_the_update_that_may_have_broken_the_weights(failed, healthy):
    skipped, window, manager = SkippedUpdates(20), MetricWindow(watched=None), SimpleNamespace()
    for step in range(1, 201):
        value = torch.tensor(float(step in failed))
        window.add({"nonfinite_updates/model": value, "nonfinite_updates/other": value * 0, "loss": value})
        if step in {7, 8, 200} | healthy.keys():  # however often it is looked at
            window.fold()
            loop: Any = SimpleNamespace(step=step, window=window, manager=manager)
            skipped.before_save(loop)
            state = skipped.state_dict()
            skipped = SkippedUpdates(20)
            skipped.load_state_dict(state)
        if step in healthy:
            assert manager.healthy == healthy[step], step
    assert manager.healthy is None


def test_more_updates_without_numbers_than_the_cap_end_the_run():
    skipped, window = SkippedUpdates(4), MetricWindow(watched=None)
    loop: Any = SimpleNamespace(step=9, window=window, manager=SimpleNamespace())
    for count, message in ((2, None), (2, None), (1, "5 updates had non-finite gradients, more than nonfinite_cap 4")):
        window.add({"nonfinite_updates/model": torch.tensor(float(count)), "skipped_updates/model": torch.tensor(3.0)})
        taken = window.take()
        row = skipped.columns(taken)
        with nullcontext() if message is None else pytest.raises(BrokenWeights, match=f"^{message}$"):
            skipped.after_row(loop, {}, taken)
        assert row == skipped.totals
    assert skipped.totals == {"skipped_updates": 9, "nonfinite_updates": 5}
    assert loop.manager.healthy == 7


def test_what_is_sound_stays_while_updates_are_skipped(tmp_path, capsys):
    """G2; and the one before it, should the newest be broken, too."""
    manager = keeper_of(tmp_path, keep=3)
    for step in (3, 6, 9, 12, 15):
        save(manager, step)
    assert steps(manager) == [15, 12, 9]
    manager.config.checkpoint.keep = 2
    for step in (18, 21, 24):
        save(manager, step, healthy=16)
    assert steps(manager) == [24, 21, 15, 12]
    loop: Any = SimpleNamespace(manager=manager, step=24, config=manager.config)
    manager.config.precision = "bf16"
    vars(manager.config).update(first=OptimizerConfig(), second=OptimizerConfig())
    remedy = "it broke; lower the learning rate (first.lr and second.lr) or use --precision fp32"
    for healthy, advice in (
        (2, " and start in another --run-dir: no checkpoint is from before that"),
        (None, "; the same command then goes on from step 21, the last checkpoint from before that"),
        (15, "; the same command then goes on from step 15, the last checkpoint from before that"),
    ):
        manager.healthy = healthy
        assert str(stop_broken(loop, "it broke")) == remedy + advice
    again = keeper_of(tmp_path)
    assert again.restore({"loop": Counter()})["step"] == 15
    told = "going back to the checkpoint of step 15: training broke after it and stopped at step 24"
    assert told in capsys.readouterr().err
    assert steps(again) == [15, 12]
