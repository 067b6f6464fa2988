"""kill -9 at random moments, and the same command again each time: the run ends as if it had never been disturbed."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from duetgan.utils import checkpoint
from tests.end_to_end import ranks
from tests.end_to_end.helpers import check_same, status
from tests.end_to_end.recipes import write_recipe
from tests.faults.forks import Fork

EVERY, FIRST_EVALUATION = 2, 15  # steps between checkpoints, and until the first that may be the best
# of a kill: once training has gone on by a checkpoint or some, so many seconds later; while a checkpoint is being
# written; so many seconds after the start, before anything is trained
KINDS = ("going on", "saving", "starting")
LATER = 0.15  # seconds, at most: a few steps
STARTING = 2.0  # seconds, at most


def started(argv: list[str]) -> Fork:
    return Fork(["train.py", *argv], dict(os.environ))


def ended_well(process: Fork) -> None:
    _, errors = process.communicate(ranks.SECONDS)
    assert process.returncode == 0, errors


def newest(run: Path) -> int:
    """The newest complete checkpoint's step, 0 without one."""
    return max(map(checkpoint.step_of, checkpoint.newest_first(run / "checkpoints")), default=0)


def wait_for(condition: Callable[[], bool], running: Fork) -> bool:
    """False: the command has ended."""
    deadline = time.monotonic() + ranks.SECONDS
    while not condition():
        if running.poll() is not None:
            return False
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.0005)
    return True


def kill(running: Fork, run: Path, kind: str, draws: random.Random) -> bool:
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
    if running.poll() is not None:
        return False
    running.kill()
    running.communicate(ranks.SECONDS)
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


def kill_and_repeat(recipe: Path, folder: Path, kinds: list[str], draws: random.Random, *more: str) -> None:
    argv = ["--config", str(recipe), "--device", "cpu", *more, "--run-dir"]
    steps = yaml.safe_load(recipe.read_text())["steps"]
    ended_well(started([*argv, str(folder / "straight")]))
    killed = folder / "killed"
    seen: list[int] = []  # newest checkpoints after the kills
    for number, kind in enumerate(kinds):
        running = started([*argv, str(killed)])
        assert kill(running, killed, kind, draws), f"the run ended before kill {number}, {kind}, after {seen}"
        seen.append(newest(killed))
    ended_well(started([*argv, str(killed)]))
    assert seen == sorted(seen)
    assert 0 < seen[-1] < steps
    check(folder / "straight", killed, steps)


def recipe_of(task: str, steps: int, images: Path, path: Path) -> Path:
    kept = {"every": EVERY, "keep": 2}
    evaluation = {"every": FIRST_EVALUATION, "n": 20}
    return write_recipe(path, task, images, steps=steps, checkpoint=kept, evaluation=evaluation)


def test_three_kills_at_random_moments(images, tmp_path):
    recipe = recipe_of("classifier", 60, images, tmp_path / "recipe.yaml")
    kill_and_repeat(recipe, tmp_path, ["going on", "saving", "going on"], random.Random(1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_kills_at_random_moments(processes, images, tmp_path):
    draws = random.Random(processes)
    kinds = draws.sample(KINDS, k=20, counts=[9, 6, 5])
    recipe = recipe_of("gan", 400, images, tmp_path / "recipe.yaml")
    kill_and_repeat(recipe, tmp_path, kinds, draws, "--procs", str(processes))
