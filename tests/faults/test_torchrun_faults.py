"""Training under torchrun, and a rank that is killed while torchrun may restart (fault 3 of the project's table)."""

import signal
import time
from pathlib import Path

import pytest

from duetgan.commands import train
from tests.end_to_end.helpers import check_same, last, status, write_config
from tests.faults.conftest import own_process
from tests.faults.torchrun import PATIENCE, ended, torchrun

LAST = 8  # step of the recipes' end; they save every second one
QUIET = ("--log.samples-every", "0", "--evaluation.every", "0")
ONE_NODE = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
RESTARTS = (*ONE_NODE, "--max-restarts=1", "--monitor-interval=0.1")


def check_restarted(tmp_path: Path, packed: Path, task: str, *, step: int) -> None:
    """Rank 1 is killed at `step`; all ranks go on from the last checkpoint, and the end is an undisturbed run's."""
    config = write_config(tmp_path / "recipe.yaml", task, packed)
    run, straight = tmp_path / "run", tmp_path / "straight"
    own_process("train.py", "--config", config, "--run-dir", straight, "--procs", "2", *QUIET).success()
    code, out = ended(torchrun(config, run, *QUIET, options=RESTARTS, DUET_FAIL_AT=f"1:{step}:kill"))
    assert code == 0, out
    saved = step - step % 2
    # torchrun names the first process that ended, and its SIGTERM may end rank 0 before that has told anything
    assert "exitcode: -9" in out or "rank 1 is gone" in out, out
    assert (f"resumed at step {saved} of {LAST}" in out) == (saved > 0), out
    check_same(straight, run, LAST)
    assert status(run, "state", "step", "exit_code") == ("finished", LAST, 0)


@pytest.mark.slow
def test_the_old_launcher_starts_too(tmp_path, packed):
    """N3: it gives every process its `--local-rank N`."""
    config = write_config(tmp_path / "recipe.yaml", "classifier", packed)
    code, out = ended(torchrun(config, tmp_path / "run", "--dry-run", module="torch.distributed.launch"))
    assert code == 0, out
    assert "dry run: everything up to the first step is in order" in out
    assert "= 2 x 10" in out  # both take part
    for option in ("--local-rank=1", "--local_rank=1"):
        assert train.parser().parse_known([option, "--seed", "3"])[1] == ["--seed", "3"]


def test_fault_03_killed_rank_all_restart_from_the_last_checkpoint(tmp_path, packed):
    check_restarted(tmp_path, packed, "gan", step=5)


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_and_its_command_goes_on(tmp_path, packed):
    """torchrun itself exits with 1, whatever its processes' exit code: status.json says what happened."""
    config, run = write_config(tmp_path / "recipe.yaml", "gan", packed), tmp_path / "run"
    process = torchrun(config, run, "--steps", "100000")
    deadline = time.monotonic() + PATIENCE
    while not (run / "checkpoints" / "last.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, out = ended(process)
    assert code == 1, out
    assert status(run, "state", "reason", "exit_code") == ("stopped", "SIGTERM", 3)
    stopped = status(run)["step"]
    assert last(run) == stopped > 0
    end = stopped + 2
    code, out = ended(torchrun(config, run, "--steps", "100000", "--max-steps", str(end)))
    assert code == 0, out
    assert f"resumed at step {stopped}" in out
    assert status(run)["step"] == end
