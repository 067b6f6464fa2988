"""Both tasks on the pretend accelerator: the CPU's numbers to the bit, no wait inside a step; faults that it sees."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.cases import FAULTS, OTHERWISE, TRAININGS
from tests.conftest import REPOSITORY


def python(*arguments: str) -> str:
    """What a process of its own prints: the device is there for the rest of it."""
    found = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


@pytest.fixture(scope="module")
def seen(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("accelerator")
    for file in packed.iterdir():
        (folder / file.name).symlink_to(file)
    return json.loads(python("-m", "tests.accelerator.cases", str(folder)).splitlines()[-1])


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_has_the_cpus_numbers_and_its_steps_wait_for_nothing(seen, name):
    assert seen[name]["waits"] == {}
    assert (seen[name]["differing"] == []) is (name not in OTHERWISE)
    assert seen[name]["largest"] < 1e-6


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
    assert told in seen["faults"][fault]


def test_a_run_goes_on_on_the_other_device(seen):
    """A checkpoint of the CPU's on `sim`, and back: the same weights, averages and moments to the bit."""
    assert seen["resumed"] == []


REFUSED = """
import gc, torch
from tests.accelerator import device
device.install()
with device.Mode():
    a, b = torch.ones(4, device="sim"), torch.ones(4, device="sim:1")
    for action in (lambda: a + b, lambda: a + torch.ones(4), lambda: a.numpy()):
        try: action()
        except (RuntimeError, TypeError) as error: print(error)
    print(a.device, b.device, (a + 1).tolist(), (a * torch.tensor(2.0)).device)
    gc.collect()
    memory = device.memory[0]
    before, view = memory.allocated, a.view(2, 2)
    print(memory.allocated - before)
    del a, view
    gc.collect()
    print(before - memory.allocated, memory.peak >= before)
    device.limit = memory.allocated + 100
    try: torch.ones(1000, device="sim")
    except torch.OutOfMemoryError as error: print(error)
    device.float64 = False
    try: torch.ones(3, dtype=torch.float64, device="sim")
    except TypeError as error: print(error)
print(torch.accelerator.current_accelerator(), torch.accelerator.device_count())
"""


def test_what_the_device_refuses_and_counts():
    assert python("-c", REFUSED).splitlines() == [
        "Expected all tensors to be on the same device, but found ['sim:0', 'sim:1']: aten.add.Tensor",
        "Expected all tensors to be on the same device, but found ['cpu', 'sim:0']: aten.add.Tensor",
        "can't convert sim device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.",
        "sim:0 sim:1 [2.0, 2.0, 2.0, 2.0] sim:0",
        "0",
        "16 True",
        "sim out of memory. Tried to allocate 4000 bytes",
        "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64",
        "sim 2",
    ]
