"""Two ranks of the oracle: each trains the named trees of a test module, and rank 0 writes the states of every step."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from duetgan.utils.distributed import collectives
from tests.end_to_end.ranks import together
from tests.slim import slim_down


def of_two_ranks(folder: Path, module: str, names: Sequence[str]) -> dict[str, list[dict[str, Tensor]]]:
    """name -> the states `module.trained` gives, over two ranks."""
    out = folder / "ranks.pt"
    together(be_a_rank, out, folder, module, names, world=2, output=folder / "ranks.txt")
    return torch.load(out, weights_only=True)


def be_a_rank(out: Path, folder: Path, module: str, names: Sequence[str]) -> None:
    torch.set_default_dtype(torch.float64)
    slim_down()
    collectives.start(torch.device("cpu"))
    tests = importlib.import_module(module)
    states = {name: tests.trained(folder, tests.TREES[name]) for name in names}
    if collectives.is_main():
        torch.save(states, out)
    collectives.stop()


def whole(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a step reports, added up over the ranks."""
    return {f"metric {name}": collectives.all_reduce_sum_(value.clone()) for name, value in metrics.items()}


def assert_close(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], place: str) -> None:
    """The same names, and values that differ by 1e-10 at most."""
    assert state.keys() == expected.keys(), place
    for name, value in expected.items():
        difference = float((state[name] - value).abs().max())
        tolerance = 1e-7 if "accuracy" in name else 1e-10  # means of float32
        assert difference < tolerance * max(1.0, float(value.abs().max())), f"{place}: {name}, {difference}"
