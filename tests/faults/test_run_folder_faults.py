"""What a run folder, its config and its checkpoint are taken for, by number in the project's table of faults (24, 25,
31): what does not belong together is told in one line before anything is lost.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from duetgan.training.engine.tasks import build_run_config
from duetgan.utils.checkpoint import newest_first, step_of
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.errors import UserError
from tests.end_to_end.helpers import contents, last, status
from tests.faults.conftest import start

QUIET = ["--evaluation.every", "0", "--log.samples-every", "0"]


# --- 24: another config


def test_fault_24_a_harmless_change_is_taken_and_told(command, gan_recipe, run):
    changes = ["--generator-optimizer.lr", "0.003", "--loss.r1-gamma", "0.5", "--log.every", "1"]
    outcome = command(*gan_recipe, *QUIET, "--max-steps", "5", *changes).success()
    notices = sorted(line for line in outcome.err.splitlines() if line.startswith("config changed"))
    assert [line.removeprefix("config changed since the last start: ") for line in notices] == [
        "evaluation.every was 4, is 0",
        "generator_optimizer.lr was 0.0025, is 0.003",
        "log.every was 3, is 1",
        "log.samples_every was 4, is 0",
        "loss.r1_gamma was 1.0, is 0.5",
    ]
    assert "resumed at step 4 of 8" in outcome.err
    assert last(run) == 5
    again = command(*gan_recipe, *QUIET, "--max-steps", "5", *changes).success()
    assert "config changed" not in again.err  # the new one is the run's now


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["--generator.channel-max", "8"], "generator.channel_max: 16 there, 8 now"),
        (["--seed", "7"], "seed: 0 there, 7 now"),
    ],
)
def test_fault_24_what_breaks_the_state_is_refused(command, gan_recipe, run, changes, told):
    before = contents(run)
    command(*gan_recipe, *changes, "--log.every", "1").refusal(f"{run}: holds another run (", told, "--run-dir")
    assert contents(run) == before


# --- 25: two runs on one folder


@contextlib.contextmanager
def running(recipe: list[str], run: Path) -> Iterator[int]:
    """A training that does not end by itself, once it has saved; its process id. Killed with -9."""
    process = start(*recipe, *QUIET, "--steps", "1000000")
    try:
        deadline = time.monotonic() + 200
        while not (run / "checkpoints" / "last.json").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process.pid
        assert process.poll() is None, process.communicate()
    finally:
        process.kill()
        process.communicate()


def test_fault_25_two_runs_on_one_folder(command, gan_recipe, tmp_path):
    run = tmp_path / "run"
    with running(gan_recipe, run) as pid:
        config = (run / "config.yaml").read_bytes()
        command(*gan_recipe, *QUIET).refusal(f"{run}: another run (process {pid}) is writing here", "--run-dir")
        assert (run / "config.yaml").read_bytes() == config
        assert status(run)["state"] == "running"
    assert (run / ".lock").read_text() == str(pid)  # stale
    left = step_of(newest_first(run / "checkpoints")[0])  # the kill may have come before last.json points at it
    again = command(*gan_recipe, *QUIET, "--steps", "1000000", "--max-steps", str(left + 2)).success()
    assert f"resumed at step {left} of" in again.err
    assert last(run) == left + 2


# --- 31: the wrong thing


def test_fault_31_a_truncated_config(command, gan_recipe, tmp_path):
    """Wherever it was cut: a recipe, with other values where those were lost, or one line."""
    recipe = tmp_path / "recipe.yaml"
    whole = recipe.read_text().strip()
    told, shortened = [], tmp_path / "short.yaml"
    for length in range(len(whole)):
        shortened.write_text(whole[:length])
        try:
            build_run_config(read_yaml(shortened), [], str(shortened))
        except UserError as error:
            told.append(str(error))
    assert len(told) > len(whole) / 3
    assert [line for line in told if not line.startswith(str(shortened)) or "\n" in line] == []
    for length in (0, whole.index("batch_size") + 4, whole.index("z_dim") + 9):
        recipe.write_text(whole[:length])
        command(*gan_recipe).refusal(str(recipe))
    assert not (tmp_path / "run").exists()


def test_fault_31_a_task_that_nobody_has(command, gan_recipe, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("task: gan", "task: gna"))
    command(*gan_recipe).refusal("task 'gna' is unknown", "did you mean 'gan'")
    assert not (tmp_path / "run").exists()
