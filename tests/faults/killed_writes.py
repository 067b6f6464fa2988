"""Kill -9 a process that writes checkpoints, again and again: `python -m tests.faults.killed_writes FOLDER KILLS SEED`.

Each time a fork takes the newest checkpoint, as a resumed run does, and saves step after step until it is killed at a
random moment; a thread writes every second time. Two of four kills wait for a moment in the middle of a write: the fork
is stopped and looked at until there is one. Prints a JSON list with, for each kill: `told`, the last step that it
knew to be on the disk; `found`, the step that loads afterwards; `whole`, whether all of its state belongs to that step;
`warnings` of loading; `leftovers`, names of half-written files; and `swept`, those that are left after the next save.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from duetgan.training.base.config import RunConfig
from duetgan.training.engine.checkpoints import CheckpointManager
from duetgan.utils.checkpoint import load_latest
from duetgan.utils.runlog.run_folder import RunFolder

ABOUT: dict[str, Any] = {"shape": {"channels": 1, "classes": 0, "resolution": 8}, "origin": None}
MOMENT = 0.06  # seconds after its first save, at most, in which a writer is killed
META = SimpleNamespace(classes=[], content_hash="", count=0, resize_filter="area")


class State:
    """Half a megabyte that says of which step it is."""

    def __init__(self) -> None:
        self.weights = [torch.zeros(40_000) for _ in range(3)]

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def keeper_of(folder: Path, asynchronous: bool) -> CheckpointManager:
    config = RunConfig(task="gan")
    config.checkpoint.asynchronous = asynchronous
    loader: Any = SimpleNamespace(dataset=SimpleNamespace(meta=META))
    return CheckpointManager(config, RunFolder(folder), loader)


def save(manager: CheckpointManager, state: State, step: int) -> None:
    for tensor in state.weights:
        tensor.fill_(step)
    best: dict[str, float | str] | None = {"metric": "x", "value": 1.0} if step % 3 == 0 else None
    manager.save(step, {"state": state}, ABOUT, best)


def write_until_killed(folder: Path, asynchronous: bool, pipe: int) -> None:
    """In the fork."""
    manager, state = keeper_of(folder, asynchronous), State()
    content = manager.restore({"state": state})
    step = 0 if content is None else content["step"]
    while True:
        step += 1
        save(manager, state, step)
        os.write(pipe, f"{manager.saved_step}\n".encode())


def stop_in_a_write(pid: int, folder: Path, moments: random.Random) -> None:
    """Stop the writer at random moments until a half-written file is there; RuntimeError after 60 s without one."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        os.kill(pid, signal.SIGSTOP)
        _, status = os.waitpid(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "the writer ended by itself"
        if leftovers(folder / "checkpoints"):
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(moments.uniform(0, MOMENT / 10))
    raise RuntimeError("the writer was never in the middle of a write")


def kill_one(folder: Path, asynchronous: bool, in_a_write: bool, moments: random.Random) -> int:
    """Start a writer and kill it at a random moment after its first save; the last step that it told."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            write_until_killed(folder, asynchronous, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        told = pipe.read(2)
        time.sleep(moments.uniform(0, MOMENT))
        if in_a_write:
            stop_in_a_write(pid, folder, moments)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the writer ended by itself"
        told += pipe.readall()
    return int(told.split()[-1])


def leftovers(folder: Path) -> list[str]:
    whole = {path.name for path in folder.glob("step-*.pt")}
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix == ".tmp" or (path.suffix == ".sha256" and path.stem not in whole)
    )


def outcome(folder: Path, told: int, asynchronous: bool) -> dict[str, Any]:
    """What a kill has left, and what the next save makes of it."""
    checkpoints = folder / "checkpoints"
    warnings: list[str] = []
    left = leftovers(checkpoints)
    latest = load_latest(checkpoints, warn=warnings.append)
    found = -1 if latest is None else latest[1]["step"]
    whole = latest is None or all((w == found).all() for w in latest[1]["state"]["state"]["weights"])
    manager = keeper_of(folder, asynchronous=False)
    save(manager, State(), found + 1)
    row = {"told": told, "found": found, "whole": bool(whole), "warnings": warnings, "leftovers": left}
    return row | {"asynchronous": asynchronous, "swept": leftovers(checkpoints)}


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)  # a fork of a process with OpenMP's threads would hang
    moments = random.Random(seed)
    rows = []
    for number in range(kills):
        asynchronous = number % 2 == 0
        told = kill_one(folder, asynchronous, in_a_write=number % 4 > 1, moments=moments)
        rows.append(outcome(folder, told, asynchronous))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
