"""torchrun as a person calls it, for training on the CPU."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import REPOSITORY

SITE = REPOSITORY / "tests" / "faults" / "site"  # of what DUET_FAIL_AT asks for
PATIENCE = 280  # seconds that a command may take on a machine that is busy with other things


def torchrun(
    config: Path,
    run: Path,
    *more: str,
    options: Sequence[str] = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"),
    prefix: Sequence[str] = (),
    log: Path | None = None,
    module: str = "torch.distributed.run",
    **environment: str,
) -> "subprocess.Popen[str]":
    """`torchrun OPTIONS train.py --config CONFIG --run-dir RUN --device cpu MORE`; both outputs go to `log`, or to one
    pipe.
    """
    output = subprocess.PIPE if log is None else log.open("w")
    command = [sys.executable, "-m", module, *options, "train.py", "--config", str(config)]
    try:
        return subprocess.Popen(
            [*prefix, *command, "--run-dir", str(run), "--device", "cpu", *more],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SITE}:{REPOSITORY}"} | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        if log is not None and not isinstance(output, int):
            output.close()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and what was printed."""
    out, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, out
