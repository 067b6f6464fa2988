"""Trackers, during a run and after it: the rows of metrics.jsonl, each once, whatever happens to the run."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from duetgan.commands.train import main as train
from duetgan.extras.trackers import trackers as track
from duetgan.utils.distributed.process import run_cli
from tests.end_to_end.helpers import write_config

ROWS: list[dict[str, Any]] = [
    {"step": 2, "loss/x": 1.5, "n": 3},
    {"step": 2, "val/y": 0.5},
    {"step": 4, "loss/x": None},
    {"step": 6, "z": 1.0},
]


def as_sent(rows: list[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    sent = [(row["step"], {k: v for k, v in row.items() if k != "step" and v is not None}) for row in rows]
    return [(step, values) for step, values in sent if values]


class Kept:
    """A tracker that keeps what it is sent, by its runs' ids."""

    runs: dict[str, list[tuple[int, dict[str, float]]]]
    opened: list[str | None]
    down = False

    def __init__(self, run: Path, config: dict[str, Any], known: str | None) -> None:
        if self.down:
            raise ConnectionError("no network")
        self.opened.append(known)
        self.id, self.run = known or f"id{len(self.runs)}", self
        self.runs.setdefault(self.id, [])

    def log(self, values: dict[str, float], step: int) -> None:
        self.runs[self.id].append((step, values))

    def finish(self) -> None:
        pass


@pytest.fixture
def kept(monkeypatch):
    """In wandb's place."""
    monkeypatch.setattr(Kept, "runs", {}, raising=False)
    monkeypatch.setattr(Kept, "opened", [], raising=False)
    monkeypatch.setattr(Kept, "down", False)
    for name in ("wandb", "trackio"):  # json: a package that is there
        monkeypatch.setitem(track.SESSIONS, name, Kept)
    usual = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: usual("json" if name in track.SESSIONS else name))
    return Kept


def made(folder: Path, *, saved: int) -> Path:
    """A run folder with ROWS and a checkpoint of step `saved`."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"step": 8, "z"')
    (folder / "config.yaml").write_text("task: gan\nloss: {r1: 2.0}\n")
    save(folder, saved)
    return folder


def save(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step-{step:08d}.pt").touch()


def test_rows_up_to_the_last_checkpoint_are_sent_once(tmp_path, kept):
    run = made(tmp_path / "run", saved=4)
    tracker = track.Tracker(run, "wandb")
    assert (tracker.send(), tracker.send()) == (3, 0)
    save(run, 6)
    assert tracker.send() == 1
    tracker.close()
    save(run, 8)
    assert track.Tracker(run, "wandb").send() == 0  # its row was left half written
    assert kept.runs == {"id0": as_sent(ROWS)}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(': 2.0}\n{"step": 8, "partial": true}\n')
    assert track.Tracker(run, "wandb").send() == 1
    assert kept.runs == {"id0": [*as_sent(ROWS), (8, {"z": 2.0})]}
    assert kept.opened == [None, "id0"]


def test_each_tracker_has_its_own_place(tmp_path, kept):
    """A damaged note of what was sent begins anew."""
    run = made(tmp_path / "run", saved=4)
    assert [track.Tracker(run, name).send() for name in ("wandb", "trackio", "wandb")] == [3, 3, 0]
    save(run, 6)
    assert [track.Tracker(run, name).send() for name in ("wandb", "trackio")] == [1, 1]
    assert kept.opened == [None, None, "id0", "id1"]
    assert kept.runs == {"id0": as_sent(ROWS), "id1": as_sent(ROWS)}
    for content in ("", "[]", '{"wandb": {"id": 3, "step": 4}}', '{"wandb": {"id": "x", "step": -1}}'):
        (run / "tracker.json").write_text(content)
        assert track.Tracker(run, "wandb").send() == 4
    assert kept.opened[4:] == [None] * 4


def test_the_command(tmp_path, kept, capsys):
    run = made(tmp_path / "run", saved=6)
    kept.down = True
    assert run_cli(track.main, [str(run), "--to", "wandb"]) == 2
    assert capsys.readouterr().err == f"error: wandb: no network; nothing of {run} is lost, give the command again\n"
    kept.down = False
    for said in (f"4 rows of {run} to wandb", f"wandb has all rows of {run}"):
        assert run_cli(track.main, [str(run), "--to", "wandb"]) == 0
        assert capsys.readouterr().out.strip() == said
    assert run_cli(track.main, [str(tmp_path), "--to", "wandb"]) == 2
    assert "no metrics.jsonl; give the folder of a run" in capsys.readouterr().err


@pytest.fixture
def options(tmp_path, packed, slim):
    """Of a short training in tmp_path / "run" that sends its rows."""
    recipe = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    return ["--config", str(recipe), "--run-dir", str(tmp_path / "run"), "--device", "cpu", "--log.tracker", "wandb"]


def test_a_training_that_stops_and_goes_on_sends_its_rows(tmp_path, options, kept):
    assert run_cli(train, [*options, "--max-steps", "4"]) == 0
    assert run_cli(train, options) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows
    assert kept.runs == {"id0": as_sent(rows)}


def test_a_tracker_that_fails_costs_its_rows_only(tmp_path, options, kept, capsys):
    kept.down = True
    run = tmp_path / "run"
    assert run_cli(train, options) == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: wandb")]
    assert warning.startswith("warning: wandb: no network; training continues without it; `duet track ")
    kept.down = False
    assert run_cli(track.main, [str(run), "--to", "wandb"]) == 0
    assert [step for step, _ in kept.runs["id0"]] == [
        json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "trackio").mkdir()  # where a tracker keeps its runs, and no package
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(track.UserError, match="the tracker trackio: its package is not installed; pip install trackio"):
        track.Tracker(tmp_path, "trackio")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_what_a_trackers_package_is_called_with(tmp_path, monkeypatch, name):
    """In two sessions, the second of which resumes the first; wandb stays offline."""
    package = MagicMock()
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(track, "require", lambda _: None)
    for variable in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    run = made(tmp_path / "run", saved=4)
    for step in (4, 6):
        save(run, step)
        tracker = track.Tracker(run, name)
        assert tracker.send()
        tracker.close()
    logged = [(call.kwargs["step"], call.args[0]) for call in package.init.return_value.log.call_args_list]
    assert logged == as_sent(ROWS)
    first, second = (call.kwargs for call in package.init.call_args_list)
    key = {"wandb": "id", "trackio": "name"}[name]
    assert first[key] == second[key] == json.loads((run / "tracker.json").read_text())[name]["id"]
    assert first["resume"] == "allow"
    assert first.get("mode", "offline") == "offline"
    assert (first["project"], first["config"]) == ("duet", {"task": "gan", "loss": {"r1": 2.0}})
    assert package.init.return_value.finish.call_count == 2
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    track.SESSIONS[name](run, {}, None)
    last = package.init.call_args.kwargs
    assert (last.get("mode"), last["project"]) == (("online", "mine") if name == "wandb" else (None, "duet"))


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(("name", "is_main", "count"), [("wandb", True, 1), ("wandb", False, 0), ("none", True, 0)])
def test_the_main_rank_alone_sends_to_the_tracker_that_is_named(monkeypatch, name, is_main, count):
    monkeypatch.setattr("duetgan.utils.distributed.collectives.is_main", lambda: is_main)
    config: Any = SimpleNamespace(log=SimpleNamespace(tracker=name))
    assert len(track.callbacks(config, torch.device("cpu"))) == count
