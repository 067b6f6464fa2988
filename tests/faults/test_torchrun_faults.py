"""Training under torchrun, and a rank that is killed while torchrun may restart (fault 3 of the project's table)."""

import subprocess
import sys

from duetgan.commands import train
from tests.conftest import REPOSITORY
from tests.end_to_end.helpers import check_same, status, write_config
from tests.faults import inject
from tests.faults.conftest import ENVIRONMENT, own_process

QUIET = ("--log.samples-every", "0", "--evaluation.every", "0")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
TORCHRUN += ["--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]


def test_the_old_launchers_option_is_taken():
    """N3: torch.distributed.launch gives every process its `--local-rank N`."""
    for option in ("--local-rank=1", "--local_rank=1"):
        assert train.parser().parse_known([option, "--seed", "3"])[1] == ["--seed", "3"]


def test_fault_03_killed_rank_all_restart_from_the_last_checkpoint(tmp_path, packed):
    """Rank 1 is killed at step 5; all ranks go on from step 4, and the end is an undisturbed run's."""
    config = write_config(tmp_path / "recipe.yaml", "gan", packed)
    run, straight = tmp_path / "run", tmp_path / "straight"
    own_process("train.py", "--config", config, "--run-dir", straight, "--procs", "2", *QUIET).success()
    done = subprocess.run(
        [*TORCHRUN, "train.py", "--config", str(config), "--run-dir", str(run), "--device", "cpu", *QUIET],
        cwd=REPOSITORY,
        env=ENVIRONMENT | {inject.VARIABLE: "1:5:kill"},
        capture_output=True,
        text=True,
    )
    out = done.stdout + done.stderr
    assert done.returncode == 0, out
    # torchrun names the first process that ended, and its SIGTERM may end rank 0 before that has told anything
    assert "exitcode: -9" in out or "rank 1 is gone" in out, out
    assert "resumed at step 4 of 8" in out, out
    check_same(straight, run, 8)
    assert status(run, "state", "step", "exit_code") == ("finished", 8, 0)
