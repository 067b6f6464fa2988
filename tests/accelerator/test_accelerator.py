"""Both tasks on the pretend accelerator: the CPU's numbers to the bit, no wait inside a step; faults; streams."""

import pytest

from tests.accelerator.cases import FAULTS
from tests.accelerator.conftest import python
from tests.accelerator.trainings import FAST, MEMORY, OTHERWISE, SLOW

CASES = "tests.accelerator.cases"
pytestmark = pytest.mark.timeout(900)  # a part runs whole when its first row is asked for
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


ORDERED = """
import gc, torch
from tests.accelerator import device, streams
device.install()
side, now = torch.Stream(torch.device("sim")), torch.accelerator.current_stream()

def tell(action, *arguments):
    gc.collect()
    streams.faults.clear()
    try: action(*arguments); print("in order")
    except streams.OrderError as error: print(error)

def fill_again(end):
    host = torch.ones(4).pin_memory()
    with side: host.to("sim", non_blocking=True)
    copied = side.record_event()
    if end: end(copied)
    host.numpy()[:] = 2  # where no mode sees it
    host.to("sim")

def hand_over(wait, keep):
    with side: there = torch.ones(4).pin_memory().to("sim", non_blocking=True)
    if wait: now.wait_event(side.record_event())
    if keep: there.record_stream(now)
    more = there + 1
    del there
    return more + 1

def write_what_is_read(wait):
    there = torch.ones(4, device="sim")
    side.wait_stream(now)
    there.record_stream(side)
    with side: there.sum()
    if wait: now.wait_stream(side)
    there.add_(1)

with device.Mode():
    for end in (None, torch.Event.synchronize, lambda _: side.synchronize(), lambda _: torch.accelerator.synchronize()):
        tell(fill_again, end)
    for wait, keep in ((True, True), (False, True), (True, False)): tell(hand_over, wait, keep)
    for wait in (True, False): tell(write_what_is_read, wait)
"""


def test_the_order_of_streams():
    assert python("-c", ORDERED).splitlines() == [
        "pinned memory was written while stream 1 of sim:0 copies it: wait for an event of it first",
        *["in order"] * 4,
        "memory is read by stream 0 of sim:0 while stream 1 of sim:0 still writes it: wait for an event of it first",
        "memory of stream 1 of sim:0 was freed while stream 0 of sim:0 uses it: call tensor.record_stream",
        "in order",
        "memory is written by stream 0 of sim:0 while stream 1 of sim:0 still reads it",
    ]
