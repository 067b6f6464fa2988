"""`python -m tests.accelerator SCRIPT ARGUMENTS...`: run a script of this repository with `sim` as its accelerator."""

import importlib
import sys
from pathlib import Path

from duetgan.utils.distributed.process import exit_cli
from tests.accelerator import device

if __name__ == "__main__":
    device.install()
    script = importlib.import_module(Path(sys.argv[1]).stem)
    sys.argv = sys.argv[1:]
    with device.Mode():
        exit_cli(script.main)
