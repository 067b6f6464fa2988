"""Two ranks of the oracle: each trains the named trees of a test module, and rank 0 writes the states of every step.

`python -m tests.oracle.ranks OUT FOLDER MODULE NAME...`; rank and world size come from the environment.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.launch import launch
from tests.slim import slim_down


def of_two_ranks(folder: Path, module: str, names: Sequence[str]) -> dict[str, list[dict[str, Tensor]]]:
    """name -> the states `module.trained` gives, over two ranks."""
    out = folder / "ranks.pt"
    assert launch(["-m", "tests.oracle.ranks", str(out), str(folder), module, *names], 2) == 0
    return torch.load(out, weights_only=True)


def main(out: str, folder: str, module: str, names: Sequence[str]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    slim_down()
    collectives.start(torch.device("cpu"))
    tests = importlib.import_module(module)
    states = {name: tests.trained(Path(folder), tests.TREES[name]) for name in names}
    if collectives.is_main():
        torch.save(states, out)
    collectives.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
