"""Both tasks on the pretend accelerator: the CPU's numbers to the bit, no wait inside a step; faults that it sees."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.cases import FAULTS
from tests.accelerator.trainings import FAST, MEMORY, OTHERWISE, SLOW
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.timeout(900)  # a part runs whole when its first row is asked for


def python(*arguments: str) -> str:
    """What a process of its own prints: the device is there for the rest of it."""
    found = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


class Seen(dict[str, Any]):
    """What each part of the cases has shown; it runs when it is first asked for."""

    def __init__(self, packed: Path, folder: Path) -> None:
        self.packed, self.folder = packed, folder

    def __missing__(self, part: str) -> Any:
        folder = self.folder / part
        folder.mkdir()
        for file in self.packed.iterdir():
            (folder / file.name).symlink_to(file)
        self[part] = json.loads(python("-m", "tests.accelerator.cases", part, str(folder)).splitlines()[-1])
        return self[part]


@pytest.fixture(scope="module")
def seen(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(packed, tmp_path_factory.mktemp("accelerator"))


ROWS = [("fast", name) for name in FAST] + [pytest.param("slow", name, marks=pytest.mark.slow) for name in SLOW]


@pytest.mark.parametrize(("part", "name"), ROWS)
def test_a_training_has_the_cpus_numbers_and_its_steps_wait_for_nothing(seen, part, name):
    found = seen[part][name]
    assert found["waits"] == {}
    assert (found["differing"] == []) is (name not in OTHERWISE)
    assert found["largest"] <= OTHERWISE.get(name, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMORY)
def test_the_peak_is_what_the_dry_run_says_of_gpus(seen, name):
    found = seen["slow"]["memory"][name]
    assert found["peak"] == pytest.approx(found["estimate"], rel=0.02)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("an .item() in the step", "(_local_scalar_dense)"),
        ("a CPU tensor in a loss", "Expected all tensors to be on the same device"),
        ("a generator on the wrong device", "Expected a 'sim' device type for generator but found 'cpu'"),
        ("memory that is not pinned", "_to_copy"),
    ],
)
def test_planted_faults_are_seen(seen, fault, told):
    assert fault in FAULTS
    assert told in seen["fast"]["faults"][fault]


def test_a_run_goes_on_on_the_other_device(seen):
    """A checkpoint of the CPU's on `sim`, and back: the same weights, averages and moments to the bit."""
    assert seen["fast"]["train.py"] == {"differing": [], "resumed": []}


def test_what_the_device_refuses_and_counts(seen):
    assert seen["fast"]["device"] == [
        "Expected all tensors to be on the same device, but found ['sim:0', 'sim:1']: aten.add.Tensor",
        "Expected all tensors to be on the same device, but found ['cpu', 'sim:0']: aten.add.Tensor",
        "can't convert sim device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.",
        ["sim:0", "sim:1", [2.0, 2.0, 2.0, 2.0], "sim:0", "sim:0"],
        [0, 16, True],
        "sim out of memory. Tried to allocate 4000 bytes",
        "sim out of memory. Tried to allocate 4000 bytes",
        ["sim", 2],
    ]
