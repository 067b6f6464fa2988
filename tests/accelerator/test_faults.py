"""The order of streams; waits beside steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.budgets import WATCHED
from tests.accelerator.test_accelerator import python


def told(module: str, packed: Path, folder: Path) -> Any:
    """What a module of this folder prints of a folder with these files."""
    for file in packed.iterdir():
        (folder / file.name).symlink_to(file)
    return json.loads(python("-m", f"tests.accelerator.{module}", str(folder)).splitlines()[-1])


@pytest.mark.slow
def test_outside_of_steps_the_host_waits_once_for_each_result(packed, tmp_path):
    """Whole trainings with their evaluations on `sim:1`, a classifier split over both devices; and a checkpoint that is
    written before its copies ended.
    """
    found = told("budgets", packed, tmp_path)
    assert found["differing"] == found["split"] == []
    assert all(found["on"])
    assert found["early"] > 0
    for name, kind in found["seen"].items():
        assert kind["calls"] >= 4, name
        assert sum(kind["waits"].values()) == 1, name
    assert found["seen"].keys() == WATCHED.keys()


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
