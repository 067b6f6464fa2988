"""kill -9 at random moments, and the same command again each time: the run ends as if it had never been disturbed."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from duetgan.utils import checkpoint
from tests.conftest import REPOSITORY
from tests.end_to_end import ranks
from tests.end_to_end.helpers import check_same, status
from tests.end_to_end.recipes import write_recipe

EVERY, FIRST_EVALUATION = 2, 15  # steps between checkpoints, and until the first that may be the best
# of a kill: once training has gone on by a checkpoint or some, so many seconds later; while a checkpoint is being
# written; so many seconds after the start, before anything is trained
KINDS = ("going on", "saving", "starting")
LATER = 0.15  # seconds, at most: a few steps
STARTING = 6.0  # seconds, at most: on an idle machine a start takes four


class Command:
    """`train.py` in a process of its own; of several ranks the launcher, whose end is theirs."""

    def __init__(self, argv: list[str], output: Path) -> None:
        self.output = output
        with open(output, "w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "train.py", *argv],
                cwd=REPOSITORY,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=file,
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def ended_well(self) -> None:
        assert self.process.wait(ranks.SECONDS) == 0, self.output.read_text()


class Fork:
    """The same in a fork that has imported everything: four seconds sooner."""

    def __init__(self, argv: list[str], output: Path) -> None:
        self.output = output
        (self.process,) = ranks.start(ranks.train, str(output), argv, None, False, world=1, output=output)

    def alive(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def ended_well(self) -> None:
        assert ranks.wait([self.process]) == [0], ranks.printed(self.output)


Running = Command | Fork  # a started command; `kill` is kill -9 and waits until it is gone


def newest(run: Path) -> int:
    """The newest complete checkpoint's step, 0 without one."""
    return max(map(checkpoint.step_of, checkpoint.newest_first(run / "checkpoints")), default=0)


def wait_for(condition: Callable[[], bool], running: Running) -> bool:
    """False: the command has ended."""
    deadline = time.monotonic() + ranks.SECONDS
    while not condition():
        if not running.alive():
            return False
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.0005)
    return True


def kill(running: Running, run: Path, kind: str, draws: random.Random) -> bool:
    """Kill it at a moment of this kind; False: it had ended before."""
    if kind == "starting":
        time.sleep(draws.uniform(0, STARTING))
    else:
        wanted = newest(run) + EVERY * draws.randint(1, 2)
        if not wait_for(lambda: newest(run) >= wanted, running):
            return False
        if kind == "saving":
            folder = run / "checkpoints"
            if not wait_for(lambda: any(folder.glob(".*.tmp")), running):
                return False
        else:
            time.sleep(draws.uniform(0, LATER))
    if not running.alive():
        return False
    running.kill()
    return True


def check(straight: Path, killed: Path, steps: int) -> None:
    """Both runs are finished and the same in all that a user has of them."""
    for run in (straight, killed):
        assert status(run, "state", "step", "exit_code") == ("finished", steps, 0)
    check_same(straight, killed, steps)
    for which in ("last", "best"):
        found = [checkpoint.pointer(run / "checkpoints", which) for run in (straight, killed)]
        assert found[0] is not None
        assert [{**entry, "sha256": ""} for entry in found if entry] == [{**found[0], "sha256": ""}] * 2
    names = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (straight, killed)]
    assert names[0] == names[1]  # nothing is left over


def kill_and_repeat(
    start: type[Command] | type[Fork], recipe: Path, folder: Path, kinds: list[str], draws: random.Random, *more: str
) -> None:
    argv = ["--config", str(recipe), "--device", "cpu", *more, "--run-dir"]
    steps = yaml.safe_load(recipe.read_text())["steps"]
    start([*argv, str(folder / "straight")], folder / "straight.txt").ended_well()
    killed = folder / "killed"
    seen: list[int] = []  # newest checkpoints after the kills
    for number, kind in enumerate(kinds):
        running = start([*argv, str(killed)], folder / f"killed-{number}.txt")
        assert kill(running, killed, kind, draws), f"the run ended before kill {number}, {kind}, after {seen}"
        seen.append(newest(killed))
    start([*argv, str(killed)], folder / "killed.txt").ended_well()
    assert seen == sorted(seen)
    assert 0 < seen[-1] < steps
    check(folder / "straight", killed, steps)


def recipe_of(task: str, steps: int, images: Path, path: Path) -> Path:
    kept = {"every": EVERY, "keep": 2}
    evaluation = {"every": FIRST_EVALUATION, "n": 20}
    return write_recipe(path, task, images, steps=steps, checkpoint=kept, evaluation=evaluation)


def test_three_kills_at_random_moments(images, tmp_path):
    recipe = recipe_of("classifier", 60, images, tmp_path / "recipe.yaml")
    kill_and_repeat(Fork, recipe, tmp_path, ["going on", "saving", "going on"], random.Random(1))


def train_until_pointing(notes: str, argv: list[str], which: str) -> int:
    """`train.py ARGV`, killed when `which`.json is to be pointed at the checkpoint that is best so far."""

    def killed(folder: Path, name: str, path: Path, **more: float | str) -> None:
        if name == which and checkpoint.step_of(path) == FIRST_EVALUATION:
            os.kill(os.getpid(), signal.SIGKILL)
        original(folder, name, path, **more)

    original = checkpoint.point
    checkpoint.point = killed  # type: ignore[assignment]
    return ranks.train(notes, argv, None, False)


@pytest.mark.parametrize("which", ["last", "best"])
def test_what_points_at_a_checkpoint_catches_up_after_a_kill(which, images, tmp_path):
    run = tmp_path / "run"
    recipe = recipe_of("classifier", 30, images, tmp_path / "recipe.yaml")
    argv = ["--config", str(recipe), "--run-dir", str(run), "--max-steps", str(FIRST_EVALUATION)]
    notes = tmp_path / "notes"
    killed = ranks.start(train_until_pointing, str(notes), [*argv, "--device", "cpu"], which, world=1, output=notes)
    assert ranks.wait(killed) == [-signal.SIGKILL], ranks.printed(notes)
    assert newest(run) == FIRST_EVALUATION
    before = checkpoint.pointer(run / "checkpoints", which)
    assert before is None or before["step"] < FIRST_EVALUATION
    ranks.run(argv, notes)  # nothing is left to train, and nothing to save
    for name in ("last", "best"):
        entry = checkpoint.pointer(run / "checkpoints", name)
        assert entry["step"] == FIRST_EVALUATION


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_kills_at_random_moments(processes, images, tmp_path):
    draws = random.Random(processes)
    kinds = draws.sample(KINDS, k=20, counts=[9, 6, 5])
    recipe = recipe_of("gan", 400, images, tmp_path / "recipe.yaml")
    kill_and_repeat(Command, recipe, tmp_path, kinds, draws, "--procs", str(processes))
