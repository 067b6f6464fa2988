"""N ranks equal one process on the same global batch: losses, gradients, weights and averages, in float64."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from data.writer import pack_arrays
from utils.launch import launch

TOLERANCE = 1e-9
VARIANTS = {
    1: ["gan:0", "gan:2", "classifier:0"],
    2: ["gan:0", "gan:2", "classifier:0", "classifier-unsynced:0"],
    4: ["gan:0", "classifier:0"],
}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo on loopback is tested on Linux")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """What each world size recorded, from 32 random 16 px grey pictures of three classes."""
    folder = tmp_path_factory.mktemp("oracle")
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (32, 1, 16, 16), dtype=np.uint8)
    pack_arrays(folder / "data.lmdb", pictures, labels=np.arange(32) % 3, classes=["a", "b", "c"])
    found = {}
    for processes, variants in VARIANTS.items():
        out = folder / f"{processes}.pt"
        command = ["-m", "tests.distributed.worker", str(out), str(folder / "data.lmdb"), *variants]
        assert launch(command, processes) == 0
        found[processes] = torch.load(out, weights_only=True)
    return found


def largest_difference(a: list[dict[str, Any]], b: list[dict[str, Any]], part: str) -> float:
    assert all(x[part].keys() == y[part].keys() for x, y in zip(a, b, strict=True))
    return max(
        float((torch.as_tensor(x[part][k]).double() - torch.as_tensor(y[part][k]).double()).abs().max())
        for x, y in zip(a, b, strict=True)
        for k in x[part]
    )


@pytest.mark.parametrize("part", ["metrics", "gradients", "weights", "average"])
@pytest.mark.parametrize(
    ("processes", "variant"),
    [(2, "gan:0"), (1, "gan:2"), (2, "gan:2"), (4, "gan:0"), (2, "classifier:0"), (4, "classifier:0")],
)
def test_every_split_gives_one_process_result(
    records: dict[int, dict[str, list[dict[str, Any]]]], processes: int, variant: str, part: str
) -> None:
    whole = records[1][f"{variant.partition(':')[0]}:0"]
    assert largest_difference(whole, records[processes][variant], part) < TOLERANCE


@pytest.mark.parametrize("variant", ["gan:0", "classifier:0"])
def test_the_comparison_is_of_something(records: dict[int, dict[str, list[dict[str, Any]]]], variant: str) -> None:
    whole = records[1][variant]
    assert all(float(g.abs().max()) > 0 for name, g in whole[0]["gradients"].items() if g.ndim > 1)
    assert largest_difference(whole[:1], whole[-1:], "weights") > 1e-3
    if variant == "gan:0":
        assert whole[0]["metrics"]["loss/r1"] > 0


def test_without_synchronised_batchnorm_two_ranks_differ(records: dict[int, dict[str, list[dict[str, Any]]]]) -> None:
    """The oracle can fail: plain BatchNorm on two ranks is not one process's."""
    whole, split = records[1]["classifier:0"], records[2]["classifier-unsynced:0"]
    assert largest_difference(whole, split, "gradients") > 1e-6
